"""Environments of the `verifiers` package.

Such an environment asks an OpenAI client for every turn itself, so it is an agent: it plays its rollout against the
episode's own endpoint, and its rubric gives the reward.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from troupe.workers.agents.environments.agent import Agent
from troupe.workers.agents.environments.gateway.request import MODEL_NAME
from troupe.workers.contract.environments import Row

NEEDS = "the environment verifiers needs the package verifiers, version 0.1.14 to 0.3: pip install 'verifiers<0.4'"
"""Version 0.4 has no `load_environment(id)`: its environments start programs instead of calling a client."""
_EMPTY = "EmptyModelResponseError"
"""An empty turn ends a rollout with this error; it is the policy's doing, and the rubric scores it."""


class Verifiers(Agent):
    """Plays an environment that `verifiers.load_environment` loads.

    A row of the data is the example: its prompt, its answer, and its further columns (`info`, `task`, `example_id`).
    The reward is the rubric's; `max_turns` and other limits of the environment hold besides the spec's.
    """

    def __init__(self, environment: str, args: Mapping[str, Any] | None = None) -> None:
        """`environment`: its id, or the name of its module; `args`: the arguments of its `load_environment`."""
        arguments = json.dumps(dict(args or {}), sort_keys=True)
        _load(environment, arguments)
        super().__init__(f"{__name__}:rollout", args={"environment": environment, "arguments": arguments})


async def rollout(row: Row, client: AsyncOpenAI, environment: str, arguments: str) -> float:
    """Play one rollout and score it; the reward.

    Raises:
        RuntimeError: the environment reports an error, which `verifiers` would score.
    """
    clients = importlib.import_module("verifiers.clients")
    example = {"example_id": 0, **row.metadata, "prompt": list(row.messages), "answer": row.answer}
    policy = clients.OpenAIChatCompletionsClient(client)
    output = await _load(environment, arguments).run_rollout(example, policy, MODEL_NAME, sampling_args={})
    error = output.get("error")
    if error and error["error"] != _EMPTY:
        raise RuntimeError(f"{environment}: {error['error_chain_repr']}")
    return output["reward"]


@functools.cache
def _load(environment: str, arguments: str) -> Any:
    """The environment, once in a process and those forked from it: it has no state of an episode.

    Raises:
        ValueError: the package is missing, or the environment cannot be loaded or needs the whole group for its reward.
    """
    try:
        load_environment = importlib.import_module("verifiers").load_environment
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{NEEDS} ({error})") from error
    try:
        loaded = load_environment(environment, **json.loads(arguments))
    except Exception as error:  # the environment is the user's
        raise ValueError(f"{environment}: {type(error).__name__}: {error}") from error
    if loaded.requires_group_rollouts:
        raise ValueError(f"{environment}: its rubric rewards whole groups, which is not supported")
    return loaded
