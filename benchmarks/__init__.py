"""Benchmarks: `python -m benchmarks.NAME`. Each one measures its baseline in the same run, turn by turn."""
