"""Reward models, combinations and normalized components of a rollout spec that cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pydantic import ValidationError

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import Finding, nearest
from troupe.orchestrator.spec.checks.shared import changed
from troupe.orchestrator.spec.derived.sampling import (
    answer_column,
    group_settings,
    measured_offsets,
    reward_functions,
    scored_models,
)
from troupe.orchestrator.spec.errors import show
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import ReasoningGymSource
from troupe.workers.contract.algorithm_config import STEP_ESTIMATORS
from troupe.workers.contract.config_base import first_problem
from troupe.workers.contract.reward_config import CombinationArgs, ModelArgs, RewardFunctionConfig, RewardModelConfig
from troupe.workers.contract.rewards import COMBINATIONS, PENALIZED, REWARD_MODEL

_ARGS = {REWARD_MODEL: ModelArgs, **dict.fromkeys(COMBINATIONS, CombinationArgs)}
"""Arguments of the components that are no functions of a response."""
_MODEL_WEIGHT = "roles.reward.model_weight"
NOT_NORMALIZED = {
    "max_likelihood": "divides by the mean reward of a group, which must not be negative",
    "decoupled_group": "normalizes each component in its group",
}
"""Why an advantage estimator takes no normalized components."""


def reward_model_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Reward models that no component reads, and fields without effect."""
    reward, scored = spec.roles.reward, scored_models(spec)
    for name in ("model_weight", "micro_batch_tokens"):
        if not reward.reward_models and changed(reward, name):
            yield f"roles.reward.{name}", "has no effect without a reward model"
    if reward.models and reward.model is not None:
        yield "roles.reward.model", "there are several reward models: name this one in roles.reward.models, too"
    elif reward.reward_models and "roles.reward.model" not in scored and changed(reward, "model_weight"):
        yield _MODEL_WEIGHT, "has no effect: a component names the model, and has a weight"
    functions = chain.from_iterable(reward_functions(spec).values())
    used = {function.model for function in functions}
    for name in reward.models:
        if name not in used:
            why = f"no component reads it: add {{name: reward_model, args: {{model: {name}}}}} to the functions"
            yield f"roles.reward.models.{name}", why
    for path, model in spec.models().items():
        of_response = isinstance(model, RewardModelConfig) and model.level in ("response", "token_mean")
        if of_response and changed(model, "separator"):
            yield f"{path}.separator", "has no effect on scores of responses; set level"
    yield from _offset_problems(spec)
    if (alone := scored.get("roles.reward.model")) is not None and alone.level == "step":
        yield from steps_problems(spec, "roles.reward.model.level", reward.model_weight)


