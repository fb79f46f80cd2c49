"""What the updates of a run do besides their losses, and what reaches the engines, as far as a spec defines it."""

from __future__ import annotations

from troupe.orchestrator.algorithms import section
from troupe.orchestrator.algorithms.table import KlPenalty
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.weight_backends import BACKENDS, TransferBackend, automatic_backend


def update_rules(spec: RunSpec) -> tuple[object, ...]:
    """What the updates of a step depend on besides its batch and the configurations of the trainers."""
    shared = spec.seed, spec.schedule.epochs, spec.schedule.minibatches
    if spec.rollouts is None:
        return shared
    rollouts: RolloutSpec = spec.rollouts
    algorithm = rollouts.algorithm
    return (
        *shared,
        rollouts.critic_warmup,
        skips_zero_advantage(rollouts),
        section.kl_penalty(algorithm),
        section.trust_region(algorithm),
        algorithm.kl_stop or None,
        algorithm.kl_states,
    )


def kl_penalty(spec: RunSpec) -> KlPenalty | None:
    """The penalty on KL(old || new), or None for an algorithm without one."""
    return None if spec.rollouts is None else section.kl_penalty(spec.rollouts.algorithm)


def source_losses(spec: RolloutSpec) -> dict[str, PolicyLossConfig]:
    """The losses of the sources that have their own, by name."""
    own = {source.name: source.algorithm for source in spec.data.mixture if source.algorithm is not None}
    return {name: section.source_loss(spec.algorithm, one) for name, one in own.items()}


def needs_whole_samples(spec: RolloutSpec) -> bool:
    """Whether the rows of a sample share a micro-batch: a loss of the run or of a source needs it."""
    losses = section.policy_loss(spec.algorithm), *source_losses(spec).values()
    return any(loss.needs_whole_samples for loss in losses)


def source_advantages(spec: RolloutSpec) -> dict[str, AdvantageConfig]:
    """How rewards become advantages in the sources that name another algorithm for it, by source; without a KL term in
    the reward."""
    named = {source.name: source.algorithm.advantage for source in spec.data.mixture if source.algorithm is not None}
    rows = {name: section.ALGORITHMS[other].advantage for name, other in named.items() if other is not None}
    return {name: row.model_copy(update={"kl_coef": 0.0}) for name, row in rows.items()}


def skips_zero_advantage(spec: RolloutSpec) -> bool:
    """Whether updates leave out rows without an advantage: the loss, unless a custom one, has no other term."""
    loss = section.policy_loss(spec.algorithm)
    only_advantages = loss.objective != "custom" and loss.kl_coef == 0 and loss.entropy_coef == 0
    only_advantages = only_advantages and not any(own.kl_coef for own in source_losses(spec).values())
    only_advantages = only_advantages and loss.distill.coef == 0 and loss.observation_coef == 0
    only_advantages = only_advantages and section.advantage(spec.algorithm).covariance != "penalize"
    follows_divergence = section.kl_penalty(spec.algorithm) or section.natural_gradient(spec.algorithm)
    return only_advantages and follows_divergence is None


def needs_old_logprobs(spec: RolloutSpec) -> bool:
    """Whether the log-probs before the update are computed separately. With one update per step and no KL in the
    reward, the update itself computes them, unless it searches for its step by the loss."""
    advantage = section.advantage(spec.algorithm)
    compares = spec.schedule.updates_per_step > 1 and section.policy_loss(spec.algorithm).has_ratio
    return compares or advantage.reads_old_logprobs or section.natural_gradient(spec.algorithm) is not None


def old_logprobs_at_batch(spec: RolloutSpec) -> bool:
    """Whether these log-probs are computed for the whole batch instead of for each group during generation."""
    return needs_old_logprobs(spec) and spec.schedule.max_staleness > 0


def values_at_batch(spec: RolloutSpec) -> bool:
    """Whether the critic's values are computed for the whole batch instead of during generation: the critic before a
    step's updates exists only once it is the step's turn."""
    return spec.roles.critic is not None and spec.schedule.max_staleness > 0


def overlaps_steps(spec: RunSpec) -> bool:
    """Whether a step may begin before the engines have the weights of the step before."""
    return spec.rollouts is not None and spec.rollouts.schedule.max_staleness > 0


def resolved_backend(spec: RolloutSpec) -> TransferBackend:
    """The weight-transfer back-end, `auto` resolved. Adapters are small: they take the way through memory."""
    if spec.weight_sync.backend != "auto":
        return spec.weight_sync.backend
    if spec.roles.policy.lora is not None:
        return "shm"
    return automatic_backend(spec.device, spec.roles.rollout.colocate_with == "policy").name


def has_weight_file(spec: RunSpec) -> bool:
    """Whether new weights reach the engines in a file in shared memory."""
    return spec.rollouts is not None and BACKENDS[resolved_backend(spec.rollouts)].writes_file
