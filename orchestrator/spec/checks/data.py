"""Data, rewards and evaluations of a rollout spec that cannot work, with the path of the field to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.algorithms.section import SourceAlgorithm
from troupe.orchestrator.algorithms.table import unread_options
from troupe.orchestrator.errors import Finding, nearest
from troupe.orchestrator.spec.checks.components import (
    NOT_NORMALIZED,
    component_list_problems,
    is_held_out,
    reward_model_problems,
    steps_problems,
)
from troupe.orchestrator.spec.checks.shared import (
    IMPORTED,
    best_problems,
    changed,
    evaluation_problems,
    mixture_problems,
    name_problems,
    template_problems,
)
from troupe.orchestrator.spec.derived.sampling import group_settings, held_out_sets, reward_functions, scored_models
from troupe.orchestrator.spec.derived.training import source_advantages
from troupe.orchestrator.spec.errors import show
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import CurriculumConfig, EvaluationConfig
from troupe.orchestrator.spec.sources import DataSource, HeldOut, Mixed, MixedSource, ReasoningGymSource
from troupe.workers.contract.algorithm_config import STEP_ESTIMATORS
from troupe.workers.contract.config import EvalSampling
from troupe.workers.contract.judges import is_file
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import COMPARED, JUDGE_REWARD, REWARD_FUNCTIONS, SHIPPED, STEP_FUNCTIONS
from troupe.workers.contract.templates import TEMPLATE_FIELDS, template_fields

NEEDS_ANSWER = frozenset(COMPARED)


_WITHIN_GROUP = ("group", "pairs")
"""What a judge compares that are samples of one prompt."""


def reward_problems(spec: RolloutSpec) -> Iterator[Finding]:
    reward = spec.roles.reward
    if not reward.components:
        yield "roles.reward", "scores nothing: set functions, model or both"
    elif not any(one.weight for one in reward.components):
        yield "roles.reward", "every weight is 0: there is nothing to learn"
    yield from reward_model_problems(spec)
    yield from _functions(spec, "roles.reward.functions", reward.components)
    shared = any(not one.own_rewards for one in held_out_sets(spec))
    if not shared and spec.data.mixture and all(one.rewards is not None for one in spec.data.mixture):
        why = "has no effect: every source of data.train sets rewards; leave them out of one source"
        yield "roles.reward.functions", f"{why}, and give its functions here"
    for path, functions in reward_functions(spec).items():
        if path.startswith("data."):
            if not any(function.weight for function in functions):
                lacks = "no reward to report" if is_held_out(path) else "nothing to learn"
                yield path, f"every weight is 0: there is {lacks}"
            yield from _functions(spec, path, functions)
        if all(function.name in SHIPPED for function in functions):  # of others the values are unknown
            yield from _below_zero(spec, path, functions)
    yield from _judge(spec)


def _functions(spec: RolloutSpec, section: str, components: Sequence[RewardFunctionConfig]) -> Iterator[Finding]:
    """Components of one list that cannot work. A reward model that is not in the list is the last one."""
    functions = reward_functions(spec)[section]
    labels = [component.component for component in components[len(functions) :]]
    yield from component_list_problems(spec, section, components)
    for index, function in enumerate(functions):
        path = f"{section}.{index}"
        label = function.component
        if label in labels:
            yield f"{path}.label", f"two components have the label '{label}'; set another label for one of them"
        labels.append(label)
        if function.timeout_s >= spec.schedule.score_timeout_s:
            limit = spec.schedule.score_timeout_s
            yield f"{path}.timeout_s", f"must be less than schedule.score_timeout_s, {limit:g}"
        yield from _reward_name(spec, section, f"{path}.name", function.name)
        if function.name == "python_tests":
            yield from _test_cases(spec, section, path, function.args.get("tests", "answer"))
        if function.name == JUDGE_REWARD:
            yield from _judged_columns(spec, section, path, function.args)
            yield from _compared(spec, section, f"{path}.args", function)
        if function.batched and function.name in REWARD_FUNCTIONS:
            yield f"{path}.batched", f"{function.name} takes one response at a time; remove it"
        if function.process and is_held_out(section):
            yield f"{path}.process", "only training uses the rewards of steps; remove it"
        elif function.process:
            yield from steps_problems(spec, f"{path}.process", function.weight)
            if function.name in REWARD_FUNCTIONS and function.name not in STEP_FUNCTIONS:
                why = f"{function.name} returns no steps; shipped functions that do: {', '.join(STEP_FUNCTIONS)}"
                yield f"{path}.process", why


def _below_zero(spec: RolloutSpec, section: str, functions: Sequence[RewardFunctionConfig]) -> Iterator[Finding]:
    """Components that make rewards negative, if advantages are divided by the mean reward."""
    run, own = algorithms.advantage(spec.algorithm), source_advantages(spec)
    scored = [source for split, source in _scored_by(spec, section).items() if split.startswith("train")]
    estimators = {own.get(one.name if isinstance(one, Mixed) else "", run).estimator for one in scored}
    if "max_likelihood" not in estimators:
        return
    for index, one in enumerate(functions):
        # Only `overlong` is at most 0; all others are at least 0.
        if one.weight and (one.name == "overlong") != (one.weight < 0):
            why = "makes rewards negative, and maxrl divides by their mean: it ends the run at a reward below 0"
            yield f"{section}.{index}.weight", f"{one.component} {why}; use another algorithm, or set weight to 0"


def _judge(spec: RolloutSpec) -> Iterator[Finding]:
    """The function `judge` without a judge, or a judge without the function."""
    lists = [(f"{path}.{n}", f) for path, one in reward_functions(spec).items() for n, f in enumerate(one)]
    asking = [path for path, f in lists if f.name == JUDGE_REWARD and not f.args.get("endpoint")]
    judge = spec.roles.judge
    if judge is None:
        for path in asking:
            why = "needs a role `judge`, or args.endpoint with the url and the model of one"
            yield f"{path}.name", why
        return
    if not asking and not spec.roles.judge_plays:
        yield "roles.judge", "no reward function asks it: add the function `judge`, or remove the role"
    if judge.max_tokens >= judge.max_model_len:
        limit = f"roles.judge.max_model_len, {judge.max_model_len}"
        yield "roles.judge.max_tokens", f"leaves no room for a question: must be less than {limit}"
    for path, function in lists:
        several = function.args.get("answers", 1) != 1 and function.compares != "group"
        if path in asking and several and judge.temperature == 0:
            yield f"{path}.args.answers", "are all the same at roles.judge.temperature 0: set it above 0"
        if path in asking and function.args.get("expected") and judge.temperature not in (0, 1):
            why = f"the log-probs of roles.judge.temperature {judge.temperature:g} are not the model's"
            yield f"{path}.args.expected", f"{why}: set it to 0, or to 1 for several answers"


def component_problems(spec: RolloutSpec, path: str, name: str, sources: Sequence[MixedSource]) -> Iterator[Finding]:
    """A field with a reward component that the spec, or one of these sources, does not have."""
    of_role = [component.component for component in spec.roles.reward.components]
    of_sources = {
        f" in the rewards of {one.name}": of_role
        if one.rewards is None
        else [function.component for function in one.rewards]
        for one in sources
    }
    for where, labels in (of_sources if spec.data.mixture else {"": of_role}).items():
        if name not in labels:
            known = f"there are: {', '.join(labels)}"
            yield path, f"no reward component '{name[:60]}'{where} ({nearest(name, labels) or known})"
            return


def _reward_name(spec: RolloutSpec, section: str, path: str, name: str) -> Iterator[Finding]:
    """A reward function that does not exist, or that cannot score the prompts it is meant for."""
    if name not in REWARD_FUNCTIONS and not IMPORTED.fullmatch(name):
        known = f"shipped: {', '.join(REWARD_FUNCTIONS)}; your own: package.module:function"
        yield path, f"no reward function '{name[:60]}' ({nearest(name, REWARD_FUNCTIONS) or known})"
    for split, source in _scored_by(spec, section).items():
        if name == "reasoning_gym" and not isinstance(source, ReasoningGymSource):
            yield path, f"scores reasoning_gym tasks only, but data.{split} is {source.kind}"
        if name in NEEDS_ANSWER and not isinstance(source, ReasoningGymSource) and source.answer is None:
            yield path, f"compares with the correct answer, but data.{split}.answer is null"


def _test_cases(spec: RolloutSpec, section: str, path: str, place: Any) -> Iterator[Finding]:
    """Sources whose rows have no test cases where `python_tests` looks for them."""
    for split, source in _scored_by(spec, section).items():
        if isinstance(source, ReasoningGymSource):
            continue
        if place == "answer" and source.answer is None:
            why = f"reads test cases from the answer, but data.{split}.answer is null; set args.tests to their column"
            yield path, why
        elif place != "answer" and place not in source.metadata:
            yield f"{path}.args.tests", f"{show(place)} is not in data.{split}.metadata; add it there"


def _judged_columns(spec: RolloutSpec, section: str, path: str, args: Mapping[str, Any]) -> Iterator[Finding]:
    """Columns that a judge reads and the data has not."""
    try:
        named = dict.fromkeys(template_fields(str(args.get("template", ""))), "template")
    except ValueError:  # reported with the arguments
        return
    if isinstance(args.get("criteria"), str):
        named[args["criteria"]] = "criteria"
    baseline = str(args.get("baseline", ""))
    if baseline and not is_file(baseline):
        named[baseline] = "baseline"
    for split, source in _scored_by(spec, section).items():
        has = () if isinstance(source, ReasoningGymSource) else source.metadata
        for name, place in named.items():
            if name not in has and (name not in TEMPLATE_FIELDS or place != "template"):
                yield f"{path}.args.{place}", f"{show(name)} is not in data.{split}.metadata; add it there"


def _compared(spec: RolloutSpec, section: str, path: str, function: RewardFunctionConfig) -> Iterator[Finding]:
    """A judge that compares where there is nothing to compare, or where it says nothing."""
    compare, sources = function.compares, _scored_by(spec, section)
    for split, source in sources.items():
        no_answer = not isinstance(source, ReasoningGymSource) and source.answer is None
        if compare == "baseline" and not function.args.get("baseline") and no_answer:
            yield f"{path}.compare", f"data.{split} has no answer to compare with: set its `answer`, or args.baseline"
        if compare in _WITHIN_GROUP and split.startswith("eval"):
            why = "compares the samples of a prompt with each other, which says nothing about the model"
            yield f"{path}.compare", f"{why}: give data.{split} `rewards`, such as a judge with compare: baseline"
    if compare not in _WITHIN_GROUP:
        return
    groups = dict(zip(spec.data.train_sources(), group_settings(spec), strict=True))
    if alone := [split for split, group in groups.items() if split in sources and group.samples == 1]:
        yield f"{path}.compare", f"data.{alone[0]} has one sample for each prompt: set algorithm.group_size"
    if algorithms.advantage(spec.algorithm).baseline == "greedy":
        yield f"{path}.compare", "the greedy response of the algorithm's baseline is scored without its group"


def _scored_by(spec: RolloutSpec, section: str) -> dict[str, DataSource]:
    """The sources whose prompts a list of reward functions scores, by their path in the section `data`."""
    own = {f"train.{n}" for n, one in enumerate(spec.data.mixture) if one.rewards is not None}
    own |= {one.section for one in held_out_sets(spec) if one.own_rewards}
    sources = spec.data.prompt_sources()
    if section == "roles.reward.functions":
        return {split: source for split, source in sources.items() if split not in own}
    split = section.removeprefix("data.").removesuffix(".rewards")
    return {split: sources[split]}


def data_problems(spec: RolloutSpec) -> Iterator[Finding]:
    sources = spec.data.prompt_sources()
    for split, source in sources.items():
        if "{prompt}" not in source.template:
            yield f"data.{split}.template", "must contain {prompt}, which stands for the row's text"
        if isinstance(source, ReasoningGymSource):
            for index, recipe in enumerate(source.recipes):
                for name in ("seed", "size"):
                    if name in recipe.args:
                        yield f"data.{split}.recipes.{index}.args.{name}", f"set data.{split}.{name} instead"
            if len(source.recipes) > source.size:
                yield f"data.{split}.size", f"{source.size} prompts cannot cover {len(source.recipes)} recipes"
            continue
        if source.candidates is not None:
            yield from _candidates(spec, split)
        if source.options is not None and source.answer is None:
            yield f"data.{split}.answer", "is required: it names the right one of the options"
    if spec.data.curriculum is not None:
        yield from _curriculum(spec, spec.data.curriculum)
    prompts = {f"data.{split}": source for split, source in sources.items()}
    yield from template_problems(spec.models(), prompts, plain=spec.model.plain)
    seeds = {split: source.seed for split, source in sources.items() if isinstance(source, ReasoningGymSource)}
    for place in spec.data.held_out_sets():
        for split in spec.data.train_sources():
            if place in seeds and seeds[place] == seeds.get(split):
                why = f"must differ from data.{split}.seed, {seeds[place]}: the tasks would be the same"
                yield f"data.{place}.seed", why
    yield from _mixture(spec)


def _curriculum(spec: RolloutSpec, curriculum: CurriculumConfig) -> Iterator[Finding]:
    """A curriculum that cannot tell which samples are solved."""
    wrong = (
        []
        if curriculum.component is None
        else list(component_problems(spec, "data.curriculum.component", curriculum.component, spec.data.mixture))
    )
    yield from wrong
    unknown = [number for number, one in enumerate(group_settings(spec)) if one.solved_at is None]
    if wrong or not unknown:
        return
    what = "the reward" if curriculum.component is None else f"the component '{curriculum.component}'"
    if len(unknown) == len(group_settings(spec)):
        why = f"{what} does not say which samples are solved: set the value of a right response, such as 1.0"
        yield "data.curriculum.solved_at", why
        return
    for number in unknown:
        why = f"{what} of this source does not say which samples are solved: set the value of a right response"
        yield f"data.train.{number}.solved_at", f"{why}, for data.curriculum"


def _mixture(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings of the sources of a mixture that cannot work."""
    yield from mixture_problems(spec.data.mixture)
    least = algorithms.row_of(spec.algorithm).min_group_size
    for number, source in enumerate(spec.data.mixture):
        path = f"data.train.{number}"
        if source.group_size is not None and source.group_size < least:
            yield f"{path}.group_size", f"{spec.algorithm.name} compares samples of a group: needs at least {least}"
        if source.max_tokens is not None and source.max_tokens > spec.sampling.max_tokens:
            limit = f"sampling.max_tokens, {spec.sampling.max_tokens}"
            yield f"{path}.max_tokens", f"must be at most {limit}, the longest response of the run; raise that"
        if source.algorithm is not None:
            yield from _source_algorithm(spec, f"{path}.algorithm", source.algorithm)


