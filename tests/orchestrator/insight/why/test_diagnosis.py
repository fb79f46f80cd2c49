"""The diagnosis on sets of facts, without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from troupe.orchestrator.cluster.inspection import NodeFacts, ProcessFacts
from troupe.orchestrator.cluster.stack_dumps import Frame, Thread
from troupe.orchestrator.insight.why.diagnosis import diagnose
from troupe.orchestrator.insight.why.facts import Call, DriverFacts, Facts, RunFacts
from troupe.orchestrator.pools.engine import EngineQueue, Queues

USER = Frame("/home/ada/reward.py", 12, "score", "while True: pass")
LIBRARY = Frame("/x/site-packages/vllm/v1/engine/core.py", 5, "run_busy_loop")
MAIN_LOOP = Frame("/x/site-packages/ray/_private/worker.py", 9, "main_loop")
ALL_REDUCE = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 8, "all_reduce")
UPDATE = Call("policy-1", "update", 84.0, 600.0)
NODE = NodeFacts("n1", shm_free=2**33, shm_total=2**34, memory_free=2**34, memory_total=2**35)
RUN = RunFacts("demo", steps=6, total=40, phase="update", progress="0/1", step_s=84.0, usual_step_s=4.0)
PIDS = {"policy-0": 10, "policy-1": 11, "rollout-0": 12, "reward-0": 13, "environment-0": 14}


def process(worker: str, *frames: Frame, pid: int = 0, state: str = "S", cpu: float = 0.0, **more: str) -> ProcessFacts:
    threads = (Thread(frames),) if frames else ()
    return ProcessFacts(
        worker, "n1", pid or PIDS[worker], 1, f"ray::{worker}", state, cpu, more.get("waits_in", ""),
        False, 2**30, 99.0, threads,
    )  # fmt: skip


def facts(*processes: ProcessFacts, calls: tuple[Call, ...] = (UPDATE,), node: NodeFacts = NODE) -> Facts:
    return Facts(RUN, DriverFacts(1, "n1"), calls, processes, (node,), PIDS)


def test_a_healthy_step_is_not_called_stuck() -> None:
    busy = process("policy-1", Frame("/x/site-packages/torch/nn.py", 1, "forward"), state="R", cpu=1.0)
    found = diagnose(replace(facts(busy), run=replace(RUN, step_s=3.0)))
    assert found.cause == "running"
    assert found.summary.startswith("nothing is stuck: step 7 waits for policy-1 (update, 84 s of 600 s): it computes")


def test_the_network_of_a_group_over_several_nodes_is_named() -> None:
    found = diagnose(replace(facts(), networks={"policy": "9 GB/s a rank (TCP: no RDMA device)"}))
    assert "network of policy: 9 GB/s a rank (TCP: no RDMA device)" in found.evidence


def test_a_stopped_rank_is_named_with_those_that_wait_for_it() -> None:
    found = diagnose(facts(process("policy-0", ALL_REDUCE), process("policy-1", state="T")))
    assert (found.cause, found.blocked_by) == ("worker_stopped", "policy-1")
    assert found.summary == (
        "step 7 waits for policy-1 (update, 84 s of 600 s): it is stopped (SIGSTOP, state T); "
        "the other 1 rank(s) of policy wait in a collective"
    )


@pytest.mark.parametrize("elsewhere", [USER, Frame("/x/site-packages/torch/nn.py", 1, "forward"), MAIN_LOOP])
def test_the_rank_that_is_not_in_the_collective_blocks_the_run(elsewhere: Frame) -> None:
    calls = (replace(UPDATE, worker="policy-0"), UPDATE)
    found = diagnose(facts(process("policy-0", ALL_REDUCE), process("policy-1", elsewhere, cpu=1.0), calls=calls))
    assert (found.cause, found.blocked_by) == ("missing_rank", "policy-1")
    assert "the other 1 rank(s) of policy wait in a collective" in found.summary


def test_a_stopped_process_of_an_engine_is_named_by_its_title() -> None:
    core = replace(process("rollout-0", pid=20, state="T"), title="VLLM::EngineCore")
    call = Call("rollout-0", "generate", 30.0, 600.0)
    found = diagnose(facts(process("rollout-0", MAIN_LOOP), core, calls=(call,)))
    assert "its process VLLM::EngineCore (20) is stopped" in found.summary


def test_a_reward_function_in_an_endless_loop_is_named_with_its_line() -> None:
    child = process("reward-0", USER, pid=21, state="R", cpu=0.97)
    call = Call("reward-0", "score", 30.0, 600.0)
    found = diagnose(facts(process("reward-0", MAIN_LOOP), child, calls=(call,)))
    assert (found.cause, found.blocked_by) == ("user_code", "reward-0")
    assert "computes (0.97 CPU seconds in the last second) in score (/home/ada/reward.py:12)" in found.summary


def test_sleeping_and_waiting_for_a_lock_differ() -> None:
    call = Call("reward-0", "score", 30.0, 600.0)
    sleeper = process("reward-0", replace(USER, source="time.sleep(9)"), pid=21, waits_in="hrtimer_nanosleep")
    locked = process("reward-0", replace(USER, source="with lock_b:"), pid=21, waits_in="futex_wait_queue")
    assert diagnose(facts(sleeper, calls=(call,))).cause == "sleep"
    assert diagnose(facts(locked, calls=(call,))).cause == "lock"


@pytest.mark.parametrize("worker", ["environment-0", "environment.tools-0"])
def test_an_environment_explains_why_an_engine_does_not_return(worker: str) -> None:
    seat = process(worker, USER, pid=22, cpu=0.0, waits_in="hrtimer_nanosleep")
    engine = replace(process("rollout-0", LIBRARY, pid=20), title="VLLM::EngineCore")
    call = Call("rollout-0", "generate", 30.0, 600.0)
    found = diagnose(facts(process("rollout-0", MAIN_LOOP), engine, seat, calls=(call,)))
    assert found.blocked_by == worker
    assert f"process 22 of {worker} sleeps" in found.summary


def test_a_short_call_into_user_code_does_not_hide_an_old_one() -> None:
    engine = replace(process("rollout-0", LIBRARY, pid=20, cpu=1.0), title="VLLM::EngineCore")
    calls = (Call("rollout-0", "generate", 90.0, 600.0), Call("reward-0", "score", 0.1, 600.0))
    found = diagnose(facts(process("rollout-0", MAIN_LOOP), engine, process("reward-0", USER, cpu=1.0), calls=calls))
    assert found.blocked_by == "rollout-0"


@pytest.mark.parametrize("state", ["", "Z"])
def test_a_child_that_has_ended_is_not_what_the_run_waits_for(state: str) -> None:
    """It has no title any more."""
    ended = replace(process("reward-0", pid=21, state=state), title="")
    call = Call("reward-0", "score", 30.0, 600.0)
    found = diagnose(facts(process("reward-0", USER, cpu=1.0), ended, calls=(call,)))
    assert (found.cause, found.blocked_by) == ("user_code", "reward-0")
    assert "its process 21 has ended" in diagnose(facts(ended, calls=(call,))).summary  # nothing else is known


def test_a_worker_behind_a_call_that_has_ended_is_named() -> None:
    call = Call("rollout-0", "generate", 30.0, 600.0)
    ended = replace(process("environment-0", state=""), title="")
    found = diagnose(facts(process("rollout-0", MAIN_LOOP), ended, calls=(call,)))
    assert found.summary.startswith("step 7 waits for rollout-0 (generate, 30 s of 600 s): process 14 of environment-0")


def test_a_write_that_hangs_is_the_disk() -> None:
    saving = process("policy-1", USER, state="D", waits_in="folio_wait_bit")
    found = diagnose(facts(saving, calls=(replace(UPDATE, method="save"),)))
    assert found.cause == "disk"
    assert found.blocked_by == "policy-1"
    assert "waits for the disk (state D, in folio_wait_bit) in " in found.summary
    in_a_thread = replace(process("policy-1", USER), waits_for_device=True)
    found = diagnose(facts(in_a_thread, calls=(replace(UPDATE, method="save"),)))
    assert found.cause == "disk" and "waits for the disk (state D) in " in found.summary


def test_a_full_file_system_is_named() -> None:
    full = replace(NODE, shm_free=4096)
    assert diagnose(facts(process("policy-1", MAIN_LOOP), node=full)).blocked_by == "/dev/shm on n1"
    failed = replace(facts(node=full), error="policy-0.publish_weights: OSError: [Errno 28] No space left on device")
    assert diagnose(failed).summary.startswith("/dev/shm on n1 is full, and step 7 (update) failed: policy-0.publish")


def test_a_lost_node_is_named_with_the_call_that_it_holds_up() -> None:
    lost = NodeFacts("n2", reachable=False, workers=("rollout-0",))
    call = Call("rollout-0", "generate", 30.0, 600.0)
    found = diagnose(replace(facts(calls=(call,)), nodes=(NODE, lost)))
    assert found.summary == "step 7 waits for rollout-0 (generate, 30 s of 600 s): its node n2 does not answer"


def test_a_dead_node_explains_why_nothing_starts() -> None:
    dead = NodeFacts("n2", reachable=False, alive=False)
    found = diagnose(replace(facts(calls=(Call("rollout-0", "start", 30.0, 600.0),)), nodes=(NODE, dead)))
    assert found.cause == "node_lost"
    assert "rollout-0 to start: node n2 is dead, and no other node has room" in found.summary


def test_a_dead_node_that_is_not_missed_is_not_the_cause() -> None:
    dead = NodeFacts("n2", reachable=False, alive=False)
    found = diagnose(replace(facts(process("policy-1", USER, cpu=1.0)), nodes=(NODE, dead)))
    assert found.cause == "user_code"


def test_a_dead_node_is_not_the_cause_while_an_engine_serves() -> None:
    """It was replaced, or the autoscaler has taken it away."""
    dead = NodeFacts("n2", reachable=False, alive=False)
    calls = (UPDATE, Call("rollout-1", "start", 30.0, 600.0))
    queues = Queues((EngineQueue("rollout-0", "serving", 4),), ("rollout-1",), waiting=2)
    found = diagnose(replace(facts(process("policy-1", USER), calls=calls), nodes=(NODE, dead), queues=queues))
    assert found.cause == "user_code"


def test_no_engine_that_serves() -> None:
    queues = Queues((), ("rollout-0",), waiting=4)
    found = diagnose(replace(facts(calls=()), queues=queues))
    assert found.cause == "no_engine"
    assert "none serves, rollout-0 is starting, 4 group(s) wait" in found.summary


def test_an_engine_that_rests_while_the_policy_trains_is_healthy() -> None:
    """Groups wait for an update then, not for an engine."""
    queues = Queues((EngineQueue("rollout-0", "asleep", 0),), (), waiting=4)
    found = diagnose(replace(facts(), queues=queues))
    assert found.cause != "no_engine" and "policy-1 (update, 84 s of 600 s)" in found.summary


def test_an_engine_that_starts_at_the_beginning_is_no_finding() -> None:
    start = replace(RUN, steps=0, phase="start workers", step_s=3.0, usual_step_s=0.0)
    queues = Queues((EngineQueue("rollout-0", "serving", 0),), (), 0)
    found = diagnose(replace(facts(calls=()), queues=queues, run=start))
    assert found.summary.startswith("the run (start workers) has been running for 3 s")


def test_the_driver_comes_first() -> None:
    own = replace(process("rollout-0", USER, cpu=1.0), worker="driver-0")
    blocked = replace(facts(own), driver=DriverFacts(1, "n1", "blocked", blocked_s=12.0))
    found = diagnose(blocked)
    assert found.summary.startswith("the driver's event loop is blocked for 12 s: its process 1 computes")
    dead = replace(facts(), driver=DriverFacts(1, "n1", "dead", last_seen_s=3.0))
    assert "waiting for policy-1 (update, 84 s of 600 s)" in diagnose(dead).summary
    killed = replace(dead, nodes=(replace(NODE, out_of_memory_kills=2),))
    assert "killed by the kernel's out-of-memory killer" in diagnose(killed).summary
    found = diagnose(replace(killed, kills_before=2))
    assert "it left no last report, so it was killed (SIGKILL) or exited at once" in found.summary


def test_a_full_disk_explains_a_driver_that_left_nothing_or_does_not_answer() -> None:
    full = facts(node=replace(NODE, disks=(("/data/run", 0, 2**40),)))
    dead = diagnose(replace(full, driver=DriverFacts(1, "n1", "dead")))
    assert (dead.cause, dead.blocked_by) == ("full", "/data/run on n1")
    assert "it left no last report, and /data/run on n1 is full" in dead.summary
    assert diagnose(replace(full, driver=DriverFacts(1, "n1", "silent"))).cause == "full"


def test_a_machine_that_was_started_again_has_killed_nothing() -> None:
    dead = replace(facts(), driver=DriverFacts(1, "n1", "dead"), kills_before=3)
    found = diagnose(dead)
    assert "out-of-memory killer" not in found.text()
    failed = replace(facts(), error="policy-0.update: WorkerDied", kills_before=3)
    assert diagnose(failed).cause == "run_failed"


@pytest.mark.parametrize(("usual", "cause"), [(0.0, "waits"), (50.0, "running")])
def test_a_call_without_a_process_is_named(usual: float, cause: str) -> None:
    """Resources that are not there yet, an actor that Ray has not placed."""
    reserve = Call("cluster", "reserve", 84.0, 600.0, "policy")
    found = diagnose(replace(facts(calls=(reserve,)), run=replace(RUN, usual_step_s=usual)))
    assert found.cause == cause
    assert found.summary.endswith(" in update 0/1; it waits for cluster (reserve, 84 s of 600 s): policy")


def test_ray_that_is_stopped_explains_everything_else() -> None:
    gcs = replace(process("rollout-0", state="T"), worker="gcs_server")
    found = diagnose(facts(gcs, process("policy-1", USER, cpu=1.0)))
    assert (found.cause, found.blocked_by) == ("ray_stopped", "gcs_server")


def test_a_process_that_has_ended_is_named_with_its_exit_reason() -> None:
    gone = replace(facts(process("policy-1", state="")), exit_reasons=("its log: Fatal Python error",))
    assert diagnose(gone).summary.endswith("its process 11 has ended: its log: Fatal Python error")


def test_an_error_of_the_run_is_told_with_where_it_happened() -> None:
    failed = replace(facts(), error="policy-1.update: WorkerDied", exit_reasons=("policy-1 (process 11) has ended",))
    assert diagnose(failed).summary == (
        "step 7 (update) failed: policy-1.update: WorkerDied; policy-1 (process 11) has ended"
    )


def test_every_diagnosis_comes_with_who_waits_for_whom() -> None:
    calls = (*(Call("rollout-0", "generate", 9.0, 600.0, f"p{n}") for n in range(12)), UPDATE)
    evidence = diagnose(facts(process("policy-1", USER), calls=calls)).evidence
    assert "the driver waits for policy-1 (update, 84 s of 600 s)" in evidence
    assert "and for 5 further call(s)" in evidence
    assert any(line.startswith("node n1: load") for line in evidence)


def test_a_worker_that_starts_again_is_not_taken_for_the_one_that_died() -> None:
    start = Call("rollout-0", "start", 9.0, 600.0)
    found = diagnose(facts(process("rollout-0", state=""), calls=(start,)))
    assert found.cause not in ("worker_gone", "gone")


def test_a_full_disk_explains_an_error_that_does_not_mention_it() -> None:
    failed = replace(facts(node=replace(NODE, shm_free=0)), error="policy-0.publish_weights: its process has died")
    assert diagnose(failed).blocked_by == "/dev/shm on n1"


def test_a_dead_policy_is_named_while_the_run_waits_for_engines() -> None:
    """No call is open that would tell; an engine that starts is not the cause."""
    waiting = Queues((), starting=("rollout-0",), waiting=3)
    start = Call("rollout-0", "start", 9.0, 600.0)
    dead = replace(
        facts(process("policy-0", state="Z"), process("policy-1", MAIN_LOOP), calls=(start,)), queues=waiting
    )
    found = diagnose(dead)
    assert (found.cause, found.blocked_by) == ("worker_gone", "policy-0")
    assert found.summary == "step 7: policy-0 is dead: its process 10 has ended; the next probe restarts it"
    restarted = replace(dead, calls=(start, Call("policy-0", "start", 1.0, 600.0)))
    assert diagnose(restarted).cause == "no_engine"
