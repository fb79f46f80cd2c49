"""The reward worker: combines reward functions and reward models into the reward of a sample and of its steps."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from troupe.workers.agents.interface import JudgeReward
from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.environments import OK, cause_of
from troupe.workers.contract.judges import Judge
from troupe.workers.contract.messages import (
    IDENTITY,
    REWARDS,
    ROLLOUTS,
    SHARED_CALL_S,
    Fault,
    KeepRequest,
    KeptTable,
    Peak,
    ReferenceScores,
    RewardRequest,
    RewardSummary,
    ScoredGroups,
    Unscored,
    WorkerHealth,
)
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig, ScoringConfig
from troupe.workers.contract.rewards import (
    COMBINATIONS,
    COMPARED,
    ENVIRONMENT_REWARD,
    JUDGE_REWARD,
    differ,
    not_usable,
    total,
)
from troupe.workers.data.kept_tables import Kept, keep_groups, read_group
from troupe.workers.data.plain_text import response_text, token_counts
from troupe.workers.data.trajectories import write_evaluation, write_trajectories
from troupe.workers.data.turn_ends import without_end
from troupe.workers.rewards.results import Step
from troupe.workers.rewards.runner import EnvironmentReward, RewardProcess, RewardResult, Sample
from troupe.workers.rewards.thoughts import VOTES, with_opened_thoughts
from troupe.workers.telemetry.peak_memory import FamilyPeak
from troupe.workers.telemetry.start_activity import Activity, announce

if TYPE_CHECKING:
    from troupe.workers.rewards.model import RewardModel

_SUM = "sum"
_VOTE_S = 30.0
"""Longest comparison of the answers of a group."""
_SAME_OUTCOMES = {"weight": 1.0, "label": "", "normalize": False}
"""Settings of a component that do not affect its outcomes."""
_NOT_COMBINED = RewardResult(None, "a component has no value")
_NONE: Mapping[str, float] = MappingProxyType({})
Component = EnvironmentReward | JudgeReward | RewardProcess
"""Computes one component of the reward of samples."""


@dataclass(frozen=True)
class SampleReward:
    """Reward of one sample; None unless the status is ok."""

    status: str
    reward: float | None
    spans: tuple[Step, ...] = ()
    """Process rewards: (tokens up to the end of the step, reward), in order."""


def component_labels(components: Sequence[RewardFunctionConfig]) -> tuple[str, ...]:
    """Names of the reward's components. Raises ValueError if there is no component, or two have the same label."""
    labels = [component.component for component in components]
    if not labels:
        raise ValueError("a reward needs at least one function or a model")
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(f"reward components must have different labels; used more than once: {', '.join(twice)}")
    return tuple(labels)


def combine(labels: Sequence[str], weights: Sequence[float], outcomes: Sequence[RewardResult]) -> SampleReward:
    """Weighted sum of one sample's components. A failed component fails the reward; the status names it."""
    failures = [
        f"{label}: {o.status}"
        for label, o in zip(labels, outcomes, strict=True)
        if o.value is None and o is not _NOT_COMBINED
    ]
    if failures:
        return SampleReward("; ".join(failures), None)
    reward = total(weight * (o.value or 0.0) for weight, o in zip(weights, outcomes, strict=True))
    if wrong := not_usable(reward):
        return SampleReward(f"{_SUM}: {wrong}", None)
    return SampleReward("ok", reward)


def combination(component: RewardFunctionConfig, outcomes: Sequence[RewardResult]) -> RewardResult:
    """One sample's combination of the components in `component.of`. If one of these has failed, so has the sample, and
    the combination adds no reason."""
    values = [outcome.value for outcome in outcomes if outcome.value is not None]
    if len(values) < len(outcomes):
        return _NOT_COMBINED
    return bounded(RewardResult(COMBINATIONS[component.name](values, float(component.args.get("coef", 1.0)))))


