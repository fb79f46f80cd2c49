"""`troupe watch`: serves the report of active runs on this machine, read-only."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.report.page import as_json, render
from troupe.orchestrator.insight.report.report import first_groups, sample_block, summary
from troupe.orchestrator.insight.report.samples import TokenTexts
from troupe.orchestrator.live.lock import LockHolder
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.units import MIB

Json = dict[str, Any]

_WATCHED = ("metrics.jsonl", "events.jsonl", "spec.yaml", "trajectories")
"""Whatever changes in a run, but for the end of its process, changes the time or the size of one of these."""
_RETRY_S = 60.0
"""After this a tokenizer that did not answer is asked again: it may only be slow while a run loads its models."""
_STEP_BYTES = 8 * MIB
"""Samples of one step that the page gets."""


class LiveData:
    """What a live page asks for. Every method reads the files anew."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises UsageError if a folder holds no run."""
        self._runs = [RunFolder(folder) for folder in folders]
        self._texts = [TokenTexts(run.spec.get("model") or {}, _RETRY_S) for run in self._runs]

    def mark(self) -> str:
        """Changes whenever the runs' records change."""
        found: list[object] = [holder.is_active for run in self._runs if (holder := LockHolder.of(run.path))]
        for path in (run.path / name for run in self._runs for name in _WATCHED):
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append(None)
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def page(self) -> str:
        """The page without samples: it asks for them itself, because token texts take seconds at first."""
        stores = [_store({}) for _ in self._runs]
        return render(summary(self._runs) | {"samples": stores, "mark": ""}, live=True)

    def data(self) -> Json:
        """Everything but the samples. `stamps` identifies the file of each step: the page asks for the samples of the
        newest step, and drops what it has of a file that has changed."""
        mark = self.mark()
        runs = [RunFolder(run.path) for run in self._runs]  # the spec is kept in them, and a resumption may change it
        files = [{step: _stamp(file) for step, file in run.sample_files().items()} for run in runs]
        stores = [_store(one) | {"problem": texts.problem} for one, texts in zip(files, self._texts, strict=True)]
        return summary(runs) | {"mark": mark, "samples": stores}

    def samples(self, run: int, step: int) -> Json | None:
        """The samples of a step, or the first groups of many; None if it has none."""
        if not 0 <= run < len(self._runs) or (file := self._runs[run].sample_files().get(step)) is None:
            return None
        stamp = _stamp(file)  # before it is read: one that is written meanwhile has another
        block = sample_block(self._runs[run], step, self._texts[run])
        return block and first_groups(block, _STEP_BYTES) | {"stamp": stamp, "problem": self._texts[run].problem}


def _stamp(file: Path) -> str:
    try:
        return str(file.stat().st_mtime_ns)
    except OSError:
        return ""  # deleted since


def _store(stamps: dict[int, str]) -> Json:
    return {"blocks": [], "steps": list(stamps), "stamps": stamps, "rule": "", "problem": ""}


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
    request_queue_size = 128

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
            return HTTPStatus.BAD_REQUEST, "text/plain", "run and step are whole numbers\n"

    def _data(self, query: dict[str, str]) -> Answer:
        if query.get("mark") == self.server.data.mark():
            return HTTPStatus.NO_CONTENT, "application/json", ""
        return HTTPStatus.OK, "application/json", as_json(self.server.data.data())

    def _block(self, read: Callable[[int, int], object], query: dict[str, str]) -> Answer:
        block = read(int(query.get("run", "0")), int(query.get("step", "")))
        status = HTTPStatus.OK if block is not None else HTTPStatus.NOT_FOUND
        return status, "application/json", as_json(block)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a page asks every two seconds."""


def refusal(host: str, site: str) -> str:
    """Why a request is not answered, or empty. By DNS rebinding another site's name can resolve to this machine.
    `site`: the header `Sec-Fetch-Site`, or empty."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # an address in brackets that is none
        name = host
    if name != "localhost" and not _is_loopback(name):
        return f"the host {name[:80]!r} is not this machine: open the page as http://127.0.0.1 or http://localhost"
    return "" if site in {"", "none", "same-origin"} else "requests from other sites are not answered"


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
