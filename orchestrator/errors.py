"""What can go wrong at run time, each naming role, worker and what it was doing."""

from __future__ import annotations


class TroupeError(RuntimeError):
    """Base of every error a user should read without a traceback."""


class UsageError(TroupeError):
    """A command line that cannot work."""


class WorkerError(TroupeError):
    """A call to a worker did not return a result."""

    def __init__(self, worker: str, method: str, detail: str) -> None:
        super().__init__(f"{worker}.{method}: {detail}")
        self.worker = worker
        self.method = method
        self.detail = detail


class WorkerDied(WorkerError):
    """The worker's process is gone (or cannot be reached)."""


class WorkerTimeout(WorkerError):
    """The worker did not answer within the bound."""


class WorkerRaised(WorkerError):
    """The worker's method raised; the worker itself is still there."""


class DataLost(WorkerRaised):
    """A table that the call needs is gone, with the node that held it."""


class EnginesLost(TroupeError):
    """No rollout engine is left and the restart budget is spent."""


class WeightsNotVerified(TroupeError):
    """An engine acknowledged other weights than those that were sent."""


class BatchFailed(TroupeError):
    """Too many samples of a step failed, or a group kept failing."""


class TrainingDiverged(TroupeError):
    """Too many updates in a row had a gradient that was not finite."""


class DoesNotFit(TroupeError):
    """The cluster has not the resources the spec asks for."""


class ClusterUnreachable(TroupeError):
    """There is no Ray cluster at the address, or it does not let us in."""


class StopRequested(TroupeError):
    """The user asked the run to stop."""
