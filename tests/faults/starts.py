"""Runs of one step, one after the other: how long each takes, and what it leaves behind.

    python -m tests.faults.starts --times 20

Each has a /dev/shm and a /tmp of its own. No file may be left there but the logs of Ray's session and the code that
torch has compiled, and no process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.faults.interrupts import COLD, SHORT
from tests.real.commands import GRPO, Run, running

ALONE = (
    *("unshare", "-m", "sh", "-c"),
    "mount -t tmpfs -o size=1g tmpfs /dev/shm && mount -t tmpfs -o size=1g tmpfs /tmp || exit 99; "
    '"$@"; code=$?; date +%s.%N > "$0"; sleep 2; '
    'find /dev/shm /tmp -mindepth 1 -not -path "/tmp/ray*" -not -path "/tmp/torchinductor_*" >> "$0"; exit $code',
)
"""Starts a command with temporary folders of its own; a file follows, which gets its end and what is left in them."""


def main(arguments: list[str]) -> int:
    """Run the steps; print each, then the median and the longest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args(arguments)
    took, wrong = list[float](), 0
    for number in range(given.times):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            seen, one = Path(folder) / "seen", (*SHORT, "schedule.steps=1")
            began = time.time()
            with running(Run(Path(folder), GRPO, *one, name="start", env=COLD, within=(*ALONE, str(seen)))) as run:
                code = run.wait()
                ended, *left = seen.read_text().splitlines()
                left += run.leftover_processes()
                said = "" if code == 0 else run.output
        took.append(float(ended) - began)
        wrong += bool(code or left)
        sys.stdout.write(json.dumps({"run": number + 1, "seconds": round(took[-1], 1), "left": left}) + f"{said}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"median": round(median(took), 1), "longest": round(max(took), 1)}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
