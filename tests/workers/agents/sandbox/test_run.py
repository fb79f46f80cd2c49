"""Ordinary programs in the sandbox, and machines that do not permit one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from troupe.workers.agents.sandbox import run, seccomp
from troupe.workers.agents.sandbox.run import (
    SandboxError,
    SandboxLimits,
    SandboxStarter,
    SandboxUnavailable,
    _explain,
    check_sandbox,
    run_python,
)


def test_a_program_reads_its_input_and_prints() -> None:
    result = run_python("print(sum(map(int, input().split())))", "1 2 3\n")
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == ("6\n", "", 0, None)
    assert result.ok and not result.timed_out and not result.out_of_memory


def test_an_error_is_a_traceback_and_an_exit_code() -> None:
    result = run_python("print('before')\nraise ValueError('wrong')")
    assert (result.stdout, result.exit_code, result.ok) == ("before\n", 1, False)
    assert result.stderr.endswith(
        "File \"/program/main.py\", line 2, in <module>\n    raise ValueError('wrong')\nValueError: wrong\n"
    )


@pytest.mark.parametrize("code", ["import sys\nsys.exit(7)", "import os\nos._exit(7)"])
def test_the_exit_code_is_the_programs(code: str) -> None:
    assert run_python(code).exit_code == 7


def test_code_that_is_not_python_fails_with_its_line() -> None:
    result = run_python("print('x'\n")
    assert result.exit_code == 1
    assert "line 1" in result.stderr and "SyntaxError" in result.stderr


@pytest.mark.parametrize("text", ["äöü \u4f60\u597d \U0001f600", "a\r\nb\rc\n", "nul \0 and escape \x1b[0m", ""])
def test_text_goes_in_and_out_unchanged(text: str) -> None:
    echo = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert run_python(echo, text).stdout == text
    assert run_python(f"import sys\nsys.stdout.buffer.write({text!r}.encode())").stdout == text


def test_bytes_that_are_not_text_are_replaced() -> None:
    assert run_python("import sys\nsys.stdout.buffer.write(b'a\\xffb')").stdout == "a\ufffdb"


def test_text_that_utf_8_cannot_encode_is_replaced() -> None:
    assert run_python("print(ascii(input()))", "a\ud800b").stdout == "'a?b'\n"


def test_a_large_input_and_a_large_program_arrive_whole() -> None:
    text = "0123456789" * 800_000
    program = "import sys\nprint(len(sys.stdin.read()))\n" + "# comment\n" * 100_000
    assert run_python(program, text).stdout == f"{len(text)}\n"


def test_input_that_nobody_reads_is_no_fault() -> None:
    result = run_python("print('done')", "x" * 5_000_000)
    assert (result.stdout, result.exit_code) == ("done\n", 0)


def test_input_and_output_flow_at_the_same_time() -> None:
    limits = SandboxLimits(output_kib=8192)
    result = run_python(
        "import sys\nfor line in sys.stdin:\n    sys.stdout.write(line)", "line\n" * 500_000, limits=limits
    )
    assert result.stdout == "line\n" * 500_000


def test_the_start_of_stdout_and_the_end_of_stderr_are_kept() -> None:
    code = "import sys\nfor stream in (sys.stdout, sys.stderr):\n    stream.write('start' + 'x' * 10_000 + 'end')"
    result = run_python(code, limits=SandboxLimits(output_kib=1))
    assert result.stdout == ("start" + "x" * 1024)[:1024]
    assert result.stderr == ("x" * 1024 + "end")[-1024:]
    assert result.stdout_discarded == result.stderr_discarded == 10_008 - 1024


def test_a_program_that_takes_too_long_is_stopped() -> None:
    result = run_python("print('early', flush=True)\nwhile True: pass", limits=SandboxLimits(timeout_s=2.0))
    assert (result.stdout, result.timed_out, result.ok, result.exit_code) == ("early\n", True, False, None)
    assert result.wall_s >= 2.0


def test_the_start_of_the_sandbox_is_not_the_programs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_BOOTSTRAP", f"import time; time.sleep(1.0); {run._BOOTSTRAP}")
    result = run_python("print(1)", limits=SandboxLimits(timeout_s=0.9))
    assert result.stdout == "1\n" and not result.timed_out
    assert 0.0 < result.program_s < 0.9 < 1.0 < result.wall_s


def test_a_sandbox_that_does_not_start_is_an_error_and_not_a_slow_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_BOOTSTRAP", f"import time; time.sleep(0.4); {run._BOOTSTRAP}")
    monkeypatch.setattr(run, "_START_S", 0.1)
    with pytest.raises(SandboxError, match=r"did not start within 0\.1 s"):
        run_python("print(1)")


def test_several_programs_start_from_one_process() -> None:
    with SandboxStarter() as starter:
        results = [run_python(f"print({number})", starter=starter) for number in range(3)]
        assert [result.stdout for result in results] == ["0\n", "1\n", "2\n"]
        assert run_python("while True: pass", limits=SandboxLimits(timeout_s=0.3), starter=starter).timed_out
        failed = run_python("print(input())\nraise SystemExit(3)", "after it", starter=starter)
        assert (failed.stdout, failed.exit_code) == ("after it\n", 3)


def test_where_the_process_that_starts_programs_is_killed_the_error_says_so() -> None:
    with SandboxStarter() as starter:
        starter._process.kill()
        starter._process.wait()
        with pytest.raises(SandboxError, match="the process that makes sandboxes has ended"):
            run_python("print(1)", starter=starter)


def test_a_deep_recursion_is_an_error_of_the_program() -> None:
    result = run_python("def f(x): return f(x + 1)\nf(0)")
    assert "RecursionError" in result.stderr


def test_files_processes_and_the_library_work() -> None:
    code = """
