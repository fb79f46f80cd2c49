"""Combinations of fields of an offline spec that cannot work, each refused with the path of the field to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from troupe.orchestrator.errors import Finding
from troupe.orchestrator.spec.checks.adapters import adapter_problems
from troupe.orchestrator.spec.checks.shared import (
    INSIDE_ANOTHER,
    best_problems,
    changed,
    evaluation_problems,
    in_process_problems,
    mixture_problems,
    shard_problems,
    shares_of,
    template_problems,
    trainer_problems,
    unread_distill,
)
from troupe.orchestrator.spec.offline import OfflineSpec, columns, data_format
from troupe.orchestrator.spec.roles import ReferenceRole
from troupe.orchestrator.spec.sources import NEGATIVE, POSITIVE, ExampleSource
from troupe.workers.contract.offline_config import KdLossConfig, RewardLossConfig

_COLUMNS = (
    *("prompt", "response", "messages", "chosen", "rejected", "margin", "answers", "scores", "ranks", "preferred"),
    *("one_in_a_row", "label", "min_margin", "steps", "step_labels", "neutral", "separator"),
)
_TEXTS = ("system", "system_column", "template", "tools")
"""What is added to texts, and not to samples, whose tokens are given."""
_ORDERS = ("scores", "ranks", "preferred")
"""Fields that order answers; a source has at most one."""


def check_roles(spec: OfflineSpec) -> Iterator[Finding]:
    row, reference = spec.row, spec.roles.reference
    if row.reference and reference is None:
        yield "roles.reference", f"is required: {row.name} compares with a reference"
    if not (row.reference or row.teacher) and reference is not None:
        yield "roles.reference", f"{row.name} has no reference; remove the role"
    if row.teacher:
        yield from _teacher(spec)
    if spec.roles.policy.colocate_with is not None:
        yield "roles.policy.colocate_with", "the policy cannot be colocated; possible: reference with policy"
    if reference is None or reference.colocate_with is None:
        return
    if reference.colocate_with != "policy":
        yield "roles.reference.colocate_with", f"there is no role {reference.colocate_with}; possible: policy"
    for name in INSIDE_ANOTHER:
        if name in ReferenceRole.model_fields and changed(reference, name):
            yield f"roles.reference.{name}", "has no effect inside the policy's workers; remove it"


def _teacher(spec: OfflineSpec) -> Iterator[Finding]:
    """What the divergence from a teacher needs of the roles, and settings of it without an effect."""
    loss, distill = spec.algorithm.loss_config(), spec.algorithm.distillation
    if isinstance(loss, KdLossConfig) and not loss.distill.coef:
        yield "algorithm.distill.coef", f"must be above 0: {spec.row.name} has no other loss"
    elif not distill.coef and spec.algorithm.distill is not None:
        yield "algorithm.distill", "has no effect with compares: sampled; remove it"
    elif spec.roles.reference is None and distill.in_process:
        why = f"algorithm.distill.support {distill.support} needs the teacher's logits"
        yield "roles.reference", f"is required: {why}; samples have only what teacher_top_k needs"
    else:
        yield from unread_distill(spec.algorithm.distill, distill)
        yield from in_process_problems(spec, distill)


def check_algorithm(spec: OfflineSpec) -> Iterator[Finding]:
    for name in spec.algorithm.unused():
        yield f"algorithm.{name}", f"{spec.row.name} does not use it; remove it"
    loss = spec.algorithm.loss_config()
    if isinstance(loss, RewardLossConfig) and loss.level == "token":
        for split, source in spec.data.sources().items():
            if data_format(spec.row.formats, source) == "ranked":
                yield "algorithm.level", f"token compares pairs, but data.{split} has ranked answers"


def check_schedule(spec: OfflineSpec) -> Iterator[Finding]:
    schedule, policy = spec.schedule, spec.roles.policy
    least = policy.data_parallel_size * schedule.minibatches * (2 if "labelled" in spec.row.formats else 1)
    if schedule.examples_per_step < least:
        yield (
            "schedule.examples_per_step",
            f"{schedule.examples_per_step} examples are too few for {shares_of('policy', policy)} times "
            f"{schedule.minibatches} minibatches (at least {least})",
        )
    for name in ("score_timeout_s", "train_timeout_s"):
        if (limit := dict(schedule)[name]) > schedule.step_timeout_s:
            yield f"schedule.{name}", f"{limit:g} is longer than step_timeout_s, {schedule.step_timeout_s:g}"
    updates = spec.updates_of("policy")
    if policy.schedule != "constant" and policy.warmup_updates >= updates:
        yield "roles.policy.warmup_updates", f"must be less than the run's {updates} updates"


def check_lengths(spec: OfflineSpec) -> Iterator[Finding]:
    policy, reference = spec.roles.policy, spec.roles.reference
    rows = 1 if spec.row.formats[0] in ("demonstrations", "steps", "samples") else 2
    need = rows * spec.data.max_length
    if policy.micro_batch_tokens < need:
        what = "one example" if rows == 1 else "the two rows of an example"
        why = f"{policy.micro_batch_tokens} cannot hold {what} of data.max_length, {spec.data.max_length}"
        yield "roles.policy.micro_batch_tokens", why
    if reference is not None and not spec.reference_in_policy and reference.micro_batch_tokens < spec.data.max_length:
        why = f"{reference.micro_batch_tokens} cannot hold one sequence of data.max_length, {spec.data.max_length}"
        yield "roles.reference.micro_batch_tokens", why


def check_devices(spec: OfflineSpec) -> Iterator[Finding]:
    for name, role in spec.roles.present().items():
        if name != "reference" and role.gpus > 1:
            yield f"roles.{name}.gpus", f"a {name} worker uses one GPU; raise workers instead"
    yield from shard_problems(spec)
    yield from trainer_problems(spec)
    yield from adapter_problems(spec)


def check_data(spec: OfflineSpec) -> Iterator[Finding]:
    yield from mixture_problems(spec.data.mixture)
    for split, source in spec.data.sources().items():
        if "{prompt}" not in source.template:
            yield f"data.{split}.template", "must contain {prompt}, which stands for the row's text"
        format_ = data_format(spec.row.formats, source)
        named = () if format_ == "samples" else columns(format_, source)
        read = {name.partition(".")[0] for name in named}
        read |= {"answers", "one_in_a_row", *_ORDERS} if format_ == "ranked" or "answers" in read else set()
        read |= {"min_margin"} if format_ == "pairs" else {"separator"} if format_ == "steps" else set()
        read |= {"step_labels"} if format_ == "steps" else set()
        read |= {"neutral"} if source.step_labels is None else set()
        if spec.trains != "reward_model" and not source.min_margin:
            read.discard("margin")
        if source.prompt is None:  # the prompt is in the conversations
            read.add("prompt")
            if "response" in read:
                yield f"data.{split}.prompt", "is required; a column with whole conversations is named by messages"
        if source.loss_on != "all" and source.messages is None:
            yield f"data.{split}.loss_on", "has no effect without messages; remove it"
        for name in (*_COLUMNS, *(_TEXTS if format_ == "samples" else ())):
            if name not in read and dict(source)[name] != type(source).model_fields[name].default:
                yield f"data.{split}.{name}", f"{spec.row.name} on {format_} does not use it; remove it"
        given = [name for name in _ORDERS if dict(source)[name] is not None]
        if spec.row.formats == ("ranked",) and not given:
            yield f"data.{split}.scores", f"is required: {spec.row.name} compares answers by their scores"
        if format_ in ("pairs", "ranked"):
            yield from ((f"data.{split}.{name}", why) for name, why in _order_problems(source, given))


def _order_problems(source: ExampleSource, given: Sequence[str]) -> Iterator[Finding]:
    """Columns of answers that do not fit the fields that order them (`given`)."""
    answers, preferred = source.answers, source.preferred
    if len(given) > 1:
        yield given[1], f"{given[0]} already orders the answers; remove one of them"
    if isinstance(answers, tuple) and len(answers) < 2:
        yield "answers", "needs two or more columns, or one column with a list as a text"
    for name in ("scores", "ranks"):
        several = dict(source)[name]
        if isinstance(several, tuple) and (not isinstance(answers, tuple) or len(answers) != len(several)):
            yield name, "must name one column for each column of answers, in their order"
    if preferred is not None:
        if isinstance(answers, tuple) and len(answers) != 2:
            yield "preferred", f"says which of two answers is better; answers names {len(answers)} columns"
        values = [str(value).lower() for value, _ in preferred.strengths]
        if preferred.signed and preferred.ties:
            yield "preferred.ties", "has no effect on signed numbers: 0 is the tie; remove it"
        elif not preferred.signed and {NEGATIVE, POSITIVE} & {preferred.first, preferred.second}:
            yield "preferred", f"{NEGATIVE} and {POSITIVE} belong together: one is first, the other second"
        elif len(set(values)) < len(values):
            yield "preferred", "has a value twice; each value of first, second and ties has one meaning"
    if source.one_in_a_row and not (source.prompt and isinstance(answers, str) and given in (["scores"], ["ranks"])):
        yield "one_in_a_row", "needs prompt, answers, the column with a row's answer, and scores or ranks, its number"
    strength = (
        source.margin is not None or {"scores", "ranks"} & {*given} or (preferred is not None and preferred.signed)
    )
    if source.min_margin and not strength:
        yield "min_margin", "needs margin, scores or signed preferred, which say how much better an answer is"


def check_template(spec: OfflineSpec) -> Iterator[Finding]:
    prompts = {f"data.{split}": source for split, source in spec.data.sources().items()}
    yield from template_problems(spec.models(), prompts, plain=spec.model.plain)
    for name, source in prompts.items():
        for field in ("messages", "tools"):
            if spec.model.plain and dict(source)[field] is not None:
                yield f"{name}.{field}", f"{field} need a chat template, and model.chat_template is none"
        if spec.model.plain and source.prompt is None and source.messages is None and "steps" not in spec.row.formats:
            yield f"{name}.prompt", "conversations need a chat template, and model.chat_template is none"


def check_evaluation(spec: OfflineSpec) -> Iterator[Finding]:
    if spec.evaluation is not None:
        yield from evaluation_problems(spec.evaluation, spec.data.eval is not None)
    yield from best_problems(spec)
