"""Micro-batches of tables of tokens.

Losses and advantages work on 1-D tensors over all response tokens of a micro-batch, with `sequence` as the number of
each token's sequence. Only the model sees packed or padded rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import torch

from troupe.workers.contract.messages import (
    IDENTITY,
    KEPT_TOKENS,
    ROUTES,
    SAMPLER_TOKENS,
    SEGMENT,
    TEACHER_TOKENS,
    TEACHER_WEIGHTS,
    TRAIN,
    RankPlan,
    identities,
    versioned,
)
from troupe.workers.contract.routes import read_routes
from troupe.workers.models.ragged import Ragged, list_column, ragged, ragged_view

FLOAT_COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns", "penalties")


def score_table(
    column: str,
    rows: pa.Table,
    values: torch.Tensor,
    lengths: torch.Tensor,
    read: Sequence[tuple[pa.Field, torch.Tensor]] = (),
) -> pa.Table:
    """A `token_scores` table: identity of `rows`, their flat values under `column`, and fields `read` [T, n]."""
    floats = list_column(values.float(), lengths, pa.float32())
    fields = [field for field in (*IDENTITY, SEGMENT) if field.name in rows.column_names]
    added = [
        (field, list_column(numbers.flatten(), lengths * numbers.shape[1], field.type.value_type))
        for field, numbers in read
    ]
    schema = versioned(*fields, pa.field(column, floats.type, nullable=False), *(field for field, _ in added))
    identity = [rows.column(field.name).combine_chunks() for field in fields]
    return pa.Table.from_arrays([*identity, floats, *(array for _, array in added)], schema=schema)


def not_finite(table: pa.Table) -> dict[tuple[str, int], str]:
    """`ScoreSummary.failed` of a token_scores table."""
    rows: set[int] = set()
    floats = [f.name for f in table.schema if pa.types.is_list(f.type) and pa.types.is_floating(f.type.value_type)]
    for name in floats:
        numbers = ragged(table.column(name))
        rows |= set(numbers.sequence()[~numbers.values.isfinite()].tolist())
    keys = identities(table)
    return {keys[row][:2]: "the score of a token is not finite" for row in sorted(rows)}


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of B sequences with T response tokens in total, packed into one row or padded to one width.
    Results do not depend on neighbours: packed ones attend to their own tokens, padding is on the right."""

    input_ids: torch.Tensor
    """int64 [rows, L]: one packed row, or B padded ones."""
    attention_mask: torch.Tensor
    """Padded: int64 [B, L], 1 on tokens, 0 on padding. Packed: the table of `segment_table`."""
    positions: torch.Tensor
    """int64 [T]: index into the flattened tokens of the one that predicts each response token."""
    targets: torch.Tensor
    """int64 [T]: the response tokens."""
    sequence: torch.Tensor
    """int64 [T]: which of the B sequences each response token belongs to."""
    lengths: torch.Tensor
    """int64 [B]: response tokens of each sequence."""
    last: torch.Tensor
    """int64 [B]: index into the flattened tokens of the last one of each sequence."""
    loss_mask: torch.Tensor
    """bool [T]: False if the policy did not sample the token."""
    rows: torch.Tensor
    """int64 [B]: row numbers in the table the batch was cut from, in host memory."""
    padding: int = 0
    """Tokens of `input_ids` that are padding."""
    position_ids: torch.Tensor | None = None
    """Packed: int64 [1, L], restarting with every sequence; a response's continue its prompt's."""
    kept: Ragged | None = None
    """The tokens that the sampler left to each of the T response tokens, in host memory, or None for all tokens, at all
    of them."""
    routes: torch.Tensor | None = None
    """int16 [rows, L, layers, k]: the experts of each token, -1 for the model's own choice, or None for that at all."""

    def sampled(self, stride: int = 1) -> TokenBatch:
        """The batch with every `stride`-th state at which the policy sampled a token."""
        chosen = self.loss_mask.nonzero().flatten()[::stride]
        kept = None if self.kept is None else self.kept.take(chosen.cpu())
        return replace(self, positions=self.positions[chosen], kept=kept)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on `device`, but row numbers, tables of segments and kept tokens stay in host memory."""
        host = {"rows", "attention_mask"} if is_table(self.attention_mask) else {"rows"}
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in host}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: to_device(tensor, device) for name, tensor in tensors.items()})


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`. A copy to a GPU starts from pinned memory, so that nothing waits for it."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def filler_batch() -> TokenBatch:
    """One token without a response, for a rank without rows: all ranks must run the same collectives."""
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, 1, dtype=torch.int64)
    return TokenBatch(
        input_ids=one,
        attention_mask=torch.ones_like(one),
        positions=none,
        targets=none,
        sequence=none,
        lengths=torch.zeros(1, dtype=torch.int64),
        last=torch.zeros(1, dtype=torch.int64),
        loss_mask=none.bool(),
        rows=none,
    )


class TokenTable:
    """Prompt and response tokens of a ROLLOUTS or TRAIN table, ready to be cut into micro-batches."""

    def __init__(self, table: pa.Table, routed: bool = False) -> None:
        """Read the columns, `routes` only if `routed`: only the policy computes with the engine's experts. Raises
        ValueError for an empty prompt, or rows that are not as long as the responses."""
        self.table = table
        self.prompts = ragged_view(table.column("prompt_ids"))
        self.responses = ragged_view(table.column("response_ids"))
        self.loss_mask = ragged(table.column("loss_mask"))
        if len(self.prompts.lengths) and int(self.prompts.lengths.min()) == 0:
            raise ValueError(f"{_name(table, int(self.prompts.lengths.argmin()))} has an empty prompt")
        _same_lengths(table, "loss_mask", self.loss_mask, self.responses)
        self._kept, self._likeliest = (
            read_kept(table.column(name), self.responses.lengths, name) if name in table.column_names else None
            for name in (KEPT_TOKENS.name, SAMPLER_TOKENS.name)
        )
        self._routes = table.column(ROUTES.name) if routed and ROUTES.name in table.column_names else None
        self._floats: dict[str, Ragged] = {}
        for name in FLOAT_COLUMNS:
            if name in table.column_names and table.column(name).null_count < max(1, table.num_rows):
                self._floats[name] = ragged_view(table.column(name))
                _same_lengths(table, name, self._floats[name], self.responses)
        names = [field.name for field in (*TEACHER_TOKENS, TEACHER_WEIGHTS) if field.name in table.column_names]
        given = [name for name in names if table.column(name).null_count < max(1, table.num_rows)]
        self._teacher = {name: ragged_view(table.column(name)) for name in given}

    @classmethod
    def concat(cls, tables: Sequence[pa.Table], routed: bool = False) -> TokenTable:
        """One table from several; rows count through them in order. Only columns of TRAIN are kept."""
        names = [name for name in TRAIN.names if tables and name in tables[0].column_names]
        if not tables:
            return cls(TRAIN.empty_table())
        return cls(pa.concat_tables([table.select(names) for table in tables]), routed)

    def batch(self, rows: Sequence[int]) -> TokenBatch:
        """The padded micro-batch of the given rows; the filler batch without rows."""
        if not rows:
            return self._filler()
        index = torch.tensor(rows, dtype=torch.int64)
        prompts, responses = self.prompts.take_ids(index), self.responses.take_ids(index)
        width = int((prompts.lengths + responses.lengths).max())
        input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
        sequence = responses.sequence()
        columns = prompts.lengths[sequence] + responses.within()
        input_ids[prompts.sequence(), prompts.within()] = prompts.values
        input_ids[sequence, columns] = responses.values
        total = prompts.lengths + responses.lengths
        return TokenBatch(
            input_ids=input_ids,
            attention_mask=(torch.arange(width)[None, :] < total[:, None]).long(),
            positions=sequence * width + columns - 1,
            targets=responses.values,
            sequence=sequence,
            lengths=responses.lengths,
            last=torch.arange(len(rows)) * width + total - 1,
            loss_mask=self.loss_mask.take(index).values,
            rows=index,
            padding=len(rows) * width - int(total.sum()),
            kept=self._kept_of(index),
            routes=self._routes_of(index, torch.arange(len(rows)) * width, prompts.lengths, input_ids),
        )

    def packed_batch(self, rows: Sequence[int], shared: bool = False) -> TokenBatch:
        """The micro-batch of the given rows without padding, in one row. With `shared`, adjacent rows of one prompt
        have one copy of it, followed by the responses: positions and attended tokens, so results, are those of
        `batch`."""
        if not rows:
            return self._filler()
        index = torch.tensor(rows, dtype=torch.int64)
        unit, counts = self._units(index, shared)
        firsts = counts.cumsum(0) - counts
        prompts, responses = self.prompts.take_ids(index[firsts]), self.responses.take_ids(index)
        widths = prompts.lengths.index_add(0, unit, responses.lengths)
        starts = widths.cumsum(0) - widths
        # Where the responses start: behind the prompt, and behind earlier responses of their unit.
        opened = (starts + prompts.lengths)[unit] + responses.starts - responses.starts[firsts][unit]
        sequence, within = responses.sequence(), responses.within()
        of_prompts = starts[prompts.sequence()] + prompts.within()
        columns = opened[sequence] + within
        input_ids, position_ids = (torch.zeros(1, int(widths.sum()), dtype=torch.int64) for _ in range(2))
        input_ids[0, of_prompts], position_ids[0, of_prompts] = prompts.values, prompts.within()
        input_ids[0, columns] = responses.values
        position_ids[0, columns] = prompts.lengths[unit][sequence] + within
        prompt_ends = (starts + prompts.lengths - 1)[unit]
        return TokenBatch(
            input_ids=input_ids,
            attention_mask=_segments(firsts, starts[unit], opened, prompts.lengths[unit], responses.lengths),
            positions=torch.where(within == 0, prompt_ends[sequence], columns - 1),
            targets=responses.values,
            sequence=sequence,
            lengths=responses.lengths,
            last=torch.where(responses.lengths > 0, opened + responses.lengths - 1, prompt_ends),
            loss_mask=self.loss_mask.take(index).values,
            rows=index,
            position_ids=position_ids,
            kept=self._kept_of(index),
            routes=self._routes_of(index, starts[unit], opened - starts[unit], input_ids),
        )

    def batches(self, plan: RankPlan) -> Iterator[TokenBatch]:
        """The micro-batches of a plan, each cut when it is requested."""
        return (self.cut(rows, plan) for rows in plan.micro_batches)

    def cut(self, rows: Sequence[int], plan: RankPlan) -> TokenBatch:
        """The micro-batch of the given rows, packed or padded according to the plan."""
        return self.packed_batch(rows, plan.shared) if plan.packed else self.batch(rows)

    def _filler(self) -> TokenBatch:
        """The filler batch, with an empty list of kept tokens if others have one: heads must run equally often."""
        return replace(filler_batch(), kept=self._kept_of(torch.zeros(0, dtype=torch.int64)))

    def _kept_of(self, index: torch.Tensor) -> Ragged | None:
        """The tokens that the sampler left to each response token of the rows."""
        return None if self._kept is None else self._words_of(self._kept, index)

    def _words_of(self, words: Ragged, index: torch.Tensor) -> Ragged:
        """The words of each response token of the rows."""
        tokens = Ragged(torch.arange(len(self.responses.values)), self.responses.lengths)
        return words.take(tokens.take(index).values)

    def _routes_of(
        self, index: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """The experts of the tokens of `input_ids`; `prompts`: where the prompt of each row begins in the flattened
        ones; `responses`: how far behind that its response does. Raises ValueError if a row has more than tokens."""
        if self._routes is None:
            return None
        read = {row: read_routes(self._routes[row].as_py()) for row in index.tolist() if self._routes[row].is_valid}
        sizes = {routes.shape[1:] for routes in read.values()}
        if len(sizes) > 1:
            raise ValueError(f"the routes of one batch are of several models: (layers, experts of a token) {sizes}")
        found = torch.full((input_ids.numel(), *(sizes.pop() if sizes else (0, 0))), -1, dtype=torch.int16)
        for row, first, apart in zip(index.tolist(), prompts.tolist(), responses.tolist(), strict=True):
            if (routes := read.get(row)) is None:
                continue
            prompt, response = int(self.prompts.lengths[row]), int(self.responses.lengths[row])
            if len(routes) > prompt + response:
                raise ValueError(f"{_name(self.table, row)} has routes of {len(routes)} tokens")
            numbers = torch.from_numpy(routes.astype(np.int16))
            found[first : first + prompt] = numbers[:prompt]
            behind = numbers[prompt:]
            found[first + apart : first + apart + len(behind)] = behind
        return found.unflatten(0, tuple(input_ids.shape)) if read else None

    def _units(self, index: torch.Tensor, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of each row's unit, and the rows of each unit: adjacent rows with one copy of their prompt."""
        if not shared:
            return torch.arange(len(index)), torch.ones(len(index), dtype=torch.int64)
        return torch.unique_consecutive(self._prompt_numbers[index], return_inverse=True, return_counts=True)[1:]

    @cached_property
    def _prompt_numbers(self) -> torch.Tensor:
        """int64, one per row: equal for rows of one group with the same prompt."""
        numbers = prompt_numbers(self.table.column("prompt_uid").to_pylist(), self.prompts)
        return torch.tensor(numbers, dtype=torch.int64)

    @cached_property
    def _sample_columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(number, loss tokens) of each row's sample, int64, one per row."""
        keys = identities(self.table)
        number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        samples = torch.tensor([number[key] for key in keys], dtype=torch.int64)
        totals = torch.zeros(len(number), dtype=torch.int64)
        totals.index_add_(0, samples[self.loss_mask.sequence()], self.loss_mask.values.long())
        return samples, totals[samples]

    def samples(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(number, loss tokens) of the sample of each response token of `batch`, int64 [T] on its device. The rows of a
        sample have one number, counted in the batch. The loss tokens are from all rows that it has in the table."""
        samples, loss_tokens = self._sample_columns
        lengths = self.responses.lengths[batch.rows]
        numbers = samples[batch.rows].unique(return_inverse=True)[1]
        per_token = (torch.repeat_interleave(of_rows, lengths) for of_rows in (numbers, loss_tokens[batch.rows]))
        number, tokens = (to_device(values, batch.targets.device) for values in per_token)
        return number, tokens

    def with_loss_of(self, batch: TokenBatch, source: str) -> torch.Tensor:
        """bool [T] on the device of `batch`: the response tokens of rows with the loss of a source, or of the run if
        empty."""
        rows = torch.tensor([self._losses[row] == source for row in batch.rows.tolist()], dtype=torch.bool)
        return to_device(rows.repeat_interleave(self.responses.lengths[batch.rows]), batch.targets.device)

    @cached_property
    def _losses(self) -> list[str]:
        """The source whose loss each row has, or empty for the run's."""
        if "loss_of" not in self.table.column_names:  # a table of an earlier version
            return [""] * self.table.num_rows
        return [source or "" for source in self.table.column("loss_of").to_pylist()]

    def teachers(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(ids int64 [T, n, k], log-probs float32 [T, n, k + 1], weights float32 [T, n]) of n teachers' likeliest
        tokens and all others together, and of their losses, on the batch's device, or None if the table has none."""
        if any(field.name not in self._teacher for field in TEACHER_TOKENS):
            return None
        weights = self.teacher_weights(batch, -1 if len(batch.rows) else 1)
        ids, logprobs = (self._teacher[field.name].take(batch.rows).values for field in TEACHER_TOKENS)
        shape, device = (*weights.shape, -1 if len(batch.targets) else 1), batch.targets.device
        return to_device(ids.long().view(shape), device), to_device(logprobs.view(shape), device), weights

    def teacher_weights(self, batch: TokenBatch, teachers: int) -> torch.Tensor:
        """float32 [T, teachers], on the batch's device: weights of the losses of a row's teachers (-1: as many as there
        are) at its tokens. Raises ValueError if the table has none."""
        if TEACHER_WEIGHTS.name not in self._teacher:
            raise ValueError(f"algorithm.distill needs the teachers' weights: the batch lacks {TEACHER_WEIGHTS.name}")
        of_rows = self._teacher[TEACHER_WEIGHTS.name].take(batch.rows).values.view(len(batch.rows), teachers)
        each = of_rows.repeat_interleave(self.responses.lengths[batch.rows], 0)
        return to_device(each, batch.targets.device)

    def likeliest(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [T, k], log-probs float32 [T, k]) of the sampler's likeliest tokens (`SAMPLER_TOKENS`), on the
        batch's device; 0 at tokens without loss that have none. Raises ValueError if a token with loss has none."""
        words = None if self._likeliest is None else self._words_of(self._likeliest, batch.rows)
        found = torch.zeros(len(batch.targets), dtype=torch.bool) if words is None else words.lengths > 0
        if (self.loss_mask.take(batch.rows).values & ~found).any():
            raise ValueError("a token with loss has no likeliest tokens of the sampler: they were not recorded")
        if words is None or not found.any():
            none = torch.zeros(len(found), 0, device=batch.targets.device)
            return none.long(), none
        taken = torch.zeros(len(found), int(words.lengths.max()), dtype=torch.int32)
        taken[found] = words.values.view(-1, taken.shape[1])
        ids, logprobs = taken.chunk(2, 1)
        device = batch.targets.device
        return to_device(ids.long(), device), to_device(logprobs.contiguous().view(torch.float32), device)

    def floats(self, name: str, batch: TokenBatch) -> torch.Tensor | None:
        """float32 [T] of column `name` for the response tokens of `batch`, on its device; None if it is absent."""
        if name not in self._floats:
            return None
        return to_device(self._floats[name].take(batch.rows).values, batch.targets.device)


def _segments(
    firsts: torch.Tensor, starts: torch.Tensor, opened: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor
) -> torch.Tensor:
    """The table of a packed row: a prompt and its first response are a segment, other responses one behind it.
    `firsts`: first row of each unit; `starts`, `opened`: where prompts and responses start."""
    first = torch.zeros(len(starts), dtype=torch.bool)
    first[firsts] = True
    prefixes = torch.stack([starts, prompts], 1).masked_fill(first[:, None], 0)
    return segment_table(
        torch.where(first, starts, opened), torch.where(first, prompts + responses, responses), prefixes
    )


def segment_table(starts: torch.Tensor, lengths: torch.Tensor, prefixes: torch.Tensor) -> torch.Tensor:
    """int64 [1, 1, S, 4]: the mask of a packed row: first and number of tokens of each segment, and of its prefix."""
    table = torch.cat([starts[:, None], lengths[:, None], prefixes], 1)
    return table[lengths > 0][None, None]


def is_table(mask: torch.Tensor | None) -> bool:
    """Whether a model's mask is a table of segments; transformers' own 4-D masks are boolean or floating."""
    return mask is not None and mask.ndim == 4 and mask.dtype == torch.int64


def prompt_numbers(uids: Sequence[str], prompts: Ragged) -> list[int]:
    """A number for each row, equal for rows of one group with the same prompt, which environments change."""
    ends = prompts.lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]] if ends else []
    values = prompts.values.numpy()
    keys = [(uid, values[start:end].tobytes()) for uid, start, end in zip(uids, starts, ends, strict=True)]
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [number[key] for key in keys]


