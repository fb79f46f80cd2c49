"""Rules on what the policy learns: signal, exploration, reward, and the length of its responses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.insight.verdicts.history import EQUAL, FEW_MIXED, SHORTEST, History, Stretch
from troupe.orchestrator.insight.verdicts.verdict import Level, Remedy, Verdict, field, flow, while_it_lasts

_HELD_OUT_REWARD = re.compile(r"eval/(?:([a-z0-9-]+)/)?reward")
_LOW_ENTROPY, _LOST_ENTROPY = 0.05, 0.15
"""Nats per token; share of the entropy at the start."""
_MOST_KL, _MOST_REPETITION = 0.5, 0.3
_MOST_PENALTY = 0.3
_LEARNING_RATE = "roles.policy.learning_rate"
_GROWTH, _SHRINKAGE = 2.0, 0.4
_CUT = 0.3
"""Share of cut responses above which most of the work is lost."""


def smaller_steps(run: History) -> Remedy:
    """Proposes smaller steps: a lower learning rate, or limit of a natural gradient's step."""
    solved = ALGORITHMS[name].natural_gradient if (name := run.get("algorithm.name")) in ALGORITHMS else None
    if solved is not None:
        limit = float(run.get("algorithm.natural_gradient.max_kl", solved.max_kl))
        return Remedy("Lower the limit of a step.", field("algorithm.natural_gradient.max_kl", 0.3 * limit))
    rate = float(run.get(_LEARNING_RATE, 1e-6))
    return Remedy("Lower the learning rate.", field(_LEARNING_RATE, 0.3 * rate))


def add_kl(run: History) -> Remedy:
    """Proposes a KL penalty, or a stronger one."""
    coef = float(run.get("algorithm.kl.coef", 0.0))
    lines = field("algorithm.kl", f"{{coef: {coef * 5 if coef else 0.01:g}}}")
    if run.get("roles.reference") is None:
        lines = f"roles:\n  reference: {{colocate_with: policy}}\n{lines}"
    return Remedy("Keep the policy nearer to the reference.", lines)


def entropy_collapse(run: History) -> Iterator[Verdict]:
    entropy = run["policy/entropy"]
    limit = max(_LOW_ENTROPY, min(_LOST_ENTROPY * entropy.first, 0.5)) if entropy else 0.0
    found = entropy.stretch(lambda value: value < limit, at_least=2)
    if found is None:
        return
    fell = entropy.first >= limit
    now = f"{entropy.typical(found):.3g} nats per token, below {limit:.3g}"
    yield Verdict(
        "entropy-collapse",
        while_it_lasts(found, Level.WARNING if run.reward_rises else Level.PROBLEM),
        "The policy no longer explores" if fell else "The policy hardly explores",
        (f"Entropy fell from {entropy.first:.3g} to {now}. " if fell else f"Entropy is {now}, as at the start. ")
        + "Samples of a prompt are much alike, and there is little to compare.",
        found.start,
        found.until,
        ("policy/entropy", "groups/mixed", "reward/mean"),
        (
            *((smaller_steps(run),) if fell else ()),
            Remedy("Add an entropy bonus.", field("algorithm.entropy_coef", 0.003)),
            *((add_kl(run),) if fell else (Remedy("Start from a model that is less sure of its responses."),)),
        ),
    )


def reward_hacking(run: History) -> Iterator[Verdict]:
    """The reward rises while what it stands for gets worse."""
    reward = run["reward/mean"]
    signs, evidence, since = _signs_of_hacking(run)
    if not signs or not reward.trend().rises:
        return
    yield Verdict(
        "reward-hacking",
        Level.PROBLEM if len(signs) > 1 or "eval/reward" in evidence else Level.WARNING,
        "The reward rises, the text gets worse",
        f"The reward rose from {reward.first:.3g} to {reward.last:.3g} while {'; '.join(signs)}. Read the best samples "
        "of the last steps: the policy may have found what the reward function does not check.",
        min(since),
        None,
        ("reward/mean", *evidence),
        (Remedy("Close the loophole in the reward function, or add one that checks what it leaves out."), add_kl(run)),
    )


def _signs_of_hacking(run: History) -> tuple[list[str], list[str], list[int]]:
    """What gets worse, the metrics that show it, and the first step of each."""
    signs: list[str] = []
    evidence: list[str] = []
    since: list[int] = []
    for held_out in run.named("eval/"):
        name = _HELD_OUT_REWARD.fullmatch(held_out.name)
        if name is None or len(held_out) < 2:
            continue
        if held_out.values[-1] < max(held_out.values) - 0.1 * _scale(held_out.values):
            best = max(range(len(held_out)), key=lambda i: held_out.values[i])
            of = f" on {name[1]}" if name[1] else ""
            signs.append(f"the held-out reward{of} fell from {held_out.values[best]:.3g} to {held_out.values[-1]:.3g}")
            evidence.append(held_out.name)
            since.append(held_out.steps[best])
    repetition = run["repetition"]
    floor = max(_MOST_REPETITION, repetition.first + 0.2) if repetition else 0.0
    if (found := repetition.stretch(lambda value: value > floor, at_least=2)) and found.ongoing:
        signs.append(f"repetition rose from {repetition.first:.2f} to {repetition.typical(found):.2f}")
        evidence.append(repetition.name)
        since.append(found.start)
    kl = run["kl_ref"]
    if (found := kl.stretch(lambda value: value > _MOST_KL, at_least=2)) and found.ongoing:
        signs.append(f"the policy moved {kl.typical(found):.3g} nats per token from the reference")
        evidence.append(kl.name)
        since.append(found.start)
        if len(signs) == 1:  # learning moves the policy too; with no other sign it is a matter of kl-explosion
            return [], [], []
    return signs, evidence, since


