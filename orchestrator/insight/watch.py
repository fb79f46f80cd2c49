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
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.units import MIB

Json = dict[str, Any]

_WATCHED = ("metrics.jsonl", "events.jsonl", "spec.yaml", "trajectories")
"""Whatever changes in a run changes the time or the size of one of these."""
_NONE = "-"
_RETRY_S = 60.0
"""After this a tokenizer that did not answer is asked again: it may only be slow while a run loads its models."""
_STEP_BYTES = 8 * MIB
"""Samples of one step that the page gets."""


class LiveData:
    """What a live page asks for. Every method reads the files anew, except samples of finished steps."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises UsageError if a folder holds no run."""
        self._runs = [RunFolder(folder) for folder in folders]
        self._texts = [TokenTexts(run.spec.get("model") or {}, _RETRY_S) for run in self._runs]

    def mark(self) -> str:
        """Changes whenever the runs' records change."""
        found: list[object] = []
        for path in (run.path / name for run in self._runs for name in _WATCHED):
            try:
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size))
            except OSError:
                found.append(None)
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def page(self) -> str:
        """The page with the runs' metrics; it asks for the rest itself, because token texts take seconds at first."""
        stores = {"samples": [_store([]) for _ in self._runs]}
        data = _summary(self._runs, [_lines(run) for run in self._runs])
        return render(data | stores | {"mark": "", "after": -1}, live=True)

    def data(self, after: int, known: str = "", held: str = "") -> Json:
        """Everything but the metrics up to step `after`, and but all samples before the last step.

        A run that has fewer steps than `after`, or no longer the line that the page has, was started or resumed anew:
        then all metrics are there, and `after` is -1 in the answer.

        Args:
            after: Last step that the page has of every run; -1 for none.
            known: `line` of every run in the page, separated by spaces; not checked if empty.
            held: `file` of every run's samples in the page, in the same way: the newest samples are sent only if
                they are in another file.
        """
        mark = self.mark()
        runs = [RunFolder(run.path) for run in self._runs]  # the spec is kept in them, and a resumption may change it
        lines = [_lines(run) for run in runs]
        data = _summary(runs, lines)
        lost = any(line not in own.values() for line, own in zip(known.split(), lines, strict=False))
        if lost or any(run["steps_done"] < after for run in data["runs"]):
            after = -1
        files = held.split() if after >= 0 else []  # otherwise the page drops its data
        files += [_NONE] * (len(runs) - len(files))
        for run in data["runs"]:
            for group in ("metrics", "used"):
                run[group] = {name: _later(points, after) for name, points in run[group].items()}
        samples = [self._newest(number, run, file) for number, (run, file) in enumerate(zip(runs, files, strict=False))]
        for store, texts in zip(samples, self._texts, strict=True):
            store["problem"] = texts.problem
        return data | {"after": after, "mark": mark, "samples": samples}

    def samples(self, run: int, step: int) -> Json | None:
        """The samples of a step, or the first groups of many; None if it has none."""
        if not 0 <= run < len(self._runs):
            return None
        block = sample_block(self._runs[run], step, self._texts[run])
        return block and first_groups(block, _STEP_BYTES)

    def _newest(self, number: int, run: RunFolder, held: str) -> Json:
        """The steps with samples, and the samples of the last one unless they are in the file that the page has."""
        files = run.sample_files()
        file = _identity(files)
        if file == held:
            return _store(list(files)) | {"file": file}
        found = self.samples(number, max(files)) if files else None
        return _store(list(files)) | {"blocks": [found] if found else [], "file": file if found else _NONE}


def _lines(run: RunFolder) -> dict[int, str]:
    """Step and time of every line of the metrics, by step: a step that was done again has another time.

    With the number of evaluations until then that ended later: with one more, metrics that a page has are incomplete.
    """
    late = run.late_evaluations()
    steps = {step: line.get("time") for line in run.metrics() if isinstance(step := line.get("step"), int)}
    return {step: f"{step}@{time}" + "+" * sum(one <= step for one in late) for step, time in steps.items()}


def _summary(runs: Sequence[RunFolder], lines: Sequence[dict[int, str]]) -> Json:
    """The data without samples; `line` of each run is its last one and identifies the page."""
    data = summary(runs)
    for run, own in zip(data["runs"], lines, strict=True):
        run["line"] = own[max(own)] if own else _NONE
    return data


def _identity(files: dict[int, Path]) -> str:
    """Step and time of the last file."""
    if not files:
        return _NONE
    step = max(files)
    try:
        return f"{step}@{files[step].stat().st_mtime_ns}"
    except OSError:
        return _NONE  # deleted since


def _store(steps: list[int]) -> Json:
    return {"blocks": [], "steps": steps, "rule": "", "problem": "", "file": _NONE}


def _later(points: Json, after: int) -> Json:
    start = next((i for i, step in enumerate(points["steps"]) if step > after), len(points["steps"]))
    return {"steps": points["steps"][start:], "values": points["values"][start:]}


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
