"""The contenders of `benchmarks.grpo_step` and `benchmarks.time_to_reward`, which train step by step in alternation."""

from __future__ import annotations

import io
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.support.bare_loop import BareLoop, BareStep
from benchmarks.support.harness import NotCorrect, Turn, progress, rotated
from benchmarks.support.processes import Meter, RemoteObject, stopped
from benchmarks.support.trl_loop import TrlLoop, check_steps
from benchmarks.support.workload import (
    MAX_GAP,
    Group,
    Settings,
    check_lengths,
    encode_prompts,
    group,
    grpo_spec,
    on_device,
    phases_of,
    without_eos,
)
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import PromptSource, load_pools
from troupe.orchestrator.roles.settings import policy_config, rollout_config
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console

BARE, KERNELS, TRL, PRODUCT = "bare loop", "bare loop, kernels", "TRL", "troupe"
MAX_NORM_RATIO, SAME_NORM_RATIO = 1.25, 1.05
"""Highest accepted ratio between the gradient norms of the first step: where batching changed some of the samples, and
where all samples are equal."""
_START_TIMEOUT_S, _STEP_TIMEOUT_S = 300.0, 300.0

Enough = Callable[[Sequence[float]], bool]
"""Whether a contender has trained enough, given the mean reward of each of its steps."""

Taken = tuple[BareStep, float, float]
"""A step, its CPU seconds, and the other load during it in cores."""


class AlternatingConsole(Console):
    """A console for the product's run that lets the other contenders take their turn whenever a step is reported."""

    def __init__(self, others: Mapping[str, RemoteObject], work: Sequence[Sequence[Group]], enough: Enough) -> None:
        super().__init__(io.StringIO())
        self._others = others
        self._work = work
        self._enough = enough
        self._rewards: list[float] = []
        self._began: Meter | None = None
        self._starting = list(others.values())
        """The contenders that have not said that they are ready. The product may report the end of its start again."""
        self.product: list[tuple[float, float]] = []
        """(CPU seconds, other load in cores) of each step."""
        self.taken: dict[str, list[Taken]] = {name: [] for name in others}

    def phase(self, name: str, done: int = 0, total: int = 1, waiting_for: str = "", *, unit: str = "") -> None:
        """Wait for the other contenders once the product has started; start the product's meter at its first phase."""
        if (name, done) == ("start workers", total):
            while self._starting:
                self._starting.pop().receive(_START_TIMEOUT_S)
        if self._began is None and name == "generate":
            self._began = self._own_meter()

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Record the product's step and run one step of every other contender; the product waits for the return."""
        if self._began is None:
            raise NotCorrect("the product reported a step before it generated anything")
        self.product.append(self._began.read())
        self._rewards.append(float(str(metrics["reward/mean"])))
        self._say_step(step, PRODUCT, float(str(metrics["seconds/step"])), self._rewards[-1])
        unfinished = [name for name in rotated(list(self._others), step) if not self._has_enough(name)]
        if not unfinished and self._enough(self._rewards):
            signal.raise_signal(signal.SIGINT)  # as a user would: the run saves and exits
        for name in unfinished:
            other = self._others[name]
            with stopped([os.getpid()], without=[other.pid]):
                meter = Meter([other.pid])
                figures: BareStep = other.call("step", self._work[step - 1], timeout_s=_STEP_TIMEOUT_S)
                self.taken[name].append((figures, *meter.read()))
            self._say_step(step, name, figures.wall_s, figures.figures["reward"])
        self._began = self._own_meter()

    @staticmethod
    def _say_step(step: int, name: str, seconds: float, reward: float) -> None:
        progress(f"step {step}, {name}: {seconds:.2f} s, reward {reward:.3f}")

    def _has_enough(self, name: str) -> bool:
        return self._enough([step.figures["reward"] for step, _, _ in self.taken[name]])

    def _own_meter(self) -> Meter:
        return Meter([os.getpid()], [other.pid for other in self._others.values()])


