"""Text of a command after a run: the places of results and report, and what a user can do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.checks.machine import RESOLVED_SPEC
from troupe.orchestrator.spec.examples import PREFIX


def write_run_report(runs: Sequence[PlannedRun]) -> Path | None:
    """The report of all runs that have recorded steps, next to their results; see `write_last_report`."""
    from troupe.orchestrator.insight.report.report import REPORT, write_last_report

    return write_last_report([planned.out for planned in runs], _results(runs) / REPORT)


def next_steps(spec: Path, runs: Sequence[PlannedRun], report: Path | None = None) -> str:
    """Where the results are, what to try next and, in the last line, the report.

    Args:
        spec: File or example that was run.
        runs: All of its runs.
        report: The report that was written, or None if no report was.
    """
    last, name = runs[-1], str(spec)
    merge = " --merge" if last.spec.trains_adapters else ""  # an engine that evaluates loads no adapters
    commands = [(f"troupe export {last.out} trained/{merge}", "the trained model, for transformers and vLLM")]
    if last.spec.checkpoint.best is not None:
        commands.append((f"troupe export {last.out} best/ --best{merge}", "the model with the best evaluation"))
    if not last.stage and last.spec.evaluation is not None:
        commands.append((f"troupe eval {last.out / RESOLVED_SPEC} --model trained/", "its score on held-out data"))
    commands += _samples(last)
    if name.startswith(PREFIX):
        example = f"troupe init --from {name.removeprefix(PREFIX)}"
        commands += [(example, "this spec as a file to edit: run.yaml"), ("troupe init", "a spec for your own data")]
    return _lines(f"results are in {_results(runs)}", commands, report)


def resume_steps(arguments: Sequence[str], runs: Sequence[PlannedRun], report: Path | None) -> str:
    """The same for runs that were stopped or failed: where the results so far are, and how to resume.

    Args:
        arguments: Arguments of the command that was stopped or failed.
        runs: All runs of its file.
        report: The report that was written, or None if no step was recorded.
    """
    begun = [planned for planned in runs if planned.out.is_dir()] or runs
    again = ["troupe", *(argument for argument in arguments if argument != "--resume")]
    resume = ["--resume"] if arguments[:1] == ["run"] else []  # `troupe demo` resumes without being asked
    commands = [(shlex.join([*again, *resume]), "resumes from the newest checkpoint"), *_samples(begun[-1])]
    return _lines(f"results so far are in {_results(runs)}", commands, report)


def _results(runs: Sequence[PlannedRun]) -> Path:
    """Folder of a run, or of all runs of a chain."""
    return runs[-1].out.parent if runs[-1].stage else runs[-1].out


def _samples(planned: PlannedRun) -> list[tuple[str, str]]:
    if planned.spec.rollouts is None:
        return []
    return [(f"troupe samples {planned.out}", "what the policy wrote, with its rewards")]


def _lines(results: str, commands: Sequence[tuple[str, str]], report: Path | None) -> str:
    width = max(len(command) for command, _ in commands)
    lines = [f"{results}; next:", *(f"  {command:<{width}}  {what}" for command, what in commands)]
    if report is not None:
        lines.append(f"report: open {report} in a browser")
    return "\n".join(lines)
