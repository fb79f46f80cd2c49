"""Cross-checks that both kinds of spec share, and cross-checks of environments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import Finding, nearest
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.models import reads_tokens
from troupe.orchestrator.spec.derived.sampling import (
    NO_ENVIRONMENT,
    evaluation_metrics,
    group_settings,
    held_out_sets,
    reward_functions,
    scored_models,
)
from troupe.orchestrator.spec.locations import checkpoint_problems, is_url
from troupe.orchestrator.spec.roles import (
    EnvironmentRole,
    ReferenceRole,
    TrainerRole,
    environment_role,
)
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import BaseEvaluation
from troupe.orchestrator.spec.sources import HeldOut, Mixed, PromptText, ReasoningGymSource, SourceName, SourceShare
from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.config_base import Frozen, ModelConfig
from troupe.workers.contract.environments import ENVIRONMENTS, HARBOR_TURNS
from troupe.workers.contract.rewards import ENVIRONMENT_REWARD

IMPORTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Custom code: `package.module:attribute`."""

NEEDS_DISK = "is not a folder: a run writes to a disk of the driver (on a cluster a shared one)"

INSIDE_ANOTHER = (
    *("workers", "min_workers", "max_workers", "cpus", "gpus", "accelerator", "node_labels", "strategy"),
    *("micro_batch_tokens", "shards", "threads"),
)
"""Fields that have no effect in a role inside another role's workers."""


def changed(section: Frozen, field: str) -> bool:
    """Whether a field differs from its default. (Set or not is no criterion: a resolved spec sets every field.)"""
    return dict(section)[field] != type(section).model_fields[field].get_default(call_default_factory=True)


_BESIDE_DIVIDED_EXPERTS: Mapping[str, tuple[object, str]] = {
    "zero_stage": (3, "must be 3"),
    "lora": (None, "must be null: checkpoints of divided experts hold trained weights only"),
    "kernels": ("torch", "must be torch: other kernels replace the same layers"),
}
"""The value that a trainer's field must have with `expert_parallel_size` above 1, and why."""


def trainer_problems(spec: RunSpec) -> Iterator[Finding]:
    """Settings of training roles that cannot work, whatever they train on."""
    for name, role in spec.roles.trainers().items():
        if role.offload_optimizer and role.gpus == 0:
            yield f"roles.{name}.offload_optimizer", "has no effect on the CPU; remove it"
        elif role.offload_optimizer and role.zero_stage == 0:
            yield f"roles.{name}.offload_optimizer", "needs zero_stage 1, 2 or 3: without ZeRO nothing is offloaded"
        if role.kernels == "liger" and role.gpus == 0:
            yield f"roles.{name}.kernels", "liger needs GPUs; use torch on the CPU"
        elif role.kernels == "liger" and spec.deterministic:
            why = "liger adds in an order that torch does not know: use torch, or remove deterministic"
            yield f"roles.{name}.kernels", why
        for key in ("recompute_every", "recompute_products"):
            if changed(role, key) and not role.gradient_checkpointing:
                yield f"roles.{name}.{key}", "has no effect without gradient_checkpointing"
        if role.schedule == "constant" and changed(role, "min_lr_ratio"):
            why = "has no effect on a constant learning rate: set schedule to linear or cosine, or this to 0"
            yield f"roles.{name}.min_lr_ratio", why
        size = role.sequence_parallel_size
        if role.workers % size:
            yield f"roles.{name}.sequence_parallel_size", f"{size} does not divide the role's {role.workers} workers"
        elif size > 1 and not role.packing:
            yield f"roles.{name}.packing", f"must be true with sequence_parallel_size {size}: it divides packed rows"
        size = role.expert_parallel_size
        if role.workers % size:
            yield f"roles.{name}.expert_parallel_size", f"{size} does not divide the role's {role.workers} workers"
        given = dict(role) if size > 1 else {}
        for field in given.keys() & _BESIDE_DIVIDED_EXPERTS:
            needed, why = _BESIDE_DIVIDED_EXPERTS[field]
            if given[field] != needed:
                yield f"roles.{name}.{field}", f"{why} (expert_parallel_size is {size})"
        for index, beta in enumerate(role.adam_betas):
            if not 0.0 <= beta < 1.0:
                yield f"roles.{name}.adam_betas.{index}", f"must be at least 0 and less than 1, got {beta}"


