"""Replies of other servers, as plain values that a checkpoint keeps, and as what the framework's client would give.

A record is `{"status", "type", "cookies", "body"}`. body: text, or bytes if it is no UTF-8. cookies: one list per
cookie, `[name, value, coded value, attributes]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from email.message import Message
from http.client import responses as phrases
from http.cookies import CookieError, Morsel, SimpleCookie
from types import TracebackType
from typing import Any

import orjson
from aiohttp import ClientResponse, ClientResponseError, RequestInfo
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gym_ckpt_grpc.participants import raise_refusal
from gym_ckpt_grpc.protocol.errors import StateCorrupt

ReplyRecord = dict[str, Any]


async def record_of(response: ClientResponse) -> ReplyRecord:
    """Read a reply to its end and give its record. Raises the ControlError that it carries: that is never recorded."""
    if response.status >= 400:
        raise_refusal(response.status, json_or_none(await response.read()), response.headers)
    return await read_record(response)


async def read_record(response: ClientResponse) -> ReplyRecord:
    """Read a reply to its end and give its record, whatever it says."""
    body = await response.read()
    return {
        "status": response.status,
        "type": response.headers.get("content-type", ""),
        "cookies": [_plain_cookie(morsel) for morsel in response.cookies.values()],
        "body": text_or_bytes(body),
    }


def text_or_bytes(body: bytes) -> str | bytes:
    """A body as a checkpoint keeps it: text where it is text, and exactly."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def bytes_of(body: str | bytes) -> bytes:
    """The body that `text_or_bytes` was given."""
    return body.encode() if isinstance(body, str) else body


def json_or_none(body: bytes) -> Any:
    """What a body says as JSON; None for no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _plain_cookie(morsel: Morsel[str]) -> list[Any]:
    attributes = {name: value for name, value in morsel.items() if value != ""}
    return [morsel.key, morsel.value, morsel.coded_value, attributes]


def _cookies(record: Mapping[str, Any]) -> SimpleCookie:
    jar = SimpleCookie()
    for name, value, coded, attributes in record["cookies"]:
        morsel: Morsel[str] = Morsel()
        # As the client does: it takes names that `set` refuses.
        morsel.__setstate__({"key": name, "value": value, "coded_value": coded})  # type: ignore[attr-defined]
        morsel.update(attributes)
        dict.__setitem__(jar, name, morsel)
    return jar


class RecordedReply:
    """A reply made of its record, with what callers use of `aiohttp.ClientResponse`.

    A caller gets one whether its call was made or replayed, so that it cannot tell. Raises StateCorrupt for a record
    that is none.
    """

    def __init__(self, record: Mapping[str, Any], method: str, url: str) -> None:
        try:
            self.status: int = record["status"]
            self.cookies = _cookies(record)
            self._body = bytes_of(record["body"])
            pairs = [("content-type", record["type"])] if record["type"] else []
        except (KeyError, TypeError, ValueError, AttributeError, CookieError) as error:
            raise StateCorrupt(f"the recorded reply to {method} {url} is unusable: {error!r}") from error
        pairs += [("set-cookie", morsel.OutputString()) for morsel in self.cookies.values()]
        self.headers = CIMultiDictProxy(CIMultiDict(pairs))
        self.method = method
        self.url = self.real_url = URL(url)
        self.reason = phrases.get(self.status, "")
        self.history: tuple[ClientResponse, ...] = ()
        self.content = _Content(self._body)

    @property
    def ok(self) -> bool:
        return self.status < 400

    @property
    def request_info(self) -> RequestInfo:
        return RequestInfo(self.url, self.method, CIMultiDictProxy(CIMultiDict()), self.url)

    @property
    def content_type(self) -> str:
        return str(self.headers.get("content-type", "application/octet-stream")).partition(";")[0].strip()

    @property
    def charset(self) -> str | None:
        """The encoding that its content type names; None for none."""
        told = Message()
        told["content-type"] = self.headers.get("content-type", "")
        return told.get_content_charset()

    async def read(self) -> bytes:
        return self._body

    async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
        return self._body.decode(encoding or self.charset or "utf-8", errors)

    async def json(self, **_: Any) -> Any:
        return json.loads(self._body) if self._body.strip() else None  # the client's own reading, NaN and all

    def raise_for_status(self) -> None:
        if not self.ok:
            raise ClientResponseError(
                self.request_info, self.history, status=self.status, message=self.reason, headers=self.headers
            )

    def release(self) -> None:
        """The connection was given back already."""

    close = release

    async def __aenter__(self) -> RecordedReply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class _Content:
    """The body as a stream, which gives each byte once."""

    def __init__(self, body: bytes) -> None:
        self._left = body

    async def read(self, size: int = -1) -> bytes:
        size = len(self._left) if size < 0 else size
        given, self._left = self._left[:size], self._left[size:]
        return given
