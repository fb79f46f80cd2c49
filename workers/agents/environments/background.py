"""Calls of tools that run while the policy takes further turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from troupe.workers.agents.environments.functions import ToolCallError

CLOSING_S = 1.0
"""Time in which calls that are still open at the end of an episode may end themselves."""


class CallsLeftOpen(RuntimeError):
    """An episode ended before its calls: what they run in must end with its process."""


@dataclass(frozen=True)
class _OpenCall:
    title: str
    answer: asyncio.Task[str]


class BackgroundCalls:
    """The calls of an episode that run in the background. They are numbered, because ids of calls are random: prompts
    would differ between two runs with the same seed."""

    def __init__(self, parallel_calls: int) -> None:
        """Run at most `parallel_calls` at the same time; others wait for a slot."""
        self._slots = asyncio.Semaphore(parallel_calls)
        self._open: list[_OpenCall] = []
        self._begun = 0
        self._overdue = False
        """Whether a call has exceeded its time, after which a function may still run in its thread."""

    def __len__(self) -> int:
        """Number of calls that have not been answered."""
        return len(self._open)

    def begin(self, name: str, call: Awaitable[str], timeout_s: float) -> str:
        """Start a call that may take `timeout_s` once it has a slot; what the policy reads now."""
        self._begun += 1
        title = f"call {self._begun} of {name}"
        self._open.append(_OpenCall(title, asyncio.create_task(self._run(call, timeout_s))))
        return f"{title} has started. Its answer comes in a later message."

    async def _run(self, call: Awaitable[str], timeout_s: float) -> str:
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await call
            except TimeoutError:
                self._overdue = True
                raise ToolCallError(f"not done after {timeout_s:g} s") from None

    async def wait(self) -> None:
        """Wait until at least one call is done."""
        await asyncio.wait([call.answer for call in self._open], return_when=asyncio.FIRST_COMPLETED)

    def answers(self) -> tuple[list[str], int]:
        """What the policy reads of the calls that are done, in the order in which they began, and how many of them
        failed. Raises what a call raised besides ToolCallError."""
        done = [call for call in self._open if call.answer.done()]
        self._open = [call for call in self._open if call not in done]
        texts, failed = list[str](), 0
        for call in done:
            try:
                text = call.answer.result()
            except ToolCallError as error:
                text, failed = f"error: {error}", failed + 1
            texts.append(f"[{call.title} is done]\n{text}")
        return texts, failed

    async def close(self) -> None:
        """Cancel the open calls. Raises CallsLeftOpen if there were any, or a call has exceeded its time."""
        left = [call.title for call in self._open if not call.answer.done()]
        for call in self._open:
            call.answer.cancel()
        if self._open:
            await asyncio.wait([call.answer for call in self._open], timeout=CLOSING_S)
        self._open = []
        if left or self._overdue:
            raise CallsLeftOpen(", ".join(left) or "a call that has exceeded its time")
