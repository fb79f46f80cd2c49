"""Tasks in Harbor's format, with a stand-in for the runtime: its commands run here, in a PID namespace of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from troupe.workers.agents.environments.harbor import Harbor, offered
from troupe.workers.agents.sandbox.containers import RUNTIMES, ContainerError, ContainerSettings, RunningContainer
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.isolation.descendants import MARK, new_mark

ISOLATED = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
pytestmark = pytest.mark.skipif(
    subprocess.run([*ISOLATED, "true"], capture_output=True).returncode != 0, reason="there are no user namespaces"
)

STAND_IN = f"""#!{sys.executable}
import json, os, subprocess, sys
root, (op, *rest) = {{root!r}}, sys.argv[1:]
with open(root + "/asked", "a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
def inside(text):
    for name in ("/tests", "/logs", "/app"):
        text = text.replace(" " + name, " " + root + name)
    return text
if op == "run":
    if "missing" in rest:
        sys.exit("Unable to find image 'missing'")
    code = subprocess.run(["sh", "-c", rest[-1]]).returncode
    open(root + "/ended", "w").close()
    sys.exit(code)
elif op == "exec":
    command = [inside(part) for part in rest[rest.index("sh"):]]
    os.execvp("unshare", [*{ISOLATED}, *command])
elif op == "build":
    sys.exit(0 if os.path.exists(rest[-1] + "/Dockerfile") else 1)
"""
TEST = """#!/bin/sh
root=${0%/tests/test.sh}
[ "$(cat $root/app/hello.txt)" = "Hello, world!" ] && reward=1
echo ${reward:-0} > $root/logs/verifier/reward.txt
"""
TOML = """
version = "1.0"
[environment]
docker_image = "{image}"
{environment}
[verifier]
timeout_sec = 5.0
{verifier}
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for the container's root; `docker` is the stand-in."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "docker"
    program.write_text(STAND_IN.format(root=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def task(
    root: Path, *, test: str = TEST, image: str = "hello", environment: str = "", verifier: str = "", extra: str = ""
) -> dict[str, Any]:
    """Arguments of the environment for one task."""
    folder = root / "tasks" / "hello"
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Write hello.\n")
    (folder / "task.toml").write_text(TOML.format(image=image, environment=environment, verifier=verifier) + extra)
    (folder / "tests" / "test.sh").write_text(test)
    return {"tasks": str(folder.parent)}


def call(command: Any) -> Message:
    function = {"name": "bash", "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


DONE: Message = {"role": "assistant", "content": "It is done.", "finish_reason": "stop"}
HELLO = call("mkdir -p /app && printf 'Hello, world!' > /app/hello.txt")


def play(args: Mapping[str, Any], turns: Sequence[Message], name: str = "hello") -> list[Observation]:
    """The observations of an episode of these turns, until it is done."""

    async def run() -> list[Observation]:
        environment = Harbor(**args)
        try:
            seen = [
                await environment.start(Row(({"role": "user", "content": "Write hello."},), metadata={"task": name}))
            ]
            for turn in turns:
                if not seen[-1].done:
                    seen.append(await environment.step(turn))
            return seen
        finally:
            await environment.close()

    return asyncio.run(run())


def texts(seen: Sequence[Observation]) -> list[str]:
    return [message["content"] for one in seen[1:] for message in one.messages]


def test_the_tests_of_a_task_give_the_reward(root: Path) -> None:
    args = task(root)
    assert list(Harbor(**args).rows()) == [{"prompt": "Write hello.", "task": "hello"}]
    seen = play(args, [HELLO, call("cat /app/hello.txt; exit 3"), DONE])
    assert texts(seen) == ["[no output]", "Hello, world!\n[exit code 3]"]
    assert (seen[-1].reward, seen[-1].done, seen[-1].info["tool_calls"]) == (1.0, True, 2.0)
    system, tools = offered({})
    assert seen[0].messages[0] == {"role": "system", "content": system}
    assert seen[0].tools == json.loads(tools)
    assert (root / "ended").exists(), "the container has ended"


def test_an_undone_task_earns_nothing_and_the_last_turn_is_tested(root: Path) -> None:
    args = task(root)
    assert play(args, [DONE])[-1].reward == 0.0
    seen = play({**args, "turns": 2}, [call("true"), HELLO, DONE])
    assert len(seen) == 3 and seen[-1].done and seen[-1].reward == 1.0


def test_what_the_policy_wrote_is_no_reward(root: Path) -> None:
    plant = call("mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.json; echo exit > /tests/helper")
    assert play(task(root), [plant, DONE])[-1].reward == 0.0
    assert not (root / "tests" / "helper").exists()


def test_further_numbers_of_the_tests_are_metrics(root: Path) -> None:
    test = 'echo \'{"reward": 0.5, "style": 1, "why": "x"}\' > ${0%/tests/test.sh}/logs/verifier/reward.json'
    end = play(task(root, test=f"#!/bin/sh\n{test}\n"), [DONE])[-1]
    assert end.reward == 0.5 and end.info["style"] == 1.0 and "why" not in end.info


def test_a_command_that_does_not_end_is_ended_and_a_long_output_is_cut(root: Path) -> None:
    args = {**task(root), "command_timeout_s": 3.0}
    seen = play(args, [call("echo begun; sleep 60"), call("seq 60000"), call(3), DONE])
    slow, long, wrong = texts(seen)
    assert slow == "begun\n[not done after 3 s: it was ended, with all that runs in the container]"
    assert long.startswith("1\n2\n") and long.endswith("\n59999\n60000") and "bytes missing]" in long
    assert len(long) < 132_000 and wrong == "error: command: expected text"
    asked = [json.loads(line) for line in (root / "asked").read_text().splitlines()]
    assert ["exec", "--interactive", "--user=0", asked[0][3].removeprefix("--name="), "sh", "-c", "kill -9 -1"] in asked


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "no reward": ({"test": "#!/bin/sh\necho broken\n"}, "hello: its tests wrote no reward to /logs/verifier: broken"),
    "no number": (
        {"test": "#!/bin/sh\necho '[1]' > ${0%/tests/test.sh}/logs/verifier/reward.txt\n"},
        "hello: its tests wrote no number as reward, but '[1]'",
    ),
    "not finite": (
        {"test": "#!/bin/sh\necho NaN > ${0%/tests/test.sh}/logs/verifier/reward.txt\n"},
        "hello: its tests wrote no number as reward, but 'NaN'",
    ),
    "slow tests": ({"test": "#!/bin/sh\nsleep 60\n"}, "hello: its tests are not done after 0.5 s"),
    "no image": ({"image": "missing"}, "no container of missing: Unable to find image 'missing'"),
    "a new setting": (
        {"environment": "gpus = 1\nswap_mb = 0"},
        "hello: task.toml has environment.gpus, which this environment does not play",
    ),
    "a size": (
        {"environment": 'memory = "much"'},
        "environment.memory: expected a size such as 2G, got 'much'",
    ),
    "several containers": ({}, "hello: docker-compose.yaml starts several containers, and this environment has one"),
    "several steps": ({"extra": '[[steps]]\nname = "a"\n'}, "hello: task.toml has steps, which this environment"),
    "a variable": (
        {"environment": 'env = {KEY = "${NO_SUCH_KEY}"}'},
        "the task needs the variable NO_SUCH_KEY: name it in roles.environment.env",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_prevents_a_reward_fails_the_episode(root: Path, case: str) -> None:
    changes, message = FAILURES[case]
    args = task(root, **changes)
    if case == "slow tests":
        path = root / "tasks" / "hello" / "task.toml"
        path.write_text(path.read_text().replace("5.0", "0.5"))
    if case == "several containers":
        (root / "tasks" / "hello" / "environment").mkdir()
        (root / "tasks" / "hello" / "environment" / "docker-compose.yaml").touch()
    with pytest.raises((ContainerError, ValueError)) as error:
        play(args, [DONE])
    assert str(error.value).startswith(message)


def test_an_unknown_task_and_wrong_arguments_are_named(root: Path) -> None:
    args = task(root)
    with pytest.raises(ValueError, match="the row's column task names no task: 'other'; there are hello"):
        play(args, [DONE], "other")
    for wrong, message in (
        ({"runtime": "dockr"}, "runtime: 'dockr' is none of docker, podman, apptainer"),
        ({"tasks": str(root / "bin")}, "tasks: .* has no folders with a task.toml"),
        ({"turns": 0}, "turns and command_timeout_s must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            Harbor(**{**args, **wrong})


def test_an_image_is_named_built_or_given(root: Path) -> None:
    args = task(root, image="")
    folder = root / "tasks" / "hello" / "environment"
    with pytest.raises(ValueError, match=r"neither environment\.docker_image nor a Dockerfile: set args\.image"):
        play(args, [DONE])
    assert play({**args, "image": "given"}, [DONE])[-1].done
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch\n")
    play(args, [DONE])
    asked = [json.loads(line) for line in (root / "asked").read_text().splitlines()]
    (build,) = [one for one in asked if one[0] == "build"]
    ran = [one for one in asked if one[0] == "run"]
    assert "given" in ran[0] and build[2].removeprefix("--tag=") in ran[1]


@pytest.mark.parametrize("runtime", ["docker", "apptainer"])
def test_a_container_ends_with_the_process_that_started_it(root: Path, runtime: str) -> None:
    """Also if all its descendants are ended, as an episode's are."""
    program = root / "bin" / "apptainer"
    program.write_text(f'#!/bin/sh\n[ "$2" = stop ] && echo "Stopping $3" && touch {root}/ended\nexit 0\n')
    program.chmod(0o755)
    script = (
        "import asyncio, os\nfrom troupe.workers.agents.sandbox.containers import *\n"
        "from troupe.workers.isolation.descendants import MARK, end_marked\n"
        f"async def main():\n    await RunningContainer.start(RUNTIMES['{runtime}'], 'a', ContainerSettings())\n"
        f"    end_marked(os.environ[MARK])\n    os.killpg(0, {int(signal.SIGKILL)})\nasyncio.run(main())"
    )
    marked = {**os.environ, MARK: new_mark()}
    ended = subprocess.run([sys.executable, "-c", script], env=marked, start_new_session=True)
    assert ended.returncode == -signal.SIGKILL
    for _ in range(600):
        if (root / "ended").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the container runs on")


SETTINGS = ContainerSettings(2, 512, False, {"A": "b, c"}, ("--gpus=all",))


def test_a_container_has_limits_and_no_network_unless_asked_for() -> None:
    docker = RUNTIMES["podman"].keep("name", "image:1", SETTINGS)
    assert docker[:2] == ["podman", "run"] and docker[docker.index("--entrypoint=sh") + 1] == "image:1"
    assert {"--rm", "--network=none", "--cpus=2", "--memory=512m", "--gpus=all"} <= {*docker}
    assert {"--pids-limit=1024", "--security-opt=no-new-privileges"} <= {*docker}
    apptainer = RUNTIMES["apptainer"].keep("name", "image:1", SETTINGS)
    assert {"--containall", "--no-privs", "--network=none", "--memory=512M", "docker://image:1"} <= {*apptainer}
    reached = ContainerSettings(network=True)
    assert not any("network" in word for name in RUNTIMES for word in RUNTIMES[name].keep("name", "image", reached))
    for missing in ("/images/none", "./none", "images/none.sif"):
        with pytest.raises(ContainerError, match=f"{missing}: no such image on this machine"):
            RUNTIMES["apptainer"].keep("name", missing, SETTINGS)
    with pytest.raises(ContainerError, match="Apptainer runs commands as the user who started it"):
        RUNTIMES["apptainer"].execute("name", ["true"], {}, "agent")
    with pytest.raises(ContainerError, match="builds no Dockerfile"):
        RUNTIMES["apptainer"].build("tag", Path("folder"))


@pytest.mark.parametrize(
    ("asked", "says", "open"),
    [
        (True, {"environment": "allow_internet = true"}, True),
        (True, {"environment": "allow_internet = false"}, False),
        (True, {"verifier": 'network_mode = "no-network"'}, False),
        (False, {"environment": "allow_internet = true"}, False),
    ],
)
def test_the_network_is_open_if_both_sides_want_it(root: Path, asked: bool, says: dict[str, str], open: bool) -> None:
    play({**task(root, **says), "network": asked}, [DONE])
    run = json.loads((root / "asked").read_text().splitlines()[0])
    assert ("--network=none" not in run) == open


def test_apptainer_starts_an_instance_and_stops_it(root: Path) -> None:
    program = root / "bin" / "apptainer"
    program.write_text(f'#!/bin/sh\necho "$@" >> {root}/asked\n[ "$2" = exec ] && shift 4 && exec "$@"\nexit 0\n')
    program.chmod(0o755)

    async def run() -> tuple[str, int | None]:
        container = await RunningContainer.start(RUNTIMES["apptainer"], "image", SETTINGS)
        result = await container.run("echo $A$D; exit 2", 10, variables={"D": "d"})
        await container.close()
        return result.output, result.exit_code

    assert asyncio.run(run()) == ("b, cd\n", 2)
    start, execute, stop = [
        line.split()
        for line in (root / "asked").read_text().splitlines()
        if line.startswith(("instance", "--silent exec"))
    ]
    assert start[:2] == ["instance", "start"] and stop == ["instance", "stop", start[-1]]
    assert execute[:4] == ["--silent", "exec", "--no-privs", f"instance://{start[-1]}"]
