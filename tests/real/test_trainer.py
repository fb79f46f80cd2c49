"""The trainers on real DeepSpeed: ZeRO 0-3, one and two ranks, every data type, compared with plain torch.

All scenarios run in two process groups, one of one rank and one of two ranks; the tests compare the files that they
write. At the end each group loads the other's checkpoints: from one rank to two ranks and back.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.real import transfers
from tests.real.models import save_llama
from tests.real.poison import poisoned
from tests.real.ranks import meet, rank_context, reported, wait_for_ranks
from tests.workers.models.test_token_batch import train_table
from troupe.workers.algorithms.policy_loss import PolicyTokens, policy_loss, token_weights
from troupe.workers.contract.algorithm_config import (
    AdvantageConfig,
    CriticLossConfig,
    NaturalGradientConfig,
    PolicyLossConfig,
)
from troupe.workers.contract.config import (
    CHUNK_LOGITS,
    CriticConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplingConfig,
    TeacherSettings,
)
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import TEXTS, RankPlan, UpdateMetrics
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.weight_backends import TransferBackend
from troupe.workers.critic import CriticWorker
from troupe.workers.models.modeling import CausalLogprobs, load_causal, score, torch_dtype
from troupe.workers.models.ragged import ragged
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.policy import PolicyWorker
from troupe.workers.reference import ReferenceWorker
from troupe.workers.training.background_save import BackgroundWriter, Write
from troupe.workers.training.optimizer import learning_rate
from troupe.workers.training.rank import TrainingRank
from troupe.workers.weights.file import read_weights

pytestmark = pytest.mark.long

STAGES = {"float32": (0, 1, 3), "bfloat16": (0, 2, 3), "float16": (0,)}
"""ZeRO stages of each type. Stages 1 and 2 share DeepSpeed's optimizer and every branch of Troupe; with float16 only
the loss scale differs."""
SCALED = (0, 1, 3)
"""Stages in which a gradient of float16 overflows."""
CASES = [(stage, dtype) for dtype, stages in STAGES.items() for stage in stages]
CHANGED = [(0, "float32"), (2, "bfloat16"), (3, "float32")]
"""Cases in which the settings of the optimizer change on a resume."""
POISONED = [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16")]
"""Cases in which the files of a checkpoint contain code."""
OVERFLOWING = 100.0
"""Factor of the advantages with which the gradient of float16 overflows at the first loss scales."""
SENT: tuple[TransferBackend, ...] = ("gloo", "ipc")
"""Back-ends over which two ranks with ZeRO-3 send their weights."""
ONE_BATCH = [[tuple(range(6))]]
MANY_BATCHES = [[(3, 0), (), (5, 1, 2, 4)]]
TWO_RANKS = [[(0, 1), (4, 5, 2)], [(), (3,)]]
LOSS_TOKENS, SEQUENCES = 21, 7
EMA_DECAY = 0.75
TIMEOUT_S = 600.0
PIECES = ([11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34])
TEXT_TOKENS = 8
TEXT_LAYOUT = {1: [((0,), (2, 1))], 2: [((0, 1), ()), ((), (2,))]}
"""Micro-batches of text pieces by world size and rank."""
PTX_COEF = 0.5
UPDATES = 3


def batch() -> pa.Table:
    """Six rows of different lengths, one without a response. The totals count a seventh, zero-advantage row."""
    generator = torch.Generator().manual_seed(5)
    sizes = [(3, 5), (1, 1), (4, 7), (2, 0), (6, 2), (1, 4)]

    def ids(count: int) -> list[int]:
        return torch.randint(3, 4096, (count,), generator=generator).tolist()

    def floats(low: float, high: float) -> list[list[float]]:
        return [(low + (high - low) * torch.rand(size, generator=generator)).tolist() for _, size in sizes]

    return train_table(
        [(ids(prompt), ids(response)) for prompt, response in sizes],
        rollout_logprobs=floats(-9.0, -7.0),
        ref_logprobs=floats(-9.0, -7.0),
        advantages=floats(-1.0, 2.0),
        values=floats(-1.0, 1.0),
        returns=floats(-1.0, 1.0),
    )


def grouped() -> pa.Table:
    """Two groups of three samples; the samples of a group share their prompt."""
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 4096, (size,), generator=generator).tolist() for size in (9, 5)]
    sizes = (4, 0, 6, 2, 3, 1)
    samples = [
        (prompts[row // 3], torch.randint(3, 4096, (size,), generator=generator).tolist())
        for row, size in enumerate(sizes)
    ]
    advantages = [torch.randn(size, generator=generator).tolist() for size in sizes]
    table = train_table(
        samples,
        rollout_logprobs=[[-8.0] * n for n in sizes],
        ref_logprobs=[[-8.1] * n for n in sizes],
        advantages=advantages,
    )
    uids = pa.array([f"g{row // 3}" for row in range(6)], pa.string())
    return table.set_column(table.column_names.index("prompt_uid"), "prompt_uid", uids)


def with_advantages(rows: list[list[float]]) -> pa.Table:
    """The batch with these advantages."""
    table = batch()
    index = table.column_names.index("advantages")
    return table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))


def batch_with_nan() -> pa.Table:
    """The batch with a NaN advantage in row 5."""
    rows: list[Any] = batch().column("advantages").to_pylist()
    rows[5][1] = math.nan
    return with_advantages(rows)


def overflowing() -> pa.Table:
    """The batch with advantages whose gradient overflows in float16 at first."""
    rows: list[Any] = batch().column("advantages").to_pylist()
    return with_advantages([[OVERFLOWING * value for value in row] for row in rows])


def rank_plan(layout: list[list[tuple[int, ...]]], rank: int, *, packed: bool = True) -> RankPlan:
    pieces = RankPlan(TEXT_LAYOUT[len(layout)][rank], TEXT_TOKENS, len(PIECES), packed)
    return RankPlan(tuple(layout[rank]), LOSS_TOKENS, SEQUENCES, packed, texts=pieces)


def texts() -> pa.Table:
    """Three pieces of text."""
    rows = [
        {
            "prompt_uid": f"t{number}",
            "sample_index": 0,
            "attempt": 0,
            "prompt_ids": piece[:1],
            "response_ids": piece[1:],
            "loss_mask": [True] * (len(piece) - 1),
        }
        for number, piece in enumerate(PIECES)
    ]
    return pa.Table.from_pylist(rows, schema=TEXTS)


def trainer(stage: int) -> TrainerConfig:
    # With a large epsilon Adam does not amplify rounding errors of tiny gradients to full steps, and the result
    # depends on the size of the gradient. The large micro-batch makes the output head compute in three chunks.
    return TrainerConfig(
        learning_rate=1e-2,
        adam_eps=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        schedule="linear",
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        gradient_checkpointing=stage in (1, 3),
        micro_batch_tokens=3 * CHUNK_LOGITS["cpu"] // 4096,
        threads=1,
        ema_decay=EMA_DECAY,
    )


def policy_config(model: str, stage: int, dtype: str) -> PolicyConfig:
    return PolicyConfig(
        model=ModelConfig(path=model, dtype=dtype),  # pyright: ignore[reportArgumentType]
        trainer=trainer(stage),
        loss=PolicyLossConfig(kl_coef=0.1, entropy_coef=0.01),
        advantage=AdvantageConfig(estimator="group"),
        sampling=SamplingConfig(temperature=0.9, max_tokens=8),
        run_id="trainer-test",
        reference_model=ModelConfig(path=model, dtype=dtype) if stage == 1 else None,  # pyright: ignore
        teachers={"teacher.own": TeacherSettings(average=True)},
        total_updates=20,
        seed=1,
        device="cpu",
        ptx_coef=PTX_COEF,
        share_prompts=True,
    )


def weights_of(worker: TrainingRank) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in worker.engine.named_weights()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def contents(folder: Path) -> dict[str, bytes]:
    """SHA-256 of every file."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): sha256(file.read_bytes()).digest() for file in files}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class LateWriter(BackgroundWriter):
    """Writes when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def _write(self, state: Sequence[Write], exports: Sequence[Write]) -> None:
        self.released.wait()
        super()._write(state, exports)


def by_uid(table: pa.Table, column: str) -> dict[str, list[float]]:
    uids: list[Any] = table["prompt_uid"].to_pylist()
    values: list[Any] = table[column].to_pylist()
    return dict(zip(uids, values, strict=True))


class Scenario:
    """Runs all scenarios on one rank. Rank 0 writes the weights that the tests read."""

    def __init__(self, rank: int, world: int, model: str, out: Path, other: Path) -> None:
        """`other` is the output folder of the group of the other size."""
        self.rank, self.world, self.model, self.out, self.other = rank, world, model, out, other
        self.facts: dict[str, Any] = {}
        self.layout = TWO_RANKS if world == 2 else MANY_BATCHES

    def save_weights(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        if self.rank == 0:
            save_file(weights, self.out / f"{name}.safetensors")

    def record(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def policy(self, worker: PolicyWorker, stage: int, dtype: str) -> None:
        """Update, save, skip an update with NaN, update again; then repeat from the checkpoint."""
        name = f"{stage}-{dtype}"
        checkpoint = str(self.out / f"checkpoint-{name}")
        plan, table = rank_plan(self.layout, self.rank), batch()
        summary, scores = worker.compute_logprobs(plan, table.slice(0, 2), table.slice(2, 4))
        self.record(f"logprobs-{name}", by_uid(scores, "old_logprobs"))
        self.record(f"rows-{name}", summary.rows)
        metrics = [worker.update(plan, table, 0.0, texts())]
        self.record(f"padding-{name}", metrics[0].values["padding"])
        before, digest_before = weights_of(worker), worker.digest()
        numbers = sum(weight.numel() for weight in before.values())
        released = [worker.offload_states() / numbers, worker.offload_states()]
        self.record(f"offloaded-{name}", [*released, worker.digest() == digest_before])
        with worker.engine._files.tried():  # which changes nothing
            worker.engine._save_shards(f"{checkpoint}-trial")
        worker.save(checkpoint)  # from host memory
        worker.export(f"{checkpoint}-model")
        worker.export(f"{checkpoint}-average", average=True)
        writer = worker._writer = LateWriter()
        late = str(self.out / f"late-{name}")
        worker.begin_save(late, f"{late}-model", f"{late}-average")
        skipped = worker.update(plan, batch_with_nan(), 0.0, texts())
        self.record(
            f"skip-{name}", [skipped.skipped, equal(before, weights_of(worker)), str(skipped.values["grad_norm"])]
        )
        drawn = torch.rand(3)
        metrics += [worker.update(plan, table, 0.0, texts()) for _ in range(UPDATES - 2)]
        worker.store_distributions(plan, table, 1)
        metrics.append(worker.update(plan, table, 0.0, texts()))
        self.record(f"divergence-{name}", worker.divergence())
        end, digest = weights_of(worker), worker.digest()
        self.save_weights(f"end-{name}", end)
        self.record(f"metrics-{name}", [self.flatten(item) for item in metrics])
        worker.export(str(self.out / f"average-{name}"), average=True)
        if stage < 3:
            _, taught = worker.teacher_logprobs(plan, "teacher.own", table.slice(0, 2), table.slice(2, 4))
            self.record(f"taught-{name}", by_uid(taught, "teacher.own"))
        self.record(f"unchanged-{name}", equal(end, weights_of(worker)))
        self.record(f"late-{name}", self.late_files(worker, writer, checkpoint, late))
        if stage in (0, 3):
            worker.export(str(self.out / f"export-{name}"))
            published = worker.publish_weights(7)
            self.record(f"published-{name}", published is not None)
            if published is not None:
                received = {key: tensor.clone() for key, tensor in read_weights(published)}
                self.record(f"received-{name}", [published.version, equal(received, end)])
                Path(published.path).unlink()

            if stage == 3 and self.world == 2 and dtype == "float32":
                for backend in SENT:
                    self.record(f"sent-{backend}", transfers.send(worker.engine, backend))

        resumed = PolicyWorker(policy_config(self.model, stage, dtype), "resumed")
        resumed.build()
        resumed.load(checkpoint)
        same_random = torch.equal(torch.rand(3), drawn)
        # The skipped update also advanced the learning-rate schedule.
        resumed.update(plan, batch_with_nan(), 0.0, texts())
        for _ in range(UPDATES - 1):
            resumed.offload_states()
            resumed.update(plan, table, 0.0, texts())
        resumed.offload_states()
        self.record(f"resume-{name}", [same_random, equal(end, weights_of(resumed))])
        repeated = digest == resumed.digest()
        self.record(f"digests-{name}", [repeated, digest != digest_before])
        resumed.export(str(self.out / f"average-resumed-{name}"), average=True)
        self.shortened_step(resumed, plan, table, name)

    def late_files(self, worker: PolicyWorker, writer: LateWriter, checkpoint: str, late: str) -> list[Any]:
        """Let what was copied before the updates be written: [done before, after, refused meanwhile, what differs]."""
        statuses, refused = [worker.save_status(late)], ""
        try:
            worker.save(checkpoint)
        except RuntimeError as error:
            refused = str(error)
        writer.released.set()
        while not (status := worker.save_status(late)).done:
            time.sleep(0.01)
        statuses.append(status)
        torch.distributed.barrier()
        trees = [
            contents(Path(f"{start}{part}")) for part in ("", "-model", "-average") for start in (checkpoint, late)
        ]
        differ = [name for one, other in zip(trees[::2], trees[1::2], strict=True) for name in differing(one, other)]
        torch.distributed.barrier()
        return [
            *([one.done, one.failed + one.export_failed] for one in statuses),
            refused == "an earlier checkpoint is still being written",
            sum(map(len, trees)),
            differ,
        ]

    def shortened_step(self, worker: PolicyWorker, plan: RankPlan, table: pa.Table, name: str) -> None:
        """Take a step, halve it, train on, go back to before it."""
        worker.store_distributions(plan, table, 1, weights=True)
        before = weights_of(worker)
        worker.update(plan, table, 0.0, texts())
        after, whole = weights_of(worker), worker.divergence()
        half = worker.shorten_step(0.5)
        halved = weights_of(worker)
        middle = {key: (before[key].double() + after[key].double()) / 2 for key in before}
        gaps = [float((halved[key].double() - middle[key]).abs().max()) for key in before]
        moved = [float((after[key].double() - before[key].double()).abs().max()) for key in before]
        # A step without gradient leaves a weight as the optimizer's own copy has it.
        worker.update(plan, batch_with_nan(), 0.0, texts())
        kept = equal(halved, weights_of(worker))
        none = worker.shorten_step(0.0)
        restored = equal(before, weights_of(worker))
        worker.discard_stored()
        self.record(f"shortened-{name}", [max(gaps), max(moved), whole[0], half[0], none[0], kept, restored])

    def flatten(self, metrics: UpdateMetrics) -> dict[str, float]:
        """Without what depends on time and layout."""
        values = {name: value for name, value in metrics.values.items() if name not in ("padding", "tokens_per_s")}
        return {**values, **{f"sum_{name}": value for name, value in metrics.sums.items()}}

    def whole_batch(self, stage: int) -> None:
        """Updates on one rank with all rows padded in one micro-batch."""
        worker = PolicyWorker(policy_config(self.model, stage, "float32"), "whole")
        worker.build()
        plan = rank_plan(ONE_BATCH, 0, packed=False)
        worker.update(plan, batch(), 0.0, texts())
        worker.update(plan, batch_with_nan(), 0.0, texts())
        for _ in range(UPDATES - 1):
            worker.update(plan, batch(), 0.0, texts())
        self.save_weights(f"whole-{stage}", weights_of(worker))

    def shared_prompts(self, stage: int) -> None:
        """Two updates on groups, with the prompt in every sample and with the prompt once per group."""
        layout = [((0, 1, 2), (3, 4, 5))] if self.world == 1 else [((0, 1, 2),), ((3, 4, 5),)]
        for shared in (False, True):
            worker = PolicyWorker(policy_config(self.model, stage, "float32"), "grouped")
            worker.build()
            self.record(f"shares-{stage}", worker.shares_prompts())
            plan = RankPlan(layout[self.rank], 16, 6, packed=shared, shared=shared)
            metrics = [worker.update(plan, grouped()) for _ in range(2)]
            self.save_weights(f"grouped-{stage}-{shared}", weights_of(worker))
            self.record(f"grouped-{stage}-{shared}", [self.flatten(item) for item in metrics])

    def natural_gradient(self, stage: int) -> None:
        """Two steps of TRPO, and the second again from the checkpoint between them."""
        settings = {
            "trainer": TrainerConfig(zero_stage=stage, threads=1, ema_decay=EMA_DECAY),  # pyright: ignore
            "loss": PolicyLossConfig(objective="policy_gradient"),
            "natural_gradient": NaturalGradientConfig(max_kl=0.01, damping=0.01),
            "ptx_coef": 0.0,
        }
        config = policy_config(self.model, stage, "float32").model_copy(update=settings)
        worker, resumed = PolicyWorker(config, "natural"), PolicyWorker(config, "resumed")
        worker.build()
        whole, table = RankPlan((tuple(range(6)),), LOSS_TOKENS, SEQUENCES, packed=False), batch()
        index = table.column_names.index("old_logprobs")
        plan = RankPlan(tuple(self.layout[self.rank]), LOSS_TOKENS, SEQUENCES, packed=self.world == 2)
        checkpoint = str(self.out / f"natural-{stage}")
        steps = []
        for number in range(2):
            _, scores = worker.compute_logprobs(whole, table)
            table = table.set_column(index, table.schema.field(index), scores["old_logprobs"])
            steps.append(self.flatten(worker.update(plan, table)))
            if not number:
                worker.save(checkpoint)
        resumed.build()
        resumed.load(checkpoint)
        resumed.update(plan, table)
        same = equal(weights_of(worker), weights_of(resumed)) and worker.digest() == resumed.digest()
        self.save_weights(f"natural-{stage}", weights_of(worker))
        self.record(f"natural-{stage}", [steps, same])

    def critic(self, stage: int) -> None:
        config = CriticConfig(
            model=ModelConfig(path=self.model, dtype="float32"),
            trainer=trainer(stage),
            loss=CriticLossConfig(value_clip=0.5),
            total_updates=20,
            seed=1,
            device="cpu",
        )
        worker = CriticWorker(config, "critic")
        worker.build()
        plan, table = rank_plan(self.layout, self.rank), batch()
        _, values = worker.compute_values(plan, table)
        self.record(f"values-{stage}", ragged(values["values"]).values.tolist())
        errors = [worker.update(plan, table).values["value_error"] for _ in range(8)]
        self.record(f"value-errors-{stage}", errors)
        self.save_weights(f"critic-{stage}", weights_of(worker))
        worker.export(str(self.out / f"critic-export-{stage}"))

    def overflow(self, stage: int) -> None:
        """Update with a gradient that overflows until the loss scale has fallen, and load the checkpoint of it."""
        exact = PolicyWorker(policy_config(self.model, stage, "float32"), "exact")
        exact.build()
        plan, table = rank_plan(self.layout, self.rank), overflowing()
        norm = exact.update(plan, table, 0.0, texts()).values["grad_norm"]
        config = policy_config(self.model, stage, "float16")
        worker, resumed = (PolicyWorker(config, name) for name in ("overflowing", "resumed"))
        worker.build()
        start, kept, steps = weights_of(worker), True, []
        while not steps or (steps[-1].skipped and len(steps) < 20):
            kept = kept and equal(start, weights_of(worker))
            steps.append(worker.update(plan, table, 0.0, texts()))
        checkpoint = str(self.out / f"overflow-{stage}")
        worker.save(checkpoint)
        resumed.build()
        resumed.load(checkpoint)
        again = [one.update(plan, batch(), 0.0, texts()).values["loss_scale"] for one in (worker, resumed)]
        shown = [[step.values["loss_scale"], step.values["overflows"], step.skipped] for step in steps]
        same = equal(weights_of(worker), weights_of(resumed))
        self.record(f"overflow-{stage}", [shown, kept, norm, steps[-1].values["grad_norm"], again, same])

    def changed_settings(self, stage: int, dtype: str) -> None:
        """Load a checkpoint with other settings of Adam."""
        config = policy_config(self.model, stage, dtype)
        settings = config.trainer.model_copy(update={"adam_betas": (0.5, 0.6), "adam_eps": 1e-3, "weight_decay": 0.25})
        worker = PolicyWorker(config.model_copy(update={"trainer": settings}), "changed")
        worker.build()
        worker.load(str(self.out / f"checkpoint-{stage}-{dtype}"))
        groups = worker.engine._engine.optimizer.param_groups
        found = [[group["betas"], group["eps"], group["weight_decay"]] for group in groups]
        self.record(f"changed-{stage}-{dtype}", found)

    def poisoned(self, stage: int, dtype: str) -> None:
        """Load copies of a checkpoint, each with code in one file: [file, how, what the load said, whether it ran]."""
        worker = PolicyWorker(policy_config(self.model, stage, dtype), "poisoned")
        worker.build()
        canary = self.out / "canary"
        found = []
        for name, damage, copy in poisoned(self.out / f"checkpoint-{stage}-{dtype}", canary):
            try:
                worker.load(str(copy))
                said = "loaded"
            except (OSError, ValueError) as error:
                said = f"{type(error).__name__}: {error}"
            found.append([name, damage, said, canary.exists()])
            shutil.rmtree(copy)
        self.record(f"poisoned-{stage}-{dtype}", found)

    def wait_for_other_group(self, name: str) -> None:
        """Wait until rank 0 of the other group has reached this point."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.other / name).exists():
            if time.monotonic() > deadline or list(self.other.glob("error-*")):
                raise TimeoutError(f"the other group did not reach {name}")
            time.sleep(0.1)

    def mark_reached(self, name: str) -> None:
        if self.rank == 0:
            (self.out / name).touch()

    def loaded_policy(self, stage: int, dtype: str, checkpoint: Path) -> PolicyWorker:
        worker = PolicyWorker(policy_config(self.model, stage, dtype), "loaded")
        worker.build()
        self.record(f"saved-by-{checkpoint.name}", worker.load(str(checkpoint)))
        return worker

    def continue_on_two_ranks(self) -> None:
        """On two ranks: load the checkpoint of one rank, save it again, and save it after one more update."""
        self.wait_for_other_group("scenarios-done")
        plan, table = rank_plan(self.layout, self.rank), batch()
        for stage, dtype in CASES:
            name = f"{stage}-{dtype}"
            worker = self.loaded_policy(stage, dtype, self.other / f"checkpoint-{name}")
            worker.save(str(self.out / f"resharded-{name}"))
            worker.update(plan, batch_with_nan(), 0.0, texts())
            self.record(f"between-{name}", self.flatten(worker.update(plan, table, 0.0, texts())))
            worker.save(str(self.out / f"between-{name}"))
        self.mark_reached("between-done")

    def continue_on_one_rank(self) -> None:
        """On one rank: load the checkpoints of two ranks and run the remaining updates."""
        self.wait_for_other_group("between-done")
        plan, table = rank_plan(self.layout, 0), batch()
        for stage, dtype in CASES:
            name = f"{stage}-{dtype}"
            if stage in (1, 3) and dtype == "float32":
                self.record(f"damaged-{name}", self.load_damaged(stage, dtype))
            worker = self.loaded_policy(stage, dtype, self.other / f"resharded-{name}")
            worker.update(plan, batch_with_nan(), 0.0, texts())
            for _ in range(UPDATES - 1):
                worker.update(plan, table, 0.0, texts())
            self.save_weights(f"resharded-{name}", weights_of(worker))
            worker.export(str(self.out / f"average-resharded-{name}"), average=True)
            worker = self.loaded_policy(stage, dtype, self.other / f"between-{name}")
            self.record(f"continued-{name}", self.flatten(worker.update(plan, table, 0.0, texts())))
            self.save_weights(f"continued-{name}", weights_of(worker))
            worker.export(str(self.out / f"average-continued-{name}"), average=True)
        for stage, written in ((2, 0), (0, 2)):
            try:
                self.loaded_policy(stage, "bfloat16", self.out / f"checkpoint-{written}-bfloat16")
            except ValueError as error:
                self.record(f"refused-{stage}", str(error))

    def load_damaged(self, stage: int, dtype: str) -> list[tuple[str, bool]]:
        """Load a checkpoint of two ranks with each file missing or truncated.

        Returns:
            For each case, the error and whether it names the file, and whether the weights are unchanged.
        """
        worker = PolicyWorker(policy_config(self.model, stage, dtype), "damaged")
        worker.build()
        before = weights_of(worker)
        copy = self.out / f"damaged-{stage}"
        shutil.copytree(self.other / f"resharded-{stage}-{dtype}", copy)
        errors = []
        # Under ZeRO-3 every rank writes the same model state, and only one of these files is read.
        files = [file for file in copy.rglob("*rank*") if file.name != "zero_pp_rank_1_mp_rank_00_model_states.pt"]
        for file in files:
            content = file.read_bytes()
            for damage in (None, content[: len(content) // 2]):
                file.unlink()
                if damage is not None:
                    file.write_bytes(damage)
                try:
                    worker.load(str(copy))
                    errors.append((f"{file.name}: no error", False))
                except (FileNotFoundError, ValueError) as error:
                    errors.append(
                        (f"{type(error).__name__} {file.name in str(error)}", equal(before, weights_of(worker)))
                    )
                file.write_bytes(content)
        return errors

    def run(self, worker: PolicyWorker) -> None:
        for stage, dtype in CASES:
            if (stage, dtype) != CASES[0]:
                worker = PolicyWorker(policy_config(self.model, stage, dtype), f"{stage}-{dtype}")
                worker.build()
            self.policy(worker, stage, dtype)
            if stage == 1 and dtype == "float32":
                _, scores = worker.reference_logprobs(rank_plan(self.layout, self.rank), batch())
                self.record("reference", by_uid(scores, "ref_logprobs"))
        for stage in SCALED:
            self.overflow(stage)
        for stage in (0, 1):
            self.natural_gradient(stage)
        for stage in (1, 3):
            self.critic(stage)
            self.shared_prompts(stage)
        if self.world == 1:
            for stage in STAGES["float32"]:
                self.whole_batch(stage)
            for stage, dtype in CHANGED:
                self.changed_settings(stage, dtype)
            for stage, dtype in POISONED:
                self.poisoned(stage, dtype)
        self.mark_reached("scenarios-done")
        if self.world == 2:
            self.continue_on_two_ranks()
        else:
            self.continue_on_one_rank()


def rank_main(rank: int, world: int, model: str, out: Path, other: Path, addresses: Any) -> None:
    """Entry of the process of one rank."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "compiled")
    with reported(rank, out):
        worker = PolicyWorker(policy_config(model, *CASES[0]), "policy")
        worker.start(meet(worker, rank, world, addresses))
        scenario = Scenario(rank, world, model, out, other)
        scenario.run(worker)
        worker.close()
        (out / f"facts-{rank}.json").write_text(json.dumps(scenario.facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tied two-layer Llama whose matrices are large enough for ZeRO-3 to partition them."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_llama(folder, vocab_size=4096, **sizes, tie_word_embeddings=True, initializer_range=0.1)
    (folder / "tokenizer_config.json").write_text('{"made_for": "this test"}')
    return str(folder)


@pytest.fixture(scope="module")
def groups(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    """Output folders of the two process groups, by world size."""
    folders: dict[int, Path] = {}
    context = rank_context()
    started: dict[int, list[Any]] = {}
    address_queues: dict[
        int, Any
    ] = {}  # referenced until the end, because a child opens its queue some time after its start
    for world in (1, 2):
        folders[world] = tmp_path_factory.mktemp(f"world{world}")
    for world, out in folders.items():
        addresses = address_queues[world] = context.Queue()
        started[world] = [
            context.Process(target=rank_main, args=(rank, world, model, out, folders[3 - world], addresses))
            for rank in range(world)
        ]
        for process in started[world]:
            process.start()
    for world, ranks in started.items():
        wait_for_ranks(ranks, folders[world], TIMEOUT_S)
    yield folders
    for folder in folders.values():
        shutil.rmtree(folder)


def facts(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"facts-{rank}.json").read_text())


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name].float(), other[name].float(), rtol=0, atol=tolerance, msg=name)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of an exported model, tied ones once."""
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@dataclass(frozen=True)
class PlainResult:
    """Results of the same updates in plain torch."""

    weights: dict[str, torch.Tensor]
    norms: list[float]
    average: dict[str, torch.Tensor]
    text_losses: list[float]
    divergence: float
    """KL(before the last update || after it), mean per token."""


def text_loss(model: Any) -> torch.Tensor:
    """Mean negative log-likelihood of the text tokens, one text at a time, on full logits."""
    losses = []
    for piece in PIECES:
        logits = model(input_ids=torch.tensor([piece])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(piece[1:]), reduction="sum"))
    return torch.stack(losses).sum() / TEXT_TOKENS


@torch.no_grad()
def distributions(model: Any, temperature: float) -> list[torch.Tensor]:
    """Log-probs over the vocabulary, [tokens, vocabulary] for each row of the batch, on full logits."""
    found = []
    for row in batch().to_pylist():
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        own = torch.tensor(row["loss_mask"], dtype=torch.bool)
        found.append(torch.log_softmax(logits.double() / temperature, -1)[own])
    return found


def plain_torch(model_path: str) -> PlainResult:
    """Run the updates of the scenarios in plain torch, without DeepSpeed."""
    config = policy_config(model_path, 0, "float32")
    model = load_causal(config.model)
    module = CausalLogprobs(model, config.sampling.temperature, entropy_grad=True)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=config.trainer.adam_betas,
        eps=config.trainer.adam_eps,
    )
    table = TokenTable(batch())
    tokens = table.batch(range(6))
    norms, text_losses = [], []
    before: list[torch.Tensor] = []
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for update in (0, 2, 3):
        before = distributions(model, config.sampling.temperature)
        ptx_loss = text_loss(model)
        text_losses.append(ptx_loss.item())
        logprobs, entropy = module(batch=tokens)
        loss = policy_loss(
            PolicyTokens(
                logprobs,
                entropy,
                table.floats("rollout_logprobs", tokens),  # pyright: ignore[reportArgumentType]
                table.floats("advantages", tokens),  # pyright: ignore[reportArgumentType]
                token_weights(
                    tokens.loss_mask, tokens.lengths[tokens.sequence], "token_mean", LOSS_TOKENS, SEQUENCES, 8
                ),
                tokens.loss_mask,
                tokens.sequence,
                ref_logprobs=table.floats("ref_logprobs", tokens),
            ),
            config.loss,
        ).loss
        optimizer.zero_grad()
        (loss + PTX_COEF * ptx_loss).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.trainer, update, config.total_updates)
        optimizer.step()
        for name, parameter in model.named_parameters():
            average[name] = EMA_DECAY * average[name] + (1 - EMA_DECAY) * parameter.detach()
    after = distributions(model, config.sampling.temperature)
    states = [(old.exp() * (old - new)).sum(-1) for old, new in zip(before, after, strict=True)]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return PlainResult(weights, norms, average, text_losses, float(torch.cat(states).mean()))


