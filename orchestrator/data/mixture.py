"""Several sources in one resumable order, in proportion to their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.pools import Pool, RowTable
from troupe.orchestrator.data.prompts import Ordered, PromptOrder, PromptPick, PromptSource, skipped
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.derived import sampling
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import SourceShare


def source_seed(seed: int, name: str) -> int:
    """Seed of a source's order: sources of equal size are not permuted alike."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()) >> 1


@dataclass
class _Drawn:
    """One source, and how far it is drawn."""

    share: SourceShare
    start: int
    order: PromptSource
    due: float
    """Virtual time of its next draw: the source with the least is drawn next. A draw costs 1 / weight."""


class PromptMixture:
    """Draws from several sources endlessly; each has its own order of passes. After n draws a source with weight w
    has had about n w / sum(w): the source whose next draw is due first is drawn; its draws are 1 / w apart, from
    half of that on. One that has had its passes (`repeats`) is not drawn again. Weights and passes that change at
    a resumption count from there on."""

    def __init__(
        self,
        pools: Sequence[Ordered],
        shares: Sequence[SourceShare],
        seed: int,
        curriculum: Curriculum | None = None,
        section: str = "data.train",
    ) -> None:
        self._section = section
        starts = (0, *accumulate(pool.rows for pool in pools))
        self._curriculum = curriculum
        self._sources = [
            _Drawn(share, start, PromptSource(pool, source_seed(seed, share.name)), 0.5 / share.weight)
            for pool, share, start in zip(pools, shares, starts, strict=False)
        ]
        self._time = 0.0
        """Virtual time of the last draw."""

    def next(self) -> PromptPick:
        """The next prompt. Raises DataError if every source has had its passes."""
        while True:
            open_sources = [source for source in self._sources if not source.order.exhausted(source.share.repeats)]
            if not open_sources:
                raise DataError(
                    f"every source of {self._section} has had its passes (repeats): there are no more prompts"
                )
            drawn = min(open_sources, key=lambda source: source.due)
            pick = drawn.order.next()
            row = drawn.start + pick.row
            if self._curriculum is not None and not self._curriculum.draws(row, pick.epoch):
                continue
            self._time = drawn.due
            drawn.due += 1.0 / drawn.share.weight
            draws = sum(source.order.draws for source in self._sources)
            return PromptPick(f"{drawn.share.name}-{pick.prompt_uid}", row, pick.epoch, draws)

    def state(self) -> dict[str, Any]:
        sources = {
            source.share.name: source.order.state() | {"due": source.due, "weight": source.share.weight}
            for source in self._sources
        }
        curriculum = {} if self._curriculum is None else {"curriculum": self._curriculum.state()}
        return {"sources": sources, "time": self._time, **curriculum}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position that `state` returned. Weights and passes may differ: they count from here on. Raises
        DataError if the sources, their rows or the seed differ, or the state is damaged."""
        saved, names = state.get("sources"), [source.share.name for source in self._sources]
        if not isinstance(saved, dict) or list(saved) != names:
            had = ", ".join(saved) if isinstance(saved, dict) else "one without a name"
            raise DataError(f"cannot resume: the sources of {self._section} are not the checkpoint's ({had})")
        for source in self._sources:
            own = saved[source.share.name]
            source.order.restore(own)
            source.due = _number(own, "due")
        # Checkpoints of earlier versions have neither the time nor weights.
        self._time = _number(state, "time") if "time" in state else min(source.due for source in self._sources)
        for source in self._sources:
            own, weight = saved[source.share.name], source.share.weight
            before = _number(own, "weight") if "weight" in own else weight
            if source.due < self._time:  # it had had its passes; it begins again as every source does
                source.due = self._time + 0.5 / weight
            elif before != weight:
                source.due = self._time + (source.due - self._time) * before / weight
        if self._curriculum is not None and "curriculum" in state:
            last = self._sources[-1]
            self._curriculum.restore(state["curriculum"], last.start + last.order.rows)


def _number(state: Mapping[str, Any], name: str) -> float:
    value = state.get(name)
    if not isinstance(value, float) or not 0.0 <= value < math.inf:
        raise DataError(f"cannot resume: the order's state is damaged ({name} {value!r})")
    return value


class OrderedParts(Ordered, Protocol):
    """A pool, and the sources of a mixture by name."""

    @property
    def parts(self) -> Mapping[str, Ordered]: ...


def prompt_order(
    spec: RolloutSpec | OfflineSpec, pool: OrderedParts, curriculum: Curriculum | None = None
) -> PromptOrder:
    """The order of a run's prompts or examples, from the first one that it draws."""
    mixture, seed = spec.data.mixture, spec.seed
    parts = [pool.parts[source.name] for source in mixture]
    order = PromptMixture(parts, mixture, seed, curriculum) if mixture else PromptSource(pool, seed, curriculum)
    return skipped(order, spec.data.skip)


def group_settings(spec: RolloutSpec, pool: Pool) -> RowTable[GroupSettings]:
    """How groups are sampled and scored, by the row of their prompt."""
    sizes = [part.rows for part in pool.parts.values()] or [pool.rows]
    return RowTable.of(sizes, sampling.group_settings(spec))


def curriculum_of(spec: RolloutSpec, settings: RowTable[GroupSettings]) -> Curriculum | None:
    config = spec.data.curriculum
    if config is None:
        return None
    solved_at = tuple(own.solved_at for own in settings.entries if own.solved_at is not None)
    if len(solved_at) < len(settings.entries):
        raise DataError("the curriculum does not know which samples are solved: set data.curriculum.solved_at")
    return Curriculum(config, spec.seed, RowTable(settings.starts, solved_at))


def epochs(state: Mapping[str, Any]) -> dict[str, int]:
    """Finished passes over every source, by name, from the state of an order; an only source has no name."""
    sources = state.get("sources")
    return {"": state["epoch"]} if sources is None else {name: own["epoch"] for name, own in sources.items()}


def prompts_drawn(state: Mapping[str, Any]) -> int | None:
    """The number of prompts or examples that an order has drawn at a state, for `skipped`, or None for one with a
    curriculum, whose draws depend on results."""
    sources = state["sources"].values() if "sources" in state else [state]
    return None if "curriculum" in state else sum(own["epoch"] * own["rows"] + own["position"] for own in sources)


DrawnSource = tuple[str, Mapping[str, Any], str]
"""(section, state of its order, digest) of a source that a checkpoint has drawn from."""


def drawn_rows(section: str, pool: Pool, state: Mapping[str, Any]) -> list[DrawnSource]:
    """Every source that a checkpoint has drawn from."""
    sources = state.get("sources")
    if not pool.parts or not isinstance(sources, dict):
        return [(section, state, pool.digest)]
    parts = enumerate(pool.parts.items())
    return [(f"{section}.{n}", sources[name], part.digest) for n, (name, part) in parts if name in sources]
