"""A whole PPO step with four models, by phase, against the same stages one by one with nothing else going on.

    python -m benchmarks.ppo_step --groups 16 --samples 2 --max-tokens 16

The product's side is its own controller, step by step. Between two steps the same workers do the same amount of every
stage alone: generation, scoring by reward, reference, critic and policy, preparation, both updates, weight sync. Their
sum is what a step costs that overlaps nothing and adds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import NotCorrect, Report, Turn, carry_out, take_turns
from benchmarks.workload import Settings, add_settings, spec, without_end
from orchestrator.spec import Spec

STAGES, PRODUCT = "stages alone", "troupe"
PHASES = ("generate", "prepare", "update", "sync")
MAX_GAP = 0.1
"""Nats between sampler and trainer per token, in every policy update of either."""
SIDE_BY_SIDE = ("policy update", "critic update")
SCORING = ("reward", "reference", "critic", "old log-probs")


def four_models(plan: Spec) -> Spec:
    """The spec with PPO: a critic, and a reference in a worker of its own. Raises ValidationError."""
    document = plan.model_dump(mode="json", exclude_defaults=True)
    policy = document["roles"]["policy"]
    document["roles"]["critic"] = dict(policy)
    shared = policy.keys() & {"cpus", "gpus", "threads", "micro_batch_tokens"}
    document["roles"]["reference"] = {key: policy[key] for key in shared}
    document["algorithm"] = {"name": "ppo", "group_size": plan.group_size, "kl": {"coef": 0.02}}
    return Spec.model_validate(document)


def critical_path(stages: Mapping[str, float]) -> float:
    """Seconds of a step of these stages with a machine for every worker, without streaming between stages.

    Scoring is fanned out, and so are the two updates: the longest of each counts.
    """
    alone = sum(seconds for name, seconds in stages.items() if name not in (*SCORING, *SIDE_BY_SIDE))
    return alone + max(stages[name] for name in SCORING) + max(stages[name] for name in SIDE_BY_SIDE)


def check(settings: Settings, metrics: Sequence[Mapping[str, float]], gaps: Sequence[float]) -> dict[str, str]:
    """What was right about all steps, or NotCorrect. `gaps`: of the policy updates of the stages, in nats a token."""
    wanted = settings.sequences
    for line in metrics:
        if line["ledger/trained"] != wanted * (line["step"] - 1) or line["ledger/dropped"]:
            raise NotCorrect(f"step {line['step']:g}: the ledger has {line['ledger/trained']:g} samples trained")
        if line["response_tokens/mean"] != settings.max_tokens:
            raise NotCorrect(f"step {line['step']:g}: {line['response_tokens/mean']:g} tokens a response")
    worst = max([*gaps, *(line["policy/rollout_logprob_gap"] for line in metrics)])
    if not worst <= MAX_GAP:
        raise NotCorrect(f"sampler and trainer are {worst:.4f} nats a token apart")
    return {
        "samples": f"{wanted} of {settings.max_tokens} tokens in each of {len(metrics)} steps, trained once each",
        "sampler to trainer": f"{worst:.4f} nats a token at most; every weight update verified by digest",
    }


async def measure(settings: Settings, turns: int) -> Report:
    """Start the cast, let step and stages take turns, check. Raises NotCorrect, and TroupeError where the run fails."""
    from benchmarks.ppo_stage import PPOStage  # every engine's process imports this module, and needs no Ray

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_end(settings.model, folder / "model")
        plan = four_models(spec(settings, model, turns + 1, 2 * settings.groups * (turns + 1)))
        stage = await stack.enter_async_context(PPOStage.open(plan, folder / "run"))
        taken = await take_turns({STAGES: stage.stages, PRODUCT: stage.step}, turns)
        await stage.finish()
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    metrics: list[dict[str, float]] = [json.loads(line) for line in lines]
    checks = check(settings, metrics, stage.gaps)
    taken[PRODUCT] = [
        Turn(turn.wall_s, turn.amount, turn.cpu_s, turn.foreign_cores, phases_of(line, turn.wall_s))
        for turn, line in zip(taken[PRODUCT], metrics[1:], strict=True)
    ]
    return Report("ppo_step", asdict(settings) | {"turns": turns}, taken, STAGES, checks)


def phases_of(metrics: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Seconds by phase of a line of metrics.jsonl; what is in none of them comes under `other`."""
    phases = {phase: metrics[f"seconds/{phase}"] for phase in PHASES}
    return phases | {"other": wall_s - sum(phases.values())}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ppo_step", description=__doc__)
    defaults = {"groups": 16, "samples": 2, "max_tokens": 16, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, turns=5, seed=17)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each of the four")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    given = vars(parse(sys.argv[1:]))
    turns, path = given.pop("turns"), given.pop("json")
    carry_out(lambda: asyncio.run(measure(Settings(**given, lengths="fixed", engines=1), turns)), path)


if __name__ == "__main__":
    main()
