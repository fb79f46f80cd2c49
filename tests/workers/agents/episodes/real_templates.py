"""Chat templates as published, with the special tokens of their tokenizers and the ends that their folders name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import trl

from tests.tokenizers import new_tokenizer
from tests.workers.agents.episodes import templates

_PUBLISHED = Path(trl.__file__).parent / "chat_templates"
"""TRL ships the templates of model families as they are published."""

LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
MERGING = (
    "{% for message in messages %}{% if loop.first or messages[loop.index0 - 1].role != message.role %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{% else %}{{ '\n' }}{% endif %}{{ message.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != message.role %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Adjacent messages of one role become one."""
GLM4 = (
    "[gMASK]<sop>{% for message in messages %}{% if message.role == 'tool' %}<|observation|>\n{{ message.content }}"
    "{% else %}<|{{ message.role }}|>{% if message.content %}\n{{ message.content }}{% else %}\n{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The line break before a turn is the policy's to sample, and is written for an empty turn, too."""


@dataclass(frozen=True)
class Real:
    """A template and what the folder of its model says."""

    template: str
    """Its text, or the name of the published one."""
    eos: str
    """The tokenizer's end-of-sequence token."""
    ends: tuple[str, ...] = ()
    """Further ends, in the generation configuration."""
    special: tuple[str, ...] = ()
    """Further special tokens, not named by the tokenizer."""
    unmarked: tuple[str, ...] = ()
    """Added tokens that the published tokenizer does not mark as special."""
    opening: str = ""
    """What the policy samples before its answer."""
    roles: tuple[str, ...] = ("user", "tool")
    spaced: bool = False
    """Whether the template writes spaces around a turn that no policy samples."""

    @property
    def text(self) -> str:
        """The template."""
        file = _PUBLISHED / f"{self.template}.jinja"
        return file.read_text() if len(self.template) < 40 and file.is_file() else self.template


_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>")
_PHI = ("<|user|>", "<|system|>")
_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")
_CHAT = ("<|im_start|>",)
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
REAL = {
    "qwen2_5": Real("qwen2_5", "<|im_end|>", ("<|endoftext|>",), _CHAT),
    "qwen3": Real("qwen3", "<|im_end|>", ("<|endoftext|>",), _CHAT),
    "qwen3_5_think": Real("qwen3_5_think", "<|im_end|>", ("<|endoftext|>",), _CHAT, opening="hm\n</think>\n\n"),
    "qwen3_instruct": Real("qwen3_instruct_2507", "<|im_end|>", ("<|endoftext|>",), _CHAT),
    "llama3": Real("llama3", "<|end_of_text|>", ("<|eot_id|>",), _HEADERS),
    "llama3_1": Real("llama3_1", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>"), _HEADERS),
    "gemma": Real("gemma", "<eos>", ("<end_of_turn>",), ("<start_of_turn>",), roles=("user",)),
    "gemma3": Real("gemma3", "<eos>", ("<end_of_turn>",), ("<start_of_turn>",), roles=("user",)),
    "gemma4": Real("gemma4", "<eos>", ("<turn|>",), ("<|turn>",), roles=("user",)),
    "phi3": Real("phi3", "<|endoftext|>", ("<|assistant|>", "<|end|>"), _PHI, roles=("user", "system")),
    "deepseek_v3": Real(
        "deepseekv3",
        "<｜end▁of▁sentence｜>",
        unmarked=_DEEPSEEK,
        opening="hm\n</think>\n\n",
        roles=("user",),
    ),
    "deepseek_r1": Real(
        "deepseek_r1_distill",
        "<｜end▁of▁sentence｜>",
        unmarked=_DEEPSEEK,
        opening="hm\n</think>\n\n",
        roles=("user",),
    ),
    "glm4": Real(GLM4, "<|endoftext|>", ("<|user|>", "<|observation|>"), _GLM, opening="\n"),
    "glm4_moe": Real("glm4moe", "<|endoftext|>", ("<|user|>", "<|observation|>"), _GLM, opening="\n<think></think>\n"),
    "gpt_oss": Real(
        "gptoss",
        "<|return|>",
        ("<|endoftext|>", "<|call|>"),
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        roles=("user",),
    ),
    "command_r": Real("cohere", "<|END_OF_TURN_TOKEN|>", (), _COHERE, roles=("user",)),
    "command_r7b": Real(
        "cohere2",
        "<|END_OF_TURN_TOKEN|>",
        (),
        (*_COHERE, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        roles=("user",),
    ),
    "lfm2": Real("lfm2", "<|im_end|>", (), _CHAT),
    "nemotron3": Real("nemotron_3_nano", "<|im_end|>", ("</s>",), _CHAT, opening="hm\n</think>\n"),
    "zephyr": Real(templates.ZEPHYR, "</s>"),
    "mistral": Real(templates.MISTRAL, "</s>", (), ("<s>", "[INST]", "[/INST]"), roles=("user",), spaced=True),
    "llama2": Real(LLAMA2, "</s>", (), ("<s>",), roles=("user",), spaced=True),
    "merging": Real(MERGING, "<|im_end|>", ("<|endoftext|>",), _CHAT, roles=("user", "assistant")),
}


@cache
def real_tokenizer(name: str, smollm2: Path) -> Any:
    """SmolLM2's tokenizer with a template of `REAL` and its special tokens, in a folder that names the ends."""
    from transformers import AddedToken

    real, folder = REAL[name], Path(mkdtemp())
    tokenizer = new_tokenizer(smollm2)
    tokenizer.add_special_tokens({"eos_token": real.eos, "bos_token": "<bos>"})
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (*real.special, *real.ends)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in real.unmarked])
    tokenizer.chat_template = real.text
    tokenizer.name_or_path = str(folder)
    ids = tokenizer.convert_tokens_to_ids([real.eos, *real.ends])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return tokenizer
