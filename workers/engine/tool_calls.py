"""Tool calls in the text of a turn, by vLLM's own parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from troupe.workers.agents.interface import MalformedCall, ParseCalls
from troupe.workers.engine.time_limit import within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRIED = {"type": "function", "function": {"name": "tried", "parameters": {"type": "object", "properties": {}}}}
"""A tool with which a parser is tried out."""
_MOST_CPU_S = 20.0
"""A call that takes longer to read is malformed. Some take minutes for a turn that repeats itself; for a call of
13,000 tokens, the slowest takes 5 s."""


def tool_parser(name: str | None, tokenizer: PreTrainedTokenizerBase) -> ParseCalls | None:
    """vLLM's parser of this name (`vllm serve --tool-call-parser`); None without a name.

    Raises:
        ValueError: vLLM has no such parser, it refuses the tokenizer, or it does not read text.
    """
    if name is None:
        return None
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

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
            found = within(_MOST_CPU_S, parser.extract_tool_calls, text, request)
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
