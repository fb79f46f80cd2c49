"""The spec's sampling has the bounds of the installed vLLM: what one takes, the other takes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from troupe.workers.contract.config import EvalSampling, SamplingConfig
from troupe.workers.contract.config_base import MAX_TEMPERATURE, GreedyOrTemperature

BEYOND = [
    *(("temperature", value) for value in (-0.1, 2.000001, 5.0, float("inf"), float("nan"))),
    *(("top_p", value) for value in (0.0, -0.1, 1.000001)),
    *(("top_k", value) for value in (-2, 1 << 70)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("max_tokens", value) for value in (0, -1)),
]
WITHIN = [
    *(("temperature", value) for value in (0.01, 1.0, MAX_TEMPERATURE)),
    *(("top_p", value) for value in (1e-6, 1.0)),
    *(("top_k", value) for value in (0, 1, 2**31 - 1)),
    *(("min_p", value) for value in (0.0, 0.999)),
    *(("max_tokens", value) for value in (1, 1 << 20)),
]


def sections(name: str) -> list[type[BaseModel]]:
    return [section for section in (SamplingConfig, EvalSampling) if name in section.model_fields]


def encoded(params: Any) -> bytes:
    """As the engine's process gets them."""
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder: Any = MsgpackEncoder()
    return bytes(encoder.encode(params)[0])


@pytest.mark.parametrize(("name", "value"), BEYOND)
def test_what_vllm_refuses_is_refused_when_a_spec_is_loaded(name: str, value: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises((VLLMValidationError, OverflowError)):
        encoded(SamplingParams(**{name: value}))
    for section in sections(name):
        with pytest.raises(ValidationError):
            section(**{name: value})
    if name == "temperature":
        with pytest.raises(ValidationError):
            TypeAdapter(GreedyOrTemperature).validate_python(value)


@pytest.mark.parametrize(("name", "value"), WITHIN)
def test_what_a_spec_takes_vllm_takes_as_it_is(name: str, value: Any) -> None:
    from vllm import SamplingParams

    for section in sections(name):
        assert dict(section(**{name: value}))[name] == value
    params = SamplingParams(**{name: value})
    assert dict.fromkeys([name], getattr(params, name)) == {name: value}
    assert encoded(params)
