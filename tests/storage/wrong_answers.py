"""A server between a client and S3 that gives one wrong answer: of a drawn kind, to a drawn request of those that a run makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from tests.storage.s3 import environment_of, using

OBJECTS = ("manifest.json", "boxes.index", "part-", "boxes-", "declared-")
NEWEST = "step-00000004"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of which kind of object, and the how manieth time."""

    method: str
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    length: int | None = None
    """Of the body by its header, where that is wrong."""
    sent: int | None = None
    """Bytes of the body after which the connection is cut."""


Change = Callable[[Answer], Answer]
"""What makes the wrong answer of the right one."""


def _error(status: int, code: str) -> Change:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    return lambda _: Answer(status, {"Content-Type": "application/xml"}, body)


def _page(_: Answer) -> Answer:
    return Answer(200, {"Content-Type": "text/html"}, b"<html>log in first</html>")


def _flipped(answer: Answer) -> Answer:
    at = len(answer.body) // 2
    return replace(answer, body=answer.body[:at] + bytes([answer.body[at] ^ 16]) + answer.body[at + 1 :])


def _shortened(answer: Answer) -> Answer:
    return replace(answer, body=answer.body[: len(answer.body) * 2 // 3])


def _ended(answer: Answer) -> Answer:
    return replace(answer, sent=len(answer.body) // 2)


def _stale(answer: Answer) -> Answer:
    """A listing of before the newest step, and before the manifest of one was written."""
    return replace(answer, body=_without(answer.body, NEWEST if b"CommonPrefixes" in answer.body else "manifest.json"))


def _without(body: bytes, name: str) -> bytes:
    text = body.decode()
    for block in re.findall(r"<(?:Contents|CommonPrefixes)>.*?</(?:Contents|CommonPrefixes)>", text, re.DOTALL):
        if name in block:
            text = text.replace(block, "")
    return re.sub(r"<KeyCount>\d+</KeyCount>", "<KeyCount>0</KeyCount>", text).encode()


ERRORS: Mapping[str, Change] = {
    "404": _error(404, "NoSuchKey"),
    "403": _error(403, "AccessDenied"),
    "416": _error(416, "InvalidRange"),
    "429": _error(429, "TooManyRequests"),
    "500": _error(500, "InternalError"),
    "503": _error(503, "SlowDown"),
    "reset": lambda answer: replace(answer, sent=-1),
}
FAULTS: Mapping[str, Mapping[str, Change]] = {
    "list": {
        **ERRORS,
        "page": _page,
        "ended early": _ended,
        "stale": _stale,
        "nothing": lambda answer: replace(answer, body=_without(answer.body, "")),
        "shortened": _shortened,
    },
    "GET": {
        **ERRORS,
        "page": _page,
        "flipped": _flipped,
        "shortened": _shortened,
        "empty": lambda answer: replace(answer, body=b""),
        "ended early": _ended,
        "too long": lambda answer: replace(answer, length=len(answer.body) + 7),
        "zeros": lambda answer: replace(answer, body=bytes(len(answer.body))),
    },
    "HEAD": {**ERRORS, "page": _page, "other size": lambda answer: replace(answer, length=17)},
    "PUT": ERRORS,
}
"""Wrong answers by what is asked."""


def faults_of(request: Request) -> Mapping[str, Change]:
    return FAULTS.get("list" if request.kind == "list" else request.method, ERRORS)


class Proxy:
    """``asked``: the requests since ``clear``, in their order. ``was_wrong``: whether one of them got the wrong answer."""

    def __init__(self) -> None:
        self.environment = dict[str, str]()
        self.asked, self.was_wrong = list[Request](), False
        self._wrong: tuple[Request, Change] | None = None
        self._lock, self._counts = Lock(), dict[tuple[str, str], int]()

    def clear(self, wrong: tuple[Request, Change] | None = None) -> None:
        with self._lock:
            self.asked, self._wrong, self.was_wrong = [], wrong, False
            self._counts.clear()

    def asks(self, method: str, path: str) -> Change | None:
        parts = urlsplit(path)
        name = parts.path.rpartition("/")[2]
        kind = (
            "list" if "list-type" in parts.query else next((kind for kind in OBJECTS if name.startswith(kind)), "other")
        )
        with self._lock:
            number = self._counts.get((method, kind), 0)
            self._counts[method, kind] = number + 1
            request = Request(method, kind, number)
            self.asked.append(request)
            if self._wrong is not None and self._wrong[0] == request:
                self.was_wrong = True
                return self._wrong[1]
        return None


@contextmanager
def between(port: int) -> Iterator[Proxy]:
    """A proxy before the server at a port of this machine, which this process uses."""
    proxy = Proxy()

    class Between(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            data = self._body()
            change = proxy.asks(self.command, self.path)
            answer = self._asked(data)
            if change is not None:
                answer = change(answer)
            self._send(answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def _body(self) -> bytes:
            if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _asked(self, data: bytes) -> Answer:
            left_out = ("connection", "transfer-encoding", "content-length", "date", "server")
            headers = {key: value for key, value in self.headers.items() if key.lower() not in left_out}
            connection = HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                connection.request(
                    self.command, self.path, body=data, headers={**headers, "Content-Length": str(len(data))}
                )
                answer = connection.getresponse()
                body = answer.read()
                length = int(answer.headers.get("Content-Length") or 0) if self.command == "HEAD" else None
                given = {key: value for key, value in answer.getheaders() if key.lower() not in left_out}
                return Answer(answer.status, given, body, length=length)
            finally:
                connection.close()

        def _send(self, answer: Answer) -> None:
            if answer.sent == -1:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body if answer.sent is None else answer.body[: answer.sent])
            if answer.sent is not None or (answer.length is not None and self.command != "HEAD"):
                self.close_connection = True

        def handle(self) -> None:
            with suppress(OSError, ValueError):
                super().handle()

        def log_message(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Between)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    proxy.environment = environment_of(server.server_address[1])
    try:
        with using(proxy.environment):
            yield proxy
    finally:
        server.shutdown()
        server.server_close()
