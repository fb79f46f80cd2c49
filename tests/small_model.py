"""The tiny model with a small vocabulary, for tests that need no other one.

Its tokenizer loads, and its output head computes, in a tenth of the time: most of what a tiny run spends.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.conftest import MODELS
from troupe.workers.isolation.lifetime import remove_at_death

TOKENS = 4096
"""The first of the vocabulary, which encode what the others do, in a third more tokens."""
_EMBEDDING = "model.embed_tokens.weight"


@cache
def small_model() -> Path:
    """The folder of the model."""
    folder = Path(tempfile.mkdtemp(prefix="troupe-test-"))
    remove_at_death(folder)
    shutil.copytree(MODELS / "tiny-llama", folder, ignore=shutil.ignore_patterns(".recipe"), dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    tokenizer["model"] |= {
        "vocab": {token: number for token, number in vocabulary.items() if number < TOKENS},
        "merges": [pair for pair in merges if vocabulary["".join(pair)] < TOKENS],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": TOKENS}))
    _change_embedding(folder, 1)
    return folder


def small() -> str:
    """The override of a spec with this model."""
    return f"model.path={small_model()}"


@cache
def small_teacher() -> Path:
    """The folder of a model with this vocabulary and other weights."""
    folder = small_model() / "teacher"
    shutil.copytree(small_model(), folder)
    _change_embedding(folder, -1)
    return folder


def _change_embedding(folder: Path, factor: int) -> None:
    """Multiply the embedding of the first tokens, and remove the others."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights[_EMBEDDING] = factor * weights[_EMBEDDING][:TOKENS].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
