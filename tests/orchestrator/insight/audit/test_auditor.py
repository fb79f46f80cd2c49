"""The auditor, on engines and a policy that are plain transformers: what it samples, and what it repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.fakes import FakeEngine, FakePolicy, FaultyWorker
from tests.real.audit_faults import audit_spec
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.audit.auditor import AuditedWeights, Auditor
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.workers.audit import score_tokens
from troupe.workers.contract.audit import TokenScores
from troupe.workers.contract.messages import ROLLOUTS, GroupRequest, GroupSummary, RankPlan, SampleSummary
from troupe.workers.data.chat import encode_prompt
from troupe.workers.models.modeling import CausalLogprobs, score_plan


class ModelEngine(FakeEngine):
    """Samples with transformers."""

    def __init__(self, name: str, folder: Path, temperature: float) -> None:
        super().__init__(name)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.temperature = temperature
        self.refuses = False
        self.stale_cache = False
        """Log-probs are wrong until the cache is reset."""
        self.requests: list[GroupRequest] = []
        self.resets = 0

    async def reset_prefix_cache(self) -> bool:
        self.resets += 1
        self.stale_cache = False
        return True

    async def generate(self, request: GroupRequest, prompts: Any, finished: Any = None) -> tuple[GroupSummary, Any]:
        self.requests.append(request)
        if self.refuses:
            return GroupSummary(request.prompt_uid, 0, self.name, (), 0.0, "too long"), ROLLOUTS.empty_table()
        prompt = prompts.slice(request.row, 1).to_pylist()[0]
        ids = encode_prompt(self.tokenizer, prompt["messages"], 100)
        rows = [self._row(request, index, prompt, ids) for index in range(request.samples)]
        samples = tuple(SampleSummary(i, len(ids), len(r["response_ids"]), "length", 0, 0) for i, r in enumerate(rows))
        return GroupSummary(request.prompt_uid, 0, self.name, samples, 0.0), pa.Table.from_pylist(rows, schema=ROLLOUTS)

    def _row(self, request: GroupRequest, index: int, prompt: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        response, logprobs = self._sample(ids, request.max_tokens or 24, request.seed + index)
        return {
            "prompt_uid": request.prompt_uid,
            "sample_index": index,
            "attempt": 0,
            "segment": 0,
            "prompt_ids": ids,
            "response_ids": response,
            "rollout_logprobs": logprobs,
            "loss_mask": [True] * len(response),
            "weight_versions": [{"version": 0, "start": 0, "end": len(response)}],
            "turns": [],
            "finish_reason": "length",
            "episode_status": "ok",
            "response": "",
            "messages": prompt["messages"],
            "conversation": "",
            "turn_rewards": [],
            "answer": "",
            "metadata": "{}",
            "engine": self.name,
            "generate_s": 0.0,
            "first_token_s": 0.0,
        }

    @torch.no_grad()
    def _sample(self, ids: list[int], count: int, seed: int) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(seed)
        response: list[int] = []
        found: list[float] = []
        for _ in range(count):
            logits = self.model(torch.tensor([ids + response]), logits_to_keep=1).logits[0, -1]
            logprobs = torch.log_softmax(logits / self.temperature, -1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            response.append(token)
            found.append(float(logprobs[token]) + (0.1 * torch.randn(1).item() if self.stale_cache else 0.0))
        return response, found


class ModelPolicy(FakePolicy):
    """Scores with the trainer's own module, without DeepSpeed."""

    module: CausalLogprobs

    def compute_logprobs(self, plan: RankPlan, *rollouts: Any) -> Any:
        return score_plan(self.module, plan, rollouts, "old_logprobs", "cpu")


class Parts:
    """Engines, a policy and the auditor between them."""

    def __init__(self, folder: Path, model: Path, engines: int = 1) -> None:
        changes = ("sampling.max_tokens=8", "audit.tokens=64", "roles.policy.threads=1")
        spec = audit_spec(folder, model, "float32", *changes)
        self.spec = spec
        temperature = spec.sampling.temperature
        self.engines = [ModelEngine(f"rollout-{number}", model, temperature) for number in range(engines)]
        policy = ModelPolicy.__new__(ModelPolicy)
        policy.module = CausalLogprobs(self.engines[0].model, temperature)
        self.policy = policy
        group = PolicyGroup("policy", [FaultyWorker("policy-0", policy)], 2048)
        pool = EnginePool(
            [Engine(FaultyWorker(e.name, e), "here") for e in self.engines], self._none, spec, PoolWeights()
        )
        prompts = load_data(spec).train
        self.scored: list[bool] = []
        self.auditor = Auditor(spec, pool, group, (prompts, prompts.table), self._score)
        self.weights = AuditedWeights("the initial weights", 0, model)

    async def _none(self, name: str) -> Engine:
        raise RuntimeError(name)

    async def _score(self, request: Any, *tables: Any) -> TokenScores:
        self.scored.append(request.thorough)
        return score_tokens(request, *tables)


@pytest.fixture
def parts(tmp_path: Path, tiny_model: Path) -> Parts:
    return Parts(tmp_path, tiny_model)


async def test_an_audit_that_passes_scores_once(parts: Parts) -> None:
    report = await parts.auditor.run(parts.weights)
    assert report.passed, report.lines()
    assert parts.scored == [False]
    assert report.tokens == 64
    assert report.prompts == 4
    assert report.between < 1e-4
    (engine,) = parts.engines
    assert engine.resets == 0
    assert {request.samples for request in engine.requests} == {2}
    assert {request.max_tokens for request in engine.requests} == {8}
    assert not any(request.forms for request in engine.requests)
    assert set(report.seconds) == {"sample", "score", "scorer"}


async def test_a_gap_is_scored_in_depth_and_with_an_empty_cache(parts: Parts) -> None:
    parts.engines[0].stale_cache = True
    report = await parts.auditor.run(parts.weights)
    assert parts.scored == [False, True, False]
    assert parts.engines[0].resets == 1
    (finding,) = report.findings()
    assert finding.startswith("rollout-0: a stale prefix cache")


async def test_the_trainers_gap_needs_no_empty_cache(parts: Parts) -> None:
    parts.policy.module.temperature = 1.0
    report = await parts.auditor.run(parts.weights)
    assert parts.scored == [False, True]
    assert parts.engines[0].resets == 0
    (finding,) = report.findings()
    assert finding.startswith("trainer: temperature 1 ")


async def test_the_engine_with_the_gap_is_named(tmp_path: Path, tiny_model: Path) -> None:
    parts = Parts(tmp_path, tiny_model, engines=2)
    parts.engines[1].temperature = 1.4
    report = await parts.auditor.run(parts.weights)
    assert [(gap.worker, gap.passed) for gap in report.gaps] == [
        ("rollout-0", True),
        ("rollout-1", False),
        ("trainer", True),
    ]
    (finding,) = report.findings()
    assert finding.startswith("rollout-1: temperature 1.4 ")


async def test_prompts_that_cannot_be_used_are_an_error(parts: Parts) -> None:
    parts.engines[0].refuses = True
    with pytest.raises(TroupeError, match=r"no prompt of data\.train"):
        await parts.auditor.run(parts.weights)
