"""A local Azure Blob Storage for tests, in memory: what Arrow's client uses of its protocol.

It has one container of an account without a hierarchical namespace, blobs, ranges, listings, uploads in blocks and
deletions, asks for no credentials, and fails on demand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import BytesParser
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.store_server import LocalStore, StoreHandler, StoreServer, serving

ACCOUNT, CONTAINER = "local", "weights"
_WRITTEN = "Thu, 01 Jan 2026 00:00:00 GMT"
_STATE = {
    "Last-Modified": _WRITTEN,
    "ETag": '"1"',
    "x-ms-creation-time": _WRITTEN,
    "x-ms-blob-type": "BlockBlob",
    "x-ms-lease-status": "unlocked",
    "x-ms-lease-state": "available",
    "x-ms-server-encrypted": "true",
    "x-ms-request-server-encrypted": "true",
}
"""What the client wants to know of every blob."""
_CONTAINER = {
    "x-ms-has-immutability-policy": "false",
    "x-ms-has-legal-hold": "false",
    "x-ms-deny-encryption-scope-override": "false",
    "x-ms-default-encryption-scope": "$account-encryption-key",
    "x-ms-immutable-storage-with-versioning-enabled": "false",
}
"""And of a container."""


class _Server(StoreServer):
    """The container, and what goes wrong with the next requests."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.blobs: dict[str, bytes] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.blocks: dict[tuple[str, str], bytes] = {}
        """Uploaded parts by blob and name."""


class _Handler(StoreHandler):
    """Answers one request."""

    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_request(self) -> None:
        """Fail, or do what is asked."""
        url, body = urlsplit(self.path), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if self.failed(url.path, query):
            return None
        if query.get("action") == "getAccessControl":
            return self.answer(409, headers={"x-ms-error-code": "HierarchicalNamespaceNotEnabled"})
        container, _, name = url.path.removeprefix(f"/{ACCOUNT}/").partition("/")
        if container != CONTAINER:
            return self.answer(404, headers={"x-ms-error-code": "ContainerNotFound"})
        if query.get("comp") == "batch":
            return self._batch(body)
        if query.get("comp") == "list":
            return self.answer(200, self._listing(query).encode(), {"Content-Type": "application/xml"})
        if not name:
            return self.answer(200, headers=_STATE | _CONTAINER)
        return self._put(unquote(name), query, body) if self.command == "PUT" else self._blob(unquote(name))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def _blob(self, name: str) -> None:
        content = self.server.blobs.get(name)
        if content is None:
            return self.answer(404, headers={"x-ms-error-code": "BlobNotFound"})
        if self.command == "DELETE":
            del self.server.blobs[name]
            return self.answer(202, headers={"x-ms-delete-type-permanent": "true"})
        own = {f"x-ms-meta-{key}": value for key, value in self.server.metadata.get(name, {}).items()}
        if self.command == "HEAD":
            return self.answer(200, content, _STATE | own)
        asked = self.headers.get("x-ms-range") or self.headers.get("Range") or ""
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        if found is None:
            return self.answer(200, content, _STATE | own)
        start, end = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
        if start >= len(content):
            return self.answer(416, headers={"x-ms-error-code": "InvalidRange"})
        place = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
        return self.answer(206, content[start : end + 1], _STATE | own | place)

    def _put(self, name: str, query: dict[str, str], body: bytes) -> None:
        server, kind = self.server, query.get("comp", "")
        if kind == "lease":
            if name not in server.blobs:
                return self.answer(404, headers={"x-ms-error-code": "BlobNotFound"})
            status = {"acquire": 201, "release": 200, "break": 202}[self.headers["x-ms-lease-action"]]
            return self.answer(status, headers=_STATE | {"x-ms-lease-id": "1", "x-ms-lease-time": "0"})
        if kind == "block":
            server.blocks[name, query["blockid"]] = body
            return self.answer(201, headers=_STATE)
        if kind == "blocklist":
            named = [block.text or "" for block in ElementTree.fromstring(body)]
            server.blobs[name] = b"".join(server.blocks.pop((name, block)) for block in named)
        elif kind == "":
            server.blobs[name] = body
        if kind != "blocklist" or not server.metadata.get(name):
            given = {key[10:]: value for key, value in self.headers.items() if key.lower().startswith("x-ms-meta-")}
            server.metadata[name] = given
        return self.answer(201, headers=_STATE)

    def _batch(self, body: bytes) -> None:
        """Deletes the blobs of a batch."""
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        answers: list[str] = []
        for number, part in enumerate(BytesParser().parsebytes(head + body).get_payload()):
            asked = re.match(r"DELETE (\S+) ", part.get_payload())  # pyright: ignore
            if asked is None:
                return self.answer(400)
            name = unquote(urlsplit(asked[1]).path.removeprefix(f"/{ACCOUNT}/{CONTAINER}/"))
            status = "404 Not Found" if self.server.blobs.pop(name, None) is None else "202 Accepted"
            answers.append(
                f"--answer\r\nContent-Type: application/http\r\nContent-ID: {part['Content-ID'] or number}\r\n\r\n"  # pyright: ignore
                f"HTTP/1.1 {status}\r\nx-ms-request-id: 1\r\nx-ms-version: 2020-01-01\r\n"
                "x-ms-delete-type-permanent: true\r\n\r\n"
            )
        content = "".join(answers) + "--answer--\r\n"
        return self.answer(202, content.encode(), {"Content-Type": "multipart/mixed; boundary=answer"})

    def _listing(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rest = {name: name[len(prefix) :] for name in sorted(self.server.blobs) if name.startswith(prefix)}
        below = {name for name, end in rest.items() if delimiter and delimiter in end}
        folders = sorted({f"{prefix}{rest[name].partition(delimiter)[0]}{delimiter}" for name in below})
        found = [f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders]
        found += [self._listed(name) for name in rest if name not in below]
        shown = found[: int(query.get("maxresults", len(found)) or 1)]
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{CONTAINER}">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{''.join(shown)}</Blobs><NextMarker/></EnumerationResults>"
        )

    def _listed(self, name: str) -> str:
        facts = {
            "Creation-Time": _WRITTEN,
            "Last-Modified": _WRITTEN,
            "Etag": "1",
            "Content-Length": str(len(self.server.blobs[name])),
            "Content-Type": "application/octet-stream",
            "BlobType": "BlockBlob",
            "AccessTier": "Hot",
            "LeaseStatus": "unlocked",
            "LeaseState": "available",
            "ServerEncrypted": "true",
        }
        known = "".join(f"<{key}>{value}</{key}>" for key, value in facts.items())
        own = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in self.server.metadata.get(name, {}).items())
        metadata = f"<Metadata>{own}</Metadata>" if own else "<Metadata/>"
        return f"<Blob><Name>{escape(name)}</Name><Properties>{known}</Properties>{metadata}</Blob>"

    def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """As in the base class, with what Azure always sends."""
        super().answer(status, content, {"x-ms-request-id": "1", "x-ms-version": "2020-01-01"} | dict(headers or {}))


@dataclass(frozen=True)
class LocalAzure(LocalStore):
    """A server in another process."""

    def url(self, folder: str) -> str:
        """URL of a folder of the container."""
        return f"abfs://{ACCOUNT}@127.0.0.1:{self.port}/{CONTAINER}/{folder}?enable_tls=false&credential_kind=anonymous"


@contextmanager
def azure_server() -> Iterator[LocalAzure]:
    """A server that ends with the block."""
    with serving(_Server) as port:
        yield LocalAzure(port)