def shard_problems(spec: RunSpec) -> Iterator[Finding]:
    """References and teachers that are divided over other devices than they have."""
    for name, role in spec.roles.present().items():
        if not isinstance(role, ReferenceRole) or role.colocate_with is not None:
            continue
        shards = role.shards
        if role.gpus == 0 and shards > 1 and role.cpus < shards:
            yield f"roles.{name}.cpus", f"shards {shards} on the CPU needs at least {shards} cores"
        if role.gpus > 0 and shards > 1 and role.gpus != shards:
            yield f"roles.{name}.gpus", f"must equal shards, {shards}, got {role.gpus:g}"
        if role.gpus > 1 and shards == 1:
            yield (f"roles.{name}.gpus", f"a {name} worker with shards 1 uses one GPU; raise workers or shards")


def shares_of(name: str, role: TrainerRole) -> str:
    """What the rows of a batch are divided among, as text: `4 policy workers`."""
    groups = "" if role.sequence_parallel_size == 1 else f"groups of {role.sequence_parallel_size} "
    return f"{role.data_parallel_size} {groups}{name} workers"


def evaluation_problems(evaluation: BaseEvaluation, has_data: bool) -> Iterator[Finding]:
    """An evaluation without data, or one that never runs."""
    if not has_data:
        yield "evaluation", "needs data.eval"
    if not (evaluation.every_steps or evaluation.at_start or evaluation.at_end):
        yield "evaluation", "never runs: set every_steps, at_start or at_end, or remove the section"


def name_problems(path: str, sources: Sequence[SourceName]) -> Iterator[Finding]:
    """Names that several sources of the list at this path have."""
    names = [source.name for source in sources]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield f"{path}.{number}.name", f"two sources have the name '{name}'"


def mixture_problems(sources: Sequence[SourceShare]) -> Iterator[Finding]:
    """Shares of the sources of `data.train` that cannot work together."""
    yield from name_problems("data.train", sources)
    if sources and all(source.repeats for source in sources):
        yield "data.train.0.repeats", "a run would end when all passes are over: give one source no limit (0)"


_LOW_IS_GOOD = ("loss", "nll", "failed_samples", "refused", "truncated", "calibration_error")
"""Last words of metrics whose highest value no run wants."""


def best_problems(spec: RunSpec) -> Iterator[Finding]:
    """A best checkpoint by a metric that no evaluation reports, and patience without one."""
    best = spec.checkpoint.best
    if best is None:
        if spec.checkpoint.patience is not None:
            yield "checkpoint.patience", "needs checkpoint.best: the metric that is to become better"
        return
    if spec.evaluation is None or not spec.evaluation.every_steps:
        yield "checkpoint.best", "needs evaluations during the run: set evaluation.every_steps above 0"
        return
    known = evaluation_metrics(spec)
    if known and best.metric not in known:
        hint = nearest(best.metric, known) or f"there are: {', '.join(known)}"
        yield "checkpoint.best.metric", f"no evaluation reports '{best.metric[:60]}' ({hint})"
    elif best.mode == "max" and best.metric.rpartition("/")[2].endswith(_LOW_IS_GOOD):
        yield "checkpoint.best.mode", f"the highest {best.metric} would be the worst; set it to min"


def output_problems(spec: RunSpec) -> Iterator[Finding]:
    """A run folder named after the scheme of a URL, and an invalid store of checkpoints."""
    if is_url(spec.output.folder):
        yield "output.folder", NEEDS_DISK
    yield from checkpoint_problems(spec.checkpoint.path)


def template_problems(
    models: Mapping[str, ModelConfig], prompts: Mapping[str, PromptText], *, plain: bool
) -> Iterator[Finding]:
    """Chat templates of models that read tokens, and system messages without a chat template."""
    for section in filter(reads_tokens, models):
        if models[section].chat_template is not None:
            yield f"{section}.chat_template", "has no effect: this model reads the policy's tokens; remove it"
    for section, source in prompts.items():
        if plain and source.system:
            yield f"{section}.system", "model.chat_template none has no system message; put the words in template"


def environment_problems(spec: RolloutSpec) -> Iterator[Finding]:
    """Combinations of fields that cannot work, each with the path of the field to change."""
    yield from _environment_rewards(spec)
    for name, role in spec.roles.environments().items():
        yield from _environment(spec, f"roles.{environment_role(name)}", role)
    misnamed = list(_misnamed(spec))  # then the environment that was meant seems unused
    yield from misnamed or (problem for name in spec.roles.environments() for problem in _unused(spec, name))
    single = without_episodes(spec)
    for split, source in spec.data.prompt_sources().items():
        if split not in single and not isinstance(source, ReasoningGymSource) and source.candidates is not None:
            why = "answers from other sources are no episodes: remove it, or the environment"
            yield f"data.{split}.candidates", why


