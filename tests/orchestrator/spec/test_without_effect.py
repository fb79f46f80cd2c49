"""Fields that would be accepted without an effect: refused where they can have none, else a warning.

A row changes a spec that has neither problems nor warnings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.algorithms.section import named_advantages, named_losses
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.rollout import RolloutSpec

SPECS = ROOT / "deploy" / "specs"
OWN = "tests.orchestrator.algorithms.own_algorithms"
DAPO = "algorithm={name: dapo, group_size: 4}"
PRICED = "{name: overlong, weight: 0.5, args: {limit: 4, buffer: 2}}"
SHIPPED = sorted(SPECS.rglob("*.yaml"))
HELD_OUT = "{kind: reasoning_gym, recipes: [{name: chain_sum}], size: 4, seed: 9}"


def specs(path: Path, *changes: str) -> list[RunSpec]:
    return [planned.spec for planned in plan_runs(read_document(path, changes))]


WARNED: list[tuple[str, tuple[str, ...], str]] = [
    ("tiny-grpo", (f"data.eval={HELD_OUT}",), "data.eval: the run never evaluates on it; add `evaluation: {}`"),
    ("tiny-grpo", (f"data.eval={{sums: {HELD_OUT}}}",), "data.eval: the run never evaluates on it"),
    ("tiny-sft", ("evaluation=null",), "data.eval: the run never evaluates on it"),
    ("tiny-grpo", ("failures.replay_steps=4",), "failures.replay_steps: 4, but 5 steps lie between checkpoints"),
    ("tiny-sft", ("failures.replay_steps=0",), "failures.replay_steps: 0, but 5 steps lie between checkpoints"),
    ("tiny-grpo", ("failures.replay_steps=7", "checkpoint.every_steps=0"), "failures.replay_steps: 7, but 15 steps"),
    (
        "tiny-grpo",
        ("schedule.steps=40", "checkpoint.every_steps=30", "failures.trainer_restarts=9"),
        "failures.replay_steps: 16, but 30 steps",
    ),
    (
        "tiny-grpo",
        (
            DAPO,
            f"roles.reward.functions=[{PRICED}, {{name: regex, args: {{pattern: x}}}}, {{name: numeric, label: a}}]",
        ),
        "algorithm.dynamic_sampling_on: null keeps groups whose samples are all wrong and differ in overlong: they "
        "would be trained for their length; set a",
    ),
    (
        "tiny-mixture",
        (DAPO, f"data.train.0.rewards=[{PRICED}, {{name: numeric}}]"),
        "data.train.0.dynamic_sampling_on: null keeps groups",
    ),
    (
        "tiny-grpo",
        ("roles.reward.functions=[{name: numeric}, {name: overlong, args: {limit: 4096, buffer: 8}}]",),
        "roles.reward: overlong begins at 4088 tokens (limit - buffer), and a response has at most",
    ),
]
"""(spec, changes, beginning of the warning)"""


@pytest.mark.parametrize(("name", "changes", "warning"), WARNED)
def test_what_may_not_be_meant_is_a_warning(name: str, changes: tuple[str, ...], warning: str) -> None:
    path = SPECS / f"{name}.yaml"
    assert [line for spec in specs(path) for line in warnings_of(spec)] == []
    (found,) = [line for spec in specs(path, *changes) for line in warnings_of(spec)]
    assert found.startswith(warning)


_TEACHER = "roles.reference={colocate_with: policy}"
_ONE_SOURCE = "roles.teacher={large: {sources: [games], model: {path: .cache/models/tiny-teacher}}}"
REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("tiny-mixture", ("data.train.0.algorithm={}",), "data.train.0.algorithm: replaces nothing; remove it"),
    (
        "tiny-mixture",
        ("data.train.0.algorithm={advantage: remax}",),
        "data.train.0.algorithm.advantage: remax computes advantages from more than rewards",
    ),
    (
        "tiny-mixture",
        ("algorithm={name: gigpo}", "data.train.0.algorithm={advantage: rloo}"),
        "data.train.0.algorithm.advantage: the run's gigpo computes advantages with more than rewards",
    ),
    (
        "tiny-mixture",
        ("data.train.0.algorithm={advantage: pass_at_k}",),
        "data.train.0.algorithm.advantage: pass_at_k compares samples of a group: needs groups of at least 5",
    ),
    (
        "tiny-mixture",
        ("data.train.0.rewards=[{name: length, normalize: true}]", "data.train.0.algorithm={advantage: maxrl}"),
        "data.train.0.algorithm.advantage: maxrl divides by the mean reward of a group",
    ),
    (
        "tiny-grpo",
        ("algorithm.name=maxrl", f"roles.reward.functions=[{{name: numeric}}, {PRICED}]"),
        "roles.reward.functions.1.weight: overlong makes rewards negative, and maxrl divides by their mean",
    ),
    (
        "tiny-mixture",
        ("data.train.0.rewards=[{name: length, weight: -1}]", "data.train.0.algorithm={advantage: maxrl}"),
        "data.train.0.rewards.0.weight: length makes rewards negative",
    ),
    (
        "tiny-mixture",
        ("data.train.0.algorithm={advantage: gkd}",),
        "data.train.0.algorithm.advantage: gkd has no advantages, and no teacher is compared: set algorithm.distill",
    ),
    ("tiny-mixture", ("data.train.0.algorithm={kl_coef: 0.1}",), "data.train.0.algorithm.kl_coef: needs a role"),
    (
        "tiny-mixture",
        ("data.train.0.algorithm={kl_estimator: k2}",),
        "data.train.0.algorithm.kl_estimator: the source has no KL term",
    ),
    (
        "tiny-mixture",
        (
            "algorithm={name: grpo, distill: {coef: 1}}",
            "roles.teacher={a: {}}",
            "data.train.0.algorithm={advantage: gkd, loss: gspo}",
        ),
        "data.train.0.algorithm.loss: has no effect: the source has no advantages",
    ),
    *(
        ("tiny-mixture", (f"data.train.0.algorithm={{{fields}}}", *run), f"data.train.0.algorithm.{message}")
        for fields, message, *run in (
            ("loss: grpo", "loss: has no effect: it is the run's loss"),
            ("loss: cispo, clip_low: 0.1", "clip_low: cispo does not use it"),
            ("loss: grop", "loss: no algorithm 'grop' (did you mean 'grpo'"),
            (
                "loss: raft",
                "loss: raft has no ratio and trains at temperature 1: no source has its loss alone",
            ),
            ("loss: ppo_penalty", "loss: ppo_penalty limits the step of a whole update: no source"),
            ("loss: flash_reinforce", "loss: flash_reinforce leaves out samples far from the sampler: no source"),
            ("loss: score_centering", "loss: score_centering reads the sampler's likeliest tokens: no source"),
            ("loss: trpo", "loss: trpo limits the step of a whole update: no source"),
            ("loss: kl_cov", "loss: kl_cov chooses tokens of a whole batch: no source"),
            ("loss: online_dpo", "loss: online_dpo trains on pairs: no source"),
            ("loss: gkd", "loss: gkd has no loss besides the divergence from a teacher: no source"),
            (
                "loss: cispo",
                "loss: the run's clip_cov chooses tokens of a whole batch: all",
                "algorithm={name: clip_cov}",
            ),
            ("loss: cispo", "loss: the run's raft has no ratio", "algorithm={name: raft}"),
            (
                "loss: cispo",
                f"loss: the run's {OWN}:detached has a custom loss",
                f"algorithm={{name: '{OWN}:detached'}}",
            ),
        )
    ),
    (
        "tiny-mixture",
        ("sampling.structured={regex: '[a-z]+'}", "data.train.0.algorithm={loss: dppo_kl}"),
        "sampling.structured: dppo_tv and dppo_kl compare a token's probability",
    ),
    (
        "tiny-mixture",
        ("algorithm={name: rloo, kl: {coef: 0}}", "data.train.0.algorithm={kl_coef: 0.1}"),
        "data.train.0.algorithm.kl_coef: rloo has no KL term in a loss with a ratio",
    ),
    (
        "tiny-mixture",
        ("algorithm={name: raft}", "data.train.0.algorithm={clip_high: 0.3}"),
        "data.train.0.algorithm.clip_high: raft does not use it; remove it",
    ),
    ("tiny-grpo", ("roles.policy.min_lr_ratio=0.1",), "roles.policy.min_lr_ratio: has no effect on a constant"),
    ("tiny-grpo", ("roles.policy.recompute_products=false",), "roles.policy.recompute_products: has no effect without"),
    ("tiny-grpo", ("roles.policy.recompute_every=2",), "roles.policy.recompute_every: has no effect without"),
    ("tiny-ppo", ("roles.critic.min_lr_ratio=0.1",), "roles.critic.min_lr_ratio: has no effect on a constant"),
    ("tiny-sft", ("roles.policy.min_lr_ratio=1",), "roles.policy.min_lr_ratio: has no effect on a constant"),
    (
        "tiny-grpo",
        (f"data.eval={HELD_OUT}", "evaluation={sampling: {top_p: 0.9}}"),
        "evaluation.sampling.top_p: has no effect on greedy decoding",
    ),
    (
        "tiny-grpo",
        (f"data.eval={{sums: {HELD_OUT[:-1]}, sampling: {{top_p: 0.9}}}}}}", "evaluation={}"),
        "data.eval.sums.sampling.top_p: has no effect on greedy decoding",
    ),
    (
        "tiny-grpo",
        ("algorithm.importance={mode: none, cap: 3.0}",),
        "algorithm.importance.cap: has no effect with mode none",
    ),
    (
        "tiny-grpo",
        ("algorithm.importance={mode: none, level: sequence}",),
        "algorithm.importance.level: has no effect with mode none",
    ),
    ("tiny-grpo", ("algorithm.distill={k: 8}",), "algorithm.distill.k: has no effect with the other fields"),
    *(
        (
            "tiny-grpo",
            (f"algorithm.distill={{coef: 1, {one}}}", _TEACHER),
            f"algorithm.distill.{name}: has no effect with",
        )
        for name, one in (("alpha", "alpha: 0.1"), ("beta", "beta: 0.1"), ("k", "k: 2, support: full"))
    ),
    ("tiny-ppo", ("algorithm.by_source=false",), "algorithm.by_source: has no effect with one source in data.train"),
    (
        "tiny-mixture",
        ("algorithm.by_source=false",),
        "algorithm.by_source: has no effect: grpo compares samples of a group",
    ),
    (
        "tiny-grpo",
        (f"algorithm.name={OWN}:ordered_filter", "algorithm.dynamic_sampling_on=letter_share"),
        f"algorithm.dynamic_sampling_on: has no effect: keep_group of {OWN}:ordered_filter decides",
    ),
]
"""(spec, changes, beginning of the message)"""
ACCEPTED: list[tuple[str, tuple[str, ...]]] = [
    ("tiny-grpo", ("roles.policy.min_lr_ratio=0.1", "roles.policy.schedule=linear")),
    ("tiny-sft", ("roles.policy.min_lr_ratio=0",)),
    ("tiny-grpo", (f"data.eval={HELD_OUT}", "evaluation={}")),
    ("tiny-grpo", (f"data.eval={HELD_OUT}", "evaluation={sampling: {temperature: 0.5, top_p: 0.9}}")),
    ("tiny-grpo", ("algorithm.importance={mode: none}",)),
    ("tiny-grpo", ("algorithm.importance={mode: mask, cap: 3.0, level: sequence}",)),
    *(
        ("tiny-grpo", (f"algorithm.distill={{coef: 1, divergence: {one}}}", _TEACHER))
        for one in ("reverse, k: 2", "skewed, alpha: 0.1", "jensen_shannon, beta: 0.1")
    ),
    (
        "tiny-mixture",
        ("data.train.1.algorithm={advantage: maxrl}", "data.train.0.rewards=[{name: length, weight: -1}]"),
    ),
    ("tiny-grpo", ("algorithm.name=maxrl", "roles.reward.functions=[{name: overlong, weight: 0}, {name: numeric}]")),
    ("tiny-grpo", ("algorithm.name=maxrl", "roles.reward.functions=[{name: numeric}, {name: 'm:f', weight: -1}]")),
    *(
        (
            "tiny-grpo",
            (
                f"algorithm.distill={{coef: 1, support: {support}}}",
                "roles.policy.ema_decay=0.9",
                "roles.teacher={own: {colocate_with: policy, average: true}}",
            ),
        )
        for support in ("full", "student_top_k")
    ),
    ("tiny-mixture", ("algorithm={name: reinforce, by_source: false}",)),
    *(("tiny-mixture", (f"data.train.0.algorithm={{loss: {name}}}",)) for name in named_losses() if name != "grpo"),
    *(
        (
            "tiny-mixture",
            (f"data.train.0.algorithm={{advantage: {name}}}", "data.train.0.group_size=8", "data.train.1.group_size=8"),
        )
        for name in named_advantages()
        if name != "gkd"  # needs a teacher
    ),
    ("tiny-mixture", ("algorithm={name: rloo, kl: {coef: 0}, whiten: true, by_source: false}",)),
    ("tiny-mixture", ("algorithm={name: rloo, kl: {coef: 0}, reward_scale: batch, by_source: false}",)),
    ("tiny-grpo", ("failures.replay_steps=5",)),
    ("tiny-grpo", ("failures={replay_steps: 0, trainer_restarts: 0}",)),
    ("tiny-grpo", ("schedule.steps=40", "checkpoint.every_steps=30")),  # the defaults, as documented
    ("tiny-grpo", ("algorithm={name: dapo, group_size: 4, dynamic_sampling_on: letter_share}",)),
    ("tiny-grpo", (f"roles.reward.functions=[{PRICED}, {{name: numeric}}]",)),  # no group is replaced
    ("tiny-grpo", (DAPO, f"roles.reward.functions=[{PRICED}]")),  # length is what is learned
    (
        "tiny-grpo",
        (DAPO, "roles.reward.functions=[{name: overlong, weight: 0, args: {limit: 4, buffer: 2}}, {name: numeric}]"),
    ),
    (
        "tiny-grpo",
        (f"{DAPO[:-1]}, dynamic_sampling_on: numeric}}", f"roles.reward.functions=[{PRICED}, {{name: numeric}}]"),
    ),
]
"""Combinations beside these that have an effect, or say what is so anyway."""


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_can_have_no_effect_is_refused_at_its_field(name: str, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError) as error:
        specs(SPECS / f"{name}.yaml", *changes)
    (problem,) = error.value.problems
    assert str(problem).startswith(f"--set: {message}"), str(problem)


@pytest.mark.parametrize(("name", "changes"), ACCEPTED)
def test_what_has_an_effect_is_accepted_without_a_warning(name: str, changes: tuple[str, ...]) -> None:
    assert [line for spec in specs(SPECS / f"{name}.yaml", *changes) for line in warnings_of(spec)] == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_spec_has_no_warnings(path: Path) -> None:
    assert [line for spec in specs(path) for line in warnings_of(spec)] == []


_BOTH, _ALONE = (
    "algorithm={name: grpo, distill: {coef: 1, k: 8}}",
    "algorithm={name: gkd, group_size: 4, distill: {k: 8}}",
)


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ((_BOTH,), True),
        ((_BOTH, "data.train.1.algorithm={advantage: gkd}"), True),
        ((_ALONE, "data.train.0.algorithm={advantage: grpo}"), True),
        ((_ALONE, "data.train.0.algorithm={advantage: grpo, loss: gspo}"), True),
        ((_ALONE,), False),
        (("algorithm={name: distill}",), False),
        ((_BOTH, "data.train.0.algorithm={advantage: gkd}"), False),
    ],
)
def test_a_source_without_a_teacher_needs_its_rewards(changes: tuple[str, ...], learns: bool) -> None:
    path = SPECS / "tiny-mixture.yaml"
    if learns:
        (spec,) = specs(path, _ONE_SOURCE, *changes)
        assert isinstance(spec, RolloutSpec) and not spec.roles.teachers("sums") and spec.roles.teachers("games")
        return
    with pytest.raises(SpecError, match=r"data\.train\.0\.name: sums has no teacher, and learns from nothing else"):
        specs(path, _ONE_SOURCE, *changes)
