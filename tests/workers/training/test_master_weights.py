"""Digests of the weights that an optimizer changes, and files of kept tables and of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import xxhash

from troupe.workers.contract.messages import KEPT_BATCH, KEPT_TEXTS
from troupe.workers.data.kept_tables import picked, write_tables
from troupe.workers.models.digests import checksums, tensors_digest
from troupe.workers.training.master_weights import own_part


def test_one_bit_changes_the_digest_and_the_split_into_tensors_does_not() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    before = tensors_digest([weights])
    assert tensors_digest([weights[:300].clone(), weights[300:].view(7, 100)]) == before
    weights.view(torch.int32)[500] ^= 1
    assert tensors_digest([weights]) != before
    assert tensors_digest([weights.double()]) != tensors_digest([weights])


def partitioned(*sizes: int, rank: int, world: int) -> list[Any]:
    """Parameters as ZeRO-3 has them: `ds_numel` elements in shares of equal width, of which a rank has one."""
    return [
        SimpleNamespace(
            ds_numel=size, ds_tensor=SimpleNamespace(ds_numel=-(-size // world)), ds_zero_partition_rank=rank
        )
        for size in sizes
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_zero_3_appends_to_a_share_is_not_in_the_digest(world: int) -> None:
    sizes = (5, 1, 8)
    total = 0
    for rank in range(world):
        parameters = partitioned(*sizes, rank=rank, world=world)
        width = sum(parameter.ds_tensor.ds_numel for parameter in parameters)
        flat = torch.arange(width, dtype=torch.float32)
        engine = SimpleNamespace(
            optimizer=SimpleNamespace(fp32_partitioned_groups_flat=[flat], fp16_groups=[parameters])
        )
        parts = list(own_part(engine, 3))
        held = [min(max(size - rank * -(-size // world), 0), -(-size // world)) for size in sizes]
        assert [len(part) for part in parts] == held
        starts = [0, parameters[0].ds_tensor.ds_numel, width - parameters[2].ds_tensor.ds_numel]
        assert [part[0].item() for part in parts if len(part)] == [s for s, n in zip(starts, held, strict=True) if n]
        total += sum(held)
    assert total == sum(sizes)


def test_kept_tables_are_read_back_and_have_the_digest_of_their_file(tmp_path: Path) -> None:
    logprobs = pa.array([[-0.1, float("nan")], None, []], pa.list_(pa.float32()))
    batch = pa.table({"prompt_uid": ["a", "b", "c"], "old_logprobs": logprobs}, metadata={b"schema": b"2"})
    texts = pa.table({"response_ids": pa.array([[1], [2, 3], [4]], pa.list_(pa.int32()))})
    files = write_tables(tmp_path, {KEPT_BATCH: batch, KEPT_TEXTS: picked(texts, (0, 2))})
    for name, entry in files.items():
        content = (tmp_path / name).read_bytes()
        assert (len(content), xxhash.xxh3_128_hexdigest(content)) == (entry.nbytes, entry.digest)
    read = pa.ipc.open_stream((tmp_path / KEPT_BATCH).read_bytes()).read_all()
    assert read.schema.equals(batch.schema, check_metadata=True)
    assert str(read.to_pylist()) == str(batch.to_pylist())
    assert pa.ipc.open_stream((tmp_path / KEPT_TEXTS).read_bytes()).read_all().to_pydict() == {
        "response_ids": [[1], [4]]
    }


def test_a_table_of_many_chunks_and_rows_is_written_whole(tmp_path: Path) -> None:
    part = pa.table({"ids": pa.array([list(range(500))] * 700, pa.list_(pa.int32()))})
    whole = pa.concat_tables([part, part, part])
    (entry,) = write_tables(tmp_path, {"x": whole}).values()
    assert entry.nbytes == (tmp_path / "x").stat().st_size
    assert pa.ipc.open_stream((tmp_path / "x").read_bytes()).read_all().equals(whole)


def test_checksums_change_with_every_byte_and_with_words_that_change_places() -> None:
    """What stands for the bytes of a GPU's tensor; also where they fill no whole word, or begin inside one."""
    flat = torch.arange(1003, dtype=torch.int64).to(torch.uint8)
    seen = {tuple(checksums(flat).tolist())}
    for place in (0, 1, 501, 1000, 1002):
        changed = flat.clone()
        changed[place] += 1
        seen.add(tuple(checksums(changed).tolist()))
    swapped = flat.view(-1)[:1000].view(torch.int32).clone()
    swapped[[3, 200]] = swapped[[200, 3]]
    seen.add(tuple(checksums(torch.cat((swapped.view(torch.uint8), flat[1000:]))).tolist()))
    seen |= {tuple(checksums(flat[:length]).tolist()) for length in (1002, 1000)}
    assert len(seen) == 9
    assert torch.equal(checksums(flat[1:]), checksums(flat[1:].clone()))
    zeros = torch.zeros(8, dtype=torch.uint8)
    assert not torch.equal(checksums(zeros), checksums(zeros[:5])), "the length counts"
