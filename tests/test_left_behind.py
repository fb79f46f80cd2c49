"""What tests of whole commands see of processes that a command leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real import commands
from tests.real.commands import Command, running


def test_a_process_without_the_mark_of_its_command_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's agents, whose titles hide their environment."""
    monkeypatch.setattr(commands, "EXIT_TIMEOUT_S", 0.5)
    with running(Command(tmp_path, ["bash", "-c", "env -i sleep 271828 & sleep 2"])) as command:
        assert command.wait() == 0
        (left,) = command.leftover_processes()
    assert left.endswith(" sleep 271828")
    assert command.leftover_processes() == []
