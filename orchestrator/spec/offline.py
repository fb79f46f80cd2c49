"""The spec of a run that trains on given examples: no rollout, no rewards, no sampling, so no fields for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.algorithms_offline import DataFormat, OfflineAlgorithm, OfflineAlgorithmConfig
from orchestrator.spec_checks import INSIDE_ANOTHER, Finding, changed, trainer_problems
from orchestrator.spec_errors import PROBLEMS
from orchestrator.spec_sections import (
    CheckpointConfig,
    DatasetsFolder,
    JsonlFile,
    ParquetFile,
    PromptText,
    ReferenceRole,
    RoleName,
    TrainerRole,
)
from orchestrator.spec_sections import Placement as RolePlacement
from workers.config import Frozen, ModelConfig, ReferenceConfig
from workers.config_offline import ExampleConfig, OfflineConfig


class OfflineRoles(Frozen):
    """The cast."""

    policy: TrainerRole
    """Workers that train the model (the reward model too, where that is what is trained)."""
    reference: ReferenceRole | None = None
    """The frozen reference; needed by dpo, ipo and kto."""

    def present(self) -> dict[RoleName, RolePlacement]:
        """The roles this spec has, by name."""
        roles: dict[RoleName, RolePlacement] = {"policy": self.policy}
        if self.reference is not None:
            roles["reference"] = self.reference
        return roles

    def trainers(self) -> dict[RoleName, TrainerRole]:
        """The roles that train, by name."""
        return {"policy": self.policy}


class OfflineSchedule(Frozen):
    """How long the run is, how a step is cut, and how long anything may take."""

    steps: int = Field(ge=1)
    """Training steps."""
    examples_per_step: int = Field(ge=1)
    """Examples (a pair is one) in a step's batch; data that are through start again, in a new order."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's batch."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates in one pass."""
    start_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest start of a worker: its place in the cluster, its process, its model."""
    score_timeout_s: float = Field(default=600.0, gt=0.0)
    """Longest call to the reference."""
    train_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Longest call to the trainers (tokenise, update, evaluate, save, load)."""
    step_timeout_s: float = Field(default=7200.0, gt=0.0)
    """Longest step; then the run stops with an error."""


class _Examples(PromptText):
    """The columns of a table of examples."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`."""
    response: str = "response"
    """Column with the response (sft, kto)."""
    chosen: str = "chosen"
    """Column with the better answer (reward_model, dpo, ipo, orpo)."""
    rejected: str = "rejected"
    """Column with the worse answer (reward_model, dpo, ipo, orpo)."""
    margin: str | None = None
    """Column with how much better the better answer is (reward_model); null: there is none."""
    answers: str | None = None
    """Column with a list of answers, best first (reward_model) or in any order with `scores` (rrhf: `answers`)."""
    scores: str | None = None
    """Column with a list of scores, one per answer (rrhf: `scores`); with it answers are put in order by score."""
    label: str = "label"
    """Column that says whether the response is good: true or false, 1 or 0 (kto)."""


class JsonlExamples(_Examples, JsonlFile):
    """A file with one JSON object per line."""


class ParquetExamples(_Examples, ParquetFile):
    """A Parquet file."""


class DatasetsExamples(_Examples, DatasetsFolder):
    """A folder written by `save_to_disk` of the `datasets` library."""


ExampleSource = Annotated[JsonlExamples | ParquetExamples | DatasetsExamples, Field(discriminator="kind")]


class OfflineData(Frozen):
    """Where examples come from, and how long they may be."""

    train: ExampleSource
    """Examples to train on."""
    eval: ExampleSource | None = None
    """Examples to evaluate on."""
    held_out: bool = True
    """Leave out of `eval` every example whose prompt also stands in `train`."""
    max_length: int = Field(default=1024, ge=8)
    """Longest prompt plus response, in tokens; a longer example is a bad row."""


class OfflineEvaluation(Frozen):
    """When the model is evaluated on `data.eval`: loss, accuracy, margins, and a reward model's calibration."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between evaluations; 0: none in between."""
    examples: int = Field(default=0, ge=0)
    """Examples per evaluation, always the same ones; 0: all."""
    at_start: bool = True
    """Evaluate the untrained model."""
    at_end: bool = True
    """Evaluate after the last step."""


