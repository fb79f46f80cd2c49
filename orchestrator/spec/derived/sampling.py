"""How the sources of `data.eval` are sampled and scored, and which metrics an evaluation reports of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from troupe.workers.contract.config import EvalSampling, RewardFunctionConfig
from troupe.workers.contract.rewards import RIGHT_OR_WRONG


@dataclass(frozen=True)
class HeldOutSettings:
    """How one source of `data.eval` is sampled and scored."""

    section: str
    """Name of its section in `data`: `eval`, or `eval.NAME`."""
    sampling: EvalSampling
    functions: tuple[RewardFunctionConfig, ...]
    """Its reward functions."""
    own_rewards: bool
    """Whether these are its own, instead of `roles.reward`'s."""
    solved_at: float | None
    """A sample with at least this reward counts as solved; None if the reward does not define it."""
    level: str
    """Key of the metadata by whose values results are also reported."""
    environment: str | None = None
    """Name of the environment that its samples are episodes in, empty for one without a name, or None if its samples
    are single responses."""

    @property
    def name(self) -> str:
        """Name of the set; empty for one source without a name."""
        return self.section.partition(".")[2]

    @property
    def label(self) -> str:
        """Its name in reports: `eval` for one source without a name."""
        return self.name or self.section

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with: `eval/`, or `eval/NAME/`."""
        return f"{self.section.replace('.', '/')}/"

    @property
    def votes(self) -> bool:
        """Whether its samples vote for an answer (maj@k)."""
        return self.sampling.samples > 1 and self.solved_at is not None

    @property
    def pass_at(self) -> list[int]:
        """Every k of its pass@k: the powers of two up to the number of samples, and that number."""
        samples = self.sampling.samples
        powers = [1 << power for power in range(1, samples.bit_length()) if 1 << power <= samples]
        return powers if samples in powers or samples == 1 else [*powers, samples]

    @property
    def average(self) -> str:
        """Name of the share of solved samples: `avg` of a named set, `accuracy` of one source without a name."""
        return "avg" if self.name else "accuracy"

    def metric_names(self) -> list[str]:
        """Every metric that an evaluation reports of it, besides those by level."""
        names = ["prompts", "refused", "failed_samples", "reward", "reward_low", "reward_high"]
        names += ["response_tokens", "truncated"]
        if self.solved_at is not None:
            names += [self.average, f"{self.average}_low", f"{self.average}_high", "solved_at"]
            names += [f"pass@{k}" for k in self.pass_at]
        if self.votes:
            names.append(f"maj@{self.sampling.samples}")
        return [f"{self.prefix}{name}" for name in names]

    @property
    def rewards(self) -> str:
        """Key of the functions in `ScoringConfig.sets` that a reward worker calls; empty for the role's."""
        return f"data.{self.section}" if self.own_rewards else ""

    @property
    def rewards_section(self) -> str:
        """Dotted path of its reward functions."""
        return f"data.{self.section}.rewards" if self.own_rewards else "roles.reward.functions"


def right_from(functions: Sequence[RewardFunctionConfig], component: str | None = None) -> float | None:
    """Least sum of reward functions of a right response, or None if they do not define it.

    `component`: label of one of them, whose value (it has no weight) is looked at instead of the sum.
    """
    if component is not None:
        says = any(one.name in RIGHT_OR_WRONG for one in functions if one.component == component)
        return 1.0 if says else None
    weighted = [function for function in functions if function.weight]
    if len(weighted) != 1:
        return None
    (only,) = weighted
    return only.weight if only.name in RIGHT_OR_WRONG and only.weight > 0 else None
