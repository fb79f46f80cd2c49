"""Completion as bash does it, which splits words at `=` and `:`: keys in a terminal, and the line that they make."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

TIMEOUT_S = 60.0
END = "<<<"


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    return Terminal(tmp_path_factory.mktemp("bash"))


class Terminal:
    """An interactive bash in `folder`, with a `troupe` on its path and the completion that `troupe` shows for it."""

    def __init__(self, folder: Path) -> None:
        command = folder / "troupe"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m troupe "$@"\n')
        command.chmod(0o755)
        self._env = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "dumb", "HOME": str(folder)}
        script = "import sys; sys.argv = ['troupe']; from troupe.orchestrator.cli import app; "
        script += "from typer._completion_shared import get_completion_script as g; "
        script += "print(g(prog_name='troupe', complete_var='_TROUPE_COMPLETE', shell='bash'))"
        self._source = folder / "completion.sh"
        shown = subprocess.run(
            [sys.executable, "-c", script], env=self._env, cwd=ROOT, capture_output=True, text=True, check=True
        )
        self._source.write_text(shown.stdout)

    def complete(self, typed: str) -> str:
        """The line after Tab. It is printed by a second command on the line, for which the cursor goes to its start."""
        master, slave = pty.openpty()
        with subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            env=self._env,
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        ) as shell:
            os.close(slave)
            try:
                os.write(master, f"source {self._source}; bind 'set enable-bracketed-paste off'\n{typed}\t".encode())
                time.sleep(0.1)
                os.write(master, f"{END}'\x01printf '>>>%s\\n' '\n".encode())
                return self._read(master)
            finally:
                shell.kill()
                os.close(master)

    @staticmethod
    def _read(master: int) -> str:
        """What is between the last marks, as printed."""
        text, deadline = "", time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                text += os.read(master, 4096).decode(errors="replace")
            for line in text.splitlines():
                if line.startswith(">>>") and line.endswith(END):
                    return line.removeprefix(">>>").removesuffix(END)
        raise AssertionError(text)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("troupe run a.yaml --set algorithm.name=raf", "troupe run a.yaml --set algorithm.name=raft "),
        ("troupe run examples:laptop-p", "troupe run examples:laptop-ppo "),
        ("troupe run a.yaml --set roles.policy.learning_ra", "troupe run a.yaml --set roles.policy.learning_rate="),
        (
            "troupe run examples:tiny-grpo --set algorithm.name=raf",
            "troupe run examples:tiny-grpo --set algorithm.name=raft ",
        ),
        ("troupe run a.yaml --set algorithm.kl.estimator=k", "troupe run a.yaml --set algorithm.kl.estimator=k"),
        ("troupe run a.yaml --set model.dtype=fl", "troupe run a.yaml --set model.dtype=float"),
        ("troupe run a.yaml --set roles.policy.packing=f", "troupe run a.yaml --set roles.policy.packing=false "),
        ("troupe why --time", "troupe why --timeout-s "),
    ],
)
def test_a_word_is_completed_where_bash_splits_it(terminal: Terminal, typed: str, line: str) -> None:
    assert terminal.complete(typed) == line
