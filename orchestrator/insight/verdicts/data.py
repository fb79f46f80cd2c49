"""Rules on data and samples: rewards that fail, data that repeats or cannot be used, samples that are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict, field, flow, while_it_lasts

_SOME, _MANY = 0.02, 0.2
_MOST_PASSES = 20
_BAD_ROWS = 0.05
_DROPPED = 0.1


def failing_rewards(run: History) -> Iterator[Verdict]:
    """Samples without a reward. A failed episode is one of them, and no fault of a function."""
    episodes = dict(run["episodes/failed"])
    functions = run["failed_samples"]
    functions = replace(functions, values=tuple(max(n - episodes.get(step, 0.0), 0.0) for step, n in functions))
    for name, failed, what, remedies in (
        (
            "failed_samples",
            functions,
            "have no reward: a function failed, or a model's score of them is not finite",
            _more_time(run),
        ),
        ("episodes/failed", run["episodes/failed"], "ended without a result", ()),
    ):
        shares = run.share_of_samples(failed)
        found = shares.stretch(lambda value: value > _SOME, at_least=1)
        if found is None:
            continue
        share, when = shares.typical(found), "at the end" if found.ongoing else "while it lasted"
        yield Verdict(
            "failing-rewards",
            while_it_lasts(found, Level.PROBLEM if share > _MANY else Level.WARNING),
            "Samples without a reward" if name == "failed_samples" else "Episodes fail",
            f"{sum(failed.values):.0f} samples {what}; {share:.0%} of a step's {when}. They are dropped, "
            "and what is left is not what the policy does.",
            found.start,
            found.until,
            (name, "reward/mean"),
            (
                Remedy(
                    f"Read their `status`, the reason (filter the samples by `status`){_most_often(_reasons(run))}. "
                    "The ledger in this report lists the reasons of groups that were replaced as a whole, too."
                ),
                *remedies,
            ),
        )


def _reasons(run: History) -> Counter[str]:
    """Samples without a reward by the reason; empty if the run has recorded none."""
    counts: Counter[str] = Counter()
    for event in run.events:
        if event.get("event") == "dropped" and str(event.get("reason")).startswith("reward: "):
            counts[str(event["reason"]).removeprefix("reward: ")] += int(event.get("samples", 0))
    return counts


def _most_often(reasons: Counter[str]) -> str:
    return f"; most often it is `{reasons.most_common(1)[0][0]}`" if reasons else ""


def _more_time(run: History) -> tuple[Remedy, ...]:
    """A longer timeout for the run's reward functions; empty if the spec has none, or no reason is a timeout."""
    reasons = _reasons(run)
    if reasons and not any("timeout" in reason for reason in reasons):
        return ()
    functions = [{"name": one["name"], **one} for one in run.get("roles.reward.functions", []) if "name" in one]
    for one in functions:
        one["timeout_s"] = 3 * float(one.get("timeout_s") or 10.0)
    lines = flow("roles.reward.functions", functions)
    return (Remedy("If it is a timeout, give the functions more time.", lines),) if functions else ()


def repeated_data(run: History) -> Iterator[Verdict]:
    steps, total = run.last_step, int(run.get("schedule.prompts_per_step", 0))
    mixed = [(str(own["name"]), float(own.get("weight") or 1.0)) for own in run.sources]
    shares = {name: total * weight / sum(weight for _, weight in mixed) for name, weight in mixed} or {"": total}
    rows = {name: run[f"source/{name}/rows" if name else "data/train_rows"] for name in shares}
    passes = {name: steps * shares[name] / rows[name].last for name in shares if rows[name] and rows[name].last > 0}
    name = max(passes, key=lambda name: passes[name], default=None)
    if name is None or not shares[name]:
        return
    per_step, series = shares[name], rows[name]
    within = series.last < per_step
    if not within and passes[name] < _MOST_PASSES:
        return
    yield Verdict(
        "repeated-data",
        Level.WARNING,
        "The prompts repeat",
        f"{series.last:.0f} prompts{name and f' of {name}'} for {per_step:.3g} a step: each was drawn "
        f"{passes[name]:.0f} times" + (", several times within a step." if within else "."),
        int(series.last // per_step) + 1,
        None,
        (series.name, "reward/mean", "eval/reward"),
        (
            Remedy("Use more prompts.", field("data.train.size", 4 * per_step * max(run.last_step, 1)))
            if run.get("data.train.kind") == "reasoning_gym"
            else Remedy("Use more prompts, or fewer steps."),
        ),
    )


def unusable_data(run: History) -> Iterator[Verdict]:
    counted = [series.name for series in run.named("data/") if series.name.endswith("_bad_rows")]
    for pool in (name.removeprefix("data/").removesuffix("_bad_rows") for name in counted):
        if pool == "ptx":
            continue
        rows = run[f"data/{pool}_rows"]
        for kind, why in (("bad", "cannot be read"), ("refused", "are too long, or the chat template refuses them")):
            lost = run[f"data/{pool}_{kind}_rows"]
            if not lost or lost.last <= _BAD_ROWS * (lost.last + max(rows.last, 0.0)):
                continue
            yield Verdict(
                "unusable-data",
                Level.WARNING,
                f"Rows of data.{pool} are lost",
                f"{lost.last:.0f} rows of `data.{pool}` {why}; {rows.last:.0f} are left.",
                lost.steps[0],
                None,
                (lost.name, rows.name),
                (Remedy("`troupe validate` names the first of them, with file and line."),),
            )


def dropped_samples(run: History) -> Iterator[Verdict]:
    """Samples that were generated and not trained, for other reasons than a failed reward."""
    dropped, failed = run["ledger/dropped"], run["failed_samples"]
    dispatched = run["ledger/dispatched"]
    if not dropped or not dispatched or not dispatched.values[-1]:
        return
    others = dropped.values[-1] - sum(failed.values)
    share = others / dispatched.values[-1]
    if share <= _DROPPED:
        return
    expected = (
        run.get("algorithm.mask_truncated")
        or run.get("algorithm.dynamic_sampling_on")
        or run.get("algorithm.name") in {"dapo", "raft"}
    )
    yield Verdict(
        "dropped-samples",
        Level.NOTE if expected else Level.WARNING,
        "Samples are generated and not trained",
        f"{others:.0f} of {dispatched.values[-1]:.0f} dispatched samples were dropped ({share:.0%}).",
        next(step for step, value in dropped if value > 0),
        None,
        ("ledger/dropped", "ledger/dispatched"),
        (Remedy("The ledger in this report lists the reasons."),),
    )
