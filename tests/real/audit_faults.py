"""A sampler and a trainer on the real stack, and faults to plant in them, for the tests of the audit.

Faults are planted in subclasses of the workers and, inside the engine's process, by an extension of vLLM's worker
(`engine_faults.py`). The product has no switch for any of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch.nn import functional

from tests.conftest import ROOT
from tests.fakes import FaultyWorker
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.insight.audit.auditor import AuditedWeights, Auditor, AuditReport
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.roles.settings import policy_config, rollout_config
from troupe.orchestrator.rollouts.weight_sync import FileSync
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.audit import score_tokens
from troupe.workers.contract.audit import TokenScores
from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.messages import GroupRequest, RankPlan, ScoreSummary
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.policy import PolicyWorker
from troupe.workers.rollout import RolloutWorker

EXTENSION = "tests.real.engine_faults.FaultyExtension"
LEFT_OUT = "model.layers.1."
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
SYNC_S = 120.0


def audit_spec(folder: Path, model: Path, dtype: str, *overrides: str) -> RolloutSpec:
    """The tiny GRPO spec with prompts longer than a block of the engine's cache, all of the same length."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": f"Tell me what {a} + {b} is.", "answer": str(a + b)} for a in range(2, 8) for b in range(2, 8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [
        *(f"model.path={model}", f"model.dtype={dtype}", "sampling.max_tokens=20", "sampling.temperature=0.7"),
        *("audit.tokens=160", f"data.train={{kind: jsonl, path: {data}}}"),
    ]
    return load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-grpo.yaml", [*changes, *overrides])


class FaultyRollout(RolloutWorker):
    """A rollout worker with faults of its own."""

    keeps_cache = False
    """Keep the prefix cache over an update."""
    sampling: Mapping[str, float] = {}
    """Sample with these parameters of vLLM."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self._own_pause, self._own_params = self.engine.pause, self.generation.sampling_params
        vars(self.engine)["pause"] = self._pause
        vars(self.generation)["sampling_params"] = self._sampling_params

    async def plant(self, fault: str, about: str = "") -> None:
        """Plants a fault in the engine's process."""
        await self.engine.require_live().collective_rpc("plant", args=(fault, about))

    async def cure(self) -> None:
        """Removes every fault."""
        self.keeps_cache, self.sampling = False, {}
        await self.engine.require_live().collective_rpc("cure")

    async def _pause(self) -> Any:
        if not self.keeps_cache:
            return await self._own_pause()
        engine = self.engine.require_live()
        await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        return engine

    def _sampling_params(self, request: GroupRequest, index: int, limits: Any = None) -> Any:
        params = self._own_params(request, index, limits)
        for name, value in self.sampling.items():
            setattr(params, name, value)
        return params


