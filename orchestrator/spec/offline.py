"""The spec of a run on offline data: no rollout, no rewards, no sampling, so no fields for them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from troupe.orchestrator.algorithms.offline import DataFormat, OfflineAlgorithm, OfflineAlgorithmConfig, Trains
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.sections import (
    LIST,
    OTHER_EVALUATIONS,
    OTHER_REFERENCE,
    RESHARDED,
    SAME_ROWS,
    SECTION,
    BaseEvaluation,
    BaseFailures,
    BaseOutput,
    BaseSchedule,
    CheckpointConfig,
    DatasetsFolder,
    HubFiles,
    MixedHubFiles,
    PromptText,
    ReferenceRole,
    Roles,
    SourceShare,
    TableFile,
    TrainerRole,
    form_of,
)
from troupe.workers.contract.config import Device, Frozen
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


class _Examples(PromptText):
    """The columns of a table of examples."""

    prompt: str | None = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`. null (reward_model, dpo, ipo,
    orpo, rrhf): the answers are whole conversations, and their common beginning is the prompt."""
    response: str = "response"
    """Column with the response (sft, kto): text, or a list of messages that begins and ends with the assistant's."""
    messages: str | None = None
    """Column with whole conversations (sft, kto) instead of `prompt` and `response`: lists of messages, the last
    one the assistant's."""
    loss_on: Literal["all", "last"] = "all"
    """Turns of the assistant in `messages` that have a loss: `all`, or only the `last`, as the response to all before
    it."""
    chosen: str = "chosen"
    """Column with the better answer (reward_model, dpo, ipo, orpo): text, or a list of messages."""
    rejected: str = "rejected"
    """Column with the worse answer (reward_model, dpo, ipo, orpo): text, or a list of messages."""
    margin: str | None = None
    """Column with how much better the better answer is (reward_model); null if there is none."""
    answers: str | None = None
    """Column with a list of answers, best first (reward_model, dpo) or in any order with `scores` (rrhf: `answers`)."""
    scores: str | None = None
    """Column with a list of scores, one per answer (rrhf: `scores`); with it answers are ranked by score, and answers
    with equal scores are tied."""
    label: str = "label"
    """Column with whether the response is good: true or false, 1 or 0 (kto)."""
    dedupe: bool = False
    """Use an example once, however many rows have its prompt and answers: those after the first are left out. False:
    they are used, and counted at the start."""


class FileExamples(_Examples, TableFile):
    """A file of examples."""


class DatasetsExamples(_Examples, DatasetsFolder):
    """A folder written by `save_to_disk` of the `datasets` library."""


class HubExamples(_Examples, HubFiles):
    """Files of a dataset on the Hugging Face hub."""


ExampleSource = Annotated[
    FileExamples | DatasetsExamples | HubExamples,
    Field(discriminator="kind"),
]


class MixedFileExamples(SourceShare, FileExamples):
    """A file of examples in a mixture."""


class MixedDatasetsExamples(SourceShare, DatasetsExamples):
    """A folder written by `save_to_disk` of the `datasets` library, in a mixture."""


class MixedHubExamples(MixedHubFiles, HubExamples):
    """Files of a dataset on the Hugging Face hub, in a mixture; `name` is the source's."""


MixedExamples = Annotated[
    MixedFileExamples | MixedDatasetsExamples | MixedHubExamples,
    Field(discriminator="kind"),
]


_WHICH_EXAMPLES = refused("it decides which examples are trained on, and so their order")


class OfflineData(Frozen):
    """Where examples come from, and how long they may be."""

    train: Annotated[
        Annotated[ExampleSource, Tag(SECTION)] | Annotated[tuple[MixedExamples, ...], Field(min_length=1), Tag(LIST)],
        Discriminator(form_of),
        NONE,
        SAME_ROWS,
    ]
    """Examples to train on: one source, or a list of named sources, which are mixed in proportion to their weights."""
    eval: Annotated[ExampleSource | None, NONE, OTHER_EVALUATIONS, EVALUATED] = None
    """Examples to evaluate on."""
    held_out: Annotated[bool, NONE, EVALUATED_IF_SET] = True
    """Exclude from `eval` every example whose prompt is also in `train`."""
    max_length: Annotated[int, NONE, _WHICH_EXAMPLES] = Field(default=1024, ge=8)
    """Longest prompt plus response, in tokens; a longer example is a bad row."""

    @property
    def mixture(self) -> tuple[MixedExamples, ...]:
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
        """This spec."""
        return self

    @property
    def row(self) -> OfflineAlgorithm:
        """The algorithm's row of the table."""
        return self.algorithm.row

    @property
    def trains(self) -> Trains:
        """What kind of model the run writes."""
        return self.row.trains

    @property
    def device(self) -> Device:
        """Device that the model is trained on."""
        return self.roles.policy.device


def data_format(spec: OfflineSpec, source: ExampleSource) -> DataFormat:
    """Format of a source's rows under the spec's algorithm."""
    formats = spec.row.formats
    return "ranked" if "ranked" in formats and source.answers is not None else formats[0]


def columns(format_: DataFormat, source: ExampleSource) -> dict[str, str]:
    """Column of each field that rows of this format have."""
    response: dict[str, str | None] = {"prompt": source.prompt, "response": source.response}
    if source.messages is not None:
        response = {"messages": source.messages}
    named: dict[DataFormat, dict[str, str | None]] = {
        "demonstrations": response,
        "pairs": {
            "prompt": source.prompt,
            "chosen": source.chosen,
            "rejected": source.rejected,
            "margin": source.margin,
        },
        "ranked": {"prompt": source.prompt, "answers": source.answers or "answers", "scores": source.scores},
        "labelled": response | {"label": source.label},
    }
    fields = named[format_]
    return {name: column for name, column in fields.items() if column is not None}
