"""Reference answers, whose mean score is the offset of a reward model."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa

from troupe.orchestrator.data.pools import Pool, RowTable
from troupe.orchestrator.data.prompts import permutation
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.derived.sampling import Offset, answer_column, measured_offsets
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import REFERENCES

MOST = 256
"""Most reference answers for an offset."""


def load_references(spec: RolloutSpec, train: Pool) -> Mapping[Offset, pa.Table]:
    """The reference answers for each offset that is measured (REFERENCES), chosen by the seed. Raises DataError."""
    return {offset: _references(spec, train, offset) for offset in measured_offsets(spec)}


def _references(spec: RolloutSpec, train: Pool, offset: Offset) -> pa.Table:
    sources = spec.data.train_sources()
    pools = dict(zip(sources, train.parts.values() or [train], strict=True))
    in_answer = (answer_column(sources[path]) == offset.column for path in offset.sources)
    answers = RowTable.of((pools[path].rows for path in offset.sources), in_answer)
    table = pa.concat_tables([pools[path].table for path in offset.sources])
    chosen = permutation(table.num_rows, spec.seed, 0)[:MOST].tolist()
    found = []
    for number, row in zip(chosen, table.take(chosen).to_pylist(), strict=True):
        text = row["answer"] if answers[number] else json.loads(row["metadata"]).get(offset.column)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{offset.path}: {row['origin']}: there is no text in '{offset.column}'")
        found.append({"messages": row["messages"], "response": text, "origin": row["origin"]})
    return pa.Table.from_pylist(found, schema=REFERENCES)