def reward_spans(
    weights: Sequence[float],
    outcomes: Sequence[RewardResult],
    tokens: int,
    counts: Callable[[Sequence[int]], Sequence[int]],
) -> tuple[Step, ...]:
    """Process rewards of one sample: at each token, the weighted sum of the steps that end. A component without
    steps ends at the last token; one with weight 0 adds none. `counts` maps character positions to numbers of
    tokens. Raises ValueError if a sum is not finite, or too large."""
    weighted = [(weight, outcome) for weight, outcome in zip(weights, outcomes, strict=True) if weight]
    if not tokens or not any(outcome.steps for _, outcome in weighted):
        return ()
    at_end: dict[int, list[float]] = {}
    for weight, outcome in weighted:
        ends = counts([end for end, _ in outcome.steps]) if outcome.steps else [tokens]
        rewards = [reward for _, reward in outcome.steps] or [outcome.value or 0.0]
        for end, reward in zip(ends, rewards, strict=True):
            at_end.setdefault(end, []).append(weight * reward)
    sums = {end: total(rewards) for end, rewards in at_end.items()}
    if wrong := next(filter(None, map(not_usable, sums.values())), ""):
        raise ValueError(wrong)
    return tuple(sorted(sums.items()))


def find_faults(labels: Sequence[str], components: Sequence[Sequence[RewardResult]]) -> tuple[Fault, ...]:
    """Causes of failed samples, by component (outcomes by component, then by sample)."""
    return _counted(
        (f"{label}: {outcome.cause or outcome.status}", outcome.status)
        for label, outcomes in zip(labels, components, strict=True)
        for outcome in outcomes
        if outcome.value is None and outcome is not _NOT_COMBINED
    )


def sum_faults(rewards: Sequence[SampleReward], components: Sequence[Sequence[RewardResult]]) -> tuple[Fault, ...]:
    """Causes of rewards that failed although every component has a number (outcomes by sample)."""
    pairs = zip(rewards, components, strict=True)
    failed = [
        reward.status for reward, parts in pairs if reward.reward is None and all(o.value is not None for o in parts)
    ]
    return _counted((status.partition(": ")[0], status) for status in failed)


def bounded(outcome: RewardResult) -> RewardResult:
    """The outcome, or a failed one if its number, or a step's, is too large for the statistics of a batch."""
    numbers = [reward for _, reward in outcome.steps] + [0.0 if outcome.value is None else outcome.value]
    wrong = next(filter(None, map(not_usable, numbers)), "")
    return RewardResult(None, wrong, cause=wrong.partition(":")[0]) if wrong else outcome


def episode_faults(statuses: Sequence[str]) -> tuple[Fault, ...]:
    """Causes of failed episodes."""
    return _counted((cause_of(status), status) for status in statuses if status != OK)


def _counted(failures: Iterable[tuple[str, str]]) -> tuple[Fault, ...]:
    """Failures by cause: (cause, status) of each."""
    faults: dict[str, Fault] = {}
    for cause, status in failures:
        before = faults.get(cause, Fault(cause, status, 0))
        faults[cause] = replace(before, samples=before.samples + 1)
    return tuple(faults.values())


class _Rewards:
    """The components of one reward; components of several rewards may share a process."""

    def __init__(
        self,
        components: Sequence[RewardFunctionConfig],
        models: Mapping[str, RewardModelConfig],
        component: Callable[[RewardFunctionConfig, int], Component],
    ) -> None:
        self.components = components
        self.labels = component_labels(components)
        self.weights = tuple(one.weight for one in components)
        self.models = tuple(dict.fromkeys(one.model for one in components if one.model))
        functions = [one for one in components if not one.model and not one.of]
        same = [function.model_copy(update=_SAME_OUTCOMES) for function in functions]
        before = [same[:number].count(function) for number, function in enumerate(same)]
        self.functions = {f.component: component(f, n) for f, n in zip(functions, before, strict=True)}
        by_step = any(models[name].level == "step" for name in self.models)
        self.gives_steps = by_step or any(function.process for function in functions)
        compared = [one for one in functions if one.weight and one.name in COMPARED]
        self.voting = {"reward": compared[0].name, "args": compared[0].args} if len(compared) == 1 else {}
        self.splits_text = by_step or any(f.process and f.name != ENVIRONMENT_REWARD for f in functions)


