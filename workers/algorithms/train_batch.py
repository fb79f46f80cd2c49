"""Preparation of a batch: from rollouts, rewards and token scores of one step to a TRAIN table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from troupe.workers.algorithms.advantages import SampledTokens
from troupe.workers.algorithms.estimators import estimate, estimate_by_source
from troupe.workers.algorithms.teachers import Teacher, kl_metrics, targets, train_columns
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.messages import (
    SCORES,
    SQUARE_SUMS,
    TEACHER_TOKENS,
    TRAIN,
    PrepareRequest,
    TrainRow,
    TrainSummary,
    identities,
    kind_of,
)
from troupe.workers.models.ragged import Ragged, list_column, ragged
from troupe.workers.models.token_batch import prompt_numbers

Keep = Sequence[tuple[str, int]]
"""(prompt_uid, sample_index) of samples, or of the rows of samples."""


def prepare(
    config: AdvantageConfig,
    request: PrepareRequest,
    tables: Sequence[pa.Table],
    sources: Mapping[str, AdvantageConfig] = MappingProxyType({}),
    whole: Sequence[str] = (),
) -> tuple[TrainSummary, pa.Table]:
    """Join ROLLOUTS, REWARDS and token_scores tables, in any order and partition, compute advantages, and build the
    TRAIN table.

    `sources`: configurations of sources with their own advantages, by name. `whole`: see `train_columns`.
    Samples outside `request.keep` are removed before anything is computed. Those in `request.masked` are removed
    afterwards: their rewards are part of the statistics of their group, and they carry no loss (overlong filtering:
    DAPO, arXiv 2503.14476, sec. 3.4).

    Raises ValueError if a kept sample is missing, occurs twice, has attempts that differ between tables, no reward with
    status ok, columns of the wrong length, or a number that is not finite (the message names the sample), if a masked
    sample is not kept, a column that the estimator needs is missing, or the estimator cannot take candidates.
    """
    keep = request.keep
    if not keep:
        raise ValueError("no sample is kept: there is nothing to train on")
    if request.candidates and config.estimator != "best_of_group" and not config.compares_reference:
        raise ValueError(f"the {config.estimator} estimator needs samples of the policy, not candidates")
    parts = _Join(keep, tables)
    rollouts = parts.segments("rollouts")
    rewards_table = parts.samples("rewards")
    _require_ok(keep, rewards_table)
    scores = {name: parts.segments(name) for name in SCORES if parts.has(name)}
    taught: dict[str, list[tuple[str, int]]] = {}
    for key in keep:
        for name in request.teachers_of(key):
            taught.setdefault(name, []).append(key)
    teachers = {name: parts.segments(name, own) for name, own in taught.items()}
    batch = _Batch(request, rollouts, rewards_table, scores, teachers)
    sampled, own = batch.sampled(by_turn=config.estimator == "turn_group"), batch.algorithms
    estimated = (
        estimate_by_source({"": config, **sources}, sampled, request.state, own)
        if sources
        else estimate(config, sampled, request.state)
    )
    advantages = batch.spread(estimated.advantages)
    given = {"returns": estimated.returns, "penalties": estimated.penalties}
    added = {name: batch.spread(values) for name, values in given.items() if values is not None}
    _require_finite(batch.rows, "advantages", advantages, batch.lengths)
    metrics = _kl_metrics(batch) | _text_metrics(batch) | dict(estimated.metrics)
    summary = _summary(batch, advantages, metrics, estimated.state)
    table = _train_table(batch, rollouts, {"advantages": advantages, **added}, whole)
    if not request.masked:
        return summary, table
    rows = (~batch.masked[batch.sample]).tolist()
    return replace(summary, rows=tuple(compress(summary.rows, rows))), table.filter(pa.array(rows))


class _Join:
    """The given tables by kind, joined on the kept samples."""

    def __init__(self, keep: Keep, tables: Sequence[pa.Table]) -> None:
        if len(set(keep)) != len(keep):
            raise ValueError("a sample is kept twice")
        self._keep = keep
        self._kinds: dict[str, list[pa.Table]] = {}
        for table in tables:
            self._kinds.setdefault(kind_of(table), []).append(table)
        self._attempts: dict[tuple[str, int], int] = {}
        self._segments: dict[tuple[str, int], int] = {}
        """Rows of each sample, as the first table that was asked for has them."""

    def has(self, kind: str) -> bool:
        return kind in self._kinds

    def samples(self, kind: str) -> pa.Table:
        """One table of the kind with one row for each kept sample, in order. Checks identities and attempts."""
        table, found = self._found(kind)
        for (uid, index), rows in found.items():
            if len(rows) > 1:
                raise ValueError(f"sample {uid}[{index}] appears twice in {kind}")
        return table.take(pa.array([rows[0] for rows in found.values()], pa.int64()))

    def segments(self, kind: str, keep: Keep = ()) -> pa.Table:
        """One table of the kind with the segments of each sample of `keep`, or of all kept ones, in order."""
        table, found = self._found(kind, keep)
        numbers = table.column("segment").to_pylist()
        taken: list[int] = []
        for (uid, index), rows in found.items():
            by_segment = {numbers[row]: row for row in rows}
            if len(by_segment) != len(rows):
                raise ValueError(f"sample {uid}[{index}] appears twice in {kind}")
            expected = self._segments.setdefault((uid, index), len(rows))
            if set(by_segment) != set(range(expected)):
                raise ValueError(f"sample {uid}[{index}]: {kind} has segments {sorted(by_segment)} of {expected}")
            taken += [by_segment[number] for number in range(expected)]
        return table.take(pa.array(taken, pa.int64()))

    def _found(self, kind: str, keep: Keep = ()) -> tuple[pa.Table, dict[tuple[str, int], list[int]]]:
        """All rows of the kind, and the numbers of each sample's rows, in order of the samples."""
        if kind not in self._kinds:
            raise ValueError(f"no table of {kind} was given")
        table = pa.concat_tables(self._kinds[kind])
        found: dict[tuple[str, int], list[int]] = {key: [] for key in keep or self._keep}
        for row, (uid, index, attempt) in enumerate(identities(table)):
            if (uid, index) in found:
                found[uid, index].append(row)
                if self._attempts.setdefault((uid, index), attempt) != attempt:
                    was = self._attempts[uid, index]
                    raise ValueError(f"sample {uid}[{index}]: {kind} is of attempt {attempt}, rollouts of {was}")
        for (uid, index), rows in found.items():
            if not rows:
                raise ValueError(f"sample {uid}[{index}] is missing from {kind}")
        return table, found


