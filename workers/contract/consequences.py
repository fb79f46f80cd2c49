"""What follows from another value of a spec's field, annotated at the field: `Annotated[int, EVALUATED, LIVE]`.

`orchestrator/spec/field_tree.py` reads the annotations of a whole spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Literal

PathKind = Literal["path", "model", "template", "store"]
"""A path on a disk; one that may be a name on the hub, or `none`, or the URL of a store."""


class Counts(IntEnum):
    """Whether a field is part of a digest. In a section a field counts at most as much as the section."""

    NO = auto()
    AT_DEFAULT = auto()
    """Its default counts, whatever its value, so that digests of earlier versions with the field stay."""
    BY_SET = auto()
    """It counts for the held-out sets that use it (`plays_and_judges`)."""
    IF_SET = auto()
    """It counts unless it has its default. For new fields, so that digests of earlier versions stay."""
    YES = auto()


@dataclass(frozen=True)
class Resume:
    """Whether a field may change when a run resumes; by default it may."""

    refused: str = ""
    """Why it may not change."""
    refused_if_off: str = ""
    """Why it may not change if it was null or 0."""
    note: str = ""
    """What the change means."""
    length: bool = False
    """Whether the number of updates follows from the field, over which learning-rate schedules extend."""


@dataclass(frozen=True)
class Consequences:
    """What follows from another value of a field. What is None is as in the section around the field. Of several
    annotations of a field the later ones win. `Frozen.consequences` is for all fields that a class defines."""

    resume: Resume | None = None
    itself: Resume | None = None
    """The same for a section that is added, removed or replaced as a whole, or None for the same as for its fields."""
    evaluation: Counts | None = None
    """Whether evaluations before and after can no longer be compared (`evaluation_digest`)."""
    reward: Counts | None = None
    """Whether rewards before and after can no longer be compared (`reward_digest`)."""
    samples: bool | None = None
    """Whether the finished samples in a checkpoint are sampled again (`kept_samples.fingerprint`)."""
    live: bool = False
    """Whether it can change while the run is active. A section then changes as a whole."""
    path: PathKind | None = None
    """What kind of path it holds, or None if it holds none."""
    of: Mapping[str, Consequences] = field(default_factory=dict, hash=False)
    """Consequences of fields of this section that are others here than elsewhere, by name."""


def refused(why: str) -> Consequences:
    """Consequences of a field that may not change when a run resumes."""
    return Consequences(resume=Resume(refused=why))


def noted(note: str) -> Consequences:
    """Consequences of a field that may change when a run resumes, with a note for the user."""
    return Consequences(resume=Resume(note=note))


ALLOWED = Resume()
NONE = Consequences(resume=ALLOWED, evaluation=Counts.NO, reward=Counts.NO, samples=False)
"""For a field or section without consequences."""
LIVE = Consequences(live=True)
SAMPLED = Consequences(samples=True)
NOT_SAMPLED = Consequences(samples=False)
EVALUATED = Consequences(evaluation=Counts.YES)
EVALUATED_IF_SET = Consequences(evaluation=Counts.IF_SET)
EVALUATED_BY_SET = Consequences(evaluation=Counts.BY_SET)
NOT_EVALUATED = Consequences(evaluation=Counts.NO)
REWARDED = Consequences(reward=Counts.YES)
NOT_REWARDED = Consequences(reward=Counts.NO)
COUNTED = Consequences(evaluation=Counts.YES, reward=Counts.YES)
UNCOUNTED = Consequences(evaluation=Counts.NO, reward=Counts.NO)
NEXT_STEP = noted("from the next step on")
AS_SAMPLED = refused("groups in flight at the checkpoint are sampled again as they were")
OTHER_REWARDS = noted("rewards before and after may not be comparable")
