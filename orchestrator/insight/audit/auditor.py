"""Samples from the run's own prompts, has trainer and scorer score the tokens, and reports the gap and its cause."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.data.mixture import group_settings
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import PromptSource
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.audit.attribution import Cause, Gap, attribute, distance, of_engine
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement
from troupe.orchestrator.pools.engines import EnginePool, sample_group
from troupe.orchestrator.roles.settings import policy_config, worker_env
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.batch import plan_rows
from troupe.workers.contract.audit import DOUBLED, MISSING, STALE, PromptDifference, ScoreRequest, TokenScores
from troupe.workers.contract.imports import resolve
from troupe.workers.contract.messages import GroupRequest, GroupSummary, sampled_tokens
from troupe.workers.contract.roles import RolloutEngine, TableRef

_WEIGHTS = "the update did not reach all weights that are used"
_ADAPTER = "the engine does not compute with the adapter of this version"
_ADAPTERS = {MISSING: "no adapter", DOUBLED: "an adapter that counts twice", STALE: "the adapter of before"}
_CONFIGURATION = "does not read the model's config.json as transformers does: check the field, and compare the versions"
_TRUNCATION = "nothing but `sampling` may truncate training samples: remove the sampler's"
_REMEDIES = {
    ("sampler", "temperature"): "sampling and log-probs must use sampling.temperature: check that nothing else sets a "
    "temperature, and that the engine returns processed log-probs",
    ("trainer", "temperature"): "the trainer must divide its logits by sampling.temperature, once",
    ("sampler", "head"): "the engine computes its output head in a shorter type than model.float32_head and "
    "model.dtype say: check that this version of vLLM supports head_dtype for this model",
    ("trainer", "head"): "the trainer computes its output head in a shorter type than model.float32_head and "
    "model.dtype say: check that the model's head is a linear layer",
    ("sampler", "top_p"): f"{_TRUNCATION} top-p",
    ("sampler", "top_k"): f"{_TRUNCATION} top-k",
    ("sampler", "min_p"): f"{_TRUNCATION} min-p",
    ("sampler", "ends"): "turns must be able to end: remove min_tokens, logit bias and bad words from the sampler",
    ("sampler", "type"): "the weights are rounded in the engine or on their way to it: check its type and quantization",
    ("trainer", "type"): "the trainer computes with rounded weights: check model.dtype",
    ("sampler", "rope"): f"the engine {_CONFIGURATION}",
    ("trainer", "rope"): f"the trainer {_CONFIGURATION}",
    ("sampler", "epsilon"): f"the engine {_CONFIGURATION}",
    ("trainer", "epsilon"): f"the trainer {_CONFIGURATION}",
    ("sampler", "positions"): "the engine numbers its tokens in another way than the model was trained: check its "
    "version and the model's rope parameters",
    ("trainer", "positions"): "the trainer numbers its tokens in another way than the model was trained: set "
    "roles.policy.packing to false",
    ("sampler", "weights"): f"{_WEIGHTS}: do not train on these samples; start the engines again, and report the model "
    "and the version of vLLM",
    ("trainer", "weights"): "the trainer does not hold the weights of the checkpoint: resume from another one",
    ("sampler", "adapter"): f"{_ADAPTER}: do not train on these samples; start the engines again, and report the model "
    "and the version of vLLM",
    ("trainer", "adapter"): "the trainer does not hold the adapter of the checkpoint: resume from another one",
    ("sampler", "prefix cache"): "the engine reuses states of older weights: set roles.rollout.enable_prefix_caching "
    "to false",
}
_UNEXPLAINED = "compare the versions of vLLM and transformers, and whether both support the model"
_TEMPLATE = "the engine renders prompts in another way than transformers does: check model.chat_template and that all "
_TEMPLATE += "nodes have the same tokenizer files"
_SAMPLES = 2
"""Responses to a prompt: the second reads the prompt from the engine's cache."""
_LEAST_PROMPTS = 4
_ROUNDS = 8
"""Most times that further prompts are sampled because responses are short."""
Scorer = Callable[..., Coroutine[Any, Any, TokenScores]]
"""Runs the scorer on the policy's node: (request, ROLLOUTS tables, tables of `old_logprobs`)."""
_SCORER = "troupe.workers.audit:score_tokens"


class AuditFailed(TroupeError):
    """Sampler and trainer do not agree, and rounding does not explain it."""


