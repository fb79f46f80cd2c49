"""What a worker process reports about itself without being called: stacks, stages of its start, peak memory."""
