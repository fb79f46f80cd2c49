"""Changes to an active run: scaling, control requests, spec differences."""