def _environment(spec: RolloutSpec, path: str, role: EnvironmentRole) -> Iterator[Finding]:
    if role.name not in ENVIRONMENTS and not IMPORTED.fullmatch(role.name):
        known = f"shipped: {', '.join(ENVIRONMENTS)}; your own: package.module:Class"
        yield f"{path}.name", f"no environment '{role.name[:60]}' ({nearest(role.name, ENVIRONMENTS) or known})"
    built_in = ENVIRONMENTS.get(role.name)
    if built_in is not None and built_in.offers_tools and role.tool_parser is None:
        yield f"{path}.tool_parser", "is required: it finds the tool calls in a turn (for SmolLM2 and Qwen: hermes)"
    turns = role.args.get("turns", HARBOR_TURNS) if role.name == "harbor" else 0
    if isinstance(turns, int) and turns > role.max_turns:
        yield f"{path}.max_turns", f"must be at least {turns} (args.turns), after which the tests of a task run"
    background = role.args.get("background") if role.name == "tools" else None
    for tool, seconds in background.items() if isinstance(background, dict) else ():
        if isinstance(seconds, int | float) and seconds >= role.turn_timeout_s:
            yield f"{path}.turn_timeout_s", f"must be more than the {seconds:g} s of args.background.{tool}: turns wait"
    for field in ("gpus", "accelerator", "colocate_with"):
        if dict(role)[field]:
            yield f"{path}.{field}", "environments run on separate CPU cores; remove it"
    if built_in is not None and built_in.runs_agent and role.compaction is not None:
        yield f"{path}.compaction", f"has no effect: what {role.name} runs keeps its conversation itself; remove it"
    if role.turn_timeout_s > role.episode_timeout_s:
        limit = f"{role.episode_timeout_s:g}"
        yield f"{path}.turn_timeout_s", f"must be at most {path}.episode_timeout_s, {limit}"
    if role.max_seconds is not None and role.max_seconds >= role.episode_timeout_s:
        limit = f"{role.episode_timeout_s:g}"
        yield f"{path}.max_seconds", f"must be less than {path}.episode_timeout_s, {limit}, which fails the sample"
    if role.episode_timeout_s >= spec.schedule.generate_timeout_s:
        limit = f"{spec.schedule.generate_timeout_s:g}"
        yield f"{path}.episode_timeout_s", f"must be less than schedule.generate_timeout_s, {limit}"


def _misnamed(spec: RolloutSpec) -> Iterator[Finding]:
    """Names of environments that would be read as something else, and sources that name a missing one."""
    names = list(spec.roles.environments())
    for name in names:
        if name == NO_ENVIRONMENT or name in EnvironmentRole.model_fields:
            means = "no environment" if name == NO_ENVIRONMENT else "a field of an environment"
            yield f"roles.environment.{name}", f"stands for {means}; use another name"
    sources: dict[str, Mixed | HeldOut] = {f"train.{n}": one for n, one in enumerate(spec.data.mixture)}
    sources |= {path: one for path, one in spec.data.held_out_sets().items() if isinstance(one, HeldOut)}
    for path, source in sources.items():
        name = source.environment
        if name is None or (names and name == NO_ENVIRONMENT) or (name and name in names):
            continue
        if not names:
            why = "has no effect: there is no role environment; remove it"
        elif names == [""]:
            why = f"no environment '{name[:60]}': roles.environment has no names (none: single responses); remove it"
        else:
            hint = nearest(name, names) or f"there are: {', '.join(names)}, and none"
            why = f"no environment '{name[:60]}' ({hint})"
        yield f"data.{path}.environment", why


def _unused(spec: RolloutSpec, name: str) -> Iterator[Finding]:
    """An environment that no samples are episodes in."""
    trained = {settings.environment for settings in group_settings(spec)}
    if name:
        if name not in trained | {one.environment for one in held_out_sets(spec)}:
            where = f"name it in a source of data.train or a set of data.eval (environment: {name})"
            if not spec.data.mixture:
                where = f"write data.train as a list of sources, which name theirs (environment: {name})"
            yield f"roles.environment.{name}", f"no samples are episodes in it: {where}, or remove it"
    elif name not in trained:
        yield "roles.environment", "no source of data.train plays in it (environment: none); remove the role"