def _source_algorithm(spec: RolloutSpec, path: str, own: SourceAlgorithm) -> Iterator[Finding]:
    """Settings of a source's algorithm that nothing reads, or that the run excludes."""
    run = algorithms.row_of(spec.algorithm)
    row = run if own.loss is None else algorithms.ALGORITHMS[own.loss]
    given = {name for name, value in own if value is not None}
    for name in sorted(given & unread_options(row)):
        yield f"{path}.{name}", f"{row.name} does not use it; remove it"
    if not given:
        yield path, "replaces nothing; remove it, or set a field"
    if own.advantage is not None:
        yield from _source_advantage(spec, f"{path}.advantage", own.advantage)
    if own.loss is not None:
        yield from _source_loss(spec, f"{path}.loss", own)
    of_kl = sorted(given & {"kl_coef", "kl_estimator"})
    if of_kl and (run.kl_in != "loss" or not run.loss.has_ratio):
        why = f"{run.name} has no KL term in a loss with a ratio; set algorithm.kl.coef for all sources"
        yield f"{path}.{of_kl[0]}", why
    elif own.kl_coef and spec.roles.reference is None:
        yield f"{path}.kl_coef", "needs a role `reference`; add it, or set 0"
    elif own.kl_estimator is not None and not algorithms.source_loss(spec.algorithm, own).kl_coef:
        yield f"{path}.kl_estimator", "the source has no KL term; set kl_coef above 0, or remove this"


