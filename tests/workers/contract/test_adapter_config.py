"""What of peft's configuration of an adapter is supported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from troupe.workers.contract.adapter_config import parse_settings, unsupported_setting
from troupe.workers.contract.text import printable

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_model_below_as_it_is_are_supported(start: object) -> None:
    assert unsupported_setting(PLAIN) == unsupported_setting(PLAIN | {"init_lora_weights": start}) == ""


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("r", value) for value in (True, -8, 0.5, "8", [8], 1 << 40)),
        *(("lora_alpha", value) for value in (True, -1, float("nan"), json.loads("1e400"), "x", [16])),
        *(("target_modules", value) for value in (5, [["a"], {}], {"a": 1}, [1])),
        *(("modules_to_save", value) for value in ([{"a": 1}], "score", 3)),
        *(("use_rslora", value) for value in ("yes", 3, [])),
        *(("base_model_name_or_path", value) for value in (5, ["x"])),
        *(("bias", value) for value in ({}, ["all"], "\x1b[2J")),
        *(("init_lora_weights", value) for value in ([1], {"a": "\x1b[2J"})),
        *(("peft_type", value) for value in ("\x1b[2J", 5, None)),
    ],
)
def test_settings_of_another_shape_are_refused_in_printable_words(setting: str, value: object) -> None:
    refused = unsupported_setting(PLAIN | {setting: value})
    assert refused and "\x1b" not in refused and len(refused) < 300


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000, "{", '"LORA"', ""])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(cannot be read|does not contain a JSON object)"):
        parse_settings(text)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "something_new"])
def test_an_adapter_of_changed_weights_is_refused(start: str) -> None:
    """peft changes the model below when it makes and when it loads such an adapter; B A alone is something else."""
    assert f"(init_lora_weights: {start})" in unsupported_setting(PLAIN | {"init_lora_weights": start})


def test_a_terminal_obeys_no_text() -> None:
    assert printable("a\x1b[2Jb\x1b]0;title\x07c\x9b\r\n\td\u3000é") == "abc??\n\td\u3000é"
