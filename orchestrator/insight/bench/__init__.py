"""`troupe bench`: the rollouts of a spec, measured without training."""
