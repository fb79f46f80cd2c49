"""What a user chooses for a first spec, what is known of the data, and the environment with its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.section import unknown_algorithm
from troupe.orchestrator.algorithms.table import ALGORITHMS, TAUGHT
from troupe.orchestrator.errors import UsageError, nearest
from troupe.orchestrator.spec.checks.shared import IMPORTED
from troupe.workers.contract.environments import ENVIRONMENTS, HARBOR_TURNS
from troupe.workers.contract.rewards import ENVIRONMENT_REWARD, JUDGE_REWARD

GYM = "reasoning_gym:"
"""Begins the name of generated tasks."""
TURNS = 4
"""Most turns of the policy in an episode."""
LONG_TURNS = ("agent", "harbor", "verifiers")
"""Environments whose turns are commands or programs with the thought before them."""
_SLOW = {"turn_timeout_s": 200.0, "episode_timeout_s": 500.0, "memory_limit_mib": 8192, "episodes": 8}
"""Bounds of environments that start programs for an episode."""
_TURN_S = 90.0
"""Longest answer of a model behind an endpoint: longer than the time that the environment gives it."""
_RUBRIC = "Rate how much of what the user wanted the assistant has done, and whether all that it said is true."
_EPISODES = 64
"""Episodes under way in one worker."""


@dataclass(frozen=True)
class Choices:
    """A user's choices."""

    model: str
    data: str
    """A file, a pattern of files, a folder of `datasets`, a name on the hub, or `reasoning_gym:TASK`."""
    algorithm: str = "grpo"
    gpus: int = 0
    gpu_type: str = ""
    """A name of `GPU_GIB`; if empty, it is unknown and memory of GPUs is not checked."""
    cpus: int = 1
    name: str = "my-run"
    steps: int = 100
    max_tokens: int = 0
    """Longest response, or turn of an episode; 0: 64 on the CPU or 256, on GPUs 1024 or 512."""
    environment: str = ""
    """A built-in environment or `package.module:Class`; empty if a sample is one response."""
    environment_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its arguments."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Columns of the data by field, if their names do not say it."""

    @property
    def offline(self) -> bool:
        """Whether the algorithm learns from examples instead of rollouts."""
        return self.algorithm in OFFLINE_ALGORITHMS


