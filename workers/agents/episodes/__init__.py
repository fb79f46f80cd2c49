"""Episodes: the policy's turns and the environment's answers, token by token."""
