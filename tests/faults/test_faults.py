"""Every fault of the table, on real Ray, vLLM and DeepSpeed: `make test-faults`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.faults.containers import CONTAINERS, Container, UnreapedRun
from tests.faults.injected import ENGINE, WORKERS, Outcome, Signalled, left_behind, seconds_until, stop_group
from tests.faults.stalls import planted_environment
from tests.faults.table import record
from tests.processes import command_line
from tests.real.commands import ENDLESS, GRPO, PPO, Run, kill, ledger_balances, running
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

HUNG_S = 15.0
BUDGETS = tuple(f"failures.{role}_restarts=9" for role in ("trainer", "engine", "reward", "reference"))
TARGETS = (
    *((role, WORKERS[role]) for role in ("policy", "critic", "reference", "reward", "rollout")),
    ("the engine's process", ENGINE),
)
TAUGHT = (
    "algorithm.name=gkd",
    "roles.teacher={other: {cpus: 0.25, threads: 1, model: {path: .cache/models/tiny-teacher, dtype: float32}}}",
)
SIGNALS = [Signalled(*target, number) for number in (signal.SIGKILL, signal.SIGSTOP) for target in TARGETS]


@pytest.fixture(scope="module", params=CONTAINERS, ids=str)
def container(request: pytest.FixtureRequest) -> Container:
    """Every fault is injected where PID 1 reaps, and where it does not."""
    return request.param


@pytest.fixture(scope="module")
def ppo(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run with every role, in which one fault after another is injected."""
    folder = tmp_path_factory.mktemp("faults")
    endless = ("schedule.steps=100000", "schedule.prompts_per_step=2", "checkpoint.every_steps=5")
    with running(container.run(folder, PPO, *endless, *BUDGETS, name="faults")) as run:
        run.wait_for_step(2)
        yield run


@pytest.mark.parametrize("fault", SIGNALS, ids=lambda fault: fault.name)
def test_a_worker_is_lost_and_the_run_continues(container: Container, ppo: Run, fault: Signalled) -> None:
    outcome = fault.inject(ppo)
    record(container, outcome)
    assert outcome.ok, ppo.output[-4000:]