def _scale(values: tuple[float, ...]) -> float:
    return max(abs(value) for value in values) or 1.0


def no_signal(run: History) -> Iterator[Verdict]:
    """Groups whose samples have equal rewards give no gradient."""
    mixed, spread, reward = run["groups/mixed"], run["reward/std"], run["reward/mean"]
    alone = run.alone
    series, limit = (spread, EQUAL) if alone or not mixed else (mixed, FEW_MIXED)
    found = series.stretch(lambda value: value <= limit, at_least=2)
    if found is None:
        return
    at = reward.typical(found)
    constant = spread.smooth.during(found).highest <= EQUAL
    equal = 1 - mixed.typical(found)
    what = f"Every sample has the same reward, {at:.3g}" if constant else f"{equal:.0%} of the groups are equal"
    learned = run.reward_rises and found.start > run.last_step // 3
    more = 2 * int(run.get("algorithm.group_size", 8))
    groups = (Remedy("Sample more per prompt, so that groups differ.", field("algorithm.group_size", more)),)
    remedies = (
        *(() if alone else groups),
        Remedy("Draw prompts that the policy solves only sometimes.", "data:\n  curriculum: {}"),
        Remedy("Replace groups without signal, as DAPO does.", field("algorithm.name", "dapo")),
        Remedy("Try the reward function on the samples below: it may give every text the same reward."),
    )
    yield Verdict(
        "no-signal",
        while_it_lasts(found, Level.WARNING if learned else Level.PROBLEM),
        "The rewards carry no signal",
        f"{what}, and {'nothing tells them apart' if alone else 'such groups have no gradient'}. "
        + (
            "The task may be solved."
            if learned
            else f"The mean reward is {at:.3g}: the task is too hard, too easy, "
            "or the reward does not depend on the response."
        ),
        found.start,
        found.until,
        (mixed.name if mixed else spread.name, spread.name, reward.name),
        remedies,
    )


def reward_falls(run: History) -> Iterator[Verdict]:
    """The reward at the end is worse than at the start."""
    reward = run["reward/mean"]
    trend = reward.trend()
    spread = run["reward/std"].first
    if not trend.falls or not spread or -trend.change < 0.5 * spread:
        return
    smooth = reward.smooth.values
    best = smooth.index(max(smooth))
    harder = run.get("data.curriculum") is not None
    yield Verdict(
        "reward-falls",
        Level.NOTE if harder else Level.PROBLEM,
        "The reward falls",
        f"The reward fell from {smooth[best]:.3g} at step {reward.steps[best]} to {reward.last:.3g}."
        + (" A curriculum draws harder prompts as the policy learns: held-out data tell whether it does." * harder),
        reward.steps[best],
        None,
        (reward.name, "policy/kl_exact", "policy/entropy"),
        () if harder else (smaller_steps(run), add_kl(run)),
    )


def penalty_dominates(run: History) -> Iterator[Verdict]:
    """The KL penalty keeps the policy from moving."""
    coef = float(run.get("algorithm.kl.coef", 0.0))
    reward = run["reward/mean"]
    penalty = run["policy/kl_loss"]
    # Advantages are about 1 in size, and so is what they can earn. The loss itself is no measure: at the first update
    # of a batch it is 0 however large its gradient.
    held = penalty.stretch(lambda value: value > _MOST_PENALTY)
    if coef < 1.0 and (held is None or not held.ongoing):
        return
    moved = run["kl_ref"].last > _MOST_KL
    if run.reward_rises or len(reward) < 2 * SHORTEST or run.no_signal or moved:
        return
    yield Verdict(
        "penalty-dominates",
        Level.WARNING,
        "The KL penalty outweighs the reward",
        f"`algorithm.kl.coef` is {coef:g}"
        + (f"; the penalty is {penalty.last:.3g} where advantages are about 1" if penalty else "")
        + ". The reward does not rise: the policy is held at the reference.",
        held.start if held else reward.steps[0],
        None,
        (reward.name, "policy/kl_loss", "kl_ref"),
        (Remedy("Lower the coefficient.", field("algorithm.kl", f"{{coef: {max(coef / 100, 0.001):g}}}")),),
    )


