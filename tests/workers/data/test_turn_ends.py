"""Base models on a chat template: the end that the template writes is known to the engine and to exports."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer, GenerationConfig

from tests.tokenizers import new_tokenizer
from troupe.workers.agents.episodes.check import _random, _scripted
from troupe.workers.agents.episodes.conversation import Conversation, TurnReader
from troupe.workers.agents.episodes.turns import TurnLimits
from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig, StructuredConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import encode_response, encode_turns
from troupe.workers.data.tokenizer import copy_tokenizer, load_chat_tokenizer
from troupe.workers.data.turn_ends import name_end, turn_ends
from troupe.workers.rollout import RolloutWorker

END, TEXT_END = "<|im_end|>", "<|endoftext|>"


@pytest.fixture
def base(tmp_path: Path, tiny_model: Path) -> Path:
    """The folder of a base model whose configurations name the end of a text, and no end of a turn."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": TEXT_END}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "max_length": 77}')
    return folder


def test_the_end_that_the_template_writes_is_one(base: Path) -> None:
    tokenizer: Any = load_chat_tokenizer(ModelConfig(path=str(base)))
    end = tokenizer.convert_tokens_to_ids(END)
    ends = turn_ends(tokenizer)
    assert (ends.ids, ends.own, ends.unnamed) == ({tokenizer.eos_token_id, end}, end, END)


def test_offline_data_and_env_check_end_a_turn_with_it(base: Path) -> None:
    tokenizer: Any = load_chat_tokenizer(ModelConfig(path=str(base)))
    asked = json.dumps([{"role": "user", "content": "1 + 1?"}])
    ids = encode_response(tokenizer, asked, encode_prompt(tokenizer, asked, 100), "2")
    assert tokenizer.decode(ids) == f"2{END}"
    assert tokenizer.decode(next(_scripted(tokenizer, ["2"]))) == f"2{END}"
    turns = _random(tokenizer, random.Random(0))
    assert {tokenizer.decode(next(turns)[-1:]) for _ in range(20)} == {END, TEXT_END}


def test_an_end_that_the_tokenizer_does_not_mark_as_special_is_one(base: Path) -> None:
    """The engine stops at it, an episode has one end, and offline training has that of the template."""
    tokenizer: Any = load_chat_tokenizer(ModelConfig(path=str(base)))
    (base / "config.json").unlink()  # its embedding has no row for another token
    tokenizer.add_tokens([AddedToken("<|turn_end|>", special=False, normalized=False)])
    tokenizer.chat_template = tokenizer.chat_template.replace(END, "<|turn_end|>")
    ends = turn_ends(tokenizer)
    assert ends.ids == {tokenizer.eos_token_id, ends.own} and ends.unnamed == "<|turn_end|>"
    asked = [{"role": "user", "content": "1 + 1?"}]
    for end in ("<|turn_end|>", TEXT_END):
        ids = tokenizer(f"2{end}", add_special_tokens=False)["input_ids"]
        message, history = TurnReader(tokenizer).read(ids, None, cut=False)
        conversation = Conversation(tokenizer, asked)
        conversation.add_response(ids, history)
        added = conversation.add_messages(asked)
        assert message["content"] == history["content"] == "2"
        assert tokenizer.decode(added.ids).startswith("\n<|im_start|>user")
    turns = [{"role": "assistant", "content": "2"}, *asked, {"role": "assistant", "content": "3"}]
    ids, _ = encode_turns(tokenizer, json.dumps(asked), encode_prompt(tokenizer, json.dumps(asked), 100), turns)
    whole = tokenizer.apply_chat_template([*asked, *turns], tokenize=False)
    assert whole.rstrip().endswith(tokenizer.decode(ids)) and ids[-1] == ends.own


def test_an_end_in_the_configuration_of_the_model_counts_where_there_is_no_other(base: Path) -> None:
    (base / "generation_config.json").unlink()
    (base / "config.json").write_text('{"text_config": {"eos_token_id": [2, 5, -1, null]}}')
    ends = turn_ends(load_chat_tokenizer(ModelConfig(path=str(base))))
    assert (ends.ids, ends.unnamed) == ({0, 2, 5}, "")


