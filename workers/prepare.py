"""Rollouts, rewards and token scores of one step into the TRAIN table the trainers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from workers.advantages import explained_variance, gae, group_advantages, shaped_rewards, uniform_groups, whiten
from workers.config import AdvantageConfig
from workers.losses import kl_penalty
from workers.messages import TRAIN, TrainRow, TrainSummary
from workers.tensors import IDENTITY_NAMES, Ragged, list_column, ragged

SCORES = ("old_logprobs", "ref_logprobs", "values")
Keep = Sequence[tuple[str, int]]


def prepare(config: AdvantageConfig, keep: Keep, tables: Sequence[pa.Table]) -> tuple[TrainSummary, pa.Table]:
    """Join the tables by sample, compute advantages, and lay out the batch.

    `tables`: ROLLOUTS, REWARDS and token_scores tables in any order and partition, told apart by their columns.
    `keep`: the (prompt_uid, sample_index) of the rows of the result, in that order; samples that are not in it are
    left out before anything is computed. Samples of one prompt_uid form a group.

    Raises ValueError, naming the sample, where one of `keep` is missing, doubled, has attempts that differ between
    tables, no reward with status ok, columns of the wrong length, or a number that is not finite; and where a column
    the estimator needs is absent.
    """
    if not keep:
        raise ValueError("no sample was kept: there is nothing to train on")
    parts = _Join(keep, tables)
    rollouts = parts.rows("rollouts")
    rewards_table = parts.rows("rewards")
    _require_ok(keep, rewards_table)
    scores = {name: parts.rows(name) for name in SCORES if parts.has(name)}
    batch = _Batch(keep, rollouts, rewards_table, scores)
    advantages, returns, metrics = _advantages(config, batch)
    _require_finite(keep, "advantages", advantages, batch.lengths)
    return _summary(batch, advantages, metrics), _train_table(batch, rollouts, advantages, returns)


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

    def __init__(self, keep: Keep, rollouts: pa.Table, rewards: pa.Table, scores: dict[str, pa.Table]) -> None:
        if len(set(keep)) != len(keep):
            raise ValueError("a sample is kept twice")
        self.keep = keep
        self.prompt_lengths = ragged(rollouts.column("prompt_ids")).lengths
        self.lengths = ragged(rollouts.column("response_ids")).lengths
        self.loss_mask = self._column("loss_mask", rollouts).values
        self.rollout_logprobs = self._column("rollout_logprobs", rollouts).values
        self.scores = {name: self._column(name, table).values for name, table in scores.items()}
        self.reward = torch.tensor(rewards.column("reward").to_pylist(), dtype=torch.double)
        _require_finite(keep, "reward", self.reward, torch.ones(len(keep), dtype=torch.int64))
        self.has_process_rewards = any(rewards.column("reward_spans").to_pylist())
        uids = [uid for uid, _ in keep]
        number = {uid: position for position, uid in enumerate(dict.fromkeys(uids))}
        self.groups = torch.tensor([number[uid] for uid in uids])

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


def _advantages(config: AdvantageConfig, batch: _Batch) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, float]]:
    """Flat advantages over all response tokens (0 outside the loss mask), returns with a critic, and metrics."""
    mask = batch.loss_mask
    metrics = _reward_metrics(batch) | _kl_metrics(batch)
    if config.estimator == "group":
        advantages = group_advantages(batch.reward, batch.groups, config.normalize_by_std)[batch.sequence] * mask
        return advantages, None, metrics | _statistics("advantage", advantages[mask])
    if "values" not in batch.scores:
        raise ValueError("the gae estimator needs values, and no critic's table was given")
    if batch.has_process_rewards:
        raise ValueError("process rewards (reward_spans) are not supported by the gae estimator")
    # Only the policy's own tokens are steps: text it did not sample is part of the next state, not an action.
    values, lengths, kl = batch.scores["values"][mask].double(), batch.loss_lengths, None
    if config.kl_coef:
        if "old_logprobs" not in batch.scores or "ref_logprobs" not in batch.scores:
            raise ValueError("kl_coef needs old_logprobs and ref_logprobs, and they were not given")
        kl = (batch.scores["old_logprobs"].double() - batch.scores["ref_logprobs"].double())[mask]
    token_rewards = shaped_rewards(batch.reward, lengths, kl, config.kl_coef, config.reward_clip)
    estimates = gae(token_rewards, values, lengths, config.gamma, config.gae_lambda)
    advantages, returns = (torch.zeros(len(mask), dtype=torch.double) for _ in range(2))
    returns[mask] = estimates + values
    metrics |= _statistics("advantage", estimates) | _statistics("value", values)
    metrics |= _statistics("return", returns[mask])
    metrics["explained_variance"] = explained_variance(values, returns[mask])
    advantages[mask] = estimates
    return (whiten(advantages, mask) if config.whiten else advantages), returns, metrics


def _reward_metrics(batch: _Batch) -> dict[str, float]:
    uniform = uniform_groups(batch.reward, batch.groups).double().mean()
    return _statistics("reward", batch.reward) | {"uniform_group_fraction": float(uniform)}


def _kl_metrics(batch: _Batch) -> dict[str, float]:
    """Mean KL(policy || reference) per loss token, by k3 on the trainer's log-probs, else on the sampler's."""
    if "ref_logprobs" not in batch.scores:
        return {}
    logprobs = batch.scores.get("old_logprobs", batch.rollout_logprobs)
    kl = kl_penalty(logprobs.double(), batch.scores["ref_logprobs"].double(), "k3")[batch.loss_mask]
    return {"kl_ref": float(kl.mean()) if len(kl) else 0.0}


def _statistics(name: str, values: torch.Tensor) -> dict[str, float]:
    if not len(values):
        return {f"{name}_mean": 0.0, f"{name}_std": 0.0}
    return {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(correction=0))}


def _summary(batch: _Batch, advantages: torch.Tensor, metrics: dict[str, float]) -> TrainSummary:
    signal = torch.zeros(len(batch.lengths)).index_add(0, batch.sequence, (advantages != 0).float()) > 0
    rows = zip(
        (batch.prompt_lengths + batch.lengths).tolist(), batch.loss_lengths.tolist(), signal.tolist(), strict=True
    )
    return TrainSummary(rows=tuple(TrainRow(*row) for row in rows), metrics=metrics)


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
