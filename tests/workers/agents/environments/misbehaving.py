"""Environments that fail in every way that one can."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from troupe.workers.agents.environments import Environment, Message, Observation, Row


class Echo(Environment):
    """Answers with what it was told, three times."""

    def __init__(self, turns: int = 3) -> None:
        self.left = turns

    def start(self, row: Row) -> Observation:
        return Observation(row.messages)

    def step(self, message: Message) -> Observation:
        self.left -= 1
        if not self.left:
            return Observation(reward=1.0, done=True, info={"pid": float(os.getpid())})
        return Observation([{"role": "user", "content": message["content"]}], reward=0.25)


class AsyncEcho(Echo):
    """The same with coroutines."""

    async def step(self, message: Message) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0.01)
        return super().step(message)


class Gated(Echo):
    """The same, and its second answer waits until the file `gate` exists."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = Path(gate)

    async def step(self, message: Message) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        while self.left == 2 and not self.gate.exists():
            await asyncio.sleep(0.01)
        return super().step(message)


class Faulty(Echo):
    """Behaves at first and fails in the second turn, in the way that it is told."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def start(self, row: Row) -> Observation:
        if self.fault == "start":
            raise RuntimeError("no start today")
        return super().start(row)

    def step(self, message: Message) -> Any:
        if self.left == 3:
            return super().step(message)
        return FAULTS[self.fault](message)

    def close(self) -> None:
        if self.fault == "close":
            time.sleep(3600)


def raises(message: Message) -> Any:
    raise KeyError("treasure")


def hangs(message: Message) -> Any:
    time.sleep(3600)


def spins(message: Message) -> Any:
    while True:
        pass


def exits(message: Message) -> Any:
    print("the arena\nis full")
    os._exit(7)


def leaves(message: Message) -> Any:
    raise SystemExit(3)


def crashes(message: Message) -> Any:
    ctypes.string_at(0)


def eats(message: Message) -> Any:
    return bytearray(8 * 2**30)


def starts_a_child(message: Message) -> Any:
    subprocess.Popen(["sleep", "3600.25"])
    time.sleep(3600)


def offers(*tools: Any) -> Any:
    """Answers with a request that offers these tools."""
    return lambda message: Observation([{"role": "user", "content": "Go on."}], tools=tools)


class HalfCharacters(Environment):
    """Writes half a surrogate pair into every text that it can."""

    def start(self, row: Row) -> Observation:
        call = {"id": "\ud83d", "type": "function", "function": {"name": "\ud83d", "arguments": '{"\ud83d": 1}'}}
        tool = {"function": {"name": "f", "parameters": {"properties": {"\ud83d": {"enum": ["\udc00"]}}}}}
        messages = [
            {"role": "\ud83d", "content": "no \ud83d", "name": "\ud83d"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "\udc00 yes", "tool_call_id": "\ud83d"},
        ]
        return Observation(messages, tools=[tool], stop=["\ud83d"], info={"\ud83d": 1.0})

    def step(self, message: Message) -> Observation:
        raise ValueError("\ud83d")


FAULTS: dict[str, Any] = {
    "raises": raises,
    "hangs": hangs,
    "spins": spins,
    "exits": exits,
    "leaves": leaves,
    "crashes": crashes,
    "eats": eats,
    "child": starts_a_child,
    "nothing": lambda message: None,
    "number": lambda message: 5,
    "role": lambda message: Observation([{"content": "who am I"}]),
    "content": lambda message: Observation([{"role": "user", "content": 3}]),
    "set": lambda message: Observation([{"role": "user", "content": "", "seen": {1, 2}}]),
    "stop": lambda message: Observation([], stop=[""]),
    "stops": lambda message: Observation([], stop=[5]),  # pyright: ignore[reportArgumentType]
    "tools": lambda message: Observation([], tools="add"),  # pyright: ignore[reportArgumentType]
    "tool": offers("add"),
    "custom tool": offers({"type": "custom", "custom": {"name": "sql"}}),
    "flat tool": offers({"type": "function", "name": "add", "parameters": {}}),
    "tool without name": offers({"type": "function", "function": {"description": "Adds."}}),
    "tool with a list": offers({"type": "function", "function": {"name": "add", "parameters": ["a"]}}),
    "tool with a number": offers({"type": "function", "function": {"name": "add", "description": 5}}),
    "nan": lambda message: Observation(reward=float("nan"), done=True),
    "long": lambda message: Observation([{"role": "user", "content": "x" * 2**24}]),
    "close": lambda message: Observation(done=True),
}
