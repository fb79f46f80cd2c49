"""Memory of pods: the numbers of `troupe plan`, and what else a pod's limit covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.platforms.kubernetes.manifests import (
    GRPO,
    NODE,
    check,
    cluster_of,
    deploy,
    documents,
    gib,
    pod_of,
    pods_of,
    runs,
    write_model,
)
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.plan import plan
from troupe.workers.contract.units import GIB


def limit(document: dict[str, Any], group: str) -> int:
    return gib(pod_of(document, group)["containers"][0]["resources"]["limits"]["memory"])


def shm(document: dict[str, Any], group: str) -> int:
    (volume,) = (volume for volume in pod_of(document, group)["volumes"] if volume["name"] == "shm")
    return gib(volume["emptyDir"]["sizeLimit"])


def test_a_pod_has_the_memory_that_the_plan_adds_up(tmp_path: Path) -> None:
    model = write_model(tmp_path / "72b", "72b")
    job, _ = documents(NODE, f"model.path={model}")
    check(job)
    spec = runs(NODE, f"model.path={model}")[0]
    planned = plan(spec, [Node("pod", 48 + 8, 8)]).memory.nodes[0].total / GIB
    assert 136 < planned < 1.2 * 136  # the four ranks read a share each of the model: 136 GiB in bfloat16
    assert planned < limit(job, "gpu") < 1.2 * planned + 20


def test_a_pod_with_one_gpu_has_the_memory_of_one_ranks_share_of_a_72b_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "72b", "72b")
    job, _ = documents(NODE, f"model.path={model}", gpus_per_node=1)
    assert 136 / 4 < limit(job, "gpu") < 136 / 4 + 20


def test_a_model_that_an_earlier_stage_writes_has_the_size_of_the_one_it_trains(tiny_chain: list[str]) -> None:
    _, notes = deploy(GRPO.with_name("tiny-three-stage.yaml"), *tiny_chain, pvc=["models:/"[:-1] + "/m"])
    assert not any("memory" in note for note in notes)


@pytest.fixture
def tiny_chain(tmp_path: Path) -> list[str]:
    return [f"model.path={write_model(tmp_path / 'small', '7b')}"]


def test_a_model_of_unknown_size_is_reported_and_gets_64_gib_per_gpu() -> None:
    job, _ = documents(NODE)
    assert limit(job, "gpu") == 8 * 64 and shm(job, "gpu") == 4 * 64
    _, notes = deploy(NODE, pvc=["models:/models"])
    assert notes == [
        "memory is not planned (models/policy-7b-instruct/config.json: No such file or directory): "
        "pods have 64 GiB for each GPU (set --gib-per-node, or deploy where the model is)"
    ]


def test_the_memory_of_pods_with_gpus_can_be_set() -> None:
    job, _ = documents(NODE, gib_per_node=900)
    assert limit(job, "gpu") == 900 and limit(job, "cpu") == 8 * 4
    with pytest.raises(UsageError, match=r"--gib-per-node 8: /dev/shm \(\d+ GiB\) is part of a pod's memory"):
        documents(NODE, gib_per_node=8)


def test_shared_memory_holds_the_store_two_weight_files_and_a_segment_per_gpu(tmp_path: Path) -> None:
    model = write_model(tmp_path / "72b", "72b")
    by_nccl, _ = documents(NODE, f"model.path={model}")
    by_file, _ = documents(NODE, f"model.path={model}", "weight_sync.backend=shm")
    weights = 2 * 72.7e9 / GIB
    assert shm(by_nccl, "gpu") == 2 + 8 + 1
    assert shm(by_file, "gpu") - shm(by_nccl, "gpu") == pytest.approx(2 * weights, abs=2)
    assert limit(by_file, "gpu") - limit(by_nccl, "gpu") == pytest.approx(2 * weights, abs=2)
    assert shm(documents(NODE, f"model.path={model}", shm_gib=40)[0], "gpu") == 40


def test_a_pod_with_gpus_has_room_for_what_the_plan_does_not_count(tmp_path: Path) -> None:
    model = write_model(tmp_path / "7b", "7b")
    assert limit(documents(NODE, f"model.path={model}")[0], "gpu") == 8 * 16


def test_the_object_store_grows_with_the_batch_and_so_does_the_head() -> None:
    small, _ = documents(NODE)
    large, _ = documents(NODE, "schedule.prompts_per_step=2048")

    def stores(document: dict[str, Any]) -> set[int]:
        cluster = cluster_of(document)
        params = [group["rayStartParams"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]
        return {int(one["object-store-memory"]) // GIB for one in params}

    (before,), (after,) = stores(small), stores(large)
    assert before == 2 < after
    assert limit(large, "head") - limit(small, "head") == after - before


def test_a_pod_without_gpus_has_room_for_the_users_code() -> None:
    job, _ = documents(NODE)
    assert limit(job, "cpu") == 8 * 4


def test_every_pod_of_a_run_on_cpus_has_the_memory_of_its_engines(tmp_path: Path) -> None:
    model = write_model(tmp_path / "7b", "7b")
    job, _ = documents(GRPO, f"model.path={model}")
    check(job)
    assert [name for name, _ in pods_of(job)] == ["head", "cpu"]
    assert limit(job, "cpu") > 2 * 7.6 * 2 * 0.93