class _Batch:
    """The kept samples as tensors: flat per token, per row, and per sample. The rows of a sample, its segments, follow
    each other, so that the tokens that the policy sampled form one sequence: estimators know samples and no rows."""

    def __init__(
        self,
        request: PrepareRequest,
        rollouts: pa.Table,
        rewards: pa.Table,
        scores: dict[str, pa.Table],
        teachers: dict[str, pa.Table],
    ) -> None:
        keep = request.keep
        masked = set(request.masked)
        if unknown := masked - set(keep):
            uid, index = min(unknown)
            raise ValueError(f"sample {uid}[{index}] is masked, but it is not kept")
        self.keep = keep
        self.request = request
        self.masked = torch.tensor([key in masked for key in keep])
        numbers = {key: number for number, key in enumerate(keep)}
        self.rows = [(uid, index) for uid, index, _ in identities(rollouts)]
        self.sample = torch.tensor([numbers[key] for key in self.rows])
        """[rows]: number of the row's sample."""
        self.prompts = ragged(rollouts.column("prompt_ids"))
        self.prompt_lengths = self.prompts.lengths
        self.responses = ragged(rollouts.column("response_ids"))
        self.lengths = self.responses.lengths
        self.turns = rollouts.column("turns")
        candidates = set(request.candidates)
        self.candidates = torch.tensor([key in candidates for key in self.rows])
        self.loss_mask = self._column("loss_mask", rollouts).values
        self.rollout_logprobs = self._column("rollout_logprobs", rollouts).values
        self.scores = {name: self._column(name, table).values for name, table in scores.items()}
        old = scores.get("old_logprobs")
        given = old is not None and SQUARE_SUMS.name in old.column_names
        self.square_sums = self._column(SQUARE_SUMS.name, old).values if given else None
        reference = {name: table for name, table in scores.items() if name == "ref_logprobs"}
        given = teachers if request.teachers else reference
        self.teachers = [self._teacher(name, table) for name, table in given.items()]
        self.reward = torch.tensor(rewards.column("reward").to_pylist(), dtype=torch.double)
        _require_finite(keep, "reward", self.reward, torch.ones(len(keep), dtype=torch.int64))
        self.components: list[list[dict[str, Any]]] = rewards.column("components").to_pylist()
        self.reward_spans: list[list[dict[str, float]]] = rewards.column("reward_spans").to_pylist()
        self.uids = [uid for uid, _ in keep]
        first = dict(zip(reversed(self.rows), reversed(rollouts.column("player").to_pylist()), strict=True))
        self.players = tuple(first[key] or "" for key in keep)
        """Player whose part each sample is, or empty."""
        compared = list(zip(self.uids, self.players, strict=True))
        number = {group: position for position, group in enumerate(dict.fromkeys(compared))}
        self.groups = torch.tensor([number[group] for group in compared])

    def sampled(self, *, by_turn: bool = False) -> SampledTokens:
        """The tokens that the policy sampled, with its turns if these are compared."""
        mask, greedy, rows = self.loss_mask, self.request.greedy_rewards, self.request.prompt_rows
        own = {name: values[mask] for name, values in self.scores.items()}
        return SampledTokens(
            rewards=self.reward,
            groups=self.groups,
            lengths=self.per_sample(self.loss_lengths),
            rollout_logprobs=self.rollout_logprobs[mask],
            old_logprobs=own.get("old_logprobs"),
            ref_logprobs=own.get("ref_logprobs"),
            values=own.get("values"),
            square_sums=None if self.square_sums is None else self.square_sums[mask],
            taught=self._taught(),
            prompt_rows=tuple(rows[uid] for uid in dict.fromkeys(self.uids)) if rows else (),
            greedy_rewards=torch.tensor([greedy[uid] for uid in self.uids]).double() if greedy else None,
            steps=self._steps(),
            turns=self._turns() if by_turn else None,
            masked=self.masked,
            components=self._by_component(),
            normalized=self._normalized(),
            sources=tuple(self.request.sources[uid] for uid in self.uids) if self.request.sources else (),
            players=self.players,
            partners=self._partners(),
        )

    @property
    def algorithms(self) -> list[str]:
        """The source of each sample that has settings of the algorithm, or empty."""
        return [self.request.algorithms.get(uid, "") for uid in self.uids]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """float64 over all response tokens: `values` on tokens that the policy sampled, 0 on the others."""
        result = torch.zeros(len(self.loss_mask), dtype=torch.double)
        result[self.loss_mask] = values
        return result

    def _by_component(self) -> dict[str, torch.Tensor]:
        """`SampledTokens.components`. Samples that were scored by an earlier version have no weights: none of them."""
        found: dict[str, list[tuple[float, float]]] = {}
        for number, own in enumerate(self.components):
            for one in own:
                if one["weight"] is None:
                    return {}
                found.setdefault(one["name"], [(0.0, 0.0)] * len(self.keep))[number] = one["value"], one["weight"]
        return {name: torch.tensor(pairs, dtype=torch.double).T for name, pairs in found.items()}

    def _normalized(self) -> dict[str, torch.Tensor]:
        """`SampledTokens.normalized`."""
        chosen = [{one["name"] for one in own if one["normalize"]} for own in self.components]
        return {name: torch.tensor([name in own for own in chosen]) for name in sorted(set().union(*chosen))}

    def _partners(self) -> torch.Tensor | None:
        """`SampledTokens.partners`: the responses of the reference follow the samples of a group in their order."""
        if not self.request.compared:
            return None
        places = {key: number for number, key in enumerate(self.keep)}
        partners = [places.get((uid, index + self.request.compared[uid]), -1) for uid, index in self.keep]
        return torch.tensor(partners)

    def _steps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Process rewards, with the ends of steps counted in tokens that the policy sampled."""
        if not any(self.reward_spans):
            return None
        own = self.loss_mask.long().cumsum(0)
        lengths = self.per_sample(self.lengths)
        first = lengths.cumsum(0) - lengths
        rewards, ends, samples = [], [], []
        for sample, spans in enumerate(self.reward_spans):
            start, length = int(first[sample]), int(lengths[sample])
            if not spans and length:
                # Rewarded as a whole: one step to the end of the response.
                spans = [{"end": float(length), "reward": float(self.reward[sample])}]
            for span in spans:
                end = int(span["end"])
                before = int(own[start - 1]) if start else 0
                tokens = int(own[start + end - 1]) - before if 0 < end <= length else 0
                if tokens < 1:
                    uid, index = self.keep[sample]
                    raise ValueError(f"sample {uid}[{index}]: the reward span that ends at {end} has no sampled token")
                rewards.append(span["reward"])
                ends.append(tokens)
                samples.append(sample)
        return torch.tensor(rewards, dtype=torch.double), torch.tensor(ends), torch.tensor(samples)

    def _turns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`SampledTokens.turns`. A turn's state is what its row has between the policy's turn before and this one, of a
        row's first turn the prompt: equal tokens are one state."""
        states, found = dict[tuple[int, bytes], int](), list[tuple[int, int, int]]()
        ended = [0] * len(self.keep)
        prompts, responses = (part.values.split(part.lengths.tolist()) for part in (self.prompts, self.responses))
        masks = self.loss_mask.split(self.lengths.tolist())
        for row, (sample, turns) in enumerate(zip(self.sample.tolist(), self.turns.to_pylist(), strict=True)):
            spans = [(turn["start"], turn["end"]) for turn in turns if turn["name"] == "assistant"]
            seen, read = prompts[row], 0
            for start, end in spans or [(0, len(responses[row]))]:
                tokens = int(masks[row][start:end].sum())
                if not tokens:
                    continue
                shown = torch.cat([seen, responses[row][read:start]])
                key = int(self.groups[sample]), shown.numpy().tobytes()
                ended[sample] += tokens
                found.append((ended[sample], sample, states.setdefault(key, len(states))))
                seen, read = seen[:0], end
        ends, samples, numbers = torch.tensor(found, dtype=torch.int64).view(-1, 3).unbind(1)
        return ends, samples, numbers

    def per_sample(self, of_rows: torch.Tensor) -> torch.Tensor:
        """[samples]: the sum of a value over the rows of each sample."""
        return torch.zeros(len(self.keep), dtype=of_rows.dtype).index_add(0, self.sample, of_rows)

    @property
    def sequence(self) -> torch.Tensor:
        """Number of the row of every response token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def by_policy(self) -> torch.Tensor:
        """bool over all response tokens: True if the policy sampled it."""
        return self.loss_mask & ~self.candidates[self.sequence]

    @property
    def loss_lengths(self) -> torch.Tensor:
        """Loss tokens of each row."""
        return torch.zeros_like(self.lengths).index_add(0, self.sequence, self.loss_mask.long())

    def _teacher(self, name: str, table: pa.Table) -> Teacher:
        """What a teacher, or the reference as one, says of the rows that it scores."""
        teachers_of = self.request.teachers_of
        given = bool(self.request.teachers)
        weights = torch.tensor([teachers_of(key).get(name, 0.0) for key in self.rows] if given else 1.0)
        weights = weights.double().expand(len(self.rows))
        names = [field.name for field in TEACHER_TOKENS if field.name in table.column_names]
        tokens = tuple(ragged(table.column(one)) for one in names)
        rows = [key for key, weight in zip(self.rows, weights.tolist(), strict=True) if weight]
        for one, column in zip(names[1:], tokens[1:], strict=True):
            _require_finite(rows, one, column.values, column.lengths)
        return Teacher(name, weights, self._column(name, table, weights > 0).values, tokens)

    def _taught(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the teachers say of the tokens that the policy sampled."""
        if not (self.teachers or self.request.teachers):
            return None
        logprobs, weights = targets(self.teachers, self.sequence)
        return logprobs[self.loss_mask], weights[self.loss_mask]

    def _column(self, name: str, table: pa.Table, chosen: torch.Tensor | None = None) -> Ragged:
        """A column with a number for each response token of the rows, or of the `chosen` ones (bool [rows])."""
        column = ragged(table.column(name))
        rows, lengths = (
            (self.rows, self.lengths)
            if chosen is None
            else (list(compress(self.rows, chosen.tolist())), self.lengths[chosen])
        )
        for key, have, need in zip(rows, column.lengths.tolist(), lengths.tolist(), strict=True):
            if have != need:
                raise ValueError(f"sample {key[0]}[{key[1]}]: {name} has {have} entries for {need} response tokens")
        if column.values.is_floating_point():
            values = column.values
            if name == "rollout_logprobs":  # no engine sampled a candidate, so they are NaN
                values = values.masked_fill(self.candidates[self.sequence], 0.0)
            _require_finite(rows, name, values, lengths)
        return column


