"""Sequence parallelism on gloo ranks: what two ranks compute of divided rows equals what one computes of whole ones.

All scenarios run in one process group. Without sequence parallelism rank 0 has all rows and the others have none, so
that both cases differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from transformers import (
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.real.models import save_llama
from tests.real.ranks import rank_context, reported, wait_for_ranks
from tests.real.test_trainer import (
    LOSS_TOKENS,
    PIECES,
    SEQUENCES,
    TEXT_TOKENS,
    batch,
    by_uid,
    grouped,
    policy_config,
    texts,
    trainer,
    weights_of,
)
from tests.workers.models.test_capabilities import LLAMA4
from tests.workers.models.test_modeling import SIZES, save_model
from troupe.orchestrator.telemetry.metrics import merge_update_metrics
from troupe.workers.contract.algorithm_config import CriticLossConfig
from troupe.workers.contract.config import CriticConfig, Rendezvous
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan, UpdateMetrics
from troupe.workers.contract.offline_config import (
    DpoLossConfig,
    ExampleConfig,
    KtoLossConfig,
    OfflineConfig,
    OfflineLossConfig,
    SftLossConfig,
)
from troupe.workers.contract.offline_messages import EXAMPLE_BATCH
from troupe.workers.contract.trainer_config import LoraConfig, TrainerConfig
from troupe.workers.critic import CriticWorker
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, RewardScores, load_causal, load_value, share_backbone
from troupe.workers.models.token_batch import TokenTable
from troupe.workers.offline import ExamplePolicyWorker
from troupe.workers.policy import PolicyWorker
from troupe.workers.training.group import join_group, leave_group, open_store, sequence_group

pytestmark = pytest.mark.long

HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "head_dim": 4}
NO_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**{**HEADS, "num_key_value_heads": 4}),
    "one KV head": LlamaConfig(**HEADS),
    "three KV heads": LlamaConfig(**{**SIZES, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "softcap of the logits": Gemma2Config(
        **HEADS, layer_types=["full_attention"] * 2, attn_logit_softcapping=None, final_logit_softcapping=2.0
    ),
    "learned positions": GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2),
    "offset positions": OPTConfig(
        vocab_size=50, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    ),
    "windows": MistralConfig(**HEADS, sliding_window=3),
    "experts": MixtralConfig(**NO_HEAD_DIM, num_local_experts=4),
    "experts with norms": Qwen3MoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
}
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "odd heads": (
        LlamaConfig(**{**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}),
        "sequence_parallel_size 2 does not divide the model's 3 attention heads",
    ),
    "chunks": (Llama4TextConfig(**LLAMA4), "takes no packed rows"),
    "softcap of attention": (Gemma2Config(**SIZES, layer_types=["full_attention"] * 2), "takes no packed rows"),
    "states": (
        FalconH1Config(**NO_HEAD_DIM, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4),
        "takes no packed rows",
    ),
}
STAGES = (0, 1, 3)
"""Stage 2 shares every branch with stage 1; `OFFLINE` has it."""
CRITICS = (1, 3)
RESUMED = (1, 3)
LORA = LoraConfig(rank=3, alpha=6)
OFFLINE: dict[str, tuple[int, OfflineLossConfig]] = {
    "sft": (0, SftLossConfig()),
    "sft with ZeRO 3": (3, SftLossConfig()),
    "dpo": (1, DpoLossConfig()),
    "kto": (2, KtoLossConfig()),
}
ROWS = [(3, 0), (), (5,), (1, 2, 4)]
"""Micro-batches of `batch`: one has a row without a response, one is empty."""
GROUPS = [(0, 1, 2), (3, 4, 5)]
"""Micro-batches of `grouped`, each with one copy of a prompt."""
TIMEOUT_S = 300.0


def small() -> TokenTable:
    """`grouped` in the vocabulary of the families."""
    table = grouped()
    for name in ("prompt_ids", "response_ids"):
        rows: list[Any] = table.column(name).to_pylist()
        place = table.column_names.index(name)
        ids = pa.array([[token % 47 + 3 for token in row] for row in rows], table.schema.field(place).type)
        table = table.set_column(place, table.schema.field(place), ids)
    return TokenTable(table)


def examples(mismatched: bool) -> pa.Table:
    """Three pairs of responses of different length, with log-probs of a reference."""
    generator = torch.Generator().manual_seed(8)
    rows = []
    for row, length in enumerate((4, 2, 7, 5, 1, 3)):
        logprobs = (-8.0 - torch.rand(length, generator=generator)).tolist()
        rows.append(
            {
                "prompt_uid": str(row // 2),
                "sample_index": row % 2,
                "attempt": 0,
                "prompt_ids": torch.randint(3, 4096, (2 + row // 2,), generator=generator).tolist(),
                "response_ids": torch.randint(3, 4096, (length,), generator=generator).tolist(),
                "loss_mask": [True] * length,
                "score": -float(row % 2),
                "margin": 0.0,
                "desirable": not mismatched or row // 2 != 1,
                "ref_logprobs": logprobs,
            }
        )
    return pa.Table.from_pylist(rows, schema=EXAMPLE_BATCH)


class Scenarios:
    """Runs everything on one rank and records what the tests compare: by scenario, whole and divided rows."""

    def __init__(self, rank: int, world: int, model: str, folder: Path) -> None:
        self.rank, self.world, self.model, self.folder = rank, world, model, folder
        self.found: dict[str, Any] = {}

    def families(self) -> None:
        """Log-probs, entropies and gradients of tiny models, with prompts once for each group and with copies."""
        for name in FAMILIES:
            model = load_causal(ModelConfig(path=str(self.folder / name), dtype="float32"))
            module = CausalLogprobs(model, temperature=0.7, chunks=3, entropy_grad=True)
            results = []
            for size in (1, 2):
                model.set_attn_implementation("sdpa")
                assert adapt(module, model, "cpu", packing=True, sequence=sequence_group(size))
                results.append([self.passes(module, shared, reduces=size > 1) for shared in (False, True)])
            self.found[name] = results

    @staticmethod
    def passes(module: CausalLogprobs, shared: bool, reduces: bool) -> list[torch.Tensor]:
        """Log-probs, entropies, and the gradient of every parameter, summed over the ranks."""
        cut = small().packed_batch(range(6), shared)
        module.zero_grad()
        logprobs, entropies = module(batch=cut)
        weights = torch.linspace(-1.0, 2.0, len(logprobs))
        ((logprobs * weights).sum() + (entropies * weights.flip(0)).sum()).backward()
        return [logprobs.detach(), entropies.detach(), *gradients(module, reduces)]

    def reward_model(self) -> None:
        """Scores of last and of all tokens, and log-probs, of a reward model that keeps its output head."""
        config = ModelConfig(path=str(self.folder / "llama"), dtype="float32")
        results = []
        for size in (1, 2):
            model = load_value(config)
            torch.nn.init.constant_(model.get_submodule("score").get_parameter("weight"), 0.3)
            module = RewardScores(model, share_backbone(model, config, chunks=2))
            assert adapt(module, model, "cpu", packing=True, sequence=sequence_group(size))
            cut = small().packed_batch(range(6), shared=True)
            scores, token_scores, logprobs = module(batch=cut, read_at=cut.positions)
            assert logprobs is not None
            (scores.sum() + (token_scores * logprobs).sum()).backward()
            outputs = [scores.detach(), token_scores.detach(), logprobs.detach()]
            results.append([*outputs, *gradients(module, reduces=size > 1)])
        self.found["reward model"] = results

    def refusals(self) -> None:
        """What the models say that cannot share their rows."""
        for name in REFUSED:
            model = load_causal(ModelConfig(path=str(self.folder / name), dtype="float32"))
            module = CausalLogprobs(model, temperature=1.0)
            with pytest.raises(ValueError) as error:
                adapt(module, model, "cpu", packing=True, sequence=sequence_group(2))
            self.found[name] = str(error.value)

    def settings(self, stage: int, size: int) -> TrainerConfig:
        return trainer(stage).model_copy(update={"sequence_parallel_size": size, "ema_decay": 0.0})

    def plan(self, micro_batches: Sequence[tuple[int, ...]], size: int, shared: bool = False) -> RankPlan:
        """Whole rows are all on rank 0, divided ones on all pairs of ranks; the texts on the first of them."""
        shares = self.world // size if size > 1 else 1
        share = self.rank // size
        count = -(-len(micro_batches) // shares)
        own = tuple(micro_batches[share::shares]) if share < shares else ()
        pieces = RankPlan(((0,), (2, 1)) if share == 0 else ((), ()), TEXT_TOKENS, len(PIECES), packed=True)
        padded = own + ((),) * (count - len(own))
        return RankPlan(padded, LOSS_TOKENS, SEQUENCES, packed=True, shared=shared, texts=pieces)

    def policy(self, stage: int) -> None:
        """Updates with texts beside them, scores of policy and reference, an exact divergence, and a resume."""
        table, rows, shared = (grouped(), GROUPS, True) if stage in (0, 3) else (batch(), ROWS, False)
        self.found[f"policy {stage}"] = [self.updates(stage, size, table, rows, shared) for size in (1, 2)]
        if stage not in RESUMED or self.world > 2:
            return
        plan = self.plan(rows, 1, shared)
        resumed = self.policy_worker(stage, 1)
        resumed.load(str(self.folder / f"checkpoint-{stage}"))
        resumed.store_distributions(plan, table, 1)
        metrics = resumed.update(plan, table, 0.1, texts())
        total, states = resumed.divergence()
        found = {"metrics": [metrics], "weights": weights_of(resumed), "divergence": (total, states)}
        self.found[f"resumed {stage}"] = found

    def policy_worker(self, stage: int, size: int, lora: LoraConfig | None = None) -> PolicyWorker:
        changes = {"trainer": self.settings(stage, size), "lora": lora}
        worker = PolicyWorker(policy_config(self.model, stage, "float32").model_copy(update=changes), "policy")
        worker.build()
        return worker

    def adapters(self, stage: int) -> None:
        """`policy` with adapters, which the reference of stage 1 is without."""
        rows = (grouped(), GROUPS, True) if stage in (0, 3) else (batch(), ROWS, False)
        self.found[f"adapters {stage}"] = [self.updates(stage, size, *rows, LORA) for size in (1, 2)]

    def updates(
        self,
        stage: int,
        size: int,
        table: pa.Table,
        rows: Sequence[tuple[int, ...]],
        shared: bool,
        lora: LoraConfig | None = None,
    ) -> dict[str, Any]:
        worker, plan = self.policy_worker(stage, size, lora), self.plan(rows, size, shared)
        found: dict[str, Any] = {"before": by_uid(worker.compute_logprobs(plan, table)[1], "old_logprobs")}
        if stage == 1:
            found["reference"] = by_uid(worker.reference_logprobs(plan, table)[1], "ref_logprobs")
        metrics = [worker.update(plan, table, 0.1, texts())]
        if size > 1:
            worker.save(str(self.folder / f"checkpoint-{stage}"))
        worker.store_distributions(plan, table, 1)
        metrics.append(worker.update(plan, table, 0.1, texts()))
        found |= {"divergence": worker.divergence(), "metrics": metrics, "weights": weights_of(worker)}
        return found | {"after": by_uid(worker.compute_logprobs(plan, table)[1], "old_logprobs")}

    def critic(self, stage: int) -> None:
        """Updates and values."""
        results = []
        for size in (1, 2):
            config = CriticConfig(
                model=ModelConfig(path=self.model, dtype="float32"),
                trainer=self.settings(stage, size),
                loss=CriticLossConfig(value_clip=0.5),
                total_updates=20,
                seed=1,
                device="cpu",
            )
            worker, plan = CriticWorker(config, "critic"), self.plan(ROWS, size)
            worker.build()
            metrics = [worker.update(plan, batch()) for _ in range(2)]
            values = by_uid(worker.compute_values(plan, batch())[1], "values")
            results.append({"metrics": metrics, "after": values, "weights": weights_of(worker)})
        self.found[f"critic {stage}"] = results

    def offline(self, name: str, stage: int, loss: OfflineLossConfig) -> None:
        """Updates and an evaluation."""
        mismatched, results = loss.kind == "kto", []
        for size in (1, 2):
            config = OfflineConfig(
                model=ModelConfig(path=self.model, dtype="float32"),
                trainer=self.settings(stage, size),
                loss=loss,
                examples=ExampleConfig(max_length=16, micro_batch_tokens=64, mismatched=mismatched),
                reference_model=None,
                total_updates=20,
                seed=1,
                device="cpu",
            )
            worker, plan = ExamplePolicyWorker(config, "policy"), self.plan([(0, 1, 2, 3), (), (4, 5)], size)
            worker.build()
            table = examples(mismatched)
            metrics = [worker.update(plan, table) for _ in range(2)]
            part = worker.evaluate(plan, table)
            results.append({"metrics": metrics, "terms": dict(part.terms), "weights": weights_of(worker)})
        self.found[name] = results

    def run(self) -> None:
        if self.world == 2:
            self.families()
            self.reward_model()
            self.refusals()
        for stage in STAGES if self.world == 2 else CRITICS:
            self.policy(stage)
        for stage in CRITICS if self.world == 2 else CRITICS[:1]:
            self.critic(stage)
        if self.world == 2:
            for stage in STAGES:
                self.adapters(stage)
            for name, (stage, loss) in OFFLINE.items():
                self.offline(name, stage, loss)


def gradients(module: torch.nn.Module, reduces: bool) -> list[torch.Tensor]:
    """The gradient of every parameter; summed over the ranks if each of them has a part."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    if reduces:
        for gradient in found:
            dist.all_reduce(gradient)
    return found


