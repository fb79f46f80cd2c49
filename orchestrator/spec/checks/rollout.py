"""Combinations of fields of a rollout spec that cannot work, each refused with the path of the field to change."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.algorithms import custom
from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.errors import Finding, nearest
from troupe.orchestrator.spec.checks.data import component_problems
from troupe.orchestrator.spec.checks.shared import (
    INSIDE_ANOTHER,
    changed,
    in_process_problems,
    shard_problems,
    shares_of,
    trainer_problems,
    unread_distill,
)
from troupe.orchestrator.spec.derived.sampling import group_settings, reward_functions
from troupe.orchestrator.spec.derived.training import resolved_backend, source_losses
from troupe.orchestrator.spec.engine_options import refused_options
from troupe.orchestrator.spec.errors import show
from troupe.orchestrator.spec.locations import url_problem
from troupe.orchestrator.spec.roles import (
    EngineRole,
    EnvironmentRole,
    GuestEngineRole,
    ReferenceRole,
    SequenceTeacherRole,
    Teacher,
    TeacherEndpointRole,
    TeacherRole,
)
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import Mixed, MixedSource, ReasoningGymSource
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.environments import ENVIRONMENTS
from troupe.workers.contract.rewards import ENVIRONMENT_REWARD, JUDGE_REWARD, REWARD_FUNCTIONS
from troupe.workers.contract.templates import DEMONSTRATION, FEEDBACK, TEACHER_FIELDS, template_fields
from troupe.workers.contract.weight_backends import BACKENDS, backend_problem

_ELSEWHERE = "remove it, or name sources without this environment"
COLOCATIONS: dict[str, str] = dict.fromkeys(("reference", "rollout", "reference_engine", "teacher"), "policy")
"""Which role can be colocated with which."""


def check_roles(spec: RolloutSpec) -> Iterator[Finding]:
    row = algorithms.row_of(spec.algorithm)
    present = spec.roles.present()
    for role in ("critic", "reference"):
        taught = row.advantage.estimator in ("distill", "none") and spec.roles.teacher
        if role in row.required and role not in present and not (role == "reference" and taught):
            yield f"roles.{role}", f"is required: {row.name} has a {role}"
        if role in row.forbidden and role in present:
            others = sorted(a.name for a in algorithms.ALGORITHMS.values() if role not in a.forbidden)
            yield f"roles.{role}", f"{row.name} has no {role}; remove the role or use one of {', '.join(others)}"
    if spec.kl_coef > 0 and spec.roles.reference is None:
        given = "" if spec.algorithm.kl.coef is not None else f", the default of {row.name}"
        why = f"is required: algorithm.kl.coef is {spec.kl_coef}{given} (0 needs no reference)"
        yield "roles.reference", why
    taught = algorithms.policy_loss(spec.algorithm).distill
    if spec.output.teacher_tokens and not (taught.stored_k and spec.output.trajectories):
        why = "needs output.trajectories" if taught.stored_k else "is for algorithm.distill with support teacher_top_k"
        yield "output.teacher_tokens", f"{why}; set that, or remove it"
    if spec.roles.teacher:
        yield from _teachers(spec)
    elif taught.coef > 0:
        yield from _teacher(spec)


def _teachers(spec: RolloutSpec) -> Iterator[Finding]:
    """Teachers that nothing learns from, and sources without a teacher or teachers without a source."""
    distill = algorithms.policy_loss(spec.algorithm).distill
    if not distill.coef and algorithms.advantage(spec.algorithm).estimator != "distill":
        yield "roles.teacher", "has no effect: algorithm.distill.coef is 0; set it, or remove the role"
    teachers = spec.roles.teachers().items()
    apart = [f"roles.{name}" for name, teacher in teachers if not _teaches_whole(teacher)] if distill.in_process else []
    if apart:
        why = f"{distill.support} needs the logits of {', '.join(apart)} in the policy's updates"
        how = "set colocate_with to policy, and a model without adapter or average: true, without prompt"
        yield "algorithm.distill.support", f"{why}: {how}; or set this to teacher_top_k"
    mixture = spec.data.mixture
    sources = [source.name for source in mixture]
    for name, teacher in spec.roles.teachers().items():
        for number, source in enumerate(teacher.sources or ()):
            if source not in sources:
                hint = nearest(source, sources) or f"sources: {', '.join(sources) or 'data.train has no names'}"
                yield f"roles.{name}.sources.{number}", f"no source '{source[:60]}' in data.train ({hint})"
        yield from _teacher_prompt(spec, f"roles.{name}.prompt", teacher)
        if isinstance(teacher, SequenceTeacherRole):
            yield from _sequence_teacher(spec, f"roles.{name}", teacher)
        elif name in spec.in_policy:
            yield from _in_policy(spec, f"roles.{name}", teacher)
        elif teacher.average:
            yield f"roles.{name}.average", "is the policy's average: set colocate_with to policy, or remove it"
    for number, source in enumerate(mixture):
        if not spec.roles.teachers(source.name) and not _rewarded(spec, source):
            why = "has no teacher, and learns from nothing else: name it in a teacher's sources, or set an"
            yield f"data.train.{number}.name", f"{source.name} {why} algorithm.advantage that compares rewards"


def _rewarded(spec: RolloutSpec, source: MixedSource) -> bool:
    """Whether the samples of a source have advantages of their rewards."""
    named = algorithms.ALGORITHMS.get((source.algorithm and source.algorithm.advantage) or "")
    advantage = algorithms.advantage(spec.algorithm) if named is None else named.advantage
    return advantage.estimator not in ("distill", "none")


def _teaches_whole(teacher: Teacher) -> bool:
    """Whether a teacher is a frozen model or an average in the policy's workers, behind the policy's prompts."""
    if not isinstance(teacher, TeacherRole) or teacher.colocate_with is None or teacher.prompt is not None:
        return False
    return teacher.average if teacher.model is None else teacher.model.adapter is None


def _sequence_teacher(spec: RolloutSpec, path: str, teacher: SequenceTeacherRole) -> Iterator[Finding]:
    """Settings with which an engine or an endpoint cannot score the policy's samples."""
    what = f"an {teacher.kind}"
    if spec.sampling.temperature != 1.0:
        why = f"returns log-probs at temperature 1, and sampling.temperature is {spec.sampling.temperature:g}"
        yield f"{path}.kind", f"{what} {why}: set that to 1, or this to forward"
    if spec.sampling.truncates:
        why = "returns log-probs over the whole vocabulary, and the policy's are among the tokens that were left by"
        yield f"{path}.kind", f"{what} {why} sampling.top_p, top_k or min_p: remove these, or set this to forward"
    if isinstance(teacher, TeacherEndpointRole):
        if teacher.colocate_with is not None:
            yield f"{path}.colocate_with", "an endpoint as teacher has separate workers: remove it, or set another kind"
        if teacher.gpus:
            yield f"{path}.gpus", "has no effect: the workers of an endpoint load no model; remove it"
        if teacher.timeout_s >= spec.schedule.score_timeout_s:
            limit = f"schedule.score_timeout_s ({spec.schedule.score_timeout_s:g}), after which its worker is replaced"
            yield f"{path}.timeout_s", f"must be less than {limit}"
        return
    longest = spec.roles.rollout.max_model_len
    if teacher.max_model_len <= longest:
        why = f"for sequences of roles.rollout.max_model_len ({longest}) and a token that vLLM samples behind them"
        yield f"{path}.max_model_len", f"must be at least {longest + 1}: {why}"


