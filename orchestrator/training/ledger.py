"""The account of every sample: each dispatched sample ends as exactly one of trained or dropped(reason).

A group is the unit of dispatch, so entries are kept per group; a closed group is reduced to counts and to its
name, which stays to refuse a second training of the same prompt visit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class LedgerError(RuntimeError):
    """The books do not balance: a sample would be trained twice, or was never dispatched."""


@dataclass
class _Group:
    row: int
    attempt: int
    open: set[int] = field(default_factory=set)
    dropped: dict[int, str] = field(default_factory=dict)
    """Samples of this attempt that were dropped, and why."""


@dataclass(frozen=True)
class OpenGroup:
    """A dispatched group whose samples have not all reached their end."""

    prompt_uid: str
    row: int
    attempt: int


class Ledger:
    """Books of one run. Identity of a sample: (prompt_uid, sample_index, attempt)."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._closed: set[str] = set()
        self._dispatched = 0
        self._in_flight = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._retries = 0

    def dispatch(self, prompt_uid: str, row: int, samples: int) -> int:
        """Open a group; returns its attempt number (0)."""
        if prompt_uid in self._groups or prompt_uid in self._closed:
            raise LedgerError(f"{prompt_uid} was dispatched before")
        self._groups[prompt_uid] = _Group(row, 0, set(range(samples)))
        self._dispatched += samples
        self._in_flight += samples
        return 0

    def retry(self, prompt_uid: str) -> int:
        """Abandon the current attempt; its late result is fenced off, and what was dropped of it is open again.

        Returns the new attempt number.
        """
        group = self._group(prompt_uid)
        self._dropped -= Counter(group.dropped.values())
        self._in_flight += len(group.dropped)
        group.open |= group.dropped.keys()
        group.dropped.clear()
        group.attempt += 1
        self._retries += 1
        return group.attempt

    def is_current(self, prompt_uid: str, attempt: int) -> bool:
        """Whether a result of this attempt may still be used."""
        group = self._groups.get(prompt_uid)
        return group is not None and group.attempt == attempt

    def trained(self, prompt_uid: str, *samples: int) -> None:
        """These samples took part in an update. Where one of them cannot have, none is entered."""
        self._settle(prompt_uid, samples)
        self._trained += len(samples)

    def dropped(self, prompt_uid: str, sample_index: int, reason: str) -> None:
        """The sample will not be trained, and why."""
        self._group(prompt_uid).dropped[sample_index] = reason
        self._settle(prompt_uid, (sample_index,))
        self._dropped[reason] += 1

    def drop_group(self, prompt_uid: str, reason: str) -> None:
        """Drop every sample of the group that has not reached its end."""
        for sample_index in sorted(self._group(prompt_uid).open):
            self.dropped(prompt_uid, sample_index, reason)

    def open_groups(self) -> list[OpenGroup]:
        """Groups in flight, in order of dispatch."""
        return [OpenGroup(uid, group.row, group.attempt) for uid, group in self._groups.items()]

    def counts(self) -> dict[str, int]:
        """dispatched, trained, dropped, in_flight, retries; dispatched = trained + dropped + in_flight."""
        return {
            "dispatched": self._dispatched,
            "trained": self._trained,
            "dropped": self._dropped.total(),
            "in_flight": self._in_flight,
            "retries": self._retries,
        }

    def drop_reasons(self) -> dict[str, int]:
        """Dropped samples by reason."""
        return dict(self._dropped)

    def check(self) -> None:
        """Raise :class:`LedgerError` unless every dispatched sample is accounted for."""
        counts = self.counts()
        in_flight = sum(len(group.open) for group in self._groups.values())
        ends = counts["trained"] + counts["dropped"]
        if counts["in_flight"] != in_flight or counts["dispatched"] != ends + in_flight:
            raise LedgerError(f"the books do not balance: {counts}")

    def state(self) -> dict[str, Any]:
        """JSON-ready state; groups in flight are kept by name, to be dispatched again on resume."""
        return {
            "closed": sorted(self._closed),
            "open": [
                [uid, g.row, g.attempt, sorted(g.open), sorted(g.dropped.items())] for uid, g in self._groups.items()
            ],
            "dispatched": self._dispatched,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "retries": self._retries,
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Ledger:
        """The ledger as :meth:`state` left it."""
        ledger = cls()
        ledger._closed = set(state["closed"])
        ledger._groups = {
            uid: _Group(row, attempt, set(open_), dict(dropped)) for uid, row, attempt, open_, dropped in state["open"]
        }
        ledger._dispatched = state["dispatched"]
        ledger._in_flight = sum(len(group.open) for group in ledger._groups.values())
        ledger._trained = state["trained"]
        ledger._dropped = Counter(state["dropped"])
        ledger._retries = state["retries"]
        return ledger

    def _group(self, prompt_uid: str) -> _Group:
        group = self._groups.get(prompt_uid)
        if group is None:
            known = "closed already" if prompt_uid in self._closed else "never dispatched"
            raise LedgerError(f"{prompt_uid} was {known}")
        return group

    def _settle(self, prompt_uid: str, samples: tuple[int, ...]) -> None:
        group = self._group(prompt_uid)
        left = group.open.difference(samples)
        if len(group.open) - len(left) != len(samples):
            ended = next(s for s in samples if s not in group.open or samples.count(s) > 1)
            raise LedgerError(f"sample {ended} of {prompt_uid} has reached its end before")
        group.open = left
        self._in_flight -= len(samples)
        if not group.open:
            del self._groups[prompt_uid]
            self._closed.add(prompt_uid)