def _kl_metrics(batch: _Batch) -> dict[str, float]:
    """Mean KL(policy || model) per loss token, of the reference and each teacher, by k3, and the number of samples that
    a teacher which reads feedback or demonstrations does not teach."""
    logprobs = batch.scores.get("old_logprobs", batch.rollout_logprobs)
    reference = batch.scores.get("ref_logprobs")
    frozen = [] if reference is None else [Teacher("", torch.ones(len(batch.rows)), reference)]
    frozen += [one for one in batch.teachers if batch.request.teachers]
    kept = set(batch.keep)
    untaught = {f"untaught_{name}": float(len(kept & keys)) for name, keys in batch.request.untaught.items()}
    return kl_metrics(frozen, logprobs, batch.sequence, batch.by_policy) | untaught


def _text_metrics(batch: _Batch) -> dict[str, float]:
    """Perplexity of the samples under the sampler, and their repetition."""
    sampled = batch.rollout_logprobs[batch.by_policy].double()
    return {"perplexity": float((-sampled.mean()).exp()) if len(sampled) else 0.0, "repetition": _repetition(batch)}


def _repetition(batch: _Batch) -> float:
    """The mean over the policy's samples of `repetitions`, for a sample the mean over its rows."""
    by_policy = ~batch.candidates
    shares = torch.tensor(repetitions(batch.responses), dtype=torch.double)[by_policy]
    of_samples, rows = batch.sample[by_policy].unique(return_inverse=True, return_counts=True)[1:]
    return float((shares / rows[of_samples]).sum()) / max(len(rows), 1)


