"""Simulated runs: what they train, and what their check refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.support.harness import NotCorrect
from benchmarks.support.simulated import Shape, SimPolicy, SimulatedWorkers, Simulation, check
from tests.fakes import FakeTable
from troupe.orchestrator.controller import RunOutcome
from troupe.workers.contract.messages import PrepareRequest, TrainSummary

SHAPE = Shape(engines=3, slots=2, groups=6, samples=4, staleness=1, steps=5)


async def run(policy: SimPolicy, shape: Shape = SHAPE) -> RunOutcome:
    outcome, _ = await Simulation(shape, SimulatedWorkers.local(shape, policy)).run()
    return outcome


async def test_lost_and_doubled_sequences_are_refused() -> None:
    class Forgetful(SimPolicy):
        @property
        def rows(self) -> list[int]:
            *others, last = super().rows
            return [*others, last - 1]

    class Repeating(SimPolicy):
        async def prepare(self, request: PrepareRequest, *tables: object) -> tuple[TrainSummary, FakeTable]:
            answer = await super().prepare(request, *tables)
            self.prepared[-1] = self.prepared[0]
            return answer

    for policy, message in ((Forgetful(), "does not have all 24"), (Repeating(), "trained twice")):
        with pytest.raises(NotCorrect, match=message):
            check(SHAPE, await run(policy), policy)
    policy = SimPolicy()
    outcome = await run(policy)
    check(SHAPE, outcome, policy)
    for wrong in ({"trained": 119, "dropped": 1}, {"trained": 112, "in_flight": 8}, {"dispatched": 121}):
        with pytest.raises(NotCorrect, match="the ledger has"):
            check(SHAPE, replace(outcome, ledger=outcome.ledger | wrong), policy)


async def test_a_run_that_is_stopped_has_the_rest_in_flight() -> None:
    policy, shape = SimPolicy(), replace(SHAPE, steps=50)
    simulation = Simulation(shape, SimulatedWorkers.local(shape, policy))
    simulation.on_prompt = lambda pick: simulation.stop.set() if len(policy.prepared) == 3 else None
    outcome, _ = await simulation.run()
    assert outcome.stopped and outcome.ledger["in_flight"]
    check(replace(shape, steps=outcome.steps_done), outcome, policy)