@pytest.fixture(scope="module")
def plain(model: str) -> PlainResult:
    """The reference results."""
    return plain_torch(model)


def test_the_kl_divergence_of_an_update_is_exact_over_the_vocabulary(
    plain: PlainResult, groups: dict[int, Path]
) -> None:
    assert plain.divergence > 1e-3
    for stage in STAGES["float32"]:
        for world in (1, 2):
            parts = [facts(groups[world], rank)[f"divergence-{stage}-float32"] for rank in range(world)]
            assert sum(states for _, states in parts) == 19
            assert sum(total for total, _ in parts) / 19 == pytest.approx(plain.divergence, rel=1e-3)


def test_shared_prompts_give_the_same_update(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        for stage in (1, 3):
            assert facts(groups[world])[f"shares-{stage}"]
            plain, shared = (
                load_file(groups[world] / f"grouped-{stage}-{shared}.safetensors") for shared in (False, True)
            )
            close(shared, plain, 2e-5)
            for one, other in zip(
                facts(groups[world])[f"grouped-{stage}-False"],
                facts(groups[world])[f"grouped-{stage}-True"],
                strict=True,
            ):
                assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_the_ptx_loss_of_every_update_equals_plain_torch(plain: PlainResult, groups: dict[int, Path]) -> None:
    for world in (1, 2):
        metrics = [facts(groups[world], rank)["metrics-1-float32"] for rank in range(world)]
        for update, expected in enumerate(plain.text_losses):
            assert sum(rank[update]["sum_ptx_loss"] for rank in metrics) == pytest.approx(expected, rel=1e-4)
    assert plain.text_losses[-1] < plain.text_losses[0]


def test_every_split_and_zero_stage_equals_plain_adamw(model: str, plain: PlainResult, groups: dict[int, Path]) -> None:
    expected, norms, average = plain.weights, plain.norms, plain.average
    start = dict(load_causal(ModelConfig(path=model, dtype="float32")).named_parameters())
    moved = max(float((expected[name] - start[name].detach()).abs().max()) for name in expected)
    assert moved > 5e-3 and min(norms) > 0.5  # the updates are not negligible, and gradients are clipped
    for stage in STAGES["float32"]:
        close(load_file(groups[1] / f"whole-{stage}.safetensors"), expected, 2e-5)
        close(load_file(groups[1] / f"end-{stage}-float32.safetensors"), expected, 2e-5)
        close(load_file(groups[2] / f"end-{stage}-float32.safetensors"), expected, 2e-5)
        for world in (1, 2):
            seen = [item["grad_norm"] for item in facts(groups[world])[f"metrics-{stage}-float32"]]
            assert seen == pytest.approx(norms, rel=1e-3)
            close(exported(groups[world] / f"average-{stage}-float32"), average, 2e-5)
    assert max(float((expected[name] - average[name]).abs().max()) for name in expected) > 1e-3


def test_the_weight_average_is_exported_and_survives_a_checkpoint(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        for stage, dtype in CASES:
            name = f"{stage}-{dtype}"
            assert facts(groups[world])[f"unchanged-{name}"]
            average = exported(groups[world] / f"average-{name}")
            close(exported(groups[world] / f"average-resumed-{name}"), average, 0.0)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_average_teaches_as_the_model_that_is_exported(groups: dict[int, Path], stage: int) -> None:
    table, name = TokenTable(batch()), f"{stage}-float32"
    for world in (1, 2):
        average = ModelConfig(path=str(groups[world] / f"average-{name}"), dtype="float32")
        module = CausalLogprobs(load_causal(average), 0.9)
        found: dict[str, list[float]] = {}
        for rank in range(world):
            found |= facts(groups[world], rank)[f"taught-{name}"]
        assert found == {f"p{row}": pytest.approx(score(module, table.batch([row])).tolist()) for row in range(6)}


def test_packed_updates_have_no_padding(groups: dict[int, Path]) -> None:
    assert {facts(groups[world])[f"padding-{stage}-float32"] for world in (1, 2) for stage in STAGES["float32"]} == {
        0.0
    }


def test_metrics_do_not_depend_on_the_split(groups: dict[int, Path]) -> None:
    for stage in STAGES["float32"]:
        one = facts(groups[1])[f"metrics-{stage}-float32"]
        two = [facts(groups[2], rank)[f"metrics-{stage}-float32"] for rank in range(2)]
        for update in range(UPDATES):
            for name, value in one[update].items():
                parts = [ranks[update][name] for ranks in two]
                found = sum(parts) if name.startswith("sum_") else parts[0]
                assert found == pytest.approx(value, rel=1e-3, abs=1e-5), (stage, update, name)
                if not name.startswith("sum_"):
                    assert parts[0] == parts[1]
        assert one[0]["sum_tokens"] == 19 and one[0]["sum_sequences"] == 6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-3), (torch.float16, 1e-3)])
