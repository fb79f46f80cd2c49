"""Shared by all tests: an offline environment, the small models, and the order of the suite."""

from __future__ import annotations

import gc
import json
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from troupe.orchestrator.plan.nvidia import Graphics, graphics
from troupe.workers.contract.config import CPU_THREADS
from troupe.workers.contract.units import GIB

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".cache" / "models"
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""
REAL_TIMEOUT_S = 1200
GPU_TIMEOUT_S = 600
CHEAP = -math.inf
"""Rank of files without real tests."""
UNKNOWN_S = 100.0
"""Of a real file without recorded seconds. A new long one that started last would keep one process busy alone."""
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds of a file in `make test` and in `make test-long`, from half a second on, written by `--record-durations`."""
count_frozen = gc.get_freeze_count
"""The count itself: while tests run, `gc` answers what it was after their import."""
seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
"""Seconds so far by (file, make target)."""

# Set before any library reads them: no access to a model hub, no usage reports, and ninja on the path.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # as in a cluster of a run; on nodes that a test starts itself
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    **CPU_THREADS,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}

# A shell starts what runs in the background with SIGINT ignored, and every process of a test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else runs on the machine; no test may.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Create a folder for what the tests leave, and Ray's token, before the processes that share them start."""
    if hasattr(config, "workerinput"):
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` stays, to look at afterwards
    folder = tempfile.mkdtemp(prefix="tests-")  # processes that a test kills remove nothing
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    token = Path.home() / ".ray" / "auth_token"
    if not token.exists():  # Ray creates one at its first start, and two clusters that start at once would create two
        token.parent.mkdir(exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records how long the files take."""
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}, which orders the files")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the durations of a file's tests and fixtures."""
    seconds[report.nodeid.partition("::")[0], _target(report.keywords)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the recorded durations of the files that have run, and forget files that are gone."""
    config = session.config
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        recorded = json.loads(DURATIONS.read_text())
        for (file, target), duration in seconds.items():
            recorded.setdefault(target, {})[file] = round(duration)
        for target, files in recorded.items():
            ordered = sorted(files.items(), key=lambda item: -item[1])
            recorded[target] = {file: duration for file, duration in ordered if duration and (ROOT / file).exists()}
        DURATIONS.write_text(json.dumps(recorded, indent=1) + "\n")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without long tests where these alone run: all imports take half a minute in every process."""
    if config.getoption("markexpr") != "long" or collection_path.suffix != ".py":
        return None
    return True if "mark.long" not in collection_path.read_text() else None


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their parameter: compressed ones may hold the time, and all processes collect the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Run cheap tests first and real-stack tests last, and skip GPU tests where they cannot or should not run."""
    for item in items:
        if any(isinstance(marker.args[1], set | frozenset) for marker in item.iter_markers("parametrize")):
            # Its order differs between processes, which then do not agree on the tests.
            raise pytest.UsageError(f"{item.nodeid}: sort the set of parameters")
        if marker := item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S))
            chosen = "gpu" in (config.getoption("markexpr") or "")
            if lacks := missing_gpus(*marker.args, **marker.kwargs) if chosen else "takes GPUs: run `make gpu-check`":
                item.add_marker(pytest.mark.skip(reason=lacks))
        if ROOT / "tests" / "real" in item.path.parents or (
            ROOT / "tests" / "gpu" in item.path.parents and item.get_closest_marker("long")
        ):
            item.add_marker(pytest.mark.real)
        if item.get_closest_marker("real") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_TIMEOUT_S))
    yield  # here -m removes items
    ranks = _ranks(items)
    items.sort(key=lambda item: ranks[item.path])
    if hasattr(config, "workerinput"):
        # One of several processes, which take whole files in this order. The longest file comes first, so that one
        # process starts with it while the others run the cheap tests.
        longest = next((path for path, rank in sorted(ranks.items(), key=lambda of: of[1]) if rank != CHEAP), None)
        items.sort(key=lambda item: item.path != longest)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while all modules are imported, which would scan the imported ones again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, which every run of the controller starts with. It also counts
    what is excluded, which takes a tenth of a second for the million objects of the tests and none without them."""
    gc.collect()
    gc.freeze()
    gc.enable()
    counted = count_frozen()
    gc.get_freeze_count = lambda: counted


def pytest_unconfigure() -> None:
    """Let Python release these objects at its end, which libraries check."""
    gc.get_freeze_count = count_frozen
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the processor represent the smallest floats again: libraries of vLLM flush them to zero in their process."""
    if "torch" in sys.modules and item.get_closest_marker("real") is None:
        sys.modules["torch"].set_flush_denormal(False)


def _ranks(items: list[pytest.Item]) -> dict[Path, float]:
    """Sort key of each file: real tests after the others, long files before short ones, to end at about one time."""
    recorded = json.loads(DURATIONS.read_text())
    targets: defaultdict[Path, set[str]] = defaultdict(set)
    for item in items:
        targets[item.path] |= {_target(item.keywords)} if item.get_closest_marker("real") else set()
    return {path: _rank(path, found, recorded) for path, found in targets.items()}


def _rank(path: Path, targets: set[str], recorded: Mapping[str, Mapping[str, float]]) -> float:
    """Rank of a file of which the tests of these targets run."""
    file = str(path.relative_to(ROOT))
    return -sum(recorded.get(target, {}).get(file, UNKNOWN_S) for target in targets) if targets else CHEAP


def _target(keywords: Mapping[str, Any]) -> str:
    """The target of the Makefile that runs a test."""
    return "test-long" if "long" in keywords else "test"


@cache
def gpus() -> Graphics:
    """The visible NVIDIA GPUs."""
    return graphics()


def missing_gpus(count: int = 1, *, gib: int = 0) -> str:
    """What this machine lacks of so many GPUs with so much memory; empty: nothing."""
    found = [gpu.memory / GIB for gpu in gpus().gpus]
    if len(found) < count:
        return f"needs {count} NVIDIA GPU{'s' if count > 1 else ''}: {len(found) or 'none'} visible"
    return f"needs a GPU of {gib} GiB: {min(found):.0f} GiB visible" if min(found) < gib else ""


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
    """Folder of the tiny random Llama: two layers, tied embeddings, 4,096 of SmolLM2's tokens."""
    return _model("tiny-llama")
