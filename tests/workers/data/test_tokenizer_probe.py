"""The texts of tokens by the tokenizer's file are those of transformers' tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import ROOT
from troupe.workers.data import tokenizer_probe


def decoded(folder: Path, ids: list[int], **fields: Any) -> list[str]:
    """Their texts, by the probe."""
    request = {"model": {"path": str(folder), "dtype": "float32", **fields}, "ids": ids}
    return next(tokenizer_probe.decode(request))


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probe sets in its process is set back."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A tokenizer of pieces with spaces before words, as SentencePiece's, one token of which is special."""
    vocabulary = [("<unk>", 0.0), ("\u2581the", -1.0), ("\u2581", -2.0), ("end", -3.0), ("</s>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    return tmp_path


def in_transformers(folder: Path, ids: list[int]) -> list[str]:
    """Their texts, by transformers' tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [tokenizer_probe._text(tokenizer, tokenizer.convert_ids_to_tokens, token) for token in ids]


def test_the_packages_of_all_modules_are_not_searched(tiny_model: Path) -> None:
    """transformers does so when it is imported; here in another process, which has not."""
    request = {"model": {"path": str(tiny_model), "dtype": "float32"}, "longest": 9, "seconds": 9.0}
    request |= {"messages": ['"What is 3 + 4?"'], "tools": [None], "responses": [None], "answers": []}
    program = """
import importlib.metadata, json, sys
search = importlib.metadata.packages_distributions = lambda: sys.exit("searched")
from troupe.workers.data.tokenizer_probe import measure
print(list(measure(json.loads(sys.argv[1]))), sys.modules["torch"])
assert importlib.metadata.packages_distributions is search, "it is set back"
"""
    command = [sys.executable, "-c", program, json.dumps(request)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("None")


def test_the_file_gives_the_texts_without_transformers(
    tiny_model: Path, pieces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, all_pieces = [*range(300), 3000, 4000], list(range(5))
    expected = in_transformers(tiny_model, few), in_transformers(pieces, all_pieces)
    monkeypatch.setattr(tokenizer_probe, "load_tokenizer", lambda _: pytest.fail("transformers was asked"))
    assert (decoded(tiny_model, few), decoded(pieces, all_pieces)) == expected
    assert expected[1] == ["<unk>", " the", " ", "end", "</s>"]


@pytest.mark.parametrize("fields", [{"trust_remote_code": True}, {}], ids=["of the user's code", "unknown to the file"])
def test_transformers_is_asked_what_the_file_cannot_say(
    pieces: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    load = tokenizer_probe.load_tokenizer
    monkeypatch.setattr(tokenizer_probe, "load_tokenizer", lambda model: asked.append(model.path) or load(model))
    assert decoded(pieces, [1, 3 if fields else 99], **fields) == [" the", "end" if fields else "<99>"]
    assert asked == [str(pieces)]
