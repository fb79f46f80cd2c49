"""A whole PPO step with four models, by phase, against the same stages run one by one.

    python -m benchmarks.ppo_step --groups 16 --samples 2 --max-tokens 16

The product runs its own controller, step by step. Between two steps the same workers run the same amount of each stage
in isolation: generation, scoring by reward, reference, critic and policy, preparation, both updates, weight sync. The
sum of the stages is the time of a step without overlap and without orchestration overhead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.support.harness import NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.workload import MAX_GAP, Settings, add_settings, grpo_spec, phases_of, without_eos
from troupe.orchestrator.live.diff import changed
from troupe.orchestrator.spec.rollout import RolloutSpec

STAGES, PRODUCT = "stages alone", "troupe"


def four_models(spec: RolloutSpec) -> RolloutSpec:
    """The spec with PPO, a critic, and a reference in a separate worker. Raises SpecError."""
    policy = spec.roles.policy.model_dump(mode="json", exclude_defaults=True)
    shared = policy.keys() & {"cpus", "gpus", "threads", "micro_batch_tokens"}
    changes = {
        "roles.critic": policy,
        "roles.reference": {key: policy[key] for key in shared},
        "algorithm": {"name": "ppo", "group_size": spec.group_size, "kl": {"coef": 0.02}},
    }
    return changed(spec, changes, "ppo_step")


def check(settings: Settings, metrics: Sequence[Mapping[str, float]], gaps: Sequence[float]) -> dict[str, str]:
    """Check the steps of the product and of the stages.

    Args:
        settings: The requested work.
        metrics: The product's metrics, one line per step.
        gaps: Sampler-to-trainer gaps of the policy updates of the stages, in nats per token.

    Returns:
        The checks and their outcomes.

    Raises:
        NotCorrect: A check failed.
    """
    wanted = settings.sequences
    for line in metrics:
        if line["ledger/trained"] != wanted * (line["step"] - 1) or line["ledger/dropped"]:
            raise NotCorrect(
                f"step {line['step']:g}: the ledger counts {line['ledger/trained']:g} samples trained and "
                f"{line['ledger/dropped']:g} dropped, expected {wanted * (line['step'] - 1):g} and 0"
            )
        if line["response_tokens/mean"] != settings.max_tokens:
            raise NotCorrect(
                f"step {line['step']:g}: {line['response_tokens/mean']:g} tokens per response, expected "
                f"{settings.max_tokens}"
            )
    worst = max([*gaps, *(line["policy/rollout_logprob_gap"] for line in metrics)])
    if not worst <= MAX_GAP:
        raise NotCorrect(f"sampler and trainer differ by {worst:.4f} nats per token, more than {MAX_GAP}")
    return {
        "samples": f"{wanted} of {settings.max_tokens} tokens in each of {len(metrics)} steps, trained once each",
        "sampler to trainer": f"{worst:.4f} nats per token at most; every weight update verified by digest",
    }


async def measure(given: argparse.Namespace) -> Report:
    """Start the workers, alternate between steps and isolated stages, and check.

    Raises:
        NotCorrect: A check failed.
        TroupeError: The run failed.
    """
    # Imported here because engine processes import this module, and they do not need Ray.
    from benchmarks.support.ppo_setup import PPOSetup

    settings, turns = Settings.of(given, lengths="fixed", engines=1), given.turns
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = without_eos(settings.model, folder / "model")
        spec = four_models(grpo_spec(settings, model, turns + 1, 2 * settings.groups * (turns + 1)))
        setup = await stack.enter_async_context(PPOSetup.open(spec, folder / "run"))
        taken = await take_turns({STAGES: setup.stages, PRODUCT: setup.step}, turns)
        await setup.finish()
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    metrics: list[dict[str, float]] = [json.loads(line) for line in lines]
    checks = check(settings, metrics, setup.gaps)
    taken[PRODUCT] = [
        Turn(turn.wall_s, turn.amount, turn.cpu_s, turn.foreign_cores, phases_of(line, turn.wall_s))
        for turn, line in zip(taken[PRODUCT], metrics[1:], strict=True)
    ]
    return Report("ppo_step", taken, STAGES, checks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("ppo_step", __doc__, 5)
    defaults = {"groups": 16, "samples": 2, "max_tokens": 16, "concurrency": 64, "threads": 2}
    add_settings(parser, **defaults, seed=17)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU for each of the four models"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
