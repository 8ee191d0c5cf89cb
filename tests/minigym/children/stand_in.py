"""A tiny HTTP server that behaves as told, in place of a real one: `stand_in.py PORT [WORD ...]`.

fail: write to stderr and exit with code 3. die: SIGKILL itself. mute: never listen. busy: health is 503.
deaf: ignore SIGTERM. child=FILE: start a process in the same group and write its pid to FILE.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

port, words = int(sys.argv[1]), sys.argv[2:]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if "busy" in words else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"pid": os.getpid()}).encode())

    def log_message(self, *args: object) -> None:
        pass


def bye(*_: object) -> None:
    print("goodbye", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in words else bye)
print(f"up with {words}", flush=True)
for word in words:
    if word.startswith("child="):
        # It holds no pipe and no port: only the process group connects it to this one.
        forever = "import signal\nwhile True: signal.pause()"
        child = subprocess.Popen([sys.executable, "-S", "-c", forever])
        file = Path(word.removeprefix("child="))
        file.with_suffix(".part").write_text(str(child.pid))
        file.with_suffix(".part").rename(file)
if "fail" in words:
    print("no such card", file=sys.stderr)
    sys.exit(3)
if "die" in words:
    os.kill(os.getpid(), signal.SIGKILL)
if "mute" in words:
    while True:
        signal.pause()
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
