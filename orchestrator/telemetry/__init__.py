"""What a run records and shows: calls, events, metrics, timeline and peak memory, for files, trackers and terminals."""
