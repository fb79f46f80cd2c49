"""The sample ledger: each dispatched sample ends either as trained or as dropped with a reason, exactly once.

Groups are dispatched as a whole, so the ledger has one entry per open group. Of closed groups it keeps only the counts.
Prompts are dispatched in the order in which they are drawn, so the number of the last draw prevents a second training
of the same prompt visit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST_KINDS = 64
"""Kinds of reasons that are counted separately."""
OTHER = "other reasons"
_LONGEST_KIND = 120
_LONGEST_EXAMPLE = 400
_ERROR = re.compile(r"\berror: (?P<type>[\w.]+)(?:: .*?)?(?P<place> \([^()\s]+:\d+\))?$", re.DOTALL)
"""Description of an exception in a status: its type, its message, and file and line of the user's code."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


class LedgerError(RuntimeError):
    """The ledger's invariant is violated: a sample ends twice, was never dispatched, or is unaccounted for."""


@dataclass
class _Group:
    row: int
    attempt: int
    open: set[int] = field(default_factory=set)
    dropped: dict[int, str] = field(default_factory=dict)
    """Kind of reason by dropped sample of this attempt."""


@dataclass(frozen=True)
class OpenGroup:
    """A dispatched group with samples that are neither trained nor dropped."""

    prompt_uid: str
    row: int
    attempt: int


