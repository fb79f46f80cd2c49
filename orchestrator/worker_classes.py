"""The worker class of each role. No other module of the orchestrator names one."""

from __future__ import annotations

from orchestrator.launcher import WorkerClasses


def worker_classes() -> WorkerClasses:
    """The worker class of each role, imported on the first call because torch takes seconds to import."""
    from workers.audit.judge import judge
    from workers.critic import CriticWorker
    from workers.environment import EnvironmentWorker
    from workers.judge import JudgeWorker
    from workers.offline import ExamplePolicyWorker, RewardTrainer
    from workers.policy import PolicyWorker
    from workers.reference import ReferenceWorker
    from workers.reward import RewardWorker
    from workers.rollout import RolloutWorker

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
        audit_judge=judge,
    )