def rank_main(rank: int, world: int, port: int, model: str, out: Path) -> None:
    """Entry of the process of one rank."""
    with reported(rank, out):
        torch.set_num_threads(1)
        join_group(Rendezvous(address="127.0.0.1", port=port, rank=rank, world_size=world), "cpu")
        scenarios = Scenarios(rank, world, model, out)
        scenarios.run()
        leave_group()
        torch.save(scenarios.found, out / f"found-{rank}.pt")


def run_ranks(world: int, model: str, out: Path) -> list[dict[str, Any]]:
    """What each rank records."""
    store = open_store("127.0.0.1")
    context = rank_context()
    ranks = [context.Process(target=rank_main, args=(rank, world, store.port, model, out)) for rank in range(world)]
    for process in ranks:
        process.start()
    wait_for_ranks(ranks, out, TIMEOUT_S)
    return [torch.load(out / f"found-{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tied two-layer Llama whose matrices are large enough for ZeRO-3 to partition them, with fewer KV heads than
    ranks."""
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
    folder = tmp_path_factory.mktemp("model")
    return save_llama(folder, vocab_size=4096, **sizes, tie_word_embeddings=True, initializer_range=0.1)


@pytest.fixture(scope="module")
def found(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks records."""
    out = tmp_path_factory.mktemp("ranks")
    for name, config in (FAMILIES | {name: config for name, (config, _) in REFUSED.items()}).items():
        save_model(config, out / name)
    return run_ranks(2, model, out)


def close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def merged(metrics: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Metrics of the ranks that have different rows, without the one that depends on time."""
    return {name: value for name, value in merge_update_metrics(metrics).items() if name != "tokens_per_s"}


def equal_updates(ranks: Sequence[dict[str, Any]], scenario: str) -> None:
    """Of the ranks that share their rows one reports."""
    whole = [rank[scenario][0] for rank in ranks]
    divided = [rank[scenario][1] for rank in ranks][::2]
    for update in range(len(whole[0]["metrics"])):
        one, other = (merged([rank["metrics"][update] for rank in part]) for part in (divided, whole))
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    same_results(divided, whole)


def same_results(divided: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]]) -> None:
    """Scores by sample, terms of an evaluation, divergence and weights."""
    for name in whole[0].keys() & {"before", "reference", "after"}:
        one, other = ({key: value for rank in part for key, value in rank[name].items()} for part in (divided, whole))
        assert one.keys() == other.keys()
        for key, values in other.items():
            assert one[key] == pytest.approx(values, rel=1e-4, abs=1e-6)
    for name in whole[0].get("terms", ()):
        one, other = (sum(rank["terms"][name] for rank in part) for part in (divided, whole))
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    if "divergence" in whole[0]:
        (one, states), (other, expected) = (
            [sum(rank["divergence"][number] for rank in part) for number in range(2)] for part in (divided, whole)
        )
        assert states == expected and other > 0.0
        assert one == pytest.approx(other, rel=1e-3)
    weights = whole[0]["weights"]
    close([divided[0]["weights"][name] for name in weights], list(weights.values()))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_divided_rows_give_the_logprobs_and_gradients_of_whole_rows(
    family: str, shared: bool, found: list[dict[str, Any]]
) -> None:
    for rank in found:
        whole, divided = (results[int(shared)] for results in rank[family])
        close(divided, whole)


def test_a_reward_model_reads_the_scores_of_whole_rows(found: list[dict[str, Any]]) -> None:
    for rank in found:
        whole, divided = rank["reward model"]
        close(divided, whole)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_divide_its_rows_is_refused(name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert REFUSED[name][1] in rank[name]


@pytest.mark.parametrize(
    "scenario",
    [*(f"{what} {stage}" for what in ("policy", "adapters") for stage in STAGES), *(f"critic {s}" for s in CRITICS)],
)
def test_updates_on_divided_rows_are_those_of_one_rank(scenario: str, found: list[dict[str, Any]]) -> None:
    equal_updates(found, scenario)


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_updates_on_divided_rows_are_those_of_one_rank(name: str, found: list[dict[str, Any]]) -> None:
    equal_updates(found, name)


@pytest.mark.parametrize("stage", RESUMED)
def test_a_checkpoint_of_divided_rows_resumes_with_whole_ones(stage: int, found: list[dict[str, Any]]) -> None:
    resumed = [rank[f"resumed {stage}"] for rank in found]
    divided = found[0][f"policy {stage}"][1]
    one = merged([rank["metrics"][0] for rank in resumed])
    assert one == pytest.approx(merged([divided["metrics"][1]]), rel=1e-4, abs=1e-6)
    same_results([{name: divided[name] for name in ("divergence", "weights")}], resumed)


def test_pairs_of_ranks_divide_their_own_rows(model: str, tmp_path: Path) -> None:
    """Four ranks: sequence parallelism within pairs, data parallelism between them."""
    ranks = run_ranks(4, model, tmp_path)
    for scenario in (*(f"policy {stage}" for stage in CRITICS), f"critic {CRITICS[0]}"):
        equal_updates(ranks, scenario)
