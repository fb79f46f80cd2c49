"""A custom agent, in any framework: it talks to the policy over a protocol that it knows.

The agent is the environment. Every request that it makes is an observation, and every turn of the policy is the
response to one: what is trained are the tokens of the responses, exactly as they were sampled. A request that continues
one of the conversations so far, in whatever form it writes the turns, continues its tokens. Any other (another
conversation, an earlier turn, a rewritten history, other tools) begins a new row of the sample with its own prompt.
Requests that wait at the same time, and the choices of one request (`n`), are sampled at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.environments.gateway.endpoint import AgentEndpoint
from troupe.workers.agents.environments.gateway.history import Conversations
from troupe.workers.agents.environments.gateway.request import MODEL_NAME, Choice
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.contract.imports import import_attribute, locate, require_package
from troupe.workers.contract.rewards import Feedback
from troupe.workers.isolation.child import BoundedOutput
from troupe.workers.isolation.descendants import MARK, end_marked, new_mark
from troupe.workers.rewards.results import ProgramFailed, as_number

Outcome = tuple[float | Feedback | None, dict[str, float]]
"""The reward, or None if `roles.reward` scores, and further numbers for the metrics."""
SERVICES = {"OPENAI": "/v1", "ANTHROPIC": ""}
"""Services whose clients find the endpoint in environment variables of a command, NAME_BASE_URL, NAME_API_KEY and
NAME_MODEL, and the path of their URL. The model is any name, for there is one model."""
ROW_VARIABLE = "TROUPE_ROW"
"""Environment variable of a command: the row, as JSON."""


class Agent(Environment):
    """Runs `function(row, client)`, or a command, against a separate endpoint.

    The function gets the `Row` and an `openai.OpenAI` client (`AsyncOpenAI` if it is a coroutine) and returns the
    reward (which may be `Feedback`), or None if `roles.reward` scores, or a mapping with `reward` and further numbers
    for the metrics. A command gets the endpoint and the row in environment variables; its last line of output is the
    reward if it is a number, or such a mapping if it is a JSON object. The endpoint listens on the loopback interface,
    with a key for each episode. The temperature of a request is ignored: responses are sampled with the spec's.
    """

    def __init__(self, function: str | None = None, command: Sequence[str] = (), args: Mapping[str, Any] | None = None):
        """`function`: `package.module:function`; `command`: program and arguments; `args`: the function's keywords."""
        if (function is None) == (not command):
            raise ValueError("set function or command, and not both")
        if function is not None:
            require_package("openai", "function")
        self._function = None if function is None else _load(function)
        self._command, self._args = list(command), dict(args or {})
        self._endpoint = AgentEndpoint()
        self._pending: list[Choice] = []
        """Choices that are being sampled: the next turn's, then the ones of the other conversations."""
        self._conversations = Conversations()
        self._agent: asyncio.Task[Outcome] | None = None
        self._program: Program | None = None
        self._requests = self._begun = self._rewritten = 0

    async def start(self, row: Row) -> Observation:
        """The agent's first request."""
        url = await self._endpoint.start()
        self._agent = asyncio.create_task(self._run(row, url))
        return await self._next()

    async def step(self, message: Message) -> Observation:
        """The responses to the pending requests; then the next requests, or the end."""
        turns = (message, *message.pop("also", ()))
        for place, (choice, turn) in enumerate(zip(self._pending, turns, strict=False)):
            response = choice.read(turn, f"call_{self._requests}_{place}")
            answered = "refused" not in response and not choice.options.counted
            self._begun += answered and not choice.known
            # The tokens of a turn with a call that the agent did not get differ from its history's.
            self._conversations.forget(choice.conversation)
            if answered and not _has_fewer_calls(response, turn):
                self._conversations.answered(choice, response)
            if not choice.answer.done():
                choice.answer.set_result(response)
        return await self._next()

    async def close(self) -> None:
        """End a command, close the endpoint and wait for the agent to end. An agent that waits for a response gets an
        error instead. One that does not end then costs its process."""
        if self._program is not None:
            self._program.kill()
        for choice in (*self._pending, *self._waiting_now()):
            choice.answer.cancel()
        await self._endpoint.close()
        if self._agent is not None:
            await asyncio.gather(self._agent, return_exceptions=True)

    async def _next(self) -> Observation:
        """The next request as an observation; the end, if the agent returns first."""
        if self._agent is None:
            raise RuntimeError("the episode was not started")
        request = asyncio.create_task(self._endpoint.waiting.get())
        await asyncio.wait({request, self._agent}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            reward, numbers = self._agent.result()  # raises what the agent raised
            if not self._begun:
                refused = self._endpoint.refused
                why = f"; its last one was refused: {refused}" if refused else ""
                raise ValueError(f"the agent ended without a request{why}")
            counts = {"requests": self._requests, "restarted": self._begun - 1, "rewritten": self._rewritten}
            info = numbers | {name: float(count) for name, count in counts.items()}
            return Observation(reward=reward, done=True, info=info)
        waiting, taken = [request.result(), *self._waiting_now()], set[str]()
        for choice in waiting:
            self._requests += not choice.options.counted
            if note := self._conversations.place(choice, f"conversation {self._requests}", taken):
                self._rewritten += 1
                self._endpoint.notes.append(note)
        self._pending = sorted(waiting, key=lambda choice: not choice.known)
        main, *others = self._pending
        note = self._endpoint.notes.pop(0) if self._endpoint.notes else ""
        return replace(main.observation, note=note, also=[choice.observation for choice in others])

    def _waiting_now(self) -> list[Choice]:
        """Takes the choices that wait, without waiting for any."""
        return [self._endpoint.waiting.get_nowait() for _ in range(self._endpoint.waiting.qsize())]

    async def _run(self, row: Row, url: str) -> Outcome:
        """Run the agent to its end; what it has earned."""
        if self._function is None:
            return await self._run_command(row, url)
        from openai import AsyncOpenAI, OpenAI

        settings: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": self._endpoint.key,
            "max_retries": 0,
            "timeout": None,
        }
        if inspect.iscoroutinefunction(self._function):
            async with AsyncOpenAI(**settings) as client:
                returned = await self._function(row, client, **self._args)
        else:
            with OpenAI(**settings) as client:
                returned = await asyncio.to_thread(self._function, row, client, **self._args)
        return _read_outcome(returned)

    async def _run_command(self, row: Row, url: str) -> Outcome:
        own = {ROW_VARIABLE: json.dumps(vars(row))}
        for service, path in SERVICES.items():
            own |= {f"{service}_BASE_URL": url + path, f"{service}_API_KEY": self._endpoint.key}
            own[f"{service}_MODEL"] = MODEL_NAME
        self._program = await Program.start(self._command, own)
        last = await self._program.last_line()
        try:
            return _read_outcome(json.loads(last) if last.startswith("{") else float(last))
        except (ValueError, RecursionError):  # it is not about the reward
            return None, {}