@dataclass(frozen=True)
class Earned:
    """A reward function, and how many of the data's own answers earn 1 from it."""

    function: str
    earned: int = 0
    tried: int = 0
    """0: it was not tried."""
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its arguments."""

    @property
    def given(self) -> dict[str, Any]:
        """Its arguments as a field, unless there are none."""
        return {"args": {**self.args}} if self.args else {}

    @property
    def share(self) -> float:
        """Part of the answers that earn 1."""
        return self.earned / self.tried if self.tried else 1.0

    @property
    def note(self) -> str:
        """What the trial has shown; empty without one."""
        return f"{self.function}: {self.earned} of {self.tried} answers of the data earn 1" if self.tried else ""


@dataclass(frozen=True)
class Data:
    """The data section of the spec, and its consequences for lengths and rewards."""

    section: dict[str, Any]
    prompt_tokens: int
    """Room for a prompt."""
    response_tokens: int
    """Room for a response of the data; 0 if there are no responses."""
    reward: Earned | None = None
    """Reward function that fits the answers, or None without sampling."""
    without_evaluation: str = ""
    """Why nothing is held out; empty if something is."""
    unused: tuple[str, ...] = ()
    """Columns that look like parts of the prompt, and that the spec does not use."""
    notes: tuple[str, ...] = ()
    """What the spec reads of the rows, and what it leaves out."""

    @property
    def unused_note(self) -> str:
        """What to do about the columns that the spec does not use; empty without one."""
        columns = ", ".join(self.unused)
        return f"Not used: {columns}. If the prompt needs more, join it into one column." if columns else ""


def check_algorithm(name: str) -> None:
    """Raise UsageError unless a first spec can be written for this algorithm."""
    if name in TAUGHT or (name in OFFLINE_ALGORITHMS and OFFLINE_ALGORITHMS[name].teacher):
        raise UsageError(f"--algorithm: {name} needs a second model as teacher; see `troupe algorithms {name}`")
    if name not in ALGORITHMS and name not in OFFLINE_ALGORITHMS:
        raise UsageError(f"--algorithm: {unknown_algorithm(name)}")


def check_environment(name: str, *, offline: bool, configured: bool = False) -> None:
    """Raise UsageError unless a first spec can be written for this environment."""
    if offline:
        raise UsageError("--environment: this algorithm learns from examples and plays no episodes")
    if name in ENVIRONMENTS and ENVIRONMENTS[name].needs_arguments and not configured:
        raise UsageError(f"--environment: {name} needs arguments: --args, as in docs/guides/environments.md")
    if name not in ENVIRONMENTS and not IMPORTED.fullmatch(name):
        hint = nearest(name, ENVIRONMENTS) or f"built in: {', '.join(ENVIRONMENTS)}; your own: package.module:Class"
        raise UsageError(f"--environment: no environment '{name[:60]}' ({hint})")


def needs_answer(choices: Choices) -> bool:
    """Whether something compares a response with the answer of the data."""
    found = ENVIRONMENTS.get(choices.environment)
    return not choices.environment or (found is not None and found.reads_answer)


def own_tasks(environment: str | None) -> tuple[str, ...]:
    """The columns of rows that name a task of an environment, or none if it has no tasks itself."""
    found = ENVIRONMENTS.get(environment or "")
    return () if found is None else found.tasks


def reward_of(choices: Choices, data: Data) -> dict[str, Any]:
    """The reward function of the role `reward`, with its arguments."""
    args = choices.environment_args
    if choices.environment == "user_simulator" and "environment" not in args:  # nothing else gives rewards
        if "endpoint" not in args:
            raise UsageError(
                "--args: name the user's model, as in '{endpoint: {url: http://localhost:8000/v1, model: M}}'"
            )
        asked = {"rubric": _RUBRIC, "endpoint": args["endpoint"]}
        return {"name": JUDGE_REWARD, "timeout_s": _TURN_S, "args": asked, **_key(args)}
    if choices.environment not in ("", "single_turn"):
        return {"name": ENVIRONMENT_REWARD}
    reward = data.reward or Earned("")
    return {"name": reward.function, **reward.given}


def _key(args: Mapping[str, Any]) -> dict[str, list[str]]:
    """The variable with the key of an environment's endpoint, as a field, unless there is none."""
    endpoint = args.get("endpoint")
    variable = endpoint.get("api_key_variable") if isinstance(endpoint, Mapping) else None
    return {"env": [str(variable)]} if variable else {}


def environment_section(choices: Choices, data: Data) -> dict[str, Any]:
    reward = data.reward or Earned("")
    scored = {"function": reward.function, **reward.given}
    own: dict[str, dict[str, Any]] = {
        "retry": {"args": {**scored, "attempts": 2}},
        "harbor": {"tool_parser": "hermes", **_SLOW, "max_turns": HARBOR_TURNS},
        "verifiers": {"tool_parser": "hermes", **_SLOW},
        "user_simulator": {"turn_timeout_s": _TURN_S, **_key(choices.environment_args)},
        "tools": {"args": {"tools": ["calculator"], **scored}, "tool_parser": "hermes"},
    }
    workers = max(1, min(8, choices.cpus // 8))
    cpus = 1 if choices.gpus else max(0.1, int(10 * choices.cpus / workers) / 100)
    return {
        "workers": workers,
        "cpus": cpus,
        "name": choices.environment,
        "max_turns": TURNS,
        "episodes": _EPISODES,
        **own.get(choices.environment, {}),
        **({"args": dict(choices.environment_args)} if choices.environment_args else {}),
    }