def _environments(spec: RolloutSpec) -> dict[str, str | None]:
    """The environment of samples by the path of their source in the section `data`, or None if they are no episodes."""
    settings = group_settings(spec)
    paths = [f"train.{number}" for number in range(len(settings))] if spec.data.mixture else ["train"]
    trained = dict(zip(paths, (own.environment for own in settings), strict=True))
    return trained | {one.section: one.environment for one in held_out_sets(spec)}


def without_episodes(spec: RolloutSpec) -> frozenset[str]:
    """Sources of prompts whose samples are single responses, by their path in the section `data`."""
    return frozenset(path for path, environment in _environments(spec).items() if environment is None)


def _scored(spec: RolloutSpec, section: str) -> dict[str, str | None]:
    """The environment of each source that a list of reward functions scores, by its path."""
    own = {f"train.{n}" for n, one in enumerate(spec.data.mixture) if one.rewards is not None}
    own |= {one.section for one in held_out_sets(spec) if one.own_rewards}
    only = section.removeprefix("data.").removesuffix(".rewards")
    shared = section == "roles.reward.functions"
    return {path: one for path, one in _environments(spec).items() if (path not in own if shared else path == only)}


def _environment_rewards(spec: RolloutSpec) -> Iterator[Finding]:
    estimator = algorithms.row_of(spec.algorithm).advantage.estimator
    advantage = algorithms.advantage(spec.algorithm)
    lists = ((section, index, one) for section, own in reward_functions(spec).items() for index, one in enumerate(own))
    for section, index, function in lists:
        path, scored = f"{section}.{index}", _scored(spec, section)
        single = sorted(source for source, environment in scored.items() if environment is None)
        given = function.name == ENVIRONMENT_REWARD
        if given and not spec.roles.environments():
            yield f"{path}.name", "there is no roles.environment that could give rewards"
        elif given and single:
            yield f"{path}.name", f"scores episodes only, but the samples of data.{single[0]} are single responses"
        if function.process and not given and len(single) < len(scored):
            yield f"{path}.process", "the steps of an episode are its turns: only `environment` rewards them"
    models = scored_models(spec)
    of_model = any(model.level == "step" for model in models.values())
    for path, model in models.items():
        alone = path == "roles.reward.model"
        section = "roles.reward.functions" if alone else path.rpartition(".")[0]
        played = [place for place, environment in _scored(spec, section).items() if environment is not None]
        if played and model.level != "response":
            field = f"{path}.level" if alone else f"{path}.args.model"
            yield field, f"the samples of data.{played[0]} are episodes: only level response scores them"
    if estimator != "group" and (of_model or any(f.process for own in reward_functions(spec).values() for f in own)):
        if advantage.reward_scale != "none":
            yield "algorithm.reward_scale", "scales rewards of responses, not of steps; set none"
        if advantage.reward_clip is not None:
            yield "algorithm.reward_clip", "clips rewards of responses, not of steps; set 0, off"


def in_process_problems(spec: RunSpec, distill: DistillConfig) -> Iterator[Finding]:
    """Roles with which the policy's workers cannot compute the logits of the reference as teacher, if they must."""
    if not distill.in_process:
        return
    why = f"algorithm.distill.support {distill.support} needs the teacher's logits in the policy's workers"
    if not spec.reference_in_policy:
        yield "roles.reference.colocate_with", f"{why}; set it to policy, or support to teacher_top_k"
    elif spec.roles.policy.zero_stage == 3:
        yield "roles.policy.zero_stage", f"{why}, where it cannot be divided; set it below 3"
    elif spec.roles.policy.lora is not None and spec.reference_model == spec.model:
        yield "roles.reference.model", f"{why}, where it is the policy without its adapters; give it another model"


def unread_distill(given: Frozen | None, distill: DistillConfig) -> Iterator[Finding]:
    """Fields of the section `algorithm.distill` that others of it turn off."""
    read = {"coef"}
    if distill.coef:
        of_kind = {"jensen_shannon": {"beta"}, "skewed": {"alpha"}}.get(distill.divergence, set[str]())
        read |= {"divergence", "support", *of_kind, *({"k"} if distill.support != "full" else ())}
    for name in sorted({name for name, value in given or () if value is not None} - read):
        yield f"algorithm.distill.{name}", "has no effect with the other fields of algorithm.distill; remove it"
