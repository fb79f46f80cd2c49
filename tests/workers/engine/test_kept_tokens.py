"""The hook that records the tokens a sampler leaves: on the outputs of vLLM's runner, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.outputs import SamplingMask
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner

from tests.kept_tokens import words_of
from troupe.workers.agents.episodes.turns import SampledTurn
from troupe.workers.engine import kept_tokens
from troupe.workers.engine.rows import _status, sampled_turn

GONE = -torch.inf


class Recorded:
    """A runner of vLLM whose sampler returns given log-probs. Outputs are read later if it is `asynchronous`."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.logprobs: torch.Tensor | None = None
        self.requests: list[str] = []
        self.runner: Any = GPUModelRunner.__new__(GPUModelRunner)
        self.runner.sampler = Sampler("processed_logprobs")
        vars(self.runner.sampler)["sample"] = lambda: (torch.zeros(1), self.logprobs)
        vars(self.runner)["sample_tokens"] = self._sample_tokens
        kept_tokens.record_kept_tokens(self.runner)

    def _sample_tokens(self) -> Any:
        self.runner.sampler.sample()
        output = ModelRunnerOutput(req_ids=self.requests, req_id_to_index={})
        if not self.asynchronous:
            return output
        later: Any = AsyncGPUModelRunnerOutput.__new__(AsyncGPUModelRunnerOutput)
        later.async_copy_ready_event = SimpleNamespace(synchronize=lambda: None)
        later.sampled_token_ids_cpu = torch.zeros(1, 1)
        later._logprobs_tensors = later._sampled_token_ids = later._num_nans = None
        later._logprobs_tensors_cpu = later._num_nans_cpu = later._has_fault = None
        later._invalid_req_indices, later._model_runner_output = [], output
        return later

    def step(self, logprobs: torch.Tensor | None) -> Any:
        """The output of one step."""
        self.logprobs = logprobs
        return self.runner.sample_tokens()

    def masks(self, output: Any) -> Any:
        """The sets of a step, as vLLM's scheduler finds them."""
        return (output.get_output() if self.asynchronous else output).sampling_masks


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    return Recorded(request.param)


def test_the_sets_of_a_step_are_the_tokens_with_finite_logprobs(recorded: Recorded) -> None:
    @given(st.integers(1, 300), st.integers(0, 2**31))
    def check(vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(5, vocabulary, generator=generator) <= torch.rand(5, 1, generator=generator) ** 4
        kept[0] = True
        masks = recorded.masks(recorded.step(torch.where(kept, -1.0, GONE)))
        found = [masks.slice_request(row, 1).to_nested_list() for row in range(5)]
        assert found == [[words.tolist()] for words in words_of(kept.numpy())]

    check()


def test_outputs_that_are_read_after_the_next_step_have_their_own_sets() -> None:
    recorded = Recorded(asynchronous=True)
    outputs = [recorded.step(torch.tensor([[-1.0, GONE, GONE]])), recorded.step(torch.tensor([[GONE, GONE, -1.0]]))]
    assert [recorded.masks(output).token_ids.tolist() for output in outputs] == [[0], [2]]


def test_a_step_without_logprobs_has_no_sets(recorded: Recorded) -> None:
    """That of a probe alone: not those of the step before either."""
    assert recorded.masks(recorded.step(torch.tensor([[-1.0, GONE]]))).token_ids.tolist() == [0]
    assert recorded.masks(recorded.step(None)) is None


def test_sets_that_some_requests_lack_are_left_out(recorded: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's scheduler takes the set of each request by its number, and an engine ends with an error there."""
    recorded.requests = ["one", "two"]
    assert recorded.masks(recorded.step(torch.tensor([[-1.0, GONE]]))) is None
    assert "1 sets for the tokens of 2 requests" in caplog.text
    assert recorded.masks(recorded.step(torch.tensor([[-1.0, GONE]] * 2))).token_ids.tolist() == [0, 0]


@pytest.mark.parametrize("part", ["_packed", "write_kept"])
def test_an_error_of_the_record_leaves_the_engine_alone(
    recorded: Recorded, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kept_tokens, part, fail)
        assert recorded.masks(recorded.step(torch.tensor([[-1.0, GONE]]))) is None
    assert "no memory" in caplog.text
    assert recorded.masks(recorded.step(torch.tensor([[-1.0, GONE]]))).token_ids.tolist() == [0]


@pytest.mark.parametrize("vocabulary", [5, 40, 70])
def test_what_runner_v2_copies_becomes_words(vocabulary: int) -> None:
    """Of a request without a token it copies whatever was in the memory: in that row even bits behind the end."""
    kept = np.arange(vocabulary) % np.array([[1], [2], [4]]) == 0
    bits = np.vstack([np.packbits(kept, axis=1, bitorder="little"), np.full((1, -(-vocabulary // 8)), 255, np.uint8)])
    counts = torch.tensor([*kept.sum(1), 0], dtype=torch.int32)
    masks = SamplingMaskTensors(torch.empty(4, 0), torch.from_numpy(bits), counts, vocabulary)
    found = kept_tokens._sets_of_v2(masks)
    assert found is not None
    assert found.to_nested_list() == [*(words.tolist() for words in words_of(kept)), []]


def test_the_device_is_not_waited_for() -> None:
    """A tensor without data has what does not depend on it: its form. What a device would be waited for fails."""
    packed = kept_tokens._packed(torch.empty(256, 152_064, device="meta"))
    assert (packed.shape, packed.dtype) == ((256, 152_064 // 8), torch.uint8)
    with pytest.raises(NotImplementedError):
        torch.empty(2, 3, device="meta").nonzero()


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ([[3, 5], []], ""),
        ([[3, 5]], "the tokens that the sampler left were not recorded; the engine's log may say why"),
        (None, "the tokens that the sampler left were not recorded; the engine's log may say why"),
        ([[3, 5], [2]], "token 7 is not among those that the sampler left to it"),
    ],
)
def test_a_response_with_sets_that_are_missing_or_wrong_fails_its_sample(
    sets: list[list[int]] | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = None if sets is None else SamplingMask(sets)
    completion = SimpleNamespace(token_ids=[3, 7], sampling_mask=mask, finish_reason="stop", weight_versions=())
    metrics = SimpleNamespace(last_token_ts=1.0, queued_ts=0.0, first_token_ts=0.5)
    output: Any = SimpleNamespace(outputs=[completion], metrics=metrics, num_cached_tokens=0)
    monkeypatch.setattr("troupe.workers.engine.rows._sampled_logprobs", lambda _: [-1.0, -2.0])
    turn = sampled_turn(output, records=True)
    assert (turn.problem, [len(words) for words in turn.kept]) == (problem, [0, 0] if problem else [8, 0])
    assert not sampled_turn(output).problem


def test_one_turn_that_cannot_be_trained_fails_an_episode() -> None:
    good = SampledTurn([3], [-1.0], [], "stop")
    turns = (good, replace(good, problem="not recorded"), replace(good, problem="another"))
    assert [_status("ok", good), _status("ok", *turns)] == ["ok", "engine: not recorded"]
    assert _status("environment: its own reason", *turns) == "environment: its own reason"
