"""Rollouts, rewards and token scores of one step into the TRAIN table the trainers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from workers.advantage_state import AdvantageState
from workers.advantages import uniform_groups
from workers.config import AdvantageConfig
from workers.estimators import SampledTokens, estimate, statistics
from workers.losses import kl_penalty
from workers.messages import TRAIN, PrepareRequest, TrainRow, TrainSummary
from workers.tensors import IDENTITY_NAMES, Ragged, list_column, ragged

SCORES = ("old_logprobs", "ref_logprobs", "values")
Keep = Sequence[tuple[str, int]]


def prepare(
    config: AdvantageConfig, request: PrepareRequest, tables: Sequence[pa.Table]
) -> tuple[TrainSummary, pa.Table]:
    """Join the tables by sample, compute advantages, and lay out the batch.

    `tables`: ROLLOUTS, REWARDS and token_scores tables in any order and partition, told apart by their columns.
    Samples that `request.keep` does not name are left out before anything is computed.

    Raises ValueError, naming the sample, where one that is kept is missing, doubled, has attempts that differ between
    tables, no reward with status ok, columns of the wrong length, or a number that is not finite; and where a column
    the estimator needs is absent.
    """
    keep = request.keep
    if not keep:
        raise ValueError("no sample was kept: there is nothing to train on")
    parts = _Join(keep, tables)
    rollouts = parts.rows("rollouts")
    rewards_table = parts.rows("rewards")
    _require_ok(keep, rewards_table)
    scores = {name: parts.rows(name) for name in SCORES if parts.has(name)}
    batch = _Batch(request, rollouts, rewards_table, scores)
    estimated = estimate(config, batch.sampled(), request.state)
    advantages = batch.spread(estimated.advantages)
    returns = None if estimated.returns is None else batch.spread(estimated.returns)
    _require_finite(keep, "advantages", advantages, batch.lengths)
    metrics = _reward_metrics(batch) | _kl_metrics(batch) | _text_metrics(batch) | dict(estimated.metrics)
    summary = _summary(batch, advantages, metrics, estimated.state)
    return summary, _train_table(batch, rollouts, advantages, returns)


class _Join:
    """The given tables by kind, and for each kind the row of every kept sample."""

    def __init__(self, keep: Keep, tables: Sequence[pa.Table]) -> None:
        self._keep = keep
        self._kinds: dict[str, list[pa.Table]] = {}
        for table in tables:
            self._kinds.setdefault(_kind(table), []).append(table)
        self._attempts: dict[tuple[str, int], int] = {}

    def has(self, kind: str) -> bool:
        return kind in self._kinds

    def rows(self, kind: str) -> pa.Table:
        """One table of the kind with exactly the kept rows, in order; checks identity and attempts."""
        if kind not in self._kinds:
            raise ValueError(f"no table of {kind} was given")
        table = pa.concat_tables(self._kinds[kind])
        identity = zip(*(table.column(name).to_pylist() for name in IDENTITY_NAMES), strict=True)
        found: dict[tuple[str, int], tuple[int, int]] = {}
        wanted = set(self._keep)
        for row, (uid, index, attempt) in enumerate(identity):
            if (uid, index) in wanted and found.setdefault((uid, index), (row, attempt)) != (row, attempt):
                raise ValueError(f"sample {uid}[{index}] appears twice in {kind}")
        for key in self._keep:
            if key not in found:
                raise ValueError(f"sample {key[0]}[{key[1]}] is missing from {kind}")
            attempt = found[key][1]
            if self._attempts.setdefault(key, attempt) != attempt:
                raise ValueError(
                    f"sample {key[0]}[{key[1]}]: {kind} is of attempt {attempt}, rollouts of {self._attempts[key]}"
                )
        return table.take(pa.array([found[key][0] for key in self._keep], pa.int64()))


class _Batch:
    """The kept rows as tensors: flat per token, and per sample."""

    def __init__(
        self, request: PrepareRequest, rollouts: pa.Table, rewards: pa.Table, scores: dict[str, pa.Table]
    ) -> None:
        keep = request.keep
        if len(set(keep)) != len(keep):
            raise ValueError("a sample is kept twice")
        self.keep = keep
        self.request = request
        self.prompt_lengths = ragged(rollouts.column("prompt_ids")).lengths
        self.responses = ragged(rollouts.column("response_ids"))
        self.lengths = self.responses.lengths
        self.loss_mask = self._column("loss_mask", rollouts).values
        self.rollout_logprobs = self._column("rollout_logprobs", rollouts).values
        self.scores = {name: self._column(name, table).values for name, table in scores.items()}
        self.reward = torch.tensor(rewards.column("reward").to_pylist(), dtype=torch.double)
        _require_finite(keep, "reward", self.reward, torch.ones(len(keep), dtype=torch.int64))
        self.reward_spans: list[list[dict[str, float]]] = rewards.column("reward_spans").to_pylist()
        self.uids = [uid for uid, _ in keep]
        number = {uid: position for position, uid in enumerate(dict.fromkeys(self.uids))}
        self.groups = torch.tensor([number[uid] for uid in self.uids])

    def sampled(self) -> SampledTokens:
        """The policy's own tokens."""
        mask, greedy, rows = self.loss_mask, self.request.greedy_rewards, self.request.prompt_rows
        own = {name: values[mask] for name, values in self.scores.items()}
        return SampledTokens(
            rewards=self.reward,
            groups=self.groups,
            lengths=self.loss_lengths,
            rollout_logprobs=self.rollout_logprobs[mask],
            old_logprobs=own.get("old_logprobs"),
            ref_logprobs=own.get("ref_logprobs"),
            values=own.get("values"),
            prompt_rows=tuple(rows[uid] for uid in dict.fromkeys(self.uids)) if rows else (),
            greedy_rewards=torch.tensor([greedy[uid] for uid in self.uids]).double() if greedy else None,
            steps=self._steps(),
        )

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """float64 over all response tokens: `values` on the policy's own, 0 on the others."""
        result = torch.zeros(len(self.loss_mask), dtype=torch.double)
        result[self.loss_mask] = values
        return result

    def _steps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Process rewards with the ends of their steps counted in the policy's own tokens."""
        if not any(self.reward_spans):
            return None
        own = self.loss_mask.long().cumsum(0)
        first = self.lengths.cumsum(0) - self.lengths
        rewards, ends, samples = [], [], []
        for sample, spans in enumerate(self.reward_spans):
            start, length = int(first[sample]), int(self.lengths[sample])
            if not spans and length:
                # Judged as a whole: one step, to the end of the response.
                spans = [{"end": float(length), "reward": float(self.reward[sample])}]
            for span in spans:
                end = int(span["end"])
                before = int(own[start - 1]) if start else 0
                tokens = int(own[start + end - 1]) - before if 0 < end <= length else 0
                if tokens < 1:
                    uid, index = self.keep[sample]
                    raise ValueError(f"sample {uid}[{index}]: a reward span ends at {end}, where no token of it stands")
                rewards.append(span["reward"])
                ends.append(tokens)
                samples.append(sample)
        return torch.tensor(rewards, dtype=torch.double), torch.tensor(ends), torch.tensor(samples)

    @property
    def sequence(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def loss_lengths(self) -> torch.Tensor:
        """Loss tokens of each sample."""
        return torch.zeros_like(self.lengths).index_add(0, self.sequence, self.loss_mask.long())

    def _column(self, name: str, table: pa.Table) -> Ragged:
        column = ragged(table.column(name))
        for key, have, need in zip(self.keep, column.lengths.tolist(), self.lengths.tolist(), strict=True):
            if have != need:
                raise ValueError(f"sample {key[0]}[{key[1]}]: {name} has {have} entries for {need} response tokens")
        if column.values.is_floating_point():
            _require_finite(self.keep, name, column.values, self.lengths)
        return column


def _reward_metrics(batch: _Batch) -> dict[str, float]:
    uniform = uniform_groups(batch.reward, batch.groups).double().mean()
    return statistics("reward", batch.reward) | {"uniform_group_fraction": float(uniform)}


def _kl_metrics(batch: _Batch) -> dict[str, float]:
    """Mean KL(policy || reference) per loss token, by k3 on the trainer's log-probs, else on the sampler's."""
    if "ref_logprobs" not in batch.scores:
        return {}
    logprobs = batch.scores.get("old_logprobs", batch.rollout_logprobs)
    kl = kl_penalty(logprobs.double(), batch.scores["ref_logprobs"].double(), "k3")[batch.loss_mask]
    return {"kl_ref": float(kl.mean()) if len(kl) else 0.0}


def _text_metrics(batch: _Batch) -> dict[str, float]:
    """How sure the sampler was of its tokens, and how much it repeated itself."""
    sampled = batch.rollout_logprobs[batch.loss_mask].double()
    return {
        "perplexity": float((-sampled.mean()).exp()) if len(sampled) else 0.0,
        "repetition": repetition(batch.responses),
    }


def repetition(responses: Ragged) -> float:
    """Mean over responses of the share of 4-grams that stood in the same response before; shorter ones count as 0."""
    starts = (responses.lengths.cumsum(0) - responses.lengths).tolist()
    shares = []
    for start, length in zip(starts, responses.lengths.tolist(), strict=True):
        tokens = responses.values[start : start + length].tolist()
        grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
        shares.append(1.0 - len(set(grams)) / len(grams) if grams else 0.0)
    return sum(shares) / max(len(shares), 1)


def _summary(batch: _Batch, advantages: torch.Tensor, metrics: dict[str, float], state: AdvantageState) -> TrainSummary:
    signal = torch.zeros(len(batch.lengths)).index_add(0, batch.sequence, (advantages != 0).float()) > 0
    rows = zip(
        (batch.prompt_lengths + batch.lengths).tolist(),
        batch.loss_lengths.tolist(),
        signal.tolist(),
        batch.prompt_lengths.tolist(),
        batch.groups.tolist(),
        strict=True,
    )
    return TrainSummary(rows=tuple(TrainRow(*row) for row in rows), metrics=metrics, state=state)


def _train_table(batch: _Batch, rollouts: pa.Table, advantages: torch.Tensor, returns: torch.Tensor | None) -> pa.Table:
    floats = dict(batch.scores) | {"advantages": advantages}
    if returns is not None:
        floats["returns"] = returns
    columns = []
    for field in TRAIN:
        if field.name == "reward":
            columns.append(pa.array(batch.reward.numpy()))
        elif field.name in floats:
            columns.append(list_column(floats[field.name].float(), batch.lengths, pa.float32()))
        elif field.name in rollouts.column_names:
            columns.append(rollouts.column(field.name).combine_chunks())
        else:
            columns.append(pa.nulls(rollouts.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=TRAIN)


def _kind(table: pa.Table) -> str:
    names = set(table.column_names)
    if "response_ids" in names:
        return "rollouts"
    if {"status", "reward"} <= names:
        return "rewards"
    scores = [name for name in SCORES if name in names]
    if len(scores) != 1:
        raise ValueError(f"a table with columns {sorted(names)} is neither rollouts, rewards nor token scores")
    return scores[0]


def _require_ok(keep: Keep, rewards: pa.Table) -> None:
    columns = (rewards.column("status").to_pylist(), rewards.column("reward").to_pylist())
    for (uid, index), status, reward in zip(keep, *columns, strict=True):
        if status != "ok" or reward is None:
            raise ValueError(f"sample {uid}[{index}] is to be trained on, but has no reward: {status}")


def _require_finite(keep: Keep, name: str, values: torch.Tensor, lengths: torch.Tensor) -> None:
    wrong = (~torch.isfinite(values)).nonzero().flatten()
    if len(wrong):
        row = int(np.searchsorted(lengths.cumsum(0).numpy(), int(wrong[0]), side="right"))
        uid, index = keep[row]
        raise ValueError(f"sample {uid}[{index}]: {name} holds {float(values[wrong[0]])}, which is not finite")