def _source_loss(spec: RolloutSpec, path: str, own: SourceAlgorithm) -> Iterator[Finding]:
    """A loss of another algorithm that is not a source's, or not another one."""
    run, row = algorithms.row_of(spec.algorithm), algorithms.ALGORITHMS[own.loss or spec.algorithm.name]
    if why := algorithms.run_loss(row):
        others = ", ".join(algorithms.named_losses())
        yield path, f"{row.name} {why}: no source has its loss alone; use one of {others}"
    advantage = run.advantage if own.advantage is None else algorithms.ALGORITHMS[own.advantage].advantage
    if advantage.estimator == "none":
        yield path, "has no effect: the source has no advantages; name an algorithm with rewards in advantage"
    elif run.advantage.estimator != "none" and (why := algorithms.run_loss(run)):
        yield path, f"the run's {run.name} {why}: all sources have its loss; remove it, or change algorithm.name"
    elif algorithms.source_loss(spec.algorithm, own) == algorithms.policy_loss(spec.algorithm):
        yield path, "has no effect: it is the run's loss; remove it"


def _source_advantage(spec: RolloutSpec, path: str, name: str) -> Iterator[Finding]:
    """Advantages of a source that need more than its rewards, or that the run's own algorithm excludes."""
    other, run = algorithms.ALGORITHMS[name], algorithms.advantage(spec.algorithm)
    advantage = other.advantage
    if not algorithms.from_rewards(advantage.model_copy(update={"kl_coef": 0.0})):
        why = f"computes advantages from more than rewards: only the algorithm of the run may be {name}"
        yield path, f"{name} {why}; use one of {', '.join(algorithms.named_advantages())}"
    if advantage.estimator == "none" and not algorithms.policy_loss(spec.algorithm).distill.coef:
        yield path, f"{name} has no advantages, and no teacher is compared: set algorithm.distill.coef, or remove it"
    if not algorithms.from_rewards(run):
        why = "a KL term" if run.kl_coef else "more than rewards"
        yield path, f"the run's {spec.algorithm.name} computes advantages with {why}: all sources have its advantages"
    least = max(other.min_group_size, advantage.pass_k + 1 if advantage.estimator == "best_of_subsets" else 1)
    if min(spec.group_sizes) < least:
        yield path, f"{name} compares samples of a group: needs groups of at least {least}"
    lists = [one for functions in reward_functions(spec).values() for one in functions]
    by_steps = any(one.process for one in lists) or any(one.level == "step" for one in scored_models(spec).values())
    if by_steps and advantage.estimator not in STEP_ESTIMATORS:
        yield path, f"{name} takes one reward for a response, and a reward function rewards steps"
    if any(one.normalize for one in lists) and (why := NOT_NORMALIZED.get(advantage.estimator)) is not None:
        yield path, f"{name} {why}: remove normalize from the rewards"


