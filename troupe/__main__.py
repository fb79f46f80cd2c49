"""`troupe` and `python -m troupe`: the command line."""

from __future__ import annotations

from typing import NoReturn

from troupe.orchestrator.signals import exit_on_signals


def main() -> NoReturn:
    """Run the command and exit."""
    exit_on_signals()  # also one that comes while the command line is loaded
    from troupe.orchestrator.cli import main as run

    run()


if __name__ == "__main__":
    main()
