"""What a run reports: metrics and the console."""
