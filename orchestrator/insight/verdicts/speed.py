"""Rules on speed and machines: who waits for whom, memory, lost workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from troupe.orchestrator.insight.verdicts.history import SHORTEST, History, Series
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict, field, while_it_lasts
from troupe.orchestrator.plan.balance import ratio
from troupe.orchestrator.roles.table import SAMPLERS, TRAINERS
from troupe.orchestrator.telemetry.run_summary import SCORING, SLOW

_WAITS, _NEVER_WAITS = 0.3, 0.03
"""Share of a step that the trainer waits for samples: above it engines are short, below it the engines wait."""
_GROWTH_GIB, _GROWTH = 0.1, 0.05
_GROWTH_STEPS = 6
"""Fewest steps, after the first third of a run, over which memory must grow."""
_WARM_UP = 2


def _workers(run: History, role: str) -> int:
    seen = run[f"workers/{role}"]
    return max(1, int(seen.last) if seen else int(run.get(f"roles.{role}.workers", 1)))


def _cores_short(run: History, engines: int) -> bool:
    """Whether so many engines and the trainers would compute on the same cores, and gain nothing from each other."""
    roles = {name: role for name in (*SAMPLERS, *TRAINERS) if (role := run.get(f"roles.{name}")) is not None}
    if "CPU" not in run.capacity or any(role.get("gpus") for role in roles.values()):
        return False
    counts = {name: int(role.get("workers", 1)) for name, role in roles.items()} | {"rollout": engines}
    each = {name: int(role.get("threads", 0)) or max(1, int(role.get("cpus", 1))) for name, role in roles.items()}
    return sum(counts[name] * threads for name, threads in each.items()) > run.capacity["CPU"]


def _typical(run: History, name: str) -> float:
    """Median of a phase after the first steps, which also hold warm-up; 0 if it is not recorded."""
    value = run[name].after(_WARM_UP).median
    return 0.0 if math.isnan(value) else value


def _busy(run: History, unknown: float) -> float:
    """Share of a step in which engines have groups; `unknown` if it is not recorded, as in older runs."""
    return _typical(run, "utilisation/rollout") if run["utilisation/rollout"] else unknown


def trainer_seconds(run: History) -> float:
    """T: seconds of a step in which the trainer works or its weights travel."""
    return sum(_typical(run, f"seconds/{phase}") for phase in ("prepare", "update", "sync"))


def _scoring(run: History) -> tuple[float, float]:
    """Seconds of a step for which a reward worker is busy, and for which the step waits for samples."""
    return _typical(run, "seconds/reward") / _workers(run, "reward"), _typical(run, "seconds/generate")


def slow_rewards(run: History) -> Iterator[Verdict]:
    """Scoring, not sampling, is what a step waits for."""
    workers, (busy, generate) = _workers(run, "reward"), _scoring(run)
    late = run["seconds/reward"].after(_WARM_UP)
    if (
        len(late) < SHORTEST
        or generate < 0.5
        or busy < SCORING * generate
        or generate < 0.2 * _typical(run, "seconds/step")
    ):
        return
    yield Verdict(
        "slow-rewards",
        Level.WARNING,
        "Reward scoring is the bottleneck",
        f"The reward workers are busy for {busy:.1f} s of the {generate:.1f} s that a step waits for samples.",
        late.steps[0],
        None,
        ("seconds/reward", "seconds/generate", "seconds/step"),
        (
            Remedy("Add reward workers.", field("roles.reward.workers", workers * max(2, round(2 * busy / generate)))),
            Remedy("Make the function `async` or batched, so that a worker scores many samples at a time."),
        ),
    )


def starved_trainer(run: History) -> Iterator[Verdict]:
    waits = run["utilisation/generate"]
    found = waits.after(_WARM_UP).stretch(lambda value: value > _WAITS)
    if found is None:
        return
    stale = int(run.get("schedule.max_staleness", 0))
    sampling, training = _typical(run, "seconds/generate"), trainer_seconds(run)
    engines, ranks = _workers(run, "rollout"), int(run.get("roles.policy.workers", 1))
    # With staleness the engines also work during the updates: what remains is a wait beyond them.
    busy = _busy(run, 1.0) if stale else 1.0
    rounds = busy * (sampling + training) if stale else sampling
    each = rounds * engines / max(training * ranks, 1e-9)
    wanted = max(engines + 1, math.ceil(each * ranks))
    remedies: list[Remedy] = []
    if not stale and not _cores_short(run, engines):
        remedies.append(Remedy("Generate during the updates.", field("schedule.max_staleness", 1)))
    if busy < 1 - _WAITS / 2:
        remedies.append(
            Remedy("The engines wait too: let samples be older.", field("schedule.max_staleness", stale + 1))
        )
    scored, waited = _scoring(run)
    if (stale or training >= 0.1 * rounds) and not _cores_short(run, wanted) and scored < SCORING * waited:
        balance = f"Add engines: {ratio(each)} engines to policy workers balance this run."
        remedies.append(Remedy(balance, field("roles.rollout.workers", wanted)))
    yield Verdict(
        "starved-trainer",
        while_it_lasts(found, Level.WARNING if stale else Level.NOTE),
        "The trainer waits for samples" if stale else "Engines and trainer wait for each other",
        f"{waits.typical(found):.0%} of a step is waiting for samples ({sampling:.1f} s), {training:.1f} s are updates "
        "and weight sync" + ("." if stale else "; nothing is generated meanwhile."),
        found.start,
        found.until,
        ("utilisation/generate", "utilisation/update", "seconds/step"),
        tuple(remedies),
    )


def starved_engines(run: History) -> Iterator[Verdict]:
    stale = int(run.get("schedule.max_staleness", 0))
    waits, busy = run["utilisation/generate"], _busy(run, 0.5)
    found = waits.after(_WARM_UP).stretch(lambda value: value < _NEVER_WAITS)
    if not stale or found is None or busy > 1 - _NEVER_WAITS:
        return
    engines, ranks = _workers(run, "rollout"), int(run.get("roles.policy.workers", 1))
    remedies = [
        Remedy("Add policy workers.", field("roles.policy.workers", ranks * 2)),
        Remedy("Pack more into a micro-batch.",
               field("roles.policy.micro_batch_tokens", 2 * int(run.get("roles.policy.micro_batch_tokens", 4096)))),
    ]  # fmt: skip
    idle = f", and the engines have no group for {1 - busy:.0%}" if run["utilisation/rollout"] else ""
    fewer = min(engines - 1, math.ceil(busy * engines))
    if fewer:
        balance = f"Or use fewer engines: {ratio(busy * engines / ranks)} engines to policy workers balance this run."
        remedies.append(Remedy(balance, field("roles.rollout.workers", fewer)))
    yield Verdict(
        "starved-engines",
        while_it_lasts(found, Level.WARNING),
        "The engines wait for the trainer",
        f"The trainer never waits for samples ({waits.typical(found):.1%} of a step); it updates for "
        f"{trainer_seconds(run):.1f} s of {_typical(run, 'seconds/step'):.1f} s{idle}.",
        found.start,
        found.until,
        ("utilisation/generate", "utilisation/update", "seconds/update"),
        tuple(remedies),
    )


def slow_engine(run: History) -> Iterator[Verdict]:
    """The run has named an engine (`rollouts/slow_engines.py`), and it or another one is still slow at times."""
    named = [event for event in run.events if event.get("event") == "slow_engine"]
    slow = run["rollout/slowest_engine"]
    found = slow.stretch(lambda value: value > SLOW)
    if not named or found is None:
        return
    last = named[-1]
    stale = int(run.get("schedule.max_staleness", 0))
    yield Verdict(
        "slow-engine",
        while_it_lasts(found, Level.WARNING),
        f"{last.get('worker')} is slower than the other engines",
        f"It {last.get('detail')}, and every step waits for its groups: one slow node of many can halve the speed of "
        "a run.",
        found.start,
        found.until,
        ("rollout/slowest_engine", "seconds/generate"),
        (
            Remedy(
                "Look at its node: other programs, a throttled GPU, memory that swaps. Without it the run is faster."
            ),
            *([Remedy("Let steps wait less for it.", field("schedule.max_staleness", stale + 1))] if stale else []),
        ),
    )


def growing_memory(run: History) -> Iterator[Verdict]:
    """A worker's memory grows as much in the second half of the steps as in the first: memory that flattens is the
    warm-up of allocators and kernels, no leak."""
    for peak in run.named("memory/"):
        late = peak.after(max(_WARM_UP + 1, peak.steps[0] + (peak.steps[-1] - peak.steps[0]) // 3))
        if len(late) <= _GROWTH_STEPS:
            continue
        growth, middle = late.values[-1] - late.values[0], late.values[len(late) // 2]
        if min(middle - late.values[0], late.values[-1] - middle) < growth / 3:
            continue
        rises = sum(b > a * 1.001 for a, b in zip(late.values, late.values[1:], strict=False))
        if growth < max(_GROWTH_GIB, _GROWTH * late.values[0]) or rises < 0.5 * (len(late) - 1):
            continue
        role = peak.name.removeprefix("memory/")
        rate = growth / (late.steps[-1] - late.steps[0])
        yield Verdict(
            "growing-memory",
            Level.WARNING,
            f"The memory of {role} grows",
            f"The largest {role} process grew from {peak.values[0]:.2f} to {peak.values[-1]:.2f} GiB, now by "
            f"{rate * 1024:.0f} MiB a step: {rate * 100:.1f} GiB more in 100 steps.",
            late.steps[0],
            None,
            (peak.name,),
            (
                Remedy("A reward function that keeps what it has seen is the usual cause: look for caches and lists.")
                if role == "reward"
                else Remedy("Checkpoint often, so that a restart costs little.", field("checkpoint.every_steps", 5)),
            ),
        )


def lost_workers(run: History) -> Iterator[Verdict]:
    """Workers died, or groups had to be sampled again, other than by a resumption or by fewer workers."""
    retries, restarts = _unplanned(run), run["trainer_restarts"]
    lost = [event for event in run.events if event.get("event") in {"worker_lost", "worker_replaced"}]
    counts = [int(sum(retries.values)), int(restarts.highest) if restarts else 0]
    if not any(counts) and not lost:
        return
    first = [step for series in (retries, restarts) for step, value in series if value > 0]
    first += [int(event.get("step") or 0) for event in lost]
    names = sorted({str(event.get("worker")) for event in lost if event.get("worker")})
    detail = f" Lost: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}." if names else ""
    yield Verdict(
        "lost-workers",
        Level.WARNING,
        "Workers were lost",
        f"{counts[0]} groups were sampled again, and the trainers were restarted {counts[1]} times.{detail}",
        min(first),
        None,
        ("ledger/retries", "trainer_restarts"),
        (Remedy("`troupe why RUN` shows the last error of a dead worker; memory is the usual cause."),),
    )


def _unplanned(run: History) -> Series:
    """Groups that a step sampled again, but for those that a resumption or a change of workers has interrupted."""
    steps, totals = run["ledger/retries"].steps, (0.0, *run["ledger/retries"].values)
    added = Series("retries", steps, tuple(max(now - before, 0.0) for before, now in pairwise(totals)))
    resumed = {(event.get("resume_at") or 0) + 1 for event in run.events if event.get("event") == "run_started"}
    scaled = {event.get("step") for event in run.events if event.get("event") == "scaled"}
    return added.where(lambda step, _: step not in (resumed - {1}) | scaled)
