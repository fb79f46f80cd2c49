"""What `troupe report`, `why`, `audit`, `replay`, `doctor` and `bench` find out about runs and machines."""
