"""Checkpoints in an object store: a folder, and local servers of S3, which fails, of Google's store and of Azure's."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

import pytest
from pyarrow import fs

from tests.azure_server import azure_server
from tests.conftest import ROOT
from tests.gcs_server import BUCKET, gcs_server
from tests.orchestrator.test_controller import RolloutRun
from tests.s3_server import Faults, s3_server
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.training import remote_checkpoints
from troupe.orchestrator.training.checkpoint import (
    MANIFEST,
    MODEL,
    STATE,
    CheckpointError,
    CheckpointsTaken,
    CheckpointStore,
)
from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints
from troupe.orchestrator.training.saves import Uploads

Inject = Callable[[Faults], None]
PAGE = ROOT / "docs" / "explanation" / "faults.md"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Inject]]:
    """URL of a bucket in a local S3 server, and what injects faults."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as (options, inject):
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        files, path = fs.FileSystem.from_uri(f"s3://runs?{options}&allow_bucket_creation=true")
        files.create_dir(path)
        yield f"s3://runs/a?{options}", inject


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    """URL of a folder in a local server of Google Cloud Storage."""
    with gcs_server() as server:
        yield f"gs://anonymous@{BUCKET}/a?{server.options}"


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    """URL of a folder in a local server of Azure Blob Storage."""
    with azure_server() as server:
        yield server.url("a")


