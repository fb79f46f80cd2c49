"""Environments in a virtual environment of their own: what they import, how they fail, and what has been installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.checks.machine import unusable_environment
from troupe.orchestrator.starter import environments
from troupe.workers.agents.environments import verifiers
from troupe.workers.agents.environments.gymnasium import Gymnasium
from troupe.workers.agents.environments.processes import EnvironmentProcesses, EpisodeProcessFailed
from troupe.workers.agents.environments.textarena import TextArena
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import ENVIRONMENTS, EpisodeReply, Row, read_observation
from troupe.workers.contract.rewards import Feedback
from troupe.workers.isolation.child import LoadFailed
from troupe.workers.isolation.interpreters import (
    NoInterpreter,
    installed_folder,
    installed_mark,
    interpreter_of,
    locked,
)

NAME = "tests.workers.agents.environments.elsewhere:Elsewhere"
PACKAGE = """
import importlib.util
assert importlib.util.find_spec("pydantic") is None, "a package of Troupe's environment"
ANSWER, TASKS = "from there", 3
def boom(text):
    raise RuntimeError(f"no {text}")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a virtual environment with one package and none of Troupe's."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (place,) = folder.glob("lib/python3*/site-packages")
    (place / "only_there.py").write_text(PACKAGE)
    return str(folder / "bin" / "python")


def play(name: str, args: dict[str, Any], python: str | None, timeout_s: float = 60.0) -> EpisodeReply:
    """Plays one turn in that environment, and the turn of a second episode, which no fault of the first one costs."""

    async def run() -> EpisodeReply:
        processes = EnvironmentProcesses(name, args, 1024, python=python)
        await processes.start()
        try:
            first, second = await processes.fork(), await processes.fork()
            for process in (first, second):
                assert (await process.start(Row(({"role": "user", "content": "?"},)), 60.0)).status == "ok"
            reply = await first.step({"role": "assistant", "content": "a"}, timeout_s)
            assert second.alive
            return reply
        finally:
            processes.close()

    return asyncio.run(run())


def test_an_environment_imports_its_own_packages_and_none_of_troupes(python: str) -> None:
    reply = play(NAME, {}, python)
    assert (reply.status, reply.observation.reward, reply.observation.info) == ("ok", 1.0, {"here": 1.0})
    assert [message["content"] for message in reply.observation.messages] == ["from there"]


