"""Errors at run time; each names the role, the worker and what it was doing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

Finding = tuple[str, str]
"""(dotted path of a field, what is wrong)"""


class TroupeError(RuntimeError):
    """Base of every error a user should read without a traceback."""


class UsageError(TroupeError):
    """A command line that is not valid."""


class DataError(TroupeError):
    """Data that cannot be used; one line that names the file, and what to change."""


class WorkerError(TroupeError):
    """A call to a worker did not return a result."""

    def __init__(self, worker: str, method: str, detail: str) -> None:
        super().__init__(f"{worker}.{method}: {detail}")
        self.worker = worker
        self.method = method
        self.detail = detail

    def locate(self, step: int, phase: str) -> None:
        """Adds the step and its phase to the message, unless that is done already."""
        if str(self) == (what := f"{self.worker}.{self.method}: {self.detail}"):
            self.args = (f"{what} [step {step}{phase and f', {phase}'}]",)


class WorkerDied(WorkerError):
    """The worker's process has died or cannot be reached."""

    def __init__(self, worker: str, method: str, detail: str, fault: str = "") -> None:
        """`fault` names what ended it, the same text for the same cause, or is empty if unknown."""
        super().__init__(worker, method, detail)
        self.fault = fault


class WorkerTimeout(WorkerError):
    """The worker did not answer within the timeout."""


class WorkerRaised(WorkerError):
    """The worker's method raised an exception; the worker itself is alive."""


class DataLost(WorkerRaised):
    """A table that the call needs was lost with the node that held it."""


class UpdateDamaged(WorkerRaised):
    """The weights did not arrive at the engine as they were published."""


class JudgeLost(WorkerRaised):
    """The judge that the call needs has died, and another one can start."""


class ExportFailed(TroupeError):
    """The trainers' state was saved, but not the model as a Hugging Face folder."""


class EnginesLost(TroupeError):
    """No rollout engine is left, and no restarts remain."""


class EvaluationLost(TroupeError):
    """No engine still has the weights that an evaluation is about."""


class WeightsNotVerified(TroupeError):
    """An engine acknowledged other weights than were sent."""


class BatchFailed(TroupeError):
    """Too many samples of a step failed, or a group kept failing."""


class TrainingDiverged(TroupeError):
    """Too many updates in a row had a gradient that was not finite."""


class DoesNotFit(TroupeError):
    """The cluster does not have the resources that the spec asks for."""


class NeverFits(DoesNotFit, UsageError):
    """The cluster will never have the resources that the spec asks for: starting the run again is of no use."""


class ClusterUnreachable(TroupeError):
    """There is no Ray cluster at the address, or it refuses the connection."""


class StopRequested(TroupeError):
    """The user asked the run to stop."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, or the kind of the error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'X'?` for the nearest known word, or empty if none is near."""
    near = nearest_word(word, known)
    return f"did you mean '{near}'?" if near else ""


def nearest_word(word: str, known: Iterable[str]) -> str:
    """The nearest known word, or empty if none is near: first of all one with the same letters (`gpro`: `grpo`)."""
    words = [*known]
    swapped = (one for one in words if sorted(one) == sorted(word))
    return next(swapped, "") or next(iter(difflib.get_close_matches(word[:60], words, n=1)), "")