@dataclass(frozen=True)
class ContenderSteps:
    """The steps of all contenders, including the first one."""

    taken: dict[str, list[Turn]]
    rewards: dict[str, list[float]]
    """Mean reward of each step's samples, which were drawn before the step's update."""
    checks: dict[str, str]


def take_steps(
    settings: Settings,
    steps: int,
    learning_rate: float,
    trl: bool,
    enough: Enough = lambda _: False,
    kernels: bool = False,
) -> ContenderSteps:
    """Train every contender and check that they did the same work.

    Args:
        settings: Size of the work.
        steps: Maximum number of steps.
        learning_rate: Learning rate of every contender.
        trl: Whether TRL is a contender.
        enough: Ends a contender's training early.
        kernels: Whether a bare loop with the product's kernels is a contender.

    Raises:
        NotCorrect: A check failed.
        TroupeError: The product's run failed.
    """
    # Imported here because engine processes import this module, and they do not need Ray.
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.runs.training import train

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(settings.model, folder / "model") if settings.lengths == "fixed" else settings.model
        spec = grpo_spec(settings, model, steps, settings.groups * steps, learning_rate)
        spec = on_device(spec, settings.device, "ipc" if settings.device == "cuda" else "auto")
        pool, _ = load_pools(spec.data)
        work = groups_by_step(settings, spec, pool, model)
        others = {BARE: RemoteObject(BARE, BareLoop, rollout_config(spec), policy_config(spec), settings.task)}
        stack.callback(others[BARE].close)
        if kernels:
            others[KERNELS] = RemoteObject(
                KERNELS, BareLoop, rollout_config(spec), policy_config(spec), settings.task, True
            )
            stack.callback(others[KERNELS].close)
        if trl:
            chats: list[str] = pool.table["messages"].take([one.row for groups in work for one in groups]).to_pylist()
            others[TRL] = RemoteObject(
                TRL, TrlLoop, policy_config(spec), chats, work, settings.max_tokens, settings.task
            )
            stack.callback(others[TRL].close)
        for other in others.values():
            other.send("ready")
        console = AlternatingConsole(others, work, enough)
        train(RunRequest(spec, folder / "run", False, None), console)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        metrics: list[dict[str, float]] = [json.loads(line) for line in lines]
        sampled = [trajectory(folder / "run" / "trajectories" / f"step-{n + 1:06d}.parquet") for n in range(len(lines))]
    return _checked_steps(settings, work, metrics, sampled, console)


def _checked_steps(
    settings: Settings,
    work: Sequence[Sequence[Group]],
    metrics: Sequence[Mapping[str, float]],
    sampled: Sequence[Mapping[tuple[str, int], list[int]]],
    console: AlternatingConsole,
) -> ContenderSteps:
    """Check the steps of all contenders and bring them into one form. Raises NotCorrect."""
    results = {name: [step for step, _, _ in taken] for name, taken in console.taken.items()}
    checks = check(settings, work, metrics, sampled, results[BARE])
    if KERNELS in results:
        own = check(settings, work, metrics, sampled, results[KERNELS])
        checks[KERNELS] = f"{own['first step']}; {own['sampler to trainer'].replace(BARE, KERNELS)}"
    if TRL in results:
        checks[TRL] = check_steps(results[TRL], settings)
    product = [
        Turn(line["seconds/step"], sum(map(len, ids.values())), cpu_s, foreign, phases_of(line, line["seconds/step"]))
        for line, ids, (cpu_s, foreign) in zip(metrics, sampled, console.product, strict=True)
    ]
    taken = {
        name: [Turn(one.wall_s, one.tokens, cpu_s, foreign, one.phases) for one, cpu_s, foreign in turns]
        for name, turns in console.taken.items()
    }
    rewards = {name: [one.figures["reward"] for one in steps] for name, steps in results.items()}
    rewards[PRODUCT] = [line["reward/mean"] for line in metrics]
    return ContenderSteps(taken | {PRODUCT: product}, rewards, checks)


