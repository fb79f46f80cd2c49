"""The spec of a run on offline data: no rollout, no rewards, no sampling, so no fields for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from troupe.orchestrator.algorithms.offline import DataFormat, OfflineAlgorithm, OfflineAlgorithmConfig, Trains
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.roles import (
    OTHER_REFERENCE,
    RESHARDED,
    ReferenceRole,
    Roles,
    TrainerRole,
)
from troupe.orchestrator.spec.sections import (
    NEW_ORDER,
    OTHER_EVALUATIONS,
    SAME_ROWS,
    BaseEvaluation,
    BaseFailures,
    BaseOutput,
    BaseSchedule,
    CheckpointConfig,
)
from troupe.orchestrator.spec.sources import LIST, SECTION, ExampleSource, MixedExampleSource, form_of
from troupe.workers.contract.config_base import Device, Frozen
from troupe.workers.contract.consequences import (
    EVALUATED,
    EVALUATED_IF_SET,
    NEXT_STEP,
    NONE,
    NOT_EVALUATED,
    NOT_REWARDED,
    NOT_SAMPLED,
    refused,
)


class OfflineRoles(Roles):
    """The worker roles."""

    policy: Annotated[TrainerRole, NONE, RESHARDED]
    """Workers that train the model, which may be a reward model."""
    reference: Annotated[ReferenceRole | None, NONE, OTHER_REFERENCE] = None
    """The frozen reference; needed by dpo, ipo and kto."""


class OfflineSchedule(BaseSchedule):
    """Length of the run, division of a step, and timeouts."""

    examples_per_step: int = Field(ge=1)
    """Examples (a pair is one) in a step's batch. Each pass over the data has a new order."""

    @property
    def rows_per_step(self) -> int:
        return self.examples_per_step


_WHICH_EXAMPLES = refused("it decides which examples are trained on, and so their order")


class OfflineData(Frozen):
    """Where examples come from, and how long they may be."""

    train: Annotated[
        Annotated[ExampleSource, Tag(SECTION)]
        | Annotated[tuple[MixedExampleSource, ...], Field(min_length=1), Tag(LIST)],
        Discriminator(form_of),
        NONE,
        SAME_ROWS,
    ]
    """Examples to train on: one source, or a list of named sources, which are mixed in proportion to their weights."""
    eval: Annotated[ExampleSource | None, NONE, OTHER_EVALUATIONS, EVALUATED] = None
    """Examples to evaluate on."""
    skip: Annotated[int, NONE, NEW_ORDER] = Field(default=0, ge=0)
    """Examples at the start of the seed's order that are not drawn. `rounds` adds what earlier rounds have drawn."""
    held_out: Annotated[bool, NONE, EVALUATED_IF_SET] = True
    """Exclude from `eval` every example whose prompt is also in `train`."""
    max_length: Annotated[int, NONE, _WHICH_EXAMPLES] = Field(default=1024, ge=8)
    """Longest prompt plus response, in tokens; a longer example is a bad row."""

    @property
    def mixture(self) -> tuple[MixedExampleSource, ...]:
        """The sources of a mixture; empty if there is one source."""
        return self.train if isinstance(self.train, tuple) else ()

    def sources(self) -> dict[str, ExampleSource]:
        """The sources of examples by their path in the section `data`."""
        train: dict[str, ExampleSource] = {}
        if isinstance(self.train, tuple):
            train = {f"train.{number}": source for number, source in enumerate(self.train)}
        else:
            train = {"train": self.train}
        return train | ({} if self.eval is None else {"eval": self.eval})


class OfflineEvaluation(BaseEvaluation):
    """When the model is evaluated on `data.eval`: loss, accuracy, margins, and a reward model's calibration."""

    examples: Annotated[int, NOT_EVALUATED] = Field(default=0, ge=0)
    """Examples per evaluation, always the same ones; 0: all."""


class OfflineSpec(RunSpec, frozen=True):
    """One run that trains on offline data."""

    roles: OfflineRoles
    """The worker roles, with their number of workers and their resources."""
    algorithm: Annotated[OfflineAlgorithmConfig, NONE, NEXT_STEP]
    """What the model learns from the examples."""
    schedule: Annotated[OfflineSchedule, NONE]
    """Length of the run, division of a step, and timeouts."""
    data: OfflineData
    """Where examples come from."""
    evaluation: Annotated[OfflineEvaluation | None, OTHER_EVALUATIONS, NOT_REWARDED, NOT_SAMPLED] = None
    """When the model is evaluated; left out: never."""
    checkpoint: Annotated[CheckpointConfig, NONE] = CheckpointConfig()
    """When the run's state is saved."""
    failures: Annotated[BaseFailures, NONE] = BaseFailures()
    """Which failures are tolerated, and when the run stops."""
    output: Annotated[BaseOutput, NONE] = BaseOutput()
    """What the run writes."""

    @property
    def offline(self) -> OfflineSpec:
        return self

    @property
    def row(self) -> OfflineAlgorithm:
        return self.algorithm.row

    @property
    def trains(self) -> Trains:
        """What kind of model the run writes."""
        return self.row.trains

    @property
    def device(self) -> Device:
        """Device that the model is trained on."""
        return self.roles.policy.device


SAMPLE_COLUMNS = ("messages", "response", "prompt_ids", "response_ids", "loss_mask", "trained")
"""Columns of a run's samples that every distillation reads."""


def data_format(formats: Sequence[DataFormat], source: ExampleSource) -> DataFormat:
    """Format of a source's rows, of those an algorithm takes: two answers in separate columns are a pair."""
    answers = source.answers
    ranked = answers is not None and source.preferred is None and (isinstance(answers, str) or len(answers) > 2)
    return "ranked" if ranked and "ranked" in formats else formats[0]


def columns(format_: DataFormat, source: ExampleSource) -> dict[str, str]:
    """Column of each field that rows of this format have; a field with several has `FIELD.0`, `FIELD.1`."""
    named: dict[str, str | tuple[str, ...] | None] = {"prompt": source.prompt, "system_column": source.system_column}
    if format_ in ("demonstrations", "labelled"):
        if source.messages is not None:
            named = {"messages": source.messages, "system_column": source.system_column}
        else:
            named["response"] = source.response
        named["label"] = source.label if format_ == "labelled" else None
    elif format_ == "samples":
        return {name: name for name in SAMPLE_COLUMNS}
    elif format_ == "steps":
        named |= {"steps": source.steps, "step_labels": source.step_labels}
    elif format_ == "pairs" and source.answers is None:
        named |= {"chosen": source.chosen, "rejected": source.rejected, "margin": source.margin}
    else:
        named |= {"answers": source.answers or "answers", "scores": source.scores, "ranks": source.ranks}
        named["preferred.column"] = None if source.preferred is None else source.preferred.column
        named["margin"] = source.margin if format_ == "pairs" else None
    named["tools"] = source.tools
    found: dict[str, str] = {}
    for name, column in named.items():
        several = {f"{name}.{number}": one for number, one in enumerate(column)} if isinstance(column, tuple) else {}
        found |= several or ({name: column} if isinstance(column, str) else {})
    return found
