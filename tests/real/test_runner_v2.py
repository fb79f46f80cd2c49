"""The model runner V2, which vLLM has on GPUs, records what its sampler leaves as runner V1 does on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.real.rollout_helpers import load_model, reference_logprobs
from tests.real.runner_v2 import REQUESTS, TOKENS
from troupe.workers.contract.kept_tokens import kept_of

pytestmark = pytest.mark.real


def test_the_sets_of_runner_v2_are_those_that_its_logprobs_are_among(tiny_model: Path) -> None:
    """Of requests that are sampled together, those that are greedy or ask for no log-probs among them."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.real.runner_v2", str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-3000:]
    rows = {row["name"]: row for row in map(json.loads, filter(lambda line: line[0] == "{", done.stdout.splitlines()))}
    assert rows.keys() == REQUESTS.keys() and not any(row["problem"] for row in rows.values())
    model, sizes = load_model(tiny_model), {}
    for name, row in rows.items():
        row["kept_tokens"] = [bytes.fromhex(words) for words in row["kept_tokens"]]
        kept = [kept_of(np.frombuffer(words, np.int32), model.config.vocab_size) for words in row["kept_tokens"]]
        sizes[name] = [int(one.sum()) for one in kept]
        if name != "probe":
            expected = reference_logprobs(model, row, 1.0 if name == "greedy" else 0.7)
            assert torch.allclose(torch.tensor(row["rollout_logprobs"]), expected, atol=1e-4), name
    everything = [model.config.vocab_size] * TOKENS
    assert sizes["whole"] == sizes["greedy"] == sizes["probe"] == everything
    assert sizes["many"] == [2_000] * TOKENS
    assert max(sizes["all"]) <= 50 and max(sizes["top-p"]) < model.config.vocab_size
