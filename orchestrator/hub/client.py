"""Access to the Hugging Face hub. No other module uses `huggingface_hub`.

The token comes from the environment (`HF_TOKEN`, or the login of `hf auth login`): `huggingface_hub` reads it, Troupe
never does, and nothing here takes, returns or logs it.
"""

from __future__ import annotations

import fnmatch
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2
from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import tqdm

from troupe.orchestrator.errors import TroupeError, first_line

hub_logging.disable_propagation()  # it prints its messages itself

_ATTEMPTS = 4
"""Attempts at a download; each resumes or repeats only the files that are not complete."""
_PAUSE_S = 2.0
"""Pause before the second attempt; it doubles before each further one."""

Progress = Callable[[int, int], None]
"""Called with the bytes received and the bytes in total."""


class HubError(TroupeError):
    """A repository cannot be used; the message gives the reason and the remedy."""

    def __init__(self, message: str, about: Literal["name", "revision"] = "name") -> None:
        super().__init__(message)
        self.about = about
        """Which of the two fields that name a repository is to be changed."""


@dataclass(frozen=True)
class Repo:
    """A repository of the hub."""

    kind: Literal["model", "dataset"]
    name: str

    @property
    def url(self) -> str:
        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


@dataclass(frozen=True)
class Snapshot:
    """Some files of a repository at a commit, in the driver's cache: every node has them in the same folder."""

    repo: Repo
    commit: str
    allow: tuple[str, ...]
    """Patterns of the files to download."""
    ignore: tuple[str, ...] = ()
    """Patterns of files among them to leave out."""
    cache: str = field(default_factory=lambda: str(Path(constants.HF_HUB_CACHE).resolve()))
    endpoint: str = field(default_factory=lambda: constants.ENDPOINT)

    def names(self, files: Sequence[str]) -> list[str]:
        """The files of a repository that belong to the snapshot."""
        allowed = [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in self.allow)]
        return [name for name in allowed if not any(fnmatch.fnmatch(name, pattern) for pattern in self.ignore)]


def resolve(repo: Repo, revision: str | None) -> str:
    """The commit of a branch or tag (main if None), or the one in the cache if the hub cannot be reached. Raises
    HubError if there is no such repository or revision, it cannot be read, or the hub cannot be reached."""
    with _reported(repo, revision):
        return HfApi().resolve_revision(repo.name, repo_type=repo.kind, revision=revision).resolved


def list_files(repo: Repo, commit: str) -> dict[str, int]:
    """Size in bytes of every file at a commit, from the cache or from the hub. Raises HubError."""
    with _reported(repo, commit):
        try:
            tree = get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=commit)
            return {entry.path: entry.size for entry in tree}
        except CachedRepoTreeNotFoundError:
            api = HfApi()
            look_up = api.model_info if repo.kind == "model" else api.dataset_info
            info = look_up(repo.name, revision=commit, files_metadata=True)
    return {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}


def config_folder(repo: Repo, commit: str) -> Path:
    """The folder of a model's snapshot with at least its `config.json`. Raises HubError."""
    with _reported(repo, commit):
        return Path(hf_hub_download(repo.name, "config.json", repo_type=repo.kind, revision=commit)).parent


def cached(snapshot: Snapshot) -> Path | None:
    """Folder of a snapshot that is known to be complete in the cache, or None if it is not. Uses no network."""
    name, kind = snapshot.repo.name, snapshot.repo.kind
    try:
        get_cached_repo_tree(name, repo_type=kind, revision=snapshot.commit, cache_dir=snapshot.cache)
        return Path(_download(snapshot, local_files_only=True))
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError, IncompleteSnapshotError):
        return None


def download(snapshot: Snapshot, progress: Progress | None = None) -> Path:
    """Downloads what the cache lacks of a snapshot and returns its folder; uses no network if the cache is complete. An
    interrupted download is retried, and resumed if the hub supports that. Concurrent downloads of a file into one cache
    wait for each other. Raises HubError if the files cannot be downloaded."""
    bar = _bar(progress)
    with _reported(snapshot.repo, snapshot.commit):
        for attempt in range(1, _ATTEMPTS):
            try:
                return Path(_download(snapshot, tqdm_class=bar))
            except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled):
                raise
            except (httpx2.TransportError, OSError):
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        return Path(_download(snapshot, tqdm_class=bar))


def download_all(snapshots: Sequence[Snapshot]) -> None:
    """Downloads several snapshots into this node's cache. Raises HubError."""
    for snapshot in snapshots:
        download(snapshot)


def _download(snapshot: Snapshot, **options: Any) -> str:
    return snapshot_download(
        snapshot.repo.name,
        repo_type=snapshot.repo.kind,
        revision=snapshot.commit,
        cache_dir=snapshot.cache,
        endpoint=snapshot.endpoint,
        allow_patterns=list(snapshot.allow),
        ignore_patterns=list(snapshot.ignore),
        **options,
    )


@contextmanager
def _reported(repo: Repo, revision: str | None) -> Iterator[None]:
    """Turns the errors of `huggingface_hub` into HubErrors with their remedies."""
    try:
        yield
    except RevisionNotFoundError:
        raise HubError(f"{repo.name} has no branch, tag or commit '{revision}'; see {repo.url}", "revision") from None
    except GatedRepoError:
        raise HubError(
            f"{repo.name} is gated: accept its terms at {repo.url} and set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError as error:
        raise HubError(_not_found(repo, error.response.status_code)) from None
    except HfHubHTTPError as error:
        raise HubError(_refused(repo, error)) from None
    except HFValidationError as error:
        raise HubError(f"{repo.name} is not a name on the hub: {first_line(error)}") from None
    except (RevisionResolutionError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise HubError(_unreachable(repo, error)) from None
    except OSError as error:
        raise HubError(f"{repo.name}: the download failed: {first_line(error)}") from None


def _not_found(repo: Repo, status: int) -> str:
    where = f"there is no {repo.kind} {repo.name} on {constants.ENDPOINT}"
    here = ", and no folder of this name" if repo.kind == "model" else ""
    hidden = "if it is private, set HF_TOKEN to a token that may read it"
    return f"{where}{here} ({status}): check the name; {hidden}"


def _refused(repo: Repo, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 401:
        return f"{constants.ENDPOINT} refuses the token (401): set HF_TOKEN to a valid one, or unset it"
    if status == 403:
        return f"{constants.ENDPOINT} refuses access (403): set HF_TOKEN to a token that may read {repo.name}"
    return f"{repo.name}: {constants.ENDPOINT} answers with status {status}: try again later"


def _unreachable(repo: Repo, error: Exception) -> str:
    here = (
        "is neither a folder here nor complete in the cache" if repo.kind == "model" else "is not complete in the cache"
    )
    cause = error.__cause__ or error
    if constants.HF_HUB_OFFLINE or isinstance(cause, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set: unset it for the download, or copy the files"
    else:
        why = (
            f"{constants.ENDPOINT} cannot be reached ({first_line(cause)}): check the network, HF_ENDPOINT and proxies"
        )
    return f"{repo.name} {here} ({constants.HF_HUB_CACHE}), and {why}"


def _bar(progress: Progress | None) -> type[tqdm]:
    """A silent progress bar for `snapshot_download` that reports the bytes that are complete."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(
                *args, **options | {"file": io.StringIO(), "disable": progress is None, "mininterval": 0.0}
            )

        def display(self, *_: Any, **__: Any) -> None:
            if self._counts and progress is not None:
                progress(int(self.n), int(self.total or 0))

    return Bar
