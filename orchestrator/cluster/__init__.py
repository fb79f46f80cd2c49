"""Ray: nodes, placement groups, actors, and typed groups of workers."""
