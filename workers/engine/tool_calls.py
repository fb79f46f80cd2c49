"""Tool calls in the text of a turn, by vLLM's own parsers, each with a bound on its processor time."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from troupe.workers.agents.interface import MalformedCall, ParseCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIED = {"type": "function", "function": {"name": "tried", "parameters": {"type": "object", "properties": {}}}}
"""A tool with which a parser is tried out."""
_MOST_CPU_S = 20.0
"""A call that takes longer to read is malformed. Some take minutes for a turn that repeats itself; for a call of
13,000 tokens, the slowest takes 5 s."""
_STEP_S = 0.05
"""Interval at which the time of a call is checked."""


def tool_parser(name: str | None, tokenizer: PreTrainedTokenizerBase) -> ParseCalls | None:
    """vLLM's parser of this name, or None. Raises ValueError if it is unknown, or refuses the tokenizer or texts."""
    if name is None:
        return None
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    for logs in ("vllm.tool_parsers", "vllm.parser"):  # a traceback for each malformed call, which the episode records
        logging.getLogger(logs).setLevel(logging.CRITICAL)
    # A parser is created for every turn and reads the vocabulary: 40 ms for 49,000 tokens unless that is cached.
    loaded: Any = tokenizer
    reader = get_cached_tokenizer(loaded)
    try:
        parser_class: Any = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ValueError(f"vLLM has no tool parser {name!r}; it has: {known}") from None
    try:
        parser_class(reader)
    except Exception as error:  # a parser can raise anything
        raise ValueError(f"the tool parser {name} refuses the tokenizer: {error}") from error

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate({"messages": [], "model": "", "tools": list(tools)})
        # A parser keeps state of one response.
        parser = parser_class(reader, request.tools)
        try:
            found = limit_cpu(_MOST_CPU_S, parser.extract_tool_calls, text, request)
        except NotImplementedError:
            raise
        except Exception as error:  # a parser can raise anything on text that a policy makes up
            raise MalformedCall(f"{type(error).__name__}: {error}") from error
        calls = [call.model_dump(include={"id", "type", "function"}) for call in found.tool_calls]
        return (found.content or "", calls) if found.tools_called else (text, [])

    try:
        parse("", [_TRIED])
    except NotImplementedError as error:
        raise ValueError(f"vLLM's tool parser {name} does not read the text of a turn: {error}") from error
    except MalformedCall:
        pass
    return parse


class _Ended(BaseException):
    """Raised in the thread of a call that takes too long. Code that expects an Exception does not catch it."""


class _Call(threading.Thread):
    """A call on a separate thread."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(name="time-limit", daemon=True)
        self._function, self._args = function, args
        self.result: Any = None
        self.error: Exception | None = None
        self._clock: int | None = None

    def run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        with suppress(_Ended):
            try:
                self.result = self._function(*self._args)
            except Exception as error:
                self.error = error

    def cpu_s(self) -> float:
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # it has ended since
            return 0.0

    def end(self) -> None:
        """Raise an exception in the thread; it ends when it next runs Python code."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(_Ended))


def limit_cpu(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Return or raise as `function(*args)`, within `seconds` of processor time: others' does not count on a busy
    machine. A call that cannot be ended at once is not waited for. Raises TimeoutError."""
    call = _Call(function, args)
    call.start()
    call.join(_STEP_S)
    while call.is_alive():
        if call.cpu_s() > seconds:
            call.end()
            raise TimeoutError(f"it is not done after {seconds:g} s of processor time")
        call.join(_STEP_S)
    if call.error is not None:
        raise call.error
    return call.result
