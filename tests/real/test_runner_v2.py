"""The model runner V2, which vLLM has on GPUs, records what its sampler leaves as runner V1 does on the CPU, and the
experts of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.rollout_helpers import load_model, reference_logprobs
from tests.real.runner_v2 import REQUESTS, TOKENS
from tests.real.test_families import FAMILIES, save_model
from tests.routes import own_routes, train_table
from troupe.workers.contract.kept_tokens import kept_of
from troupe.workers.contract.routes import read_routes, write_routes
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.route_replay import RouteReplay
from troupe.workers.models.token_batch import TokenTable

pytestmark = pytest.mark.real


def sampled(script: str, model: Path) -> list[dict[str, Any]]:
    """The rows that a program of this folder prints."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", f"tests.real.{script}", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_recorded_experts_are_those_that_the_trainer_replays(tiny_model: Path, tmp_path: Path) -> None:
    """In float32 engine and trainer choose the same experts: what is recorded of every token and layer is the
    trainer's own choice, and with it its log-probs are the sampler's. With others they are not."""
    model = load_model(save_model(FAMILIES["qwen3-moe"], tmp_path / "model", tiny_model))
    rows = sampled("runner_v2_routes", tmp_path / "model")
    module = CausalLogprobs(model, temperature=1.0)
    replay = module.replay = RouteReplay(model)
    for row in rows:
        replay.set(None)
        ids, recorded = [*row["prompt_ids"], *row["response_ids"]], read_routes(bytes.fromhex(row["routes"])).copy()
        chosen = own_routes(model, torch.tensor([ids]))[:-1]
        assert np.array_equal(np.sort(recorded, -1), np.sort(chosen.numpy(), -1))
        for routes, same in ((recorded, True), ((recorded + 1) % 4, False)):
            table = train_table([row["prompt_ids"]], [row["response_ids"]], [write_routes(routes)])
            with torch.no_grad():
                logprobs = module(batch=TokenTable(table, routed=True).batch([0]))[0]
            assert torch.allclose(logprobs, torch.tensor(row["rollout_logprobs"]), atol=1e-4) is same
    assert len(rows) == 2


def test_the_sets_of_runner_v2_are_those_that_its_logprobs_are_among(tiny_model: Path) -> None:
    """Of requests that are sampled together, those that are greedy or ask for no log-probs among them."""
    rows = {row["name"]: row for row in sampled("runner_v2", tiny_model)}
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
