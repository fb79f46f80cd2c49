"""Chat templates in the public formats of model families, and what each writes behind a turn of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{% set role = 'ipython' if message['role'] == 'tool' else message['role'] %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = """\
<s>{% for message in messages %}
{%- if message['role'] == 'user' %}[INST] {{ message['content'] }}[/INST]
{%- elif message['role'] == 'assistant' and message['tool_calls'] is defined %}[TOOL_CALLS] [
{%- for call in message['tool_calls'] %}{{ call['function'] | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif message['role'] == 'assistant' %} {{ message['content'] | trim }}</s>
{%- elif message['role'] == 'tool' %}
{%- if messages[loop.index0 - 1]['role'] == 'assistant' and messages[loop.index0 - 1]['tool_calls'] is not defined %}
{{- raise_exception('a tool result needs a call') }}{% endif %}[TOOL_RESULTS] {{ message['content'] }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
GEMMA = (
    "<bos>{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK_R1 = (
    "<bos>{% for message in messages %}{% if message['role'] == 'user' %}<|User|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|Assistant|>"
    "{{ message['content'].split('</think>')[-1] }}<|end_of_sentence|>"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LATE = (
    "{% for message in messages %}"
    "{% if loop.last %}<|im_start|>system\nTurn {{ messages | length }}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml(messages: list[Message]) -> str:
    """Written by hand, independently of the template: the text behind the token that ends a turn."""
    return (
        "\n"
        + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        + ("<|im_start|>assistant\n")
    )


def qwen3(messages: list[Message]) -> str:
    text, tools = "\n", list[str]()
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            tools.append(f"\n<tool_response>\n{message['content']}\n</tool_response>")
            continue
        text += f"<|im_start|>user{''.join(tools)}<|im_end|>\n" if tools else ""
        tools = []
        if message["role"] != "end":
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def llama3(messages: list[Message]) -> str:
    names = {"tool": "ipython"}
    parts = (
        f"<|start_header_id|>{names.get(m['role'], m['role'])}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>"
        for m in messages
    )
    return "".join(parts) + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def mistral(messages: list[Message]) -> str:
    tags = {"user": "INST", "tool": "TOOL_RESULTS"}
    return "".join(f"[{tags[m['role']]}] {m['content']}[/{tags[m['role']]}]" for m in messages)


def gemma(messages: list[Message]) -> str:
    parts = (f"<start_of_turn>{m['role']}\n{m['content'].strip()}<end_of_turn>\n" for m in messages)
    return "\n" + "".join(parts) + "<start_of_turn>model\n"


def phi3(messages: list[Message]) -> str:
    return "\n" + "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in messages) + "<|assistant|>\n"


def deepseek_r1(messages: list[Message]) -> str:
    return "".join(("<|User|>" if m["role"] == "user" else "") + m["content"] for m in messages) + "<|Assistant|>"


def zephyr(messages: list[Message]) -> str:
    return "\n" + "".join(f"<|{m['role']}|>\n{m['content']}</s>\n" for m in messages) + "<|assistant|>\n"


@dataclass(frozen=True)
class Family:
    """A template, and what is known of it."""

    template: str
    eos: str
    special: tuple[str, ...]
    behind: Callable[[list[Message]], str] | None
    """The text behind the end of a turn; None: the template rewrites its history in every turn."""
    roles: tuple[str, ...] = ("user", "tool", "system")
    strips: str = ""
    """A response with this text is rewritten once a message of the user follows; empty: none is."""
    any_role_strips: bool = False
    fills: bool = False
    """Whether the template writes white space for an empty turn."""


CHAT = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", CHAT, chatml),
    "qwen3": Family(QWEN3, "<|im_end|>", CHAT, qwen3, ("user", "tool"), "</think>"),
    "llama3": Family(
        LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), llama3
    ),
    "mistral": Family(
        MISTRAL, "</s>", ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), mistral, ("user",), fills=True
    ),
    "gemma": Family(GEMMA, "<end_of_turn>", ("<bos>", "<start_of_turn>", "<end_of_turn>"), gemma, ("user",)),
    "phi3": Family(PHI3, "<|end|>", ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), phi3),
    "deepseek_r1": Family(
        DEEPSEEK_R1,
        "<|end_of_sentence|>",
        ("<bos>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>"),
        deepseek_r1,
        ("user", "tool"),
        "</think>",
        any_role_strips=True,
    ),
    "zephyr": Family(ZEPHYR, "</s>", ("</s>",), zephyr),
    "late_system": Family(LATE, "<|im_end|>", CHAT, None),
}
