"""The batch of the benchmark packing and its layouts."""

from __future__ import annotations

from benchmarks.packing import LAYOUTS, parse, work
from troupe.workers.models.token_batch import TokenTable


def test_the_layouts_have_the_same_tokens_and_only_padded_rows_have_padding() -> None:
    made = work(parse(["--groups", "5", "--samples", "3", "--micro-batch-tokens", "1024"]))
    table = TokenTable(made.table)
    assert made.tokens == len(table.responses.values) + len(table.prompts.values)
    computed, padding, targets = {}, {}, []
    for layout in LAYOUTS:
        plan = made.plan(layout)
        batches = list(table.batches(plan))
        assert sorted(row for rows in plan.micro_batches for row in rows) == list(range(15))
        computed[layout] = sum(batch.input_ids.numel() - batch.padding for batch in batches)
        padding[layout] = sum(batch.padding for batch in batches)
        targets.append(sorted(token for batch in batches for token in batch.targets.tolist()))
    assert targets[0] == targets[1] == targets[2]
    assert padding["padded"] > 0 == padding["packed"] == padding["packed, prompts shared"]
    assert computed["padded"] == computed["packed"] == made.tokens
    assert made.plan("packed, prompts shared").shared
    assert computed["packed, prompts shared"] < made.tokens - 4 * 2 * 64