@pytest.fixture(params=["file", "s3", "gs", "abfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a store."""
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    if request.param == "s3":
        return request.getfixturevalue("server")[0]
    return request.getfixturevalue("google" if request.param == "gs" else "azure")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_checkpoints, "_PAUSE_S", 0.0)


def remote(url: str, tmp_path: Path, keep: int = 2) -> RemoteCheckpoints:
    """The checkpoints of a run of this test."""
    return RemoteCheckpoints(url, tmp_path.name, keep)


def saved(store: CheckpointStore, step: int, nbytes: int = 3000) -> Path:
    """A checkpoint with a file of random bytes in a folder."""
    path = store.begin(step)
    (path / "policy").mkdir()
    (path / "policy" / "rank0").write_bytes(random.Random(step).randbytes(nbytes))
    return store.commit(path, {"step": step}).path


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_fetched_checkpoint_is_the_uploaded_one_and_old_ones_are_removed(url: str, tmp_path: Path) -> None:
    here, there = CheckpointStore(tmp_path / "here", 9), CheckpointStore(tmp_path / "there", 9)
    copies = remote(url, tmp_path)
    assert copies.steps() == [] and copies.fetch(there, 0) is None
    paths = {step: saved(here, step) for step in (5, 10, 15)}
    for path in paths.values():
        copies.upload(path)
    copies.upload(paths[15])
    assert copies.steps() == [10, 15]
    found = copies.fetch(there, 0)
    assert found is not None and found.step == 15
    assert contents(found.path) == contents(paths[15])
    assert copies.fetch(there, 15) is None and there.steps() == [15]
    copies.upload(saved(here, 20), protected={10})  # the best one
    copies.upload(saved(here, 25), protected={10})
    assert copies.steps() == [10, 20, 25]


def test_a_fetched_spec_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    here, file = CheckpointStore(tmp_path / "here" / "checkpoints", 9), tmp_path / "spec.yaml"
    copies = remote(f"file://{tmp_path}/bucket", tmp_path)
    copies.fetch_spec(file)
    assert not list(tmp_path.iterdir())
    path = saved(here, 5)
    (tmp_path / "here" / "spec.yaml").write_text("name: a\n")
    copies.upload(path)
    copies.fetch_spec(file)
    assert file.read_text() == "name: a\n" and file.stat().st_mode & 0o777 == 0o600


def test_a_complete_copy_stays_while_a_stop_adds_samples(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copies = CheckpointStore(tmp_path / "here", 9), remote(url, tmp_path)
    copies.upload(saved(store, 5))
    sent: list[str] = []
    send = copies._send
    monkeypatch.setattr(copies, "_send", lambda file, to: (sent.append(to.name), send(file, to)))
    path = store.begin_again(5)
    (path / "samples").mkdir()
    (path / "samples" / "groups.json").write_text("{}")
    copies.upload(store.commit(path, {"step": 5}).path)
    assert copies.steps() == [5] and sent == []
    saved_otherwise = store.begin(5)
    (saved_otherwise / "policy").mkdir()
    (saved_otherwise / "policy" / "rank0").write_bytes(b"other")
    copies.upload(store.commit(saved_otherwise, {"step": 5}).path)
    assert sent == ["rank0", "state.json", "manifest.json"]


def test_a_protected_step_whose_upload_failed_is_uploaded_with_the_next(url: str, tmp_path: Path) -> None:
    store, copies = CheckpointStore(tmp_path / "here", 9), remote(url, tmp_path, keep=1)
    saved(store, 5)
    copies.upload(saved(store, 10), protected={5})
    assert copies.steps() == [5, 10]


def test_the_last_copy_with_a_model_stays_where_the_newest_has_none(url: str, tmp_path: Path) -> None:
    """As in the run's folder: the export of steps 10 and 15 failed."""
    store, copies = CheckpointStore(tmp_path / "here", 9), remote(url, tmp_path, keep=1)
    path = store.begin(5)
    (path / MODEL).mkdir()
    (path / MODEL / "config.json").write_text("{}")
    copies.upload(store.commit(path, {"step": 5}).path)
    copies.upload(saved(store, 10))
    copies.upload(saved(store, 15))
    assert copies.steps() == [5, 15]


DAMAGE = ("no manifest: the upload was interrupted", "a byte", "a file missing", "a manifest that leads outside")
"""What is wrong with the newest copy, as the page of faults names it."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_is_never_used(url: str, tmp_path: Path, damage: str) -> None:
    """An upload that was interrupted has no manifest; the next upload removes it."""
    here, there = CheckpointStore(tmp_path / "here", 9), CheckpointStore(tmp_path / "there", 9)
    copies = remote(url, tmp_path)
    for step in (1, 2):
        copies.upload(saved(here, step))
    files, root = fs.FileSystem.from_uri(url)
    newest = PurePosixPath(root) / tmp_path.name / "step-000002"
    if damage == "a file missing":
        files.delete_file(str(newest / STATE))
    elif damage.startswith("no manifest"):
        files.delete_file(str(newest / MANIFEST))
    else:
        text = b'{"files": {"../x": {}}}' if "outside" in damage else bytes(3000)
        with files.open_output_stream(str(newest / (MANIFEST if "outside" in damage else "policy/rank0"))) as sink:
            sink.write(text)
    found = copies.fetch(there, 0)
    assert found is not None and found.step == 1 and there.steps() == [1]
    assert [entry.name for entry in there.directory.iterdir()] == ["step-000001"]
    if damage.startswith("no manifest"):
        copies.upload(saved(here, 3))
        names = {info.base_name for info in files.get_file_info(fs.FileSelector(str(newest.parent)))}
        assert names == {"step-000001", "step-000003"}


FAULTS = {
    "two answers of 500 to writes (PUT)": Faults("PUT", errors=2),
    "two answers of 500 to reads (GET)": Faults("GET", errors=2),
    "two answers of 500 to questions about an object (HEAD)": Faults("HEAD", errors=2),
    "an answer of 500 to a deletion (DELETE)": Faults("DELETE", errors=1),
    "an answer of 500 to an upload in parts or a deletion of many (POST)": Faults("POST", errors=1),
    "two connections cut while it is written": Faults("PUT", cuts=2),
    "two connections cut while it is read": Faults("GET", cuts=2),
    "0.1 s before each answer to a read": Faults("GET", delay_s=0.1),
    "0.1 s before each answer to a write": Faults("PUT", delay_s=0.1),
}
"""What goes wrong with requests, as the page of faults names it."""
ALWAYS = "500 to every write"


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_store_that_fails_now_and_then_has_the_whole_checkpoint(
    server: tuple[str, Inject], tmp_path: Path, faults: Faults
) -> None:
    """One file is uploaded in parts."""
    (url, inject), here = server, CheckpointStore(tmp_path / "here", 9)
    copies, path = remote(url, tmp_path), saved(here, 3, nbytes=12 << 20)
    try:
        inject(faults)
        copies.upload(path)
        inject(faults)
        found = copies.fetch(CheckpointStore(tmp_path / "there", 9), 0)
    finally:
        inject(Faults())
    assert found is not None and contents(found.path) == contents(path)


def test_an_upload_that_fails_is_not_found(
    server: tuple[str, Inject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow repeats a request for six seconds, so the upload itself is not repeated here."""
    monkeypatch.setattr(remote_checkpoints, "_TRIES", 1)
    (url, inject), here = server, CheckpointStore(tmp_path / "here", 9)
    copies = remote(url, tmp_path)
    copies.upload(saved(here, 1))
    try:
        inject(Faults("PUT", errors=10**6))
        with pytest.raises(CheckpointError, match=r"checkpoint\.path: "):
            copies.upload(saved(here, 2))
    finally:
        inject(Faults())
    assert copies.steps() == [1]


class CopiedRun(RolloutRun):
    """A run with copies of its checkpoints."""

    def __init__(self, out: Path, copies: RemoteCheckpoints, resume: bool = False) -> None:
        super().__init__(out, resume=resume, checkpoint={"every_steps": 1}, failures={"failed_saves": 1})
        self.copies = copies


def test_the_page_of_faults_lists_what_is_injected() -> None:
    section = PAGE.read_text().partition("## An object store that fails\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [*FAULTS, ALWAYS, *DAMAGE]


def test_a_run_uploads_its_checkpoints_and_resumes_from_them_in_an_empty_folder(url: str, tmp_path: Path) -> None:
    copies = remote(url, tmp_path)
    CopiedRun(tmp_path / "one", copies).run_until(2)
    assert max(copies.steps()) == CheckpointStore(tmp_path / "one" / "checkpoints", 2).steps()[-1] >= 2
    done = copies.fetch(CheckpointStore(tmp_path / "two" / "checkpoints", 2), 0)
    assert done is not None
    resumed = CopiedRun(tmp_path / "two", copies, resume=True)
    assert resumed.run().steps_done == 4 and copies.steps()[-1] == 4
    assert len(resumed.policies[0].updates) == 4 - done.step


def test_a_run_ends_with_an_error_where_its_last_checkpoint_was_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = remote(f"file://{tmp_path}/bucket", tmp_path)

    def refuse(file: Path, to: PurePosixPath) -> None:
        raise OSError("no space")

    monkeypatch.setattr(copies, "_send", refuse)
    with pytest.raises(TroupeError, match=r"is in the run's folder, but was not uploaded: .*no space"):
        CopiedRun(tmp_path / "one", copies).run()
    assert CheckpointStore(tmp_path / "one" / "checkpoints", 2).latest() is not None
    assert copies.steps() == []


def claimed(url: str, store: CheckpointStore, *, resumed: bool = False) -> RemoteCheckpoints:
    """The copies of a run `a`, as a process that starts or resumes it opens them."""
    store.prepare()
    copies = RemoteCheckpoints(url, "a", 2)
    copies.claim(store.directory, resumed=resumed)
    return copies


def test_two_runs_of_one_name_do_not_write_to_the_same_place(url: str, tmp_path: Path) -> None:
    """Neither one that starts at the same time, nor one that has a folder of its own, nor a copy of the folder."""
    url = url.replace("/a?", f"/{tmp_path.name}?")
    one, other = CheckpointStore(tmp_path / "one", 9), CheckpointStore(tmp_path / "other", 9)
    early, late = claimed(url, one), claimed(url, other)
    early_path, late_path = saved(one, 5), saved(other, 3)
    late.upload(late_path)
    with pytest.raises(
        CheckpointsTaken, match=rf"the checkpoints of 'a' are written by another run \(.*{other.directory}"
    ):
        early.upload(early_path)
    with pytest.raises(CheckpointsTaken, match="set another name"):
        claimed(url, one)
    assert late.steps() == [3]
    shutil.copytree(other.directory, tmp_path / "copy")
    again = claimed(url, other)  # it resumes in its own folder
    with pytest.raises(CheckpointsTaken):
        claimed(url, CheckpointStore(tmp_path / "copy", 9))
    again.upload(saved(other, 4))
    lost = claimed(url, CheckpointStore(tmp_path / "elsewhere", 9), resumed=True)  # it resumes from a copy
    lost.upload(saved(other, 6))
    with pytest.raises(CheckpointsTaken):
        again.upload(saved(other, 7))


def test_a_place_that_another_run_took_is_no_failed_save(tmp_path: Path) -> None:
    url, store = f"file://{tmp_path}/bucket", CheckpointStore(tmp_path / "here", 9)
    copies = claimed(url, store)
    claimed(url, CheckpointStore(tmp_path / "other", 9))

    async def run() -> None:
        uploads = Uploads(copies, tolerated=3, timeout_s=60.0)
        uploads.start(saved(store, 4))
        await uploads.settle()

    with pytest.raises(CheckpointsTaken, match="set another name"):
        asyncio.run(run())


@pytest.mark.parametrize("mended", [True, False])
def test_a_run_repeats_the_upload_that_failed_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """The last checkpoint is written already, and its upload is tolerated as any other; nothing follows it."""
    copies = remote(f"file://{tmp_path}/bucket", tmp_path)
    upload, failed = copies.upload, list[Path]()

    def fails_once(checkpoint: Path, protected: Collection[int] = ()) -> None:
        if not mended or not failed:
            failed.append(checkpoint)
            raise CheckpointError(5, "no space", str(checkpoint))
        upload(checkpoint, protected)

    monkeypatch.setattr(copies, "upload", fails_once)

    async def run() -> None:
        uploads = Uploads(copies, tolerated=3, timeout_s=60.0)
        uploads.start(saved(CheckpointStore(tmp_path / "here", 9), 4), {4})
        await uploads.settle()
        await uploads.settle(last=True)
        await uploads.settle(last=True)

    if mended:
        asyncio.run(run())
        assert copies.steps() == [4] and len(failed) == 1
    else:
        with pytest.raises(TroupeError, match=r"was not uploaded: .*no space"):
            asyncio.run(run())
        assert len(failed) == 2


def test_an_upload_that_takes_too_long_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process waits for the threads of an upload when it ends: a slow one would keep the error back for hours."""
    monkeypatch.setattr(remote_checkpoints, "_COPY_BYTES", 1)
    copies = remote(f"file://{tmp_path}/bucket", tmp_path)
    checkpoint = saved(CheckpointStore(tmp_path / "here", 9), 4)
    (checkpoint / "large").write_bytes(bytes(4 << 20))

    async def run() -> None:
        uploads = Uploads(copies, tolerated=3, timeout_s=0.2)
        uploads.start(checkpoint)
        await uploads.settle()

    with pytest.raises(TroupeError, match=r"its upload takes more than 0.2 s \(schedule.train_timeout_s\)"):
        asyncio.run(run())
    assert remote(f"file://{tmp_path}/bucket", tmp_path).steps() == []


@pytest.mark.parametrize("url", ["nowhere://bucket", "file:relative", "s3://bucket?port=7"])
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.path: "):
        RemoteCheckpoints(url, "run", 1)