def _in_policy(spec: RolloutSpec, path: str, teacher: TeacherRole) -> Iterator[Finding]:
    """Settings with which a teacher cannot score in the policy's workers, or has nothing to teach."""
    policy = spec.roles.policy
    shares = teacher.model is None or teacher.model.adapter is not None
    if teacher.model is not None and shares:
        yield from _adapter_as_teacher(spec, f"{path}.model", teacher.model)
    if teacher.average and teacher.model is not None:
        yield f"{path}.average", "is the average of the policy's weights, and model has others: remove one of them"
    elif teacher.average and not policy.ema_decay:
        yield f"{path}.average", "there is no moving average: set roles.policy.ema_decay above 0"
    if not teacher.average and teacher.prompt is None and teacher.model is None:
        how = "give it a prompt or a model, or set average to true"
        yield path, f"is the policy itself, from which it does not differ: {how}"
    if policy.zero_stage == 3 and (teacher.average or teacher.prompt is not None or not shares):
        why = f"{path} scores in the policy's workers, where it cannot be divided"
        yield "roles.policy.zero_stage", f"{why}; set it below 3"


def _adapter_as_teacher(spec: RolloutSpec, path: str, model: ModelConfig) -> Iterator[Finding]:
    """Settings with which a teacher's adapter does not fit the policy's model."""
    if spec.roles.policy.lora is None:
        yield f"{path}.adapter", "needs roles.policy.lora: without, the weights that it is added to train"
    for name, value in model:
        if name != "adapter" and value != (own := dict(spec.model)[name]):
            yield (
                f"{path}.{name}",
                f"must be {show(own)}, as in model, which the teacher shares; or remove colocate_with",
            )


