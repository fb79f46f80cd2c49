"""What of peft's configuration of an adapter is supported."""

from __future__ import annotations

from typing import Any

import pytest

from troupe.workers.contract.adapter_config import unsupported_setting

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_model_below_as_it_is_are_supported(start: object) -> None:
    assert unsupported_setting(PLAIN) == unsupported_setting(PLAIN | {"init_lora_weights": start}) == ""


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "something_new"])
def test_an_adapter_of_changed_weights_is_refused(start: str) -> None:
    """peft changes the model below when it makes and when it loads such an adapter; B A alone is something else."""
    assert f"(init_lora_weights: {start})" in unsupported_setting(PLAIN | {"init_lora_weights": start})