def overfitting(run: History) -> Iterator[Verdict]:
    """The loss on held-out examples rises while the training loss falls."""
    held_out = run["eval/loss"]
    if len(held_out) < SHORTEST:
        return
    best = min(range(len(held_out)), key=lambda i: held_out.values[i])
    low, last = held_out.values[best], held_out.values[-1]
    if last < low + max(0.05 * abs(low), 1e-3) or not math.isfinite(last):
        return
    steps = held_out.steps[best]
    yield Verdict(
        "overfitting",
        Level.WARNING,
        "The held-out loss rises",
        f"The held-out loss was lowest at step {steps} ({low:.4g}) and is {last:.4g} now.",
        steps,
        None,
        (held_out.name, "policy/loss"),
        (Remedy("Stop where it was lowest.", field("schedule.steps", max(steps, 1))), smaller_steps(run)),
    )


def _longest(run: History) -> int:
    return int(run.get("sampling.max_tokens", 0)) or int(run["response_tokens/max"].highest)


def _overlong(run: History) -> str:
    """The run's reward functions, and one that charges for length; empty if the spec does not have them."""
    longest = _longest(run)
    charge = {"name": "overlong", "args": {"limit": longest, "buffer": max(1, longest // 4)}, "weight": 0.2}
    functions = run.get("roles.reward.functions", [])
    return flow("roles.reward.functions", [*functions, charge]) if functions else ""


def length_explosion(run: History) -> Iterator[Verdict]:
    """Responses become much longer, and longer does not mean better."""
    length, cut = run["response_tokens/mean"], run["truncated"]
    limit = _GROWTH * length.first
    found = length.stretch(lambda value: value > limit, at_least=2)
    pays = run.reward_rises and not cut.trend().rises
    if found is None or not length.trend().rises:
        return
    yield Verdict(
        "length-explosion",
        Level.NOTE if pays else while_it_lasts(found, Level.WARNING),
        "Responses become much longer",
        f"Responses grew from {length.first:.0f} to {length.typical(found):.0f} tokens"
        + ("" if pays or not cut else f"; {cut.typical(found):.0%} are cut,")
        + (" while the reward rises." if run.reward_rises else " while the reward does not rise."),
        found.start,
        found.until,
        (length.name, cut.name, "reward/mean"),
        (
            Remedy("Make length cost something near the limit.", _overlong(run)),
            Remedy("Do not let a length's share of the loss grow with it.", field("algorithm.name", "dr_grpo")),
        ),
    )


def length_collapse(run: History) -> Iterator[Verdict]:
    length = run["response_tokens/mean"]
    limit = _SHRINKAGE * length.first
    found = length.stretch(lambda value: value < limit, at_least=2)
    if found is None:
        return
    yield Verdict(
        "length-collapse",
        while_it_lasts(found, Level.WARNING if run.reward_rises else Level.PROBLEM),
        "Responses become very short",
        f"Responses shrank from {length.first:.0f} to {length.typical(found):.1f} tokens. "
        "Check that the reward pays for what a short response leaves out.",
        found.start,
        found.until,
        (length.name, "reward/mean", "policy/entropy"),
        (
            Remedy("Read the shortest samples, and let the reward ask for an answer."),
            add_kl(run),
            smaller_steps(run),
        ),
    )


def truncation(run: History) -> Iterator[Verdict]:
    """Responses are cut before they end, and may earn nothing for it."""
    cut = run["truncated"]
    limit = _CUT
    found = cut.stretch(lambda value: value > limit, at_least=2)
    if found is None:
        return
    rises = cut.trend().rises and cut.last > cut.first + 0.2
    always = min(cut.values) > 0.99 and run["reward/std"].last > 0.0  # then the reward scores cut responses as such
    harmless = (run.reward_rises or always) and not rises
    limits, remedies = _limits(run, found)
    yield Verdict(
        "truncation",
        Level.NOTE if harmless else while_it_lasts(found, Level.WARNING),
        "Responses are truncated",
        f"{cut.typical(found):.0%} of the responses reach {limits}; "
        + ("rewards still differ." if harmless else "what would follow is neither scored nor trained."),
        found.start,
        found.until,
        (cut.name, "response_tokens/mean", "reward/mean"),
        (*remedies, Remedy("Leave truncated responses out of the loss.", field("algorithm.mask_truncated", "true"))),
    )


def _limits(run: History, found: Stretch) -> tuple[str, list[Remedy]]:
    """The limits that responses reach, each with its value, and what raises them: a source may have its own."""
    cut = {n: run[f"source/{own.get('name')}/truncated"].during(found) for n, own in enumerate(run.sources)}
    reach = {n: run.sources[n].get("max_tokens") for n, share in cut.items() if not share or share.last > _CUT}
    own = {f"data.train.{n}.max_tokens": most for n, most in reach.items() if most is not None}
    longest, remedies = _longest(run), [Remedy(f"Allow longer responses: raise `{path}`.") for path in own]
    if not own or None in reach.values():
        own["sampling.max_tokens"] = longest
        remedies.append(Remedy("Allow longer responses.", field("sampling.max_tokens", 2 * longest)))
    if run.get("roles.environment") is not None:
        own["roles.rollout.max_model_len"] = run.get("roles.rollout.max_model_len", "-")
    return " or ".join(f"`{path}` ({most})" for path, most in own.items()), remedies
