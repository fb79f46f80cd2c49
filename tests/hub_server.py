"""A local server that speaks as much of the Hugging Face hub's protocol as `huggingface_hub` uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A repository: branches are names of commits, a commit is a set of files."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str = ""
    """Who else reads it is told that there is no such repository."""
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Moves a branch to a new commit and returns its hash."""
        digest = hashlib.sha1(f"{len(self.commits)}{branch}{sorted(files)}".encode()).hexdigest()
        self.commits[digest] = files
        self.branches[branch] = digest
        return digest

    def find(self, revision: str) -> str | None:
        """The commit of a branch, or of its own hash."""
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass(frozen=True)
class Request:
    """One request that was answered."""

    method: str
    path: str
    token: str
    """Empty: none was sent."""
    range: str = ""


class HubServer:
    """The server; its address is `url`. It runs in a thread from `start` to `stop`."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        """By kind (`models`, `datasets`) and name."""
        self.requests: list[Request] = []
        self.cuts: dict[str, int] = {}
        """How often the download of a file ends in the middle, by its name."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> HubServer:
        """Answers from now on."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Refuses connections from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def add(self, name: str, files: dict[str, bytes], kind: str = "models", token: str = "") -> Repository:
        """A new repository with one commit on `main`."""
        repository = self.repositories[kind, name] = Repository(token=token)
        repository.commit(files)
        return repository


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _etag(name: str, content: bytes) -> str:
    return (hashlib.sha256 if name.endswith(".safetensors") else hashlib.sha1)(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets: the second would wait 40 ms for the first

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.requests.append(Request(self.command, path, token, self.headers.get("Range", "")))
        if found := _API.fullmatch(path):
            return self._api(*found.groups(), token=token)
        if found := _FILE.fullmatch(path):
            return self._file(*found.groups(), token=token)
        self._send(404, b"{}")

    def _api(self, kind: str, name: str, verb: str | None, revision: str | None, *, token: str) -> None:
        repository = self._repository(kind, name, token)
        if repository is None:
            return
        commit = repository.find(revision or "main")
        if commit is None:
            return self._fail(404, "RevisionNotFound")
        files = repository.commits[commit]
        if verb == "tree":
            self._send_json(
                [{"type": "file", "path": n, "size": len(c), "oid": _etag(n, c)} for n, c in sorted(files.items())]
            )
        else:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in sorted(files.items())]
            self._send_json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _file(self, dataset: str | None, name: str, revision: str, path: str, *, token: str) -> None:
        repository = self._repository("datasets" if dataset else "models", name, token)
        if repository is None:
            return
        commit = repository.find(revision)
        if commit is None:
            return self._fail(404, "RevisionNotFound")
        content = repository.commits[commit].get(path)
        if content is None:
            return self._fail(404, "EntryNotFound")
        headers = {"ETag": f'"{_etag(path, content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.command == "GET" and self.hub.cuts.get(path, 0) > 0
        if cut:
            self.hub.cuts[path] -= 1
        self._send(206 if start else 200, content[start:], headers, cut=cut)

    def _repository(self, kind: str, name: str, token: str) -> Repository | None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.token and not token):
            self._fail(404 if token else 401, "RepoNotFound")
        elif repository.token and token != repository.token:
            self._fail(401, "", "Invalid credentials in Authorization header")
        elif repository.gated:
            self._fail(403 if token else 401, "GatedRepo")
        else:
            return repository
        return None

    def _fail(self, status: int, code: str, message: str = "") -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {"X-Error-Message": message})

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True