def _teacher_prompt(spec: RolloutSpec, path: str, teacher: Teacher) -> Iterator[Finding]:
    """Episodes whose prompts no template writes, and what a teacher reads and its sources do not have."""
    names = set(template_fields(teacher.prompt or ""))
    if "demonstration_reward" in teacher.model_fields_set and DEMONSTRATION not in names:
        field = f"{path.removesuffix('prompt')}demonstration_reward"
        yield field, f"has no effect: {show(DEMONSTRATION)} is not in its prompt; remove it"
    if teacher.prompt is None:
        return
    told = [name for name in (FEEDBACK, DEMONSTRATION) if name in names]
    inside = not isinstance(teacher, SequenceTeacherRole) and teacher.colocate_with == "policy"
    for name in () if inside else told:
        why = "needs kind forward and colocate_with: policy: other teachers score while rewards are computed"
        yield path, f"{show(name)} {why}"
    for (section, source), group in zip(spec.data.train_sources().items(), group_settings(spec), strict=True):
        if isinstance(source, Mixed) and teacher.sources is not None and source.name not in teacher.sources:
            continue
        generated = isinstance(source, ReasoningGymSource)
        columns = () if generated else source.metadata
        environment = None if group.environment is None else spec.roles.environments()[group.environment]
        built_in = None if environment is None else ENVIRONMENTS.get(environment.name)
        if built_in is not None and built_in.offers_tools:
            yield path, f"replaces a message of the prompt, which has the environment's tools besides; {_ELSEWHERE}"
        if environment is not None and environment.compaction is not None:
            yield path, f"replaces a message of the prompt, which the environment's compaction rewrites; {_ELSEWHERE}"
        if DEMONSTRATION in names and environment is not None:
            yield path, f"{show(DEMONSTRATION)} is a single response, and data.{section} is played in an environment"
        if DEMONSTRATION in names and group.samples < 2:
            yield path, f"{show(DEMONSTRATION)} is another response to the prompt: data.{section} has one"
        if FEEDBACK in names and not _gives_feedback(spec, source, environment):
            why = "but nothing that rewards its samples returns a text (a judge without compare does)"
            yield path, f"reads the feedback of data.{section}, {why}; name a function of your own"
        for name in [name for name in told if name in columns]:
            yield path, f"{show(name)} comes with the rewards: rename the column in data.{section}.metadata"
        if "answer" in names and not generated and source.answer is None:
            yield path, f"reads the answer, but data.{section}.answer is null; set it to its column"
        for name in sorted(names - {*TEACHER_FIELDS, *columns}):
            yield path, f"{show(name)} is not in data.{section}.metadata; add it there"


def _gives_feedback(spec: RolloutSpec, source: object, environment: EnvironmentRole | None) -> bool:
    """Whether a reward function of a source, played in an environment or not, may return feedback."""
    own = source.rewards if isinstance(source, Mixed) else None
    functions = spec.roles.reward.functions if own is None else own
    by_name = {JUDGE_REWARD: lambda args: not args.get("compare"), ENVIRONMENT_REWARD: lambda _: _says_why(environment)}
    return any(
        by_name[function.name](function.args) if function.name in by_name else function.name not in REWARD_FUNCTIONS
        for function in functions
    )


def _says_why(environment: EnvironmentRole | None) -> bool:
    """Whether an environment may give a text with its reward: alone, or by a function of the user."""
    if environment is None:
        return False
    built_in, function = ENVIRONMENTS.get(environment.name), environment.args.get("function")
    return built_in is None or built_in.gives_feedback or function not in (None, *REWARD_FUNCTIONS)


def _teacher(spec: RolloutSpec) -> Iterator[Finding]:
    """What a divergence from the reference as teacher needs of the roles."""
    distill, reference = algorithms.policy_loss(spec.algorithm).distill, spec.roles.reference
    if reference is None and "reference" not in algorithms.row_of(spec.algorithm).required:
        yield "roles.reference", f"is required: algorithm.distill.coef is {distill.coef:g}"
    if reference is not None:
        yield from in_process_problems(spec, distill)


