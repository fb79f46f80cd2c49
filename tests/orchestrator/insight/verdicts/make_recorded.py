"""Records the runs that the verdicts are tested on: real runs of the tiny specs, healthy and with a planted fault.

    python tests/orchestrator/insight/verdicts/make_recorded.py FOLDER [NAME ...]

Runs every variant (or the named ones) from the root of a checkout, one after the other, and copies its `metrics.jsonl`
to `recorded/`, and of its `spec.yaml` what differs from the defaults. A variant takes about a minute on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.load import parse_spec

ROOT = Path(__file__).resolve().parents[4]
RECORDED = Path(__file__).resolve().parent / "recorded"
_REWARDS = "tests.orchestrator.insight.verdicts.planted_rewards"


@dataclass(frozen=True)
class Variant:
    """A spec of `deploy/specs` with overrides."""

    spec: str
    overrides: tuple[str, ...] = ()
    as_shipped: bool = False
    """Whether it has the learning rate of its file."""


def _reward(name: str, args: str = "{}") -> str:
    return f"roles.reward.functions=[{{name: '{_REWARDS}:{name}', args: {args}, label: goal}}]"


STEPS = "schedule.steps=8"
NO_SAVES = "checkpoint.every_steps=0"
REFERENCE = "roles.reference={colocate_with: policy}"
SLOWER = "roles.policy.learning_rate=0.02"
FASTER = ("roles.policy.learning_rate=0.1", "roles.policy.warmup_updates=0")
"""Of every variant of a tiny spec with rollouts that is not as shipped, unless it says something else."""

VARIANTS: dict[str, Variant] = {
    "sick-constant-reward": Variant("tiny-grpo", ("schedule.steps=6", _reward("always_one"))),
    "sick-never-solved": Variant("tiny-grpo", ("schedule.steps=6", _reward("never"))),
    "sick-failing-reward": Variant(
        "tiny-grpo", (STEPS, SLOWER, "failures.max_failed_fraction=0.9", _reward("fails_often"))
    ),
    "sick-learning-rate": Variant("tiny-grpo", (STEPS, "roles.policy.learning_rate=3.0", REFERENCE)),
    "sick-slow-reward": Variant("tiny-grpo", (STEPS, SLOWER, _reward("slow"))),
    "sick-one-letter": Variant(
        "tiny-grpo", ("schedule.steps=12", REFERENCE, "sampling.max_tokens=24", _reward("one_letter"))
    ),
    "sick-critic-rate": Variant("tiny-ppo", (STEPS, "roles.critic.learning_rate=3.0", SLOWER)),
    "sick-epochs": Variant("tiny-ppo", (STEPS, "schedule.epochs=4", "roles.policy.learning_rate=0.3")),
    "sick-stale": Variant("tiny-grpo", (STEPS, "schedule.max_staleness=3", "roles.policy.learning_rate=0.3")),
    "sick-extreme-reward": Variant(
        "tiny-grpo",
        ("schedule.steps=12", SLOWER, "algorithm.normalize_by_std=false", _reward("rare_extreme")),
    ),
    "sick-leaking-reward": Variant("tiny-grpo", ("schedule.steps=12", SLOWER, _reward("leaking"))),
    "sick-few-prompts": Variant("tiny-grpo", ("schedule.steps=12", SLOWER, "data.train.size=2")),
    "sick-kl-coef": Variant("tiny-grpo", (STEPS, SLOWER, REFERENCE, "algorithm.kl={coef: 50.0}")),
    "sick-slow-update": Variant(
        "tiny-grpo",
        (STEPS, SLOWER, "schedule.max_staleness=2", "schedule.epochs=12", "roles.policy.micro_batch_tokens=256"),
    ),
    "sick-collapse-grpo": Variant("tiny-grpo"),  # at this learning rate the policy ends as one word
    "sick-collapse-ppo": Variant("tiny-ppo"),
    "healthy-tiny-grpo": Variant("tiny-grpo", ("schedule.steps=16",), as_shipped=True),
    "healthy-tiny-ppo": Variant("tiny-ppo", as_shipped=True),
    "healthy-grpo": Variant("tiny-grpo", (STEPS, SLOWER)),
    "healthy-grpo-seed-11": Variant("tiny-grpo", ("schedule.steps=10", SLOWER, "seed=11")),
    "healthy-grpo-kl": Variant("tiny-grpo", (STEPS, SLOWER, "seed=3", REFERENCE, "algorithm.kl={coef: 0.01}")),
    "healthy-ppo": Variant("tiny-ppo", (STEPS, SLOWER)),
    "healthy-ppo-seed-5": Variant("tiny-ppo", (STEPS, SLOWER, "seed=5")),
    "healthy-async": Variant("tiny-grpo", (STEPS, SLOWER, "schedule.max_staleness=1")),
    "healthy-sft": Variant("tiny-sft"),
    "healthy-dpo": Variant("tiny-dpo"),
    "healthy-rloo": Variant("tiny-grpo", (STEPS, SLOWER, "algorithm={name: rloo, group_size: 16}", REFERENCE)),
    "healthy-laptop": Variant("laptop-grpo", ("schedule.steps=6",)),
}


def record(name: str, folder: Path) -> None:
    """Runs one variant and copies what the verdicts read."""
    variant, out = VARIANTS[name], folder / name
    first = FASTER if variant.spec in {"tiny-grpo", "tiny-ppo"} and not variant.as_shipped else ()
    sets = [part for override in (*first, *variant.overrides, NO_SAVES) for part in ("--set", override)]
    command = [sys.executable, "-m", "troupe", "run", f"deploy/specs/{variant.spec}.yaml", *sets]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and not (out / "metrics.jsonl").is_file():
        sys.stderr.write(f"{name}: {done.stderr[-2000:]}\n")
        return
    RECORDED.mkdir(exist_ok=True)
    shutil.copy(out / "metrics.jsonl", RECORDED / f"{name}.jsonl")
    spec = parse_spec(yaml_reader.read_file(out / "spec.yaml")).model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=118)
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT.resolve()), ".")
    (RECORDED / f"{name}.yaml").write_text(text, encoding="utf-8")
    sys.stdout.write(f"{name}: exit code {done.returncode}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for wanted in sys.argv[2:] or list(VARIANTS):
        record(wanted, Path(sys.argv[1]))
