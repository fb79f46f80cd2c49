"""The sandbox tests need a machine that permits a sandbox, and see what is left of a program outside."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that start a sandbox where the machine permits none."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if not here:
        return
    # Asked of another program: a sandbox that is broken here must fail its tests, not skip them.
    command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--mount-proc", "true"]
    try:
        refusal = subprocess.run(command, capture_output=True, text=True).stderr
    except FileNotFoundError:
        return
    if refusal:
        for item in here:
            item.add_marker(pytest.mark.skip(reason=f"this machine permits no user namespaces: {refusal.strip()}"))


class Marked:
    """Processes of this machine with a name that only one test's program gives itself."""

    def __init__(self) -> None:
        self.name = f"tr{secrets.token_hex(5)}"
        self.most = 0

    @property
    def prefix(self) -> str:
        """Code with which a program marks itself and, from then on, its children."""
        return f"open('/proc/self/comm', 'w').write({self.name!r})\n"

    def alive(self) -> list[int]:
        """Ids of the marked processes."""
        found: list[int] = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdigit() and (path / "comm").read_text().strip() == self.name:
                    found.append(int(path.name))
        return found

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Keep the largest number of marked processes at one time in `most`."""
        stop = threading.Event()

        def count() -> None:
            while not stop.is_set():
                self.most = max(self.most, len(self.alive()))
                time.sleep(0.02)

        thread = threading.Thread(target=count)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def marked() -> Iterator[Marked]:
    """A mark for a program. No process may have it at the end of the test."""
    mark = Marked()
    yield mark
    assert mark.alive() == []
