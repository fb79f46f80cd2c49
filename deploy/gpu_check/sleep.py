"""The sleep piece of the GPU check: vLLM gives memory back, wakes, and samples the same tokens with the same weights.

It is vLLM's sleep mode with the settings of Troupe's engines. Troupe itself does not put engines to sleep.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from troupe.workers.contract.config import EngineConfig, ModelConfig, RolloutConfig, SamplingConfig
from troupe.workers.engine.settings import engine_args, set_environment

LEAST_SHARE = 0.5
"""Share of the engine's memory that has to be free while it sleeps: its weights and its KV cache."""
_PROMPTS = [[1, 100 + number, 200, 300] for number in range(8)]
_TOKENS = 16


def configuration(model: Path) -> RolloutConfig:
    """An engine as a run on one GPU has it."""
    return RolloutConfig(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(max_model_len=256, enforce_eager=True, gpu_memory_utilization=0.3),
        sampling=SamplingConfig(max_tokens=_TOKENS),
        seed=1,
        transfer_backend="shm",
        device="cuda",
    )


def arguments(config: RolloutConfig) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: those of the engines that differ from its defaults, and its sleep mode."""
    chosen = engine_args(config)
    plain = type(chosen)(model=chosen.model)
    values = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    return {name: value for name, value in changed.items() if name != "enable_log_requests"} | {
        "model": chosen.model,
        "enable_sleep_mode": True,
    }


def free_bytes() -> int:
    """Free memory of the GPU, over all processes."""
    return int(torch.cuda.mem_get_info()[0])


def measure(model: Path) -> dict[str, float]:
    """Sleep and wake once.

    Raises:
        RuntimeError: too little memory was freed, or the tokens differ.
    """
    config = configuration(model)
    set_environment(config)
    from vllm import LLM, SamplingParams

    before = free_bytes()
    engine = LLM(**arguments(config))
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)

    def sampled() -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": ids} for ids in _PROMPTS]
        return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False)]

    first, awake = sampled(), free_bytes()
    began = time.monotonic()
    engine.sleep(level=1)
    slept_s, asleep = time.monotonic() - began, free_bytes()
    began = time.monotonic()
    engine.wake_up()
    woke_s = time.monotonic() - began
    share = (asleep - awake) / max(1, before - awake)
    if share < LEAST_SHARE:
        raise RuntimeError(f"sleeping gave {share:.0%} of the engine's memory back, less than {LEAST_SHARE:.0%}")
    if sampled() != first:
        raise RuntimeError("after waking, the engine samples other tokens greedily")
    gib = 2**30
    return {"share freed": share, "GiB freed": (asleep - awake) / gib, "sleep, s": slept_s, "wake, s": woke_s}


def main() -> None:
    """Measure and write the figures; exits with code 1 where a check fails."""
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu_check.sleep", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m-instruct"))
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    given = parser.parse_args()
    try:
        given.json.write_text(json.dumps(measure(given.model)))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