def read_kept(column: pa.ChunkedArray, lengths: torch.Tensor, name: str = KEPT_TOKENS.name) -> Ragged | None:
    """The words of every response token of a column (lists of binaries; null: no words), or None if it has none. Raises
    ValueError if entries and tokens differ in number, or one is no sequence of words."""
    if column.null_count == len(column):
        return None
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    entries = torch.tensor(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
    restricted = torch.tensor(array.is_valid().to_numpy(zero_copy_only=False))
    if wrong := ((entries != lengths) & restricted).nonzero().flatten().tolist():
        row = wrong[0]
        raise ValueError(f"row {row}: {name} has {int(entries[row])} entries for {int(lengths[row])} tokens")
    flat = array.flatten()
    sizes = compute.call_function("binary_length", [flat]).to_numpy(zero_copy_only=False)
    if (sizes % 4).any():
        raise ValueError(f"{name} has an entry that is no sequence of 32-bit words")
    words = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    words[torch.repeat_interleave(restricted, lengths)] = torch.from_numpy(sizes // 4)
    return Ragged(torch.from_numpy(_bytes(flat).view(np.int32)), words)


def _bytes(array: pa.Array) -> np.ndarray:
    """uint8: the bytes of all entries of an array of large binaries."""
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return np.empty(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].copy()


def _name(table: pa.Table, row: int) -> str:
    return f"sample {table.column('prompt_uid')[row]}[{table.column('sample_index')[row]}]"


def _same_lengths(table: pa.Table, name: str, column: Ragged, responses: Ragged) -> None:
    wrong = (column.lengths != responses.lengths).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{_name(table, row)}: {name} has {int(column.lengths[row])} entries for "
            f"{int(responses.lengths[row])} response tokens"
        )
