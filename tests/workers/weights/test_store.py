"""Weights through an object store: a folder, a local S3 server, and a local Google Cloud Storage."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import fs

from tests.azure_server import LocalAzure, azure_server
from tests.gcs_server import BUCKET, LocalGcs, gcs_server
from tests.s3_server import Faults, s3_server
from troupe.workers.weights.file import RankWeights, WeightDigestMismatch, read_payload, write_payload
from troupe.workers.weights.store import StoredBytes, StoreFailed, WeightStore

CONTENT = np.arange(1000, dtype=np.uint8)


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, Callable[[Faults], None]]]:
    """A local S3 server: options of URLs, and what injects faults."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as (options, inject):
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        files, path = fs.FileSystem.from_uri(f"s3://weights?{options}&allow_bucket_creation=true")
        files.create_dir(path)
        yield options, inject


@pytest.fixture
def bucket(server: tuple[str, Callable[[Faults], None]]) -> str:
    """URL of a bucket in the server."""
    return f"s3://weights/runs?{server[0]}"


@pytest.fixture(scope="session")
def google() -> Iterator[LocalGcs]:
    """A local Google Cloud Storage."""
    with gcs_server() as server:
        yield server


@pytest.fixture
def google_bucket(google: LocalGcs) -> str:
    """URL of a folder in its bucket."""
    return f"gs://anonymous@{BUCKET}/runs?{google.options}"


@pytest.fixture(scope="session")
def azure() -> Iterator[LocalAzure]:
    """A local Azure Blob Storage."""
    with azure_server() as server:
        yield server


@pytest.fixture
def azure_container(azure: LocalAzure) -> str:
    """URL of a folder in its container."""
    return azure.url("runs")


