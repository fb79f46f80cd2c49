"""Samples from a mixture of experts with vLLM's model runner V2 on the CPU, and prints each response as a JSON object:
prompt, response, log-probs and routes, as the rollout worker writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROMPTS = ([1, 40, 41, 42], [1, 43, 44, 45, 46])
TOKENS = 12


def main(model: Path) -> None:
    """Sample a response to each prompt, in a process that has imported the engine."""
    from tests.real.rollout_helpers import rollout_config
    from troupe.workers.engine.rows import sampled_turn
    from troupe.workers.engine.settings import engine_args, set_environment

    config = rollout_config(model)
    set_environment(config.process)
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    sampling = config.sampling.model_copy(update={"router_replay": True})
    engine = LLMEngine.from_engine_args(engine_args(config.model_copy(update={"sampling": sampling})))
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            seed=number,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        outputs: list[Any] = engine.step()
        for output in outputs:
            output.outputs[0].weight_versions = []  # the engine has received no weights
            turn = sampled_turn(output, routed=True)
            row = {"prompt_ids": output.prompt_token_ids, "response_ids": turn.ids, "rollout_logprobs": turn.logprobs}
            print(json.dumps(row | {"routes": (turn.routes or b"").hex()}))
