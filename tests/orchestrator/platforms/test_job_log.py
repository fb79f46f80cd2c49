"""What `troupe status` reads from a job's log."""

from __future__ import annotations

from dataclasses import asdict

from ray.dashboard.modules.job.common import JobStatus

from troupe.orchestrator.platforms.ray_jobs import JobState, RunProgress, run_progress

LOG = """\
INFO job_manager.py:568 -- Runtime env is setting up.
tiny-grpo: 40 steps
starting 1 rollout, 1 policy, 2 reward
step 1/40  reward 0.315  entropy 10.484  length 6  tok/s 173  generate s 0.8  update s 1.3  sync s 0.1  1 min left
rollout: 1 -> 3 workers: rollout-1, rollout-2 starting
other: 1 -> 7 workers: a line of a reward function
step 2/40  reward -0.5  no update: no sample has an advantage  1 h 20 min left
WARNING lost step 3/40  of something
"""


def test_a_log_says_step_reward_workers_and_time_left() -> None:
    found = run_progress(LOG)
    assert asdict(found) == {
        "step": 2,
        "steps": 40,
        "reward": -0.5,
        "left": "1 h 20 min",
        "workers": {"rollout": 3, "policy": 1, "reward": 2},
        "line": "step 2/40  reward -0.5  no update: no sample has an advantage  1 h 20 min left",
    }
    assert found.lines() == ["workers: 3 rollout, 1 policy, 2 reward", found.line]


def test_before_the_first_step_nothing_is_known_but_the_workers() -> None:
    assert run_progress("") == run_progress("step 1/40 is planned\n") == RunProgress()
    assert run_progress("starting 1 policy\n").lines() == ["workers: 1 policy"]


def test_after_the_last_step_no_time_is_left() -> None:
    found = run_progress("step 4/4  loss 0.25  update s 1.3\nsteps  4\n")
    assert (found.step, found.steps, found.reward, found.left) == (4, 4, None, None)


def test_a_job_that_has_ended_takes_no_more_time() -> None:
    found = run_progress(LOG).ended()
    assert found.left is None and found.line.endswith("no sample has an advantage") and found.step == 2
    assert all(JobState("job", "", str(state.value), 1.0, "").has_ended is state.is_terminal() for state in JobStatus)
