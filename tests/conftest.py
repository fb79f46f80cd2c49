"""Shared by all tests: an offline environment, the two small models, and the order of the suite."""

from __future__ import annotations

import os
import secrets
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from troupe.workers.contract.config import CPU_THREADS

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "models"
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""
REAL_TIMEOUT_S = 1200
LONG_FIRST = (
    *("test_offline_runs.py", "test_trainer.py", "test_grpo_run.py", "test_algorithms.py", "test_ppo_run.py"),
    *("test_reward_failures.py", "test_weight_sync.py", "test_rollout.py", "test_submit.py", "test_wheel.py"),
    *("test_cluster_demo.py", "test_staged_run.py", "test_worker_deaths.py", "test_rollout_worker_killed.py"),
    *("test_data_forms.py", "test_audit.py", "test_replay.py"),
)
"""Files of real tests by duration, longest first. Files that are not listed are short."""

# Set before any library reads them: no access to a model hub, no usage reports, and ninja on the path.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **CPU_THREADS,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}

# How long an example takes depends on what else runs on the machine; no test may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Create Ray's token. Ray creates one at its first start, and two clusters that start at once would create two."""
    token = Path.home() / ".ray" / "auth_token"
    if not hasattr(config, "workerinput") and not token.exists():
        token.parent.mkdir(exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run cheap tests first and real-stack tests last, and skip GPU tests on a machine without a GPU."""
    for item in items:
        if ROOT / "tests" / "real" in item.path.parents:
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_TIMEOUT_S))
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_rank)
    if hasattr(config, "workerinput"):
        # One of several processes, which take whole files in this order. The longest file comes first, so that one
        # process starts with it while the others run the cheap tests.
        items.sort(key=lambda item: _rank(item) != 0)


def _rank(item: pytest.Item) -> int:
    """Sort key: real tests after the others, long files before short ones, so that processes end at about one time."""
    if item.get_closest_marker("real") is None:
        return -1
    return LONG_FIRST.index(item.path.name) if item.path.name in LONG_FIRST else len(LONG_FIRST)


@cache
def has_gpu() -> bool:
    """Whether torch finds a CUDA device. Imports torch, so only tests that need a GPU call it."""
    import torch

    return torch.cuda.is_available()


def _model(name: str) -> Path:
    folder = MODELS / name
    if not (folder / "config.json").exists():
        pytest.fail(f"{folder} does not exist: run `make models`", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    return _model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny random Llama: two layers, tied embeddings, SmolLM2's tokenizer."""
    return _model("tiny-llama")
