"""The data sets of an RL run, read before anything starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from troupe.orchestrator.data.mixture import DrawnSource, drawn_rows
from troupe.orchestrator.data.prompts import PromptPool, load_pools
from troupe.orchestrator.data.summary import Pools, named
from troupe.orchestrator.data.texts import TextPool, load_texts
from troupe.orchestrator.spec.rollout import RolloutSpec


@dataclass(frozen=True)
class RunData:
    """The data sets of a run."""

    train: PromptPool
    held_out: Mapping[str, PromptPool]
    """The pools by the name of their section in `data`."""
    texts: TextPool | None
    refused: Mapping[str, int] = field(default_factory=dict)
    """Prompts rendered before the start that do not fit the model, by the name of their section."""

    @property
    def held_out_digest(self) -> str:
        """Digest of the rows of all held-out sets; empty without one."""
        content = [[name, pool.digest] for name, pool in sorted(self.held_out.items())]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest() if content else ""

    @property
    def pools(self) -> Pools:
        """The pools by the name of their section."""
        return named(self.train, self.held_out, self.texts)

    def drawn(self, state: Mapping[str, Any]) -> list[DrawnSource]:
        """The sources that a checkpoint has drawn from, by the state of their order."""
        texts = [] if self.texts is None else drawn_rows("data.ptx", self.texts, state.get("texts", {}))
        return drawn_rows("data.train", self.train, state["prompts"]) + texts


def load_data(spec: RolloutSpec) -> RunData:
    """Reads the data sets of the spec. Raises DataError."""
    on_bad_row = spec.failures.on_bad_row
    texts = load_texts(spec.data, on_bad_row)
    return RunData(*load_pools(spec.data, on_bad_row, plain=spec.model.plain), texts)
