"""A teacher behind an endpoint: what a vLLM server answers, and answers that no sample is trained on."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from tests.workers.agents.judges.judge_endpoint import Endpoint, Script, endpoint, error
from tests.workers.algorithms.test_train_batch import rollout_table
from tests.workers.models.test_prompt_logprobs import LOGITS, SEQUENCE, VOCABULARY, K, returned
from troupe.workers.contract.config import TeacherEndpointConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary
from troupe.workers.models.prompt_logprobs import PromptLogprobs, read_prompt_logprobs
from troupe.workers.teacher import TeacherEndpoint

Change = Callable[[list[Any]], Any]
"""Changes the places of an answer: an object by token id for each token but the first, behind a null."""


def places(k: int = K, sequence: list[int] = SEQUENCE) -> list[Any]:
    """As vLLM's server sends the log-probs of a prompt: the token, and the k likeliest, of which it may be one."""
    one = returned(sequence, LOGITS[: len(sequence) - 1], k)
    found: list[Any] = [None]
    for ids, values in zip(one.ids.tolist(), one.logprobs.tolist(), strict=True):
        ranks = [VOCABULARY, *range(1, k + 1)]
        entries = zip(ids, values, ranks, strict=True)
        found.append({str(token): {"logprob": v, "rank": rank, "decoded_token": "é"} for token, v, rank in entries})
    return found


def body(found: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "x", "prompt_logprobs": found}]}).encode()


@pytest.mark.parametrize("k", [0, 1, K])
def test_the_log_probs_of_an_answer_are_the_sequences(k: int) -> None:
    found, wanted = read_prompt_logprobs(body(places(k)), SEQUENCE, k), returned(k=k)
    assert isinstance(found, PromptLogprobs)
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.logprobs.tolist() == wanted.logprobs.tolist()


NO = f"the endpoint returned no log-probs of token {{}} and the {K} likeliest in place {{}}"


def without(name: str) -> Change:
    return lambda found: [None, *({key: one for key, one in place.items() if key != name} for place in found[1:])]


def given(value: Any) -> Change:
    """The third token's log-prob is this value."""
    own = str(SEQUENCE[2])
    return lambda found: [*found[:2], found[2] | {own: found[2][own] | {"logprob": value}}, *found[3:]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found[:-1], "the endpoint returned log-probs of 5 tokens, not of 6"),
        (lambda found: found[1:], "the endpoint returned log-probs of 5 tokens, not of 6"),
        (lambda found: None, "the endpoint returned no log-probs of the sequence (prompt_logprobs)"),
        (without("7"), NO.format(7, 1)),
        (lambda found: [None, *places(1)[1:]], NO.format(7, 1)),
        (lambda found: [None, *found[:5]], NO.format(7, 1)),
        (given("low"), NO.format(1, 2)),
        (lambda found: [*found[:3], {"x": {"logprob": 0.0, "rank": 1}}, *found[4:]], NO.format(9, 3)),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_the_sequences_says_why(change: Change, why: str) -> None:
    assert read_prompt_logprobs(body(change(places())), SEQUENCE, K) == why


@pytest.mark.parametrize("text", [b"<html>", b"[" * 100_000, b"{}", b'{"choices": []}', b"null"])
def test_an_answer_of_another_form_says_so(text: bytes) -> None:
    assert isinstance(read_prompt_logprobs(text, SEQUENCE, K), str)


@pytest.mark.parametrize(("value", "read"), [(None, np.nan), (float("nan"), np.nan), (-9999.0, -np.inf)])
def test_what_json_cannot_say_is_not_a_number(value: Any, read: float) -> None:
    found = read_prompt_logprobs(body(given(value)(places())), SEQUENCE, K)
    assert isinstance(found, PromptLogprobs)
    assert found.logprobs[1, 0] == pytest.approx(read, nan_ok=True)


def config(served: Endpoint, model: Path, **others: Any) -> TeacherEndpointConfig:
    settings = {"top_k": K, "retries": 0, "timeout_s": 5.0, "longest": 6} | others
    return TeacherEndpointConfig(
        url=served.url, model="m", column="teacher.math", policy=ModelConfig(path=str(model)), **settings
    )