class OfflineFailures(Frozen):
    """What is borne, and when the run stops."""

    on_bad_row: Literal["skip", "stop"] = "skip"
    """A row of the data that cannot be used is counted and skipped, or stops the run."""
    nonfinite_steps: int = Field(default=3, ge=1)
    """Updates in a row with a gradient that is not finite before the run stops."""


class OfflineOutput(Frozen):
    """What the run writes, besides its log, metrics and checkpoints."""

    folder: str = Field(default="runs", min_length=1)
    """Runs are written to folders in here, by the spec's name."""
    tensorboard: bool = False
    """Write TensorBoard event files."""


class OfflineSpec(Frozen):
    """One run that trains on given examples."""

    name: str = Field(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Name of the run and of its folder: lowercase letters, digits and `-`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything random: order of examples, initial head."""
    model: ModelConfig
    """The model that is trained."""
    roles: OfflineRoles
    """Who takes part, with how many workers and how many resources."""
    algorithm: OfflineAlgorithmConfig
    """What is learnt from the examples."""
    schedule: OfflineSchedule
    """How long the run is, how a step is cut, and how long anything may take."""
    data: OfflineData
    """Where examples come from."""
    evaluation: OfflineEvaluation | None = None
    """When the model is evaluated; left out: never."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run's state is saved."""
    failures: OfflineFailures = OfflineFailures()
    """What is borne, and when the run stops."""
    output: OfflineOutput = OfflineOutput()
    """What the run writes."""

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        problems = [finding for check in _CHECKS for finding in check(self)]
        if problems:
            text = "; ".join(f"{path}: {message}" for path, message in problems)
            raise PydanticCustomError(PROBLEMS, "{text}", {"text": text, "problems": problems})
        return self

    @property
    def row(self) -> OfflineAlgorithm:
        """The algorithm's row."""
        return self.algorithm.row

    @property
    def updates(self) -> int:
        """Optimizer updates over the run."""
        return self.schedule.steps * self.schedule.epochs * self.schedule.minibatches

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where the model is trained."""
        return "cuda" if self.roles.policy.gpus > 0 else "cpu"

    @property
    def reference_in_policy(self) -> bool:
        """Whether the reference lives in the policy's workers."""
        return self.roles.reference is not None and self.roles.reference.colocate_with == "policy"

    @property
    def run_folder(self) -> Path:
        """Where the run is written."""
        return Path(self.output.folder) / self.name

    def trainer_config(self) -> OfflineConfig:
        """What every rank is told."""
        return OfflineConfig(
            model=self.model,
            trainer=self.roles.policy.trainer_config(),
            loss=self.algorithm.loss_config(),
            examples=ExampleConfig(
                max_length=self.data.max_length,
                micro_batch_tokens=self.roles.policy.micro_batch_tokens,
                from_divergence=bool(self.algorithm.from_divergence),
                mismatched="labelled" in self.row.formats,
            ),
            packing=bool(self.algorithm.packing),
            reference_model=self._reference_model() if self.reference_in_policy else None,
            total_updates=self.updates,
            seed=self.seed,
            device=self.device,
        )

    def reference_config(self) -> ReferenceConfig | None:
        """What every reference worker is told; None without one or where it lives in the policy's workers."""
        role = self.roles.reference
        if role is None or self.reference_in_policy:
            return None
        return ReferenceConfig(
            model=self._reference_model(),
            temperature=1.0,
            micro_batch_tokens=role.micro_batch_tokens,
            threads=role.threads or max(1, int(role.cpus)),
            device="cuda" if role.gpus > 0 else "cpu",
        )

    def _reference_model(self) -> ModelConfig:
        role = self.roles.reference
        return role.model if role is not None and role.model is not None else self.model


def data_format(spec: OfflineSpec, source: ExampleSource) -> DataFormat:
    """What a source's rows are, for the spec's algorithm."""
    formats = spec.row.formats
    return "ranked" if "ranked" in formats and source.answers is not None else formats[0]


def columns(format_: DataFormat, source: ExampleSource) -> dict[str, str]:
    """Column of each field that rows of this format are read from."""
    named: dict[DataFormat, dict[str, str | None]] = {
        "demonstrations": {"response": source.response},
        "pairs": {"chosen": source.chosen, "rejected": source.rejected, "margin": source.margin},
        "ranked": {"answers": source.answers or "answers", "scores": source.scores},
        "labelled": {"response": source.response, "label": source.label},
    }
    fields = {"prompt": source.prompt, **named[format_]}
    return {name: column for name, column in fields.items() if column is not None}


_COLUMNS = ("response", "chosen", "rejected", "margin", "answers", "scores", "label")


def _roles(spec: OfflineSpec) -> Iterator[Finding]:
    row, reference = spec.row, spec.roles.reference
    if row.reference and reference is None:
        yield "roles.reference", f"is required: {row.name} compares with a reference"
    if not row.reference and reference is not None:
        yield "roles.reference", f"{row.name} has no reference; remove the role"
    if spec.roles.policy.colocate_with is not None:
        yield "roles.policy.colocate_with", "there is nobody the policy can live with; can: reference with policy"
    if reference is None or reference.colocate_with is None:
        return
    if reference.colocate_with != "policy":
        yield "roles.reference.colocate_with", f"there is no role {reference.colocate_with}; can: policy"
    for name in INSIDE_ANOTHER:
        if name in ReferenceRole.model_fields and changed(reference, name):
            yield f"roles.reference.{name}", "has no effect inside the policy's workers; remove it"


def _algorithm(spec: OfflineSpec) -> Iterator[Finding]:
    for name in spec.algorithm.unused():
        yield f"algorithm.{name}", f"{spec.row.name} does not use it; remove it"


def _schedule(spec: OfflineSpec) -> Iterator[Finding]:
    schedule, policy = spec.schedule, spec.roles.policy
    least = policy.workers * schedule.minibatches * (2 if "labelled" in spec.row.formats else 1)
    if schedule.examples_per_step < least:
        yield (
            "schedule.examples_per_step",
            f"{schedule.examples_per_step} examples are too few for {policy.workers} policy workers times "
            f"{schedule.minibatches} minibatches (at least {least})",
        )
    for name in ("score_timeout_s", "train_timeout_s"):
        if (limit := dict(schedule)[name]) > schedule.step_timeout_s:
            yield f"schedule.{name}", f"{limit:g} is longer than step_timeout_s, {schedule.step_timeout_s:g}"
    if policy.warmup_updates >= spec.updates:
        yield "roles.policy.warmup_updates", f"must be less than the run's {spec.updates} updates"


def _lengths(spec: OfflineSpec) -> Iterator[Finding]:
    policy, reference = spec.roles.policy, spec.roles.reference
    rows = 1 if spec.row.formats == ("demonstrations",) else 2
    need = rows * spec.data.max_length
    if policy.micro_batch_tokens < need:
        what = "one example" if rows == 1 else "the two rows of an example"
        why = f"{policy.micro_batch_tokens} cannot hold {what} of data.max_length, {spec.data.max_length}"
        yield "roles.policy.micro_batch_tokens", why
    if reference is not None and not spec.reference_in_policy and reference.micro_batch_tokens < spec.data.max_length:
        why = f"{reference.micro_batch_tokens} cannot hold one sequence of data.max_length, {spec.data.max_length}"
        yield "roles.reference.micro_batch_tokens", why


def _devices(spec: OfflineSpec) -> Iterator[Finding]:
    for name, role in spec.roles.present().items():
        if role.gpus > 1:
            yield f"roles.{name}.gpus", f"a {name} worker uses one GPU; raise workers instead"
    yield from trainer_problems(spec.roles.trainers())


def _data(spec: OfflineSpec) -> Iterator[Finding]:
    for split, source in (("train", spec.data.train), ("eval", spec.data.eval)):
        if source is None:
            continue
        if "{prompt}" not in source.template:
            yield f"data.{split}.template", "must contain {prompt}, the place of the row's text"
        format_ = data_format(spec, source)
        read = {*columns(format_, source), *({"answers", "scores"} if format_ == "ranked" else ())}
        for name in _COLUMNS:
            if name not in read and dict(source)[name] != type(source).model_fields[name].default:
                yield f"data.{split}.{name}", f"{spec.row.name} on {format_} does not use it; remove it"
        if spec.row.formats == ("ranked",) and source.scores is None:
            yield f"data.{split}.scores", f"is required: {spec.row.name} compares answers by their scores"


def _evaluation(spec: OfflineSpec) -> Iterator[Finding]:
    evaluation = spec.evaluation
    if evaluation is None:
        return
    if spec.data.eval is None:
        yield "evaluation", "needs data.eval"
    if not (evaluation.every_steps or evaluation.at_start or evaluation.at_end):
        yield "evaluation", "never takes place: set every_steps, at_start or at_end, or remove the section"


_CHECKS = (_roles, _algorithm, _schedule, _lengths, _devices, _data, _evaluation)
