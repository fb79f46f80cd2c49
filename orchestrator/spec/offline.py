"""The spec of a run on offline data: no rollout, no rewards, no sampling, so no fields for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from troupe.orchestrator.algorithms.offline import DataFormat, OfflineAlgorithm, OfflineAlgorithmConfig, Trains
from troupe.orchestrator.spec.base import PromptRoom, RunSpec
from troupe.orchestrator.spec.checks.machine import DataSource
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
from troupe.workers.contract.config import Device, Frozen, TrainerConfig
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
from troupe.workers.contract.offline_config import ExampleConfig, OfflineConfig


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

    def example_sources(self) -> dict[str, ExampleSource]:
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
    def row(self) -> OfflineAlgorithm:
        """The algorithm's row of the table."""
        return self.algorithm.row

    @property
    def updates(self) -> int:
        """Optimizer updates over the run."""
        return self.schedule.steps * self.schedule.updates_per_step

    def warnings(self) -> list[str]:
        """As in the base class, and a learning rate that does not reach its peak."""
        return [*super().warnings(), *self.roles.policy.rising("policy", self.updates)]

    @property
    def probe_interval_s(self) -> float:
        """See `RunSpec.probe_interval_s`: there are no other workers."""
        return self.schedule.step_timeout_s

    @property
    def device(self) -> Device:
        """Device that the model is trained on."""
        return self.roles.policy.device

    def trainer_config(self) -> OfflineConfig:
        """Configuration of each training rank."""
        return OfflineConfig(
            model=self.model,
            trainer=self.roles.policy.worker_config(TrainerConfig),
            loss=self.algorithm.loss_config(),
            examples=ExampleConfig(
                max_length=self.data.max_length,
                micro_batch_tokens=self.roles.policy.micro_batch_tokens,
                from_divergence=bool(self.algorithm.from_divergence),
                mismatched="labelled" in self.row.formats,
            ),
            reference_model=self.colocated_reference_model,
            total_updates=self.updates,
            seed=self.seed,
            device=self.device,
            lora=self.roles.policy.lora,
        )

    @property
    def offline(self) -> OfflineSpec:
        """See `RunSpec.offline`."""
        return self

    @property
    def trains(self) -> Trains:
        """What kind of model the run writes."""
        return self.row.trains

    @property
    def prompt_room(self) -> PromptRoom:
        """See `RunSpec.prompt_room`."""
        words = f"data.max_length {self.data.max_length} leaves beside a response of one token"
        return PromptRoom(self.data.max_length - 1, "data.max_length", words)

    @property
    def trainer(self) -> str:
        """See `RunSpec.trainer`."""
        return "reward_trainer" if self.trains == "reward_model" else "example_policy"

    @property
    def batch_bytes(self) -> int:
        """See `RunSpec.batch_bytes`: ids, masks and log-probs of at most two answers, pair by pair (EXAMPLE_BATCH)."""
        return 2 * self.schedule.examples_per_step * self.data.max_length * 16

    @property
    def batch_description(self) -> str:
        """Size of a step's batch, as text."""
        return f"{self.schedule.examples_per_step} examples"

    @property
    def scoring_temperature(self) -> float:
        """Temperature that the reference divides its logits by: 1, since there is no sampling."""
        return 1.0

    def sequence_lengths(self) -> dict[str, int]:
        """Every limit on the length of a sequence in tokens, by the dotted path of its field."""
        return {"data.max_length": self.data.max_length}

    def data_sources(self) -> dict[str, DataSource]:
        """The sections that name data, by their name in the section `data`."""
        return {**self.data.example_sources()}

    def evaluation_metrics(self) -> list[str]:
        """See `RunSpec.evaluation_metrics`."""
        names = () if self.data.eval is None else ("examples", *self.algorithm.reported)
        return [f"eval/{name}" for name in names]

    def with_model(self, path: Path) -> list[str]:
        """Overrides (`--set`) that replace the trained model.

        A reference without a separate model keeps the model that training starts from.
        """
        overrides = super().with_model(path)
        reference = self.roles.reference
        if reference is not None and reference.model is None:
            model = self.model.model_copy(update={"chat_template": None})  # a reference reads tokens
            overrides.append(f"roles.reference.model={model.model_dump_json()}")
        return overrides


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