def _candidates(spec: RolloutSpec, split: str) -> Iterator[Finding]:
    row = algorithms.row_of(spec.algorithm)
    others = [a.name for a in algorithms.ALGORITHMS.values() if a.advantage.estimator == "best_of_group"]
    if split not in spec.data.train_sources():
        yield f"data.{split}.candidates", "has no effect: the evaluation scores the policy's samples only; remove it"
    elif row.name not in others:
        why = f"{row.name} trains on the policy's samples only; remove it or use one of {', '.join(others)}"
        yield f"data.{split}.candidates", why


def text_problems(spec: RolloutSpec) -> Iterator[Finding]:
    coef, sources = spec.algorithm.ptx_coef, spec.data.text_sources()
    if not sources:
        if coef > 0:
            yield "data.ptx", f"is required: algorithm.ptx_coef is {coef:g}"
        return
    if coef == 0:
        yield "data.ptx", "has no effect without algorithm.ptx_coef above 0"
    if isinstance(spec.data.ptx, tuple):
        yield from name_problems("data.ptx", spec.data.ptx)
    pieces = sum(source.texts_per_step for source in sources.values())
    if pieces < spec.schedule.minibatches:
        why = f"{pieces} texts are too few for {spec.schedule.minibatches} minibatches"
        yield f"data.{next(iter(sources))}.texts_per_step", why
    budget = spec.roles.policy.micro_batch_tokens
    for section, texts in sources.items():
        if budget < texts.max_tokens:
            why = f"{texts.max_tokens} is more than roles.policy.micro_batch_tokens, {budget}"
            yield f"data.{section}.max_tokens", why


