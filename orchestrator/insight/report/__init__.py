"""The report of a run: one HTML file with its data."""
