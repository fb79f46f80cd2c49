"""Pure parts of the benchmarks of weight sync, of TRL's step, of the PPO step and of the time to a reward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks import time_to_reward, timing
from benchmarks.bare_loop import BareStep
from benchmarks.grpo_step import Steps
from benchmarks.grpo_step import parse as parse_grpo
from benchmarks.harness import NotCorrect, Report, Turn
from benchmarks.ppo_step import check, critical_path, four_models, phases_of
from benchmarks.time_to_reward import never_there, steps_to, to_target
from benchmarks.timing import Parts
from benchmarks.trl_loop import check_steps, micro_batch_rows
from benchmarks.weight_sync import Gate
from benchmarks.workload import Settings, on_device, spec
from tests.test_benchmarks import SETTINGS


class Worker:
    """Something to watch."""

    def work(self, result: int) -> int:
        """Give it back."""
        return result

    def fail(self) -> None:
        """Raise."""
        raise ValueError("no")


def test_parts_are_noted_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    parts, worker = Parts(), Worker()
    parts.watch(worker, "work", "work")
    parts.watch(worker, "fail", "failure")
    assert (worker.work(1), worker.work(2)) == (1, 2)
    with pytest.raises(ValueError, match="no"):
        worker.fail()
    assert parts.read() == {"work": 3.0, "failure": 4.0}
    assert parts.read() == {}


def test_sync_gate_passes_new_weights_and_says_what_it_saw() -> None:
    gate = Gate(12)
    gate.turn("disk", stale=0.5, fresh=0.01, tokens=12)
    gate.turn("troupe", stale=0.3, fresh=0.02, tokens=12)
    gate.digest("a")
    gate.digest("b")
    checks = gate.checks()
    assert checks["sampler to trainer"].startswith("0.0200 nats a token at most after a sync, 0.3000 at least before")
    assert checks["digests"].startswith("2 versions")


@pytest.mark.parametrize(
    ("stale", "fresh", "tokens", "message"),
    [
        (0.5, 0.2, 12, "0.2000 nats a token apart"),
        (0.5, float("nan"), 12, "nan nats"),
        (0.03, 0.02, 12, "look like new ones"),
        (0.5, 0.01, 11, "11 tokens"),
    ],
)
def test_sync_gate_refuses(stale: float, fresh: float, tokens: int, message: str) -> None:
    with pytest.raises(NotCorrect, match=message):
        Gate(12).turn("troupe", stale, fresh, tokens)


def test_sync_gate_refuses_weights_that_did_not_change() -> None:
    gate = Gate(12)
    gate.digest("a")
    with pytest.raises(NotCorrect, match="digest a"):
        gate.digest("a")


def test_backends_of_the_gpu_share_one_or_have_one_each() -> None:
    plan = spec(SETTINGS, Path("m"), 1, 1)
    assert on_device(plan, "cpu", "auto").resolved_backend() == "shm"
    shared, apart = on_device(plan, "cuda", "ipc"), on_device(plan, "cuda", "nccl")
    assert shared.roles.rollout.colocate_with == "policy" and shared.roles.policy.gpus == 0.5
    assert (apart.roles.rollout.gpus, apart.roles.policy.gpus, apart.resolved_backend()) == (1.0, 1.0, "nccl")
    with pytest.raises(ValidationError, match="ipc"):
        on_device(plan, "cpu", "ipc")


def test_micro_batches_are_even_and_within_the_budget() -> None:
    assert micro_batch_rows(64, 160, 4096) == 16
    assert micro_batch_rows(64, 64, 4096) == 64
    assert micro_batch_rows(6, 100, 50) == 1


def trl_step(lengths: tuple[int, ...] = (3, 3, 3, 3), norm: float = 0.5, silent: float = 0.0) -> BareStep:
    ids = [[7] * length for length in lengths]
    return BareStep(1.0, {}, sum(lengths), {"grad_norm": norm, "reward": 0.1, "groups without signal": silent}, ids)


def test_trl_steps_must_have_the_same_amount_and_learn() -> None:
    four_of_three = Settings(Path("model"), "float32", "fixed", 2, 2, 3, 64, 1, 1, 17)
    assert check_steps([trl_step(), trl_step()], four_of_three).startswith("4 responses of 3 tokens in all 2 steps")
    for wrong in (trl_step((3, 3, 3)), trl_step((3, 3, 3, 2)), trl_step(norm=0.0), trl_step(norm=float("nan"))):
        with pytest.raises(NotCorrect, match="TRL, step 2"):
            check_steps([trl_step(), wrong], four_of_three)
    with pytest.raises(NotCorrect, match="TRL, step 2"):
        check_steps([trl_step(), trl_step(norm=0.0, silent=0.5)], four_of_three)
    told = check_steps([trl_step(), trl_step(norm=0.0, silent=1.0)], four_of_three)
    assert told.endswith("gradients are zero in 1, which had no signal")


def test_trl_needs_fixed_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_grpo(["--trl"]).trl
    with pytest.raises(SystemExit):
        parse_grpo(["--trl", "--lengths", "natural"])
    assert "fixed" in capsys.readouterr().err


def test_ppo_has_four_models_in_workers_of_their_own() -> None:
    plan = four_models(spec(SETTINGS, Path("m"), 3, 8))
    assert plan.algorithm.name == "ppo" and plan.group_size == 2
    assert plan.roles.critic is not None and plan.roles.reference is not None
    assert plan.roles.reference.colocate_with is None
    assert plan.roles.critic.micro_batch_tokens == plan.roles.policy.micro_batch_tokens


def test_critical_path_takes_the_longest_of_what_can_run_side_by_side() -> None:
    stages = {"generate": 4.0, "prepare": 0.5, "sync": 0.25}
    scoring = {"reward": 0.1, "reference": 1.0, "critic": 2.0, "old log-probs": 1.5}
    updates = {"policy update": 3.0, "critic update": 5.0}
    assert critical_path(stages | scoring | updates) == 4.75 + 2.0 + 5.0


def ppo_lines(**wrong: float) -> list[dict[str, float]]:
    right = {"ledger/dropped": 0.0, "response_tokens/mean": 3.0, "policy/rollout_logprob_gap": 0.01}
    lines = [{"step": float(step), "ledger/trained": 4.0 * (step - 1)} | right for step in (1, 2, 3)]
    lines[1] |= wrong
    return lines


def test_ppo_check_passes_equal_work() -> None:
    assert check(SETTINGS, ppo_lines(), [0.02])["sampler to trainer"].startswith("0.0200 nats")


@pytest.mark.parametrize(
    ("wrong", "gap", "message"),
    [
        ({"ledger/trained": 3.0}, 0.01, "3 samples trained"),
        ({"ledger/dropped": 1.0}, 0.01, "ledger"),
        ({"response_tokens/mean": 2.5}, 0.01, "2.5 tokens"),
        ({"policy/rollout_logprob_gap": 0.2}, 0.01, "0.2000 nats"),
        ({}, 0.3, "0.3000 nats"),
    ],
)
def test_ppo_check_refuses_other_work(wrong: dict[str, float], gap: float, message: str) -> None:
    with pytest.raises(NotCorrect, match=message):
        check(SETTINGS, ppo_lines(**wrong), [gap])


def test_ppo_phases_add_up_to_the_step() -> None:
    line = {f"seconds/{name}": 2.0 for name in ("generate", "prepare", "update", "sync")}
    assert phases_of(line, 9.0)["other"] == 1.0


def test_ppo_leaves_the_rest_of_the_work_as_it_was() -> None:
    plan = spec(replace(SETTINGS, samples=4), Path("m"), 3, 8)
    assert four_models(plan).sampling == plan.sampling and four_models(plan).data == plan.data


def training(rewards: list[float]) -> Steps:
    turns = [Turn(2.0, 10, 3.0, 0.5) for _ in rewards]
    return Steps({"bare loop": turns}, {"bare loop": rewards}, {})


def test_steps_are_counted_until_the_mean_of_the_last_ones_is_the_target() -> None:
    rewards = [0.1, 0.5, 0.1, 0.3, 0.4, 0.4]
    assert steps_to(rewards, 0.35, 2) == 5
    assert steps_to(rewards, 0.5, 1) == 2
    assert steps_to(rewards, 0.5, 2) is None


def test_time_to_a_reward_is_that_of_the_steps_it_took() -> None:
    turn = to_target("bare loop", training([0.1, 0.5, 0.1, 0.3, 0.4, 0.4]), 0.35, 2)
    assert (turn.wall_s, turn.cpu_s, turn.figures["steps"]) == (10.0, 15.0, 5.0)


def test_one_that_never_was_there_counts_with_all_its_steps() -> None:
    steps = training([0.1, 0.3, 0.2])
    assert to_target("bare loop", steps, 0.35, 2).wall_s == 6.0
    assert never_there(steps, 0.35, 2) == {"bare loop": "not there: 0.2500 at best; all its 3 steps count"}
    assert never_there(steps, 0.25, 2) == {}


def test_the_product_has_to_be_there() -> None:
    steps = training([0.1, 0.3])
    own = Steps({"troupe": steps.taken["bare loop"]}, {"troupe": steps.rewards["bare loop"]}, {})
    with pytest.raises(NotCorrect, match=r"came to a reward of 0\.2000 in 2 steps"):
        to_target("troupe", own, 0.35, 2)


def test_a_seed_that_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def train(settings: Settings, *_: object) -> Steps:
        trained.append(settings.seed)
        if settings.seed == 3 and trained.count(3) == 1:
            raise NotCorrect("cut short")
        return replace(training([0.5, 0.9]), checks={"samples": f"those of {settings.seed}"})

    monkeypatch.setattr(time_to_reward, "take_steps", train)
    path = tmp_path / "out.json"

    def measured(*more: str) -> Report:
        given = time_to_reward.parse(["--seeds", "1", "2", "3", "--window", "1", "--json", str(path), *more])
        return time_to_reward.measure(SETTINGS, given)

    with pytest.raises(NotCorrect, match="cut short"):
        measured()
    report = measured()
    assert trained == [1, 2, 3, 3]
    assert report.arguments["seeds"] == [1, 2, 3] == json.loads(path.read_text())["arguments"]["seeds"]
    assert len(report.taken["bare loop"]) == 3
    assert {name: said for name, said in report.checks.items() if "machine" not in name} == {
        f"seed {seed}, samples": f"those of {seed}" for seed in (1, 2, 3)
    }
    assert all(" cores of " in report.checks[f"seed {seed}, machine"] for seed in (1, 2, 3))
    for number, other in enumerate((("--target", "0.4"), ("--no-trl",)), 1):
        assert measured(*other).arguments["seeds"] == [1, 2, 3]
        assert trained == [1, 2, 3, 3, *[1, 2, 3] * number], "other settings have nothing in common with what is there"
