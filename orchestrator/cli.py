"""The `troupe` command line. Each command is in `commands/`; errors become one line and an exit code here.

`troupe --help` needs only the imports of this module, so neither pydantic nor pyarrow.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import inspect
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from troupe.orchestrator.commands import bash_completion
from troupe.orchestrator.commands.options import FAILURE, USER_ERROR, echo_json, exit_with
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError
from troupe.orchestrator.signals import STOPPED, STOPPED_LINE, interrupt_on_signals, taken

_FOLDER = "troupe.orchestrator.commands"


@dataclass(frozen=True)
class Entry:
    """A command, or a group of commands, and its text in `troupe --help`."""

    home: str
    """`module:attribute` of its function or its `Typer`, in `orchestrator/commands/`."""
    help: str
    """The first paragraph of its help text."""


@cache
def load(name: str, home: str) -> Any:
    """The command with this name, imported from its home and built by Typer."""
    module, _, attribute = home.partition(":")
    found = getattr(importlib.import_module(f"{_FOLDER}.{module}"), attribute)
    parent = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(found)
    command = get_group(parent).commands[name]
    for one in (command, *getattr(command, "commands", {}).values()):
        paragraphs = inspect.cleandoc(one.help or "").split("\n\n")
        one.help = "\n\n".join(_unwrapped(paragraph) for paragraph in paragraphs)
    return command


def _unwrapped(paragraph: str) -> str:
    """A paragraph as one line, which Typer wraps at the terminal's width. Lists keep their lines."""
    return paragraph if paragraph.startswith(("\b", "- ")) else " ".join(paragraph.split())