def _read_outcome(returned: Any) -> Outcome:
    """What an agent returns, as its reward and further numbers. Raises TypeError for something else."""
    numbers = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    given = numbers.get("reward")
    if isinstance(given, Feedback):
        numbers["reward"] = given.reward
    read = {str(name): as_number(value) for name, value in numbers.items() if value is not None}
    for name, value in read.items():
        if value is None:
            where = "" if name == "reward" else f" as {name:.60}"
            raise TypeError(f"the agent returned no number{where}, but {type(numbers[name]).__name__}")
    known = {name: value for name, value in read.items() if value is not None}
    reward = known.pop("reward", None)
    return (replace(given, reward=reward) if isinstance(given, Feedback) else reward), known


class Program:
    """A running program: its end, its last line of output, and why it failed."""

    def __init__(
        self, process: asyncio.subprocess.Process, mark: str, output: BoundedOutput, errors: BoundedOutput
    ) -> None:
        self._process, self._mark, self._output, self._errors = process, mark, output, errors

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str]) -> Program:
        """Start it with further environment variables. Raises OSError if there is no such program."""
        output, errors = BoundedOutput(command[0], log=None), BoundedOutput(command[0])
        mark = f"{os.environ.get(MARK) or new_mark()}.{new_mark()}"
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=os.environ | variables | {MARK: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.descriptor,
                stderr=errors.descriptor,
                start_new_session=True,
            )
        except BaseException:
            output.discard()
            errors.discard()
            raise
        output.started()
        errors.started()
        return cls(process, mark, output, errors)

    async def last_line(self) -> str:
        """Wait for its end; the last line of its output, or nothing. Raises ProgramFailed if it has failed."""
        code = await self._process.wait()
        await asyncio.gather(*(asyncio.to_thread(pipe.drain) for pipe in (self._output, self._errors)))
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
            raise ProgramFailed(f"the command ended with {how}{self._errors.last_lines() or self._output.last_lines()}")
        return (self._output.lines() or [""])[-1]

    def kill(self) -> None:
        """End it, what is in its process group, and what it has left behind."""
        if self._process.returncode is None:  # after that its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        end_marked(self._mark)


def _has_fewer_calls(response: Message, turn: Message) -> bool:
    return len(response.get("tool_calls") or ()) < len(turn.get("tool_calls") or ())


def _load(name: str) -> Any:
    function = import_attribute(name, *locate(name, {}, "agent", "package.module:function"))
    if not callable(function):
        raise ValueError(f"{name}: not a function, got {type(function).__name__}")
    return function