def check_algorithm(spec: RolloutSpec) -> Iterator[Finding]:
    config = spec.algorithm
    row = algorithms.row_of(config)
    if spec.group_size < row.min_group_size:
        yield "algorithm.group_size", f"{row.name} compares samples of a group: needs at least {row.min_group_size}"
    for name in algorithms.unused_options(config):
        yield f"algorithm.{name}", f"{row.name} does not use it; remove it"
    masking = ["algorithm"] if config.mask_truncated else []
    masking += [f"data.train.{n}" for n, source in enumerate(spec.data.mixture) if source.mask_truncated]
    for path in masking if row.advantage.estimator == "best_of_group" else ():
        yield f"{path}.mask_truncated", f"{row.name} trains on one sample of a group and does not use it; remove it"
    for path in masking if row.advantage.compares_reference else ():
        yield f"{path}.mask_truncated", f"{row.name} trains on pairs, and this leaves half of one; remove it"
    for name in ("clip_low", "clip_high"):
        if config.clip_range is not None and dict(config)[name] is not None:
            yield f"algorithm.{name}", "clip_range is set too; give either clip_range or clip_low and clip_high"
    if row.kl_in == "reward" and config.kl.estimator not in (None, "k1"):
        yield "algorithm.kl.estimator", f"{row.name} has its KL term in the reward, which is k1; remove it"
    steered = config.kl.target is not None
    if steered and not (row.kl_in == "reward" and spec.kl_coef > 0):
        why = "adapts a KL term in the reward, which this spec lacks"
        yield "algorithm.kl.target", f"{why}; set algorithm.kl.coef above 0" if row.kl_in == "reward" else why
    if config.kl.to_go is not None and (row.kl_in != "reward" or row.advantage.estimator != "returns"):
        yield "algorithm.kl.to_go", f"{row.name} does not use it; remove it"
    if config.kl.horizon is not None and not steered:
        yield "algorithm.kl.horizon", "has no effect without algorithm.kl.target"
    if not row.loss.has_ratio and spec.kl_coef > 0 and spec.sampling.temperature != 1.0:
        why = f"{row.name} trains at temperature 1, but the reference is scored at sampling.temperature"
        yield "algorithm.kl.coef", f"{why}, {spec.sampling.temperature:g}; set one to 1 or the other to 0"
    if not row.loss.has_ratio and spec.kl_coef > 0 and spec.sampling.truncates:
        why = (
            f"{row.name} trains on the whole distribution, but the reference is scored among the tokens that were left"
        )
        yield "algorithm.kl.coef", f"{why} by sampling.top_p, top_k or min_p; set it to 0 or remove these"
    loss = algorithms.policy_loss(config)
    distill = loss.distill
    if loss.observation_coef and spec.roles.environment is None:
        yield "algorithm.observation_coef", "has no effect: there is no role environment; remove it"
    if row.advantage.estimator == "none" and not distill.coef:
        yield "algorithm.distill.coef", f"must be above 0: {row.name} has no other loss"
    if not row.loss.has_ratio and distill.coef > 0 and spec.sampling.temperature != 1.0:
        why = f"{row.name} trains at temperature 1, but the teacher is scored at sampling.temperature"
        yield "algorithm.distill.coef", f"{why}, {spec.sampling.temperature:g}; set one to 1 or the other to 0"
    yield from _signals(spec)
    yield from _without_effect(spec)
    uncorrected = row.loss.has_ratio and not algorithms.corrects_sampler(config)
    if spec.sampling.structured is not None and uncorrected and not spec.sampling.truncates:
        why = "samples come from the permitted tokens (sampling.structured), and only the correction accounts for that"
        yield "algorithm.importance.mode", f"{why}; use truncate or mask"
    compares = "divergence" in {row.loss.objective, *(one.objective for one in source_losses(spec).values())}
    if spec.sampling.structured is not None and compares and not spec.sampling.truncates:
        why = (
            "dppo_tv and dppo_kl compare a token's probability with the sampler's, which is among the permitted tokens"
        )
        yield "sampling.structured", f"{why}; set sampling.top_p below 1 too, or use another algorithm"
    if algorithms.advantage(config).reads_square_sums and (spec.sampling.truncates or spec.sampling.structured):
        why = f"{row.name} weighs tokens by the whole distribution: remove sampling.top_p, top_k, min_p and structured"
        yield "algorithm.name", why
    if algorithms.advantage(config).baseline == "batch_mean" and spec.schedule.prompts_per_step * spec.group_size < 2:
        yield "schedule.prompts_per_step", f"must be at least 2: {row.name} compares the samples of a batch"
    smallest, pass_k = min(spec.group_sizes), algorithms.advantage(config).pass_k
    if row.advantage.estimator == "best_of_subsets" and smallest <= pass_k:
        yield "algorithm.pass_k", f"must be less than the samples of a group, {smallest}, got {pass_k}"
    yield from _several_updates(spec)
    yield from _exact_divergence(spec)
    if algorithms.natural_gradient(config) is not None:
        yield from _natural_gradient(spec)
    if loss.recorded_top_k:
        yield from _score_centering(spec)


