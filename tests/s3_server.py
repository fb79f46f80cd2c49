"""A local S3 server for tests, in memory: `python -m tests.s3_server PORT`, or :func:`s3_server` for a child process.

It has what Arrow's S3 client uses: buckets, objects, ranges, listings, uploads in parts and deletions. It checks no
signature. Faults are injected with `PUT /-/faults` (:class:`Faults` as JSON). moto cannot be installed beside the
versions of the lock (botocore needs python-dateutil below 3), and does not complete uploads in parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import md5
from http.server import ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.store_server import AnsweringHandler

ROOT = Path(__file__).resolve().parents[1]
_XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_TIMEOUT_S = 60.0


@dataclass
class Faults:
    """What goes wrong with the next requests for objects."""

    method: str = "GET"
    errors: int = 0
    """Requests that are answered with 500."""
    cuts: int = 0
    """Requests whose connection is closed in the middle of the answer; writes are not done then."""
    delay_s: float = 0.0
    """Wait before every answer."""

    def __str__(self) -> str:
        return f"{self.method}: {self.errors} errors, {self.cuts} cuts, {self.delay_s:g} s"


@dataclass
class _Store:
    """All buckets: objects by path, and uploads in parts by id."""

    objects: dict[str, bytes] = field(default_factory=dict)
    buckets: set[str] = field(default_factory=set)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    lock: threading.Lock = field(default_factory=threading.Lock)


_STORE = _Store()


class Handler(AnsweringHandler):
    """Answers one request."""

    def handle_request(self) -> None:
        """Inject a fault, or do what is asked."""
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        body = self._body()
        if path == "-/faults":
            _STORE.faults = Faults(**json.loads(body))
            return self.answer(200)
        fault = self._fault() if "/" in path or self.command == "POST" else ""
        if fault == "error":
            return self.answer(500, b"<Error><Code>InternalError</Code><Message>injected</Message></Error>")
        if fault == "cut":
            return self._cut(path)
        with _STORE.lock:
            status, content, headers = self._reply(path, query, body, url.path.endswith("/"))
        self.answer(status, content, headers)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_request

    def _fault(self) -> str:
        with _STORE.lock:
            faults = _STORE.faults
            if self.command != faults.method:
                return ""
            kind = "error" if faults.errors else "cut" if faults.cuts else ""
            faults.errors -= kind == "error"
            faults.cuts -= kind == "cut"
        time.sleep(faults.delay_s)
        return kind

    def _cut(self, path: str) -> None:
        """Announce the whole object and send its first half."""
        content = _STORE.objects.get(path, b"")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + 1))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def _reply(
        self, path: str, query: dict[str, list[str]], body: bytes, marker: bool
    ) -> tuple[int, bytes, dict[str, str]]:
        bucket, _, key = path.partition("/")
        if not key and not (marker and "/" in path):
            return self._bucket(bucket, query, body)
        path += "/" if marker else ""
        store, upload = _STORE, query.get("uploadId", [""])[0]
        match self.command:
            case "POST" if "uploads" in query:
                store.uploads[name := uuid.uuid4().hex] = {}
                return _xml(f"<InitiateMultipartUploadResult {_XMLNS}><UploadId>{name}</UploadId>")
            case "POST":
                parts = store.uploads.pop(upload)
                store.objects[path] = b"".join(parts[number] for number in sorted(parts))
                return _xml(f"<CompleteMultipartUploadResult {_XMLNS}><Key>{escape(key)}</Key>")
            case "PUT" if upload:
                store.uploads[upload][int(query["partNumber"][0])] = body
                return 200, b"", {"ETag": _etag(body)}
            case "PUT":
                store.objects[path] = body
                return 200, b"", {"ETag": _etag(body)}
            case "DELETE":
                if upload:
                    store.uploads.pop(upload, None)
                else:
                    store.objects.pop(path, None)
                return 204, b"", {}
            case _:
                return self._read(path)

    def _read(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        content = _STORE.objects.get(path)
        if content is None:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>", {}
        headers = {"ETag": _etag(content), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if path.endswith("/"):
            headers["Content-Type"] = "application/x-directory"
        wanted = self.headers.get("Range", "")
        if not wanted:
            return 200, content, headers
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        return 206, content[start : end + 1], headers | {"Content-Range": f"bytes {start}-{end}/{len(content)}"}

    def _bucket(self, bucket: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        store = _STORE
        if self.command == "PUT":
            store.buckets.add(bucket)
        if bucket not in store.buckets:
            return 404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>", {}
        if self.command == "POST":  # deletion of many
            for entry in ElementTree.fromstring(body).iter():
                if entry.tag.endswith("Key"):
                    store.objects.pop(f"{bucket}/{entry.text}", None)
            return _xml(f"<DeleteResult {_XMLNS}>")
        return _listing(bucket, query) if self.command == "GET" else (200, b"", {})

    def _body(self) -> bytes:
        """The content of the request; Arrow may send it in chunks with their sizes, and checksums behind them."""
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            content = b"".join(chunks(self.rfile))
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        encoded = "aws-chunked" in self.headers.get("Content-Encoding", "")
        return b"".join(chunks(BytesIO(content))) if encoded else content


def chunks(stream: BufferedIOBase) -> Iterator[bytes]:
    """The content of a stream of chunks, each behind a line with its size, up to the end of what follows them."""
    while length := int(stream.readline().partition(b";")[0], 16):
        yield stream.read(length)
        stream.readline()
    while stream.readline().strip():  # checksums
        pass


def _etag(content: bytes) -> str:
    return f'"{md5(content, usedforsecurity=False).hexdigest()}"'


def _xml(opened: str) -> tuple[int, bytes, dict[str, str]]:
    """A document whose root element is opened here."""
    root = opened[1:].partition(" ")[0]
    return 200, f"{opened}</{root}>".encode(), {"Content-Type": "application/xml"}


def _listing(bucket: str, query: dict[str, list[str]]) -> tuple[int, bytes, dict[str, str]]:
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    keys = sorted(path.partition("/")[2] for path in _STORE.objects if path.startswith(f"{bucket}/{prefix}"))
    folders: dict[str, None] = {}
    files: list[str] = []
    for key in keys:
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        if found:
            folders[f"{prefix}{head}{delimiter}"] = None
        else:
            files.append(key)
    most = int(query.get("max-keys", ["1000"])[0])
    rows = [
        f"<Contents><Key>{escape(key)}</Key><Size>{len(_STORE.objects[f'{bucket}/{key}'])}</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in files[:most]
    ]
    rows += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders]
    count = f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated><Prefix>{escape(prefix)}</Prefix>"
    return _xml(f"<ListBucketResult {_XMLNS}>{count}{''.join(rows)}")


@contextmanager
def s3_server() -> Iterator[tuple[str, Callable[[Faults], None]]]:
    """A server in a child process: the options of a URL that leads to it, and what injects faults.

    The caller sets `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`.
    """
    process = subprocess.Popen([sys.executable, "-m", "tests.s3_server"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())

    def inject(faults: Faults) -> None:
        body = json.dumps(asdict(faults)).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/-/faults", body, method="PUT")
        urllib.request.urlopen(asked, timeout=_TIMEOUT_S).close()

    try:
        yield f"region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{port}", inject
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
