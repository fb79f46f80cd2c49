"""The trainers on real DeepSpeed: ZeRO 0-3, one rank and two, float32 and bfloat16, against plain torch.

All scenarios run in two groups of processes, one of one rank and one of two; the tests compare what they wrote. At the
end the groups take up each other's checkpoints, from one rank to two and back.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.real.helpers import save_llama
from tests.test_tensors import train_table
from workers.config import (
    AdvantageConfig,
    CriticConfig,
    CriticLossConfig,
    ModelConfig,
    PolicyConfig,
    PolicyLossConfig,
    Rendezvous,
    SamplingConfig,
    TrainerConfig,
)
from workers.critic import CriticWorker
from workers.deepspeed_engine import learning_rate
from workers.losses import PolicyTokens, policy_loss, token_weights
from workers.messages import TEXTS, RankPlan, UpdateMetrics
from workers.modeling import CHUNK_LOGITS, CausalLogprobs, load_causal, score
from workers.policy import PolicyWorker
from workers.reference import ReferenceConfig, ReferenceWorker
from workers.tensors import TokenTable, ragged
from workers.weight_file import read_weights

pytestmark = pytest.mark.real

CASES = [
    *((stage, "float32") for stage in range(4)),
    *((stage, "bfloat16") for stage in range(4)),
]
ONE_BATCH = [[tuple(range(6))]]
MANY_BATCHES = [[(3, 0), (), (5,), (1, 2, 4)]]
TWO_RANKS = [[(0, 1), (4, 5), (2,)], [(), (3,), ()]]
LOSS_TOKENS, SEQUENCES = 21, 7
EMA_DECAY = 0.75
BOUND_S = 600.0
PIECES = ([11, 12, 13, 14, 15], [21, 22], [31, 32, 33, 34])
TEXT_TOKENS = 8
TEXT_LAYOUT = {1: [((0,), (), (2, 1))], 2: [((0, 1), ()), ((), (2,))]}
"""Micro-batches of pieces by world size and rank."""
PTX_COEF = 0.5
UPDATES = 3


def batch() -> pa.Table:
    """Six ragged rows, one of them without a response; the seventh of the totals was left out for lack of signal."""
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
    """Two groups of three samples, each with one prompt."""
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


def poisoned() -> pa.Table:
    """The same with a NaN advantage in row 5 only."""
    table = batch()
    index = table.column_names.index("advantages")
    rows: list[Any] = table.column("advantages").to_pylist()
    rows[5][1] = math.nan
    return table.set_column(index, table.schema.field(index), pa.array(rows, table.schema.field(index).type))


def plans(layout: list[list[tuple[int, ...]]], rank: int) -> RankPlan:
    pieces = RankPlan(TEXT_LAYOUT[len(layout)][rank], total_loss_tokens=TEXT_TOKENS, total_sequences=len(PIECES))
    return RankPlan(tuple(layout[rank]), total_loss_tokens=LOSS_TOKENS, total_sequences=SEQUENCES, texts=pieces)


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
    # A large epsilon keeps Adam from blowing rounding errors of tiny gradients up to whole steps, and makes the
    # result depend on the size of the gradient. The large micro-batch makes the output head work in three parts.
    return TrainerConfig(
        learning_rate=1e-2,
        adam_eps=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        schedule="linear",
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        gradient_checkpointing=stage in (1, 3),
        micro_batch_tokens=3 * CHUNK_LOGITS // 4096,
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
        total_updates=20,
        seed=1,
        device="cpu",
        ptx_coef=PTX_COEF,
        share_prompts=True,
    )


def weights_of(worker: PolicyWorker | CriticWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in worker.engine.named_weights()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_uid(table: pa.Table, column: str) -> dict[str, list[float]]:
    uids: list[Any] = table["prompt_uid"].to_pylist()
    values: list[Any] = table[column].to_pylist()
    return dict(zip(uids, values, strict=True))


class Scenario:
    """One rank's run through all scenarios; rank 0 writes what the tests read."""

    def __init__(self, rank: int, world: int, model: str, out: Path, other: Path) -> None:
        """`other`: what the group of the other size writes."""
        self.rank, self.world, self.model, self.out, self.other = rank, world, model, out, other
        self.facts: dict[str, Any] = {}
        self.layout = TWO_RANKS if world == 2 else MANY_BATCHES

    def keep(self, name: str, weights: dict[str, torch.Tensor]) -> None:
        if self.rank == 0:
            save_file(weights, self.out / f"{name}.safetensors")

    def note(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def policy(self, worker: PolicyWorker, stage: int, dtype: str) -> None:
        """Updates; a checkpoint after the first; a NaN after the checkpoint; the same again from the checkpoint."""
        name = f"{stage}-{dtype}"
        checkpoint = str(self.out / f"checkpoint-{name}")
        plan, table = plans(self.layout, self.rank), batch()
        rows, scores = worker.compute_logprobs(plan, table.slice(0, 2), table.slice(2, 4))
        self.note(f"logprobs-{name}", by_uid(scores, "old_logprobs"))
        self.note(f"rows-{name}", rows)
        metrics = [worker.update(plan, table, 0.0, texts())]
        worker.save(checkpoint)
        before = weights_of(worker)
        skipped = worker.update(plan, poisoned(), 0.0, texts())
        self.note(
            f"skip-{name}", [skipped.skipped, equal(before, weights_of(worker)), str(skipped.values["grad_norm"])]
        )
        drawn = torch.rand(3)
        metrics += [worker.update(plan, table, 0.0, texts()) for _ in range(UPDATES - 2)]
        worker.hold_distributions(plan, table, 1)
        metrics.append(worker.update(plan, table, 0.0, texts()))
        self.note(f"divergence-{name}", worker.divergence())
        end = weights_of(worker)
        self.keep(f"end-{name}", end)
        self.note(f"metrics-{name}", [self.flat(item) for item in metrics])
        worker.export_average(str(self.out / f"average-{name}"))
        self.note(f"unchanged-{name}", equal(end, weights_of(worker)))
        if stage in (0, 3):
            worker.export(str(self.out / f"export-{name}"))
            published = worker.publish_weights(7)
            self.note(f"published-{name}", published is not None)
            if published is not None:
                received = {key: tensor.clone() for key, tensor in read_weights(published)}
                self.note(f"received-{name}", [published.version, equal(received, end)])
                Path(published.path).unlink()

        resumed = PolicyWorker(policy_config(self.model, stage, dtype), "resumed")
        resumed.build()
        resumed.load(checkpoint)
        same_random = torch.equal(torch.rand(3), drawn)
        # The skipped update took its place in the learning-rate schedule.
        resumed.update(plan, poisoned(), 0.0, texts())
        for _ in range(UPDATES - 1):
            resumed.update(plan, table, 0.0, texts())
        self.note(f"resume-{name}", [same_random, equal(end, weights_of(resumed))])
        resumed.export_average(str(self.out / f"average-resumed-{name}"))

    def flat(self, metrics: UpdateMetrics) -> dict[str, float]:
        return {**metrics.values, **{f"sum_{name}": value for name, value in metrics.sums.items()}}

    def whole_batch(self, stage: int) -> None:
        """On one rank, all rows in one micro-batch."""
        worker = PolicyWorker(policy_config(self.model, stage, "float32"), "whole")
        worker.build()
        worker.update(plans(ONE_BATCH, 0), batch(), 0.0, texts())
        worker.update(plans(ONE_BATCH, 0), poisoned(), 0.0, texts())
        for _ in range(UPDATES - 1):
            worker.update(plans(ONE_BATCH, 0), batch(), 0.0, texts())
        self.keep(f"whole-{stage}", weights_of(worker))

    def shared_prompts(self, stage: int) -> None:
        """Two updates on groups, with every sample alone and with the prompt of a group once."""
        layout = [((0, 1, 2), (3, 4, 5))] if self.world == 1 else [((0, 1, 2),), ((3, 4, 5),)]
        for shared in (False, True):
            worker = PolicyWorker(policy_config(self.model, stage, "float32"), "grouped")
            worker.build()
            self.note(f"shares-{stage}", worker.shares_prompts())
            plan = RankPlan(layout[self.rank], total_loss_tokens=16, total_sequences=6, shared=shared)
            metrics = [worker.update(plan, grouped()) for _ in range(2)]
            self.keep(f"grouped-{stage}-{shared}", weights_of(worker))
            self.note(f"grouped-{stage}-{shared}", [self.flat(item) for item in metrics])

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
        plan, table = plans(self.layout, self.rank), batch()
        _, values = worker.compute_values(plan, table)
        self.note(f"values-{stage}", ragged(values["values"]).values.tolist())
        errors = [worker.update(plan, table).values["value_error"] for _ in range(8)]
        self.note(f"value-errors-{stage}", errors)
        self.keep(f"critic-{stage}", weights_of(worker))
        worker.export(str(self.out / f"critic-export-{stage}"))

    def until_other(self, name: str) -> None:
        """Wait until rank 0 of the other group has got so far."""
        bound = time.monotonic() + BOUND_S
        while not (self.other / name).exists():
            if time.monotonic() > bound or list(self.other.glob("error-*")):
                raise TimeoutError(f"the other group did not come to {name}")
            time.sleep(0.1)

    def reached(self, name: str) -> None:
        if self.rank == 0:
            (self.out / name).touch()

    def fresh(self, stage: int, dtype: str, checkpoint: Path) -> PolicyWorker:
        worker = PolicyWorker(policy_config(self.model, stage, dtype), "fresh")
        worker.build()
        self.note(f"saved-by-{checkpoint.name}", worker.load(str(checkpoint)))
        return worker

    def two_ranks_between(self) -> None:
        """In the group of two: what one rank saved after the first update, as it is, and one update later."""
        self.until_other("scenarios-done")
        plan, table = plans(self.layout, self.rank), batch()
        for stage, dtype in CASES:
            name = f"{stage}-{dtype}"
            worker = self.fresh(stage, dtype, self.other / f"checkpoint-{name}")
            worker.save(str(self.out / f"relaid-{name}"))
            worker.update(plan, poisoned(), 0.0, texts())
            self.note(f"between-{name}", self.flat(worker.update(plan, table, 0.0, texts())))
            worker.save(str(self.out / f"between-{name}"))
        self.reached("between-done")

    def one_rank_again(self) -> None:
        """In the group of one: from what two ranks saved, to the end."""
        self.until_other("between-done")
        plan, table = plans(self.layout, 0), batch()
        for stage, dtype in CASES:
            name = f"{stage}-{dtype}"
            if stage in (1, 3) and dtype == "float32":
                self.note(f"damaged-{name}", self.damaged(stage, dtype))
            worker = self.fresh(stage, dtype, self.other / f"relaid-{name}")
            worker.update(plan, poisoned(), 0.0, texts())
            for _ in range(UPDATES - 1):
                worker.update(plan, table, 0.0, texts())
            self.keep(f"relaid-{name}", weights_of(worker))
            worker.export_average(str(self.out / f"average-relaid-{name}"))
            worker = self.fresh(stage, dtype, self.other / f"between-{name}")
            self.note(f"again-{name}", self.flat(worker.update(plan, table, 0.0, texts())))
            self.keep(f"again-{name}", weights_of(worker))
            worker.export_average(str(self.out / f"average-again-{name}"))
        for stage, written in ((1, 0), (0, 1)):
            try:
                self.fresh(stage, "bfloat16", self.out / f"checkpoint-{written}-bfloat16")
            except ValueError as error:
                self.note(f"refused-{stage}", str(error))

    def damaged(self, stage: int, dtype: str) -> list[tuple[str, bool]]:
        """What is said of each file of two ranks that is missing or cut off, and whether nothing was changed."""
        worker = PolicyWorker(policy_config(self.model, stage, dtype), "damaged")
        worker.build()
        before = weights_of(worker)
        copy = self.out / f"damaged-{stage}"
        shutil.copytree(self.other / f"relaid-{stage}-{dtype}", copy)
        said = []
        # Under ZeRO-3 every rank writes the same of the model, and one of these files is read.
        files = [file for file in copy.rglob("*rank*") if file.name != "zero_pp_rank_1_mp_rank_00_model_states.pt"]
        for file in files:
            content = file.read_bytes()
            for damage in (None, content[: len(content) // 2]):
                file.unlink()
                if damage is not None:
                    file.write_bytes(damage)
                try:
                    worker.load(str(copy))
                    said.append((f"{file.name} was not missed", False))
                except (FileNotFoundError, ValueError) as error:
                    said.append(
                        (f"{type(error).__name__} {file.name in str(error)}", equal(before, weights_of(worker)))
                    )
                file.write_bytes(content)
        return said

    def run(self, worker: PolicyWorker) -> None:
        for stage, dtype in CASES:
            if (stage, dtype) != CASES[0]:
                worker = PolicyWorker(policy_config(self.model, stage, dtype), f"{stage}-{dtype}")
                worker.build()
            self.policy(worker, stage, dtype)
            if stage == 1 and dtype == "float32":
                _, scores = worker.reference_logprobs(plans(self.layout, self.rank), batch())
                self.note("reference", by_uid(scores, "ref_logprobs"))
        for stage in (1, 3):
            self.critic(stage)
            self.shared_prompts(stage)
        if self.world == 1:
            for stage in range(4):
                self.whole_batch(stage)
        self.reached("scenarios-done")
        if self.world == 2:
            self.two_ranks_between()
        else:
            self.one_rank_again()


def rank_main(rank: int, world: int, model: str, out: Path, other: Path, meeting: Any) -> None:
    """The process of one rank."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(out / "compiled")
    try:
        worker = PolicyWorker(policy_config(model, *CASES[0]), "policy")
        if rank == 0:
            place = worker.rendezvous()
            for _ in range(world):
                meeting.put(place)
        address, port = meeting.get(timeout=60)
        worker.start(Rendezvous(address=address, port=port, rank=rank, world_size=world))
        scenario = Scenario(rank, world, model, out, other)
        scenario.run(worker)
        worker.close()
        (out / f"facts-{rank}.json").write_text(json.dumps(scenario.facts))
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        raise


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
    """What the group of one rank and the group of two left behind, by world size."""
    folders: dict[int, Path] = {}
    context = multiprocessing.get_context("spawn")
    started: dict[int, list[Any]] = {}
    meetings: dict[int, Any] = {}  # held until the end: a child opens the queue some time after its start
    for world in (1, 2):
        folders[world] = tmp_path_factory.mktemp(f"world{world}")
    for world, out in folders.items():
        meeting = meetings[world] = context.Queue()
        started[world] = [
            context.Process(target=rank_main, args=(rank, world, model, out, folders[3 - world], meeting))
            for rank in range(world)
        ]
        for process in started[world]:
            process.start()
    for world, ranks in started.items():
        for process in ranks:
            process.join(timeout=BOUND_S)
            if process.is_alive():
                process.kill()
                process.join()
        errors = "\n".join(file.read_text() for file in sorted(folders[world].glob("error-*.txt")))
        if errors or any(process.exitcode for process in ranks):
            pytest.fail(f"world {world}: exit codes {[process.exitcode for process in ranks]}\n{errors}")
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
class Plain:
    """What plain torch comes to."""

    weights: dict[str, torch.Tensor]
    norms: list[float]
    average: dict[str, torch.Tensor]
    text_losses: list[float]
    divergence: float
    """KL(before the last update || after it), per token."""


def text_loss(model: Any) -> torch.Tensor:
    """Mean negative log-likelihood of the texts' tokens, text by text, on full logits."""
    losses = []
    for piece in PIECES:
        logits = model(input_ids=torch.tensor([piece])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(piece[1:]), reduction="sum"))
    return torch.stack(losses).sum() / TEXT_TOKENS


@torch.no_grad()
def distributions(model: Any, temperature: float) -> list[torch.Tensor]:
    """Of every response token of the batch, row by row, on full logits."""
    found = []
    for row in batch().to_pylist():
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        own = torch.tensor(row["loss_mask"], dtype=torch.bool)
        found.append(torch.log_softmax(logits.double() / temperature, -1)[own])
    return found


def plain_torch(model_path: str) -> Plain:
    """The same updates written out with torch alone."""
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
        of_texts = text_loss(model)
        text_losses.append(of_texts.item())
        logprobs, entropy = module(tokens.input_ids, tokens.attention_mask, tokens.positions, tokens.targets)
        loss = policy_loss(
            PolicyTokens(
                logprobs,
                entropy,
                table.floats("rollout_logprobs", tokens),  # pyright: ignore[reportArgumentType]
                table.floats("advantages", tokens),  # pyright: ignore[reportArgumentType]
                token_weights(tokens.loss_mask, tokens.sequence, "token_mean", LOSS_TOKENS, SEQUENCES, 8),
                tokens.loss_mask,
                tokens.sequence,
                ref_logprobs=table.floats("ref_logprobs", tokens),
            ),
            config.loss,
        ).loss
        optimizer.zero_grad()
        (loss + PTX_COEF * of_texts).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.trainer, update, config.total_updates)
        optimizer.step()
        for name, parameter in model.named_parameters():
            average[name] = EMA_DECAY * average[name] + (1 - EMA_DECAY) * parameter.detach()
    after = distributions(model, config.sampling.temperature)
    states = [(old.exp() * (old - new)).sum(-1) for old, new in zip(before, after, strict=True)]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Plain(weights, norms, average, text_losses, float(torch.cat(states).mean()))


@pytest.fixture(scope="module")
def plain(model: str) -> Plain:
    """The reference for all."""
    return plain_torch(model)


def test_the_divergence_of_an_update_is_exact_over_the_vocabulary(plain: Plain, groups: dict[int, Path]) -> None:
    assert plain.divergence > 1e-3
    for stage in range(4):
        for world in (1, 2):
            parts = [facts(groups[world], rank)[f"divergence-{stage}-float32"] for rank in range(world)]
            assert sum(states for _, states in parts) == 19
            assert sum(total for total, _ in parts) / 19 == pytest.approx(plain.divergence, rel=1e-3)


def test_a_groups_prompt_is_trained_once_to_the_same_result(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        for stage in (1, 3):
            assert facts(groups[world])[f"shares-{stage}"]
            plain, shared = (
                load_file(groups[world] / f"grouped-{stage}-{together}.safetensors") for together in (False, True)
            )
            close(shared, plain, 2e-5)
            for one, other in zip(
                facts(groups[world])[f"grouped-{stage}-False"],
                facts(groups[world])[f"grouped-{stage}-True"],
                strict=True,
            ):
                assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_texts_are_learnt_in_the_same_update(plain: Plain, groups: dict[int, Path]) -> None:
    for world in (1, 2):
        metrics = [facts(groups[world], rank)["metrics-1-float32"] for rank in range(world)]
        for update, expected in enumerate(plain.text_losses):
            assert sum(rank[update]["sum_ptx_loss"] for rank in metrics) == pytest.approx(expected, rel=1e-4)
    assert plain.text_losses[-1] < plain.text_losses[0]


def test_every_split_and_stage_is_plain_adamw(model: str, plain: Plain, groups: dict[int, Path]) -> None:
    expected, norms, average = plain.weights, plain.norms, plain.average
    start = dict(load_causal(ModelConfig(path=model, dtype="float32")).named_parameters())
    moved = max(float((expected[name] - start[name].detach()).abs().max()) for name in expected)
    assert moved > 5e-3 and min(norms) > 0.5  # the steps are real, and clipping takes part in them
    for stage in range(4):
        close(load_file(groups[1] / f"whole-{stage}.safetensors"), expected, 2e-5)
        close(load_file(groups[1] / f"end-{stage}-float32.safetensors"), expected, 2e-5)
        close(load_file(groups[2] / f"end-{stage}-float32.safetensors"), expected, 2e-5)
        for world in (1, 2):
            seen = [item["grad_norm"] for item in facts(groups[world])[f"metrics-{stage}-float32"]]
            assert seen == pytest.approx(norms, rel=1e-3)
            close(exported(groups[world] / f"average-{stage}-float32"), average, 2e-5)
    assert max(float((expected[name] - average[name]).abs().max()) for name in expected) > 1e-3


def test_the_average_of_the_weights_is_exported_and_resumed(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        for stage, dtype in CASES:
            name = f"{stage}-{dtype}"
            assert facts(groups[world])[f"unchanged-{name}"]
            average = exported(groups[world] / f"average-{name}")
            close(exported(groups[world] / f"average-resumed-{name}"), average, 0.0)


def test_metrics_do_not_depend_on_the_split(groups: dict[int, Path]) -> None:
    for stage in range(4):
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


def test_bfloat16_follows_float32(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        exact = load_file(groups[world] / "end-1-float32.safetensors")
        for stage in range(4):
            rounded = load_file(groups[world] / f"end-{stage}-bfloat16.safetensors")
            assert all(tensor.dtype == torch.bfloat16 for tensor in rounded.values())
            close(rounded, exact, 6e-3)


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_continues_bit_by_bit(groups: dict[int, Path], world: int) -> None:
    for stage, dtype in CASES:
        assert facts(groups[world])[f"resume-{stage}-{dtype}"] == [True, True], (stage, dtype)


def test_a_checkpoint_of_another_number_of_ranks_loses_nothing(groups: dict[int, Path]) -> None:
    """One rank's state, laid anew for two ranks and back, goes on bit by bit."""
    for stage, dtype in CASES:
        name = f"{stage}-{dtype}"
        assert facts(groups[2])[f"saved-by-checkpoint-{name}"] == 1
        assert facts(groups[1])[f"saved-by-relaid-{name}"] == 2
        end = load_file(groups[1] / f"end-{name}.safetensors")
        assert equal(load_file(groups[1] / f"relaid-{name}.safetensors"), end), name
        close(exported(groups[1] / f"average-relaid-{name}"), exported(groups[1] / f"average-{name}"), 0.0)


def test_one_rank_then_two_then_one_train_as_one(groups: dict[int, Path]) -> None:
    for stage, dtype in CASES:
        name = f"{stage}-{dtype}"
        # A weight near 1 may be rounded to the next bfloat16.
        relative, absolute, tolerance = (1e-3, 1e-5, 2e-5) if dtype == "float32" else (5e-2, 1e-2, 8e-3)
        whole = facts(groups[1])[f"metrics-{name}"]
        between = [facts(groups[2], rank)[f"between-{name}"] for rank in range(2)]
        for metric, value in whole[1].items():
            found = sum(part[metric] for part in between) if metric.startswith("sum_") else between[0][metric]
            assert found == pytest.approx(value, rel=relative, abs=absolute), (name, metric)
        again = facts(groups[1])[f"again-{name}"]
        assert again == pytest.approx(whole[2], rel=relative, abs=absolute), name
        end = load_file(groups[1] / f"end-{name}.safetensors")
        close(load_file(groups[1] / f"again-{name}.safetensors"), end, tolerance)
        average = exported(groups[1] / f"average-{name}")
        close(exported(groups[1] / f"average-again-{name}"), average, tolerance)


def test_a_missing_or_damaged_file_of_any_rank_is_named_and_nothing_is_loaded(groups: dict[int, Path]) -> None:
    for stage in (1, 3):
        said = facts(groups[1])[f"damaged-{stage}-float32"]
        # Two ranks, of each our own file and the optimizer's, and the model's.
        assert said == [["FileNotFoundError True", True], ["ValueError True", True]] * 5


def test_bfloat16_keeps_its_zero_stage(groups: dict[int, Path]) -> None:
    assert "was written without ZeRO" in facts(groups[1])["refused-1"]
    assert "was written with ZeRO" in facts(groups[1])["refused-0"]


@pytest.mark.parametrize("world", [1, 2])
def test_nan_on_one_rank_skips_on_all_and_changes_nothing(groups: dict[int, Path], world: int) -> None:
    for rank in range(world):
        for stage, dtype in CASES:
            assert facts(groups[world], rank)[f"skip-{stage}-{dtype}"] == [True, True, "inf"], (rank, stage, dtype)


def test_scores_match_the_model(model: str, groups: dict[int, Path]) -> None:
    table = TokenTable(batch())
    module = CausalLogprobs(load_causal(ModelConfig(path=model, dtype="float32")), 0.9)
    expected = {f"p{row}": score(module, table.batch([row])).tolist() for row in range(6)}
    for stage in range(4):
        one = facts(groups[1])[f"logprobs-{stage}-float32"]
        two = [facts(groups[2], rank)[f"logprobs-{stage}-float32"] for rank in range(2)]
        assert facts(groups[1])[f"rows-{stage}-float32"] == 6 and [len(part) for part in two] == [5, 1]
        for found in (one, two[0] | two[1]):
            assert found.keys() == expected.keys()
            for uid, logprobs in expected.items():
                assert found[uid] == pytest.approx(logprobs, abs=1e-4)
    for uid, logprobs in expected.items():
        # After all updates the colocated reference still says what the model said at the start.
        assert facts(groups[1])["reference"][uid] == pytest.approx(logprobs, abs=1e-4)


def test_reference_worker(model: str) -> None:
    config = ReferenceConfig(
        model=ModelConfig(path=model, dtype="float32"),
        temperature=0.9,
        micro_batch_tokens=64,
        threads=0,
        device="cpu",
    )
    worker = ReferenceWorker(config, "reference")
    with pytest.raises(RuntimeError, match="not been started"):
        worker.score(plans(ONE_BATCH, 0), batch())
    assert worker.start().name == "reference"
    summary, scores = worker.score(plans(MANY_BATCHES, 0), batch())
    table = TokenTable(batch())
    module = CausalLogprobs(load_causal(config.model), 0.9)
    found = by_uid(scores, "ref_logprobs")
    assert summary.rows == len(found) == 6
    for uid, logprobs in found.items():
        assert logprobs == pytest.approx(score(module, table.batch([int(uid[1:])])).tolist(), abs=1e-4)
    worker.close()


@pytest.mark.parametrize(("world", "name"), [(1, "0-float32"), (2, "3-float32"), (2, "3-bfloat16")])
def test_export_loads_in_transformers(groups: dict[int, Path], world: int, name: str) -> None:
    folder = groups[world] / f"export-{name}"
    loaded = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    trained = load_file(groups[world] / f"end-{name}.safetensors")
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == trained.keys()
    assert all(torch.equal(parameters[key], trained[key]) for key in trained)
    assert loaded.dtype == (torch.bfloat16 if "bfloat16" in name else torch.float32)
    assert loaded.get_parameter("lm_head.weight") is loaded.get_parameter("model.embed_tokens.weight")
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"made_for": "this test"}
    assert not list(folder.glob("*.bin"))


def test_published_weights_are_the_trained_ones(groups: dict[int, Path]) -> None:
    for world in (1, 2):
        for name in ("0-float32", "3-float32", "0-bfloat16", "3-bfloat16"):
            assert facts(groups[world])[f"received-{name}"] == [7, True]
            assert [facts(groups[world], rank)[f"published-{name}"] for rank in range(world)] == [True, False][:world]


def test_critic(groups: dict[int, Path]) -> None:
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


def test_nothing_was_compiled(groups: dict[int, Path]) -> None:
    for folder in groups.values():
        assert not list((folder / "compiled").rglob("*.so")) and not list((folder / "compiled").rglob("*.cpp"))


def test_learning_rate() -> None:
    config = TrainerConfig(learning_rate=1.0, schedule="linear", warmup_updates=2, min_lr_ratio=0.2)
    rates = [learning_rate(config, update, 7) for update in range(9)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = config.model_copy(update={"schedule": "cosine"})
    assert [learning_rate(cosine, update, 7) for update in (2, 4, 6)] == pytest.approx([1.0, 0.6, 0.2])
    constant = config.model_copy(update={"schedule": "constant"})
    assert [learning_rate(constant, update, 7) for update in (0, 1, 5, 99)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert learning_rate(config.model_copy(update={"warmup_updates": 0}), 0, 1) == 1.0
