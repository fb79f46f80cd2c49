"""Check Troupe on this machine's NVIDIA GPUs, in pieces of under ten minutes: `make gpu-check`.

    python -m deploy.gpu_check                    # every piece that has not passed yet
    python -m deploy.gpu_check --only ipc sync    # some pieces
    python -m deploy.gpu_check --on-cpu           # the check itself, without a GPU, with a tiny model

Writes result.json, result.md and a log of each piece. Exit code 0: nothing failed; 1: a piece failed; 2: no GPU, or a
wrong call.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.support.harness import machine, versions
from deploy.gpu_check.measurements import measurements
from deploy.gpu_check.pieces import PIECES, Decision, arguments, decide
from deploy.gpu_check.processes import last_lines, run_commands
from deploy.gpu_check.record import PieceResult, Record, read
from troupe.orchestrator.capacity.nvidia import graphics
from troupe.workers.contract.units import GIB

ROOT = Path(__file__).resolve().parents[2]


def run_piece(decision: Decision, out: Path) -> PieceResult:
    """Run a piece in a fresh folder; returns its result."""
    piece, folder = decision.piece, out / decision.piece.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = out / f"{piece.name}.log"
    ended = run_commands([arguments(command, folder) for command in decision.commands], piece.bound_s, log, ROOT)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    result = PieceResult(piece.name, piece.what, "failed", ended.failure, round(ended.seconds, 1), time)
    if not ended.failure:
        try:
            return replace(result, status="passed", measurements=measurements(piece.kind, folder))
        except (OSError, ValueError, KeyError) as error:
            result = replace(result, reason=f"no measurements: {error!r}")
    return replace(result, error=last_lines(log))


def check(decisions: Sequence[Decision], record: Record, path: Path) -> Record:
    """Carry out the decisions; the record is written after every piece."""
    for decision in decisions:
        name = decision.piece.name
        if decision.commands:
            print(f"{name}: at most {decision.piece.bound_s:g} s, log in {path.parent / name}.log", flush=True)
            result = run_piece(decision, path.parent)
        elif decision.skipped:
            result = PieceResult(name, decision.piece.what, "skipped", decision.skipped)
        else:
            print(f"{name}: passed before (--again runs it again)")
            continue
        print(f"{name}: {result.status}{f', {result.reason}' if result.reason else ''}", flush=True)
        found = {**record.results, name: result}
        order = [piece.name for piece in PIECES if piece.name in found]
        record = replace(record, results={one: found[one] for one in order})
        record.write(path)
    return record


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_check", description=__doc__, formatter_class=formatter)
    names = [piece.name for piece in PIECES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="pieces to run (default: all)")
    parser.add_argument("--again", action="store_true", help="run pieces again that passed")
    parser.add_argument("--on-cpu", action="store_true", help="try the check itself without a GPU, with a tiny model")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/gpu-check, or -cpu)")
    return parser.parse_args(given)


def main(argv: Sequence[str]) -> int:
    """Run the check; returns the exit code."""
    given = parse(argv)
    mode = "cpu" if given.on_cpu else "gpu"
    out: Path = given.out or ROOT / "runs" / ("gpu-check-cpu" if given.on_cpu else "gpu-check")
    path, found = out.resolve() / "result.json", graphics()
    gpus = [f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for gpu in found.gpus]
    here = {name: value for name, value in machine().items() if name != "load_average"}
    record = Record(mode, here | {"gpus": gpus, "driver": found.driver or "none"}, versions())
    try:
        recorded = read(path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missing = not gpus and not given.on_cpu
    if recorded is not None and not recorded.comparable(record):
        if missing and recorded.passed | recorded.failed:
            print(
                f"error: no NVIDIA GPU is visible; the results of another machine in {path} are kept", file=sys.stderr
            )
            return 2
        if recorded.passed | recorded.failed and not given.again:
            why = "are of another mode, other GPUs, another driver or other versions"
            print(
                f"error: the results in {path} {why}: choose another --out, or replace them with --again",
                file=sys.stderr,
            )
            return 2
        recorded = None
    if recorded is not None:
        record = replace(record, results=recorded.results)
    chosen = [piece for piece in PIECES if piece.name in given.only]
    memory = [gpu.memory / GIB for gpu in found.gpus]
    record = check(decide(chosen, memory, given.on_cpu, record.passed, given.again), record, path)
    print(f"wrote {path} and {path.with_suffix('.md').name}")
    if missing:
        print("error: no NVIDIA GPU is visible: nothing was checked (--on-cpu tries the check itself)", file=sys.stderr)
        return 2
    return 1 if record.failed & set(given.only) else 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception, so that the piece's processes end too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
