"""Statuses that name a cause: each is in a test with the cause, and in one with the same symptom and another cause."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from tests.conftest import ROOT
from troupe.orchestrator.cluster import links
from troupe.workers.agents.sandbox.run import SandboxError, _check_report
from troupe.workers.contract.environments import EnvironmentGone

CAUSE = re.compile(
    r"\b(timeout|timed out|did not answer|died|dead|out of memory|has ended|gone|killed|lost|cannot be reached)\b"
)
SOURCES = ("workers/rewards", "workers/agents", "workers/isolation/child.py", "workers/environment.py")
SOURCES += ("workers/reward.py", "workers/judge.py", "orchestrator/cluster/links.py", "orchestrator/rollouts")

FAULT, ASYNC = (
    "test_a_fault_is_a_status_and_costs_one_sample",
    "test_a_fault_of_an_asynchronous_function_costs_one_sample",
)
EPISODE, AGENT = "test_a_fault_is_a_status_and_costs_nobody_else", "test_a_fault_of_the_agent_is_a_status"
PROGRAM, SANDBOX = "test_the_answer_says_why_a_program_ended", "test_a_sandbox_without_a_result"
LINK, JUDGE = "test_an_environment_worker_that_is_lost_or_slow", "test_an_outage_and_a_silent_endpoint_are_statuses"
SERVER = "test_a_server_that_is_lost_fails_its_episode_alone"

STATUSES: dict[str, tuple[str, str] | str] = {
    "timeout after {} s": ("test_a_slow_sample_of_an_asynchronous_function_times_out_alone", ASYNC),
    "timeout": "the common cause of the statuses above, and the kind of an agent's answer",
    "out of memory (limit {} MiB)": (FAULT, EPISODE),
    "{}: out of memory (limit {} MiB; {} processes use {} MiB more)": (
        "test_memory_counts_over_all_processes_of_a_function",
        "test_memory_that_forked_processes_share_counts_once",
    ),
    "{} is lost, or leaves": (
        "test_a_lost_engine_s_evaluation_begins_again_where_the_version_still_is",
        "test_an_engine_that_leaves_hands_its_evaluation_over",
    ),
    "died": "there is no process: it has been closed",
    "died with exit code {}": (FAULT, FAULT),
    "died with signal {} ({})": (FAULT, FAULT),
    "its process died{}": (EPISODE, EPISODE),
    "its process was killed": (
        "test_a_turn_behind_one_that_timed_out_says_that_the_process_was_killed",
        "test_an_episode_that_ends_during_a_turn_leaves_its_process_whole_or_none",
    ),
    "timeout after {} s{}": (EPISODE, EPISODE),
    "it was lost: {}": (
        "test_workers_that_keep_dying_fail_the_sample",
        "test_an_episode_starts_again_when_its_worker_dies",
    ),
    "the process that loads the environment cannot be reached: {}": (
        "test_a_worker_whose_loading_process_died_says_so",
        EPISODE,
    ),
    "{}: the process that loaded the environment has died": (
        "test_a_worker_whose_loading_process_died_says_so",
        EPISODE,
    ),
    "the episode has ended": ("test_an_episode_that_is_cut_short_leaves_nothing_in_its_process", AGENT),
    "the MCP server {} has ended": (SERVER, SERVER),
    "[out of memory: the limit is {} MiB]": ("test_memory_that_ran_out_is_named", PROGRAM),
    "the process that makes sandboxes has ended: {}": (
        "test_where_the_process_that_starts_programs_is_killed_the_error_says_so",
        PROGRAM,
    ),
    "the sandbox ended without a result: a process of it was killed from outside": (SANDBOX, SANDBOX),
    "the sandbox did not end after it was killed": "a process that cannot be killed is none that a test can make",
    "{} is gone": (LINK, LINK),
    "{}: {} did not answer in {} s": (LINK, LINK),
    "{} did not answer in {} s": (JUDGE, JUDGE),
    "its data were lost {} times": (
        "test_a_group_whose_data_are_lost_each_time_is_replaced",
        "test_failed_rewards_drop_samples_and_groups_that_become_too_small",
    ),
}
"""A test with the cause, and one without it; or why a text needs none."""


def texts(path: Path) -> Iterator[str]:
    """The texts of a module but its docstrings, with `{}` for what is inserted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    parts = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node]
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)} | set(map(id, parts))
    for node in nodes:
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield str(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_every_status_that_names_a_cause_is_tested_with_the_cause_and_without() -> None:
    files = [
        file for name in SOURCES for file in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])
    ]
    assert {text for file in files for text in texts(file) if CAUSE.search(text)} == set(STATUSES)
    tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    named = {name for names in STATUSES.values() if isinstance(names, tuple) for name in names}
    assert {name for name in named if f"def {name}(" not in tests} == set()


async def _raises(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RayActorError(), "environment-0 is gone"),
        (TimeoutError(), "step: environment-0 did not answer in 5 s"),
    ],
)
def test_an_environment_worker_that_is_lost_or_slow(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "submit", lambda actor, method, *args: _raises(error))

    async def step() -> str:
        try:
            return (await links.ActorEnvironments({"environment-0": None}).step("environment-0", "e", {}, 5.0)).status
        except EnvironmentGone as gone:
            return str(gone)

    assert asyncio.run(step()) == status


@pytest.mark.parametrize(
    ("report", "says"),
    [({}, "killed from outside"), ({"failure": "mount: no", "step": "mount", "errno": 5}, "mount: no")],
)
def test_a_sandbox_without_a_result(report: dict[str, Any], says: str) -> None:
    with pytest.raises(SandboxError, match=says):
        _check_report(report, False)
