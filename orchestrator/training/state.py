"""Values that parts of a run keep from step to step; checkpoints contain them."""

from __future__ import annotations

from typing import Literal

from troupe.orchestrator.algorithms.table import KlPenalty
from troupe.orchestrator.spec.sections import BestConfig, CheckpointConfig
from troupe.workers.contract.advantage_state import adapted_coef
from troupe.workers.contract.config_base import Frozen

_TOO_FAR, _STEP = 1.5, 2.0
"""The penalty's coefficient doubles above 1.5 times the target and halves below the target / 1.5."""


class SavedStep(Frozen):
    """A step with one of the best evaluations."""

    step: int
    value: float


class BestState(Frozen):
    """The best evaluations so far, by one metric."""

    metric: str = ""
    """Empty before the first one."""
    mode: Literal["max", "min"] = "max"
    steps: tuple[SavedStep, ...] = ()
    """The best steps, whose checkpoints are kept; the best one first. Step 0 is none of them."""
    value: float | None = None
    """The best value, step 0's included."""
    without_gain: int = 0
    """Evaluations since then."""
    held_out: str = ""
    """Digest of how the evaluations were made, or empty if unknown."""
    rows: str = ""
    """Digest of the held-out rows, or empty if unknown."""

    def of(self, config: BestConfig, held_out: str = "", rows: str = "") -> BestState:
        """This state if it belongs to this metric and to evaluations of these digests, else an empty one."""
        same = (self.metric, self.mode) == (config.metric, config.mode)
        digests = (held_out, self.held_out), (rows, self.rows)
        comparable = all(not (now and before) or now == before for now, before in digests)
        kept = self if same and comparable else BestState(metric=config.metric, mode=config.mode)
        return kept.model_copy(update={"held_out": held_out or kept.held_out, "rows": rows or kept.rows})

    def seen(self, step: int, value: float, keep: int) -> BestState:
        """The state after an evaluation. Of equal values the earlier one is the better."""
        sign = 1.0 if self.mode == "max" else -1.0
        gain = self.value is None or sign * value > sign * self.value
        others = [one for one in self.steps if one.step < step]
        steps = others if step == 0 else [*others, SavedStep(step=step, value=value)]
        steps.sort(key=lambda one: (-sign * one.value, one.step))
        return self.model_copy(
            update={
                "steps": tuple(steps[:keep]),
                "value": value if gain else self.value,
                "without_gain": 0 if gain else self.without_gain + 1,
            }
        )

    def keeping(self, steps: tuple[SavedStep, ...]) -> BestState:
        """The state with other best steps: the previous ones if the newest step's checkpoint cannot be written."""
        return self.model_copy(update={"steps": steps})

    def no_gain(self, checkpoint: CheckpointConfig) -> str:
        """Why the run ends early: `checkpoint.patience` evaluations without a gain. Empty if it does not."""
        if checkpoint.best is None or checkpoint.patience is None:
            return ""
        state = self.of(checkpoint.best)
        if state.without_gain < checkpoint.patience:
            return ""
        return f"no gain of {state.metric} in {state.without_gain} evaluations (checkpoint.patience)"

    @property
    def saved(self) -> frozenset[int]:
        """The steps whose checkpoints are kept."""
        return frozenset(one.step for one in self.steps)


class PenaltyState(Frozen):
    """The penalty on KL(old || new)."""

    kl_old_coef: float = 0.0
    """Its coefficient."""
    kl_old_start: float | None = None
    """Its initial value, or None without a penalty or in a state of an earlier version."""

    def for_penalty(self, penalty: KlPenalty | None) -> PenaltyState:
        """This state with a coefficient that started from the penalty's: a resumed run may have a new one."""
        if penalty is None:
            return self
        same = self.kl_old_coef > 0.0 and self.kl_old_start in (None, penalty.coef)
        coef = self.kl_old_coef if same else penalty.coef
        return self.model_copy(update={"kl_old_coef": coef, "kl_old_start": penalty.coef})

    def after_updates(self, divergence: float, penalty: KlPenalty) -> PenaltyState:
        """The state with the KL penalty's coefficient adapted to the nats per token that a batch moved the policy by
        (arXiv 1707.06347, sec. 4)."""
        coef = self.kl_old_coef
        if divergence > _TOO_FAR * penalty.target:
            coef *= _STEP
        elif divergence < penalty.target / _TOO_FAR:
            coef /= _STEP
        return self.model_copy(update={"kl_old_coef": adapted_coef(coef, penalty.coef)})