def test_16_bits_stay_close_to_float32(groups: dict[int, Path], dtype: torch.dtype, tolerance: float) -> None:
    name = str(dtype).removeprefix("torch.")
    for world in (1, 2):
        exact = load_file(groups[world] / "end-1-float32.safetensors")
        for stage in STAGES[name]:
            rounded = load_file(groups[world] / f"end-{stage}-{name}.safetensors")
            assert all(tensor.dtype == dtype for tensor in rounded.values())
            close(rounded, exact, tolerance)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", SCALED)
def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(
    groups: dict[int, Path], world: int, stage: int
) -> None:
    """The update is skipped; the first that does not overflow has the norm of the unscaled gradient."""
    for rank in range(world):
        steps, kept, norm, found, again, same = facts(groups[world], rank)[f"overflow-{stage}"]
        assert 3 < len(steps) < 16
        assert [scale for scale, *_ in steps] == [2.0 ** (16 - number) for number in range(len(steps))]
        assert [tuple(rest) for _, *rest in steps] == [(1.0, True)] * (len(steps) - 1) + [(0.0, False)]
        assert kept and found == pytest.approx(norm, rel=1e-2)
        assert again == [steps[-1][0]] * 2 and same  # a resumed run has the scale of the checkpoint


@pytest.mark.parametrize("world", [1, 2])
def test_updates_after_loading_a_checkpoint_are_bitwise_equal(groups: dict[int, Path], world: int) -> None:
    for stage, dtype in CASES:
        assert facts(groups[world])[f"resume-{stage}-{dtype}"] == [True, True], (stage, dtype)


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_in_the_background_writes_the_same_bytes_as_one_that_waits(groups: dict[int, Path], world: int) -> None:
    """It was begun before the updates and is written after them: every stage and type, all ranks, with the exports."""
    for stage, dtype in CASES:
        before, after, refused, files, differ = facts(groups[world])[f"late-{stage}-{dtype}"]
        assert (before, after, refused, differ) == ([False, ""], [True, ""], True, []), (stage, dtype)
        assert files >= 2 * (2 + 2 + 2)


