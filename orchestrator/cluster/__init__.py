"""Ray: nodes, placement groups, actors, typed groups of workers, and their processes, inspected from outside."""
