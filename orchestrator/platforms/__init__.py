"""Where a run is submitted: Ray jobs, Kubernetes, Slurm."""
