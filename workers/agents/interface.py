"""What the rest of `workers/` uses of environments, episodes, judges and sandbox. It imports no other module of them.

A name is imported when it is first used, so that a process imports no more than it uses: a reward function's starts
without pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupe.workers.agents.environments.processes import EnvironmentProcesses as EnvironmentProcesses
    from troupe.workers.agents.environments.processes import EpisodeProcess as EpisodeProcess
    from troupe.workers.agents.environments.processes import EpisodeProcessFailed as EpisodeProcessFailed
    from troupe.workers.agents.episodes.check import Rehearsal as Rehearsal
    from troupe.workers.agents.episodes.check import describe as describe
    from troupe.workers.agents.episodes.check import rehearse as rehearse
    from troupe.workers.agents.episodes.check import stretches as stretches
    from troupe.workers.agents.episodes.conversation import MalformedCall as MalformedCall
    from troupe.workers.agents.episodes.conversation import ParseCalls as ParseCalls
    from troupe.workers.agents.episodes.conversation import TurnReader as TurnReader
    from troupe.workers.agents.episodes.conversation import read_row as read_row
    from troupe.workers.agents.episodes.episode import EpisodeRunner as EpisodeRunner
    from troupe.workers.agents.episodes.episode import LongReader as LongReader
    from troupe.workers.agents.episodes.turns import Played as Played
    from troupe.workers.agents.episodes.turns import RecordedTurns as RecordedTurns
    from troupe.workers.agents.episodes.turns import SampledTurn as SampledTurn
    from troupe.workers.agents.episodes.turns import Segment as Segment
    from troupe.workers.agents.episodes.turns import TurnLimits as TurnLimits
    from troupe.workers.agents.judges.arguments import judge_problem as judge_problem
    from troupe.workers.agents.judges.reward import JudgeReward as JudgeReward
    from troupe.workers.agents.sandbox.python_tests import python_tests as python_tests
    from troupe.workers.agents.sandbox.run import sandbox_problem as sandbox_problem

_HOMES = {
    **dict.fromkeys(("EnvironmentProcesses", "EpisodeProcessFailed", "EpisodeProcess"), "environments.processes"),
    **dict.fromkeys(("Rehearsal", "describe", "rehearse", "stretches"), "episodes.check"),
    **dict.fromkeys(("EpisodeRunner", "LongReader"), "episodes.episode"),
    **dict.fromkeys(("MalformedCall", "ParseCalls", "TurnReader", "read_row"), "episodes.conversation"),
    **dict.fromkeys(("Played", "RecordedTurns", "SampledTurn", "Segment", "TurnLimits"), "episodes.turns"),
    "JudgeReward": "judges.reward",
    "judge_problem": "judges.arguments",
    "python_tests": "sandbox.python_tests",
    "sandbox_problem": "sandbox.run",
}
"""The names, and the module of each in this folder."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"troupe.workers.agents.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
