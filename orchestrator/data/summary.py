"""The data sets of a spec: read once before anything starts, counted for the console and the metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from troupe.orchestrator.data.mixture import DrawnSource, drawn_rows
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.data.references import load_references
from troupe.orchestrator.data.texts import load_texts
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sampling import Offset

_SHOWN = 3
"""Bad rows that are shown."""

Pools = Mapping[str, Pool]
"""The pools of a run by the name of their section in `data`."""


@dataclass(frozen=True)
class RunData:
    """The data sets of a run."""

    train: Pool
    held_out: Mapping[str, Pool]
    """The pools by the name of their section in `data`."""
    texts: Pool | None = None
    refused: Mapping[str, int] = field(default_factory=dict)
    """Prompts and examples rendered before the start that do not fit the model, by the name of their section. Examples
    are among the bad rows once all of them are tokenized."""
    references: Mapping[Offset, pa.Table] = field(default_factory=dict)
    """The reference answers (REFERENCES) of each offset that is measured."""

    @property
    def held_out_digest(self) -> str:
        """Digest of the rows of all held-out sets; empty without one."""
        content = [[name, pool.digest] for name, pool in sorted(self.held_out.items())]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest() if content else ""

    @property
    def pools(self) -> Pools:
        return {"train": self.train, **self.held_out} | ({} if self.texts is None else {"ptx": self.texts})

    def drawn(self, state: Mapping[str, Any]) -> list[DrawnSource]:
        """The sources that a checkpoint has drawn from, by the state of its batch source."""
        texts = [] if self.texts is None else drawn_rows("data.ptx", self.texts, state.get("texts", {}))
        return drawn_rows("data.train", self.train, state.get("prompts", state)) + texts


def load_data(spec: RunSpec) -> RunData:
    """Reads the data sets of a spec. Raises DataError."""
    if spec.rollouts is None:
        from troupe.orchestrator.data.examples import load_examples

        train, held_out = load_examples(spec.offline)
        return RunData(train, {} if held_out is None else {"eval": held_out})
    data, on_bad_row = spec.rollouts.data, spec.failures.on_bad_row
    texts = load_texts(data, on_bad_row)
    train, held_out = load_pools(data, on_bad_row, plain=spec.model.plain)
    return RunData(train, held_out, texts, references=load_references(spec.rollouts, train))


def is_held_out(name: str) -> bool:
    """Whether a section of `data` has prompts or examples for evaluation: `eval`, or `eval.NAME` of a named set."""
    return name.partition(".")[0] == "eval"


def describe(pools: Pools) -> list[str]:
    """Number of rows of each pool or source, and what was skipped or removed, one line for each."""
    return [f"data.{section}: {', '.join(_parts(pool))}" for section, pool in by_source(pools).items()]


def by_source(pools: Pools) -> Pools:
    """The pools with one for each source of a mixture instead of the whole: `train.0 (math)`, `train.1 (code)`, ..."""
    found: dict[str, Pool] = {}
    for section, pool in pools.items():
        parts = {f"{section}.{n} ({name})": part for n, (name, part) in enumerate(pool.parts.items())}
        found |= parts or {section: pool}
    return found


def data_metrics(pools: Pools, refused: Mapping[str, int] | None = None) -> dict[str, float]:
    """Used, bad and left out rows of each pool; `refused`: prompts that do not fit, or None if among the bad."""
    metrics = {}
    for name, pool in pools.items():
        metrics[f"data/{name}_rows"] = float(pool.rows)
        metrics[f"data/{name}_bad_rows"] = float(pool.bad_rows)
        own = "source/{}/rows" if name == "train" else f"data/{name}.{{}}_rows"
        metrics |= {own.format(source): float(part.rows) for source, part in pool.parts.items()}
        if is_held_out(name):
            metrics[f"data/{name}_removed_rows"] = float(pool.left_out)
    return metrics | {f"data/{name}_refused_rows": float(count) for name, count in (refused or {}).items()}


def _parts(pool: Pool) -> list[str]:
    parts = [f"{pool.rows} rows"]
    if pool.left_out:
        parts.append(f"{pool.left_out} removed because data.train has the same prompt, spaces aside (data.held_out)")
    if pool.alike:
        parts.append(f"{pool.alike} ask what data.train asks with another system message or template, and stay")
    if pool.repeated:
        parts.append(f"{pool.repeated} repeat an earlier one, spaces aside (dedupe: true leaves them out)")
    if pool.deduped:
        parts.append(f"{pool.deduped} that repeat an earlier one left out (dedupe)")
    if pool.shared:
        parts.append(f"{pool.shared} have a prompt of an earlier source")
    if pool.contradicted:
        parts.append(f"{pool.contradicted} have another answer than an earlier row with the same prompt")
    parts += [f"{count} {kind} left out" for kind, count in pool.skipped.items()]
    parts += [f"warning: {doubt}" for doubt in pool.doubts]
    if pool.bad_rows:
        more = "; ..." if pool.bad_rows > _SHOWN else ""
        parts.append(f"{pool.bad_rows} bad rows skipped: {'; '.join(pool.problems[:_SHOWN])}{more}")
    return parts