_ADAMW = (
    *("learning_rate", "weight_decay", "adam_betas", "adam_eps", "max_grad_norm"),
    *("schedule", "warmup_updates", "min_lr_ratio", "offload_optimizer"),
)
"""Fields of a trainer that only AdamW reads."""


def _natural_gradient(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings that a step of the natural gradient does not use, or with which it cannot be computed."""
    name, policy = spec.algorithm.name, spec.roles.policy
    for field in _ADAMW:
        if changed(policy, field):
            yield f"roles.policy.{field}", f"{name} takes no step of AdamW and does not use it; remove it"
    if spec.model.dtype != "float32":
        yield "model.dtype", f"must be float32: {name} solves for its step, and {spec.model.dtype} rounds too much"
    if policy.zero_stage > 1:
        yield "roles.policy.zero_stage", f"must be 0 or 1: {name} needs the whole gradient and weights on every worker"
    if policy.lora is not None:
        yield "roles.policy.lora", f"{name} trains all weights; remove it"
    if policy.sequence_parallel_size > 1:
        yield "roles.policy.sequence_parallel_size", f"must be 1: {name} differentiates attention twice on each worker"
    if policy.kernels != "torch":
        yield "roles.policy.kernels", f"must be torch: the gradients of {policy.kernels} have no derivative ({name})"
    if policy.gradient_checkpointing:
        yield "roles.policy.gradient_checkpointing", f"{name} differentiates the backward pass; set it to false"
    if spec.algorithm.ptx_coef:
        yield "algorithm.ptx_coef", f"{name} measures its divergence on samples only; set it to 0"
    for field in ("epochs", "minibatches"):
        if (value := dict(spec.schedule)[field]) > 1:
            yield f"schedule.{field}", f"must be 1, got {value}: {name} takes one step on the whole batch"


def _score_centering(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings with which the sampler's mean of a score is another one than what is subtracted."""
    name, loss = spec.algorithm.name, algorithms.policy_loss(spec.algorithm)
    if spec.sampling.truncates:
        yield "algorithm.name", f"{name} reads the whole distribution: remove sampling.top_p, top_k and min_p"
    if loss.importance.mode != "none" and loss.importance.level == "sequence":
        yield "algorithm.importance.level", f"must be token: {name} weighs every token that could have been sampled"
    if loss.importance.max_divergence is not None:
        yield (
            "algorithm.importance.max_divergence",
            f"{name} leaves out no samples, or the mean is not 0; remove it",
        )
    if loss.distill.coef > 0:
        yield "algorithm.distill.coef", f"must be 0: {name} reads the sampler's tokens, and no teacher's"


def _without_effect(spec: RolloutSpec) -> Iterator[Finding]:
    """Settings of the algorithm that another one turns off."""
    config, sources = spec.algorithm, len(spec.data.mixture)
    normalized = any(one.normalize for own in reward_functions(spec).values() for one in own)
    if config.importance is not None and algorithms.policy_loss(config).importance.mode == "none":
        for name in ("level", "cap"):
            if dict(config.importance)[name] is not None:
                yield f"algorithm.importance.{name}", "has no effect with mode none; remove it"
    yield from unread_distill(config.distill, algorithms.policy_loss(config).distill)
    if not config.by_source and sources < 2:
        yield "algorithm.by_source", "has no effect with one source in data.train; remove it"
    elif not config.by_source and not algorithms.compares_with_batch(config) and not normalized:
        why = f"has no effect: {config.name} compares samples of a group only, and a group has one source; remove it"
        yield "algorithm.by_source", why


def _exact_divergence(spec: RolloutSpec) -> Iterator[Finding]:
    """What follows KL(old || new) after the updates needs it measured."""
    limited = algorithms.trust_region(spec.algorithm) is not None
    if spec.algorithm.kl_states == 0 and (limited or algorithms.kl_penalty(spec.algorithm) is not None):
        yield "algorithm.kl_states", f"must be above 0: {spec.algorithm.name} follows the divergence measured there"
    if limited and spec.roles.policy.ema_decay > 0:
        yield "roles.policy.ema_decay", f"{spec.algorithm.name} shortens steps after they are averaged; set it to 0"


def _signals(spec: RolloutSpec) -> Iterator[Finding]:
    """Components for dynamic sampling to compare that are missing, or are not compared."""
    config, sources = spec.algorithm, spec.data.mixture
    filtered = custom.group_filter(config) is not None
    shared = [number for number, source in enumerate(sources) if source.dynamic_sampling_on is None]
    own = {
        f"data.train.{number}.dynamic_sampling_on": (source.dynamic_sampling_on, [number])
        for number, source in enumerate(sources)
    }
    named = {"algorithm.dynamic_sampling_on": (config.dynamic_sampling_on, shared), **own}
    for path, (component, numbers) in named.items():
        if component is None:
            continue
        if not algorithms.dynamic_sampling(config):
            yield path, "has no effect without algorithm.dynamic_sampling above 0"
        elif sources and not numbers:
            yield path, "has no effect: every source of data.train sets its own; remove it"
        elif filtered:
            yield path, f"has no effect: keep_group of {config.name} decides which groups are replaced; remove it"
        yield from component_problems(spec, path, component, [sources[number] for number in numbers])


def _several_updates(spec: RolloutSpec) -> Iterator[Finding]:
    """KL(old || new) is 0 before the first update of a step, so what reads it needs a second update."""
    if spec.schedule.updates_per_step > 1:
        return
    why = "needs more than one update a step (schedule.epochs times schedule.minibatches)"
    penalized = algorithms.advantage(spec.algorithm).covariance == "penalize"
    if penalized or algorithms.kl_penalty(spec.algorithm) is not None:
        yield "algorithm.name", f"{spec.algorithm.name} {why}"
    if spec.algorithm.kl_stop:
        yield "algorithm.kl_stop", why


def check_schedule(spec: RolloutSpec) -> Iterator[Finding]:
    schedule = spec.schedule
    for name, role in spec.roles.trainers().items():
        smallest = min(spec.group_sizes)
        if schedule.prompts_per_step * smallest < role.data_parallel_size * schedule.minibatches:
            yield (
                "schedule.prompts_per_step",
                f"{schedule.prompts_per_step} prompts of {smallest} samples are too few for "
                f"{shares_of(name, role)} times {schedule.minibatches} minibatches",
            )
    if schedule.max_staleness > 0 and (guests := spec.roles.guests()):
        why = f"must be 0 where {next(iter(guests))} shares the policy's GPUs: engines sleep during updates"
        yield "schedule.max_staleness", why
    for name in ("generate_timeout_s", "score_timeout_s", "train_timeout_s", "sync_timeout_s"):
        if (limit := dict(schedule)[name]) > schedule.step_timeout_s:
            yield f"schedule.{name}", f"{limit:g} is longer than step_timeout_s, {schedule.step_timeout_s:g}"
    for name, role in spec.roles.trainers().items():
        updates = spec.updates_of(name)
        if role.schedule != "constant" and 0 < updates <= role.warmup_updates:
            yield f"roles.{name}.warmup_updates", f"must be less than the run's {updates} updates"
    if spec.roles.critic is not None and spec.roles.critic.warmup_steps >= schedule.steps:
        yield "roles.critic.warmup_steps", f"must be less than schedule.steps, {schedule.steps}"


def check_lengths(spec: RolloutSpec) -> Iterator[Finding]:
    longest = spec.roles.rollout.max_model_len
    if spec.sampling.max_tokens >= longest:
        yield (
            "sampling.max_tokens",
            f"{spec.sampling.max_tokens} leaves no room for a prompt in roles.rollout.max_model_len, {longest}",
        )
    budgets: dict[str, int] = {name: role.micro_batch_tokens for name, role in spec.roles.trainers().items()}
    if spec.roles.reference is not None and not spec.reference_in_policy:
        budgets["reference"] = spec.roles.reference.micro_batch_tokens
    teachers = {n: one for n, one in spec.roles.teachers().items() if isinstance(one, TeacherRole)}
    budgets |= {name: one.micro_batch_tokens for name, one in teachers.items() if name not in spec.in_policy}
    if spec.roles.reward.reward_models:
        budgets["reward"] = spec.roles.reward.micro_batch_tokens
    for name, tokens in budgets.items():
        if tokens < longest:
            why = f"{tokens} cannot hold one sequence of roles.rollout.max_model_len, {longest}"
            yield f"roles.{name}.micro_batch_tokens", why
    for index, text in enumerate(spec.sampling.stop):
        if not text:
            yield f"sampling.stop.{index}", "may not be empty"


def check_colocation(spec: RolloutSpec) -> Iterator[Finding]:
    present = spec.roles.present()
    for name, role in present.items():
        other = role.colocate_with
        if other is None:
            continue
        path = f"roles.{name}.colocate_with"
        if other == name:
            yield path, "a role cannot be colocated with itself"
        elif other not in present:
            yield path, f"there is no role {other}"
        elif COLOCATIONS.get(name.partition(".")[0]) != other:
            can = ", ".join(f"{a} with {b}" for a, b in COLOCATIONS.items())
            mutual = " (and they name each other)" if present[other].colocate_with == name else ""
            yield path, f"{name} cannot be colocated with {other}{mutual}; possible: {can}"
        elif isinstance(role, GuestEngineRole):
            yield from _shared_gpus(spec, name, role)
        elif isinstance(role, ReferenceRole):
            for field in INSIDE_ANOTHER:
                if changed(role, field):
                    yield f"roles.{name}.{field}", f"has no effect inside the {other}'s workers; remove it"


def check_scaling(spec: RolloutSpec) -> Iterator[Finding]:
    scaled = spec.roles.scaled()
    for name, role in scaled.items():
        path, most = f"roles.{name}", role.max_workers
        if role.min_workers > role.workers:
            yield f"{path}.min_workers", f"{role.min_workers} is more than workers, {role.workers}"
        if most is not None and most < role.workers:
            yield f"{path}.max_workers", f"{most} is less than workers, {role.workers}"
    for name, role in spec.roles.guests().items():
        for field in ("min_workers", "max_workers"):
            if changed(role, field):
                yield f"roles.{name}.{field}", "has no effect: there is one engine for each policy worker; remove it"


def _shared_gpus(spec: RolloutSpec, name: str, guest: GuestEngineRole) -> Iterator[Finding]:
    """Settings with which a role's engines cannot be on the policy's GPUs, together with the engines of others."""
    policy, guests = spec.roles.policy, spec.roles.guests()
    path, ranks = f"roles.{name}.colocate_with", guest.tensor_parallel_size
    first, others = next(iter(guests.items()))
    parts = [policy.gpus, *(one.gpus for one in guests.values())]
    if guest.gpus == 0 or policy.gpus == 0:
        yield path, f"{name} and policy can share GPUs only; leave gpus out of both, or remove this"
    elif ranks != others.tensor_parallel_size:
        why = f"must be {others.tensor_parallel_size}, as in roles.{first}, whose engines are on the same GPUs"
        yield f"roles.{name}.tensor_parallel_size", why
    elif guest.workers * ranks != policy.workers:
        each = "each policy worker" if ranks == 1 else f"every {ranks} policy workers"
        yield path, f"needs one engine for {each}, got {guest.workers} and {policy.workers}"
    elif ranks > 1 and policy.gpus != 1:
        yield "roles.policy.gpus", f"must be 1: an engine of {ranks} GPUs shares whole ones; remove it"
    elif ranks == 1 and name == first and round(sum(parts), 6) > 1:
        asked = " + ".join(str(part) for part in reversed(parts))
        equal = "remove both: each has half" if len(parts) == 2 else "remove all: each has an equal part"
        yield path, f"they share one GPU, but ask for {asked} of it; {equal}"
    if name != "rollout" and guest.gpu_memory_utilization is None:
        why = "is required on the policy's GPUs: the share that it has there while it is awake"
        yield f"roles.{name}.gpu_memory_utilization", f"{why}; rollout engines take what is left"
    if changed(guest, "strategy"):
        yield f"roles.{name}.strategy", "engines are placed with the policy's workers: set roles.policy.strategy"
    if guest.accelerator and policy.accelerator and guest.accelerator != policy.accelerator:
        why = f"{guest.accelerator}, but roles.policy.accelerator is {policy.accelerator}: they share GPUs"
        yield f"roles.{name}.accelerator", why
    for key, value in guest.node_labels.items():
        if (other := policy.node_labels.get(key, value)) != value:
            yield f"roles.{name}.node_labels", f"{key} is {value}, but {other} in roles.policy.node_labels"


def check_devices(spec: RolloutSpec) -> Iterator[Finding]:
    on_gpu = spec.roles.policy.gpus > 0
    for name, role in spec.roles.present().items():
        if name in ("rollout", "critic") and (role.gpus > 0) != on_gpu:
            yield f"roles.{name}.gpus", f"{name} and policy must both run on GPUs or both on the CPU"
        if not isinstance(role, EngineRole | ReferenceRole) and role.gpus > 1:
            yield f"roles.{name}.gpus", f"a {name} worker uses one GPU; raise workers instead"
    yield from shard_problems(spec)
    if spec.roles.reward.gpus > 0 and not spec.roles.reward.reward_models:
        yield "roles.reward.gpus", "reward functions run on the CPU; only a reward model uses a GPU"
    for name, role in spec.roles.engines().items():
        yield from _engine_devices(name, role)
    if spec.sampling.router_replay:
        if spec.roles.rollout.gpus == 0:
            yield "sampling.router_replay", "vLLM does not record the experts of tokens on the CPU: remove it"
        elif not spec.roles.rollout.enable_prefix_caching:
            why = "vLLM records the experts of tokens (sampling.router_replay) only with it"
            yield "roles.rollout.enable_prefix_caching", f"{why}: set it to true"


def _engine_devices(name: str, role: EngineRole) -> Iterator[Finding]:
    yield from refused_options(name, role.engine, role.device)
    ranks = role.tensor_parallel_size
    if role.gpus == 0 and ranks > 1 and role.cpus < ranks:
        yield f"roles.{name}.cpus", f"tensor_parallel_size {ranks} on the CPU needs at least {ranks} cores"
    if role.gpus > 0 and ranks > 1 and role.gpus != ranks:
        yield f"roles.{name}.gpus", f"must equal tensor_parallel_size, {ranks}, got {role.gpus:g}"
    if role.gpus > 1 and ranks == 1:
        yield f"roles.{name}.gpus", "an engine with tensor_parallel_size 1 uses one GPU; raise workers or that"


def check_weight_sync(spec: RolloutSpec) -> Iterator[Finding]:
    backend, shared = spec.weight_sync.backend, spec.roles.rollout.colocate_with == "policy"
    problem = None if backend == "auto" else backend_problem(backend, spec.device, shared)
    if problem is not None:
        yield "weight_sync.backend", problem
    stored = BACKENDS[resolved_backend(spec)].stores
    problem = _store_problem(spec.weight_sync.url, stored)
    if problem is not None:
        yield "weight_sync.url", problem
    yield from _group_on_one_gpu(spec)


def _group_on_one_gpu(spec: RolloutSpec) -> Iterator[Finding]:
    """Fractions with which Ray may put two processes of a transfer group on one GPU."""
    backend, rollout, policy = BACKENDS[resolved_backend(spec)], spec.roles.rollout, spec.roles.policy
    engines = max(rollout.workers, rollout.max_workers or 0)
    shared = rollout.gpus + policy.gpus <= 1 or (engines > 1 and rollout.gpus <= 0.5)
    if backend.shared_gpu is False and rollout.colocate_with is None and 0 < rollout.gpus < 1 and shared:
        yield (
            "roles.rollout.gpus",
            f"with {rollout.gpus:g}, two processes may be on one GPU, which {backend.name} refuses; set "
            "roles.rollout.colocate_with: policy, or weight_sync.backend: shm",
        )


def _store_problem(url: str | None, stored: bool) -> str | None:
    """Why the URL of an object store cannot be used."""
    if url is None:
        return "the back-end store needs a URL, such as s3://bucket/folder" if stored else None
    if not stored:
        return "only the back-end store uses a URL; set weight_sync.backend: store, or remove it"
    return url_problem(url)


def check_sleep(spec: RolloutSpec) -> Iterator[Finding]:
    for name, role in spec.roles.engines().items():
        if not isinstance(role, GuestEngineRole) or role.sleep in (None, "none"):
            continue
        path = f"roles.{name}"
        if role.device == "cpu":
            yield f"{path}.sleep", f"{role.sleep} needs a GPU: vLLM's CPU build releases no memory; remove it"
        elif role.colocate_with != "policy":
            why = "nobody takes the memory of an engine that sleeps on separate GPUs"
            yield f"{path}.sleep", f"{why}; remove it or set {path}.colocate_with: policy"


def check_optimizers(spec: RolloutSpec) -> Iterator[Finding]:
    yield from trainer_problems(spec)
    if spec.roles.critic is not None and spec.roles.critic.ema_decay > 0:
        yield "roles.critic.ema_decay", "only the policy's average is exported; remove it"
