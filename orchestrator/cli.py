"""The `troupe` command line. Each command is in `commands/`; errors become one line and an exit code here."""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated, NoReturn

import typer

from troupe.orchestrator.commands import algorithms, check, export, jobs, live, samples, start, train
from troupe.orchestrator.commands.audit import audit
from troupe.orchestrator.commands.bench import bench
from troupe.orchestrator.commands.environment import env_app
from troupe.orchestrator.commands.messages import os_error, typer_error
from troupe.orchestrator.commands.options import FAILURE, USER_ERROR, exit_with
from troupe.orchestrator.commands.replay import replay
from troupe.orchestrator.commands.report import report
from troupe.orchestrator.commands.trace import trace
from troupe.orchestrator.commands.watch import watch
from troupe.orchestrator.commands.why import why
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError
from troupe.orchestrator.signals import STOPPED, STOPPED_LINE, interrupt_on_signals, taken
from troupe.orchestrator.spec.errors import SpecError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language models with reinforcement learning.",
)


def main() -> NoReturn:
    """Run the command and exit.

    Exit codes: 0 success, 1 failure at run time, 2 invalid spec or command line (one line per error), 130 stopped by
    SIGINT or SIGTERM after saving.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know a character
    try:
        code = app(prog_name="troupe", standalone_mode=False)
        if code == STOPPED:  # typer has caught a KeyboardInterrupt
            sys.stderr.write(f"{STOPPED_LINE}\n")
    except KeyboardInterrupt:
        exit_with(STOPPED_LINE, STOPPED)
    except typer.TyperException as error:
        exit_with(typer_error(error), USER_ERROR)
    except typer.Abort:
        exit_with("aborted", FAILURE)
    except SpecError as error:
        exit_with(str(error), USER_ERROR)
    except UsageError as error:
        exit_with(f"error: {error}", USER_ERROR)
    except StopRequested as error:
        exit_with(str(error), STOPPED)
    except TroupeError as error:
        said = os_error(error) if isinstance(error, OSError) else str(error)
        exit_with("\n".join([f"error: {said}", *getattr(error, "__notes__", ())]), FAILURE)
    except MemoryError:
        exit_with("error: this machine has no memory left for the command", FAILURE)
    except OSError as error:
        exit_with(f"error: {os_error(error)}", FAILURE)
    except ImportError as error:
        exit_with(f"error: {error}; `troupe doctor` lists the packages that are missing here", FAILURE)
    sys.exit(code)


def _show_versions(asked: bool) -> None:
    if asked:
        from troupe.orchestrator.versions import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def troupe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_versions, is_eager=True, help="Print versions: troupe, torch, vLLM ..."
        ),
    ] = False,
) -> None:
    """Train language models with reinforcement learning."""
    if taken():
        interrupt_on_signals()  # a command begins, which may have to be ended in order


COMMANDS = {
    "run": train.run,
    "demo": start.demo,
    "eval": train.evaluate,
    "bench": bench,
    "init": start.init,
    "validate": check.validate,
    "plan": check.plan,
    "doctor": check.doctor,
    "schema": check.schema,
    "algorithms": algorithms.algorithms,
    "export": export.export,
    "submit": jobs.submit,
    "jobs": jobs.jobs,
    "status": jobs.status,
    "logs": jobs.logs,
    "stop": jobs.stop,
    "scale": live.scale,
    "apply": live.apply,
    "report": report,
    "watch": watch,
    "samples": samples.samples,
    "replay": replay,
    "audit": audit,
    "trace": trace,
    "why": why,
    "deploy": jobs.deploy,
}
"""Every command by name, in the order of `troupe --help`."""
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(env_app, name="env")


if __name__ == "__main__":
    main()