FAULTS = {
    "dies": "step: its process died: the arena is on fire",
    "hangs": "step: timeout after 1 s",
    "garbage": "step: error: ",
    "raises": "step: error: RuntimeError: no",
    "20 MB": "step: error: ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_foreign_process_is_a_status(python: str, fault: str) -> None:
    reply = play(NAME, {"fault": fault}, python, timeout_s=1.0 if fault == "hangs" else 60.0)
    assert reply.status.startswith(FAULTS[fault]), reply.status
    assert reply.observation.reward is None and reply.observation.done
    reply.status.encode()


@pytest.mark.parametrize(("fault", "content"), [("slow", "from there"), ("surrogates", r"from there\ud83d")])
def test_a_foreign_process_that_is_slow_or_writes_half_a_character_plays(python: str, fault: str, content: str) -> None:
    reply = play(NAME, {"fault": fault}, python)
    assert (reply.status, reply.observation.messages[0]["content"]) == ("ok", content)


def test_a_long_message_of_a_foreign_process_arrives(python: str) -> None:
    reply = play(NAME, {"fault": "10 MB"}, python)
    assert (reply.status, len(reply.observation.messages[0]["content"])) == ("ok", 10_000_000)


def test_an_interpreter_that_cannot_be_used_is_refused(python: str, tmp_path: Path) -> None:
    def problems(python: str | None) -> list[tuple[str, str]]:
        return list(unusable_environment(EnvironmentConfig(name=NAME, python=python), "roles.environment"))

    assert problems(python) == []
    ((field, problem),) = problems(str(tmp_path / "python"))
    assert field == "roles.environment.python" and "name VENV/bin/python" in problem
    ((field, problem),) = problems(None)
    assert field == "roles.environment.name" and "No module named 'only_there'" in problem
    (tmp_path / "no-python").write_text("#!/bin/sh\necho no python here >&2; exit 4")
    (tmp_path / "no-python").chmod(0o755)
    with pytest.raises(LoadFailed, match="died with exit code 4: no python here"):
        play(NAME, {}, str(tmp_path / "no-python"))
    with pytest.raises(NoInterpreter):
        interpreter_of("agent", str(tmp_path))


def test_tasks_of_an_environment_are_rows(python: str) -> None:
    for name in (NAME, NAME.replace(":Elsewhere", ":Further")):
        found = environments.own_rows(name, {}, 2, python)
        assert found == [{"prompt": "number 0", "index": 0}, {"prompt": "number 1", "index": 1}]
    with pytest.raises(UsageError, match="guess_number: it has no tasks itself"):
        environments.own_rows("guess_number", {}, 2)
    with pytest.raises(UsageError, match="unexpected keyword argument"):
        environments.own_rows(NAME, {"colour": 1}, 2, python)


def test_an_environment_is_installed_once_from_its_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran, said = list[list[str]](), list[str]()

    def run(command: list[str], say: object) -> None:
        ran.append(command)
        installed_folder("gymnasium").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    monkeypatch.setattr(environments.shutil, "which", lambda _: None)
    assert interpreter_of("gymnasium", None) is None
    python = environments.install("gymnasium", (), said.append)
    assert [command[1:3] for command in ran] == [["-m", "venv"], ["-I", "-m"]]
    assert ran[0][3] == str(installed_folder("gymnasium"))
    assert said[0].startswith("installing 7 packages") and "MiB in" in said[1]
    assert interpreter_of("gymnasium", None) == str(python)
    assert environments.install("gymnasium", (), said.append) == python and len(ran) == 2
    environments.install("gymnasium", ("my-game",), said.append)
    assert ran[2][-1] == "my-game" and "-c" in ran[2] and len(ran) == 3
    environments.install("gymnasium", ("my-game",), said.append)
    assert len(ran) == 3
    monkeypatch.chdir(tmp_path)
    for folder in ("one/my-game", "other/my-game"):
        (tmp_path / folder).mkdir(parents=True)
    environments.install("gymnasium", ("one/my-game",), said.append)
    monkeypatch.chdir("other")
    environments.install("gymnasium", ("my-game", "./my-game"), said.append)
    assert [command[-1] for command in ran[3:]] == [f"-e{tmp_path}/{name}/my-game" for name in ("one", "other")]
    installed_mark("gymnasium").unlink()
    assert interpreter_of("gymnasium", None) is None, "an installation that was interrupted"
    with pytest.raises(UsageError, match="did you mean 'verifiers'"):
        environments.install("verifers", (), said.append)


def test_a_package_that_cannot_be_installed_leaves_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment does not have it, though another folder has."""
    (tmp_path / "elsewhere-1.0.dist-info").mkdir()
    (tmp_path / "elsewhere-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments, "lock_of", lambda _: tmp_path / "no-such-lock")
    monkeypatch.setattr(environments.shutil, "which", lambda _: None)
    (tmp_path / "no-such-lock").write_text("elsewhere==1.0\n")
    with pytest.raises(UsageError, match=r"exit code 1: .*elsewhere==1.0"):
        environments.install("gymnasium", (), lambda _: None)
    assert interpreter_of("gymnasium", None) is None


def test_uv_installs_where_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert environments._installer(tmp_path) == ["/usr/bin/uv", "pip", "install", "--python", str(tmp_path)]


def test_every_lock_is_of_a_built_in_environment() -> None:
    assert set(locked()) <= set(ENVIRONMENTS)
    assert set(locked()) == {"gymnasium", "openenv", "textarena", "verifiers"}


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for Gymnasium: a corridor of three places."""

    class Discrete:
        n, start = 2, 0

        def contains(self, action: int) -> bool:
            return 0 <= action < self.n

        def seed(self, seed: int) -> None:
            self.seeded = seed

        def __str__(self) -> str:
            return "Discrete(2)"

    class Corridor:
        action_space, render_mode = Discrete(), "ansi"

        def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
            self.place, self.seed = 0, seed
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            self.place += 1 if action else -1
            return self.place, float(self.place == 2), self.place == 2, self.place < -1, {}

        def render(self) -> str:
            return "".join(f"\x1b[41m{n}\x1b[0m" if n == self.place else str(n) for n in range(3))

        def close(self) -> None:
            self.closed = True

    corridor = Corridor()
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda _, **__: corridor))
    yield corridor