def vllm_server(model: Path, answer: Callable[[list[int]], web.StreamResponse | None], room: int = 7) -> Script:
    """A server with the model's tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def script(_: int, request: dict[str, Any]) -> web.StreamResponse | None:
        if "max_tokens" in request:
            return answer(request["prompt"])
        tokens = tokenizer(request["prompt"], add_special_tokens=request["add_special_tokens"])["input_ids"]
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": room})

    return script


def right(sequence: list[int]) -> web.Response:
    return web.Response(body=body(places(K, sequence)))


async def scored(config: TeacherEndpointConfig, sequences: list[list[int]]) -> list[PromptLogprobs | str]:
    teacher = TeacherEndpoint(config, "teacher.math-0")
    try:
        assert (await teacher.start()).name == "teacher.math-0"
        return await teacher.sequences(sequences)
    finally:
        await teacher.close()


def test_sequences_are_asked_for_by_their_tokens(tiny_model: Path) -> None:
    with endpoint(vllm_server(tiny_model, right)) as served:
        found = asyncio.run(scored(config(served, tiny_model), [SEQUENCE, SEQUENCE[:3]]))
    assert [isinstance(one, PromptLogprobs) and one.ids[:, 0].tolist() for one in found] == [
        SEQUENCE[1:],
        SEQUENCE[1:3],
    ]
    asked = [one for one in served.bodies if "max_tokens" in one]
    assert asked[1:] == [
        {"model": "m", "prompt": one, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": K}
        for one in (SEQUENCE, SEQUENCE[:3])
    ]


def test_the_server_bounds_a_sequence_with_another_prompt(tiny_model: Path) -> None:
    """One that is longer than the policy's sequences, but leaves room for a token behind it."""
    rows = [[4, 7, 1, 9], [4, 7, 1, 9, 2]]
    table = rollout_table([("a", 0), ("a", 1)], [1, 1], prompt_ids=[one[:-1] for one in rows], response_ids=[[9], [2]])

    async def score(config: TeacherEndpointConfig) -> ScoreSummary:
        teacher = TeacherEndpoint(config, "teacher.math-0")
        await teacher.start()
        summary, _ = await teacher.score(RankPlan(((0, 1),), total_loss_tokens=2, total_sequences=2), table)
        await teacher.close()
        return summary

    with endpoint(vllm_server(tiny_model, right, room=5)) as served:
        assert asyncio.run(score(config(served, tiny_model, longest=3))).failed == {
            ("a", 1): "it has more than 4 tokens"
        }


def test_a_failure_is_that_of_one_sample(tiny_model: Path) -> None:
    """Of an outage, a late answer, an answer without log-probs and one that never ends."""
    answers: dict[int, Callable[[], web.StreamResponse | None]] = {
        2: lambda: error(503),
        3: lambda: None,
        4: lambda: web.Response(body=body(None)),
        5: lambda: web.Response(body=b" " * 2**20),
    }

    def answer(sequence: list[int]) -> web.StreamResponse | None:
        return answers[len(sequence)]() if sequence[0] else right(sequence)

    with endpoint(vllm_server(tiny_model, answer)) as served:
        asked = [SEQUENCE[:n] for n in (2, 3, 4, 5)]
        late = config(served, tiny_model, timeout_s=1.0)
        assert asyncio.run(scored(late, [[0, *SEQUENCE[1:]], *asked]))[1:] == [
            f"{served.url}: InternalServerError: Error code: 503 - try later",
            f"{served.url}: timeout after 1 s",
            "the endpoint returned no log-probs of the sequence (prompt_logprobs)",
            f"{served.url}: an answer of more than {2**16 + 256 * 5 * (1 + K)} bytes",
        ]


RELAY = """
import asyncio, sys
async def copy(source, target):
    while data := await source.read(65536):
        target.write(data)
    target.close()
async def serve(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(copy(reader, back), copy(there, writer))
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""Passes bytes on to a port: a server's process that can be lost."""


