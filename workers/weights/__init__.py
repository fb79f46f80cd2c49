"""Transfer of the weights from the policy to the rollout engines."""
