"""`troupe init`: writes a first spec that fits the machine."""
