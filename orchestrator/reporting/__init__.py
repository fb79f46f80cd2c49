"""What a run writes (metrics, timeline, samples) and what reads it: reports, verdicts, queries, traces, the console."""