import json, multiprocessing, pathlib, subprocess, tempfile, threading
pathlib.Path("a.txt").write_text("content")
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "b").write_text("b")
child = subprocess.run(["/bin/echo", "child"], capture_output=True, text=True)
print(pathlib.Path("a.txt").read_text(), child.stdout.strip())
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
"""
    assert run_python(code).stdout == "content child\n[1, 2]\n"


def test_every_program_starts_in_a_fresh_folder() -> None:
    assert (
        run_python("open('left', 'w').write('x')\nimport os\nprint(os.getcwd(), os.listdir('.'))").stdout
        == "/tmp ['left']\n"
    )
    assert run_python("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_packages_can_be_imported_only_where_they_are_allowed() -> None:
    assert "ModuleNotFoundError" in run_python("import numpy").stderr
    assert "ModuleNotFoundError" in run_python("import workers", limits=SandboxLimits(packages=True)).stderr
    result = run_python(
        "import numpy\nprint(numpy.arange(3).sum())", limits=SandboxLimits(packages=True, memory_mib=1024)
    )
    assert result.stdout == "3\n", result.stderr


def test_modules_given_beside_the_program_can_be_imported() -> None:
    assert run_python("import other\nprint(other.x)", modules={"other": "x = 'ä'"}).stdout == "ä\n"
    with pytest.raises(ValueError, match="plain names"):
        run_python("", modules={"../evil": ""})


def test_the_same_program_gives_the_same_output() -> None:
    code = "print(set('abcdefgh'), hash('text'))"
    assert run_python(code).stdout == run_python(code).stdout


@pytest.mark.parametrize("field", ["timeout_s", "disk_mib", "processes", "output_kib", "memory_mib"])
def test_limits_must_be_positive(field: str) -> None:
    wrong: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=field):
        SandboxLimits(**wrong)


def test_a_thread_that_starts_a_program_may_have_other_work_beside_it() -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(run_python("print(1)").stdout)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["1\n"] * 4


def test_a_call_leaves_no_descriptor_and_no_child() -> None:
    run_python("pass")
    before, others = sorted(os.listdir("/proc/self/fd")), set(psutil.Process().children(recursive=True))
    run_python("pass")
    run_python("while True: pass", limits=SandboxLimits(timeout_s=0.3))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert set(psutil.Process().children(recursive=True)) <= others, "a child is left"


def limited(code: str, memory_mib: int, kind: int) -> subprocess.CompletedProcess[str]:
    """Run code in a process with a limit, as the process of a reward function has one on its data."""

    def limit() -> None:
        resource.setrlimit(kind, (memory_mib * 2**20, memory_mib * 2**20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    command = [
        sys.executable,
        "-c",
        f"from troupe.workers.agents.sandbox.run import *\n{code}",
    ]
    return subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_the_memory_limit_of_the_caller_does_not_lower_that_of_the_program(kind: int) -> None:
    code = (
        "print(run_python('x = bytearray(300 * 2**20)\\nprint(len(x))', limits=SandboxLimits(memory_mib=512)).stdout)"
    )
    done = limited(code, 640, kind)
    assert done.stdout.split() == [str(300 * 2**20)], done.stderr
    done = limited(code, 300, kind)  # root may raise it, with CAP_SYS_RESOURCE
    assert done.stdout.split() == [str(300 * 2**20)] or "memory_mib is above the limit" in done.stderr


def test_a_memory_limit_that_cannot_be_met_is_an_error_and_not_a_failure_of_the_program() -> None:
    error = _explain({"step": "raise the memory limit", "failure": "", "errno": 1})
    assert isinstance(error, SandboxError) and not isinstance(error, SandboxUnavailable)
    assert "roles.reward.memory_limit_mib" in str(error)


# Machines that permit no sandbox

FORBIDDEN = """
import ctypes, sys
from troupe.workers.agents.sandbox import inside, seccomp
seccomp._DENIED.clear()  # what is left forbids new namespaces, as the seccomp profile of Docker does
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
inside._filter_calls()
"""


def forbidden(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that may not make namespaces."""
    return subprocess.run(
        [sys.executable, "-c", FORBIDDEN + code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_where_namespaces_are_forbidden_nothing_runs_and_the_message_says_what_to_change() -> None:
    code = """
from troupe.workers.agents.sandbox.run import SandboxUnavailable, check_sandbox, run_python
for call in (check_sandbox, lambda: run_python("open('/tmp/ran', 'w')")):
    try:
        call()
    except SandboxUnavailable as error:
        print(error)
"""
    done = forbidden(code)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert line.startswith("the sandbox is not permitted here: clone: Operation not permitted")
        assert "user.max_user_namespaces" in line and "apparmor_restrict_unprivileged_userns" in line
        assert "seccomp" in line


def test_a_reward_function_that_needs_the_sandbox_is_refused_at_start() -> None:
    code = """
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.rewards.runner import RewardProcess
from troupe.workers.rewards.loading import RewardFunctionError
process = RewardProcess(RewardFunctionConfig(name="python_tests"), 1024)
try:
    process.start()
except RewardFunctionError as error:
    print(error)
"""
    done = forbidden(code)
    assert done.stdout.startswith("python_tests: the sandbox is not permitted here: clone"), done.stderr


def test_the_check_passes_here_twice_and_costs_nothing_the_second_time() -> None:
    check_sandbox()
    before = check_sandbox.cache_info()
    check_sandbox()
    assert (check_sandbox.cache_info().misses, check_sandbox.cache_info().hits) == (before.misses, before.hits + 1)


def test_an_unsupported_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    check_sandbox.cache_clear()
    try:
        with pytest.raises(SandboxUnavailable, match="x86-64 or arm64, not linux riscv64"):
            check_sandbox()
    finally:
        check_sandbox.cache_clear()


# The filter


def judge(
    machine: str, number: int, argument: int = 0, architecture: int | None = None, flags: int = 0, option: int = 0
) -> int:
    """What the filter answers to a system call: an interpreter of the few instructions that it uses."""
    program = seccomp.build_filter(machine)
    known = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    fields = {0: number, 4: known if architecture is None else architecture, 16: argument}
    fields |= {24: argument, 32: option, 40: flags}
    position, loaded = 0, 0
    while True:
        at = position * 8
        code, if_true, if_false = int.from_bytes(program[at : at + 2], "little"), program[at + 2], program[at + 3]
        value = int.from_bytes(program[at + 4 : at + 8], "little")
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = fields[value]
            continue
        holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
        position += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_what_it_names_and_allows_the_rest(machine: str) -> None:
    column = ("x86_64", "aarch64").index(machine)
    allowed, denied, killed = 0x7FFF0000, 0x00050001, 0x80000000
    named = {numbers[column] for numbers in seccomp._DENIED.values()} - {None}
    clone, clone3, sockets = (56, 435, 41) if column == 0 else (220, 435, 198)
    for number in range(480):
        expected = denied if number in named else allowed
        if number == clone3:
            expected = 0x00050000 | 38
        if number == sockets:
            expected = 0x00050000 | 97
        assert judge(machine, number) == expected, number
    for family in (1, 2, 10):
        assert judge(machine, sockets, family) == allowed
    assert judge(machine, clone, 0x003D0F00 | signal.SIGCHLD) == allowed  # a thread
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(machine, clone, flag | signal.SIGCHLD) == denied
    mmap_call = (9, 222)[column]
    for flags in (0x22, 0x4022, 0x20022, 0x1, 0x2, 0x3, 0x40002):  # private, with options; of a file
        assert judge(machine, mmap_call, flags=flags) == allowed, hex(flags)
    for flags in (0x21, 0x8021, 0x40022, 0x40021, 0x23):  # shared without a file; huge pages
        assert judge(machine, mmap_call, flags=flags) == denied, hex(flags)
    control, set_option = ((157, 54), (167, 208))[column]
    assert judge(machine, control, 15) == allowed and judge(machine, control, 41) == denied  # its name; huge pages
    for option in (7, 8, 32, 33):  # the sizes of a socket's buffers, and of another level
        assert judge(machine, set_option, 1, option=option) == denied
        assert judge(machine, set_option, 6, option=option) == judge(machine, set_option, 1, option=2) == allowed
    assert judge(machine, 0, architecture=0x40000003) == killed  # a 32-bit call
    assert judge("x86_64", 0x40000000 | 101) == killed  # a call of the x32 kind
