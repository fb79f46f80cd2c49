"""Faults injected into real runs: `make test-faults` runs them all and writes the table of the docs."""
