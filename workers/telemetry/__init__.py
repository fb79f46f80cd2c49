"""What a worker process reports about itself without being called: stacks, activity of its start, peak memory."""
