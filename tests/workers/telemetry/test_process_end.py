"""How a process ended, and what its log says about it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.workers.engine.errors import EngineDead
from troupe.workers.telemetry.process_end import end_of_log, ended_by, last_error

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

FATAL = """\
Fatal Python error: {}

Current thread 0x00007fb2 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "<string>", line 1 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
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
        ("(EngineCore pid=7) MemoryError\n", "MemoryError"),
        ("Traceback (most recent call last):\nAssertionError\n", "AssertionError"),
        (
            "free(): invalid pointer\n" + FATAL.format("Aborted"),
            "free(): invalid pointer (Fatal Python error: Aborted)",
        ),
        (FATAL.format("Aborted"), "Fatal Python error: Aborted"),
        (
            "free(): invalid pointer\n"
            "*** SIGABRT received at time=1795889438 on cpu 0 ***\n"
            "PC: @     0x7fcc792a8eec  (unknown)  (unknown)\n"
            "    @     0x7fcc7925a050  160859920  (unknown)\n"
            "[2026-11-28 18:10:38,540 E 17548 17548] logging.cc:474: *** SIGABRT received on cpu 0 ***\n"
            + FATAL.format("Aborted"),
            "free(): invalid pointer (Fatal Python error: Aborted)",
        ),
        (
            FATAL.format("Segmentation fault") + "(EngineCore pid=7) ERROR [multiproc_executor.py:315] Worker proc "
            "VllmWorker-1 died unexpectedly (exit code: -11), shutting down executor.\n"
            "(EngineCore pid=7) RuntimeError: Executor failed.\n",
            "Worker proc VllmWorker-1 died unexpectedly (SIGSEGV)",
        ),
        ("loading\nWARNING: nothing\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_is_the_one_that_has_no_other_cause(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log") == error
    assert last_error(tmp_path / "none") == ""


def test_a_process_finds_its_own_logs(tmp_path: Path) -> None:
    code = "from troupe.workers.telemetry.process_end import own_logs; print(*own_logs())"
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
    assert str(EngineDead("rollout-3", "", "", "SIGKILL")) == "the engine process of rollout-3 has ended (SIGKILL)"
    assert "; its last lines: a | b; its log: " in str(EngineDead("rollout-3", "", "/logs/worker.err", "", "a | b"))


def test_a_log_without_an_error_has_last_lines(tmp_path: Path) -> None:
    """What Ray marks in it is none of them."""
    log = tmp_path / "log"
    log.write_text(":job_id:01\n:actor_name:RolloutWorker\n")
    assert end_of_log(log) == end_of_log(tmp_path / "none") == ""
    log.write_text("one\n\ntwo\x1b[0m\nthree\n:task_name:a\nfour\n")
    assert end_of_log(log) == "two[0m | three | four"
    log.write_text("ValueError: x\none\n")
    assert end_of_log(log) == "ValueError: x"


@pytest.mark.parametrize(("code", "words"), [(-9, "SIGKILL"), (-6, "SIGABRT"), (3, "exit code 3"), (-63, "signal 63")])
def test_exit_codes_have_words(code: int, words: str) -> None:
    assert ended_by(code) == words
