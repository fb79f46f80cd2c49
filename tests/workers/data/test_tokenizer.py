"""`model.chat_template`: a file instead of the tokenizer's template, or texts as they stand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import encode_response, encode_turns
from troupe.workers.data.tokenizer import copy_tokenizer, load_chat_tokenizer, load_tokenizer

OWN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def base(tmp_path: Path, tiny_model: Path) -> Path:
    """The tokenizer of a base model: without a chat template, and with a BOS token before a text and one after it."""
    folder = tmp_path / "base"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix == ".json" and "tokenizer" in file.name:
            shutil.copy(file, folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=ends
    )
    tokenizer.save_pretrained(folder)
    assert tokenizer.chat_template is None
    return folder


def prompt(text: str) -> str:
    return json.dumps([{"role": "user", "content": text}])


def test_a_tokenizer_without_a_template_names_the_option(base: Path) -> None:
    assert load_tokenizer(ModelConfig(path=str(base))).chat_template is None
    with pytest.raises(ValueError, match=r"has no chat template: set model\.chat_template to a Jinja file, or to none"):
        load_chat_tokenizer(ModelConfig(path=str(base)))


def test_a_file_replaces_the_template_of_the_tokenizer(tmp_path: Path, base: Path, tiny_model: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    for folder in (base, tiny_model):
        tokenizer = load_chat_tokenizer(ModelConfig(path=str(folder), chat_template=str(tmp_path / "own.jinja")))
        ids = encode_prompt(tokenizer, prompt("Hello"), 100)
        assert tokenizer.decode(ids) == "[user] Hello<|im_end|>[assistant] "
        reply = encode_response(tokenizer, prompt("Hello"), ids, "Hi")
        assert tokenizer.decode(reply) == "Hi<|im_end|>"
    with pytest.raises(ValueError, match=r"the chat template .*/no\.jinja cannot be read"):
        load_tokenizer(ModelConfig(path=str(base), chat_template=str(tmp_path / "no.jinja")))


@pytest.mark.parametrize("text", ["What is 2 + 2?\nAnswer:", " Say {{ a }} {% b %}\n\n", "<|im_start|>"])
def test_none_tokenizes_the_text_as_it_stands_after_what_the_tokenizer_puts_before_it(
    base: Path, tiny_model: Path, text: str
) -> None:
    own: Any = AutoTokenizer.from_pretrained(base)
    tokenizer = load_chat_tokenizer(ModelConfig(path=str(base), chat_template="none", allow_special=True))
    ids = encode_prompt(tokenizer, prompt(text), 100)
    assert ids == own(text)["input_ids"][:-1]  # the text goes on, so nothing ends it
    assert ids[0] == own.bos_token_id and tokenizer.decode(ids) == f"<|im_start|>{text}"
    instruct = load_chat_tokenizer(ModelConfig(path=str(tiny_model), chat_template="none", allow_special=True))
    assert encode_prompt(instruct, prompt(text), 100) == ids[1:]  # this one puts nothing before a text


def test_a_response_to_plain_text_follows_it_and_ends_the_sequence(base: Path) -> None:
    tokenizer: Any = load_chat_tokenizer(ModelConfig(path=str(base), chat_template="none"))
    ids = encode_prompt(tokenizer, prompt("2 + 2 ="), 100)
    for response in (" 4", "4\n", " {{ x }} "):
        turn = {"role": "assistant", "content": response}
        reply, mask = encode_turns(tokenizer, prompt("2 + 2 ="), ids, [turn])
        assert tokenizer.decode(ids + reply) == f"<|im_start|>2 + 2 ={response}<|im_end|>"
        assert all(mask) and reply == encode_response(tokenizer, prompt("2 + 2 ="), ids, response)


def test_an_export_has_the_template_that_the_model_was_trained_with(tmp_path: Path, tiny_model: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny_model, source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "of the settings"}))
    (tmp_path / "own.jinja").write_text(OWN)
    exports = {None: "of the file", "none": None, str(tmp_path / "own.jinja"): OWN}
    (source / "chat_template.jinja").write_text("of the file")
    for number, (chosen, template) in enumerate(exports.items()):
        (folder := tmp_path / str(number)).mkdir()
        copy_tokenizer(ModelConfig(path=str(source), chat_template=chosen), folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == template
        assert tokenizer("a b")["input_ids"] == AutoTokenizer.from_pretrained(tiny_model)("a b")["input_ids"]
        assert not (folder / "config.json").exists() and not list(folder.glob("*.safetensors"))