class RewardWorker:
    """Scores groups of samples. Every reward function runs in its own process."""

    def __init__(
        self, config: RewardConfig, name: str, device: Device = "cpu", policy: ModelConfig | None = None
    ) -> None:
        """Set up the components. `policy`: the model whose tokenizer made the responses, for process rewards, and to
        know whether its template opens the thought of a response."""
        pickle_tables()
        self.config = config
        self.name = name
        self.device: Device = device
        self.policy = policy
        self._components: dict[str, Component] = {}
        """Components by the settings that affect their outcomes."""
        sets = {"": config.components} | (config.sets if isinstance(config, ScoringConfig) else {})
        models = config.reward_models
        self._rewards = {name: _Rewards(own, models, self._component) for name, own in sets.items()}
        self._teacher_tokens = isinstance(config, ScoringConfig) and config.teacher_tokens
        self._processes = [part for part in self._components.values() if isinstance(part, RewardProcess)]
        self._family = FamilyPeak()
        self._judges = [part for part in self._components.values() if isinstance(part, JudgeReward)]
        self._votes: dict[str, RewardProcess] = {}
        self._models: dict[str, RewardModel] = {}
        self._tokenizer: Any = None

    def _component(self, function: RewardFunctionConfig, before: int) -> Component:
        """The component of a function, `before` times used in the same reward: components of one run concurrently."""
        key = f"{before} {function.model_dump_json(exclude={*_SAME_OUTCOMES})}"
        if key not in self._components:
            self._components[key] = _component(function, self.config.memory_limit_mib)
        return self._components[key]

    def start(self) -> WorkerHealth:
        """Load every function and model, so that errors show before the run. Raises RewardFunctionError if a function
        cannot be loaded, and ValueError or OSError if a reward model or the policy's tokenizer cannot be loaded, or a
        judge's cache or key."""
        try:
            measured = any(isinstance(model.offset, str) for model in self.config.reward_models.values())
            if measured or any(rewards.splits_text for rewards in self._rewards.values()):
                self._tokenizer = _load_tokenizer(self.policy)
            announce(Activity.FUNCTIONS)
            for process in self._processes:
                process.config = with_opened_thoughts(process.config, self.policy)
            for process in (*self._processes, *self._judges):
                process.start()
            if self.config.reward_models and not self._models:
                self._load_models()
        except BaseException:
            self.close()
            raise
        return self.health()

    def connect_judge(self, judge: Judge) -> None:
        """Ask this judge from now on if a function names no endpoint."""
        for function in self._judges:
            function.connect(judge)

    def score_groups(
        self, asked: Sequence[RewardRequest], *rollouts: pa.Table
    ) -> tuple[ScoredGroups, *tuple[pa.Table | None, ...]]:
        """Score the first group, and others until `SHARED_CALL_S` have passed: no group waits long for others, and a
        call of several takes hardly longer than one of the slowest."""
        started = time.perf_counter()
        scored: list[tuple[RewardSummary, pa.Table]] = []
        for one, table in zip(asked, rollouts, strict=True):
            if scored and time.perf_counter() - started > SHARED_CALL_S:
                break
            scored.append(self.score(table, one.rewards, one.vote, one.offsets))
        summaries = tuple(summary for summary, _ in scored)
        tables = [table for _, table in scored] + [None] * (len(rollouts) - len(scored))
        return ScoredGroups(summaries, peak=self._peak()), *tables

    def score(
        self, rollouts: pa.Table, rewards: str = "", vote: bool = False, offsets: Mapping[str, float] = _NONE
    ) -> tuple[RewardSummary, pa.Table]:
        """Score one group: from a ROLLOUTS table to a REWARDS table with a row per sample, in order. `rewards` names
        a set of functions in `ScoringConfig.sets`, empty for the role's. With `vote` the summary has which
        samples give the same answer (`troupe.workers.rewards.numeric`). `offsets`: measured ones, by reward model.
        Raises ValueError for another table, or more than one group and attempt; KeyError; RuntimeError before `start`;
        JudgeGone if the judge is being replaced."""
        started = time.perf_counter()
        asked = self._rewards[rewards]
        rollouts = _samples_of(_check_group(rollouts))
        statuses = rollouts["episode_status"].to_pylist()
        played = [status == OK for status in statuses]
        # Episodes that have failed are not scored.
        given = rollouts.filter(pa.array(played))
        scored = self._outcomes(asked, given, offsets) if any(played) else [[] for _ in asked.labels]
        components = [_with_failed(outcomes, statuses) for outcomes in scored]
        per_sample = list(zip(*components, strict=True))
        combined = [
            combine(asked.labels, asked.weights, outcomes) if status == OK else SampleReward(status, None)
            for outcomes, status in zip(per_sample, statuses, strict=True)
        ]
        if asked.gives_steps:
            texts = rollouts.select(["response", "response_ids", "conversation", "tokens"]).to_pylist()
            rows = zip(combined, per_sample, texts, strict=True)
            combined = [self._with_spans(asked.weights, *parts) for parts in rows]
        identities = rollouts.select([field.name for field in IDENTITY]).to_pylist()
        summary = RewardSummary(
            prompt_uid=identities[0]["prompt_uid"],
            attempt=identities[0]["attempt"],
            statuses=tuple(reward.status for reward in combined),
            rewards=tuple(reward.reward for reward in combined),
            components=_reported(asked.labels, components),
            answers=self._answers(asked, rollouts) if vote else (),
            steps_differ=differ(reward for sample in combined for _, reward in sample.spans),
            faults=(*find_faults(asked.labels, scored), *sum_faults(combined, per_sample), *episode_faults(statuses)),
            seconds=time.perf_counter() - started,
        )
        return summary, _rewards_table(identities, asked, combined, per_sample)

    def score_references(self, model: str, references: pa.Table) -> ReferenceScores:
        """Score reference answers (REFERENCES) with a reward model, without an offset, as if the policy had sampled
        their tokens. Raises RuntimeError before `start`."""
        from troupe.workers.data.chat import encode_prompt
        from troupe.workers.data.examples import encode_response

        given, rows = references.to_pylist(), list[dict[str, Any]]()
        for row in given:
            try:
                prompt_ids = encode_prompt(self._tokenizer, row["messages"], sys.maxsize)
                ids = encode_response(self._tokenizer, row["messages"], prompt_ids, row["response"])
            except ValueError as error:
                return ReferenceScores((), f"{row['origin']}: {error}")
            sampled = {"response": self._decode(ids), "prompt_ids": prompt_ids, "response_ids": ids}
            rows.append({"messages": row["messages"], "conversation": ""} | sampled)
        outcomes = self._scores(model, pa.Table.from_pylist(rows), {model: 0.0})
        pairs = zip(given, outcomes, strict=True)
        problems = [f"{row['origin']}: {outcome.status}" for row, outcome in pairs if outcome.value is None]
        scores = tuple(outcome.value for outcome in outcomes if outcome.value is not None)
        return ReferenceScores(scores, next(iter(problems), ""), peak=self._peak())

    def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: pa.Table) -> int:
        return write_trajectories(path, step, unscored, tables, teacher_tokens=self._teacher_tokens)

    def write_evaluation(self, path: str, step: int, *tables: pa.Table) -> int:
        return write_evaluation(path, step, tables)

    def keep_groups(self, folder: str, request: KeepRequest, *tables: pa.Table) -> tuple[Kept, ...]:
        return keep_groups(folder, request, tables)

    def read_group(self, folder: str, kept: KeptTable) -> tuple[int, pa.Table]:
        table = read_group(folder, kept)
        return table.num_rows, table

    def health(self) -> WorkerHealth:
        """Health of the worker; a reward worker has no policy version."""
        return WorkerHealth(self.name, socket.gethostname(), os.getpid(), 0, 0, peak=self._peak())

    def close(self) -> None:
        """End the functions' processes and release the model."""
        for process in (*self._processes, *self._judges):
            process.close()
        self._models = {}
        self._tokenizer = None

    def _peak(self) -> Peak:
        """Peak memory of this process and the functions' processes, without processes that a function starts."""
        functions = [process.pid for process in self._processes if process.pid is not None]
        return Peak(self._family.read(functions), max((model.gpu_peak() for model in self._models.values()), default=0))

    def _load_models(self) -> None:
        import torch

        from troupe.workers.rewards.model import RewardModel

        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        announce(Activity.MODEL)
        for name, config in self.config.reward_models.items():
            self._models[name] = model = RewardModel(config, self.config.micro_batch_tokens, self.device)
            if config.level != "response" and not model.reads_steps:
                raise ValueError(f"{config.path}: its head gives no scores of tokens (level: {config.level})")

    def _outcomes(self, asked: _Rewards, rollouts: pa.Table, offsets: Mapping[str, float]) -> list[list[RewardResult]]:
        """Outcomes by component, then by sample. Functions run concurrently, the models on this thread."""
        samples = _samples(rollouts)
        with contextlib.ExitStack() as stack:
            futures = {}
            if asked.functions:
                pool = stack.enter_context(ThreadPoolExecutor(len(asked.functions)))
                futures = {label: pool.submit(one.score, samples) for label, one in asked.functions.items()}
            scores = {name: self._scores(name, rollouts, offsets) for name in asked.models}
            found = {label: future.result() for label, future in futures.items()}
        found |= {one.component: scores[one.model] for one in asked.components if one.model}
        found = {label: [bounded(outcome) for outcome in outcomes] for label, outcomes in found.items()}
        for one in asked.components:
            if one.of:
                parts = zip(*(found[label] for label in one.of), strict=True)
                found[one.component] = [combination(one, outcomes) for outcomes in parts]
        return [found[label] for label in asked.labels]

    def _answers(self, asked: _Rewards, rollouts: pa.Table) -> tuple[int | None, ...]:
        """Number of each sample's answer. The process starts with the first vote."""
        config = RewardFunctionConfig(name=VOTES, batched=True, timeout_s=_VOTE_S, args=asked.voting)
        process = self._votes.get(config.model_dump_json())
        if process is None:
            process = RewardProcess(with_opened_thoughts(config, self.policy), self.config.memory_limit_mib)
            self._votes[config.model_dump_json()] = process
            self._processes.append(process)
        outcomes = process.score(_samples(rollouts))
        return tuple(None if outcome.value is None else int(outcome.value) for outcome in outcomes)

    def _with_spans(
        self, weights: Sequence[float], reward: SampleReward, outcomes: Sequence[RewardResult], row: dict[str, Any]
    ) -> SampleReward:
        """The reward with its process rewards, or a failed reward with the reason why there are none."""
        if reward.reward is None:
            return reward
        text, ids = row["response"], row["response_ids"]

        def counts(ends: Sequence[int]) -> Sequence[int]:
            # The steps of an episode are its turns, and they end at tokens.
            return ends if row["conversation"] else token_counts(ends, text, ids, self._decode)

        try:
            spans = reward_spans(weights, outcomes, row["tokens"], counts)
        except ValueError as error:
            return SampleReward(f"steps: {error}", None)
        return replace(reward, spans=spans)

    def _decode(self, ids: list[int]) -> str:
        """Decode tokens as the rollout worker does."""
        if self._tokenizer is None:
            raise RuntimeError(f"{self.name}: the policy's tokenizer is not loaded; call start() first")
        return response_text(self._tokenizer, without_end(self._tokenizer, ids))

    def _scores(self, name: str, rollouts: pa.Table, offsets: Mapping[str, float]) -> list[RewardResult]:
        if (model := self._models.get(name)) is None:
            raise RuntimeError(f"{self.name}: {name} is not loaded; call start() first")
        config = self.config.reward_models[name]
        offset = offsets[name] if isinstance(config.offset, str) else config.offset
        return model.score(rollouts, config.level, config.separator, offset)


