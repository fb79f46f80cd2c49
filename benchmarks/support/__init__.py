"""What benchmarks share: turns, statistics, baselines, workloads."""