class _Loaded(Mapping[str, Any]):
    """Commands by name. One that is looked up is imported."""

    def __init__(self, table: Mapping[str, Entry]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return load(name, self._table[name].home)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def lazy_group(table: Mapping[str, Entry]) -> type[TyperGroup]:
    """The class of a group of these commands, in this order."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "commands": _Loaded(table)})

        def list_commands(self, ctx: Any) -> list[str]:
            return list(table)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """A command with its help text alone, for lists of commands."""
            if cmd_name not in table:
                return None
            heading = next((name for name, commands in _HEADINGS.items() if cmd_name in commands), None)
            return TyperCommand(cmd_name, help=table[cmd_name].help, rich_help_panel=heading)

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            """The command itself. It is imported before any command begins, while a signal can still exit at once."""
            name, _, rest = super().resolve_command(ctx, args)
            return name, None if name is None else self.commands[name], rest

    return LazyGroup


_TYPE_NAMES = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "path": "PATH"}


def _type_of_option(self: TyperOption, ctx: Any) -> str | None:
    """The type of an option in a help text, as in `INTEGER`. A flag has none: `<bool>` would read as a value."""
    if self.is_flag:
        return None
    shown = self.display_type(ctx).strip("<>").removesuffix(" range").removeprefix("list[").removesuffix("]")
    return self.metavar or _TYPE_NAMES.get(shown, shown)


def _usage_of_argument(self: TyperArgument) -> str:
    """An argument in a usage line, as in `[RUN]...`."""
    name = self.display_name_raw if self.required else f"[{self.display_name_raw}]"
    return name if self.nargs == 1 else f"{name}..."


bash_completion.install()
TyperOption.display_type_rich = _type_of_option
TyperArgument.display_type_rich = lambda self, ctx: None  # its name says it
TyperArgument._usage_display_name = _usage_of_argument


_START = {
    "init": Entry(
        "start:init",
        "Write a first spec that fits this machine, with a comment for each field; in a terminal, ask what is missing.",
    ),
    "demo": Entry(
        "start:demo", "Create small models, once, and train one of them on this machine; a second call resumes."
    ),
    "validate": Entry(
        "check:validate",
        "Check a spec and the files and data it names; starts and writes nothing. Names on the hub are looked up.",
    ),
    "plan": Entry(
        "check:plan",
        "Show the placement and the memory of every worker, part by part, compared with the resources of the cluster.",
    ),
    "doctor": Entry(
        "check:doctor",
        "Check this machine: vLLM, compiler, GPUs, memory, disks, limits, network. Each finding names its remedy.",
    ),
    "algorithms": Entry(
        "check:algorithms", "List the algorithms, or describe one with its formula, source and defaults."
    ),
    "skill": Entry(
        "skills:skill", "Print, list or copy the skills: how an agent starts, reads, repairs and tunes a run."
    ),
    "env": Entry("check:env_app", "Check environments, install their packages, write their tasks as rows."),
    "schema": Entry("check:schema", "Print the JSON Schema of a spec, of errors or of verdicts."),
}
_TRAIN = {
    "run": Entry("train:run", "Train: start or join Ray, place the workers and run every step."),
    "sweep": Entry(
        "sweep:sweep",
        "Train a spec with other values and several seeds, and say which setting is best, with intervals.",
    ),
    "eval": Entry("train:evaluate", "Evaluate a model on the spec's held-out data and print the metrics."),
    "bench": Entry(
        "bench:bench",
        "Measure rollouts without training: tokens/s, latencies, caches and the bottleneck, "
        "for every point of a sweep.",
    ),
    "export": Entry(
        "train:export", "Export a run's trained policy as a Hugging Face model folder for transformers and vLLM."
    ),
}
_LOOK = {
    "report": Entry(
        "report:report",
        "Write a report of one or several runs: verdicts, curves and samples in one HTML file, for any browser.",
    ),
    "watch": Entry(
        "report:watch", "Serve the report of active runs in the browser and keep it current, until interrupted."
    ),
    "samples": Entry("report:samples", "Show what a run sampled, with rewards and what was trained."),
    "why": Entry(
        "diagnose:why",
        "Say why a run is slow, stuck or dead: what it waits for, since when, and what that does. Also when it hangs.",
    ),
    "audit": Entry(
        "diagnose:audit",
        "Score sampled tokens in an engine, in the trainer and in plain float32 transformers, and explain the gaps.",
    ),
    "replay": Entry(
        "diagnose:replay", "Repeat the updates of a step, without engines, and compare the weights with the run's."
    ),
    "trace": Entry("report:trace", "Write the timeline of a run as a trace file for ui.perfetto.dev."),
}
_CLUSTER = {
    "submit": Entry("jobs:submit", "Submit a spec to a cluster as a Ray job."),
    "jobs": Entry("jobs:jobs", "List a cluster's jobs, newest first."),
    "status": Entry("jobs:status", "Show the state of a job and the last step of its run: reward, times, time left."),
    "logs": Entry("jobs:logs", "Print a job's log."),
    "stop": Entry("jobs:stop", "Stop a job: it saves and exits. Submitting the spec again resumes it."),
    "scale": Entry(
        "jobs:scale", "Add or remove workers of an active run. Without ROLE=WORKERS, show the state of its roles."
    ),
    "apply": Entry(
        "jobs:apply",
        "Apply a changed spec to an active run: show the differences, change what can change, refuse the rest.",
    ),
    "deploy": Entry("jobs:deploy", "Write a spec as a KubeRay manifest, or as an sbatch script for Slurm."),
}
_HEADINGS = {"Start": _START, "Train": _TRAIN, "Look": _LOOK, "Cluster": _CLUSTER}
COMMANDS = _START | _TRAIN | _LOOK | _CLUSTER
"""Every command by name, in the order of `troupe --help`."""
app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language models with reinforcement learning.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_REMEDIES = {
    errno.ENOSPC: "free some space, or use another disk",
    errno.EDQUOT: "free some of your quota, or use another disk",
    errno.EACCES: "change its permissions, or use another path",
    errno.EPERM: "change its permissions, or use another path",
    errno.EROFS: "use a path on another disk",
    errno.EEXIST: "use another path",
    errno.ENOTDIR: "use another path",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENOMEM: "free some memory",
    errno.EAGAIN: "raise the limit on processes (`ulimit -u`)",
}
"""What helps, by the number of an operating system's error."""


class _Plain(logging.Formatter):
    """`WARNING text`; lines of other libraries have the name of their logger too."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as text."""
        name = "" if record.name.startswith("troupe.") else f"{record.name}: "
        return f"{record.levelname} {name}{super().format(record)}"


def main() -> NoReturn:
    """Run the command and exit.

    Exit codes: 0 success, 1 failure at run time, 2 invalid spec or command line (one line per error), 130 stopped by
    SIGINT or SIGTERM after saving.
    """
    atexit.register(gc.freeze)  # nothing that ends with the process is collected: it takes up to a second
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger().handlers[0].setFormatter(_Plain())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack a character
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    try:
        code = app(prog_name="troupe", standalone_mode=False)
        if code == STOPPED:  # typer has caught a KeyboardInterrupt
            sys.stderr.write(f"{STOPPED_LINE}\n")
    except KeyboardInterrupt:
        fail(STOPPED_LINE, STOPPED)
    except typer.TyperException as error:
        fail(typer_error(error), USER_ERROR)
    except typer.Abort:
        fail("aborted", FAILURE)
    except UsageError as error:
        fail(f"error: {error}", USER_ERROR)
    except StopRequested as error:
        fail(str(error), STOPPED)
    except TroupeError as error:
        from troupe.orchestrator.spec.errors import SpecError  # imports pydantic

        if isinstance(error, SpecError):
            fail(str(error), USER_ERROR, [problem.found() for problem in error.problems])
        said = os_error(error) if isinstance(error, OSError) else str(error)
        fail("\n".join([f"error: {said}", *getattr(error, "__notes__", ())]), FAILURE)
    except MemoryError:
        fail("error: this machine has no memory left for the command", FAILURE)
    except OSError as error:
        fail(f"error: {os_error(error)}", FAILURE)
    except ImportError as error:
        fail(f"error: {error}; `troupe --version` lists the packages that are installed", FAILURE)
    sys.exit(code)


def fail(text: str, code: int, problems: Sequence[object] = ()) -> NoReturn:
    """Exit with an error, which with `--json` is an object on standard output as well.

    Args:
        text: The error; empty if everything is said.
    """
    if text and "--json" in sys.argv:
        echo_json({"error": text.removeprefix("error: "), "exit_code": code, "problems": problems})
    exit_with(text, code)


def _show_versions(asked: bool) -> None:
    if asked:
        from troupe.orchestrator.telemetry.versions import versions

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


def typer_error(error: typer.TyperException) -> str:
    """One line for a command line that Typer refuses, with the command whose `--help` tells more."""
    context = vars(error).get("ctx")  # not every error has one
    command = "troupe" if context is None else context.command_path
    said = " ".join(error.format_message().split()).rstrip(".")
    if command == "troupe deploy" and said.startswith("No such option"):
        said += "; kustomize sets any other field of a manifest"
    if said == "Missing option '--address'":
        said += (
            ", the URL of the job server, such as http://HEAD:8265; RAY_API_SERVER_ADDRESS sets it for every command"
        )
    if said.startswith("Got unexpected extra argument"):
        if command == "troupe demo":
            said += "; --spec chooses the example"
        elif "--set" in sys.argv:
            said += "; a change of the spec is --set FIELD=VALUE, in quotes if it has spaces, with --set before each"
    return f"error: {said}; see `{command} --help`" if said else ""


def os_error(error: OSError) -> str:
    """The path of a failed operation, why it failed, and what helps."""
    reason = " ".join((error.strerror or str(error) or type(error).__name__).split())
    if error.errno == errno.ENOENT and not error.filename and not _has_current_folder():
        return "the current folder does not exist any more; change to another one"
    remedy = _REMEDIES.get(error.errno or 0)
    told = f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason
    return f"{told}; {remedy}" if remedy else told


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
