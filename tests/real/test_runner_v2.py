"""The model runner V2, which vLLM has on GPUs, records what its sampler leaves as runner V1 does on the CPU, and the
experts of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sampled:
    """What the programs print."""

    experts: Path
    """The model of experts."""
    routed: list[dict[str, Any]]
    """Its rows, by `runner_v2_routes.py`."""
    kept: dict[str, dict[str, Any]]
    """The rows of `runner_v2.py`, by name."""


@pytest.fixture(scope="module")
def sampled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    """The rows of both programs."""
    pytest.importorskip("triton")
    experts = tmp_path_factory.mktemp("runner-v2") / "model"
    save_model(FAMILIES["qwen3-moe"], experts, tiny_model)
    command = [sys.executable, "-m", "tests.real.runner_v2", str(tiny_model), str(experts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    kept = {row["name"]: row for row in rows if "name" in row}
    return Sampled(experts, [row for row in rows if "routes" in row], kept)


def test_the_recorded_experts_are_those_that_the_trainer_replays(sampled: Sampled) -> None:
    """In float32 engine and trainer choose the same experts: what is recorded of every token and layer is the
    trainer's own choice, and with it its log-probs are the sampler's. With others they are not."""
    model, rows = load_model(sampled.experts), sampled.routed
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


def test_the_sets_of_runner_v2_are_those_that_its_logprobs_are_among(tiny_model: Path, sampled: Sampled) -> None:
    """Of requests that are sampled together, those that are greedy or ask for no log-probs among them."""
    rows = sampled.kept
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
