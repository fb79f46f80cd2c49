"""Rules on the updates: step sizes, gradients, the critic, and the gap between sampler and trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from troupe.orchestrator.insight.verdicts.history import SHORTEST, History, Series, Stretch
from troupe.orchestrator.insight.verdicts.learning import add_kl, smaller_steps
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict, field, while_it_lasts
from troupe.orchestrator.roles.table import TRAINED

_MOST_KL_REF, _MOST_KL_STEP = 1.0, 0.3
_UNTRAINED = 8.0
"""Entropy at the start, in nats per token, of a model with random weights: it chooses among thousands of tokens."""
_FAR_WORSE = -0.5
"""Explained variance of a critic whose values are much worse than a constant."""
_MOST_CLIPPED = 0.3
_SPIKE = 10.0
_CLIPPED_TO = 10.0
_REWARD_CLIP = 5.0
_GAPS = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.02}
"""Largest mean difference of log-probs that precision explains, in nats, with room to spare."""
_STALE_GAP = 0.5
"""If samples may be older than the policy, the gap also holds what the policy has learned since."""
_JUMP = 5.0
_WARM_UP = 5


def fewer_updates(run: History) -> Remedy:
    """Proposes fewer updates of each batch; changes nothing in a run that makes one."""
    several = "epochs" if int(run.get("schedule.epochs", 1)) > 1 else "minibatches"
    return Remedy("Make fewer updates per batch.", field(f"schedule.{several}", 1))


def kl_explosion(run: History) -> Iterator[Verdict]:
    if run["policy/entropy"].first > _UNTRAINED:  # whatever it learns leaves a reference that prefers no token
        return
    for name in ("kl_ref", "policy/kl_ref"):
        kl = run[name]
        if found := kl.stretch(lambda value: value > _MOST_KL_REF, at_least=2):
            start = kl.values[0]  # alone: one step may be enough to leave it
            left = start <= _MOST_KL_REF
            nearer = (add_kl(run), smaller_steps(run))
            if kl.values[1] > _MOST_KL_REF:  # no penalty holds a policy that leaves in one step
                nearer = nearer[::-1]
            yield Verdict(
                "kl-explosion",
                while_it_lasts(found, Level.WARNING if run.reward_rises else Level.PROBLEM),
                "The policy has left the reference" if left else "The reference is another model",
                f"KL to the reference {'is' if found.ongoing else 'was'} {kl.typical(found):.3g} nats per token "
                f"(below 0.5 is usual), {'from' if left else 'and was'} {start:.3g} at the start.",
                found.start,
                found.until,
                (kl.name, "reward/mean", "policy/entropy"),
                nearer if left else (Remedy("Check `roles.reference.model`."),),
            )
            return


def steps_too_large(run: History) -> Iterator[Verdict]:
    """One step moves the policy far from the one that sampled."""
    for name in ("policy/kl_exact", "policy/kl_old"):
        kl = run[name]
        if found := kl.stretch(lambda value: value > _MOST_KL_STEP):
            warm_up = max(5, run.last_step // 20, 2 * int(run.get("roles.policy.warmup_updates", 0)))
            remedies = [
                smaller_steps(run),
                fewer_updates(run),
                Remedy("Warm the learning rate up for longer.", field("roles.policy.warmup_updates", warm_up)),
            ]
            yield Verdict(
                "steps-too-large",
                while_it_lasts(found, Level.WARNING if run.reward_rises else Level.PROBLEM),
                "A step changes the policy too much",
                f"KL(old || new) of a step is {kl.highest:.3g} nats per token at most and {kl.last:.3g} at the end; "
                "below 0.1 is usual.",
                found.start,
                found.until,
                (kl.name, "policy/ratio_max", "reward/mean"),
                tuple(remedies),
            )
            return


def clip_fraction_stuck(run: History) -> Iterator[Verdict]:
    """Most of the batch is clipped and moves nothing."""
    clipped = run["policy/clip_fraction"]
    found = clipped.stretch(lambda value: value > _MOST_CLIPPED)
    if found is None:
        return
    yield Verdict(
        "clip-fraction",
        while_it_lasts(found, Level.WARNING),
        "Most tokens are clipped",
        f"{clipped.typical(found):.0%} of the tokens are beyond the clip bounds, which remove or limit their gradient "
        "(below 30% is usual).",
        found.start,
        found.until,
        (clipped.name, "policy/ratio_max", "policy/kl_old"),
        (smaller_steps(run), fewer_updates(run)),
    )


def sampler_gap(run: History) -> Iterator[Verdict]:
    """Engine and trainer compute different probabilities of the same tokens."""
    gap = run["policy/rollout_logprob_gap"]
    if not gap:
        return
    stale = int(run.get("schedule.max_staleness", 0))
    limit = _STALE_GAP if stale else _GAPS.get(str(run.get("model.dtype", "bfloat16")), 0.1)
    # Asynchronous runs begin with a large gap, which the first steps of a fresh optimizer cause.
    late = gap.after(gap.steps[0] + 1) if stale else gap
    found = late.stretch(lambda value: value > limit, at_least=SHORTEST if stale else 2)
    jump = None if stale else _jump(gap, limit / 5)
    grows = late.last > 3 * late.first and late.last > limit / 2 and late.trend().rises
    if found is None and jump is None and not grows:
        return
    spells = [one for one in (found, jump) if one is not None]
    since = min([one.start for one in spells], default=gap.steps[-1])
    over = not grows and not any(one.ongoing for one in spells)
    at = gap.typical(spells[0]) if over else gap.last
    what = f"jumps at step {since}" if jump is not None else "grows" if grows else "is large"
    remedies = (
        (
            Remedy("Train on fresher samples.", field("schedule.max_staleness", max(stale - 1, 0))),
            smaller_steps(run),
        )
        if stale
        else (
            Remedy("Ask where the gap comes from: `troupe audit RUN` compares engine, trainer and a float32 scorer."),
            Remedy("Compute both in the same precision.", field("model.dtype", "float32")),
        )
    )
    yield Verdict(
        "sampler-gap",
        Level.NOTE if over else Level.WARNING if stale else Level.PROBLEM,
        f"Sampler and trainer disagree: the gap {what}",
        f"The mean difference of their log-probs {'was' if over else 'is'} {at:.3g} nats, from {gap.first:.3g} at "
        f"the start; up to {limit:g} is explained by {'staleness' if stale else 'precision'}. "
        + ("" if stale else "An engine may hold other weights than the trainer."),
        since,
        max(one.end for one in spells) if over else None,
        (gap.name, "policy/rollout_logprob_gap_max", "policy/importance_weight"),
        remedies,
    )


def _jump(gap: Series, floor: float) -> Stretch | None:
    """The steps for which the gap stays several times above what it was, from the first such step on."""
    for i in range(2, len(gap) - 1):
        limit = max(_JUMP * max(gap.values[:i]), floor)
        if min(gap.values[i : i + 2]) > limit:
            found = gap.after(gap.steps[i - 1]).stretch(lambda value, limit=limit: value > limit, at_least=2)
            return found and replace(found, start=gap.steps[i])
    return None


def gradient_spikes(run: History) -> Iterator[Verdict]:
    """Single batches with a gradient far beyond the usual, or one that is not finite."""
    for role in TRAINED:
        norm, skipped = run[f"{role}/grad_norm"], run[f"{role}/skipped_updates"]
        usual = norm.where(lambda _, value: value > 0).median  # a step without a signal has no gradient
        spikes = [step for step, value in norm.after(1) if value > _SPIKE * usual] if len(norm) > 4 else []
        scaled = dict(run[f"{role}/overflows"])  # of float16, which the loss scale ends
        lost = [step for step, value in skipped if value > scaled.get(step, 0.0)]
        if not spikes and not lost:
            continue
        parts = [f"{len(spikes)} of {len(norm)} steps have a gradient above {_SPIKE:g} times the median "
                 f"({norm.highest:.3g} against {usual:.3g})"] if spikes else []  # fmt: skip
        parts += [f"{len(lost)} steps have updates that were skipped, because the gradient was not finite"] * bool(lost)
        yield Verdict(
            "gradient-spikes",
            Level.PROBLEM if lost else Level.WARNING if len(spikes) > 1 else Level.NOTE,
            f"The gradient of the {role.replace('_', ' ')} spikes",
            f"{'; '.join(parts)}.",
            min([*spikes, *lost]),
            None,
            (norm.name, skipped.name, "reward/std"),
            (
                Remedy("Bound the rewards.", field("algorithm.reward_clip", _REWARD_CLIP)),
                Remedy("Clip the gradient at a lower norm.", field(f"roles.{role}.max_grad_norm", 0.5)),
                Remedy("Look at the samples of these steps: extreme rewards or very long responses stand out."),
            ),
        )


def clipped_gradients(run: History) -> Iterator[Verdict]:
    """Clipping, not the learning rate, decides how far an update goes."""
    for role in TRAINED:
        norm, most = run[f"{role}/grad_norm"], float(run.get(f"roles.{role}.max_grad_norm", 1.0))
        found = norm.stretch(lambda value, most=most: value > _CLIPPED_TO * most)
        if found is None or not found.ongoing:
            continue
        yield Verdict(
            "clipped-gradients",
            Level.WARNING,
            f"The gradient of the {role.replace('_', ' ')} is clipped to a small part",
            f"Its norm is {norm.during(found).median:.3g} in most steps, {norm.highest:.3g} at most, and is clipped to "
            f"{most:g}: what is left of a batch with large rewards is as large as of any other.",
            found.start,
            None,
            (norm.name, "reward/std", "reward/mean"),
            (
                *_bounds(run, role),
                Remedy("Normalize the advantages.", field("algorithm.normalize_by_std", True)),
                Remedy("Look at the scale of rewards and of the penalty: sort the samples by reward."),
            ),
        )


def _bounds(run: History, role: str) -> Iterator[Remedy]:
    """What makes the gradients of a role smaller: a bound on rewards above it, or a slower critic if its values have
    left the scale of the rewards."""
    means, spreads = run["reward/mean"].values, run["reward/std"].values
    scale = max((abs(mean) + spread for mean, spread in zip(means, spreads, strict=False)), default=math.inf)
    if role == "critic" and run["critic/value_abs_max"].last > _CLIPPED_TO * scale:
        rate = float(run.get("roles.critic.learning_rate", 1e-6))
        yield Remedy("Lower the critic's learning rate.", field("roles.critic.learning_rate", rate * 0.1))
    if scale > _REWARD_CLIP:
        yield Remedy("Bound the rewards.", field("algorithm.reward_clip", _REWARD_CLIP))


def blind_critic(run: History) -> Iterator[Verdict]:
    """The critic's values say nothing about the returns."""
    explained = run["explained_variance"]
    warm = int(run.get("roles.critic.warmup_steps", 0)) + _WARM_UP
    late = explained.after(warm)
    if len(late) < SHORTEST:
        return
    if late.last == 0.0:  # the returns do not vary: there is nothing to explain
        return
    worse = late.last < -0.05
    blind = len(late) >= 3 * _WARM_UP and late.last < 0.05
    value = run["critic/value_error"]
    learns = late.trend().rises or (value.last < 0.5 * value.first and late.last > _FAR_WORSE)
    if not (worse or blind) or learns:
        return
    found = explained.stretch(lambda value: value < 0.05, at_least=2)
    rate = float(run.get("roles.critic.learning_rate", 1e-6))
    yield Verdict(
        "blind-critic",
        Level.PROBLEM if worse else Level.WARNING,
        "The critic explains nothing",
        f"The explained variance is {late.last:.3g} after {explained.steps[-1]} steps"
        + (": worse than a constant, so that the advantages are noisier than the rewards." if worse else "."),
        found.start if found else explained.steps[0],
        None,
        (explained.name, "critic/value_error", "value_mean", "return_mean"),
        (
            Remedy("Lower the critic's learning rate.", field("roles.critic.learning_rate", rate * 0.1))
            if worse or value.trend().rises
            else Remedy("Raise the critic's learning rate.", field("roles.critic.learning_rate", rate * 5)),
            Remedy("Train the critic alone at first.", field("roles.critic.warmup_steps", 10)),
            Remedy("Do without a critic.", field("algorithm.name", "grpo")),
        ),
    )
