"""`python -m troupe`: the command line."""

from troupe.orchestrator.cli import main

if __name__ == "__main__":
    main()
