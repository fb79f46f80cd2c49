"""The worker class of each role. No other module of the orchestrator names one."""

from __future__ import annotations

from troupe.orchestrator.launcher import WorkerClasses


def worker_classes() -> WorkerClasses:
    """The worker class of each role, imported on the first call because torch takes seconds to import."""
    from troupe.workers.audit.scorer import score_tokens
    from troupe.workers.critic import CriticWorker
    from troupe.workers.environment import EnvironmentWorker
    from troupe.workers.judge import JudgeWorker
    from troupe.workers.offline import ExamplePolicyWorker, RewardTrainer
    from troupe.workers.policy import PolicyWorker
    from troupe.workers.reference import ReferenceWorker
    from troupe.workers.reward import RewardWorker
    from troupe.workers.rollout import RolloutWorker

    return WorkerClasses(
        RolloutWorker,
        PolicyWorker,
        CriticWorker,
        ReferenceWorker,
        RewardWorker,
        EnvironmentWorker,
        JudgeWorker,
        example_policy=ExamplePolicyWorker,
        reward_trainer=RewardTrainer,
        audit_judge=score_tokens,
    )