@dataclass(frozen=True)
class AuditReport:
    """The findings of one audit."""

    weights: str
    """What was compared: `the initial weights`, or `the checkpoint of step 40`."""
    version: int
    dtype: str
    gaps: tuple[Gap, ...]
    """The gap of every engine and of the trainer."""
    between: float
    """Mean |sampler - trainer| in nats."""
    prompts: int
    prompt_differences: tuple[PromptDifference, ...]
    seconds: dict[str, float]
    """Duration by phase."""

    @property
    def passed(self) -> bool:
        """Whether rounding explains every gap, and prompts are rendered as transformers renders them."""
        return not self.prompt_differences and all(gap.passed for gap in self.gaps)

    @property
    def tokens(self) -> int:
        return sum(gap.tokens for gap in self.gaps if gap.side == "sampler")

    def lines(self) -> list[str]:
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        lines = [f"audit of {self.weights}: {self.tokens} sampled tokens, {self.dtype} ({seconds})"]
        for gap in self.gaps:
            result = "explained by rounding" if gap.passed else "NOT explained by rounding"
            lines.append(
                f"  {gap.worker}: mean gap to the float32 scorer {gap.mean:.2g} nats (99th percentile {gap.p99:.2g}); "
                f"rounding {gap.rounding:.2g}: {result}"
            )
        lines.append(f"  sampler and trainer: mean gap {self.between:.2g} nats")
        if self.prompts:
            same = (
                "all as transformers renders them"
                if not self.prompt_differences
                else "NOT as transformers renders them"
            )
            lines.append(f"  prompts: {self.prompts} compared, {same}")
        lines += [f"  {line}" for line in self.findings()]
        return [*lines, "passed" if self.passed else "FAILED"]

    def findings(self) -> list[str]:
        """A line for every cause, with its remedy."""
        found = [f"{gap.worker}: {_causes(gap)}; {_remedy(gap)}" for gap in self.gaps if not gap.passed]
        for one in self.prompt_differences[:1]:
            found.append(
                f"template: prompt {one.prompt_uid} differs from token {one.position} on: the engine has "
                f"{one.found!r}, transformers has {one.expected!r}; {_TEMPLATE}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "findings": self.findings()}

    def require(self) -> None:
        """Raise AuditFailed unless the audit passed."""
        if not self.passed:
            head = (
                "sampler and trainer do not agree, and rounding does not explain it (`troupe audit` has the metrics):"
            )
            raise AuditFailed("\n  ".join([head, *self.findings()]))


def _causes(gap: Gap) -> str:
    first = gap.causes[0]
    if first.kind == "unexplained" and first.samples_only:
        return (
            "the log-probs are right, but the tokens are not drawn from them, and no single cause explains how "
            f"(the best candidates: {first.about})"
        )
    if first.kind == "unexplained":
        return f"no single cause explains the gap of {gap.mean:.2g} nats ({first.about})"
    others = " or ".join(_named(cause) for cause in gap.causes)
    if first.samples_only:
        return f"the log-probs are right, but the tokens are drawn with {others}"
    return f"{others} explains {first.share:.1%} of the gap of {gap.mean:.2g} nats"


def _named(cause: Cause) -> str:
    words = {
        "temperature": f"temperature {cause.about}",
        "head": f"an output head in {cause.about}",
        "top_p": f"top-p {cause.about}",
        "top_k": f"top-k {cause.about}",
        "min_p": f"min-p {cause.about}",
        "ends": "ends of turns left out",
        "type": f"weights in {cause.about}",
        "rope": f"rotary angles {cause.about}",
        "epsilon": f"norms with epsilon {cause.about}",
        "positions": f"shifted positions ({cause.about})",
        "weights": f"older weights in {cause.about}",
        "adapter": _ADAPTERS.get(cause.about, f"an adapter that is {cause.about}"),
        "prefix cache": "a stale prefix cache",
    }
    return words.get(cause.kind, cause.kind)


def _remedy(gap: Gap) -> str:
    return _REMEDIES.get((gap.side, gap.causes[0].kind), _UNEXPLAINED)


@dataclass(frozen=True)
class AuditedWeights:
    """The weights that engines and trainer must have."""

    label: str
    version: int
    folder: Path
    previous: Path | None = None
    """Folder with the weights that the engines served before, or None if there were no others."""
    adapter: Path | None = None
    """Folder of the adapter on the weights, or None without an adapter."""
    previous_adapter: Path | None = None
    """Folder of the adapter that the engines served before, or None if it had no effect."""


class Auditor:
    """Audits the engines of a pool and a policy. The workers are as they were afterwards."""

    def __init__(
        self, spec: RolloutSpec, pool: EnginePool, policy: PolicyGroup, prompts: tuple[Pool, TableRef], scorer: Scorer
    ) -> None:
        """`prompts`: the pool of data.train, and the reference to its table."""
        self._spec = spec
        self._pool = pool
        self._policy = policy
        self._prompts, self._table = prompts
        self._settings = group_settings(spec, self._prompts)
        self._scorer = scorer
        self._seconds: dict[str, float] = {}

    async def run(self, weights: AuditedWeights) -> AuditReport:
        """Compares engines, trainer and scorer with `weights`; in depth if a gap is not explained. Raises TroupeError
        if no prompt gives a response that can be compared; WorkerError if a worker failed."""
        self._seconds = {}
        found = await self._measure(weights, thorough=False)
        report = self._report(weights, found, None)
        if all(gap.passed for gap in report.gaps):
            return report
        fresh = None
        found = await self._measure(weights, thorough=True)  # with the caches as they are
        sampler_failed = any(gap.side == "sampler" and not gap.passed for gap in report.gaps)
        if sampler_failed and self._spec.roles.rollout.enable_prefix_caching:
            await self.forget()
            fresh = await self._measure(weights, thorough=False)
        return self._report(weights, found, fresh)

    async def warm(self) -> None:
        """Samples as an audit does, so that the engines' caches hold the prompts under the current weights."""
        await self._sample()

    async def forget(self) -> None:
        timeout_s = self._spec.schedule.generate_timeout_s
        await asyncio.gather(
            *(engine.handle.call(RolloutEngine.reset_prefix_cache, timeout_s) for engine in self._pool.workers)
        )

    async def _measure(self, weights: AuditedWeights, *, thorough: bool) -> TokenScores:
        spec = self._spec
        with self._phase("sample"):
            groups = await self._sample()
        with self._phase("score"):
            lengths = [length for summary, _ in groups for sample in summary.samples for length in sample.row_lengths]
            plans = plan_rows(lengths, self._policy)
            tables = [table for _, table in groups]
            scores = await self._policy.compute_logprobs(plans, *tables, timeout_s=spec.schedule.score_timeout_s)
        request = ScoreRequest(
            model=spec.model,
            weights=str(weights.folder),
            previous=None if weights.previous is None else str(weights.previous),
            adapter=None if weights.adapter is None else str(weights.adapter),
            previous_adapter=None if weights.previous_adapter is None else str(weights.previous_adapter),
            temperature=spec.sampling.temperature,
            thorough=thorough,
            compare_prompts=not spec.roles.environments(),
            threads=policy_config(spec).trainer.threads,
        )
        with self._phase("scorer"):
            return await self._scorer(request, *tables, *(table for _, table in scores))

    async def _sample(self) -> list[tuple[GroupSummary, TableRef]]:
        """Groups with at least `audit.tokens` sampled tokens together, as far as the prompts give them."""
        audit, spec = self._spec.audit, self._spec
        longest = min(audit.response_tokens, spec.sampling.max_tokens)
        source = PromptSource(self._prompts, spec.seed)
        count = max(_LEAST_PROMPTS, len(self._pool.workers), math.ceil(audit.tokens / (_SAMPLES * longest)))
        groups: list[tuple[GroupSummary, TableRef]] = []
        for _ in range(_ROUNDS):
            picks = [source.next() for _ in range(count)]
            requests = [
                GroupRequest(
                    prompt_uid=f"audit-{pick.prompt_uid}",
                    row=pick.row,
                    attempt=0,
                    samples=_SAMPLES,
                    seed=sampling_seed(spec.seed, pick.prompt_uid),
                    max_tokens=longest,
                    environment=self._settings[pick.row].environment,
                    forms=False,  # log-probs would be relative to the permitted tokens, which no scorer has
                )
                for pick in picks
            ]
            found = await asyncio.gather(*(sample_group(self._pool, request, self._table) for request in requests))
            groups += [group for group in found if not group[0].refused]
            sampled = sum(count for summary, _ in groups for count in sampled_tokens(summary.samples))
            if sampled >= audit.tokens:
                break
            short = audit.tokens - sampled
            count = min(256, max(_LEAST_PROMPTS, math.ceil(count * short / max(sampled, 1))))
        if not groups:
            raise TroupeError("audit: no prompt of data.train could be used; `troupe validate` says why")
        return groups

    def _report(self, weights: AuditedWeights, found: TokenScores, fresh: TokenScores | None) -> AuditReport:
        engines = sorted(set(found.engine))
        by_engine = [
            attribute("sampler", of_engine(found, name), None if fresh is None else of_engine(fresh, name))
            for name in engines
        ]
        return AuditReport(
            weights=weights.label,
            version=weights.version,
            dtype=self._dtype(),
            gaps=(*by_engine, attribute("trainer", found)),
            between=distance(found.sampler, found.trainer),
            prompts=found.prompts,
            prompt_differences=found.prompt_differences,
            seconds=dict(self._seconds),
        )

    def _dtype(self) -> str:
        model = self._spec.model
        return f"{model.dtype} with a float32 head" if model.computes_float32_logits else model.dtype

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started


def token_scorer(spec: RolloutSpec, cluster: Cluster, placed: tuple[Placement, WorkerPlacement]) -> Scorer:
    """A scorer in a separate process, on the node of this placement; raises WorkerError if it fails."""

    async def score(request: ScoreRequest, *tables: TableRef) -> TokenScores:
        env, timeout_s = worker_env(request.threads or 1, "cpu"), spec.schedule.score_timeout_s
        return await cluster.run_beside(*placed, env, resolve(_SCORER), timeout_s, request, *tables)

    return score
