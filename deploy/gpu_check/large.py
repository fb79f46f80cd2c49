"""Writes a random model with the widths of Qwen2.5-7B and few layers, for the large piece of the GPU check.

Its embedding is larger than a bucket of a weight transfer (1 GiB) and its vocabulary takes the output head in chunks,
which no small model does. The tokenizer is that of another model and knows a part of the vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

LAYERS, VOCABULARY = 4, 152064
WIDTHS: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
NARROW: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(folder: Path, tokenizer: Path, *, narrow: bool) -> int:
    """Write the model; returns the number of its parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    known = AutoTokenizer.from_pretrained(tokenizer)
    config = Qwen2Config(
        **(NARROW if narrow else WIDTHS),
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Write the model and print its size."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_check.large", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--narrow", action="store_true", help="narrow layers, for machines without a GPU")
    given = parser.parse_args()
    print(f"{write(given.out, given.tokenizer, narrow=given.narrow) / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