def held_out_problems(spec: RolloutSpec) -> Iterator[Finding]:
    yield from best_problems(spec)
    evaluation = spec.evaluation
    if evaluation is None:
        return
    yield from evaluation_problems(evaluation, spec.data.eval is not None)
    yield from _beside(spec, evaluation)
    yield from _eval_sampling(spec, "evaluation.sampling", evaluation.sampling)
    sources = spec.data.held_out_sets()
    for held_out in held_out_sets(spec):
        source, path = sources[held_out.section], "evaluation.sampling"
        if isinstance(source, HeldOut) and source.sampling is not None:
            path = f"data.{held_out.section}.sampling"
            yield from _eval_sampling(spec, path, source.sampling)
        longest = held_out.sampling.max_tokens
        if held_out.environment is not None and longest is not None and longest > spec.sampling.max_tokens:
            limit = f"sampling.max_tokens, {spec.sampling.max_tokens}"
            yield f"{path}.max_tokens", f"turns of episodes have at most {limit}"


def _beside(spec: RolloutSpec, evaluation: EvaluationConfig) -> Iterator[Finding]:
    """Evaluations during training that no engine could make."""
    if not evaluation.beside:
        return
    path, engines = "evaluation.beside", spec.roles.rollout.workers
    if engines < 2:
        yield path, f"needs two engines or more: one evaluates while others sample (roles.rollout.workers: {engines})"
    if spec.roles.rollout.resolved_sleep != "none":
        yield path, "engines release their memory while the policy trains (roles.rollout.sleep): none can evaluate then"
    if not (evaluation.every_steps or evaluation.at_start):
        yield path, "has no effect: the only evaluation is that after the last step; set every_steps, or remove it"


def _eval_sampling(spec: RolloutSpec, path: str, sampling: EvalSampling) -> Iterator[Finding]:
    if sampling.temperature == 0:
        if sampling.samples > 1:
            yield f"{path}.samples", "greedy samples are all the same; set a temperature above 0"
        for name in ("top_p", "top_k", "min_p"):
            if changed(sampling, name):
                yield f"{path}.{name}", "has no effect on greedy decoding; set a temperature above 0"
    longest = sampling.max_tokens
    if longest is not None and longest >= spec.roles.rollout.max_model_len:
        room = f"roles.rollout.max_model_len, {spec.roles.rollout.max_model_len}"
        yield f"{path}.max_tokens", f"{longest} leaves no room for a prompt in {room}"
