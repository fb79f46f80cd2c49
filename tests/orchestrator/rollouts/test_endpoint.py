"""Held-out prompts sampled at an endpoint: against a server that speaks the protocol, and breaks it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pytest

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.rollouts import endpoint as endpoints
from troupe.orchestrator.rollouts.endpoint import Endpoint, endpoint_sampler
from troupe.workers.contract.messages import PROMPTS, ROLLOUTS, GroupRequest, GroupSummary

Answer = Callable[[int, dict[str, Any]], tuple[int, Any]]
"""From the number of a request and its body to a status and a body."""


def completion(text: str, reason: str = "stop", tokens: int = 3) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens},
    }


class Server:
    """Serves `models`, and what `answer` says to chat completions."""

    def __init__(self) -> None:
        self.models = ["m"]
        self.owner = "x"
        self.answer: Answer = lambda number, body: (200, completion(f"said {number}"))
        self.asked: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shared = {"object": "model", "created": 1, "owned_by": server.owner}
                self._reply(200, {"object": "list", "data": [{"id": name, **shared} for name in server.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(body)
                self._reply(*server.answer(len(server.asked), body))

            def _reply(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def sample(self, model: str | None = None, **request: Any) -> tuple[GroupSummary, pa.Table]:
        """Samples the second of two prompts."""
        messages = [json.dumps([{"role": "user", "content": text}]) for text in ("a", "b")]
        rows = [
            {"row": row, "messages": text, "answer": "5", "metadata": "{}", "origin": f"x:{row}"}
            for row, text in enumerate(messages)
        ]
        prompts = pa.Table.from_pylist(rows, schema=PROMPTS)
        fields = {"samples": 2, "seed": 3, "temperature": 0.5} | request

        async def run() -> tuple[GroupSummary, pa.Table]:
            options = {"max_tokens": 9, "concurrency": 2, "timeout_s": 5.0}
            async with endpoint_sampler(Endpoint(self.url, model), lambda table: table, **options) as sample:
                return await sample(GroupRequest("eval-r1", 1, 0, **fields), prompts)

        return asyncio.run(run())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(endpoints, "_RETRIES", 0)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_samples_are_rows_that_a_reward_worker_scores(server: Server) -> None:
    server.answer = lambda number, body: (200, completion("4", "length", 9) if number == 2 else completion("5"))
    summary, table = server.sample()
    assert table.schema.equals(ROLLOUTS)
    rows = sorted(table.to_pylist(), key=lambda row: row["response"])
    assert [(row["response"], row["finish_reason"], len(row["response_ids"])) for row in rows] == [
        ("4", "length", 9),
        ("5", "stop", 3),
    ]
    assert {row["answer"] for row in rows} == {"5"} and {row["episode_status"] for row in rows} == {"ok"}
    assert sorted(sample.sampled_tokens for sample in summary.samples) == [3, 9]
    (first, second) = server.asked
    assert first["messages"] == [{"role": "user", "content": "b"}]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.5, 9)
    assert first["seed"] != second["seed"] and first["top_p"] == 1.0 and "top_k" not in first


def test_the_sampling_of_a_set_reaches_the_endpoint(server: Server) -> None:
    server.sample(model="other", samples=1, top_p=0.9, top_k=4, min_p=0.1, max_tokens=70)
    server.sample(samples=1, greedy=True, temperature=0.0)
    sampled, greedy = server.asked
    assert (sampled["model"], sampled["top_p"], sampled["top_k"], sampled["max_tokens"]) == ("other", 0.9, 4, 70)
    assert sampled["min_p"] == 0.1 and "min_p" not in greedy
    assert greedy["temperature"] == 0.0 and "seed" not in greedy


@pytest.mark.parametrize("model", [None, "m"])
def test_a_server_adds_nothing_of_its_own_to_the_sampling(server: Server, model: str | None) -> None:
    """vLLM takes what a request leaves out from the model's generation_config.json."""
    server.owner = "vllm"
    server.sample(model=model, samples=1)
    server.sample(model=model, samples=1, top_k=4)
    first, second = server.asked
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for body in (first, second):
        assert body["top_p"] == 1.0 and neutral.items() <= body.items()
    assert (first["top_k"], second["top_k"]) == (-1, 4)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ((500, {"error": {"message": "it burns"}}), "endpoint: "),
        ((429, {"error": {"message": "too many"}}), "endpoint: "),
        ((200, {"choices": []}), "endpoint: not a chat completion with usage"),
        ((200, completion("5") | {"usage": None}), "endpoint: not a chat completion with usage"),
    ],
)
def test_a_request_that_is_not_answered_is_a_failed_sample(server: Server, answer: Any, status: str) -> None:
    server.answer = lambda number, body: answer if number == 1 else (200, completion("5"))
    summary, table = server.sample()
    failed = [row["episode_status"] for row in table.to_pylist() if row["episode_status"] != "ok"]
    assert len(failed) == 1 and failed[0].startswith(status)
    assert sorted(sample.status == "ok" for sample in summary.samples) == [False, True]


@pytest.mark.parametrize(("status", "message"), [(401, "no key"), (404, "no such model"), (400, "no top_k here")])
def test_what_the_endpoint_refuses_for_good_ends_the_evaluation(server: Server, status: int, message: str) -> None:
    server.answer = lambda number, body: (status, {"error": {"message": message}})
    with pytest.raises(TroupeError, match=message):
        server.sample()


def test_the_model_has_to_be_named_where_there_are_several(server: Server) -> None:
    server.models = ["a", "b"]
    with pytest.raises(UsageError, match=r"name the model with --served: it serves a, b"):
        server.sample()
    server.models = []
    with pytest.raises(UsageError, match="it lists no model"):
        server.sample()
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(TroupeError, match=r"its models cannot be listed .* name one with --served"):
        server.sample()
