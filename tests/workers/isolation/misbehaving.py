"""Reward functions that print without end, leave processes behind, or read what is not theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

_SLEEP = "import time; time.sleep(600)"


def talks(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Print 64 MiB, from Python, from C and from a separate process."""
    for _ in range(1024):
        print("x" * 2**14)
    os.write(2, b"y" * 2**24)
    subprocess.run([sys.executable, "-c", "print('z' * 2**25)"], check=True)
    return 1.0


def leaves(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Start processes that leave the session and the parent, and then hang, exit or return."""
    subprocess.Popen([sys.executable, "-c", _SLEEP], start_new_session=True)
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{_SLEEP}'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    if response == "hangs":
        time.sleep(600)
    if response == "exits":
        os._exit(3)
    return 1.0


def grows(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Start four processes that use 100 MiB each."""
    program = "import time; held = bytearray(100 * 2**20); time.sleep(600)"
    for _ in range(4):
        subprocess.Popen([sys.executable, "-c", program])
    time.sleep(600)
    return 1.0


def forks(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Hold 150 MiB, which the same three processes share that are started by a fork."""
    held = bytearray(150 * 2**20)
    held[::4096] = b"x" * (len(held) // 4096)
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            time.sleep(600)
        children.append(child)
    time.sleep(1.5)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return 1.0


def reads(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 for a variable that is set."""
    return float(response in os.environ)


def says(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Raise with hostile text."""
    raise ValueError("\x1b[2J\x1b]0;title\x07red\r\n\x00" + "long " * 1000)


def kills(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Send a signal to the parent, or to its process group, and go on."""
    target, number = response.split()
    kill = os.kill if target == "parent" else os.killpg
    kill(os.getppid() if target == "parent" else os.getpgid(os.getppid()), int(number))
    time.sleep(0.2)
    return 1.0
