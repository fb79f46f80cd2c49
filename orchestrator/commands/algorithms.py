"""`troupe algorithms`: the algorithms, and checks of custom ones."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import yaml

from troupe.orchestrator.commands.options import FAILURE, USER_ERROR, JsonOption, echo_json, exit_with
from troupe.orchestrator.errors import UsageError


def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="Algorithm to describe in full; package.module:attribute for a custom one.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check a custom algorithm on random batches: gradients, order, splits, masks, edge cases."
        ),
    ] = False,
    args: Annotated[str, typer.Option(help="Its arguments, as a YAML mapping.")] = "{}",
    as_json: JsonOption = False,
) -> None:
    """List the algorithms, or describe one with its formula, source and defaults."""
    from troupe.orchestrator.algorithms.description import described_row, description, listed, listing, named
    from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
    from troupe.orchestrator.algorithms.section import is_custom, unknown_algorithm
    from troupe.orchestrator.algorithms.table import ALGORITHMS

    if name is not None and is_custom(name):
        _custom_algorithm(name, args, check, as_json)
    elif check:
        exit_with("error: --check is for a custom algorithm, package.module:attribute", USER_ERROR)
    elif name is None:
        _echo(listed(), listing(), as_json)
    elif name in ALGORITHMS or name in OFFLINE_ALGORITHMS:
        _echo(described_row(named(name)), description(name), as_json)
    else:
        exit_with(f"error: {unknown_algorithm(name)}", USER_ERROR)


def _echo(value: Any, text: str, as_json: bool) -> None:
    """Print a value as JSON, or as text."""
    if as_json:
        echo_json(value)
    else:
        typer.echo(text)


def _custom_algorithm(name: str, args: str, check: bool, as_json: bool) -> None:
    """Describe or check a custom algorithm."""
    from troupe.orchestrator.algorithms.custom import report
    from troupe.orchestrator.algorithms.description import describe_row, described_row
    from troupe.orchestrator.algorithms.section import custom_row
    from troupe.workers.algorithms.custom_checks import Available, check_custom
    from troupe.workers.contract.config import CustomConfig

    try:
        values = yaml.safe_load(args)
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"--args: expected a YAML mapping, as in '{{beta: 0.1}}', got {args[:60]!r}")
    try:
        config = CustomConfig(name=name, args=values)
        row = custom_row(config)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from None
    if not check:
        _echo(described_row(row), describe_row(row), as_json)
        return
    available = Available(importance=row.loss.importance.mode != "none")
    checks = check_custom(config, available=available)
    _echo(checks, report(checks), as_json)
    if any(one.problem for one in checks):
        sys.exit(FAILURE)