@pytest.mark.parametrize("world", [1, 2])
def test_what_only_an_update_needs_leaves_the_device(groups: dict[int, Path], world: int) -> None:
    """At least the moments and the moving average; at most these, float32 weights and gradients.

    Masters whose digest was computed share their memory with numpy on the CPU, and stay there.
    The updates after it, and those after a checkpoint that was written meanwhile, are the same bit for bit.
    """
    for stage, dtype in CASES:
        used = 0 if world == 1 and dtype == "float32" and stage < 3 else stage
        share = 1 / world if used else 1
        average = 4 * (share if used == 3 else 1)
        released, again, same = facts(groups[world])[f"offloaded-{stage}-{dtype}"]
        assert 8 * share + average <= released <= 1.02 * (12 * share + average + 4), (stage, dtype, released)
        assert (again, same) == (0, True), (stage, dtype)


@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_repeated_updates_have_the_digests_of_the_first_ones(groups: dict[int, Path], world: int, rank: int) -> None:
    """What `troupe replay` compares, of each rank's part and of whole parameters, under every ZeRO stage and type."""
    for stage, dtype in CASES:
        assert facts(groups[world], rank)[f"digests-{stage}-{dtype}"] == [True, True], (stage, dtype)


@pytest.mark.parametrize("backend", SENT)
def test_a_transfer_that_fails_leaves_all_parameters_divided_and_the_next_one_sends_the_same(
    groups: dict[int, Path], backend: str
) -> None:
    """ZeRO-3 gathers on all ranks at once: one that stops early, or keeps a parameter whole, makes the others wait."""
    found = facts(groups[2])[f"sent-{backend}"]
    assert tuple(found) == transfers.FAULTS
    assert [whole for ranks in found.values() for _, whole in ranks] == [[]] * 8
    errors = {fault: [result for result, _ in ranks] for fault, ranks in found.items()}
    assert len(errors["none"][0]) == 32 and errors["none"] == errors["none again"] == [errors["none"][0], ""]
    for fault, reason in (("engine", "rollout-0 is gone"), ("rank", "the weights do not match their layout")):
        first, second = errors[fault]
        # Over gloo the sender may see the closed connection before it hears why.
        assert reason in first or ((backend, fault) == ("gloo", "engine") and "broadcast" in first)
        assert second == (first if backend == "ipc" else "")  # over gloo it only gathers


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_can_be_shortened_and_undone(groups: dict[int, Path], world: int) -> None:
    """The trust region's line search, under every ZeRO stage and type: halfway is halfway, 0 is bit for bit before."""
    for stage, dtype in CASES:
        gap, moved, whole, half, none, kept, restored = facts(groups[world])[f"shortened-{stage}-{dtype}"]
        # The optimizer's own weights are halved; with 16 bits the model holds them rounded.
        assert gap <= (moved * 1e-4 if dtype == "float32" else 2**-8), (stage, dtype)
        assert 0.0 < half < 0.5 * whole, (stage, dtype)
        assert none == 0.0 and kept and restored, (stage, dtype)


