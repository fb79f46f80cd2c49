"""What the policy acts in and is judged by: environments, episodes, sandbox, judges. `interface` is the way in.

This file imports nothing, because the processes of the sandbox import it at every start.
"""
