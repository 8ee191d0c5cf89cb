"""The audit behind the table of declared servers: what their sources may do, and that their verdicts repeat.

`sources` reads the files of a server and everything it imports; `check` follows what its requests run; `bodies` and
`serving` build the real server and the requests that verify it twice.
"""
