"""What every test shares: a quiet and offline environment, the two small models, and the order of the suite."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "models"
REAL_TIMEOUT_S = 1200
LONG_FIRST = (
    *("real/test_offline", "real/test_runs", "real/test_algorithms", "real/test_offline:chain", "real/test_rollout"),
    *("real/test_trainer", "real/test_submit", "real/test_faults", "real/test_weight_sync", "real/test_runs:ppo"),
)
"""Groups of real tests by what they take, the longest first; those that are not here are short."""

# Before any library reads them: nothing asks a hub, nothing reports usage, and what is compiled finds ninja.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who runs when, and in several processes what stays together; GPU tests only where there is a GPU."""
    for item in items:
        if ROOT / "tests" / "real" in item.path.parents:
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_TIMEOUT_S))
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not item.get_closest_marker("xdist_group"):
            # A file shares its engines and clusters: one process runs all of it.
            item.add_marker(pytest.mark.xdist_group(_file(item)))
    items.sort(key=_turn if getattr(config.option, "loadgroup", False) else _is_real)


def _file(item: pytest.Item) -> str:
    """As in `real/test_runs`."""
    return item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()


def _is_real(item: pytest.Item) -> bool:
    """Order in one process: cheap tests first, real stacks last."""
    return item.get_closest_marker("real") is not None


def _turn(item: pytest.Item) -> int:
    """Order in several processes: one begins with the longest of the real stacks while others do the cheap tests; then
    the other real ones, long before short, so that all end at about the same time."""
    if not _is_real(item):
        return 1
    mark = item.get_closest_marker("xdist_group")
    group = str(mark.args[0]) if mark else ""
    place = LONG_FIRST.index(group) if group in LONG_FIRST else len(LONG_FIRST)
    return place if place == 0 else place + 1


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
