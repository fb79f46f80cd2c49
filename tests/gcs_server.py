"""A local server of Google Cloud Storage for tests, in memory: `python -m tests.gcs_server PORT`; :func:`gcs_server`.

It has what Arrow's client uses of the JSON API: objects, ranges, listings, uploads in one and in several requests, and
deletions. It checks no credentials. Its one bucket is `runs`. Requests fail on demand (:func:`fail`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from deploy.demo.cluster import free_port
from tests.s3_server import ROOT, chunks

BUCKET = "runs"
_START_S = 60.0
_OBJECTS: dict[str, bytes] = {}
_UPLOADS: dict[str, tuple[str, bytearray]] = {}
"""Name and content so far of uploads in several requests, by id."""
_LABELS: dict[str, dict[str, str]] = {}
"""What an upload says about its object: Arrow tells folders by it."""
_FAILING: dict[str, int] = {}
"""How many of the next requests with a method are answered with 503."""
_FAIL = "/-/fail"
_LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        """Do what is asked."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            body = b"".join(chunks(self.rfile))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        _, separator, name = url.path.partition("/o/")
        with _LOCK:
            if url.path == _FAIL:
                self._fail(query)
            elif _FAILING.get(self.command, 0) > 0:
                _FAILING[self.command] -= 1
                self._answer(503, b"")
            elif f"/b/{BUCKET}" not in url.path:
                self._json({"error": {"code": 404, "message": "no such bucket"}}, 404)
            elif url.path.startswith("/upload/"):
                self._upload(query, body)
            elif separator:
                self._object(unquote(name), query)
            elif url.path.endswith("/o"):
                self._json(_listing(query.get("prefix", ""), query.get("delimiter", "")))
            else:
                self._json({"kind": "storage#bucket", "id": BUCKET, "name": BUCKET})

    do_GET = do_PUT = do_POST = do_DELETE = handle_request

    def _fail(self, query: dict[str, str]) -> None:
        ((method, times),) = query.items()
        left, _FAILING[method] = _FAILING.get(method, 0), int(times)
        self._answer(200, str(left).encode())

    def _object(self, name: str, query: dict[str, str]) -> None:
        content = _OBJECTS.get(name)
        if content is None:
            self._json({"error": {"code": 404, "message": f"no object {name}"}}, 404)
        elif self.command == "DELETE":
            del _OBJECTS[name]
            self._answer(204, b"")
        elif query.get("alt") == "media":
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            ranged = {"Content-Range": f"bytes {start}-{end}/{len(content)}"} if "Range" in self.headers else {}
            self._answer(206 if ranged else 200, content[start : end + 1], ranged)
        else:
            self._json(_described(name))

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        if query["uploadType"] == "multipart":
            description, content = _parts(body, self.headers["Content-Type"].partition("boundary=")[2].encode())
            name = query.get("name") or json.loads(description)["name"]
            _OBJECTS[name], _LABELS[name] = content, json.loads(description).get("metadata", {})
            return self._json(_described(name))
        if self.command == "POST":
            number = uuid.uuid4().hex
            name = query.get("name") or json.loads(body)["name"]
            _LABELS[name] = json.loads(body or b"{}").get("metadata", {})
            _UPLOADS[number] = name, bytearray()
            where = f"http://{self.headers['Host']}/upload/storage/v1/b/{BUCKET}/o"
            return self._json({}, 200, {"Location": f"{where}?uploadType=resumable&upload_id={number}"})
        name, content = _UPLOADS[query["upload_id"]]
        content += body
        if self.headers.get("Content-Range", "").endswith("/*"):
            return self._answer(308, b"", {"Range": f"bytes=0-{len(content) - 1}"} if content else {})
        _OBJECTS[name] = bytes(content)
        return self._json(_described(name))

    def _json(self, content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def _described(name: str) -> dict[str, Any]:
    times = dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z")
    numbers = {"size": str(len(_OBJECTS[name])), "generation": "1", "metageneration": "1"}
    names = {"id": name, "name": name, "bucket": BUCKET, "metadata": _LABELS.get(name, {})}
    return {"kind": "storage#object", **names, **numbers, **times}


def _listing(prefix: str, delimiter: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    folders: dict[str, None] = {}
    for name in sorted(name for name in _OBJECTS if name.startswith(prefix)):
        head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        if found:
            folders[f"{prefix}{head}{delimiter}"] = None
        if not found or name == f"{prefix}{head}{delimiter}":  # includeTrailingDelimiter
            items.append(_described(name))
    return {"kind": "storage#objects", "items": items, "prefixes": list(folders)}


def _parts(body: bytes, boundary: bytes) -> tuple[bytes, bytes]:
    """The two parts of an upload in one request: its description and its content."""
    pieces = body.split(b"--" + boundary.strip(b'"'))[1:3]
    first, second = (piece.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for piece in pieces)
    return first, second


@contextmanager
def gcs_server() -> Iterator[str]:
    """A server in a child process: the URL of a folder in its bucket."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.gcs_server", str(port)], cwd=ROOT)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/storage/v1/b/{BUCKET}", timeout=_START_S).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield f"gs://anonymous@{BUCKET}/a?scheme=http&endpoint_override=127.0.0.1:{port}&retry_limit_seconds=5"
    finally:
        process.terminate()
        process.wait()


def fail(url: str, method: str, times: int) -> int:
    """Answer the next requests with this method with 503; returns how many of those before were left."""
    (endpoint,) = parse_qs(urlsplit(url).query)["endpoint_override"]
    asked = urllib.request.Request(f"http://{endpoint}{_FAIL}?{method}={times}", method="POST")
    with urllib.request.urlopen(asked, timeout=_START_S) as answer:
        return int(answer.read())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
