"""A whole GRPO step of the product, by phase, against a bare single-process loop on the same prompts.

    python -m benchmarks.grpo_step --groups 8 --samples 8 --max-tokens 32
    python -m benchmarks.grpo_step --trl                                    # TRL's GRPOTrainer as well

The product runs as `troupe run` runs it: the real controller, Ray, vLLM, DeepSpeed, rewards in sandboxed processes,
verified weights, trajectories written. When it reports a step, its loop is held while the others take their turns.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.bare_loop import BareLoop, BareStep
from benchmarks.harness import NotCorrect, Report, Turn, carry_out, in_turn, progress
from benchmarks.processes import Child, Meter, stopped
from benchmarks.trl_loop import TrlLoop, check_steps
from benchmarks.workload import (
    DEVICE,
    Group,
    Settings,
    add_settings,
    check_lengths,
    encoded,
    group,
    on_device,
    spec,
    without_end,
)
from orchestrator.console import Console
from orchestrator.prompts import PromptPool, PromptSource, load_pools
from orchestrator.spec import Spec

BARE, TRL, PRODUCT = "bare loop", "TRL", "troupe"
START_TIMEOUT_S, STEP_TIMEOUT_S = 300.0, 300.0
PHASES = ("generate", "prepare", "update", "sync")
MAX_GAP = 0.1
"""Nats between sampler and trainer per token. Stale weights in an engine, or wrong log-probs, show up here."""
MAX_NORM_RATIO, SAME_NORM_RATIO = 1.25, 1.05
"""Between the gradient norms of the first trained step: where batching changed some of the samples, and where all of
them are the same."""


Enough = Callable[[Sequence[float]], bool]
"""Whether a contender has trained enough, by the mean rewards of its steps."""

Taken = tuple[BareStep, float, float]
"""A step, its CPU seconds, and other load meanwhile in cores."""


class Turns(Console):
    """Stands where the product's display stands: a reported step is a turn taken, and now it is the others' turn."""

    def __init__(self, others: Mapping[str, Child], work: Sequence[Sequence[Group]], enough: Enough) -> None:
        super().__init__(io.StringIO())
        self._others = others
        self._work = work
        self._enough = enough
        self._rewards: list[float] = []
        self._began: Meter | None = None
        self.product: list[tuple[float, float]] = []
        """(CPU seconds, other load in cores) of each step."""
        self.taken: dict[str, list[Taken]] = {name: [] for name in others}

    def phase(self, name: str, done: int, total: int) -> None:
        """All start together: the product waits for the others. Its first sign of generation starts its meter."""
        if (name, done) == ("start workers", total):
            for other in self._others.values():
                other.receive(START_TIMEOUT_S)
        if self._began is None and name == "generate":
            self._began = self._own_meter()

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """The product has finished a step, and does nothing until this returns."""
        if self._began is None:
            raise NotCorrect("the product trained without generating")
        self.product.append(self._began.read())
        self._rewards.append(float(str(metrics["reward/mean"])))
        self._progress(step, PRODUCT, float(str(metrics["seconds/step"])), self._rewards[-1])
        going_on = [name for name in in_turn(list(self._others), step) if not self._has_enough(name)]
        if not going_on and self._enough(self._rewards):
            signal.raise_signal(signal.SIGINT)  # what a user does: the run saves and ends
        for name in going_on:
            other = self._others[name]
            with stopped([os.getpid()], without=[other.pid]):
                meter = Meter([other.pid])
                figures: BareStep = other.call("step", self._work[step - 1], timeout_s=STEP_TIMEOUT_S)
                self.taken[name].append((figures, *meter.read()))
            self._progress(step, name, figures.wall_s, figures.figures["reward"])
        self._began = self._own_meter()

    @staticmethod
    def _progress(step: int, name: str, seconds: float, reward: float) -> None:
        progress(f"step {step}, {name}: {seconds:.2f} s, reward {reward:.3f}")

    def _has_enough(self, name: str) -> bool:
        return self._enough([step.figures["reward"] for step, _, _ in self.taken[name]])

    def _own_meter(self) -> Meter:
        return Meter([os.getpid()], [other.pid for other in self._others.values()])


@dataclass(frozen=True)
class Steps:
    """What all contenders did, step by step, the first one included."""

    taken: dict[str, list[Turn]]
    rewards: dict[str, list[float]]
    """Mean reward of what was sampled in a step, before it was learnt from."""
    checks: dict[str, str]


def take_steps(
    settings: Settings, steps: int, learning_rate: float, trl: bool, enough: Enough = lambda _: False
) -> Steps:
    """Let each train for so many steps, or until it has `enough`, and check.

    Raises NotCorrect, and TroupeError where the run fails.
    """
    from benchmarks.streaming import CLASSES  # every engine's process imports this module, and needs no Ray
    from orchestrator.run import RunRequest, run

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_end(settings.model, folder / "model") if settings.lengths == "fixed" else settings.model
        plan = spec(settings, model, steps, settings.groups * steps, learning_rate)
        plan = on_device(plan, settings.device, "ipc" if settings.device == "cuda" else "auto")
        pool, _ = load_pools(plan.data)
        work = steps_of(settings, plan, pool, model)
        others = {BARE: Child(BARE, BareLoop, plan.rollout_config(), plan.policy_config(), settings.task)}
        stack.callback(others[BARE].close)
        if trl:
            chats: list[str] = pool.table["messages"].take([one.row for groups in work for one in groups]).to_pylist()
            others[TRL] = Child(TRL, TrlLoop, plan.policy_config(), chats, work, settings.max_tokens, settings.task)
            stack.callback(others[TRL].close)
        for other in others.values():
            other.send("ready")
        console = Turns(others, work, enough)
        run(RunRequest(plan, folder / "run", False, None), lambda: CLASSES, console)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        metrics: list[dict[str, float]] = [json.loads(line) for line in lines]
        sampled = [trajectory(folder / "run" / "trajectories" / f"step-{n + 1:06d}.parquet") for n in range(len(lines))]
    figures = {name: [step for step, _, _ in taken] for name, taken in console.taken.items()}
    checks = check(settings, work, metrics, sampled, figures[BARE])
    if trl:
        checks[TRL] = check_steps(figures[TRL], settings)
    product = [
        Turn(line["seconds/step"], sum(map(len, ids.values())), cpu_s, foreign, phases_of(line))
        for line, ids, (cpu_s, foreign) in zip(metrics, sampled, console.product, strict=True)
    ]
    taken = {
        name: [Turn(one.wall_s, one.tokens, cpu_s, foreign, one.phases) for one, cpu_s, foreign in turns]
        for name, turns in console.taken.items()
    }
    rewards = {name: [one.figures["reward"] for one in own] for name, own in figures.items()}
    rewards[PRODUCT] = [line["reward/mean"] for line in metrics]
    return Steps(taken | {PRODUCT: product}, rewards, checks)


def measure(settings: Settings, turns: int, learning_rate: float, trl: bool) -> Report:
    """Steps after a warm-up step. Raises what :func:`take_steps` raises."""
    steps = take_steps(settings, turns + 1, learning_rate, trl)
    taken = {name: own[1:] for name, own in steps.taken.items()}
    arguments = asdict(settings) | {"turns": turns, "learning_rate": learning_rate}
    return Report("grpo_step", arguments, taken, BARE, steps.checks)


def steps_of(settings: Settings, plan: Spec, pool: PromptPool, model: Path) -> list[list[Group]]:
    """The groups of every step, drawn as the product draws them."""
    source = PromptSource(pool, plan.seed)
    picks = [source.next() for _ in range(plan.schedule.steps * settings.groups)]
    ids = encoded(model, pool.table, [pick.row for pick in picks], longest=128)
    answers: list[str] = pool.table["answer"].to_pylist()
    groups = [
        group(settings, pick.prompt_uid, pick.row, one, answers[pick.row]) for pick, one in zip(picks, ids, strict=True)
    ]
    return [groups[start : start + settings.groups] for start in range(0, len(groups), settings.groups)]


def phases_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase of a line of metrics.jsonl; what is in none of them comes under `other`."""
    phases = {phase: metrics[f"seconds/{phase}"] for phase in PHASES}
    return phases | {"other": metrics["seconds/step"] - sum(phases.values())}


