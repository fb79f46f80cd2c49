"""TEMPORARY"""
from __future__ import annotations

from dataclasses import dataclass


class ConversationError(ValueError): ...
@dataclass(frozen=True)
class Added:
    ids: list[int]
    forked: bool = False
class Conversation:
    def __init__(self, tokenizer, messages, tools=None):
        self.tok=tokenizer; self.messages=list(messages); self.tools=tools
        text=tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False, tools=tools)
        self.prompt_ids=tokenizer(text, add_special_tokens=False)["input_ids"]
    def add_response(self, ids, message):
        self.prompt_ids=self.prompt_ids+list(ids); self.messages.append(message); self.last=list(ids)
    def add_messages(self, messages):
        self.messages += list(messages)
        text="" if self.last[-1:]==[self.tok.eos_token_id] else "<|im_end|>"
        text+="\n"+"".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)+"<|im_start|>assistant\n"
        ids=self.tok(text, add_special_tokens=False)["input_ids"]
        self.prompt_ids=self.prompt_ids+ids
        return Added(ids)
