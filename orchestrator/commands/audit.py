"""`troupe audit`: does the sampler agree with the trainer?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from troupe.orchestrator.commands.options import FAILURE, USER_ERROR, AddressOption, SetOption, exit_with


def audit(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC|RUN", help="YAML spec (its initial weights) or run folder (its newest checkpoint)."
        ),
    ],
    set_: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    address: AddressOption = None,
) -> None:
    """Score sampled tokens in an engine, in the trainer and in plain float32 transformers, and explain the gaps.

    Starts one engine and the policy with the run's own settings. Of a run folder, the newest checkpoint is pushed to
    the engine as the run pushes it. Exit code 1: rounding does not explain a gap.
    """
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.runs.session import audit as audit_run
    from troupe.orchestrator.spec.checks.machine import RESOLVED_SPEC
    from troupe.orchestrator.spec.derived.hub import uses_hub
    from troupe.orchestrator.spec.errors import SpecError
    from troupe.orchestrator.spec.load import plan_runs, read_document
    from troupe.orchestrator.telemetry.console import Console

    is_run = target.is_dir()
    runs = plan_runs(read_document(target / RESOLVED_SPEC if is_run else target, set_), target if is_run else None)
    planned = runs[0]
    if planned.stage:
        exit_with(f"{target}: cannot audit a file with stages; name a stage's run folder", USER_ERROR)
    if problems := planned.missing():
        raise SpecError(problems)
    if uses_hub(planned.spec):
        from troupe.orchestrator.hub.resolve import pin_run

        planned = pin_run(planned, resume=is_run)
    console = Console(sys.stderr)  # standard output holds the report only
    try:
        report = audit_run(RunRequest(planned.spec, planned.out, is_run, address), console)
    finally:
        console.close()
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    if not report.passed:
        sys.exit(FAILURE)