@pytest.fixture(scope="module")
def taught(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that learns from a teacher with a separate worker."""
    folder = tmp_path_factory.mktemp("taught")
    with running(container.run(folder, GRPO, *ENDLESS, *BUDGETS, *TAUGHT, name="taught")) as run:
        run.wait_for_step(2)
        yield run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_teacher_is_lost_and_the_run_continues(container: Container, taught: Run, number: signal.Signals) -> None:
    outcome = Signalled("a teacher", WORKERS["reference"], number).inject(taught)
    record(container, outcome)
    assert outcome.ok, taught.output[-4000:]


def test_a_teacher_without_finite_scores_ends_the_run_under_its_name(container: Container, tmp_path: Path) -> None:
    model = tmp_path / "teacher"
    shutil.copytree(ROOT / ".cache" / "models" / "tiny-teacher", model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    broken = (*TAUGHT, f"roles.teacher.other.model.path={model}")
    with running(container.run(tmp_path, GRPO, *ENDLESS, *broken, name="broken")) as run:
        code = run.wait(240)
    said = "teacher.other: the score of a token is not finite" in run.stderr
    remains = left_behind(run)
    outcome = f"the run ends, exit code {code}, and names the teacher" if said else f"ended with {code}"
    ok = said and code == 1 and not run.metrics
    record(container, Outcome("a teacher's scores are NaN", outcome, left_behind=remains, ok=ok))
    assert ok and remains == "nothing", run.output[-4000:]


def test_a_rank_hangs_and_the_trainers_are_restarted(container: Container, tmp_path: Path) -> None:
    """Its process runs, so that no watch of processes finds it; the bound follows the calls before."""
    bug = tmp_path / "bug"
    overrides = (*ENDLESS, "roles.policy.workers=2", "algorithm.kl_states=0", f"failures.hung_s={HUNG_S:g}")
    with running(container.run(tmp_path, GRPO, *overrides, name="hung", env=planted_environment(bug))) as run:
        run.wait_for_step(9)  # every call has been made more than five times: what bounds one are those before
        bug.write_text("sleep")
        run.processes("ray::PolicyWorker")[1].send_signal(signal.SIGUSR2)
        step, began = run.metrics[-1]["step"], time.monotonic()
        found_s = seconds_until(run, lambda: "failures.hung_s" in run.stderr, began)
        seconds = seconds_until(run, lambda: run.metrics[-1]["step"] > step + 1, began)
        stop_group(run, signal.SIGINT)
        code = run.wait(120)
    remains = left_behind(run)
    ok = None not in (found_s, seconds) and code == 130 and run.steps() == list(range(1, len(run.steps()) + 1))
    fault = f"a policy rank hangs in an update (failures.hung_s={HUNG_S:g})"
    record(container, Outcome(fault, "both ranks restart, continues", found_s, seconds, left_behind=remains, ok=ok))
    assert ok and remains == "nothing", run.output


def test_nothing_is_left_of_the_run(container: Container, ppo: Run) -> None:
    """After all faults the run stops on request, with a checkpoint, and leaves nothing."""
    began = time.monotonic()
    stop_group(ppo, signal.SIGTERM)
    code = ppo.wait(120)
    seconds = time.monotonic() - began
    remains = left_behind(ppo)
    record(container, Outcome("SIGTERM", f"saves, exit code {code}", recovered_s=seconds, left_behind=remains))
    assert (code, remains) == (130, "nothing")
    steps = ppo.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert all(ledger_balances(line) for line in ppo.metrics)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves(container: Container, tmp_path: Path, number: signal.Signals) -> None:
    with running(container.run(tmp_path, GRPO, *ENDLESS, name="signal")) as run:
        run.wait_for_step(1)
        began = time.monotonic()
        stop_group(run, number)
        code = run.wait(120)
        seconds = time.monotonic() - began
    saved = sorted(path.name for path in (run.out / "checkpoints").iterdir())
    remains = left_behind(run)
    record(container, Outcome(number.name, f"saves, exit code {code}", recovered_s=seconds, left_behind=remains))
    assert code == 130 and saved and remains == "nothing"


def test_a_signal_loses_no_finished_sample(container: Container, tmp_path: Path) -> None:
    """An asynchronous run is stopped while groups wait and run; the resumed one samples none of them again."""
    overrides = (*ENDLESS, "schedule.max_staleness=3", "checkpoint.every_steps=2")
    with running(container.run(tmp_path, GRPO, *overrides, name="open")) as run:
        run.wait_for_step(5)
        stop_group(run, signal.SIGTERM)
        code = run.wait(120)
    events = map(json.loads, (run.out / "events.jsonl").read_text().splitlines())
    saved = [event for event in events if event["event"] == "checkpoint"][-1]
    began, last = time.monotonic(), run.steps()[-1]
    with running(container.run(tmp_path, GRPO, *overrides, name="open", resume=True)) as again:
        again.wait_until(lambda: again.steps()[-1] > last, "another step")
        seconds = time.monotonic() - began
        said = f"{saved['samples']} finished samples of the checkpoint are not sampled again" in again.output
        stop_group(again, signal.SIGTERM)
        again.wait(120)
    remains = left_behind(again)
    ok = code == 130 and saved["samples"] > 0 and said and remains == "nothing"
    outcome = f"saves; --resume takes over {saved['samples']} finished samples of open groups"
    record(container, Outcome("SIGTERM of an asynchronous run", outcome, None, seconds, 0, remains, ok=ok))
    assert ok, again.output


COUNTED = """
from troupe.workers.rewards.functions import letter_share

def counted(response, answer, metadata):
    with open({path!r}, "a") as lines:
        lines.write("x\\n")
    return letter_share(response, answer, metadata, letters="aeiou")
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_kill_throws_away_what_was_finished_since_the_checkpoint(
    container: Container, tmp_path: Path, *, kept: bool
) -> None:
    """SIGKILL at a random moment of an asynchronous run; each sample that is scored leaves a line in a file."""
    rng, scored, steps = random.Random(34), tmp_path / "scored", 12
    (tmp_path / "counted_reward.py").write_text(COUNTED.format(path=str(scored)))
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    overrides = (
        f"schedule.steps={steps}",
        "schedule.max_staleness=3",
        "checkpoint.every_steps=1",
        "checkpoint.async_save=true",
        f"checkpoint.samples_mib={1024 if kept else 0}",
        "roles.reward.functions=[{name: 'counted_reward:counted'}]",
    )
    total = steps * 4 * 16
    with running(container.run(tmp_path, GRPO, *overrides, name="thrown", env=env)) as run:
        at = rng.randint(total // 3, 2 * total // 3)
        run.wait_until(lambda: scored.is_file() and scored.stat().st_size >= 2 * at, f"{at} samples")
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait(30)
        remains, before = left_behind(run), scored.stat().st_size // 2
    began = time.monotonic()
    with running(container.run(tmp_path, GRPO, *overrides, name="thrown", resume=True, env=env)) as again:
        assert again.wait() == 0, again.output
        seconds = time.monotonic() - began
    thrown = scored.stat().st_size // 2 - total
    trained = again.metrics[-1]["ledger/trained"]
    fault = f"SIGKILL of an asynchronous run that {'keeps' if kept else 'does not keep'} finished samples"
    outcome = f"`--resume` finishes the run; of {before} samples that were scored {thrown} are sampled again"
    record(
        container, Outcome(fault, outcome, None, seconds, thrown, remains, ok=trained == total and remains == "nothing")
    )
    assert trained == total and remains == "nothing"
    assert thrown <= (4 if kept else 8) * 4 * 16


def test_the_driver_is_killed_and_the_run_resumes(container: Container, tmp_path: Path) -> None:
    overrides = (*ENDLESS, "checkpoint.every_steps=1")
    with running(container.run(tmp_path, GRPO, *overrides, name="driver")) as run:
        run.wait_for_step(2)
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait(30)
        remains = left_behind(run)
        zombies = isinstance(run, UnreapedRun) and run.zombies
    began = time.monotonic()
    last = run.steps()[-1]
    with running(container.run(tmp_path, GRPO, *overrides, name="driver", resume=True)) as again:
        again.wait_until(lambda: again.steps()[-1] > last, "another step")
        seconds = time.monotonic() - began
    record(container, Outcome("SIGKILL of the driver", "resumes with --resume", None, seconds, left_behind=remains))
    assert remains == "nothing"
    assert container.reaps or zombies, "the container reaps"


def test_the_supervisor_resumes_after_the_driver_is_killed(container: Container, tmp_path: Path) -> None:
    with running(
        container.run(tmp_path, GRPO, *ENDLESS, "checkpoint.every_steps=1", name="supervised", supervise=True)
    ) as run:
        run.wait_for_step(2)
        (driver,) = [child for child in psutil.Process(run.process.pid).children() if _is_driver(child)]
        last = run.steps()[-1]
        driver.kill()
        began = time.monotonic()
        run.wait_until(lambda: run.steps()[-1] > last, "another step")
        seconds = time.monotonic() - began
        run.process.send_signal(signal.SIGTERM)
        code = run.wait(120)
        remains = left_behind(run)
    said = "the run was killed by SIGKILL; starting it again from step" in run.stderr
    ok = said and code == 130 and run.steps() == list(range(1, len(run.steps()) + 1))
    outcome = "resumes automatically (--supervise)"
    record(container, Outcome("SIGKILL of the driver, supervised", outcome, None, seconds, left_behind=remains, ok=ok))
    assert ok and remains == "nothing", run.output


def test_the_supervisor_resumes_on_a_new_cluster_after_rays_head_is_killed(
    container: Container, tmp_path: Path
) -> None:
    """Ray ends a driver that cannot reach its head."""
    with running(
        container.run(tmp_path, GRPO, *ENDLESS, "checkpoint.every_steps=1", name="head", supervise=True)
    ) as run:
        run.wait_for_step(2)
        (head,) = run.processes("gcs_server")
        head.kill()
        began = time.monotonic()
        run.wait_until(lambda: "starting it again from step" in run.stderr, "the driver's end")
        found_s = time.monotonic() - began
        last = run.steps()[-1]
        run.wait_until(lambda: run.steps()[-1] > last, "another step")
        seconds = time.monotonic() - began
        run.process.send_signal(signal.SIGTERM)
        code = run.wait(120)
        remains = left_behind(run)
    ok = code == 130 and run.steps() == list(range(1, len(run.steps()) + 1))
    outcome = "Ray ends the driver; resumes on a new cluster (--supervise)"
    record(container, Outcome("SIGKILL of Ray's head", outcome, found_s, seconds, left_behind=remains, ok=ok))
    assert ok and remains == "nothing", run.output


@pytest.fixture(scope="module")
def finished(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of three steps, with a checkpoint of each."""
    overrides = ("schedule.steps=3", "checkpoint.every_steps=1")
    with running(container.run(tmp_path_factory.mktemp("finished"), GRPO, *overrides, name="run")) as run:
        assert run.wait() == 0, run.output
    return run.out


@pytest.mark.parametrize("damage", ["a byte flipped", "truncated", "a file missing", "a file added"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    container: Container, finished: Path, tmp_path: Path, damage: str
) -> None:
    saved = shutil.copytree(finished, tmp_path / "run") / "checkpoints"
    weights = saved / "step-000003" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    match damage:
        case "a byte flipped":
            weights.write_bytes(content)
        case "truncated":
            weights.write_bytes(content[: len(content) // 2])
        case "a file missing":
            weights.unlink()
        case _:
            (saved / "step-000003" / "policy" / "x").touch()
    overrides = ("schedule.steps=4", "checkpoint.every_steps=1")
    with running(container.run(tmp_path, GRPO, *overrides, name="run", resume=True)) as again:
        code = again.wait()
    refused = "skipping invalid checkpoint" in again.stderr
    resumed = [line["step"] for line in again.metrics][-2:] == [3, 4]
    ok = code == 0 and refused and resumed
    record(container, Outcome(f"newest checkpoint: {damage}", "refused by its manifest; the one before is used", ok=ok))
    assert ok, again.output


def test_a_second_run_in_the_folder_is_refused(container: Container, tmp_path: Path) -> None:
    with running(container.run(tmp_path, GRPO, *ENDLESS, name="same")) as run:
        run.wait_for_step(1)
        with running(container.run(tmp_path, GRPO, *ENDLESS, name="same", resume=True)) as second:
            code = second.wait(60)
            lines = second.error_lines
        step = run.metrics[-1]["step"]
        run.wait_for_step(step + 1)
    ok = code == 2 and len(lines) == 1
    record(
        container, Outcome("two runs in one folder", f"the second ends with code {code}; the first continues", ok=ok)
    )
    assert ok, lines


def test_the_ledger_of_the_runs_balances(ppo: Run) -> None:
    """Every sample dispatched was trained, dropped with a reason, or is in flight."""
    assert json.loads((ppo.out / "metrics.jsonl").read_text().splitlines()[-1])["ledger/dropped"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 256 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_costs_no_step(container: Container, small_disk: Path, tmp_path: Path) -> None:
    """The run continues while checkpoints and metrics cannot be written, and writes them once they can."""
    overrides = (*ENDLESS, "checkpoint.every_steps=2", "checkpoint.keep=1")
    with running(container.run(tmp_path, GRPO, *overrides, name="full", out=small_disk / "run")) as run:
        run.wait_for_step(3)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
        began, last = time.monotonic(), run.steps()[-1]
        found_s = seconds_until(run, lambda: "failed" in run.stderr and "continuing" in run.stderr, began)
        filler.unlink()
        freed = time.monotonic()
        seconds = seconds_until(run, lambda: run.metrics[-1]["step"] > last + 4, freed)
        assert run.process.poll() is None, run.output
        stop_group(run, signal.SIGINT)
        code = run.wait(120)
    remains = left_behind(run)
    whole = run.steps() == list(range(1, len(run.steps()) + 1))
    ok = found_s is not None and whole and code == 130
    record(
        container,
        Outcome("disk full", "says so, continues, saves once there is room", found_s, seconds, 0, remains, ok=ok),
    )
    assert ok, run.output


def test_a_disk_that_stays_full_ends_the_run_with_one_line(
    container: Container, small_disk: Path, tmp_path: Path
) -> None:
    overrides = ("checkpoint.every_steps=1", "checkpoint.keep=1", "failures.failed_saves=1")
    with running(container.run(tmp_path, GRPO, *ENDLESS, *overrides, name="full", out=small_disk / "run")) as run:
        run.wait_for_step(2)
        with contextlib.suppress(OSError):
            (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        began = time.monotonic()
        code = run.wait(240)
        found_s = time.monotonic() - began
    saved = CheckpointStore(run.out / "checkpoints", keep=3).latest()
    ok = code == 1 and len(run.error_lines) == 1 and "in a row were not written" in run.error_lines[0]
    ok = ok and saved is not None
    record(
        container, Outcome("disk that stays full", "ends with one line; the last checkpoint is valid", found_s, ok=ok)
    )
    assert ok, run.output


def test_a_folder_that_vanishes_is_made_again(container: Container, tmp_path: Path) -> None:
    with running(container.run(tmp_path, GRPO, *ENDLESS, "checkpoint.every_steps=2", name="gone")) as run:
        run.wait_for_step(3)
        began = time.monotonic()
        shutil.rmtree(run.out)
        run.wait_until(lambda: run.metrics and any((run.out / "checkpoints").glob("step-*")), "a new checkpoint")
        seconds = time.monotonic() - began
        stop_group(run, signal.SIGINT)
        code = run.wait(120)
    ok = code == 130 and CheckpointStore(run.out / "checkpoints", keep=3).latest() is not None
    record(container, Outcome("run folder removed", "made again; earlier files are lost", None, seconds, ok=ok))
    assert ok, run.output


def test_a_second_signal_ends_at_once_and_leaves_nothing(container: Container, tmp_path: Path) -> None:
    with running(container.run(tmp_path, GRPO, *ENDLESS, name="twice")) as run:
        run.wait_for_step(1)
        stop_group(run, signal.SIGINT)
        run.wait_until(lambda: "press again" in run.stderr, "the message of the first signal")
        stop_group(run, signal.SIGINT)  # at once: the same request, passed on by someone
        time.sleep(0.6)
        assert run.process.poll() is None, run.output
        began = time.monotonic()
        stop_group(run, signal.SIGINT)
        code = run.wait(30)
        seconds = time.monotonic() - began
    remains = left_behind(run)
    record(
        container,
        Outcome("SIGINT twice", f"ends at once, exit code {code}", None, seconds, 0, remains, ok=remains == "nothing"),
    )
    assert remains == "nothing" and code != 0


def test_the_policy_is_lost_while_no_engine_serves(container: Container, tmp_path: Path) -> None:
    """The engine that starts needs the file that was removed with the policy; nothing calls the policy meanwhile."""
    with running(container.run(tmp_path, GRPO, *ENDLESS, "failures.engine_restarts=1", name="together")) as run:
        run.wait_for_step(2)
        step, began = run.metrics[-1]["step"], time.monotonic()
        kill(run, "VLLM::EngineCore")
        time.sleep(3.0)
        kill(run, "ray::PolicyWorker")
        found_s = seconds_until(run, lambda: "policy-0 is lost" in run.stderr, began + 3.0)
        seconds = seconds_until(run, lambda: run.metrics[-1]["step"] > step + 1, began)
        stop_group(run, signal.SIGINT)
        code = run.wait(120)
    remains = left_behind(run)
    whole = run.steps() == list(range(1, len(run.steps()) + 1))
    ok = None not in (found_s, seconds) and whole and code == 130 and run.metrics[-1]["ledger/dropped"] == 0
    fault = "SIGKILL of the engine's process, of policy 3 s later"
    record(container, Outcome(fault, "continues" if ok else "fails", found_s, seconds, 0, remains, ok=ok))
    assert ok and remains == "nothing", run.output


def kill_in(run: Run, title: str) -> None:
    """Kill the process with this title as soon as there is one; Ray names a process after the method that it runs."""
    while not (found := run.processes(title)):
        assert run.process.poll() is None, run.output
    for process in found:
        process.kill()


def test_the_policy_is_lost_while_a_resume_starts_it(container: Container, tmp_path: Path) -> None:
    """As soon as its process is there, and again in the middle of the load: it is started again in place."""
    overrides = (*ENDLESS, "checkpoint.every_steps=1")
    with running(container.run(tmp_path, GRPO, *overrides, "schedule.steps=2", name="loads")) as run:
        assert run.wait() == 0, run.output
    began = time.monotonic()
    with running(container.run(tmp_path, GRPO, *overrides, name="loads", resume=True)) as again:
        kill_in(again, "ray::PolicyWorker")
        kill_in(again, "ray::PolicyWorker.load")
        seconds = seconds_until(again, lambda: again.steps()[-1] > 3, began)
        stop_group(again, signal.SIGINT)
        code = again.wait(120)
    remains = left_behind(again)
    ok = seconds is not None and code == 130 and again.steps() == list(range(1, len(again.steps()) + 1))
    record(
        container,
        Outcome(
            "SIGKILL of policy while a resume starts it, and while it loads",
            "continues",
            None,
            seconds,
            0,
            remains,
            ok=ok,
        ),
    )
    assert ok and remains == "nothing", again.output


def _is_driver(process: psutil.Process) -> bool:
    return " -m troupe" in command_line(process)


def test_a_signal_while_workers_start_ends_with_one_line(container: Container, tmp_path: Path) -> None:
    """No second Ray cluster starts, and nothing is left."""
    before = set(Path("/dev/shm").glob("sem.troupe-*"))
    with running(container.run(tmp_path, GRPO, *ENDLESS, name="starting")) as run:
        run.wait_until(lambda: run.processes("ray::PolicyWorker"), "a worker that starts")
        began = time.monotonic()
        stop_group(run, signal.SIGTERM)
        code = run.wait(60)
        seconds = time.monotonic() - began
    remains = left_behind(run)
    semaphores = set(Path("/dev/shm").glob("sem.troupe-*")) - before
    ok = code == 130 and remains == "nothing" and len(run.stderr.splitlines()) <= 2
    record(container, Outcome("SIGTERM while workers start", f"exit code {code}", None, seconds, 0, remains, ok=ok))
    assert ok, run.stderr
    assert not semaphores
