"""What `troupe status` reads from a job's log."""

from __future__ import annotations

import pytest
from ray.dashboard.modules.job.common import JobStatus

from troupe.orchestrator.platforms.ray_jobs import JobState

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


LAST = "step 2/40  reward -0.5  no update: no sample has an advantage"


@pytest.mark.parametrize("status", JobStatus)
def test_the_last_step_of_a_job_that_has_ended_leaves_no_time(status: JobStatus) -> None:
    state = JobState("job", "", str(status.value), "running", 1.0, "")
    assert state.last_step(LOG) == (LAST if status.is_terminal() else f"{LAST}  1 h 20 min left")
    planned = "step 1/40 is planned\nwaiting for nodes: no node is large enough for policy for 34 s\n"
    assert state.last_step(planned) == ("" if status.is_terminal() else planned.splitlines()[-1])
    assert state.last_step("step 4/4  loss 0.25  update s 1.3\nsteps  4\n") == "step 4/4  loss 0.25  update s 1.3"
