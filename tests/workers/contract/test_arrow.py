"""Pickling of tables: the round trip is exact, large tables are not copied, slices leave out the rest."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable

import pyarrow as pa
import pytest

from benchmarks.data_plane import buffers, rollouts_table, train_table
from troupe.workers.contract import arrow
from troupe.workers.contract.algorithm_config import CriticLossConfig
from troupe.workers.contract.config import CriticConfig, ReferenceConfig, RolloutConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import REWARDS, ROLLOUTS
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.critic import CriticWorker
from troupe.workers.reference import ReferenceWorker
from troupe.workers.reward import RewardWorker
from troupe.workers.rollout import RolloutWorker

CRITIC = CriticConfig(
    model=ModelConfig(path=""), trainer=TrainerConfig(), loss=CriticLossConfig(), total_updates=1, seed=0, device="cpu"
)
SMALL, LARGE = rollouts_table(4, 50, 1), train_table(512, 1024, 1)


@pytest.fixture(autouse=True)
def pickled_tables() -> None:
    arrow.pickle_tables()


def moved(table: pa.Table, protocol: int = 5) -> tuple[pa.Table, list[pickle.PickleBuffer]]:
    """The unpickled table, and the out-of-band buffers."""
    apart: list[pickle.PickleBuffer] = []
    callback = apart.append if protocol == 5 else None
    data = pickle.dumps(table, protocol=protocol, buffer_callback=callback)
    return pickle.loads(data, buffers=apart if protocol == 5 else None), apart


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "table",
    [
        *(SMALL, LARGE, SMALL.slice(1, 2), LARGE.slice(3, 500), LARGE.slice(7, 5), ROLLOUTS.empty_table()),
        pa.concat_tables([SMALL, SMALL.slice(2)]),
        REWARDS.empty_table(),
    ],
)
def test_a_pickled_table_round_trips(table: pa.Table, protocol: int) -> None:
    got, _ = moved(table, protocol)
    assert got.equals(table) and got.schema.equals(table.schema, check_metadata=True)
    got.validate(full=True)


def test_large_tables_pickle_their_buffers_without_a_copy() -> None:
    assert LARGE.nbytes > arrow._SMALL_BYTES
    got, apart = moved(LARGE)
    own = {buffer.address for buffer in buffers(LARGE)}
    assert {pa.py_buffer(one).address for one in apart} == own == {buffer.address for buffer in buffers(got)}


def test_small_tables_are_one_buffer_that_is_read_in_place() -> None:
    got, apart = moved(SMALL)
    stream = pa.py_buffer(apart[0])
    assert len(apart) == 1
    assert all(0 <= buffer.address - stream.address < stream.size for buffer in buffers(got) if buffer.size)


@pytest.mark.parametrize("rows", [3, 300])
def test_a_slice_is_pickled_without_the_rest_of_its_table(rows: int) -> None:
    """A small or large slice of a large table."""
    part = LARGE.slice(100, rows)
    _, apart = moved(part)
    assert sum(one.raw().nbytes for one in apart) < 1.05 * part.nbytes + 8192


@pytest.mark.parametrize(
    "worker",
    [
        lambda: RolloutWorker(RolloutConfig.model_construct(), "rollout-0"),
        lambda: CriticWorker(CRITIC, "critic-0"),
        lambda: ReferenceWorker(ReferenceConfig.model_construct(), "reference-0"),
        lambda: RewardWorker(RewardConfig(functions=(RewardFunctionConfig(name="exact_match"),)), "reward-0"),
    ],
)
def test_a_worker_pickles_tables_this_way(worker: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(copyreg.dispatch_table, pa.Table)
    worker()
    assert len(moved(SMALL)[1]) == 1
