"""Runs a reward function in its own process, so that a fault costs one sample and not the run.

This isolates faults (hangs, exits, memory), not attacks: a reward function is the user's own code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import total
from troupe.workers.contract.text import valid_text
from troupe.workers.isolation.child import MAX_REPLY, Child, InvalidReply, LoadFailed
from troupe.workers.isolation.descendants import used_bytes
from troupe.workers.rewards.loading import RewardFunctionError
from troupe.workers.rewards.results import Step, checked_steps

logger = logging.getLogger(__name__)

_ENTRY = "troupe.workers.rewards.child:main"
_GRACE_S = 1.0
"""Seconds that a child gets beyond the timeout to reply for the samples that were in time."""


@dataclass(frozen=True)
class Sample:
    """Input of a reward function."""

    response: str
    answer: str
    metadata: str
    """JSON object."""
    response_tokens: int
    finish_reason: str
    messages: str = "[]"
    """JSON list: the prompt."""
    conversation: str = ""
    """JSON list: all messages of an episode; empty if the sample is one response."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(tokens up to the end of the turn, reward) from the environment."""
    feedback: str = ""
    """What the environment says of the episode."""

    def request(self) -> dict[str, Any]:
        """The sample as it is sent to the child."""
        return {
            "response": self.response,
            "answer": self.answer,
            "metadata": self.metadata,
            "sample": {
                "response_tokens": self.response_tokens,
                "finish_reason": self.finish_reason,
                "messages": self.messages,
                "conversation": self.conversation,
            },
        }


@dataclass(frozen=True)
class RewardResult:
    """Result for one sample: a number, or the reason why it has no number."""

    value: float | None
    status: str = "ok"
    steps: tuple[Step, ...] = ()
    """Process rewards, by character position in the response; only for a function with `process`."""
    cause: str = field(default="", compare=False)
    """Common text of failures of the same cause; if empty, the status is."""
    also: Mapping[str, float] = field(default_factory=dict)
    """Further numbers about the sample by name, which are reported beside the component."""
    feedback: str = ""
    """What the component says of the sample."""


class _OutOfMemory(Exception):
    """The child and its descendants use too much memory together."""


