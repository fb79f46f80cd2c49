"""The schema of a run's samples: what was sampled, how it was rewarded, and what was trained.

`trajectories/step-NNNNNN.parquet` of a run folder has one row for each row of the ROLLOUTS tables of the step's batch.
"""

from __future__ import annotations

import pyarrow as pa

from troupe.workers.contract.messages import (
    IDENTITY_NAMES,
    KEPT_TOKENS,
    REWARDS,
    ROLLOUTS,
    ROUTES,
    SAMPLER_TOKENS,
    TEACHER_TOKENS,
    TEACHER_WEIGHTS,
    versioned,
)

_FLOATS = pa.list_(pa.float32())

TRAINED = (
    pa.field("trained", pa.bool_(), nullable=False),  # the row was a row of the step's TRAIN table
    pa.field("advantages", _FLOATS),
    pa.field("returns", _FLOATS),
    pa.field("old_logprobs", _FLOATS),
    pa.field("ref_logprobs", _FLOATS),
    pa.field("values", _FLOATS),
    pa.field("logprobs", _FLOATS),  # of the policy in the step's last update that had the row
    pa.field("entropy", _FLOATS),  # of the policy in that update
    *TEACHER_TOKENS,  # null unless the run keeps them
    TEACHER_WEIGHTS,
)
"""What was trained: over response tokens, null if it was not computed."""

SAMPLES = versioned(
    pa.field("step", pa.int32(), nullable=False),
    # The others are large, of no use without the model.
    *(field for field in ROLLOUTS if field not in (KEPT_TOKENS, SAMPLER_TOKENS, ROUTES)),
    *(field for field in REWARDS if field.name not in IDENTITY_NAMES),
    *TRAINED,
)
"""All columns, in order."""


def conform(table: pa.Table, schema: pa.Schema, **constants: object) -> pa.Table:
    """The table with the columns of `schema`, in its order. A column that the table lacks has one of `constants` in
    every row, or is null: files of earlier versions stay readable."""

    def column(field: pa.Field) -> pa.ChunkedArray | pa.Array:
        if field.name in table.column_names:
            return table[field.name].cast(field.type)
        return pa.repeat(pa.scalar(constants.get(field.name), field.type), table.num_rows)

    arrays = [column(field) for field in schema]
    fields = [
        field.with_nullable(True) if array.null_count else field for field, array in zip(schema, arrays, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))
