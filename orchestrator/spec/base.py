"""What every spec has, whichever kind it is, and what each kind answers for itself."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import yaml
from pydantic import Field

from troupe.orchestrator.algorithms.offline import Trains
from troupe.orchestrator.algorithms.table import KlPenalty
from troupe.orchestrator.spec.checks import machine as preflight
from troupe.orchestrator.spec.checks.adapters import (
    adapter_template,
    forgotten_templates,
    unverified_adapters,
    wrong_adapters,
)
from troupe.orchestrator.spec.checks.machine import Finding
from troupe.orchestrator.spec.field_tree import field_tree
from troupe.orchestrator.spec.sections import (
    AlarmConfig,
    BaseEvaluation,
    BaseFailures,
    BaseOutput,
    BaseSchedule,
    CheckpointConfig,
    ReferenceRole,
    RoleResources,
    TrainerRole,
)
from troupe.workers.contract.adapter_config import ADAPTER_CONFIG
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic
from troupe.workers.contract.config import ALL_LINEAR, Device, Frozen, LoraConfig, ModelConfig, ReferenceConfig
from troupe.workers.contract.consequences import EVALUATED_IF_SET, NONE, Consequences, Counts, refused

_ORDER = refused("the order of the data and of sampling follows from it")
_TRAINED_MODEL = Consequences(
    of={
        "path": refused("the weights are the checkpoint's; to train another model, start another run"),
        "adapter": refused("the adapters are the checkpoint's; to train others, start another run"),
        "dtype": refused("the checkpoint's optimizer states are of the other type"),
        "chat_template": EVALUATED_IF_SET,
    }
)


class PromptRoom(NamedTuple):
    """Tokens that a prompt may have."""

    tokens: int
    field: str
    """The field that sets the limit."""
    words: str
    """The limit as the subject of a relative clause: "more than the N tokens that WORDS"."""


class AlgorithmSection(Protocol):
    """The algorithm section, as both kinds have it."""

    @property
    def name(self) -> str: ...


class RolesSection(Protocol):
    """The roles section, as both kinds have it."""

    @property
    def policy(self) -> TrainerRole: ...

    @property
    def reference(self) -> ReferenceRole | None: ...

    def present(self) -> dict[str, RoleResources]: ...

    def trainers(self) -> dict[str, TrainerRole]: ...


class RunSpec(Frozen, frozen=True):  # pyright: ignore[reportGeneralTypeIssues]
    """One run, of either kind."""

    # `frozen=True` repeats what `Frozen` says in a place where pyright reads it: fields of a frozen class may be
    # narrowed by a subclass.

    name: Annotated[str, NONE] = Field(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Name of the run and of its folder: lowercase letters, digits and `-`."""
    seed: Annotated[int, NONE, _ORDER] = Field(default=0, ge=0, lt=2**31)
    """Seed of everything random: order of the data, sampling, initial value or score head."""
    model: Annotated[ModelConfig, NONE, _TRAINED_MODEL]
    """The model that is trained."""

    if TYPE_CHECKING:
        # Each kind defines these fields, so that a resolved spec keeps the order of that kind's sections.
        algorithm: AlgorithmSection
        roles: RolesSection
        schedule: BaseSchedule
        evaluation: BaseEvaluation | None
        checkpoint: CheckpointConfig = CheckpointConfig()
        failures: BaseFailures
        output: BaseOutput

    @property
    def rollouts(self) -> Any:
        """The spec itself if it is a `RolloutSpec`; None if it trains on offline data."""
        return None

    @property
    def offline(self) -> Any:
        """The spec itself if it is an `OfflineSpec`; None if it trains on rollouts."""
        return None

    @property
    @abstractmethod
    def prompt_room(self) -> PromptRoom:
        """Tokens that a prompt may have."""

    def room_for(self, section: str) -> PromptRoom:
        """Tokens that a prompt of this section in `data` may have (of a mixture: `train.0`, or `train.0 (math)`)."""
        return self.prompt_room

    @property
    @abstractmethod
    def trains(self) -> Trains:
        """What kind of model the run writes."""

    @property
    def trains_adapters(self) -> bool:
        """Whether the run writes adapters instead of whole models."""
        return self.roles.policy.lora is not None

    @property
    @abstractmethod
    def device(self) -> Device:
        """Device that the model is trained on."""

    @property
    @abstractmethod
    def batch_description(self) -> str:
        """Size of a step's batch, as text: `128 samples`."""

    @property
    @abstractmethod
    def trainer(self) -> str:
        """Row of the table of roles for the workers that train the model."""

    @property
    @abstractmethod
    def batch_bytes(self) -> int:
        """Most bytes of the object store that the tables of one step and of steps in progress take."""

    @property
    @abstractmethod
    def probe_interval_s(self) -> float:
        """Seconds between two rounds of health probes of the workers besides the trainers."""

    @property
    def overlaps_steps(self) -> bool:
        """Whether a step may begin before the engines have the weights of the step before."""
        return False

    @property
    def alarm(self) -> AlarmConfig | None:
        """When a rising reward counts as reward hacking, or None if never."""
        return None

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """The penalty on KL(old || new); None for an algorithm without one."""
        return None

    @property
    def kl_start(self) -> float | None:
        """Start value of the adaptive coefficient of the KL term in the reward, or None if it does not adapt."""
        return None

    @property
    def update_rules(self) -> tuple[object, ...]:
        """What the updates of a step depend on besides its batch and the configurations of the trainers."""
        return self.seed, self.schedule.epochs, self.schedule.minibatches

    @property
    def has_weight_file(self) -> bool:
        """Whether new weights reach the engines in a file in shared memory."""
        return False

    def models(self) -> dict[str, ModelConfig]:
        """The models that the spec names, by the dotted path of their section; the trained one first."""
        sections = {f"roles.{name}.model": getattr(role, "model", None) for name, role in self.roles.present().items()}
        return {"model": self.model} | {path: model for path, model in sections.items() if model is not None}

    @abstractmethod
    def sequence_lengths(self) -> dict[str, int]:
        """Every limit on the length of a sequence in tokens, by the dotted path of its field."""

    @abstractmethod
    def data_sources(self) -> Mapping[str, preflight.DataSource]:
        """The sections that name data, by their name in the section `data`."""

    @abstractmethod
    def evaluation_metrics(self) -> list[str]:
        """The metrics that every evaluation of this spec reports; empty without held-out data."""

    def evaluated_by(self) -> dict[str, Any]:
        """What else decides what an evaluation gives, by set; JSON-ready."""
        return {}

    def evaluation_digest(self) -> str:
        """Digest of how evaluations are made: the values of those with the same one can be compared."""
        fields = field_tree(type(self))
        # Digests of earlier versions have these sections, with or without fields that count.
        content = {name: dict(self)[name] and {} for name in ("data", "evaluation", "roles")}
        content |= fields.counted(self, "evaluation", Counts.YES)
        if others := fields.counted(self, "evaluation", Counts.IF_SET):
            content["others"] = others
        if sets := self.evaluated_by():
            content["sets"] = sets
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    def reward_digest(self) -> str:
        """Digest of what gives the rewards of training: equal ones are comparable. Empty if nothing does."""
        return ""

    @property
    @abstractmethod
    def scoring_temperature(self) -> float:
        """Temperature that the reference divides its logits by."""

    def missing(self) -> list[Finding]:
        """What the spec names and this machine does not have: models, data, libraries."""
        return [
            *preflight.missing_models(self.models()),
            *preflight.missing_templates(self.models()),
            *preflight.broken_weights(self.models()),
            *preflight.headless(self.models(), self.trains),
            *self.model_problems(self.models()),
            *wrong_adapters(self.models(), self.trains, self.trained_adapters()),
            *preflight.missing_data(self.data_sources()),
            *preflight.missing_packages(self.packages()),
        ]

    def packages(self) -> Iterator[tuple[str, str]]:
        """(field, module) of every feature of the spec whose package is one of an extra.

        Those of reward functions and environments are found when these are loaded.
        """
        yield from preflight.data_packages(self.data_sources())
        yield from ((f"output.sinks.{number}", sink) for number, sink in enumerate(self.output.sinks))
        if self.output.prometheus is not None:
            yield "output.prometheus", "prometheus_client"
        yield from ((path, "peft") for path, _, _ in self.trained_adapters())

    def model_problems(self, models: Mapping[str, ModelConfig]) -> list[Finding]:
        """What is wrong with models of this spec by their config.json.

        Args:
            models: Models by the path of their section, each in a folder of this machine.
        """
        return [
            *preflight.wrong_kinds(models, self.trains),
            *preflight.quantized(models),
            *preflight.smaller_vocabularies(models),
            *preflight.too_long(models, self.sequence_lengths()),
            *preflight.undivided_heads(models, self._shared_models()),
            *self._adapted_experts(models),
        ]

    def trained_adapters(self) -> Iterator[tuple[str, str, LoraConfig]]:
        """(path of the section, section of the model below, section) of all adapters that train."""
        for name, role in self.roles.trainers().items():
            own = f"roles.{name}.model"
            if role.lora is not None:
                yield f"roles.{name}.lora", own if own in self.models() else "model", role.lora

    def _adapted_experts(self, models: Mapping[str, ModelConfig]) -> Iterator[Finding]:
        """Adapters of experts."""
        for path, section, lora in self.trained_adapters():
            if lora.targets == ALL_LINEAR and section in models and preflight.has_experts(models[section]):
                layers = ", ".join(preflight.ATTENTION)
                yield f"{path}.targets", f"adapters of experts are not supported; name other layers: [{layers}]"

    def _shared_models(self) -> Iterator[tuple[str, str, int]]:
        """(section, field, `sequence_parallel_size`) of every model that workers run on parts of the same rows."""
        for name, role in self.roles.trainers().items():
            own = f"roles.{name}.model"
            section = own if own in self.models() else "model"
            yield section, f"roles.{name}.sequence_parallel_size", role.sequence_parallel_size
            if name == "policy" and self.reference_in_policy:
                yield "roles.reference.model", f"roles.{name}.sequence_parallel_size", role.sequence_parallel_size

    def warnings(self) -> list[str]:
        """What works, and is probably not meant: one line each. Here: adapters of models that nothing verifies or that
        were trained with other chat templates, held-out data that no evaluation uses, profiles of what the run does not
        have, and restarts that cannot be."""
        return [
            *unverified_adapters(self.models()),
            *forgotten_templates(self.models()),
            *self._unused_eval(),
            *self._missing_profiles(),
            *self._limited_restarts(),
        ]

    def _unused_eval(self) -> Iterator[str]:
        if self.evaluation is None and any(name.partition(".")[0] == "eval" for name in self.data_sources()):
            yield "data.eval: the run never evaluates on it; add `evaluation: {}` (without it, only `troupe eval` does)"

    def _missing_profiles(self) -> Iterator[str]:
        profile, trainers = self.output.profile, self.roles.trainers().values()
        if profile is None:
            return
        most, ranks = self.schedule.steps, max(role.data_parallel_size for role in trainers)
        if late := [str(step) for step in profile.steps if step > most]:
            yield f"output.profile.steps: the run has {most} steps; not recorded: {', '.join(late)}"
        if beyond := [str(rank) for rank in profile.ranks if rank >= ranks]:
            yield f"output.profile.ranks: no trainer has rank {', '.join(beyond)} (ranks count from 0)"

    def _limited_restarts(self) -> Iterator[str]:
        """Trainers that can be restarted only in some of the steps, if the spec sets one of the two fields."""
        failures, every = self.failures, min(self.checkpoint.every_steps or self.schedule.steps, self.schedule.steps)
        kept, defaults = failures.replay_steps, type(failures).model_fields
        ours = all(dict(failures)[name] == defaults[name].default for name in ("replay_steps", "trainer_restarts"))
        if not ours and failures.trainer_restarts and kept < every:
            yield (
                f"failures.replay_steps: {kept}, but {every} steps lie between checkpoints (checkpoint.every_steps): a "
                f"trainer that is lost more than {kept} steps after one is not restarted, and the run ends"
            )

    def with_model(self, path: Path) -> list[str]:
        """Overrides (`--set`) that replace the trained model, or add an adapter to it if the folder holds one."""
        if (path / ADAPTER_CONFIG).is_file():
            return [f"model.adapter={json.dumps(str(path))}", *self.with_template(path)]
        return [f"model.path={json.dumps(str(path))}", "model.adapter=null", "model.revision=null"]

    def with_template(self, adapter: Path) -> list[str]:
        """Overrides with which the trained model renders as an adapter was trained, if the spec has no template."""
        trained = None if self.model.chat_template else adapter_template(adapter, Path(self.model.path))
        return [] if trained is None else [f"model.chat_template={json.dumps(trained)}"]

    def as_yaml(self) -> str:
        """The spec, with every default."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def write(self, file: Path) -> None:
        """Writes the spec, with every default, for its owner only."""
        write_atomic(file, self.as_yaml(), PRIVATE)

    @property
    def longest_sequence(self) -> int:
        """Length of the longest sequence that is trained on, in tokens."""
        return max(self.sequence_lengths().values())

    @property
    def run_folder(self) -> Path:
        """Folder that the run is written to, unless the command line names another."""
        return Path(self.output.folder) / self.name

    @property
    def reference_in_policy(self) -> bool:
        """Whether the reference lives in the policy's workers."""
        return self.roles.reference is not None and self.roles.reference.colocate_with == "policy"

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's model: its own, or else the one that training starts from."""
        role = self.roles.reference
        return role.model if role is not None and role.model is not None else self.model

    @property
    def colocated_reference_model(self) -> ModelConfig | None:
        """The reference's model if the policy's workers hold it, else None."""
        return self.reference_model if self.reference_in_policy else None

    def reference_config(self) -> ReferenceConfig | None:
        """Configuration of each reference worker; None without a reference or with one in the policy's workers."""
        role = self.roles.reference
        if role is None or self.reference_in_policy:
            return None
        return role.worker_config(
            ReferenceConfig,
            model=self.reference_model,
            temperature=self.scoring_temperature,
            device=role.device,
            threads=role.threads or max(1, int(role.cpus) // role.shards),
        )
