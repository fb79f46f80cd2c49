"""Records of what a run does: calls to workers, events, peak memory, and the schema of the timeline."""
