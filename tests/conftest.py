"""What every test shares: a quiet and offline environment, the two small models, and the order of the suite."""

from __future__ import annotations

import os
import secrets
import sys
from functools import cache
from pathlib import Path

import pytest

from workers.config import CPU_THREADS

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "models"
REAL_TIMEOUT_S = 1200
LONG_FIRST = (
    *("test_offline.py", "test_trainer.py", "test_runs.py", "test_algorithms.py", "test_ppo.py", "test_faults.py"),
    *("test_weight_sync.py", "test_rollout.py", "test_submit.py"),
    *("test_cluster.py", "test_chain.py", "test_deaths.py", "test_rollout_killed.py"),
)
"""Files of real tests by what they take; the others are short."""

# Before any library reads them: nothing asks a hub, nothing reports usage, and what is compiled finds ninja.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **CPU_THREADS,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}


def pytest_configure(config: pytest.Config) -> None:
    """Ray makes its token at its first start on a machine; two clusters that start side by side would make two."""
    token = Path.home() / ".ray" / "auth_token"
    if not hasattr(config, "workerinput") and not token.exists():
        token.parent.mkdir(exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cheap tests first, real stacks last; GPU tests only where there is a GPU."""
    for item in items:
        if ROOT / "tests" / "real" in item.path.parents:
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_TIMEOUT_S))
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=_place)
    if hasattr(config, "workerinput"):
        # One of several processes, which take whole files in this order: the longest file goes first, so that one of
        # them begins with it while the others do the cheap tests.
        items.sort(key=lambda item: _place(item) != 0)


def _place(item: pytest.Item) -> int:
    """Real tests after the others; long files before short ones, so that all processes end at about one time."""
    if item.get_closest_marker("real") is None:
        return -1
    return LONG_FIRST.index(item.path.name) if item.path.name in LONG_FIRST else len(LONG_FIRST)


@cache
def has_gpu() -> bool:
    """Whether torch sees a CUDA device; torch is imported only if a collected test asks."""
    import torch

    return torch.cuda.is_available()


def _model(name: str) -> Path:
    folder = MODELS / name
    if not (folder / "config.json").exists():
        pytest.fail(f"{folder} is not there: run `make models`", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    return _model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny random Llama: two layers, tied embeddings, SmolLM2's tokenizer."""
    return _model("tiny-llama")
