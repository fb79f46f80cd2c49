"""`troupe watch`: serves the report of active runs on this machine, read-only."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.report.live import LiveData
from troupe.orchestrator.insight.report.page import as_json

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_IDLE_S = 30.0
"""A connection on which nothing arrives is closed after this."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Answer = tuple[HTTPStatus, str, str]
"""Status, type of the content, content."""


class WatchServer(ThreadingHTTPServer):
    """Answers GET and HEAD from this machine; it has four addresses and writes nothing."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int) -> None:
        """Bind to loopback; port 0 takes a free one. Raises UsageError if the port is taken or there is no run."""
        self.data = LiveData(folders)
        self.reading = Lock()
        """One answer is computed at a time."""
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            remedy = "another program has it; --port 0 takes a free one"
            raise UsageError(f"--port {port}: {error.strerror} ({remedy})") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]: narrower
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._respond(body=True)

    def do_HEAD(self) -> None:
        self._respond(body=False)

    def _respond(self, *, body: bool) -> None:
        try:
            status, kind, text = self._answer()
        except Exception:
            logger.exception("%s cannot be answered", self.path[:200])
            status, kind, text = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", "the run's records cannot be read\n"
        content = text.encode("utf-8")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _answer(self) -> Answer:
        if refused := refusal(self.headers.get("Host", ""), self.headers.get("Sec-Fetch-Site", "")):
            return HTTPStatus.FORBIDDEN, "text/plain", f"{refused}\n"
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        known: dict[str, Callable[[dict[str, str]], Answer]] = {
            "/": lambda _: (HTTPStatus.OK, "text/html", self.server.data.page()),
            "/data.json": self._data,
            "/samples.json": lambda q: self._block(self.server.data.samples, q),
        }
        found = known.get(parts.path)
        if found is None:
            return HTTPStatus.NOT_FOUND, "text/plain", "no such page\n"
        try:
            with self.server.reading:
                return found(query)
        except ValueError:
            return HTTPStatus.BAD_REQUEST, "text/plain", "run, step and after are whole numbers\n"

    def _data(self, query: dict[str, str]) -> Answer:
        after = int(query.get("after", "-1"))
        if query.get("mark") == self.server.data.mark():
            return HTTPStatus.NO_CONTENT, "application/json", ""
        data = self.server.data.data(after, query.get("known", ""), query.get("held", ""))
        return HTTPStatus.OK, "application/json", as_json(data)

    def _block(self, read: Callable[[int, int], object], query: dict[str, str]) -> Answer:
        block = read(int(query.get("run", "0")), int(query.get("step", "")))
        status = HTTPStatus.OK if block is not None else HTTPStatus.NOT_FOUND
        return status, "application/json", as_json(block)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a page asks every two seconds."""


def refusal(host: str, site: str) -> str:
    """Why a request is not answered, or "" if it is.

    A page elsewhere may have a name that resolves to this machine (DNS rebinding): its requests carry that name.

    Args:
        host: Header `Host`.
        site: Header `Sec-Fetch-Site`; empty if the client sends none.
    """
    name = urlsplit(f"//{host}").hostname or ""
    if name != "localhost" and not _is_loopback(name):
        return f"the host {name[:80]!r} is not this machine: open the page as http://127.0.0.1 or http://localhost"
    return "" if site in {"", "none", "same-origin"} else "requests from other sites are not answered"


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
