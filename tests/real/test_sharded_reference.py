"""A reference worker that divides its model over two processes, compared with one that has it whole."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from tests.processes import descendants
from tests.real.models import save_llama
from tests.real.ranks import rank_context, wait_for_ranks
from tests.workers.models.test_token_batch import train_table
from troupe.workers.contract.config import ReferenceConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.reference import ReferenceModel, ReferenceWorker
from troupe.workers.training.rank import own_peak

pytestmark = pytest.mark.real

TIMEOUT_S = 240.0
PLAN = RankPlan(((3, 0), (1,), (2,)), total_loss_tokens=8, total_sequences=4)
"""Three micro-batches: one of the two ranks has an empty one."""
SAMPLES = [([5, 6, 7], [8, 9]), ([11], [12, 13, 14, 15, 16]), ([17, 18], [3]), ([19, 20], [21])]
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}


def config(model: str, shards: int) -> ReferenceConfig:
    source = ModelConfig(path=model, dtype="float32")
    return ReferenceConfig(model=source, temperature=0.9, micro_batch_tokens=64, shards=shards, threads=1, device="cpu")


def by_row(scores: pa.Table) -> dict[str, list[float]]:
    """The log-probs by row."""
    columns = (scores[name].to_pylist() for name in ("prompt_uid", "sample_index", "ref_logprobs"))
    return {f"{uid}/{index}": logprobs for uid, index, logprobs in zip(*columns, strict=True)}


def _ranks() -> list[int]:
    """Process ids of the other ranks."""
    return [process.pid for process in descendants(os.getpid(), "multiprocessing.spawn")]


def scores(model: str, out: Path) -> None:
    """Score with a whole model and with a divided one; then lose the other rank."""
    with reported(out):
        whole = ReferenceWorker(config(model, 1), "reference-0")
        divided = ReferenceWorker(config(model, 2), "reference-1")
        whole.start()
        divided.start()
        table = train_table(SAMPLES)
        expected = whole.score(PLAN, table)
        found = [divided.score(PLAN, table.slice(0, 1), table.slice(1)) for _ in range(2)]
        peak = found[0][0].peak
        assert peak is not None
        facts = {
            "packs": [whole.packs(), divided.packs()],
            "rows": [expected[0].rows, *(summary.rows for summary, _ in found)],
            "scores": [by_row(expected[1]), *(by_row(table) for _, table in found)],
            "host": [peak.host, own_peak("cpu").host],
        }
        (out / "facts.json").write_text(json.dumps(facts))
        (rank,) = _ranks()
        os.kill(rank, signal.SIGKILL)
        time.sleep(30)


def closes(model: str, out: Path) -> None:
    """Start a divided model, let a call fail, and close it."""
    with reported(out):
        divided = ReferenceWorker(config(model, 2), "reference-0")
        divided.start()
        table = train_table(SAMPLES)
        with patch.object(ReferenceModel, "score", side_effect=MemoryError), pytest.raises(MemoryError):
            divided.score(PLAN, table)
        with pytest.raises(OSError, match="closed"):  # what the other rank has answered is not for this call
            divided.score(PLAN, table)
        divided.close()
        deadline = time.monotonic() + 30
        while _ranks() and time.monotonic() < deadline:
            time.sleep(0.1)
        (out / "left").write_text(str(_ranks()))


@contextmanager
def reported(out: Path) -> Iterator[None]:
    """Write an error to the file that the test reads."""
    try:
        yield
    except BaseException:
        (out / "error-0.txt").write_text(traceback.format_exc())
        raise


def run(target: Callable[[str, Path], None], folder: Path) -> int | None:
    """Exit code of a process that does this with a small model."""
    model = save_llama(folder / "model", **SIZES, num_key_value_heads=2)
    process = rank_context().Process(target=target, args=(model, folder))
    process.start()
    process.join(TIMEOUT_S)
    if (folder / "error-0.txt").exists() or process.is_alive():
        wait_for_ranks([process], folder, 0.0)
    return process.exitcode


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "code").write_text(str(run(scores, folder)))
    return folder


def test_a_divided_reference_scores_like_a_whole_one(out: Path) -> None:
    facts = json.loads((out / "facts.json").read_text())
    assert facts["packs"] == [True, True]
    assert facts["rows"] == [4, 4, 4]
    whole, *divided = facts["scores"]
    assert len(whole) == 4 and all(whole.values())
    for found in divided:
        assert found.keys() == whole.keys()
        for row, logprobs in whole.items():
            assert found[row] == pytest.approx(logprobs, abs=1e-5)


def test_the_memory_of_both_processes_is_reported(out: Path) -> None:
    both, own = json.loads((out / "facts.json").read_text())["host"]
    assert both > 1.3 * own


def test_the_worker_ends_with_a_rank_that_is_lost(out: Path) -> None:
    """The ranks wait for each other in every layer, so that a worker without one would hang."""
    assert (out / "code").read_text() == "1"


@pytest.mark.long
def test_a_call_that_fails_is_the_last_one_and_no_process_is_left_after_close(tmp_path: Path) -> None:
    assert run(closes, tmp_path) == 0
    assert (tmp_path / "left").read_text() == "[]"