def _component(function: RewardFunctionConfig, memory_limit_mib: int) -> Component:
    if function.name == ENVIRONMENT_REWARD:
        return EnvironmentReward(function)
    if function.name == JUDGE_REWARD:
        return JudgeReward(function)
    return RewardProcess(function, memory_limit_mib)


def _load_tokenizer(policy: ModelConfig | None) -> Any:
    """The policy's tokenizer, which locates the end of each token in a response.

    The reward worker maps steps to tokens, although the rollout worker has the tokenizer loaded: only the steps tell
    which few positions are needed, runs without process rewards pay nothing, and generation does not wait. Raises
    ValueError if no policy was given, or the tokenizer cannot be loaded.
    """
    if policy is None:
        raise ValueError("process rewards need the policy's tokenizer, but no policy was given")
    from troupe.workers.data.tokenizer import load_tokenizer

    return load_tokenizer(policy)


def _reported(
    labels: Sequence[str], components: Sequence[Sequence[RewardResult]]
) -> dict[str, tuple[float | None, ...]]:
    """Values by component, and what else the components say of the samples, as `LABEL_NAME`."""
    found: dict[str, tuple[float | None, ...]] = {}
    for label, outcomes in zip(labels, components, strict=True):
        found[label] = tuple(outcome.value for outcome in outcomes)
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome.also):
            found[f"{label}_{name}"] = tuple(outcome.also.get(name) for outcome in outcomes)
    return found


