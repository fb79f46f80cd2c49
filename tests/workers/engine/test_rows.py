"""Rows and summaries of responses, from vLLM's own outputs."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan

from troupe.workers.agents.episodes.turns import Played, SampledTurn, Segment
from troupe.workers.contract.routes import read_routes
from troupe.workers.engine.rows import sample_summary, sampled_turn


def output(*logprobs: float, versions: list[WeightVersionSpan]) -> Any:
    """vLLM's output for one prompt, with a token for each log-prob."""
    flat = FlatLogprobs()
    for token, value in enumerate(logprobs):
        flat.append({token: Logprob(value)})
    completion = CompletionOutput(0, "", list(range(len(logprobs))), None, flat, finish_reason="stop")
    completion.weight_versions = versions
    metrics = SimpleNamespace(queued_ts=1.0, first_token_ts=2.0, last_token_ts=4.0)
    return SimpleNamespace(outputs=[completion], metrics=metrics, num_cached_tokens=2)


def row(*versions: int) -> dict[str, Any]:
    """What a summary reads of a row whose tokens were sampled by these versions, two each."""
    spans = [{"version": version, "start": 2 * n, "end": 2 * n + 2} for n, version in enumerate(versions)]
    ids = {"prompt_ids": [1], "response_ids": [7, 7] * len(versions), "finish_reason": "stop", "episode_status": "ok"}
    return {"sample_index": 3, "player": None, "weight_versions": spans, **ids}


def test_a_turn_has_the_versions_and_logprobs_of_its_tokens() -> None:
    turn = sampled_turn(output(-1.0, -2.0, -3.0, versions=[WeightVersionSpan("4", 0, 1), WeightVersionSpan("5", 1, 3)]))
    assert turn.versions == [{"version": 4, "start": 0, "end": 1}, {"version": 5, "start": 1, "end": 3}]
    assert (turn.ids, turn.logprobs, turn.problem) == ([0, 1, 2], [-1.0, -2.0, -3.0], "")
    assert (turn.first_token_s, turn.generate_s, turn.cached_tokens) == (1.0, 3.0, 2)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_response_with_a_logprob_that_is_not_finite_cannot_be_trained(wrong: float) -> None:
    turn = sampled_turn(output(-1.0, wrong, versions=[WeightVersionSpan("4", 0, 2)]))
    assert turn.problem == "a log-prob of the response is not finite"


def test_a_turn_has_the_experts_of_all_tokens_that_the_engine_ran() -> None:
    """Those of the prompt, and of the response without its last token; only if it is asked for them."""
    sampled = output(-1.0, -2.0, versions=[WeightVersionSpan("4", 0, 2)])
    sampled.prompt_token_ids = [5, 6, 7]
    sampled.outputs[0].routed_experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    routes = sampled_turn(sampled, routed=True).routes
    assert routes is not None and np.array_equal(read_routes(routes), sampled.outputs[0].routed_experts)
    assert sampled_turn(sampled).routes is None


@pytest.mark.parametrize("tokens", [None, 3, 5])
def test_experts_of_fewer_or_more_tokens_are_no_sample(tokens: int | None) -> None:
    sampled = output(-1.0, -2.0, versions=[WeightVersionSpan("4", 0, 2)])
    sampled.prompt_token_ids = [5, 6, 7]
    sampled.outputs[0].routed_experts = None if tokens is None else np.zeros((tokens, 2, 2), np.uint8)
    with pytest.raises(RuntimeError, match=r"vLLM returned .*; the sequence has 4 that it ran"):
        sampled_turn(sampled, routed=True)


def likeliest_output(*entries: int) -> Any:
    """A response with this many log-probs in the place of each token: the sampled one's, then the likeliest ones'."""
    sampled = output(*[-1.0] * len(entries), versions=[WeightVersionSpan("4", 0, len(entries))])
    sampled.outputs[0].logprobs = flat = FlatLogprobs()
    for token, count in enumerate(entries):
        flat.append_fast(
            [token, *range(10, 9 + count)],
            [-1.0, *(-0.5 * n for n in range(1, count))],
            itertools.chain(itertools.count()),
            itertools.repeat(None),
        )
    return sampled


def test_a_turn_has_the_likeliest_tokens_in_the_place_of_each_one() -> None:
    """Without the sampled one, which is the first; only if it is asked for them."""
    turn = sampled_turn(likeliest_output(3, 3), top_k=2)
    for words in turn.likeliest:
        assert np.frombuffer(words[:8], np.int32).tolist() == [10, 11]
        assert np.frombuffer(words[8:], np.float32).tolist() == [-0.5, -1.0]
    assert (turn.ids, turn.logprobs, len(turn.likeliest)) == ([0, 1], [-1.0, -1.0], 2)
    assert sampled_turn(likeliest_output(3, 3)).likeliest == ()
    with pytest.raises(RuntimeError, match="returned 2 log-probs in a token's place instead of 3"):
        sampled_turn(likeliest_output(3, 2), top_k=2)


def test_the_likeliest_tokens_of_an_episode_are_at_the_tokens_that_the_policy_sampled() -> None:
    segment = Segment([1, 2])
    segment.sampled(SampledTurn([7, 8], [-1.0, -1.0], [], "stop", likeliest=[b"a", b"b"]))
    segment.added([8, 9])
    segment.sampled(SampledTurn([7], [-1.0], [], "stop", likeliest=[b"c"]))
    segment.added([8])
    segment.sampled(SampledTurn([7], [-1.0], [], "stop"))
    assert segment.likeliest == [b"a", b"b", b"", b"", b"c", b"", b""]


def test_an_episode_has_the_experts_that_came_with_its_last_turn() -> None:
    """Which includes all tokens before it."""
    segment = Segment([1, 2])
    segment.sampled(SampledTurn([7], [-1.0], [], "stop", routes=b"first"))
    segment.added([8, 9])
    segment.sampled(SampledTurn([7], [-1.0], [], "stop", routes=b"all"))
    segment.added([8])
    assert segment.routes == b"all"


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    summary = sample_summary([row(5, 4, 6)], version=9)
    assert (summary.oldest_version, summary.newest_version) == (4, 6)
    assert sample_summary([row()], version=9).oldest_version == 9


def test_an_episode_is_as_old_as_the_oldest_token_of_its_rows() -> None:
    turns = [SampledTurn([7, 7], [-1.0, -1.0], [], "stop")]
    played = Played([Segment([1])], turns=turns)
    summary = sample_summary([row(6, 5), row(4)], 9, played)
    assert (summary.oldest_version, summary.newest_version, summary.segments) == (4, 6, (5, 3))