def repetitions(responses: Ragged) -> list[float]:
    """Share of 4-grams of each response that occurred earlier in it; 0 for a shorter response."""
    starts = (responses.lengths.cumsum(0) - responses.lengths).tolist()
    shares = []
    for start, length in zip(starts, responses.lengths.tolist(), strict=True):
        tokens = responses.values[start : start + length].tolist()
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        shares.append(1.0 - len(set(grams)) / len(grams) if grams else 0.0)
    return shares


def _summary(batch: _Batch, advantages: torch.Tensor, metrics: dict[str, float], state: AdvantageState) -> TrainSummary:
    signal = torch.zeros(len(batch.lengths)).index_add(0, batch.sequence, (advantages != 0).float()) > 0
    rows = zip(
        (batch.prompt_lengths + batch.lengths).tolist(),
        batch.loss_lengths.tolist(),
        signal.tolist(),
        batch.prompt_lengths.tolist(),
        prompt_numbers([batch.uids[sample] for sample in batch.sample.tolist()], batch.prompts),
        batch.sample.tolist(),
        strict=True,
    )
    return TrainSummary(rows=tuple(TrainRow(*row) for row in rows), metrics=metrics, state=state)


def _train_table(
    batch: _Batch, rollouts: pa.Table, estimated: dict[str, torch.Tensor], whole: Sequence[str]
) -> pa.Table:
    floats, compared = batch.scores | estimated, batch.teachers or batch.request.teachers
    taught = train_columns(batch.teachers, batch.lengths, whole) if compared else {}
    columns = []
    for field in TRAIN:
        if field.name == "reward":
            columns.append(pa.array(batch.reward[batch.sample].numpy()))
        elif field.name == "loss_of":
            columns.append(pa.array([batch.request.algorithms.get(uid) for uid, _ in batch.rows], pa.string()))
        elif field.name in floats:
            columns.append(list_column(floats[field.name].float(), batch.lengths, pa.float32()))
        elif field.name in rollouts.column_names:
            columns.append(rollouts.column(field.name).combine_chunks())
        elif field.name in taught:
            columns.append(taught[field.name])
        else:
            columns.append(pa.nulls(rollouts.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=TRAIN)


def _require_ok(keep: Keep, rewards: pa.Table) -> None:
    columns = (rewards.column("status").to_pylist(), rewards.column("reward").to_pylist())
    for (uid, index), status, reward in zip(keep, *columns, strict=True):
        if status != "ok" or reward is None:
            raise ValueError(f"sample {uid}[{index}] is kept for training but has no reward: {status}")


def _require_finite(keep: Keep, name: str, values: torch.Tensor, lengths: torch.Tensor) -> None:
    wrong = (~torch.isfinite(values)).nonzero().flatten()
    if len(wrong):
        row = int(np.searchsorted(lengths.cumsum(0).numpy(), int(wrong[0]), side="right"))
        uid, index = keep[row]
        raise ValueError(f"sample {uid}[{index}]: {name} has {float(values[wrong[0]])}, which is not finite")