def _rewards_table(
    identities: Sequence[dict[str, Any]],
    asked: _Rewards,
    rewards: Sequence[SampleReward],
    per_sample: Sequence[tuple[RewardResult, ...]],
) -> pa.Table:
    rows = [
        {
            **identity,
            "status": reward.status,
            "reward": reward.reward,
            "components": [
                {"name": label, "value": outcome.value, "weight": one.weight, "normalize": one.normalize}
                for label, one, outcome in zip(asked.labels, asked.components, outcomes, strict=True)
            ],
            "reward_spans": [{"end": end, "reward": value} for end, value in reward.spans],
            "feedback": "\n".join(outcome.feedback for outcome in outcomes if outcome.feedback) or None,
        }
        for identity, reward, outcomes in zip(identities, rewards, per_sample, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=REWARDS)


def _check_group(rollouts: pa.Table) -> pa.Table:
    """The table ordered by sample_index and segment; it must have exactly one group."""
    if missing := [name for name in ROLLOUTS.names if name not in rollouts.column_names]:
        raise ValueError(f"not a rollouts table: missing columns {', '.join(missing)}")
    groups = set(zip(rollouts["prompt_uid"].to_pylist(), rollouts["attempt"].to_pylist(), strict=True))
    if len(groups) != 1:
        raise ValueError(f"a reward worker scores one group at a time, got {len(groups)}")
    return rollouts.sort_by([("sample_index", "ascending"), ("segment", "ascending")])


def _samples_of(rollouts: pa.Table) -> pa.Table:
    """One row for each sample: its last segment's, with the tokens of all its responses as `tokens`."""
    lengths = pc.call_function("list_value_length", [rollouts["response_ids"]]).to_numpy()
    rows: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for row, (index, length) in enumerate(zip(rollouts["sample_index"].to_pylist(), lengths, strict=True)):
        rows[index] = row
        tokens[index] = tokens.get(index, 0) + int(length)
    table = rollouts.take(pa.array(rows.values(), pa.int64()))
    return table.append_column("tokens", pa.array(tokens.values(), pa.int64()))


def _with_failed(outcomes: Sequence[RewardResult], statuses: Sequence[str]) -> list[RewardResult]:
    """The outcomes of the episodes that were scored, in place among the failed ones."""
    scored = iter(outcomes)
    return [next(scored) if status == OK else RewardResult(None, status) for status in statuses]


def _samples(rollouts: pa.Table) -> list[Sample]:
    columns = ("response", "answer", "metadata", "messages", "conversation", "finish_reason", "turn_rewards")
    rows = rollouts.select([*columns, "tokens"]).to_pylist()
    return [
        Sample(
            **{name: row[name] for name in columns if name != "turn_rewards"},
            response_tokens=row["tokens"],
            turn_rewards=tuple((turn["end"], turn["reward"]) for turn in row["turn_rewards"]),
            feedback="\n".join(turn["feedback"] for turn in row["turn_rewards"] if turn["feedback"]),
        )
        for row in rows
    ]