def test_a_turn_is_an_action_of_gymnasium(gym: Any) -> None:
    environment = Gymnasium("Corridor-v0", actions=["left", "right"])
    first = environment.start(Row(({"role": "user", "content": "Walk."},), metadata={"seed": 7}, seed=1))
    assert (first.messages[0]["content"], gym.seed, gym.action_space.seeded) == ("Walk.\n\n[0]12", 7, 7)
    wrong = environment.step({"role": "assistant", "content": "up"})
    assert wrong.messages[0]["content"] == "error: no action; name one of left, right"
    assert (wrong.reward, gym.place) == (None, 0)
    second = environment.step({"role": "assistant", "content": "not left, but RIGHT"})
    assert (second.messages[0]["content"], second.reward, second.done) == ("0[1]2", 0.0, False)
    last = environment.step({"role": "assistant", "content": "right"})
    assert (last.reward, last.done, last.info) == (1.0, True, {"terminated": 1.0, "truncated": 0.0})
    environment.close()
    assert gym.closed


@pytest.mark.parametrize(("turn", "problem"), [("go 5", "no action of Discrete(2)"), ("", "no action of Discrete(2)")])
def test_a_turn_outside_the_space_is_no_step(gym: Any, turn: str, problem: str) -> None:
    environment = Gymnasium("Corridor-v0")
    environment.start(Row(()))
    answer = environment.step({"role": "assistant", "content": turn})
    assert (answer.messages[0]["content"], gym.place) == (f"error: {problem}", 0)
    assert environment.step({"role": "assistant", "content": "10 or 1"}).messages[0]["content"] == "0[1]2"


def test_wrong_words_for_actions_are_refused(gym: Any) -> None:
    with pytest.raises(ValueError, match="expected a word for each action"):
        Gymnasium("Corridor-v0", actions=["left"])


def test_a_game_of_textarena_shows_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    class Game:
        def reset(self, num_players: int, seed: int = 0) -> None:
            self.text, self.seed = "Guess!", seed

        def get_observation(self) -> tuple[int, str]:
            return 0, self.text

        def step(self, action: str) -> tuple[bool, dict[str, Any]]:
            self.text += f"\n{action} is wrong"
            return action == "5", {}

        def close(self) -> tuple[dict[int, int], dict[int, Any]]:
            return {0: 1}, {0: {"invalid_move": False, "reason": "you guessed it"}}

    game = Game()
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda **_: game))
    environment = TextArena("Guess-v0")
    shown = environment.start(Row(({"role": "system", "content": "Play."},), metadata={"seed": 3}))
    assert ([message["content"] for message in shown.messages], game.seed) == (["Play.", "Guess!"], 3)
    assert environment.step({"role": "assistant", "content": "4"}).messages[0]["content"] == "4 is wrong"
    last = environment.step({"role": "assistant", "content": "5"})
    assert (last.reward, last.done, last.info) == (Feedback(1.0, "you guessed it"), True, {"invalid_move": 0.0})


def test_a_game_of_textarena_for_two_names_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Game:
        def reset(self, num_players: int, seed: int = 0) -> None:
            if num_players != 2:
                raise ValueError("two players")
            self.texts, self.turn = ["You are 0.", "You are 1."], 0

        def get_observation(self) -> tuple[int, str]:
            return self.turn, self.texts[self.turn]

        def step(self, action: str) -> tuple[bool, dict[str, Any]]:
            self.texts = [f"{text}\n{action}" for text in self.texts]
            self.turn = 1 - self.turn
            return action == "mate", {}

        def close(self) -> tuple[dict[int, int], dict[int, Any]]:
            return {0: 1, 1: -1}, {0: {"invalid_move": False}, 1: {"invalid_move": True}}

    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda **_: Game()))
    with pytest.raises(ValueError, match="two players"):
        TextArena("Chess-v0")
    environment = TextArena("Chess-v0", players=2)
    asked = [environment.start(Row(({"role": "system", "content": "Play."},)))]
    asked += [environment.step({"role": "assistant", "content": move}) for move in ("e4", "e5", "mate")]
    texts = [[message["content"] for message in observation.messages] for observation in asked]
    assert texts == [["Play.", "You are 0."], ["Play.", "You are 1.\ne4"], ["e4\ne5"], []]
    assert [observation.player for observation in asked] == ["0", "1", "0", None]
    last = read_observation(asked[-1])
    assert (last.rewards, last.done, last.info) == ({"0": 1.0, "1": -1.0}, True, {"invalid_move": 1.0})