def test_a_step_of_the_natural_gradient_is_the_same_on_any_ranks_and_resumes(groups: dict[int, Path]) -> None:
    """Padded on one rank, packed on two, one of which has an empty micro-batch."""
    results = {(world, stage): facts(groups[world])[f"natural-{stage}"] for world in (1, 2) for stage in (0, 1)}
    rates = [[step["learning_rate"] for step in facts(groups[2], rank)["natural-1"][0]] for rank in (0, 1)]
    assert rates[0] == rates[1]
    reference = load_file(groups[1] / "natural-0.safetensors")
    for (world, stage), (steps, same) in results.items():
        assert same, (world, stage)
        for step, expected in zip(steps, results[1, 0][0], strict=True):
            assert 0.0 < step["kl_step"] <= 0.01 and step["surrogate_gain"] > 0.0 == step["rejected_steps"]
            assert step["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-3)
        close(reference, load_file(groups[world] / f"natural-{stage}.safetensors"), 2e-5)


def test_resharding_a_checkpoint_to_two_ranks_and_back_loses_nothing(groups: dict[int, Path]) -> None:
    """Updates from the resharded state are bitwise equal to those of the uninterrupted run."""
    for stage, dtype in CASES:
        name = f"{stage}-{dtype}"
        assert facts(groups[2])[f"saved-by-checkpoint-{name}"] == 1
        assert facts(groups[1])[f"saved-by-resharded-{name}"] == 2
        end = load_file(groups[1] / f"end-{name}.safetensors")
        assert equal(load_file(groups[1] / f"resharded-{name}.safetensors"), end), name
        close(exported(groups[1] / f"average-resharded-{name}"), exported(groups[1] / f"average-{name}"), 0.0)


def test_training_on_one_then_two_then_one_rank_equals_one_rank(groups: dict[int, Path]) -> None:
    for stage, dtype in CASES:
        name = f"{stage}-{dtype}"
        # A weight near 1 may be rounded to the next bfloat16.
        relative, absolute, tolerance = (1e-3, 1e-5, 2e-5) if dtype == "float32" else (5e-2, 1e-2, 8e-3)
        whole = facts(groups[1])[f"metrics-{name}"]
        between = [facts(groups[2], rank)[f"between-{name}"] for rank in range(2)]
        for metric, value in whole[1].items():
            found = sum(part[metric] for part in between) if metric.startswith("sum_") else between[0][metric]
            assert found == pytest.approx(value, rel=relative, abs=absolute), (name, metric)
        continued = facts(groups[1])[f"continued-{name}"]
        assert continued == pytest.approx(whole[2], rel=relative, abs=absolute), name
        end = load_file(groups[1] / f"end-{name}.safetensors")
        close(load_file(groups[1] / f"continued-{name}.safetensors"), end, tolerance)
        average = exported(groups[1] / f"average-{name}")
        close(exported(groups[1] / f"average-continued-{name}"), average, tolerance)


def test_a_missing_or_damaged_rank_file_is_named_and_nothing_is_loaded(groups: dict[int, Path]) -> None:
    for stage in (1, 3):
        errors = facts(groups[1])[f"damaged-{stage}-float32"]
        # For each of two ranks our own file and the optimizer's, and one model file.
        assert errors == [["FileNotFoundError True", True], ["ValueError True", True]] * 5


def test_a_bfloat16_checkpoint_needs_the_same_zero_mode(groups: dict[int, Path]) -> None:
    assert "was written without ZeRO" in facts(groups[1])["refused-2"]
    assert "was written with ZeRO" in facts(groups[1])["refused-0"]


@pytest.mark.parametrize(("stage", "dtype"), CHANGED)
def test_a_resumed_trainer_uses_its_own_adam_settings(groups: dict[int, Path], stage: int, dtype: str) -> None:
    """Not those of the checkpoint."""
    found = facts(groups[1])[f"changed-{stage}-{dtype}"]
    assert [betas for betas, _, _ in found] == [[0.5, 0.6]] * len(found)
    assert {eps for _, eps, _ in found} == {1e-3}
    assert {decay for _, _, decay in found} == {0.25, 0.0}


def test_no_file_of_a_checkpoint_runs_code(groups: dict[int, Path]) -> None:
    """A poisoned file is refused and named."""
    found = [one for stage, dtype in POISONED for one in facts(groups[1])[f"poisoned-{stage}-{dtype}"]]
    assert len(found) >= 15
    assert [one for one in found if one[-1]] == []
    assert [one for one in found if one[0] not in one[2] or "\n" in one[2]] == []
    added = [said for _, damage, said, _ in found if damage == "an entry"]
    assert added and all("posix.system" in said for said in added)


@pytest.mark.parametrize("world", [1, 2])
def test_nan_on_one_rank_skips_the_update_on_all_ranks(groups: dict[int, Path], world: int) -> None:
    for rank in range(world):
        for stage, dtype in CASES:
            assert facts(groups[world], rank)[f"skip-{stage}-{dtype}"] == [True, True, "inf"], (rank, stage, dtype)


def test_logprobs_equal_those_of_the_model(model: str, groups: dict[int, Path]) -> None:
    table = TokenTable(batch())
    module = CausalLogprobs(load_causal(ModelConfig(path=model, dtype="float32")), 0.9)
    expected = {f"p{row}": score(module, table.batch([row])).tolist() for row in range(6)}
    for stage in STAGES["float32"]:
        one = facts(groups[1])[f"logprobs-{stage}-float32"]
        two = [facts(groups[2], rank)[f"logprobs-{stage}-float32"] for rank in range(2)]
        assert facts(groups[1])[f"rows-{stage}-float32"] == 6 and [len(part) for part in two] == [5, 1]
        for found in (one, two[0] | two[1]):
            assert found.keys() == expected.keys()
            for uid, logprobs in expected.items():
                assert found[uid] == pytest.approx(logprobs, abs=1e-4)
    for uid, logprobs in expected.items():
        # After all updates the colocated reference still has the log-probs of the initial model.
        assert facts(groups[1])["reference"][uid] == pytest.approx(logprobs, abs=1e-4)


def test_the_reference_worker_scores_like_the_model(model: str) -> None:
    config = ReferenceConfig(
        model=ModelConfig(path=model, dtype="float32"),
        temperature=0.9,
        micro_batch_tokens=64,
        threads=0,
        device="cpu",
    )
    worker = ReferenceWorker(config, "reference")
    with pytest.raises(RuntimeError, match="not been started"):
        worker.score(rank_plan(ONE_BATCH, 0), batch())
    assert worker.start().name == "reference"
    summary, scores = worker.score(rank_plan(MANY_BATCHES, 0), batch())
    table = TokenTable(batch())
    module = CausalLogprobs(load_causal(config.model), 0.9)
    found = by_uid(scores, "ref_logprobs")
    assert summary.rows == len(found) == 6
    for uid, logprobs in found.items():
        assert logprobs == pytest.approx(score(module, table.batch([int(uid[1:])])).tolist(), abs=1e-4)
    worker.close()


@pytest.mark.parametrize(("world", "name"), [(1, "0-float32"), (2, "3-float32"), (2, "3-bfloat16"), (1, "0-float16")])
def test_an_export_loads_in_transformers(groups: dict[int, Path], world: int, name: str) -> None:
    folder = groups[world] / f"export-{name}"
    loaded = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    trained = load_file(groups[world] / f"end-{name}.safetensors")
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == trained.keys()
    assert all(torch.equal(parameters[key], trained[key]) for key in trained)
    assert loaded.dtype == torch_dtype(name.partition("-")[2])  # pyright: ignore[reportArgumentType]
    assert loaded.get_parameter("lm_head.weight") is loaded.get_parameter("model.embed_tokens.weight")
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"made_for": "this test"}
    assert not list(folder.glob("*.bin"))


