"""What the policy acts in and is judged by: environments, episodes, sandboxed programs, judges."""