class RewardProcess:
    """One reward function in a child process, which is replaced when it hangs or dies."""

    def __init__(self, config: RewardFunctionConfig, memory_limit_mib: int) -> None:
        self.config = config
        self.memory_limit_mib = memory_limit_mib
        self._child: Child | None = None
        self._pid = 0
        """Process id of the function's process, once the function is loaded."""
        self._resident = 0
        """Memory of the process once the function is loaded, in bytes."""
        self._requests = 0
        self._concurrent = False
        """Whether the function is asynchronous; known once it is loaded."""

    @property
    def pid(self) -> int | None:
        """Process id of the function's process; None if there is none."""
        return self._pid if self._child else None

    def start(self) -> None:
        """Start the child and load the function in it; does nothing if a child is ready. Raises RewardFunctionError if
        the function cannot be loaded or does not take its arguments."""
        if self._child is not None:
            if self._child.alive:
                return
            self.close()
        self._child = child = Child(_ENTRY, self.config.name, self.config.env)
        order = {
            "function": self.config.name,
            "args": self.config.args,
            "batched": self.config.batched,
            "timeout_s": self.config.timeout_s,
            "memory_limit_mib": self.memory_limit_mib,
        }
        try:
            reply = child.load(order)
        except LoadFailed as error:
            self._child = None
            raise RewardFunctionError(str(error)) from None
        self._pid = int(reply["pid"])
        self._concurrent = reply.get("concurrent") is True
        self._resident, _ = used_bytes(child.mark)

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Score the samples of a group; faults of the function never raise.

        A batched function gets all of them in one call, an asynchronous one is called for all of them at the same time,
        any other one by one. A failed sample costs the others only time, unless it ends or blocks the call they share.
        """
        try:
            self.start()
        except (RewardFunctionError, OSError) as error:  # the replacement of a dead child did not start
            self.close()
            return [RewardResult(None, f"error: {error}")] * len(samples)
        if self.config.batched or self._concurrent:
            return self._score(samples)
        return [outcome for sample in samples for outcome in self._score([sample])]

    def close(self) -> None:
        """End the child and everything that it has started."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        self._requests += 1
        request = {"id": self._requests, "samples": [sample.request() for sample in samples]}
        try:
            self.start()
            reply = self._exchange(request)
            outcomes = self._read(reply, samples)
        except TimeoutError:
            self.close()
            return self._all_failed(f"timeout after {self.config.timeout_s:g} s", len(samples))
        except _OutOfMemory as error:
            self.close()
            return self._all_failed(str(error), len(samples))
        except (EOFError, ConnectionError):
            how, words = self._reap()
            return self._all_failed(how, len(samples), words)
        except InvalidReply as error:
            self.close()
            return self._all_failed(f"error: the reward process {error}", len(samples))
        except (RewardFunctionError, OSError) as error:
            self.close()
            return self._all_failed(f"error: {error}", len(samples))
        if reply.get("last"):
            self.close()
        return outcomes

    @staticmethod
    def _all_failed(cause: str, samples: int, words: str = "") -> list[RewardResult]:
        """The same failure for every sample of a request, marked as such, with the last lines of the process."""
        shared = f" (one call for {samples} samples)" if samples > 1 else ""
        return [RewardResult(None, cause + shared + words, cause=cause)] * samples

    def _read(self, reply: dict[str, Any], samples: Sequence[Sample]) -> list[RewardResult]:
        """The outcomes in a reply. Raises InvalidReply for an invalid one: user code may have written it."""
        if reply.get("last") and isinstance(failure := reply.get("failure"), str):
            return self._all_failed(f"{self.config.name}: {failure}", len(samples))
        if reply.get("id") != self._requests:
            raise InvalidReply("replied out of turn")
        results = reply.get("results")
        if not isinstance(results, list) or len(results) != len(samples):
            raise InvalidReply(f"replied no results for {len(samples)} samples")
        return [self._outcome(result, len(s.response)) for result, s in zip(results, samples, strict=True)]

    def _outcome(self, result: Any, length: int) -> RewardResult:
        """The outcome of one sample, with a response of `length` characters. Raises InvalidReply for an invalid one."""
        if not isinstance(result, dict):
            raise InvalidReply("replied a result that is not a JSON object")
        if isinstance(failure := result.get("failure"), str):
            return RewardResult(None, failure, cause=str(result.get("cause", "")))
        value = result.get("value")
        if not isinstance(value, float) or not math.isfinite(value):
            raise InvalidReply("replied neither a number nor a failure")
        feedback = result.get("feedback", "")
        if not isinstance(feedback, str):
            raise InvalidReply("replied feedback that is not text")
        if not self.config.process:
            return RewardResult(value, feedback=valid_text(feedback))
        if (steps := result.get("steps")) is None:
            return RewardResult(None, f"expected steps, got a number: {value}", cause="expected steps, got a number")
        try:
            return RewardResult(value, steps=checked_steps(steps, length), feedback=valid_text(feedback))
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidReply(f"replied invalid steps: {error}") from error

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request. Raises as `Child.exchange`, and _OutOfMemory."""
        if self._child is None:
            raise EOFError
        timeout_s = self.config.timeout_s + (_GRACE_S if self._concurrent else 0.0)
        return self._child.exchange(request, timeout_s, len(request["samples"]) * MAX_REPLY, self._check_memory)

    def _check_memory(self) -> None:
        """Raises _OutOfMemory if the process and its descendants together use more than the limit."""
        if self._child is None or not self._resident:
            return
        most = self._resident + (self.memory_limit_mib << 20)
        used, processes = used_bytes(self._child.mark, at_most=most)
        grown = (used - self._resident) >> 20
        if grown > self.memory_limit_mib:
            raise _OutOfMemory(
                f"{self.config.name}: out of memory (limit {self.memory_limit_mib} MiB; {processes} processes use "
                f"{grown} MiB more)"
            )

    def _reap(self) -> tuple[str, str]:
        """Clean up a child that closed its connection; returns how it ended, and its last lines."""
        child, self._child = self._child, None
        return ("died", "") if child is None else (child.wait(), child.last_lines())


@dataclass(frozen=True)
class EnvironmentReward:
    """The rewards that the environment gave during an episode: their sum, or with `process` each at its turn; and what
    it said with them."""

    config: RewardFunctionConfig

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One outcome per sample; an episode without a reward has 0."""
        return [
            RewardResult(
                total(reward for _, reward in s.turn_rewards),
                steps=s.turn_rewards if self.config.process else (),
                feedback=s.feedback,
            )
            for s in samples
        ]
