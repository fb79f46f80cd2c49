"""Runs with an environment: real Ray, vLLM and DeepSpeed, PPO over turns, and workers that are killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, kill, ledger_balances, running, trajectories
from tests.real.paused_game import PAUSE
from troupe.orchestrator.runs.opponents import weights_digest

TINY = ROOT / "deploy" / "specs" / "tiny-environment.yaml"
ENDLESS = ("schedule.steps=1000", "checkpoint.every_steps=0", "sampling.max_tokens=24", "failures.health_interval_s=2")
LETTERS = "{name: letter_share, args: {letters: aeiou}}"
"""A reward function that gives a random model rewards, for its last turn."""


@pytest.mark.real
def test_ppo_trains_over_turns_and_the_table_shows_them(tmp_path: Path) -> None:
    """A critic, rewards of turns, two environment workers; every number that the run writes agrees with its table.

    Samples are up to one step older than the weights that they train.
    """
    options = (
        *("algorithm.name=ppo", "algorithm.group_size=2", "schedule.prompts_per_step=8"),
        *("roles.critic={cpus: 0.25, threads: 1, learning_rate: 1e-3, micro_batch_tokens: 2048}",),
        f"roles.reward.functions=[{{name: environment, process: true}}, {LETTERS}]",
        *("roles.environment.workers=2", "roles.environment.episodes=4"),
        *("algorithm.kl.coef=0.0", "schedule.steps=3", "schedule.max_staleness=1"),
    )
    with running(Run(tmp_path, TINY, *options, name="ppo-turns")) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    for line in run.metrics:
        assert ledger_balances(line) and line["ledger/dropped"] == 0
        assert (line["workers/environment"], line["episodes/failed"], line["episodes/turns"]) == (2, 0, 3)
        assert line["prompt_tokens/cached"] > 0.3, "later turns read their prompt from the cache"
        # The only update of a step begins with the critic that gave the values, however old the samples are.
        assert line["critic/value"] == pytest.approx(line["value_mean"], abs=1e-5)
        assert line["critic/value_clip_fraction"] == 0
    assert {line["staleness/max"] for line in run.metrics} == {0, 1}
    assert abs(run.metrics[-1]["value_mean"]) > 1e-3, "the critic starts with values of 0"
    table = trajectories(run.out, 1).to_pylist()
    assert len(table) == 16
    for row in table:
        speakers = [turn["name"] for turn in row["turns"]]
        assert speakers == ["assistant", "environment", "assistant", "environment", "assistant"]
        inside = [place for turn in row["turns"][::2] for place in range(turn["start"], turn["end"])]
        assert [place for place, own in enumerate(row["loss_mask"]) if own] == inside
        said = json.loads(row["conversation"])
        assert [message["role"] for message in said] == ["user", "assistant", "user", "assistant", "user", "assistant"]
        assert row["reward"] == sum(span["reward"] for span in row["reward_spans"])
    mean = sum(row["reward"] for row in table) / len(table)
    assert run.metrics[0]["reward/mean"] == pytest.approx(mean)


@pytest.mark.real
def test_the_policy_plays_itself_and_a_frozen_model(tmp_path: Path) -> None:
    """Kuhn poker as both players, and as the first one against a judge, which also plays in the evaluation."""
    kuhn = "name: 'troupe.deploy.examples.games:KuhnPoker', cpus: 0.25"
    sums = "kind: reasoning_gym, recipes: [{name: chain_sum, args: {max_terms: 2}}]"
    judge = "model: {path: .cache/models/tiny-llama, dtype: float32}, cpus: 0.5, threads: 1, max_num_seqs: 32"
    options = (
        f"roles.environment={{both: {{{kuhn}, players: {{first: policy, second: policy}}}},"
        f" frozen: {{{kuhn}, players: {{first: policy, second: judge}}}}}}",
        f"roles.judge={{{judge}, max_model_len: 128, enforce_eager: true, kv_cache_gib: 0.1, temperature: 1.0,"
        " max_tokens: 2, structured: {choice: [p, b]}}",
        f"data.train=[{{name: both, environment: both, {sums}, seed: 1, size: 8}},"
        f" {{name: frozen, environment: frozen, {sums}, seed: 2, size: 8}}]",
        f"data.eval={{both: {{environment: both, {sums}, seed: 3, size: 2}},"
        f" frozen: {{environment: frozen, {sums}, seed: 3, size: 4}}}}",
        "evaluation={every_steps: 2, sampling: {samples: 2, temperature: 1.0}}",
        *("algorithm.group_size=4", "schedule.prompts_per_step=8"),
    )
    with running(Run(tmp_path, TINY.with_name("tiny-self-play.yaml"), *options, name="games")) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    for line in run.metrics[1:]:  # the first one is the evaluation at the start
        assert ledger_balances(line) and line["ledger/dropped"] == 0 and line["episodes/failed"] == 0
        assert line["players/both.first/reward"] == pytest.approx(-line["players/both.second/reward"])
        assert {name.split("/")[1] for name in line if name.startswith("players/")} == {
            *("both.first", "both.second", "frozen.first")
        }
    assert "eval/frozen/reward" in run.metrics[-1] and "eval/frozen/players/first/reward" not in run.metrics[-1]
    assert run.metrics[-1]["eval/both/reward"] == pytest.approx(0.0), "what one player wins the other one loses"
    won, lost = (run.metrics[-1][f"eval/both/players/{player}/reward"] for player in ("first", "second"))
    assert won == pytest.approx(-lost)
    for row in trajectories(run.out, 1).to_pylist():
        moves = [message["content"] for message in json.loads(row["conversation"]) if message["role"] == "assistant"]
        assert moves and set(moves) <= {"p", "b"}
        assert len(row["turns"]) == 2 * len(moves) - 1, "only turns of its player"
        assert row["player"] == ("second" if row["source"] == "both" and row["sample_index"] % 2 else "first")
        (given,) = [span["reward"] for span in row["reward_spans"]] or [row["reward"]]
        assert abs(given) in (1.0, 2.0)


@pytest.mark.long
def test_an_opponent_is_renewed_and_a_resumed_run_plays_against_the_same(tmp_path: Path) -> None:
    """The last step is played against the checkpoint of step 2, in one that saves while it trains and
    in one that resumes after step 3 from the copies of its checkpoints.

    Checkpoints hold adapters, which are merged; the judge's engine starts only if it has loaded what was merged.
    """
    options = (
        "roles.environment={name: 'troupe.deploy.examples.games:KuhnPoker', cpus: 0.25,"
        " players: {first: policy, second: judge}}",
        "roles.judge={model: {path: .cache/models/tiny-llama, dtype: float32}, cpus: 0.5, threads: 1, max_num_seqs: 32,"
        " max_model_len: 128, enforce_eager: true, kv_cache_gib: 0.1, temperature: 1.0, max_tokens: 2,"
        " structured: {choice: [p, b]}, renew_every: 2}",
        *("roles.policy.schedule=constant", "roles.policy.lora={rank: 4, alpha: 8}"),
        *("checkpoint.every_steps=1", "checkpoint.keep=1", f"checkpoint.path=file://{tmp_path}/bucket"),
        *("algorithm.group_size=4", "schedule.prompts_per_step=8"),
    )

    def play(name: str, steps: int, *own: str, resume: bool = False) -> Run:
        spec = TINY.with_name("tiny-self-play.yaml")
        run = Run(tmp_path, spec, *options, *own, f"schedule.steps={steps}", name=name, resume=resume)
        with running(run):
            assert run.wait() == 0, run.output
        return run

    whole = play("whole", 4, "checkpoint.async_save=true")
    shutil.rmtree(play("parts", 3).out)
    parts = play("parts", 4, resume=True)
    events = [json.loads(line) for line in (whole.out / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["of"]) for event in events if event["event"] == "opponent"] == [(3, 2)]
    (played,) = [event["digest"] for event in events if event["event"] == "opponent"]
    assert played == weights_digest(whole.out / "opponent" / "step-000002")
    assert "the opponent is the model of step 2" in parts.output, "from its start on"
    assert not any(event["event"] == "worker_replaced" for event in events), "a renewed judge was not lost"
    for run in (whole, parts):
        assert sorted(path.name for path in (run.out / "checkpoints").glob("step-*")) == ["step-000002", "step-000004"]
        assert ledger_balances(run.metrics[-1]) and run.metrics[-1]["ledger/dropped"] == 0
    games = [
        [(row["conversation"], row["reward"]) for row in trajectories(run.out, 4).to_pylist()] for run in (whole, parts)
    ]
    assert games[0] == games[1]


@pytest.mark.long
def test_every_worker_of_an_environments_run_is_replaced_until_no_restart_is_left(tmp_path: Path) -> None:
    """SIGKILL of every worker but the policy.

    First of a reward and a reference worker, for which no sample is generated again; then, in the middle of episodes,
    of an environment worker with its processes and of the engine. The last is the environment worker that may not start
    again, which ends the run.
    """
    reference = ("roles.reference={cpus: 0.25, threads: 1, micro_batch_tokens: 2048}", "algorithm.kl.coef=0.01")
    restarts = ("failures.reference_restarts=1", "failures.environment_restarts=1")
    paused = ("roles.environment.name=tests.real.paused_game:PausedGame", f"roles.environment.args.folder={tmp_path}")
    overrides, env = (*ENDLESS, *reference, *restarts, *paused), {"PYTHONPATH": str(ROOT)}
    with running(Run(tmp_path, TINY, *overrides, name="killed", env=env)) as run:
        run.wait_for_step(1)
        for role in ("RewardWorker", "ReferenceWorker"):
            kill(run, role)
            run.wait_until(lambda role=role: f"{role.removesuffix('Worker').lower()}-0 is lost" in run.output, role)
            run.wait_for_step(run.metrics[-1]["step"] + 2)
        assert {line["ledger/retries"] for line in run.metrics} == {0}
        assert restarted(run) == 0
        with in_an_episode(run, tmp_path, "first"):
            kill(run, "EnvironmentWorker")
        step = run.wait_until(lambda: restarted(run), "episodes that start again")
        run.wait_for_step(step + 1)
        with in_an_episode(run, tmp_path, "second"):
            kill(run, "EngineCore")
        run.wait_until(lambda: run.metrics[-1]["ledger/retries"] > 0, "a retry on a new engine")
        run.wait_for_step(run.metrics[-1]["step"] + 1)
        kill(run, "EnvironmentWorker")
        assert run.wait() == 1
        for line in run.metrics:
            assert ledger_balances(line) and line["ledger/dropped"] == 0
            assert line["ledger/trained"] == 16 * line["step"]
        assert len(run.error_lines) == 1, run.output
        assert "no environment worker is left (1 of 1 restarts used: failures.environment_restarts)" in run.output
        assert run.leftover_processes() == []
    assert run.weight_files == []


@contextmanager
def in_an_episode(run: Run, folder: Path, name: str) -> Iterator[None]:
    """No turn of an episode ends within the block, which one has begun."""
    (folder / PAUSE).write_text(name)
    run.wait_until((folder / name).exists, "a turn of an episode")
    yield
    (folder / PAUSE).unlink()


def restarted(run: Run) -> int:
    """Step in which episodes started again; 0: none so far."""
    return next((line["step"] for line in run.metrics if line["episodes/restarted"]), 0)
