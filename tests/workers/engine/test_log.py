"""What an engine's log says about its end."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.workers.engine.errors import EngineDead, last_error

LOG = """\
(EngineCore pid=7) ERROR 11-23 20:00:00 [core.py:1234] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-23 20:00:00 [core.py:1234] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 20:00:00 [core.py:1234]   File "selector.py", line 1, in f
(EngineCore pid=7) ERROR 11-23 20:00:00 [core.py:1234] ValueError: head_size not supported: 16
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) ValueError: head_size not supported: 16
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (LOG, "ValueError: head_size not supported: 16"),
        ("x" * 200_000 + "\n" + LOG, "ValueError: head_size not supported: 16"),
        ("torch.OutOfMemoryError: no memory\n", "torch.OutOfMemoryError: no memory"),
        (
            "CUDA error (flash_fwd.h:60): an illegal memory access was encountered\n"
            + "\n".join(LOG.splitlines()[-3:]),
            "CUDA error (flash_fwd.h:60): an illegal memory access was encountered",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n",
            "terminate called after throwing an instance of 'c10::Error'",
        ),
        ("Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault"),
        ("loading\nWARNING: nothing\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_is_the_one_that_has_no_other_cause(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log") == error
    assert last_error(tmp_path / "none") == ""


def test_a_process_finds_its_own_logs(tmp_path: Path) -> None:
    code = "from troupe.workers.engine.errors import own_logs; print(*own_logs())"
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=out, stderr=err, check=True)
    assert (tmp_path / "out").read_text().split() == [str(tmp_path / "out"), str(tmp_path / "err")]


def test_the_error_names_the_fault_and_the_log_and_survives_pickling() -> None:
    error = EngineDead("rollout-3", "ValueError: x", "/logs/worker.err")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.fault) == (str(error), "ValueError: x")
    assert str(error).startswith(
        "the engine process of rollout-3 has ended; vLLM's last error: ValueError: x; its log: "
    )
    assert str(error).endswith(":/logs/worker.err")
    assert str(EngineDead("rollout-3")) == "the engine process of rollout-3 has ended"
