"""The length of a step, the age of its samples and who waits for whom, from the seconds of its stages; and the division
of GPUs with which a step is shortest.

With a staleness limit of k, a step's prompts are opened when the version of k steps before is served, and its samples
are trained on k + 1 steps later at the latest: a step takes as long as its longer stage, or as a (k + 1)th of what the
two and the transfer take one after the other. The age of samples is Little's law: as many steps' samples as have been
started and not yet been taken when a version is served. Engines that never wait have started what they sample at once
and what they finished while the version was made; others have started all that k allows.
`tests/orchestrator/plan/test_balance.py` compares with the controller's own loop over simulated engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from troupe.orchestrator.spec.rollout import RolloutSpec


@dataclass(frozen=True)
class Stages:
    """Seconds of the stages of a step."""

    sampling_s: float
    """A step's samples, by engines that always have more to sample."""
    training_s: float
    transfer_s: float = 0.0
    """New weights reach the engines: nobody works."""
    group_s: float = 0.0
    """A group, from its first token to its last."""
    drain: float = 1.0
    """How many times longer sampling takes if nothing follows: until the longest response ends."""
    others_s: float = 0.0
    """Training of other roles at the same time, on separate GPUs."""

    def step_s(self, staleness: int) -> float:
        """Seconds of a step with this limit of staleness."""
        training_s = max(self.training_s, self.others_s)
        in_turn = self.drain * self.sampling_s + training_s + self.transfer_s
        if not staleness:
            return in_turn
        return max(max(self.sampling_s, training_s) + self.transfer_s, in_turn / (staleness + 1))

    def mean_staleness(self, staleness: int) -> float:
        """Versions that the policy is ahead of a sample's first token on average, with this limit."""
        step_s = self.step_s(staleness)
        if step_s > self.sampling_s + self.transfer_s:  # the engines wait
            return float(staleness)
        return min(staleness, (self.group_s + max(self.training_s, self.others_s) + self.transfer_s) / step_s)

    def waits(self, staleness: int) -> tuple[float, float]:
        """Shares of a step in which engines, and the policy, wait for the others."""
        sampling_s = self.sampling_s * (1.0 if staleness else self.drain)
        step_s = self.step_s(staleness)
        return 1 - (sampling_s + self.transfer_s) / step_s, 1 - (self.training_s + self.transfer_s) / step_s


@dataclass(frozen=True)
class Division:
    """A division of the GPUs that sample and train."""

    sampling: int
    training: int
    step_s: float

    def changes(self, spec: RolloutSpec) -> dict[str, int]:
        """The fields of a spec that make the division."""
        engines = self.sampling // spec.roles.rollout.tensor_parallel_size
        return {"roles.rollout.workers": engines, "roles.policy.workers": self.training}


def ratio(value: float) -> str:
    """A ratio of workers in small numbers: `3 : 2`."""
    near = Fraction(max(value, 0.125)).limit_denominator(4)
    return f"{near.numerator} : {near.denominator}"


def divisions(stages: Stages, gpus: tuple[int, int], groups: tuple[int, int], staleness: int) -> tuple[Division, ...]:
    """The divisions of the GPUs, those with the shortest steps first.

    R of N GPUs sample for A / R seconds and the others train for B / (N - R). Both take the same time at R = N A / (A +
    B), which makes the longer one shortest; their sum is least at R = N sqrt(A) / (sqrt(A) + sqrt(B)). `groups`: GPUs
    of an engine, and trainers that share a micro-batch; the numbers are multiples of them.
    """
    (sampling, training), (engine, sharing) = gpus, groups
    both = sampling + training

    def divided(r: int) -> Division:
        scaled = {
            "sampling_s": stages.sampling_s * sampling / r,
            "training_s": stages.training_s * training / (both - r),
        }
        return Division(r, both - r, replace(stages, **scaled).step_s(staleness))

    counts = (r for r in range(engine, both, engine) if (both - r) % sharing == 0)
    return tuple(sorted(map(divided, counts), key=lambda one: one.step_s))
