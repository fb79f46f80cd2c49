"""Environments as a user of `verifiers` writes them."""

from __future__ import annotations

import importlib
from typing import Any

vf: Any = importlib.import_module("verifiers")


async def exact(completion: list[Any], answer: str) -> float:
    return float(bool(completion) and completion[-1]["content"] == answer)


class Countdown(vf.MultiTurnEnv):
    """The policy counts down from the answer, and is told to go on."""

    async def setup_state(self, state: Any) -> Any:
        state["left"] = int(state["answer"])
        return state

    @vf.stop
    async def counted(self, state: Any) -> bool:
        return state["left"] == 0

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if messages[-1]["content"] == str(state["left"]):
            state["left"] -= 1
        else:
            raise vf.ToolError("lost count") if messages[-1]["content"] == "break" else ValueError("not a number")
        if state["left"] == 0:
            state["final_env_response"] = [{"role": "user", "content": "Done."}]
        return [{"role": "user", "content": "Go on."}]


async def counted_share(state: Any) -> float:
    return 1.0 - state["left"] / int(state["answer"])


async def best_of_group(completions: list[Any]) -> list[float]:
    return [1.0] * len(completions)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


def load_environment(kind: str = "single") -> Any:
    """The environment that the adapter loads."""
    data = importlib.import_module("datasets").Dataset.from_list([{"question": "2+3?", "answer": "5"}])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric([exact]))
    if kind == "tools":
        return vf.ToolEnv(tools=[add], max_turns=4, dataset=data, rubric=vf.Rubric([exact]))
    if kind == "countdown":
        return Countdown(max_turns=9, dataset=data, rubric=vf.Rubric([counted_share]))
    if kind == "group":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric([best_of_group]))
    raise KeyError(kind)