def trace(**fields: Any) -> Any:
    """A trace of verifiers: the policy's, with a reward of two parts."""
    client = SimpleNamespace(base_url=fields.pop("url", "http://episode/v1"))
    rewards = {"right": SimpleNamespace(value=1.0), "short": SimpleNamespace(value=0.25), "unset": None}
    known = {"info": {}, "ok": True, "errors": []}
    known |= {"reward": 1.25, "rewards": rewards, "metrics": {"turns": 2.0, "unset": None}}
    return SimpleNamespace(agent=SimpleNamespace(config=SimpleNamespace(client=client)), **(known | fields))


@pytest.fixture
def episode(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An episode of verifiers that is played at once, with one task."""

    class Env:
        taskset = (SimpleNamespace(hash="a" * 64),)
        played: Any = None
        refuses = ""
        started = ended = 0

        async def __aenter__(self) -> None:
            if self.refuses:
                raise OSError(self.refuses)
            self.started += 1

        async def __aexit__(self, *_: object) -> None:
            self.ended += 1

        def serving(self) -> Env:
            return self

        async def run_episode(self, task: Any, context: Any) -> Any:
            return self.played

    env = Env()
    monkeypatch.setattr(verifiers, "_load", lambda _: env)
    verifiers._servers.cache_clear()
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verifiers.v1", SimpleNamespace(EvalClientConfig=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", SimpleNamespace(ModelContext=SimpleNamespace))

    def play(*traces: Any, errors: tuple[Any, ...] = (), **metadata: Any) -> dict[str, float]:
        ok = not errors and all(one.ok for one in traces)
        env.played = SimpleNamespace(traces=traces, errors=errors, ok=ok)
        row = Row((), metadata=metadata or {"index": 0, "task": "a" * 16})
        client: Any = SimpleNamespace(base_url="http://episode/v1", api_key="key")
        return asyncio.run(verifiers.play(row, client, ""))

    return play


def test_rewards_and_metrics_of_a_trace_are_numbers_of_the_episode(episode: Any) -> None:
    judge = trace(url="http://judge", reward=9.0)
    assert episode(trace(), judge) == {"reward": 1.25, "reward_right": 1.0, "reward_short": 0.25, "turns": 2.0}


def test_an_error_of_a_trace_is_no_reward(episode: Any) -> None:
    error = SimpleNamespace(type="TaskError", message="the verifier is gone")
    with pytest.raises(RuntimeError, match="TaskError: the verifier is gone"):
        episode(trace(ok=False, errors=[error]))
    with pytest.raises(RuntimeError, match="TaskError: the verifier is gone"):
        episode(trace(), errors=(error,))
    with pytest.raises(RuntimeError, match="not ok"):
        episode(trace(ok=False))
    with pytest.raises(RuntimeError, match="excludes the sample: no judge"):
        episode(trace(info={"nemo_gym": {"mask_sample": True, "failure_reason": "no judge"}}))
    assert episode(trace(errors=[error]))["reward"] == 1.25, "an attempt that was repeated"
    for traces in ((), (trace(), trace())):
        with pytest.raises(RuntimeError, match="the policy played"):
            episode(*traces)


def test_what_all_episodes_share_is_started_once_and_again_after_one_that_failed(episode: Any) -> None:
    env, row = verifiers._load(""), Row((), metadata={"index": 0})
    client: Any = SimpleNamespace(base_url="http://episode/v1", api_key="key")
    episode(trace())  # sets what is played
    counts = list[tuple[int, int]]()

    async def run() -> None:
        for ok in (True, True, False, True):
            env.played.ok = ok
            if ok:
                await verifiers.play(row, client, "")
            else:
                with pytest.raises(RuntimeError, match="not ok"):
                    await verifiers.play(row, client, "")
            counts.append((env.started - 1, env.ended - 1))  # besides the episode before

    asyncio.run(run())
    assert counts == [(1, 0), (1, 0), (1, 1), (2, 1)]


def test_an_environment_that_cannot_serve_fails_each_sample_with_its_reason(episode: Any) -> None:
    env = verifiers._load("")
    env.refuses = "no port is free"
    for _ in range(2):
        with pytest.raises(OSError, match="no port is free"):
            episode(trace())


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"level": 1}, "no index of a task"),
        ({"index": True}, "no index of a task"),
        ({"index": 1}, "no task 1"),
        ({"index": 0, "task": "b" * 16}, "write the rows again"),
    ],
)
def test_a_row_that_names_no_task_fails_its_sample(episode: Any, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        episode(trace(), **metadata)


def test_the_process_that_loads_a_foreign_environment_is_closed_once() -> None:
    processes = EnvironmentProcesses(NAME, {}, 1024)
    with pytest.raises(EpisodeProcessFailed, match="closed"):
        asyncio.run(processes.fork())
