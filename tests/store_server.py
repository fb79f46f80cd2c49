"""What the local object stores for tests share: a server in another process, which fails on demand."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection

_FAIL = "/-/fail"
_START_S = 60.0


class StoreServer(ThreadingHTTPServer):
    """A store on a free port, and what goes wrong with the next requests."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.failing: dict[str, int] = {}
        """How many of the next requests with this method are answered with 503."""


class AnsweringHandler(BaseHTTPRequestHandler):
    """Answers one request, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets: the second would wait 40 ms for the first

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send an answer; to HEAD without its content."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


class StoreHandler(AnsweringHandler):
    """Answers one request of a server that fails on demand."""

    server: StoreServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def failed(self, path: str, query: Mapping[str, str]) -> bool:
        """Whether the request is answered: it orders failures (`LocalStore.fail`), or fails as ordered."""
        failing = self.server.failing
        if path == _FAIL:
            ((method, times),) = query.items()
            left, failing[method] = failing.get(method, 0), int(times)
            self.answer(200, str(left).encode())
            return True
        if failing.get(self.command, 0) > 0:
            failing[self.command] -= 1
            self.answer(503)
            return True
        return False


@dataclass(frozen=True)
class LocalStore:
    """A server in another process: Arrow's client holds the interpreter while it waits for an answer."""

    port: int

    def fail(self, method: str, times: int) -> int:
        """Answer the next requests with this method with 503; returns how many of those before were left."""
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{_FAIL}?{method}={times}", method="POST")
        with urllib.request.urlopen(asked, timeout=_START_S) as answer:
            return int(answer.read())


def _serve(ports: Connection, make: Callable[[], StoreServer]) -> None:
    with make() as server:
        ports.send(server.server_port)
        server.serve_forever()


@contextmanager
def serving(make: Callable[[], StoreServer]) -> Iterator[int]:
    """The port of a server in another process, which ends with the block."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, make), daemon=True)
    process.start()
    try:
        if not here.poll(_START_S):
            raise TimeoutError("the local object store did not start")
        yield here.recv()
    finally:
        process.kill()
        process.join()
