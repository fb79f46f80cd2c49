"""Runs the scorer of an audit beside the policy: sampled tokens in plain transformers, in a separate process."""

from __future__ import annotations

from troupe.orchestrator.capacity.placement import Placement, Seat
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.roles.table import worker_env
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.audit import ScoreRequest, TokenScores
from troupe.workers.contract.naming import resolve
from troupe.workers.contract.roles import TableRef

_SCORER = "troupe.workers.audit.scorer:score_tokens"


class AuditScorer:
    """Scores tokens on the node of one worker."""

    def __init__(self, spec: RolloutSpec, cluster: Cluster, seat: tuple[Placement, Seat]) -> None:
        """`seat`: that of the worker whose node has the model."""
        self._timeout_s = spec.schedule.score_timeout_s
        self._cluster = cluster
        self._seat = seat

    async def score(self, request: ScoreRequest, *tables: TableRef) -> TokenScores:
        """Scores the tokens of ROLLOUTS tables.

        Raises:
            WorkerError: The process failed, or did not answer in time.
        """
        env = worker_env(request.threads or 1, "cpu")
        return await self._cluster.run_beside(*self._seat, env, resolve(_SCORER), self._timeout_s, request, *tables)
