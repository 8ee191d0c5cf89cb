"""Replies as records, and made of them again: against those of the framework's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from nemo_gym.server_utils import raise_for_status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gym_ckpt_grpc.integrations.nemo_gym.recorded import RecordedReply, bytes_of, record_of, text_or_bytes
from gym_ckpt_grpc.protocol.errors import AdmissionClosed, StaleAttempt, StateCorrupt
from gym_ckpt_grpc.storage import decode, encode
from tests.nemo_gym.agent_rig import loopback, port_of, refused, served

COOKIES = [
    "plain=1",
    'quoted="a b"; Path=/x; HttpOnly',
    "of/a@server{1}=2; Path=/",
    "signed=eyJ4IjogMX0=.aB-c_d; Max-Age=1209600; SameSite=lax; Secure",
]


@pytest.fixture
async def server() -> AsyncIterator[tuple[list[Response], str]]:
    """Replies to give, and where."""
    replies: list[Response] = []

    async def answer(request: Request) -> Response:
        return replies.pop(0)

    listening = loopback()
    async with served(Starlette(routes=[Route("/", answer, methods=["POST"])]), listening):
        yield replies, f"http://127.0.0.1:{port_of(listening)}/"


def reply_with(body: bytes, status: int = 200) -> Response:
    reply = Response(body, status, media_type="application/json")
    for each in COOKIES:
        reply.raw_headers.append((b"set-cookie", each.encode()))
    return reply


async def told(reply: Any) -> dict[str, Any]:
    """All that callers in the framework ask a reply for."""
    cookies = {
        name: (morsel.value, morsel.coded_value, {k: str(v) for k, v in morsel.items() if v})
        for name, morsel in reply.cookies.items()
    }
    facts = {"ok": reply.ok, "status": reply.status, "cookies": cookies, "type": reply.headers["Content-Type"]}
    return {
        **facts,
        "read": await reply.read(),
        "text": await reply.text(),
        "method": reply.method,
        "url": str(reply.url),
    }


async def test_a_reply_made_of_a_record_tells_what_the_reply_told(server: tuple[list[Response], str]) -> None:
    replies, url = server
    replies += [reply_with(b'{"a": [1, "\xc3\xa9"]}')] * 2
    async with aiohttp.ClientSession() as http:
        live = await http.post(url)
        record = await record_of(await http.post(url))
        kept = decode(encode(record))
        again = RecordedReply(kept, "POST", url)
        assert (kept, type(kept["body"])) == (record, str)
        assert await told(again) == await told(live)
        assert (await again.json(), await again.content.read(), await again.content.read()) == (
            {"a": [1, "é"]},
            '{"a": [1, "é"]}'.encode(),
            b"",
        )
        async with again as entered:
            entered.release()


async def test_an_error_is_raised_as_the_framework_raises_it(server: tuple[list[Response], str]) -> None:
    replies, url = server
    replies += [reply_with(b"broken", 500)] * 2
    async with aiohttp.ClientSession() as http:
        errors = []
        for reply in (await http.post(url), RecordedReply(await record_of(await http.post(url)), "POST", url)):
            with pytest.raises(aiohttp.ClientResponseError) as raised:
                await raise_for_status(reply)
            error = raised.value
            errors.append((error.status, error.message, error.response_content, str(error.request_info.url)))  # type: ignore[attr-defined]
    assert errors == [(500, "Internal Server Error", b"broken", url)] * 2


async def test_text_is_read_in_its_encoding(server: tuple[list[Response], str]) -> None:
    replies, url = server
    replies += [Response("é".encode("latin-1"), media_type="text/plain; charset=latin-1")] * 2
    async with aiohttp.ClientSession() as http:
        live, record = await http.post(url), await record_of(await http.post(url))
        assert await RecordedReply(decode(encode(record)), "POST", url).text() == await live.text() == "é"


@pytest.mark.parametrize("body", [b'{"reward": NaN}', b"", b" ", b"[1.5]"])
async def test_json_is_read_as_the_client_reads_it(server: tuple[list[Response], str], body: bytes) -> None:
    replies, url = server
    replies += [reply_with(body)] * 2
    async with aiohttp.ClientSession() as http:
        live, record = await http.post(url), await record_of(await http.post(url))
        assert repr(await RecordedReply(record, "POST", url).json()) == repr(await live.json())


async def test_a_refusal_is_raised_and_never_recorded(server: tuple[list[Response], str]) -> None:
    replies, url = server
    replies += [refused(StaleAttempt("gone")), refused(AdmissionClosed("full", retry_after=7))]
    async with aiohttp.ClientSession() as http:
        with pytest.raises(StaleAttempt, match="gone"):
            await record_of(await http.post(url))
        with pytest.raises(AdmissionClosed) as raised:
            await record_of(await http.post(url))
    assert raised.value.retry_after == 7


@pytest.mark.parametrize("body", [b"", b"text \xe2\x82\xac", b"\x89PNG\r\n\x00\xff", bytes(range(256))])
def test_a_body_is_kept_exactly(body: bytes) -> None:
    kept = decode(encode(text_or_bytes(body)))
    assert bytes_of(kept) == body
    assert isinstance(kept, bytes) == (b"\xff" in body)


@pytest.mark.parametrize("cookies", [None, [["a", "1", "1", {"unknown": "x"}]], [["a", "1"]]])
def test_a_record_that_is_none_is_refused(cookies: Any) -> None:
    record = {"status": 200, "type": "", "body": "", **({"cookies": cookies} if cookies else {})}
    with pytest.raises(StateCorrupt, match="POST http://x/ is unusable"):
        RecordedReply(record, "POST", "http://x/")