def groups_by_step(settings: Settings, spec: RolloutSpec, pool: Pool, model: Path) -> list[list[Group]]:
    """The groups of each step, drawn in the product's order of prompts."""
    source = PromptSource(pool, spec.seed)
    picks = [source.next() for _ in range(spec.schedule.steps * settings.groups)]
    ids = encode_prompts(model, pool.table, [pick.row for pick in picks], longest=settings.longest_prompt)
    answers: list[str] = pool.table["answer"].to_pylist()
    groups = [
        group(settings, pick.prompt_uid, pick.row, one, answers[pick.row]) for pick, one in zip(picks, ids, strict=True)
    ]
    return [groups[start : start + settings.groups] for start in range(0, len(groups), settings.groups)]


def trajectory(path: Path) -> dict[tuple[str, int], list[int]]:
    """Response token ids by (prompt_uid, sample_index), from a trajectory file of the product."""
    rows: list[dict[str, Any]] = pq.read_table(path, columns=["prompt_uid", "sample_index", "response_ids"]).to_pylist()
    return {(row["prompt_uid"], row["sample_index"]): row["response_ids"] for row in rows}


def check(
    settings: Settings,
    work: Sequence[Sequence[Group]],
    metrics: Sequence[Mapping[str, float]],
    sampled: Sequence[Mapping[tuple[str, int], list[int]]],
    bare: Sequence[BareStep],
) -> dict[str, str]:
    """Check that product and bare loop did the same work with the right weights.

    Args:
        settings: The requested work.
        work: The groups of each step.
        metrics: The product's metrics, one line per step.
        sampled: The product's response token ids of each step, by (prompt_uid, sample_index).
        bare: The steps of the bare loop.

    Returns:
        The checks and their outcomes.

    Raises:
        NotCorrect: A check failed.
    """
    for step, (groups, ids) in enumerate(zip(work, sampled, strict=False), 1):
        if set(ids) != {(one.uid, index) for one in groups for index in range(settings.samples)}:
            raise NotCorrect(f"step {step}: the contenders did not sample the same prompts")
    for name, steps in ((PRODUCT, [list(ids.values()) for ids in sampled]), (BARE, [one.response_ids for one in bare])):
        check_lengths(name, steps, settings)
    gaps = {  # an empty update, where every advantage is zero, computes no log-probs
        PRODUCT: max(line["policy/rollout_logprob_gap"] for line in metrics if "policy/empty_updates" not in line),
        BARE: max(figures.figures["rollout_logprob_gap"] for figures in bare),
    }
    if max(gaps.values()) > MAX_GAP:
        raise NotCorrect(f"sampler and trainer differ by {gaps} nats per token, more than {MAX_GAP}")
    same = sum(
        sampled[0][one.uid, index] == bare[0].response_ids[number * settings.samples + index]
        for number, one in enumerate(work[0])
        for index in range(settings.samples)
    )
    norms = metrics[0]["policy/grad_norm"], bare[0].figures["grad_norm"]
    apart = SAME_NORM_RATIO if same == settings.sequences else MAX_NORM_RATIO
    if max(norms) > apart * min(norms):
        raise NotCorrect(
            f"the first gradients have norms of {norms[0]:.4f} and {norms[1]:.4f} although {same} of "
            f"{settings.sequences} samples are equal"
        )
    return {
        "samples of a step": f"{settings.sequences} in all {len(sampled)} steps, of the same prompts and seeds",
        "first step": f"{same} of {settings.sequences} responses equal; gradient norms {norms[0]:.4f}, {norms[1]:.4f}",
        "sampler to trainer": ", ".join(f"{name} {gap:.4f}" for name, gap in gaps.items()) + " nats a token at most",
    }