class Ledger:
    """Accounts for every sample of a run. A sample is identified by (prompt_uid, sample_index, attempt)."""

    def __init__(self, source_of: Callable[[int], str] | None = None) -> None:
        """`source_of`: returns the name of a row's source, or None for a single source."""
        self._source_of = source_of
        self._by_source: dict[str, Counter[str]] = {}
        """Samples dispatched, trained and dropped, by the name of their source."""
        self._groups: dict[str, _Group] = {}
        self._drawn = 0
        """Draw of the prompt that was dispatched last."""
        self._dispatched = 0
        self._in_flight = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._retries = 0
        self._examples: dict[str, str] = {}
        """The first reason of each kind since the start or the resumption."""

    def dispatch(self, prompt_uid: str, row: int, draw: int, samples: int) -> int:
        """Opens a group; returns its attempt number (0). Raises LedgerError if it, or a later prompt, was."""
        if prompt_uid in self._groups or draw <= self._drawn:
            raise LedgerError(f"{prompt_uid} was dispatched before: draw {draw} after draw {self._drawn}")
        self._drawn = draw
        self._groups[prompt_uid] = _Group(row, 0, set(range(samples)))
        self._dispatched += samples
        self._in_flight += samples
        self._count(row, "dispatched", samples)
        return 0

    def retry(self, prompt_uid: str) -> int:
        """Abandons a group's attempt (`is_current` fences its results off), reopens dropped samples; returns the
        new."""
        group = self._group(prompt_uid)
        self._dropped -= Counter(group.dropped.values())
        self._in_flight += len(group.dropped)
        self._count(group.row, "dropped", -len(group.dropped))
        group.open |= group.dropped.keys()
        group.dropped.clear()
        group.attempt += 1
        self._retries += 1
        return group.attempt

    def is_current(self, prompt_uid: str, attempt: int) -> bool:
        """Whether a result of this attempt can still be used."""
        group = self._groups.get(prompt_uid)
        return group is not None and group.attempt == attempt

    def mark_trained(self, prompt_uid: str, *samples: int) -> None:
        """Records samples of a group as trained, all or none. Raises LedgerError if one is unknown or has ended."""
        row = self._group(prompt_uid).row
        self._settle(prompt_uid, samples)
        self._trained += len(samples)
        self._count(row, "trained", len(samples))

    def mark_dropped(self, prompt_uid: str, sample_index: int, reason: str) -> None:
        """Records a sample that will not be trained, with the reason. Raises LedgerError if it has ended already."""
        kind = kind_of(reason)
        if kind not in self._dropped and len(self._dropped) >= MOST_KINDS:
            kind = OTHER
        self._examples.setdefault(kind, reason[:_LONGEST_EXAMPLE])
        group = self._group(prompt_uid)
        group.dropped[sample_index] = kind
        self._settle(prompt_uid, (sample_index,))
        self._dropped[kind] += 1
        self._count(group.row, "dropped", 1)

    def drop_group(self, prompt_uid: str, reason: str) -> None:
        """Drops every open sample of a group."""
        for sample_index in sorted(self._group(prompt_uid).open):
            self.mark_dropped(prompt_uid, sample_index, reason)

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

    def source_counts(self) -> dict[str, dict[str, int]]:
        """dispatched, trained and dropped by the name of the source, or empty for a single source."""
        return {name: dict(counts) for name, counts in self._by_source.items()}

    def drop_reasons(self) -> dict[str, int]:
        """Dropped samples by kind of reason (`kind_of`)."""
        return dict(self._dropped)

    def describe_drops(self) -> str:
        """The kinds of reasons, most frequent first, each with its number of samples and its first reason in full."""
        return "; ".join(f"{count} x {self._examples.get(kind, kind)}" for kind, count in self._dropped.most_common())

    def check(self) -> None:
        """Raises LedgerError unless every dispatched sample is accounted for."""
        counts = self.counts()
        in_flight = sum(len(group.open) for group in self._groups.values())
        ends = counts["trained"] + counts["dropped"]
        if counts["in_flight"] != in_flight or counts["dispatched"] != ends + in_flight:
            raise LedgerError(f"the ledger does not balance: {counts}, {in_flight} open samples")

    def state(self) -> dict[str, Any]:
        """JSON-ready state; groups in flight are kept by name and dispatched again on resume."""
        sources = {"sources": self.source_counts()} if self._by_source else {}
        return sources | {
            "drawn": self._drawn,
            "open": [
                [uid, g.row, g.attempt, sorted(g.open), sorted(g.dropped.items())] for uid, g in self._groups.items()
            ],
            "dispatched": self._dispatched,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "retries": self._retries,
        }

    @classmethod
    def restore(cls, state: dict[str, Any], source_of: Callable[[int], str] | None = None) -> Ledger:
        ledger = cls(source_of)
        ledger._by_source = {name: Counter(counts) for name, counts in state.get("sources", {}).items()}
        # Checkpoints of earlier versions name every closed group; there are as many draws at least.
        ledger._drawn = state["drawn"] if "drawn" in state else len(state["closed"]) + len(state["open"])
        ledger._groups = {
            uid: _Group(row, attempt, set(open_), dict(dropped)) for uid, row, attempt, open_, dropped in state["open"]
        }
        ledger._dispatched = state["dispatched"]
        ledger._in_flight = sum(len(group.open) for group in ledger._groups.values())
        ledger._trained = state["trained"]
        ledger._dropped = Counter(state["dropped"])
        ledger._retries = state["retries"]
        return ledger

    def _count(self, row: int, what: str, samples: int) -> None:
        if self._source_of is not None:
            counts = self._by_source.setdefault(self._source_of(row), Counter(dispatched=0, trained=0, dropped=0))
            counts[what] += samples

    def _group(self, prompt_uid: str) -> _Group:
        group = self._groups.get(prompt_uid)
        if group is None:
            raise LedgerError(f"{prompt_uid} is closed already or was never dispatched")
        return group

    def _settle(self, prompt_uid: str, samples: tuple[int, ...]) -> None:
        """Ends open samples of a group, and closes the group after its last one."""
        group = self._group(prompt_uid)
        left = group.open.difference(samples)
        if len(group.open) - len(left) != len(samples):
            ended = next(s for s in samples if s not in group.open or samples.count(s) > 1)
            raise LedgerError(f"sample {ended} of {prompt_uid} has ended already or was never dispatched")
        group.open = left
        self._in_flight -= len(samples)
        if not group.open:
            del self._groups[prompt_uid]


def kind_of(reason: str) -> str:
    """The part that reasons of one kind share, without messages and quotations: those of user code can differ for
    every sample, and checkpoints must not grow with them."""
    found = _ERROR.search(reason)
    kind = f"{reason[: found.start()]}error: {found['type']}{found['place'] or ''}" if found else reason
    return _QUOTED.sub("...", kind)[:_LONGEST_KIND]
