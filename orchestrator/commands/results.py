"""What a command says after a run: where the results are, the report, and what a user can do next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.spec.examples import PREFIX
from troupe.orchestrator.spec.preflight import RESOLVED_SPEC
from troupe.orchestrator.spec.stages import PlannedRun

logger = logging.getLogger(__name__)


def write_run_report(runs: Sequence[PlannedRun]) -> Path | None:
    """The report of all runs, beside their results; None, with a warning, where it cannot be written."""
    from troupe.orchestrator.reporting.html.report import REPORT, write_report

    folder = runs[-1].out.parent if runs[-1].stage else runs[-1].out
    try:
        return write_report([planned.out for planned in runs], folder / REPORT)
    except (TroupeError, OSError) as error:
        logger.warning("the report was not written: %s", error)
        return None


def next_steps(spec: Path, runs: Sequence[PlannedRun], report: Path | None = None) -> str:
    """Where the results are, what to try next and, in the last line, the report.

    Args:
        spec: File or example that was run.
        runs: All of its runs.
        report: The report that was written; None: there is none.
    """
    last, name = runs[-1], str(spec)
    folder = last.out.parent if last.stage else last.out
    commands = [(f"troupe export {last.out} trained/", "the trained model, for transformers and vLLM")]
    if not last.stage and last.spec.evaluation is not None:
        commands.append((f"troupe eval {last.out / RESOLVED_SPEC} --model trained/", "its score on held-out data"))
    commands.append((f"troupe samples {last.out}", "what the policy wrote, with its rewards"))
    if name.startswith(PREFIX):
        example = f"troupe init --from {name.removeprefix(PREFIX)}"
        commands += [(example, "this spec as a file to edit: run.yaml"), ("troupe init", "a spec for your own data")]
    width = max(len(command) for command, _ in commands)
    lines = [f"results are in {folder}; next:", *(f"  {command:<{width}}  {what}" for command, what in commands)]
    if report is not None:
        lines.append(f"report: open {report} in a browser")
    return "\n".join(lines)