def _offset_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Offsets whose reference answers nothing reads, or that are no responses."""
    sources = spec.data.train_sources()
    environments = dict(zip(sources, (one.environment for one in group_settings(spec)), strict=True))
    for offset in measured_offsets(spec):
        if not offset.sources:
            yield offset.path, "the model scores no source of data.train, which has the references: set a number"
        for name in offset.sources:
            source = sources[name]
            own = () if isinstance(source, ReasoningGymSource) else source.metadata
            has = [column for column in (answer_column(source), *own) if column is not None]
            if offset.column not in has:
                hint = nearest(offset.column, has) or f"there are: {', '.join(has) or 'none'}"
                why = f"no number, and neither the answer nor in data.{name}.metadata; add it there ({hint})"
                yield offset.path, f"{show(offset.column)} is {why}"
            elif environments[name] is not None:
                why = "are episodes, and a reference answer is one response: set a number"
                yield offset.path, f"the samples of data.{name} {why}"


def component_list_problems(
    spec: RolloutSpec, section: str, components: Sequence[RewardFunctionConfig]
) -> Iterator[Finding]:
    """Reward models, combinations and normalized components of one list that cannot work. The reward model that is not
    in the list is the last component."""
    models = scored_models(spec)
    paths = [f"{section}.{index}" for index in range(len(reward_functions(spec)[section]))]
    rewards_steps = [
        one.process or (path in models and models[path].level == "step")
        for path, one in zip([*paths, "roles.reward.model"], components, strict=False)
    ]
    for place, (path, one) in enumerate(zip(paths, components, strict=False)):
        if (form := _ARGS.get(one.name)) is not None:
            try:
                form.model_validate(one.args)
            except ValidationError as error:
                yield f"{path}.args", f"{one.name}: {first_problem(error)}"
                continue
            for name in ("timeout_s", "env"):
                if changed(one, name):
                    yield f"{path}.{name}", f"has no effect on {one.name}; remove it"
        if one.model and path not in models:
            known = list(spec.roles.reward.reward_models)
            hint = nearest(one.model, known) or f"there are: {', '.join(known) or 'none'}"
            yield f"{path}.args.model", f"no reward model '{one.model[:60]}' in roles.reward ({hint})"
        elif one.model and rewards_steps[place] and not is_held_out(section):
            yield from steps_problems(spec, f"{path}.args.model", one.weight)
        if one.of:
            yield from _combined(spec, section, components, place, rewards_steps)
        if one.normalize:
            yield from _normalized(spec, path, one)


def _combined(
    spec: RolloutSpec,
    section: str,
    components: Sequence[RewardFunctionConfig],
    place: int,
    rewards_steps: Sequence[bool],
) -> Iterator[Finding]:
    """A combination of components that it cannot combine, or whose weights are not said."""
    one, path = components[place], f"{section}.{place}"
    if "coef" in one.args and one.name not in PENALIZED:
        yield f"{path}.args.coef", f"has no effect on {one.name}; only {' and '.join(PENALIZED)} read it"
    places = {other.component: n for n, other in enumerate(components) if not other.of or n < place}
    for label in one.of:
        if label not in places:
            hint = nearest(label, [*places]) or f"there are: {', '.join(places)}"
            why = f"no component '{label[:60]}' that is not made of others, or is before this one ({hint})"
            yield f"{path}.args.of", why
            continue
        number = places[label]
        member, of_list = components[number], number < len(reward_functions(spec)[section])
        if rewards_steps[number]:
            yield f"{path}.args.of", f"'{label}' rewards steps, and only rewards of responses can be combined"
        if member.normalize:
            why = f"{one.component} is made of the values themselves; remove it, or normalize {one.component}"
            yield f"{section}.{number}.normalize", why
        where, given = (f"{section}.{number}.weight", member) if of_list else (_MODEL_WEIGHT, spec.roles.reward)
        if where.rpartition(".")[2] not in given.model_fields_set:
            yield where, f"is required: {one.component} uses {label}; 0 if it counts only there, or its weight besides"


def _normalized(spec: RolloutSpec, path: str, one: RewardFunctionConfig) -> Iterator[Finding]:
    """A normalized component if nothing is normalized, or if an algorithm compares the values themselves."""
    advantage = algorithms.advantage(spec.algorithm)
    by_steps = any(function.process for own in reward_functions(spec).values() for function in own)
    by_steps |= any(model.level == "step" for model in scored_models(spec).values())
    field, name = f"{path}.normalize", spec.algorithm.name
    if is_held_out(path):
        yield field, "only training uses the normalized values; remove it"
    elif one.weight == 0:
        yield field, "has no effect with weight 0; remove it"
    elif by_steps:
        yield field, "a batch with rewards of steps is not normalized: remove it, or reward responses only"
    elif (why := NOT_NORMALIZED.get(advantage.estimator)) is not None:
        yield field, f"{name} {why}; remove it"
    elif advantage.baseline == "greedy":
        yield field, f"{name} compares with the reward of a greedy response, which is not normalized; remove it"


def is_held_out(section: str) -> bool:
    """Whether a list of reward functions belongs to a held-out set."""
    return section.startswith("data.eval.")


def steps_problems(spec: RolloutSpec, path: str, weight: float) -> Iterator[Finding]:
    """Rewards of steps that nothing reads."""
    row = algorithms.row_of(spec.algorithm)
    if row.advantage.estimator not in STEP_ESTIMATORS:
        others = [a.name for a in algorithms.ALGORITHMS.values() if a.advantage.estimator in STEP_ESTIMATORS]
        yield path, f"{row.name} takes one reward for a response; remove it or use one of {', '.join(others)}"
    if weight == 0:
        yield path, "has no effect with weight 0; remove it"
