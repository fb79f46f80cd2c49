"""Events as text."""

from __future__ import annotations

from typing import Any

import pytest

from troupe.orchestrator.insight.event_texts import event_text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "run_started", "resume_at": 0, "roles": {"rollout": 2, "policy": 1}, "versions": {"ray": "2"}},
         "run started with 2 rollout, 1 policy; ray 2"),
        ({"event": "run_started", "resume_at": 7}, "run resumed after step 7"),
        ({"event": "run_ended", "how": "finished"}, "run finished"),
        ({"event": "run_ended", "how": "failed", "error": "WorkerError", "detail": "policy-0 died"},
         "run failed: WorkerError: policy-0 died"),
        ({"event": "worker_started", "worker": "reward-0", "detail": "host vm, pid 3"},
         "reward-0 started (host vm, pid 3)"),
        ({"event": "worker_lost", "worker": "rollout-1", "detail": ""}, "rollout-1 lost"),
        ({"event": "slow_engine", "worker": "rollout-1", "detail": "takes long, on b"}, "rollout-1 takes long, on b"),
        ({"event": "trainer_restarted", "workers": ["policy-0", "critic-0"]},
         "trainers restarted: policy-0, critic-0"),
        ({"event": "dropped", "samples": 1, "reason": "no number"}, "1 sample dropped: no number"),
        ({"event": "network", "role": "policy", "detail": "slow"}, "policy: slow"),
        ({"event": "retry", "groups": 2}, "2 groups sampled again"),
        ({"event": "scaled", "workers": {"rollout": 3}}, "workers changed to 3 rollout"),
        ({"event": "evaluation", "of": 3, "ok": True}, "step 3 evaluated beside training"),
        ({"event": "evaluation", "of": 3, "ok": False, "detail": "x"}, "the evaluation of step 3 is lost: x"),
        ({"event": "checkpoint", "ok": True, "seconds": 0.4925}, "checkpoint saved in 0.49 s"),
        ({"event": "checkpoint", "ok": False, "detail": "disk full"}, "checkpoint failed: disk full"),
        ({"event": "weights", "version": 4, "seconds": 0.05}, "weights of version 4 sent in 0.05 s"),
        (
            {"event": "weights", "version": 4, "seconds": 0.05, "to_nodes": 3_180_000},
            "weights of version 4 sent in 0.05 s, 3.2 MB to other nodes",
        ),
        ({"event": "weights", "version": 4, "to_nodes": 0}, "weights of version 4 sent"),
        ({"event": "new_kind", "step": 3, "time": 1.0, "size": 4, "of": ["a"]}, 'new kind: size 4, of ["a"]'),
        ({"event": "new_kind"}, "new kind"),
    ],
)  # fmt: skip
def test_an_event_is_a_line_of_text(event: dict[str, Any], text: str) -> None:
    assert event_text(event) == text
