"""Faults that cannot be had from a short real run: a documented change of one or two series of a real healthy run.

Each model takes the lines of a recorded healthy run, repeats them to `STEPS` steps (the last lines continue with seeded
noise of one percent), and changes the named series from `ONSET` on. Everything else stays as it was recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STEPS, ONSET = 24, 12

Line = dict[str, Any]
Model = Callable[[Line, float, random.Random], Mapping[str, float | None]]
"""Given a line, how far the fault has developed (0 before the onset, then up to 1) and noise: the changed metrics."""


def lengthened(lines: Sequence[Line], steps: int, noise: random.Random) -> list[Line]:
    """The run with more steps: after its end, its last three lines in turn with one percent of noise."""
    found = [dict(line) for line in lines if line["step"] > 0][:steps]
    for step in range(len(found) + 1, steps + 1):
        like = found[-3:][step % 3]
        line = {name: _noisy(value, noise) for name, value in like.items()}
        kept = {name: value for name, value in like.items() if name.startswith(("data/", "workers/", "memory/"))}
        counts = {name: value * step / like["step"] for name, value in like.items() if name.startswith("ledger/")}
        found.append({**line, **kept, **counts, "step": step, "time": like["time"] + 2.0, "ledger/retries": 0.0})
    return found


def _noisy(value: Any, noise: random.Random) -> Any:
    return value * noise.gauss(1.0, 0.01) if isinstance(value, float) and value not in {0.0, 1.0} else value


def sick(lines: Sequence[Line], model: Model, seed: int) -> list[Line]:
    """A healthy run with one fault."""
    noise = random.Random(seed)
    found = lengthened(lines, STEPS, noise)
    for line in found:
        line.update(model(line, max(0.0, (line["step"] - ONSET) / (STEPS - ONSET)), noise))
    return found


def gap_jumps(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """After one weight sync the engine holds other weights than the trainer."""
    return {"policy/rollout_logprob_gap": noise.uniform(0.15, 0.25)} if far > 0 else {}


def gap_grows(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The engine falls behind a little with every sync."""
    return {"policy/rollout_logprob_gap": 1e-5 + 0.08 * far * noise.uniform(0.9, 1.1)}


def length_explodes(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Responses grow until they are cut; the reward stays as noise around its start."""
    return {
        "response_tokens/mean": (60 + 400 * far) * noise.uniform(0.95, 1.05),
        "truncated": min(1.0, 0.02 + 0.9 * far),
        "reward/mean": noise.gauss(0.3, 0.01),
    }


def length_collapses(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Responses shrink to a few tokens, because the reward does not miss them."""
    return {"response_tokens/mean": (60 - 57 * min(1.0, 2 * far)) * noise.uniform(0.97, 1.03), "truncated": 0.0}


def truncation_rises(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """More and more responses are cut at the limit, at a nearly constant mean length."""
    return {
        "truncated": min(1.0, 0.03 + 0.6 * far + noise.uniform(0, 0.02)),
        "response_tokens/mean": noise.gauss(200, 4),
    }


def spikes(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Every fifth step after the onset has a gradient fifty times the usual."""
    spike = far > 0 and line["step"] % 5 == 0
    return {"policy/grad_norm": 50.0 * noise.uniform(0.9, 1.1) if spike else noise.uniform(0.8, 1.2)}


def not_finite(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Two steps have a gradient that is not finite, and are skipped."""
    lost = line["step"] in {ONSET + 2, ONSET + 5}
    return {"policy/skipped_updates": 1.0, "policy/grad_norm": None} if lost else {}


def critic_never_learns(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The critic's values are noise around a constant."""
    return {"explained_variance": noise.gauss(0.0, 0.02), "critic/value_error": noise.gauss(0.05, 0.002)}


def clipped(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Half of the tokens are beyond the clip bounds in every update."""
    return {"policy/clip_fraction": noise.gauss(0.5, 0.03) if far > 0 else 0.05}


def memory_grows(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The engine keeps 60 MiB of every step."""
    return {"memory/rollout": 2.1 + 0.06 * line["step"]}


def memory_flattens(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The engine takes 340 MiB in eight steps, as that of `laptop-grpo` does, and no more."""
    return {"memory/rollout": 3.1 + 0.34 * min(line["step"], 8) / 8}


def held_out_falls(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The reward rises, the reward on held-out prompts falls: the training reward is hacked."""
    training = {"reward/mean": 0.3 + 0.02 * line["step"] + noise.gauss(0, 0.005)}
    return training | ({"eval/reward": 0.35 - 0.2 * far} if line["step"] % 4 == 0 else {})


def entropy_collapses(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Entropy decays to a hundredth of a nat; the groups become equal with it."""
    return {"policy/entropy": 2.0 * (1 - far) ** 4 + 0.01, "groups/mixed": 1.0 - 0.7 * far}


def leaves_reference(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """KL to a trained reference grows without bound; the reward falls."""
    return {
        "policy/entropy": 1.5,
        "kl_ref": 0.02 + 3.0 * far * far,
        "reward/mean": 0.4 - 0.2 * far + noise.gauss(0, 0.005),
    }


def rewards_fail(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """From the onset on a service that the reward asks answers only half of the time."""
    return {"failed_samples": float(noise.randint(26, 38)) if far > 0 else 0.0}


def workers_die(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """An engine dies twice; its groups are sampled again."""
    return {"ledger/retries": float(4 * ((line["step"] > ONSET) + (line["step"] > ONSET + 6)))}


def rows_lost(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """A third of the training file cannot be read."""
    return {"data/train_bad_rows": 16.0}


def trainer_waits(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Asynchronous, and one engine is too few: the trainer waits for most of each step."""
    wait = 6.0 * noise.uniform(0.95, 1.05)
    return {"seconds/generate": wait, "seconds/step": wait + 2.0, "utilisation/generate": wait / (wait + 2.0)}


# What looks like a fault and is none: healthy runs must stay healthy with these.


def nothing(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """No fault; a longer run."""
    return {}


def length_grows_with_reward(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The policy learns to think longer, and is rewarded for its answers; nothing is cut."""
    return {
        "response_tokens/mean": (100 + 200 * far) * noise.uniform(0.97, 1.03),
        "truncated": 0.0,
        "reward/mean": 0.2 + 0.5 * far + noise.gauss(0, 0.01),
    }


def entropy_falls_slowly(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """The policy becomes surer, as it should."""
    return {"policy/entropy": 1.2 - 0.5 * far + noise.gauss(0, 0.02), "reward/mean": 0.3 + 0.3 * far}


def one_spike(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """One batch with a large gradient, which clipping bounds."""
    return {"policy/grad_norm": 20.0 if line["step"] == ONSET else noise.uniform(0.8, 1.2)}


def stale_gap(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """Asynchronous: the trainer has learned since the samples were drawn."""
    return {"policy/rollout_logprob_gap": noise.uniform(0.05, 0.15), "utilisation/generate": 0.15}


def few_failures(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """One sample in some steps has no reward."""
    return {"failed_samples": float(line["step"] % 6 == 0), "truncated": noise.uniform(0.0, 0.08)}


def rewards_fluctuate(line: Line, far: float, noise: random.Random) -> Mapping[str, float | None]:
    """A hard task: the reward is noise around its start."""
    return {"reward/mean": noise.gauss(0.3, 0.02), "groups/mixed": noise.uniform(0.4, 0.8)}
