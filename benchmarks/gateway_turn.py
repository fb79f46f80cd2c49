"""What a turn costs an agent through the gateway: seconds beside a direct call, and memory.

    python -m benchmarks.gateway_turn [--turns 100] [--repeat 1] [--model .cache/models/tiny-llama]

The agent is a loop around the official client, which sends its whole conversation with every request. Through the
gateway each turn is sampled at once, by a script; the direct call goes to a server in another process that answers
every request with the same words. The difference is the gateway, the environment worker, the episode, and rendering
and tokenizing the conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from anthropic import Anthropic
from openai import OpenAI
from transformers import AutoTokenizer

from troupe.environments import Row
from troupe.workers.agents.episodes.check import Rehearsal, rehearse
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.agents.episodes.turns import Played
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.environment import EnvironmentWorker

SAID = "I look at the next file, and then I say what is wrong with it."
ASKED = "The file has 40 lines, and nothing in it is wrong. Look at the next one."
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ANSWERS: dict[str, dict[str, Any]] = {
    "chat": {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "usage": USAGE,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": SAID}}],
    },
    "messages": {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_reason": "end_turn",
        "content": [{"type": "text", "text": SAID}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "responses": {
        "id": "r",
        "object": "response",
        "created_at": 0,
        "model": "m",
        "status": "completed",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "output": [
            {
                "id": "o",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": SAID, "annotations": []}],
            }
        ],
    },
}
"""A response in each protocol."""
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def serve(port: Any) -> None:
    """The server of direct calls; puts its port into a queue."""

    async def run() -> None:
        app = web.Application(client_max_size=2**28)
        for protocol, path in PATHS.items():
            body = json.dumps(ANSWERS[protocol])

            async def answer(request: web.Request, body: str = body) -> web.Response:
                await request.json()
                return web.Response(text=body, content_type="application/json")

            app.router.add_post(path, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def caller(protocol: str, client: OpenAI) -> Callable[[list[Any]], str]:
    """From a conversation to the next turn, by the client of a protocol."""
    if protocol == "messages":
        url = str(client.base_url).removesuffix("v1/")
        other = Anthropic(base_url=url, api_key=client.api_key)
        return lambda talk: str(other.messages.create(model="m", max_tokens=64, messages=talk).content[0].text)  # type: ignore[union-attr]
    if protocol == "responses":
        return lambda talk: client.responses.create(model="m", input=talk).output_text
    return lambda talk: client.chat.completions.create(model="m", messages=talk).choices[0].message.content or ""


def milliseconds(call: Callable[[list[Any]], str], turns: int, repeat: int) -> tuple[list[float], float]:
    """Time of each turn of a conversation, and the mean of this process's CPU time."""
    talk, times, cpu = [{"role": "user", "content": ASKED * repeat}], [], time.process_time()
    for _ in range(turns):
        started = time.perf_counter()
        said = call(talk)
        times.append(1e3 * (time.perf_counter() - started))
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": ASKED * repeat}]
    return times, 1e3 * (time.process_time() - cpu) / turns


def agent(row: Row, client: OpenAI, protocol: str, turns: int, repeat: int, direct: str) -> dict[str, float]:
    """Runs in an episode: the same conversation directly and through the gateway."""
    beside = OpenAI(base_url=direct, api_key="none")
    milliseconds(caller(protocol, beside), turns, repeat)  # warm
    before, client_cpu = milliseconds(caller(protocol, beside), turns, repeat)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    through, cpu = milliseconds(caller(protocol, client), turns, repeat)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    found = {"agent_kib": kib / turns, "agent_cpu": cpu - client_cpu}
    for name, part in (("first", slice(1, 11)), ("last", slice(-10, None)), ("all", slice(1, None))):
        found[f"direct_{name}"] = statistics.median(before[part])
        found[f"through_{name}"] = statistics.median(through[part])
    return {"reward": 0.0, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=1, help="how often an answer has its text: 18 tokens each")
    parser.add_argument("--model", default=".cache/models/tiny-llama")
    options = parser.parse_args()
    port: Any = multiprocessing.get_context("fork").Queue()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(port,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port.get(timeout=60)}/v1"
    for protocol in PATHS:
        print(protocol, json.dumps(measure(protocol, url, options)))
    server.terminate()


def measure(protocol: str, url: str, options: argparse.Namespace) -> dict[str, float]:
    """One episode: milliseconds a turn beside a direct call, and KiB a turn of the agent's process and of this one."""
    turns = options.turns
    args = {"protocol": protocol, "turns": turns, "repeat": options.repeat, "direct": url}
    config = EnvironmentConfig(
        name="agent",
        args={"function": "benchmarks.gateway_turn:agent", "args": args},
        max_turns=turns + 1,
        max_observation_chars=10**6,
        turn_timeout_s=120.0,
        episode_timeout_s=300.0,
    )
    rehearsal = Rehearsal(config, TurnReader(AutoTokenizer.from_pretrained(options.model)), 64, 2**20)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    play(rehearsal, config)  # imports, and renders what tells the template's form
    own = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / turns
    cpu = time.process_time()
    played = play(rehearsal, config)
    own_cpu = 1e3 * (time.process_time() - cpu) / turns
    info = dict(played.info)
    gained = {name: info[f"through_{name}"] - info[f"direct_{name}"] for name in ("first", "last", "all")}
    tokens = float(played.segments[-1].tokens)
    return {
        name: round(value, 2)
        for name, value in (info | gained | {"own_kib": own, "own_cpu": own_cpu, "tokens": tokens}).items()
    }


def play(rehearsal: Rehearsal, config: EnvironmentConfig) -> Played:
    """One episode with the script's turns."""
    row = Row(({"role": "user", "content": ASKED},))
    (played,) = asyncio.run(rehearse(rehearsal, EnvironmentWorker(config, "gateway"), [row], [SAID]))
    if played.status != "ok":
        raise SystemExit(played.status)
    return played


if __name__ == "__main__":
    main()
