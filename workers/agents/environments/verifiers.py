"""Environments of the `verifiers` package, usually in a virtual environment (`troupe env install verifiers`).

Such an environment asks an endpoint for every turn itself, so it is an agent: it plays against the episode's own
endpoint, and its rewards are the sample's.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from troupe.workers.agents.environments.agent import Agent
from troupe.workers.agents.environments.gateway.request import MODEL_NAME
from troupe.workers.contract.environments import Row

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NEEDS = "the environment verifiers needs the package verifiers: troupe env install verifiers, or name its `python`"
_KEY = "TROUPE_ENDPOINT_KEY"
_DIGITS = 16


class Verifiers(Agent):
    """Plays a taskset with a harness (version 0.4).

    A row of the data is a task of the taskset by its `index`; `troupe env rows` writes them.
    """

    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        harness: str | Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the environment.

        Args:
            taskset: Id of the taskset, or `id` with its settings.
            harness: Id of the policy's program, or `id` with its settings. If None, the taskset's own, or else `null`,
                which calls the tools of the task and has no others.
            settings: Further fields of the environment's configuration, such as those of other agents.
        """
        parts = _with_id(taskset), _with_id(harness), dict(settings or {})
        request = json.dumps(parts, sort_keys=True)
        _load(request)
        super().__init__(f"{__name__}:play", args={"request": request})

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks as rows of data, without end if the taskset generates them."""
        for index, task in enumerate(_load(self._args["request"]).taskset):
            prompt = task.data.prompt or task.data.name or f"task {index}"
            text = prompt if isinstance(prompt, str) else task.data.prompt_text
            yield {"prompt": text, "index": index, "task": task.hash[:_DIGITS]}


async def play(row: Row, client: AsyncOpenAI, request: str) -> dict[str, float]:
    """Play one episode and score it; the reward, its parts and the metrics. Raises RuntimeError if the episode has
    failed, and ValueError if the row names no task."""
    api = importlib.import_module("verifiers.v1")
    env, task = _load(request), _task_of(row, request)
    os.environ[_KEY] = client.api_key
    endpoint = api.EvalClientConfig(base_url=str(client.base_url), api_key_var=_KEY)
    context = importlib.import_module("verifiers.v1.clients").ModelContext(model=MODEL_NAME, client=endpoint)
    async with _servers(request).running():
        episode = await env.run_episode(task, context)
        failed = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if failed or not episode.ok:
            raise RuntimeError(f"{failed[0].type}: {failed[0].message}" if failed else "the episode is not ok")
    policy = [trace for trace in episode.traces if trace.agent.config.client.base_url == endpoint.base_url]
    if len(policy) != 1:
        raise RuntimeError(f"the policy played {len(policy)} agents of the episode; their rewards are not told apart")
    told = policy[0].info.get("nemo_gym", {})
    if told.get("mask_sample"):
        raise RuntimeError(f"NeMo Gym's server excludes the sample: {told.get('failure_reason')}")
    parts = {f"reward_{name}": one.value for name, one in policy[0].rewards.items() if one is not None}
    metrics = {name: value for name, value in policy[0].metrics.items() if value is not None}
    return {**metrics, **parts, "reward": policy[0].reward}


class _Servers:
    """What an environment runs for all episodes of a process, such as shared tool servers, which take seconds to start.
    They end with the process, or with an episode that fails: the next one starts them again."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start them unless they run. Raises what the environment raises."""
        if self._task is None or self._task.done():
            started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(started))
            await started
        try:
            yield
        except BaseException:
            self._task.cancel()
            await asyncio.wait({self._task})
            raise

    async def _run(self, started: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                started.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)


@functools.cache
def _servers(request: str) -> _Servers:
    return _Servers(_load(request))


def _with_id(part: str | Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if part is None else {"id": part} if isinstance(part, str) else dict(part)


def _task_of(row: Row, request: str) -> Any:
    """The task of a row. Raises ValueError if there is none, or it has changed since the row was written."""
    index, written = row.metadata.get("index"), row.metadata.get("task")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ValueError("the row has no index of a task: write the rows with `troupe env rows`, and name the column")
    task = next(itertools.islice(_load(request).taskset, index, None), None)
    if task is None:
        raise ValueError(f"the taskset has no task {index}")
    if written is not None and written != task.hash[:_DIGITS]:
        raise ValueError(f"task {index} of the taskset is not the row's: write the rows again with `troupe env rows`")
    return task


@functools.cache
def _load(request: str) -> Any:
    """The environment, once in a process and those forked from it: it has no state of an episode. Raises ValueError."""
    taskset, harness, settings = json.loads(request)
    try:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    except ImportError as error:
        raise ValueError(f"{NEEDS} ({error})") from error
    try:
        name, seat = _seat(taskset.get("id", ""), harness, settings)
        env = loaders.load_environment(loaders.resolve_env_config({**settings, "taskset": taskset, name: seat}))
        asyncio.run(_prepare(env.config))
    except Exception as error:  # the environment is the user's
        raise ValueError(f"{taskset.get('id')}: {type(error).__name__}: {error}") from error
    return env


def _seat(taskset: str, harness: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The agent that the policy plays, and its settings. Raises ValueError if there are several, or none."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    kind = importlib.import_module("verifiers.v1.configs.agent").AgentConfig
    fields = loaders.env_config_type(taskset, settings.get("id", "")).model_fields
    agents = {name: field.default for name, field in fields.items() if isinstance(field.default, kind)}
    free = [name for name in agents if "client" not in settings.get(name, {})]
    if len(free) != 1:
        others = f"give all but one a client in settings ({', '.join(agents)})"
        raise ValueError(f"the policy plays one agent, and {len(free)} agents have no client: {others}")
    declared, seat = agents[free[0]].model_fields_set, dict[str, Any]()
    if "runtime" not in declared:
        seat["runtime"] = {"type": "subprocess"}
    if harness:
        seat["harness"] = harness
    elif "harness" not in declared:
        own = loaders.default_harness_id(taskset)  # without one `bash`, which runs the policy's commands here
        seat["harness"] = {"id": "null" if own == "bash" else own}
    return free[0], {**seat, **settings.get(free[0], {})}


async def _prepare(config: Any) -> None:
    """Install the packages of the harnesses' programs, which episodes would otherwise look up again."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    runtimes = importlib.import_module("verifiers.v1.runtimes")
    for harness in config.agent_harnesses().values():
        async with runtimes.provision_runtime(runtimes.SubprocessConfig()) as runtime:
            await loaders.load_harness(harness).setup(runtime)
