"""The files that `troupe submit --working-dir` sends: a copy of the folder, without secrets and without what a job does
not need. The folder itself is only read.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from troupe.orchestrator.errors import UsageError

MOST_BYTES = 256 << 20
MOST_FILES = 20_000
_DEEPEST = 64
_SHOWN = 12
_KEY_BYTES = 4096

_UNNEEDED = (
    *(".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", ".cache", "runs"),
    *("*.safetensors", "*.pt"),
)
"""Names of files and folders that are large, or that the cluster has already."""
_SECRET = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd"),
    *(".ssh", ".gnupg", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".huggingface", ".ray", "kubeconfig"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "id_rsa*", "id_ed25519*"),
    *("id_ecdsa*", "id_dsa*", "*.token", "token", "auth_token", "credentials", "credentials.*", "*_credentials.json"),
    *("secret", "secrets", "secret.*", "secrets.*", "service-account*.json", "service_account*.json"),
)
"""Names of files and folders that hold secrets."""
_NO_SECRET = ("*.py", ".env.example", ".env.sample", ".env.template")
_KEY = b"PRIVATE KEY-----"
_IGNORE_FILES = (".gitignore", ".rayignore")

Ignored = Callable[[Path], bool]


@dataclass
class Sent:
    """What was copied, and what was not."""

    bytes: int = 0
    files: int = 0
    largest: tuple[int, str] = (0, "")
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(path in the folder, why)"""

    def notes(self) -> list[str]:
        """One line for every reason why something was left out; nothing for `.gitignore`, which the user wrote."""
        reasons = dict.fromkeys(why for _, why in self.left_out)
        return [f"not sent, {why}: {_listed([path for path, of in self.left_out if of == why])}" for why in reasons]


def copy_folder(folder: Path, target: Path) -> Sent:
    """Copy the files of a folder that a job needs to an empty one. Left out are version control, environments,
    caches, runs, weights; files that hold secrets by name or are private keys; what `.gitignore` and `.rayignore`
    name; links that lead out of it or to folders. Raises UsageError beyond `MOST_BYTES` or `MOST_FILES`; OSError."""
    sent, root = Sent(), folder.resolve()
    for path in _walk(root, root, [], sent):
        name = str(path.relative_to(root))
        try:
            copied = _copy(path, target / name)
        except _LeftOut as reason:
            sent.left_out.append((name, str(reason)))
            continue
        sent.bytes += copied
        sent.files += 1
        sent.largest = max(sent.largest, (copied, name))
        if sent.bytes > MOST_BYTES or sent.files > MOST_FILES:
            most = f"{MOST_BYTES >> 20} MiB or {MOST_FILES} files"
            raise UsageError(
                f"--working-dir {folder}: more than {most} to send (the largest so far: {sent.largest[1]}, "
                f"{sent.largest[0] >> 20} MiB); name a smaller folder, or list the rest in {folder / '.rayignore'}"
            )
    return sent


class _LeftOut(Exception):
    """A file that is not sent; the message gives the reason."""


def _walk(folder: Path, root: Path, ignored: list[Ignored], sent: Sent) -> Iterator[Path]:
    """Every file below a folder that may be sent; notes the others. Follows no link to a folder."""
    if len(folder.relative_to(root).parts) > _DEEPEST:
        sent.left_out.append((str(folder.relative_to(root)), "nested too deeply"))
        return
    ignored = [*ignored, *_ignore_files(folder)]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = folder / entry.name
        if entry.name in _IGNORE_FILES or any(matches(path) for matches in ignored):
            continue
        if why := _refusal(entry, path, root):
            sent.left_out.append((str(path.relative_to(root)), why))
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(path, root, ignored, sent)
        else:
            yield path


def _refusal(entry: os.DirEntry[str], path: Path, root: Path) -> str:
    """Why an entry of a folder is not sent; empty if it is."""
    names = [entry.name]
    if entry.is_symlink():
        target = path.resolve()
        if not target.is_relative_to(root):
            return "a link that leads out of the folder"
        if not target.is_file():
            return "a link to a folder, or to nothing"
        names += target.relative_to(root).parts
    elif not (entry.is_file() or entry.is_dir()):
        return "not a file"
    if any(_matches(name, _SECRET) and not _matches(name, _NO_SECRET) for name in names):
        return "may hold a secret"
    return "not needed" if any(_matches(name, _UNNEEDED) for name in names) else ""


def _copy(path: Path, target: Path) -> int:
    """Copy one file, or the file in the folder that a link leads to; its size in bytes."""
    with ExitStack() as stack:
        # Another file may stand there by now: a pipe would block, a link would lead elsewhere.
        descriptor = os.open(path.resolve(), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        source = stack.enter_context(open(descriptor, "rb"))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _LeftOut("not a file")
        if status.st_size > MOST_BYTES:
            raise UsageError(f"{path}: {status.st_size >> 20} MiB is too much to send; list it in .rayignore")
        if _KEY in source.read(_KEY_BYTES):
            raise _LeftOut("may hold a secret")
        source.seek(0)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = stack.enter_context(target.open("wb"))
        shutil.copyfileobj(source, copy, 1 << 20)
        os.fchmod(copy.fileno(), 0o700 if status.st_mode & stat.S_IXUSR else 0o600)
        return copy.tell()


def _ignore_files(folder: Path) -> list[Ignored]:
    """What the folder's `.gitignore` and `.rayignore` name, as Ray itself understands them."""
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    return get_excludes_from_ignore_files(folder, include_gitignore=True)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)


def _listed(paths: list[str]) -> str:
    shown = ", ".join(ascii(path)[1:-1] for path in paths[:_SHOWN])
    return shown if len(paths) <= _SHOWN else f"{shown} and {len(paths) - _SHOWN} more"
