"""The worker roles: what each one is, in one table."""
