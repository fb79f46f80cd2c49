"""A token that the model has no embedding for refuses its prompt, its row or its episode, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from troupe.workers.agents.episodes.conversation import Conversation, ConversationError
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.data.chat import PromptRefused, encode_prompt
from troupe.workers.data.examples import ExampleRefused, encode_turns
from troupe.workers.data.tokenizer import load_chat_tokenizer, within_embedding

WHY = r"the token 4096 \('<extra>'\) is outside the model's embedding, which has 4096 rows"


@pytest.fixture
def tokenizer(tmp_path: Path, tiny_model: Path) -> Any:
    """Of a folder whose tokenizer has a token more than the model."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer: Any = load_chat_tokenizer(ModelConfig(path=str(folder)))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(tokenizer) == 4096
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    return load_chat_tokenizer(ModelConfig(path=str(folder)))


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_prompt_is_refused(tokenizer: Any) -> None:
    with pytest.raises(PromptRefused, match=WHY):
        encode_prompt(tokenizer, json.dumps(messages("a <extra> b")), 100)
    assert encode_prompt(tokenizer, json.dumps(messages("a b")), 100)


def test_an_end_that_cannot_be_sampled_is_no_end_for_the_engine(tokenizer: Any) -> None:
    assert within_embedding(tokenizer, {4096, 7, 4095}) == [7, 4095]


def test_a_row_of_offline_data_is_refused(tokenizer: Any) -> None:
    said = json.dumps(messages("a"))
    prompt = encode_prompt(tokenizer, said, 100)
    for response in ("yes", "<extra>"):
        turns = [{"role": "assistant", "content": response}]
        if response == "yes":
            assert len(encode_turns(tokenizer, said, prompt, turns)[0]) > 1
            continue
        with pytest.raises(ExampleRefused, match=WHY):
            encode_turns(tokenizer, said, prompt, turns)


def test_an_episode_fails(tokenizer: Any) -> None:
    with pytest.raises(ConversationError, match=WHY):
        Conversation(tokenizer, messages("<extra>"))
    conversation = Conversation(tokenizer, messages("a"))
    conversation.add_response([5, 2], {"role": "assistant", "content": tokenizer.decode([5])})
    with pytest.raises(ConversationError, match=WHY):
        conversation.add_messages(messages("<extra>"))
