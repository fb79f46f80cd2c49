"""A local Google Cloud Storage for tests, in memory: what Arrow's client uses of its JSON API.

It has one bucket, objects, ranges, listings, uploads in parts and deletions, asks for no credentials, and fails on
demand.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import BytesParser
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.store_server import LocalStore, StoreHandler, StoreServer, serving

BUCKET = "weights"
_WRITTEN = "2026-01-01T00:00:00.000Z"


class _Server(StoreServer):
    """The bucket, and what goes wrong with the next requests."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.objects: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.uploads: dict[str, tuple[str, bytearray]] = {}


class _Handler(StoreHandler):
    """Answers one request."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_request(self) -> None:
        """Fail, or do what is asked."""
        url, body = urlsplit(self.path), self._body()
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if self.failed(url.path, query):
            return None
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        if bucket != BUCKET:
            return self.answer(404)
        if url.path.startswith("/upload/"):
            return self._upload(query, body)
        if not name:
            return self._json(self._listing(query) if "/o" in url.path else {"kind": "storage#bucket", "name": bucket})
        return self._object(unquote(name[1:]), query)

    do_GET = do_POST = do_PUT = do_DELETE = handle_request

    def _object(self, name: str, query: dict[str, str]) -> None:
        content = self.server.objects.get(name)
        if content is None:
            return self.answer(404)
        if self.command == "DELETE":
            del self.server.objects[name]
            return self.answer(204)
        if query.get("alt") != "media":
            return self._json(self._resource(name))
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            return self.answer(200, content)
        start, end = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
        return self.answer(206, content[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(content)}"})

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        if self.command == "PUT":
            return self._part(query["upload_id"], body)
        if query["uploadType"] == "resumable":
            self.server.uploads[name := uuid.uuid4().hex] = query["name"], bytearray()
            place = f"http://{self.headers['Host']}/upload/storage/v1/b/{BUCKET}/o?upload_id={name}"
            return self.answer(200, headers={"Location": place})
        if query["uploadType"] == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            described, content = BytesParser().parsebytes(head + body).get_payload()
            known: dict[str, Any] = json.loads(described.get_payload())  # pyright: ignore
            name = query.get("name") or known["name"]
            self.server.metadata[name] = known.get("metadata", {})
            self.server.objects[name] = content.get_payload(decode=True)  # pyright: ignore
        else:
            name = query["name"]
            self.server.objects[name] = body
        return self._json(self._resource(name))

    def _part(self, upload: str, body: bytes) -> None:
        """The next bytes of an upload, which ends where the whole length is known."""
        name, content = self.server.uploads[upload]
        content += body
        if self.headers["Content-Range"].endswith("/*"):
            return self.answer(308, headers={"Range": f"bytes=0-{len(content) - 1}"} if content else {})
        self.server.objects[name] = bytes(content)
        return self._json(self._resource(name))

    def _resource(self, name: str) -> dict[str, Any]:
        size = str(len(self.server.objects[name]))
        kind = {"kind": "storage#object", "bucket": BUCKET, "name": name, "size": size, "generation": "1"}
        return kind | {"timeCreated": _WRITTEN, "updated": _WRITTEN, "metadata": self.server.metadata.get(name, {})}

    def _listing(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rest = {name: name[len(prefix) :] for name in sorted(self.server.objects) if name.startswith(prefix)}
        below = {name for name, end in rest.items() if delimiter and delimiter in end[:-1]}
        folders = sorted({f"{prefix}{rest[name].partition(delimiter)[0]}{delimiter}" for name in below})
        items = [self._resource(name) for name in rest if name not in below]
        return {"kind": "storage#objects", "items": items, "prefixes": folders}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while length := int(self.rfile.readline(), 16):
            content += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _json(self, content: dict[str, Any]) -> None:
        self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


@dataclass(frozen=True)
class LocalGcs(LocalStore):
    """A server in another process."""

    @property
    def options(self) -> str:
        """Options of a URL that leads there."""
        return f"endpoint_override=127.0.0.1:{self.port}&scheme=http&retry_limit_seconds=3"


@contextmanager
def gcs_server() -> Iterator[LocalGcs]:
    """A server that ends with the block."""
    with serving(_Server) as port:
        yield LocalGcs(port)