def test_an_export_names_the_end_that_its_model_was_trained_to_write(base: Path, tmp_path: Path) -> None:
    (export := tmp_path / "export").mkdir()
    model = ModelConfig(path=str(base))
    shutil.copy(base / "generation_config.json", export)
    copy_tokenizer(model, export)
    name_end(model, export)
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    assert tokenizer.eos_token == END
    named = GenerationConfig.from_pretrained(export)
    assert (named.eos_token_id, named.max_length) == ([0, 2], 77)
    assert turn_ends(tokenizer).unnamed == ""


REFUSED = {"do_sample": False, "temperature": 0.9}


@pytest.mark.parametrize("given", [json.dumps(REFUSED).encode(), b"{not json", b"[]", b"null", b"", b"\xff\xfe{"])
def test_an_export_names_the_end_whatever_the_generation_settings_are(base: Path, tmp_path: Path, given: bytes) -> None:
    """What transformers refuses to write stays; what is not a JSON object is of no use to a tool, and is replaced."""
    (base / "generation_config.json").write_bytes(given)
    (export := tmp_path / "export").mkdir()
    model = ModelConfig(path=str(base))
    shutil.copy(base / "generation_config.json", export)
    copy_tokenizer(model, export)
    ends = turn_ends(load_chat_tokenizer(model))
    assert ends.unnamed == END
    name_end(model, export)
    named = json.loads((export / "generation_config.json").read_bytes())
    assert named == {**(REFUSED if given == json.dumps(REFUSED).encode() else {}), "eos_token_id": sorted(ends.ids)}
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    assert (tokenizer.eos_token, turn_ends(tokenizer).unnamed) == (END, "")


@pytest.mark.parametrize("chosen", [None, "none"])
def test_an_export_of_a_model_that_names_its_end_is_left_as_it_is(
    tiny_model: Path, base: Path, tmp_path: Path, chosen: str | None
) -> None:
    """So is that of a base model without a template."""
    source = tiny_model if chosen is None else base
    (export := tmp_path / "export").mkdir()
    model = ModelConfig(path=str(source), chat_template=chosen)
    shutil.copy(source / "generation_config.json", export)
    copy_tokenizer(model, export)
    before = {file.name: file.read_bytes() for file in export.iterdir()}
    name_end(model, export)
    assert {file.name: file.read_bytes() for file in export.iterdir()} == before


def test_an_export_without_a_tokenizer_is_left_as_it_is(tmp_path: Path) -> None:
    """A critic's model may have none."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    name_end(ModelConfig(path=str(tmp_path)), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def params(model: Path, *stop: str, forms: bool = True, limits: TurnLimits | None = None) -> Any:
    """What a rollout worker asks of vLLM, with a form in the spec."""
    config = RolloutConfig(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(),
        sampling=SamplingConfig(stop=stop, structured=StructuredConfig(regex="[0-9]")),
        seed=0,
        transfer_backend="shm",
        device="cpu",
    )
    worker = RolloutWorker(config, "rollout-0")
    worker.generation.tokenizer = load_chat_tokenizer(config.model)
    return worker.generation.sampling_params(GroupRequest("u", 0, 0, 1, seed=0, forms=forms), 0, limits)


def test_the_engine_stops_at_every_end(base: Path, tiny_model: Path) -> None:
    assert params(base).stop_token_ids == [0, 2]
    assert params(tiny_model).stop_token_ids == [2]


@pytest.mark.parametrize("stop", ["<|im_start|>", "x<|im_start|>", "<|im_start|>user"])
def test_a_stop_string_with_a_special_token_matches(tiny_model: Path, stop: str) -> None:
    """As vLLM's own detokenizer finds stop strings."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer = new_tokenizer(tiny_model)
    fields: dict[str, Any] = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    ids = tokenizer("some x<|im_start|>user text", add_special_tokens=False)["input_ids"]
    fields |= {"prompt_token_ids": ids[:1], "sampling_params": params(tiny_model, stop)}
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, EngineCoreRequest(**fields))
    assert [detokenizer.update([token], False) for token in ids[1:]].count(stop) >= 1


def test_an_audit_is_sampled_without_forms(tiny_model: Path) -> None:
    """Neither that of the spec nor that of a turn."""
    turn = TurnLimits(0, 4, structured=StructuredConfig(choice=("yes", "no")))
    assert params(tiny_model).structured_outputs.regex == "[0-9]"
    assert params(tiny_model, limits=turn).structured_outputs.choice == ["yes", "no"]
    assert params(tiny_model, forms=False).structured_outputs is None
    assert params(tiny_model, forms=False, limits=turn).structured_outputs is None
