"""Shortening of a step that is already taken: weights between those before the step and those after it."""

from __future__ import annotations

from typing import Any

import torch

from troupe.workers.training.masters import masters


class HeldStep:
    """This rank's part of the weights before a step. Collective: all ranks hold and shorten together.

    Only the weights move: the optimizer's moments keep what they learnt from the step's gradients.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        """Hold the weights that DeepSpeed's `engine` has now.

        Args:
            engine: DeepSpeed's engine.
            stage: Its ZeRO stage.
        """
        self._engine = engine
        self._stage = stage
        self._before = [master.detach().clone() for master in masters(self._engine, self._stage)]

    @torch.no_grad()
    def shorten(self, factor: float) -> None:
        """Move the weights to before + `factor` * (now - before); 0 restores the held weights bit for bit."""
        for master, before in zip(masters(self._engine, self._stage), self._before, strict=True):
            # Under a factor of 0 a weight that is not finite must not survive as 0 * inf.
            master.copy_(torch.lerp(before, master, factor) if factor else before)
        self._round()

    def _round(self) -> None:
        """Give the model the changed weights in its own precision, with the steps of DeepSpeed's optimizers."""
        optimizer = self._engine.optimizer
        if self._stage == 3:
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_epilogue()  # gathers the small parameters that every rank keeps whole
        elif self._stage > 0:
            optimizer.update_lp_params()
        elif self._engine.bfloat16_enabled():
            for masters, rounded in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for master, parameter in zip(masters, rounded, strict=True):
                    parameter.data.copy_(master.data)
