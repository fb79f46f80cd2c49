"""What every spec has, whichever kind it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

import yaml
from pydantic import Field

from troupe.orchestrator.algorithms.offline import Trains
from troupe.orchestrator.spec.roles import ReferenceRole, RoleResources, TrainerRole
from troupe.orchestrator.spec.sections import (
    BaseEvaluation,
    BaseFailures,
    BaseOutput,
    BaseSchedule,
    CheckpointConfig,
)
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic
from troupe.workers.contract.config_base import Device, Frozen, ModelConfig
from troupe.workers.contract.consequences import EVALUATED_IF_SET, NONE, Consequences, refused

RESOLVED_SPEC = "spec.yaml"
"""File in a run's folder that holds its spec as it is now, with every default written out."""

_ORDER = refused("the order of the data and of sampling follows from it")
_TRAINED_MODEL = Consequences(
    of={
        "path": refused("the weights are the checkpoint's; to train another model, start another run"),
        "adapter": refused("the adapters are the checkpoint's; to train others, start another run"),
        "dtype": refused("the checkpoint's optimizer states are of the other type"),
        "chat_template": EVALUATED_IF_SET,
    }
)


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


class NamedData(Protocol):
    """A section that names data."""

    @property
    def kind(self) -> str: ...


class DataSection(Protocol):
    """The data section, as both kinds have it."""

    @property
    def skip(self) -> int: ...

    def sources(self) -> Mapping[str, NamedData]: ...

    def model_copy(self, *, update: Mapping[str, Any]) -> Self: ...


class RunSpec(Frozen, frozen=True):  # pyright: ignore[reportGeneralTypeIssues]
    """One run, of either kind."""

    # `frozen=True` repeats what `Frozen` says in a place where pyright reads it: fields of a frozen class may be
    # narrowed by a subclass.

    name: Annotated[str, NONE] = Field(max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Name of the run and of its folder: lowercase letters, digits and `-`."""
    seed: Annotated[int, NONE, _ORDER] = Field(default=0, ge=0, lt=2**31)
    """Seed of everything random: order of the data, sampling, initial value or score head."""
    deterministic: Annotated[bool, NONE] = False
    """Train with algorithms that add in a fixed order, so that updates that are repeated on the same GPUs are equal bit
    for bit; slower, above all in attention. On the CPU they are equal without."""
    model: Annotated[ModelConfig, NONE, _TRAINED_MODEL]
    """The model that is trained."""

    if TYPE_CHECKING:
        # Each kind defines these fields, so that a resolved spec keeps the order of that kind's sections.
        algorithm: AlgorithmSection
        roles: RolesSection
        schedule: BaseSchedule
        data: DataSection
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
    def trains(self) -> Trains:
        """What kind of model the run writes."""

    @property
    @abstractmethod
    def device(self) -> Device:
        """Device that the model is trained on."""

    @property
    def trains_adapters(self) -> bool:
        """Whether the run writes adapters instead of whole models."""
        return self.roles.policy.lora is not None

    @property
    def reference_in_policy(self) -> bool:
        """Whether the reference lives in the policy's workers."""
        return "reference" in self.in_policy

    @property
    def in_policy(self) -> set[str]:
        """The reference and the teachers that score in the policy's workers."""
        roles = self.roles.present().items()
        return {name for name, role in roles if isinstance(role, ReferenceRole) and role.colocate_with == "policy"}

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's model: its own, or else the one that training starts from."""
        role = self.roles.reference
        return role.model if role is not None and role.model is not None else self.model

    @property
    def run_folder(self) -> Path:
        """Folder that the run is written to, unless the command line names another."""
        return Path(self.output.folder) / self.name

    def models(self) -> dict[str, ModelConfig]:
        """The models that the spec names, by the dotted path of their section; the trained one first."""
        found = {"model": self.model}
        for name, role in self.roles.present().items():
            for field, value in role:
                if isinstance(value, ModelConfig):
                    found[f"roles.{name}.{field}"] = value
                elif isinstance(value, dict):
                    models = {key: model for key, model in value.items() if isinstance(model, ModelConfig)}
                    found |= {f"roles.{name}.{field}.{key}": model for key, model in models.items()}
        return found

    def updates_of(self, role: str) -> int:
        """Optimizer updates of a role that trains, over the run."""
        return self.schedule.steps * self.schedule.updates_per_step

    def as_yaml(self) -> str:
        """The spec, with every default."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def write(self, file: Path) -> None:
        """Writes the spec, with every default, for its owner only."""
        write_atomic(file, self.as_yaml(), PRIVATE)