def trajectory(path: Path) -> dict[tuple[str, int], list[int]]:
    """Response token ids by (prompt_uid, sample_index), from the file that the product wrote."""
    rows: list[dict[str, Any]] = pq.read_table(path, columns=["prompt_uid", "sample_index", "response_ids"]).to_pylist()
    return {(row["prompt_uid"], row["sample_index"]): row["response_ids"] for row in rows}


def check(
    settings: Settings,
    work: Sequence[Sequence[Group]],
    metrics: Sequence[Mapping[str, float]],
    sampled: Sequence[Mapping[tuple[str, int], list[int]]],
    bare: Sequence[BareStep],
) -> dict[str, str]:
    """Both did the same work with right weights, or NotCorrect."""
    for step, (groups, ids) in enumerate(zip(work, sampled, strict=False), 1):
        if set(ids) != {(one.uid, index) for one in groups for index in range(settings.samples)}:
            raise NotCorrect(f"step {step}: the samples are not those of the same prompts")
    for name, steps in ((PRODUCT, [list(ids.values()) for ids in sampled]), (BARE, [one.response_ids for one in bare])):
        check_lengths(name, steps, settings)
    gaps = {  # of an empty update, where no sample has an advantage, nothing is computed that could be apart
        PRODUCT: max(line["policy/rollout_logprob_gap"] for line in metrics if "policy/empty_updates" not in line),
        BARE: max(figures.figures["rollout_logprob_gap"] for figures in bare),
    }
    if max(gaps.values()) > MAX_GAP:
        raise NotCorrect(f"sampler and trainer are {gaps} nats apart, more than {MAX_GAP}")
    same = sum(
        sampled[0][one.uid, index] == bare[0].response_ids[number * settings.samples + index]
        for number, one in enumerate(work[0])
        for index in range(settings.samples)
    )
    norms = metrics[0]["policy/grad_norm"], bare[0].figures["grad_norm"]
    apart = SAME_NORM_RATIO if same == settings.sequences else MAX_NORM_RATIO
    if max(norms) > apart * min(norms):
        raise NotCorrect(
            f"the first gradients have norms of {norms[0]:.4f} and {norms[1]:.4f}, {same} samples are equal"
        )
    return {
        "samples of a step": f"{settings.sequences} in all {len(sampled)} steps, of the same prompts and seeds",
        "first step": f"{same} of {settings.sequences} responses equal; gradient norms {norms[0]:.4f}, {norms[1]:.4f}",
        "sampler to trainer": ", ".join(f"{name} {gap:.4f}" for name, gap in gaps.items()) + " nats a token at most",
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo_step", description=__doc__)
    defaults = {"groups": 8, "samples": 8, "max_tokens": 32, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, micro_batch_tokens=4096, turns=5, seed=17)
    add = parser.add_argument
    add("--lengths", choices=("fixed", "natural"), default="fixed", help="natural: the model ends its responses")
    add("--device", choices=("cpu", "cuda"), default="cpu", help=DEVICE)
    add("--learning-rate", type=float, default=1e-5)
    add("--trl", action="store_true", help="TRL's GRPOTrainer as well; with fixed lengths only")
    given = parser.parse_args(arguments)
    if given.trl and given.lengths != "fixed":
        parser.error("--trl needs --lengths fixed: TRL samples other responses, and so other amounts")
    return given


def main() -> None:
    """Measure, print, write."""
    given = vars(parse(sys.argv[1:]))
    turns, path, trl = given.pop("turns"), given.pop("json"), given.pop("trl")
    learning_rate = given.pop("learning_rate")
    carry_out(lambda: measure(Settings(**given, engines=1), turns, learning_rate, trl), path)


if __name__ == "__main__":
    main()
