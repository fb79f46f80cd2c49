"""Every verdict and diagnosis that names a cause: it is named if present, and not if only the symptom is.

A rule without a case is a failure of the first test; so is a cause in a status that is in no test.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.orchestrator.insight.why.test_diagnosis import LIBRARY, MAIN_LOOP, NODE, RUN, USER, facts, process
from troupe.orchestrator.insight.verdicts import apply
from troupe.orchestrator.insight.verdicts.apply import RULES, apply_rules
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.insight.why import diagnosis
from troupe.orchestrator.insight.why.diagnosis import diagnose
from troupe.orchestrator.insight.why.facts import Call, DriverFacts, Facts
from troupe.orchestrator.live.lock import LockHolder
from troupe.orchestrator.live.run_state import state_of
from troupe.orchestrator.pools.engine import EngineQueue, Queues
from troupe.orchestrator.telemetry.console import NO_UPDATE, note
from troupe.orchestrator.telemetry.run_summary import RunSummary

STEPS = 24
Value = float | Callable[[int], float]
Json = dict[str, Any]


def record(spec: Json | None = None, events: tuple[Json, ...] = (), steps: int = STEPS, **metrics: Value) -> History:
    """A run with these metrics, `__` for a slash: a value or a function of the step each."""
    lines: list[Json] = [{"step": step} for step in range(1, steps + 1)]
    for line in lines:
        for name, value in metrics.items():
            line[name.replace("__", "/")] = value(line["step"]) if callable(value) else value
    state = state_of(events, None, steps, STEPS)
    return replace(History.of(lines, spec or {}, events), state=state)


def late(before: float, after: float) -> Callable[[int], float]:
    """One value in the first half of a run, another in the second."""
    return lambda step: before if step <= STEPS // 2 else after


def rising(first: float, slope: float) -> Callable[[int], float]:
    return lambda step: first + slope * step


def killed(found: History) -> History:
    """The record of a run whose process has left its lock."""
    own = os.stat("/proc/self/ns/pid").st_ino
    holder = LockHolder("me", socket.gethostname(), os.getpid(), 1, own, since=0.0, command="troupe run")
    return replace(found, state=state_of(found.events, holder, found.last_step, STEPS))


BATCH = {"schedule": {"prompts_per_step": 4}, "algorithm": {"group_size": 8}, "sampling": {"max_tokens": 64}}
PPO = BATCH | {"algorithm": {"group_size": 1}}
REWARDS = {"roles": {"reward": {"functions": [{"name": "exact_match"}]}}}
STALE = {"schedule": {"prompts_per_step": 4, "max_staleness": 1}}
BUSY: Json = {"utilisation__generate": 0.9, "seconds__generate": 9.0, "seconds__update": 1.0, "seconds__step": 10.0}
HALF: Json = {"utilisation__rollout": 0.5}
TWO_ENGINES = {"roles": {"rollout": {"workers": 2}}}
MIXED = {"data": {"train": [{"name": "a", "weight": 1}, {"name": "b", "weight": 1, "max_tokens": 8}]}}
CUT: Json = {"truncated": 0.6, "source__a__truncated": late(0.9, 0.9), "source__b__truncated": 0.0}
BOTH_CUT: Json = CUT | {"source__b__truncated": 0.9}
SHORT_CUT: Json = BOTH_CUT | {"source__a__truncated": 0.0}
SLOW_ENGINE = {"event": "slow_engine", "step": 5, "worker": "rollout-3", "detail": "takes 3.0 times as long, on b"}
STARTED = {"event": "run_started", "resume_at": 0}
FAILED = {"event": "run_ended", "how": "failed", "error": "WorkerError", "detail": "rollout-0.generate: no restarts"}
FINISHED = {"event": "run_ended", "how": "finished"}
RESUMED = {"event": "run_started", "resume_at": 12}

CLAIMS: dict[str, tuple[tuple[str, History, History], ...]] = {
    "failed": (
        (
            "WorkerError: rollout-0.generate",
            record(events=(STARTED, FAILED), a=1.0),
            record(events=(STARTED, FAILED, RESUMED, FINISHED), a=1.0),
        ),
        (
            "killed (SIGKILL), or exited at once",
            killed(record(events=(STARTED,), a=1.0)),
            record(events=(STARTED,), a=1.0),
        ),
        ("The run has died", record(events=(STARTED,), a=1.0), record(events=(STARTED, FINISHED), a=1.0)),
        ("The run has failed", record(events=(FAILED,)), record(events=(FINISHED,))),
    ),
    "no_steps": (
        ("not started", record(steps=0), record(a=1.0)),
        ("was stopped before", record(steps=0, events=({"event": "run_ended", "how": "stopped"},)), record(steps=0)),
    ),
    "entropy_collapse": (
        ("Entropy fell", record(policy__entropy=late(2.0, 0.01)), record(policy__entropy=0.02)),
        ("no longer explores", record(policy__entropy=late(2.0, 0.01)), record(policy__entropy=0.02)),
    ),
    "reward_hacking": (
        (
            "The reward rises",
            record(reward__mean=rising(0.1, 0.02), repetition=late(0.1, 0.8)),
            record(reward__mean=rising(0.9, -0.02), repetition=late(0.1, 0.8)),
        ),
    ),
    "no_signal": (
        (
            "such groups",
            record(BATCH, groups__mixed=0.0, reward__std=0.2, reward__mean=0.5),
            record(PPO, groups__mixed=0.0, reward__std=0.0, reward__mean=0.5),
        ),
        (
            "The rewards carry no signal",
            record(PPO, groups__mixed=0.0, reward__std=0.0, reward__mean=0.5),
            record(PPO, groups__mixed=0.0, reward__std=0.3, reward__mean=0.5),
        ),
    ),
    "reward_falls": (
        (
            "Lower the learning rate",
            record(reward__mean=rising(0.9, -0.03), reward__std=0.1),
            record({"data": {"curriculum": {}}}, reward__mean=rising(0.9, -0.03), reward__std=0.1),
        ),
    ),
    "penalty_dominates": (
        (
            "outweighs the reward",
            record({"algorithm": {"kl": {"coef": 5.0}}}, reward__mean=0.5, reward__std=0.2, kl_ref=0.001),
            record({"algorithm": {"kl": {"coef": 5.0}}}, reward__mean=0.5, reward__std=0.0, kl_ref=0.001),
        ),
        (
            "held at the reference",
            record({"algorithm": {"kl": {"coef": 5.0}}}, reward__mean=0.5, reward__std=0.2, kl_ref=0.001),
            record({"algorithm": {"kl": {"coef": 5.0}}}, reward__mean=0.5, reward__std=0.2, kl_ref=0.9),
        ),
    ),
    "overfitting": (("held-out loss rises", record(eval__loss=late(1.0, 1.3)), record(eval__loss=late(1.3, 1.0))),),
    "length_explosion": (
        (
            "does not rise",
            record(BATCH, response_tokens__mean=late(20, 90), truncated=late(0.0, 0.6), reward__mean=0.5),
            record(BATCH, response_tokens__mean=late(20, 90), truncated=late(0.0, 0.6), reward__mean=rising(0.1, 0.02)),
        ),
        (
            "are cut",
            record(BATCH, response_tokens__mean=late(20, 90), truncated=late(0.0, 0.6)),
            record(BATCH, response_tokens__mean=late(20, 90)),
        ),
    ),
    "length_collapse": (("shrank", record(response_tokens__mean=late(90, 5)), record(response_tokens__mean=5)),),
    "truncation": (
        ("`sampling.max_tokens` (64)", record(BATCH, truncated=0.6), record(BATCH | MIXED, **SHORT_CUT)),
        ("--set sampling.max_tokens=128", record(BATCH | MIXED, **CUT), record(BATCH | MIXED, **SHORT_CUT)),
        ("`data.train.1.max_tokens` (8)", record(BATCH | MIXED, **BOTH_CUT), record(BATCH | MIXED, **CUT)),
        ("max_model_len", record(BATCH | {"roles": {"environment": {}}}, truncated=0.6), record(BATCH, truncated=0.6)),
    ),
    "kl_explosion": (("has left the reference", record(kl_ref=late(0.1, 3.0)), record(kl_ref=3.0)),),
    "steps_too_large": (("A step changes", record(policy__kl_old=0.9), record(policy__kl_old=0.05)),),
    "clip_fraction_stuck": (
        ("beyond the clip bounds", record(policy__clip_fraction=0.6), record(policy__clip_fraction=0.1)),
    ),
    "sampler_gap": (
        (
            "explained by staleness",
            record(STALE, policy__rollout_logprob_gap=0.9),
            record(policy__rollout_logprob_gap=0.9),
        ),
        (
            "An engine may hold other weights",
            record(policy__rollout_logprob_gap=0.9),
            record(STALE, policy__rollout_logprob_gap=0.9),
        ),
    ),
    "gradient_spikes": (
        (
            "was not finite",
            record(policy__grad_norm=1.0, policy__skipped_updates=late(0, 1)),
            record(policy__grad_norm=lambda step: 1.0 + 99.0 * (step == 20), policy__skipped_updates=0.0),
        ),
        (
            "was not finite",
            record(policy__grad_norm=1.0, policy__skipped_updates=late(0, 1), policy__overflows=late(0, 0.5)),
            record(
                policy__grad_norm=lambda step: 1.0 + 99.0 * (step == 20),
                policy__skipped_updates=late(0, 1),
                policy__overflows=late(0, 1),
            ),
        ),
    ),
    "clipped_gradients": (
        (
            "clipped to 1:",
            record(policy__grad_norm=50.0),
            record({"roles": {"policy": {"max_grad_norm": 40.0}}}, policy__grad_norm=50.0),
        ),
    ),
    "blind_critic": (
        (
            "The critic explains nothing",
            record(explained_variance=-0.4, critic__value_error=1.0),
            record(explained_variance=0.0, critic__value_error=0.0),
        ),
    ),
    "failing_rewards": (
        (
            "Samples without a reward",
            record(BATCH, failed_samples=16.0),
            record(BATCH, failed_samples=16.0, episodes__failed=16.0),
        ),
        (
            "Episodes fail",
            record(BATCH, failed_samples=16.0, episodes__failed=16.0),
            record(BATCH, failed_samples=16.0, episodes__failed=0.0),
        ),
        (
            "more time",
            record(BATCH | REWARDS, failed_samples=16.0),
            record(BATCH | REWARDS, failed_samples=16.0, episodes__failed=16.0),
        ),
    ),
    "repeated_data": (
        ("The prompts repeat", record(BATCH, data__train_rows=4.0), record(BATCH, data__train_rows=400.0)),
        (
            "prompts of a",
            record(BATCH | MIXED, data__train_rows=404.0, source__a__rows=2.0, source__b__rows=402.0),
            record(BATCH | MIXED, data__train_rows=404.0, source__a__rows=202.0, source__b__rows=202.0),
        ),
    ),
    "unusable_data": (
        (
            "cannot be read",
            record(data__train_rows=9.0, data__train_bad_rows=4.0),
            record(data__train_rows=9.0, data__train_bad_rows=0.0, data__train_refused_rows=4.0),
        ),
    ),
    "dropped_samples": (
        (
            "generated and not trained",
            record(ledger__dropped=50.0, ledger__dispatched=100.0),
            record(ledger__dropped=48.0, ledger__dispatched=100.0, failed_samples=2.0),
        ),
    ),
    "slow_rewards": (
        (
            "Reward scoring is the bottleneck",
            record(**BUSY, seconds__reward=9.0, workers__reward=1.0),
            record(**BUSY, seconds__reward=9.0, workers__reward=4.0),
        ),
    ),
    "slow_engine": (
        (
            "rollout-3 is slower",
            record(events=(SLOW_ENGINE,), rollout__slowest_engine=3.0),
            record(rollout__slowest_engine=3.0),
        ),
        (
            "It takes 3.0 times as long, on b",
            record(events=(SLOW_ENGINE,), rollout__slowest_engine=late(1.1, 3.0)),
            record(events=(SLOW_ENGINE,), rollout__slowest_engine=1.5),
        ),
        (
            "steps wait less",
            record(STALE, events=(SLOW_ENGINE,), rollout__slowest_engine=3.0),
            record(events=(SLOW_ENGINE,), rollout__slowest_engine=3.0),
        ),
    ),
    "starved_trainer": (
        ("Add engines", record(STALE, **BUSY), record(STALE, **BUSY, seconds__reward=9.0)),
        ("let samples be older", record(STALE, **BUSY, **HALF), record(STALE, **BUSY, utilisation__rollout=0.99)),
        ("5 : 1 engines", record(STALE, **BUSY, **HALF), record(STALE, **BUSY)),
    ),
    "starved_engines": (
        (
            "no group for 50%",
            record(STALE, utilisation__generate=0.01, **HALF),
            record(STALE, utilisation__generate=0.01, utilisation__rollout=0.99),
        ),
        (
            "1 : 1 engines",
            record(STALE | TWO_ENGINES, utilisation__generate=0.01, **HALF),
            record(STALE | TWO_ENGINES, utilisation__generate=0.01, utilisation__rollout=0.2),
        ),
        ("The engines wait", record(STALE, utilisation__generate=0.01), record(utilisation__generate=0.01)),
    ),
    "growing_memory": (
        (
            "A reward function that keeps",
            record(memory__reward=rising(1.0, 0.1)),
            record(memory__rollout=rising(1.0, 0.1)),
        ),
    ),
    "lost_workers": (
        (
            "Workers were lost",
            record(events=(STARTED, RESUMED), ledger__retries=lambda step: 4.0 * (step > 9)),
            record(events=(STARTED, RESUMED), ledger__retries=late(0.0, 4.0)),
        ),
        (
            "groups were sampled again",
            record(ledger__retries=late(0.0, 4.0)),
            record(events=({"event": "scaled", "step": 13},), ledger__retries=late(0.0, 4.0)),
        ),
    ),
}


def cases(table: Mapping[str, tuple[tuple[str, Any, Any], ...]]) -> pytest.MarkDecorator:
    """The cases of a table by rule: what it says, a record with the cause, and one without it."""
    rows = [(rule, *case) for rule, found in table.items() for case in found]
    return pytest.mark.parametrize(("rule", "says", "present", "absent"), rows, ids=[f"{r[0]}: {r[1]}" for r in rows])


def test_every_rule_has_a_case_in_which_its_cause_is_absent() -> None:
    assert set(CLAIMS) == {rule.__name__ for rule in RULES}
    assert set(DIAGNOSES) == {rule.__name__.removeprefix("_") for rule in diagnosis._RULES}


@cases(CLAIMS)
def test_a_verdict_names_its_cause_only_where_it_is(
    rule: str,
    says: str,
    present: History,
    absent: History,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(run: History) -> str:
        return "\n".join(line for verdict in apply_rules(run) for line in verdict.lines())

    assert says not in said(absent)
    assert "nan" not in said(present) + said(absent)
    monkeypatch.setattr(apply, "RULES", [one for one in RULES if one.__name__ == rule])
    assert says in said(present)
    assert not caplog.records, "no rule failed"


GENERATE = Call("rollout-0", "generate", 30.0, 600.0)
BUSY_POLICY = process("policy-1", USER, cpu=1.0)
GCS = replace(process("rollout-0", state=""), worker="gcs_server")
KILLED = ("rollout-0 (process 12) has ended; SIGKILL; its log: step 3",)
RAISED = ("rollout-0 (process 12) has ended; exit code 1; its log: ValueError: shapes differ",)
KILLS, FULL = replace(NODE, out_of_memory_kills=1), replace(NODE, shm_free=0)
DEAD = DriverFacts(1, "n1", "dead", last_seen_s=3.0)


def engines(state: Any) -> Facts:
    found = facts(calls=())
    return replace(found, queues=Queues(waiting=3, engines=(EngineQueue("rollout-0", state, 2),)))


DIAGNOSES: dict[str, tuple[tuple[str, Facts, Facts], ...]] = {
    "driver_dead": (
        (
            "was killed by the kernel's out-of-memory",
            replace(facts(node=KILLS), driver=DEAD),
            replace(facts(), driver=DEAD),
        ),
        ("is full", replace(facts(node=FULL), driver=DEAD), replace(facts(), driver=DEAD)),
        ("is dead", replace(facts(), driver=DEAD), facts(BUSY_POLICY)),
    ),
    "run_failed": (
        (
            "has run out of memory",
            replace(facts(node=KILLS), error="rollout-0.generate: its process died", exit_reasons=KILLED),
            replace(facts(node=KILLS), error="rollout-0.generate: ValueError", exit_reasons=RAISED),
        ),
        (
            "has run out of memory",
            replace(facts(), error="MemoryError"),
            replace(facts(node=KILLS), error="the data is empty"),
        ),
        (
            "has run out of memory",
            replace(facts(), error="policy-0.update: out of memory"),
            replace(facts(), error="4 x reward: mine:f: out of memory (limit 128 MiB): error: MemoryError (mine.py:3)"),
        ),
        (
            "is full",
            replace(facts(node=FULL), error="OSError: no space left"),
            replace(facts(), error="OSError: no space left"),
        ),
        ("failed", replace(facts(), error="it broke"), facts(BUSY_POLICY)),
    ),
    "driver_stopped": (("is stopped", replace(facts(), driver=DriverFacts(1, "n1", "stopped")), facts(BUSY_POLICY)),),
    "ray_stopped": (
        (
            "gcs_server (process 12 on n1) has ended",
            facts(GCS, BUSY_POLICY),
            replace(facts(GCS, BUSY_POLICY), run=replace(RUN, phase="close")),
        ),
        ("has ended", facts(GCS, BUSY_POLICY), facts(replace(GCS, state="S"), BUSY_POLICY)),
    ),
    "worker_stopped": (("is stopped", facts(process("policy-1", state="T")), facts(BUSY_POLICY)),),
    "node_lost": (
        ("n1 does not answer", facts(node=replace(NODE, reachable=False, workers=("policy-1",))), facts(BUSY_POLICY)),
    ),
    "driver_blocked": (
        ("event loop is blocked", replace(facts(), driver=DriverFacts(1, "n1", "blocked", 9.0)), facts(BUSY_POLICY)),
    ),
    "no_space": (("/dev/shm on n1 is full", facts(node=FULL), facts(BUSY_POLICY)),),
    "worker_gone": (("its process 11 has ended", facts(process("policy-1", state="")), facts(BUSY_POLICY)),),
    "trainer_gone": (
        (
            "policy-0 is dead",
            facts(process("policy-0", state=""), calls=()),
            facts(process("rollout-0", state=""), calls=()),
        ),
    ),
    "no_engine": (("none serves", engines("starting"), engines("asleep")),),
    "waits": (
        ("computes", facts(BUSY_POLICY), facts(process("policy-1", USER))),
        ("waits for the disk", facts(process("policy-1", USER, state="D")), facts(BUSY_POLICY)),
        (
            "waits for a lock",
            facts(process("policy-1", replace(USER, source="with lock:"))),
            facts(process("policy-1", replace(LIBRARY, source="with lock:"))),
        ),
        (
            "sleeps",
            facts(process("policy-1", replace(USER, source="time.sleep(9)"), waits_in="hrtimer_nanosleep")),
            facts(process("policy-1", MAIN_LOOP, waits_in="hrtimer_nanosleep")),
        ),
        (
            "rank(s) of policy wait",
            facts(process("policy-0", replace(LIBRARY, file="distributed_c10d.py")), BUSY_POLICY),
            facts(process("policy-0", MAIN_LOOP), BUSY_POLICY),
        ),
    ),
}


@cases(DIAGNOSES)
def test_a_diagnosis_names_its_cause_only_where_it_is(rule: str, says: str, present: Facts, absent: Facts) -> None:
    assert getattr(diagnosis, f"_{rule}")(present) and says in diagnose(present).summary
    assert says not in diagnose(absent).summary


WAITS: Json = {"seconds/step": 10.0, "seconds/generate": 8.0, "seconds/update": 1.0}
SCORED = WAITS | {"seconds/reward": 8.0, "workers/reward": 1.0}
HINTS: tuple[tuple[str, Json, Json], ...] = (
    ("trainer", {"seconds/step": 9.0, "seconds/generate": 1.0, "seconds/update": 8.0}, WAITS),
    ("engines", WAITS, SCORED),
    ("reward workers", SCORED, SCORED | {"workers/reward": 4.0}),
    ("engines and environment", WAITS | {"episodes/turns": 2.0}, WAITS),
    (NO_UPDATE, {"policy/empty_updates": 1.0}, {"policy/empty_updates": 1.0, "policy/loss": 0.1}),
    ("reward 0 to 1: rises", {"reward/mean": 1.0}, {"reward/mean": 0.0}),
)


@pytest.mark.parametrize(("says", "present", "absent"), HINTS)
def test_a_hint_of_the_console_is_shown_only_where_it_holds(says: str, present: Json, absent: Json) -> None:
    def shown(metrics: Json) -> set[str]:
        summary = RunSummary(STEPS)
        for step in range(1, STEPS + 1):
            summary.add(step, metrics if step > STEPS // 3 else metrics | {"reward/mean": 0.0})
        return {summary.bottleneck(), summary.learns(), note(metrics)}

    assert says in shown(present)
    assert says not in shown(absent)