@pytest.fixture(params=["file", "bucket", "google_bucket", "azure_container"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store."""
    return f"file://{tmp_path}/bucket" if request.param == "file" else request.getfixturevalue(request.param)


def paths(url: str) -> set[str]:
    """Names of all objects in a store."""
    files, root = fs.FileSystem.from_uri(url)
    found = files.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    return {info.base_name for info in found if info.type == fs.FileType.File}


def test_bytes_arrive_and_only_those_of_the_last_version_stay(url: str) -> None:
    store = WeightStore(url, "run")
    first = store.put("1.weights", CONTENT)
    assert np.array_equal(first.fetch(), CONTENT)
    assert store.put("1.weights", CONTENT) == first  # for an engine that joins late
    store.clear()
    store.put("2.weights", CONTENT)
    store.put("2.delta", CONTENT[:10])
    assert paths(url) == {"2.weights", "2.delta"}
    store.close()
    assert not paths(url)


def test_objects_that_are_gone_or_cut_are_refused(url: str) -> None:
    store = WeightStore(url, "run")
    stored = store.put("1.weights", CONTENT)
    with pytest.raises(StoreFailed, match=r"weight_sync\.url: .*1\.weights does not have the 1001 bytes that"):
        replace(stored, nbytes=1001).fetch()
    with pytest.raises(StoreFailed, match=r"does not have the 999 bytes"):
        replace(stored, nbytes=999).fetch()
    store.clear()
    with pytest.raises(StoreFailed, match=r"weight_sync\.url: cannot read .*1\.weights"):
        stored.fetch()
    store.close()


@pytest.mark.parametrize("nbytes", [1000, 25 << 20])
@pytest.mark.parametrize(
    "faults",
    [
        Faults("PUT", errors=2),
        Faults("GET", errors=2),
        Faults("POST", errors=1),
        Faults("GET", cuts=1),
        Faults("GET", delay_s=0.2),
        Faults("PUT", delay_s=0.2),
    ],
    ids=str,
)
def test_s3_that_fails_now_and_then_delivers_the_bytes(
    bucket: str, server: tuple[str, Callable[[Faults], None]], faults: Faults, nbytes: int
) -> None:
    """Small objects, and those that are uploaded in parts."""
    content = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    store, inject = WeightStore(bucket, "run"), server[1]
    try:
        inject(faults)
        assert np.array_equal(store.put("1.weights", content).fetch(), content)
    finally:
        inject(Faults())
        store.close()
    assert not paths(bucket)


@pytest.mark.parametrize(("method", "nbytes"), [("POST", 1000), ("PUT", 25 << 20), ("GET", 25 << 20)])
def test_google_that_fails_now_and_then_delivers_the_bytes(
    google: LocalGcs, google_bucket: str, method: str, nbytes: int
) -> None:
    content = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    store = WeightStore(google_bucket, "run")
    google.fail(method, 1)
    assert np.array_equal(store.put("1.weights", content).fetch(), content)
    assert google.fail(method, 0) == 0
    store.close()
    assert not paths(google_bucket)


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_azure_that_fails_now_and_then_delivers_the_bytes(azure: LocalAzure, azure_container: str, method: str) -> None:
    store = WeightStore(azure_container, "run")
    azure.fail(method, 1)
    stored = store.put("1.weights", CONTENT)
    assert stored.fetch().tobytes() == CONTENT.tobytes()
    store.clear()
    assert azure.fail(method, 0) == 0
    store.close()
    assert not paths(azure_container)


def test_an_azure_container_that_is_not_there_is_an_error(azure: LocalAzure) -> None:
    with pytest.raises(StoreFailed, match=r"weight_sync\.url"):
        WeightStore(azure.url("runs").replace("/weights/", "/nowhere/"), "run").put("1.weights", CONTENT)


def test_google_that_keeps_failing_or_has_no_such_bucket_is_an_error(google: LocalGcs, google_bucket: str) -> None:
    store = WeightStore(google_bucket.replace("retry_limit_seconds=3", "retry_limit_seconds=1"), "run")
    stored = store.put("1.weights", CONTENT)
    try:
        google.fail("GET", 1000)
        with pytest.raises(StoreFailed, match=r"weight_sync\.url: cannot read .*1\.weights"):
            stored.fetch()
        google.fail("POST", 1000)
        with pytest.raises(StoreFailed, match=r"weight_sync\.url: cannot write .*2\.weights"):
            store.put("2.weights", CONTENT)
    finally:
        google.fail("GET", 0)
        google.fail("POST", 0)
        store.close()
    assert not paths(google_bucket)
    with pytest.raises(StoreFailed, match=r"weight_sync\.url: .*"):
        WeightStore(f"gs://anonymous@nowhere/runs?{google.options}", "run")


def test_s3_that_keeps_failing_is_an_error(bucket: str, server: tuple[str, Callable[[Faults], None]]) -> None:
    """Arrow repeats a request for six seconds. A write fails as that to Google's store does, in the test above."""
    store, inject = WeightStore(bucket, "run"), server[1]
    stored = store.put("1.weights", CONTENT)
    try:
        inject(Faults("GET", errors=1000))
        with pytest.raises(StoreFailed, match=r"weight_sync\.url: cannot read .*1\.weights"):
            stored.fetch()
    finally:
        inject(Faults())
        store.close()
    assert not paths(bucket)


def test_what_a_killed_policy_left_is_removed_by_the_next_one_of_the_run(url: str) -> None:
    lives = WeightStore(url, "run")
    lives.put("1.weights", CONTENT)
    killed = f"""
import os, numpy as np
from troupe.workers.weights.store import WeightStore
for run, name in (("run", "2.weights"), ("other", "3.weights")):
    WeightStore({url!r}, run).put(name, np.ones(10, np.uint8))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", killed]).returncode == -9
    assert paths(url) == {"1.weights", "2.weights", "3.weights"}
    following = WeightStore(url, "run")
    assert paths(url) == {"1.weights", "3.weights"}
    other = WeightStore(url, "other")
    for store in (lives, following, other):
        store.close()
    assert not paths(url)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreFailed, match=r"weight_sync\.url: "):
        WeightStore(f"file://{tmp_path}/bucket", "run")


@pytest.mark.parametrize("url", ["nowhere://bucket", "file:relative", "s3://bucket?port=7"])
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(StoreFailed, match=r"weight_sync\.url: "):
        WeightStore(url, "run")


def test_what_a_store_gives_is_verified_as_any_payload(tmp_path: Path) -> None:
    """Here the object was replaced by another of the same size."""
    tensors = {"a": torch.arange(1000.0)}
    weights = RankWeights(tensors.items, [("a", torch.float32, (1000,))], rank=0, gathers=False)
    publisher = weights.publisher(tmp_path, "test")
    update = publisher.publish(1)
    assert update is not None
    store = WeightStore(f"file://{tmp_path}/bucket", "run")
    stored: StoredBytes = store.put("1.weights", read_payload(update))
    (tmp_path / "far").mkdir()
    there = replace(update, path=str(tmp_path / "far" / Path(update.path).name))
    write_payload(there, stored.fetch())
    read_payload(there)
    Path(stored.path).write_bytes(bytes(update.nbytes))
    write_payload(there, stored.fetch())
    with pytest.raises(WeightDigestMismatch):
        read_payload(there)
    publisher.close()
    store.close()