@pytest.mark.parametrize(
    ("fault", "why"), [(signal.SIGKILL, "APIConnectionError: Connection error."), (signal.SIGSTOP, "timeout after 2 s")]
)
def test_a_server_that_is_lost_or_stopped_fails_each_sample_by_its_timeout(
    fault: signal.Signals, why: str, tiny_model: Path
) -> None:
    """Its address and the cause are in every status; one that continues teaches again, without a restart."""
    rows = [("a", 0), ("a", 1), ("b", 0)]
    table = rollout_table(rows, [1] * 3, prompt_ids=[[4, 7]] * 3, response_ids=[[1]] * 3)
    plan = RankPlan(((0, 1, 2),), total_loss_tokens=3, total_sequences=3)

    async def score(teacher: TeacherEndpoint) -> tuple[dict[tuple[str, int], str], float]:
        started = time.monotonic()
        summary, found = await teacher.score(plan, table)
        missing = [not math.isfinite(one) for one in chain.from_iterable(found["teacher.math"].to_pylist())]
        assert missing == [key in summary.failed for key in rows]
        return dict(summary.failed), time.monotonic() - started

    async def run(port: str, process: subprocess.Popen[str]) -> None:
        url = f"http://127.0.0.1:{port}/v1"
        settings = {"top_k": K, "retries": 1, "timeout_s": 2.0, "longest": 6, "column": "teacher.math"}
        teacher = TeacherEndpoint(
            TeacherEndpointConfig(url=url, model="m", policy=ModelConfig(path=str(tiny_model)), **settings), "teacher-0"
        )
        await teacher.start()
        assert (await score(teacher))[0] == {}
        process.send_signal(fault)
        failed, seconds = await score(teacher)
        assert failed == dict.fromkeys(rows, f"{url}: {why}") and seconds < 4.0
        process.send_signal(signal.SIGCONT)
        assert ((await score(teacher))[0] == {}) is (fault is signal.SIGSTOP)
        await teacher.close()

    with endpoint(vllm_server(tiny_model, right)) as served:
        target = served.url.rpartition(":")[2].removesuffix("/v1")
        with subprocess.Popen([sys.executable, "-c", RELAY, target], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                asyncio.run(run(process.stdout.readline().strip(), process))
            finally:
                process.kill()


def test_numbers_that_are_none_and_too_few_fail_their_sample_alone(tiny_model: Path) -> None:
    """A log-prob that is null, one log-prob too few, and a token without its likeliest ones."""
    changes: dict[int, Change] = {
        7: lambda found: [*found[:-1], {key: one | {"logprob": None} for key, one in found[-1].items()}],
        1: lambda found: found[:-1],
        9: lambda found: [*found[:-1], dict(list(found[-1].items())[:1])],
    }
    keys = [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    prompts = [[4, 7], [4, 1], [4, 9], [4, 2]]

    def answer(sequence: list[int]) -> web.Response:
        return web.Response(body=body(changes.get(sequence[1], list)(places(K, sequence))))

    async def failed(config: TeacherEndpointConfig) -> dict[tuple[str, int], str]:
        teacher = TeacherEndpoint(config, "teacher.math-0")
        await teacher.start()
        table = rollout_table(keys, [1] * 4, prompt_ids=prompts, response_ids=[[1]] * 4)
        summary, _ = await teacher.score(RankPlan(((0, 1, 2, 3),), total_loss_tokens=4, total_sequences=4), table)
        await teacher.close()
        return dict(summary.failed)

    with endpoint(vllm_server(tiny_model, answer)) as served:
        assert asyncio.run(failed(config(served, tiny_model))) == {
            ("a", 0): "the score of a token is not finite",
            ("a", 1): "the endpoint returned log-probs of 2 tokens, not of 3",
            ("a", 2): NO.format(1, 2),
        }


def test_an_endpoint_that_cannot_teach_the_policy_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    """Another tokenizer, too little room, an outage, and a server that returns fewer log-probs than are asked for."""
    changed = tmp_path / "other"
    changed.mkdir()
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    first, second = list(pieces)[300:302]
    pieces[first], pieces[second] = pieces[second], pieces[first]
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "tokenizer_config.json"):
        (changed / name).write_bytes((tiny_model / name).read_bytes())
    for script, others, why in [
        (vllm_server(changed, right), {}, "its tokenizer is another than the policy's: the text of the tokens"),
        (lambda *_: web.json_response({"tokens": [], "max_model_len": 64}), {}, r"is \[\] there"),
        (vllm_server(tiny_model, right, room=6), {}, "its max_model_len is 6, and must be at least 7"),
        (lambda *_: error(404), {}, "/tokenize, which compares its tokenizer with the policy's: NotFoundError"),
        (lambda *_: "text", {}, "its answer has no tokens and max_model_len, as a vLLM server's has"),
        (vllm_server(tiny_model, right), {"top_k": K + 1}, f"token 0 and the {K + 1} likeliest in place 1"),
        (vllm_server(tiny_model, right), {"api_key_variable": "UNSET_KEY"}, "variable UNSET_KEY is not set"),
    ]:
        with endpoint(script) as served, pytest.raises(ValueError, match=why.replace("(", r"\(")):
            asyncio.run(scored(config(served, tiny_model, **others), []))