class FaultyPolicy(PolicyWorker):
    """A policy with faults of its own."""

    late = False
    """Responses are one position late."""
    scaled = False
    """Positions are twice what they should be."""
    no_norm = False
    """The last norm does nothing."""
    head: torch.dtype | None = None
    """The output head computes in this type."""

    @property
    def logprobs_module(self) -> CausalLogprobs:
        """The module that scores tokens."""
        module = self.engine.module
        assert isinstance(module, CausalLogprobs)
        return module

    def compute_logprobs(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """As the policy does, with the faults."""
        module = self.logprobs_module
        hooks = []
        if self.late:
            starts = {tuple(ids) for table in rollouts for ids in table.column("prompt_ids").to_pylist()}
            (start,) = {len(ids) for ids in starts}

            def shift(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                places = kwargs.get("position_ids")
                if places is None:
                    places = torch.arange(kwargs["input_ids"].shape[1])[None]
                return args, kwargs | {"position_ids": places + (places >= start)}

            hooks.append(module.model.base_model.register_forward_pre_hook(shift, with_kwargs=True))
        if self.scaled:

            def stretch(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                places = kwargs.get("position_ids")
                if places is None:
                    places = torch.arange(kwargs["input_ids"].shape[1])[None]
                return args, kwargs | {"position_ids": 2 * places}

            hooks.append(module.model.base_model.register_forward_pre_hook(stretch, with_kwargs=True))
        if self.no_norm:
            norm = module.model.base_model.get_submodule("norm")
            hooks.append(norm.register_forward_hook(lambda norm, args, output: args[0]))
        if self.head is not None:
            dtype = self.head

            def short(head: Any, args: Any, output: Any) -> Any:
                logits = functional.linear(args[0].to(dtype), head.weight.to(dtype)).float()
                if len(args) == 1:
                    return logits
                _, targets, factor, _ = args  # a float32 head of a bfloat16 model computes log-probs itself
                logprobs = (factor * logits).log_softmax(-1)
                return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

            found = module.model.get_output_embeddings()
            assert found is not None
            hooks.append(found.register_forward_hook(short))
        try:
            return super().compute_logprobs(plan, *rollouts)
        finally:
            for hook in hooks:
                hook.remove()

    def cure(self) -> None:
        """Removes every fault."""
        self.late, self.scaled, self.no_norm, self.head = False, False, False, None
        self.logprobs_module.temperature = self._config.sampling.temperature


class Stack:
    """One engine and one policy rank in this process, connected as in a run."""

    def __init__(self, spec: RolloutSpec, folder: Path, scorer: Executor) -> None:
        """`scorer`: a separate process that scores. With the trainer's memory settings it would take twice as long."""
        self.spec = spec
        self.folder = folder
        self.scorer = scorer
        self.version = 0
        self.initial = Path(spec.model.path)
        self.weights = AuditedWeights("the initial weights", 0, self.initial)
        self.engine = FaultyRollout(rollout_config(spec), "rollout-0")
        self.policy = FaultyPolicy(policy_config(spec), "policy-0")
        pool = EnginePool([Engine(FaultyWorker("rollout-0", self.engine), "here")], self._no_other, spec, PoolWeights())
        self.pool = pool
        group = PolicyGroup("policy", [FaultyWorker("policy-0", self.policy)], spec.roles.policy.micro_batch_tokens)
        self.group = group
        self.push_version: Callable[[int], Awaitable[object]] = FileSync(group, pool, SYNC_S).push
        prompts = load_data(spec).train
        self.auditor = Auditor(spec, pool, group, (prompts, prompts.table), self._score)

    async def start(self) -> None:
        """Starts both workers."""
        health = await self.engine.start()
        self.pool.workers[0].host = health.host
        if torch.distributed.is_initialized():
            self.policy.build()  # DeepSpeed knows only the first group of a process
        else:
            await self.group.start(SYNC_S)

    async def close(self) -> None:
        """Ends both workers."""
        await self.engine.close()
        self.policy.release()

    async def update(self, seed: int) -> None:
        """Changes every weight of the policy a little, and pushes them, after the engine has sampled."""
        await self.auditor.warm()
        generator = torch.Generator().manual_seed(seed)
        for _, weight in self.policy.engine.named_weights():
            scale = 0.1 * weight.float().std().clamp(min=0.5)
            weight += (scale * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        self.version += 1
        folder, previous = self.folder / f"version-{self.version}", self.weights.folder
        self.policy.export(str(folder))
        await self.push_version(self.version)
        self.weights = AuditedWeights(f"version {self.version}", self.version, folder, previous)

    async def push(self) -> None:
        """Pushes the weights of now once more, without a fault."""
        await self.cure()
        self.version += 1
        await self.push_version(self.version)

    async def cure(self) -> None:
        """Removes every fault."""
        await self.engine.cure()
        self.policy.cure()

    async def audit(self) -> AuditReport:
        """Audits the stack as it is."""
        return await self.auditor.run(self.weights)

    async def _score(self, *args: Any) -> TokenScores:
        return await asyncio.get_running_loop().run_in_executor(self.scorer, score_tokens, *args)

    async def _no_other(self, name: str) -> Engine:
        raise RuntimeError(f"{name} died")
