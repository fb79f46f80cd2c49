"""What the cross-checks of both kinds of spec share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from troupe.orchestrator.spec.preflight import Finding
from troupe.orchestrator.spec.sections import BaseEvaluation, PromptText, RoleName, TrainerRole
from troupe.workers.contract.config import Frozen, ModelConfig

INSIDE_ANOTHER = (
    *("workers", "min_workers", "max_workers", "cpus", "gpus", "accelerator", "node_labels", "strategy"),
    *("micro_batch_tokens", "threads"),
)
"""Fields that have no effect in a role inside another role's workers."""

_READ_TOKENS = ("roles.critic.model", "roles.reference.model")
"""Sections of models that render no conversation."""


def changed(section: Frozen, field: str) -> bool:
    """Whether a field differs from its default. (Set or not is no criterion: a resolved spec sets every field.)"""
    return dict(section)[field] != type(section).model_fields[field].get_default(call_default_factory=True)


def trainer_problems(trainers: Mapping[RoleName, TrainerRole]) -> Iterator[Finding]:
    """Settings of training roles that cannot work, whatever they train on."""
    for name, role in trainers.items():
        if role.offload_optimizer and role.gpus == 0:
            yield f"roles.{name}.offload_optimizer", "has no effect on the CPU; remove it"
        elif role.offload_optimizer and role.zero_stage == 0:
            yield f"roles.{name}.offload_optimizer", "needs zero_stage 1, 2 or 3: without ZeRO nothing is offloaded"
        for index, beta in enumerate(role.adam_betas):
            if not 0.0 <= beta < 1.0:
                yield f"roles.{name}.adam_betas.{index}", f"must be at least 0 and less than 1, got {beta}"


def evaluation_problems(evaluation: BaseEvaluation, has_data: bool) -> Iterator[Finding]:
    """An evaluation without data, or one that never runs."""
    if not has_data:
        yield "evaluation", "needs data.eval"
    if not (evaluation.every_steps or evaluation.at_start or evaluation.at_end):
        yield "evaluation", "never runs: set every_steps, at_start or at_end, or remove the section"


def template_problems(
    models: Mapping[str, ModelConfig], prompts: Mapping[str, PromptText], *, plain: bool
) -> Iterator[Finding]:
    """Chat templates of models that read tokens, and system messages without a chat template.

    Args:
        models: The models of a spec by the path of their section.
        prompts: The sections with prompts, by their path.
        plain: Whether the trained model has no chat template.
    """
    for section in _READ_TOKENS:
        if section in models and models[section].chat_template is not None:
            yield f"{section}.chat_template", "has no effect: this model reads the policy's tokens; remove it"
    for section, source in prompts.items():
        if plain and source.system:
            yield f"{section}.system", "model.chat_template none has no system message; put the words in template"