def test_published_weights_are_the_trained_ones(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        for name in ("0-float32", "3-float32", "0-bfloat16", "3-bfloat16", "0-float16"):
            assert facts(groups[world])[f"received-{name}"] == [7, True]
            assert [facts(groups[world], rank)[f"published-{name}"] for rank in range(world)] == [True, False][:world]


def test_the_critic_learns_equally_with_every_split_and_zero_stage(groups: dict[int, Path]) -> None:
    for stage in (1, 3):
        assert facts(groups[1])[f"values-{stage}"] == [0.0] * 19
        errors = facts(groups[1])[f"value-errors-{stage}"]
        assert errors[-1] < 0.5 * errors[0]
        assert facts(groups[2])[f"value-errors-{stage}"] == pytest.approx(errors, rel=1e-3)
        weights = load_file(groups[1] / f"critic-{stage}.safetensors")
        close(load_file(groups[2] / f"critic-{stage}.safetensors"), weights, 2e-5)
        close(weights, load_file(groups[1] / "critic-1.safetensors"), 2e-5)
        loaded = AutoModelForSequenceClassification.from_pretrained(groups[2] / f"critic-export-{stage}")
        head = load_file(groups[2] / f"critic-{stage}.safetensors")["score.weight"]
        assert torch.equal(loaded.get_parameter("score.weight"), head) and bool(head.any())


def test_deepspeed_compiles_no_extension(groups: dict[int, Path]) -> None:
    for folder in groups.values():
        assert not list((folder / "compiled").rglob("*.so")) and not list((folder / "compiled").rglob("*.cpp"))
