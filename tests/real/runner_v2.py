"""Samples with vLLM's model runner V2, which engines on GPUs have, on the CPU: Triton's interpreter runs its kernels.

Prints a JSON object for each request: prompt, response, log-probs, and the words of each token. Before it a fork, which
shares the import of vLLM, prints those of `runner_v2_routes.py`. The arguments are the models of both.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.real import runner_v2_routes

PROMPT = [1, 40, 41, 42]
REQUESTS: dict[str, dict[str, Any]] = {
    "top-p": {"temperature": 0.7, "top_p": 0.8, "seed": 1, "logprobs": 0},
    "all": {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.02, "seed": 2, "logprobs": 0},
    "many": {"temperature": 0.7, "top_k": 2_000, "seed": 3, "logprobs": 0},
    "whole": {"temperature": 0.7, "seed": 4, "logprobs": 0},
    "greedy": {"temperature": 0.0, "logprobs": 0},
    "probe": {"temperature": 0.0},
}
"""Parameters of requests that are sampled together."""
TOKENS = 3


def run_triton_on_cpu() -> None:
    """Choose runner V2, in this process, with Triton's interpreter. Before vLLM is imported."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import triton.backends

    vars(triton.backends)["backends"]["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def import_engine(model: Path) -> None:
    """Import what both programs use."""
    run_triton_on_cpu()

    from tests.real.rollout_helpers import rollout_config
    from troupe.workers.engine.settings import set_environment

    set_environment(rollout_config(model).process)
    import_module("vllm.v1.engine.llm_engine")
    import_module("vllm.v1.worker.cpu.model_runner")


def main(model: Path) -> None:
    """Sample all requests."""
    from tests.real.rollout_helpers import rollout_config
    from troupe.workers.engine.kept_tokens import kept_tokens
    from troupe.workers.engine.settings import engine_args, set_environment

    config = rollout_config(model)
    set_environment(config.process)
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner

    kernels: Any = topk_topp_sampler
    kernels.HAS_TRITON = False  # the interpreter cannot run that of top-p and top-k
    sampling = config.sampling.model_copy(update={"top_p": 0.8})
    engine = LLMEngine.from_engine_args(engine_args(config.model_copy(update={"sampling": sampling})))
    executor: Any = engine.model_executor
    if not isinstance(runner := executor.driver_worker.worker.model_runner, CPUModelRunner):
        raise TypeError(f"{type(runner)} is not runner V2")
    engine.collective_rpc("troupe_record_kept_tokens")
    for name, values in REQUESTS.items():
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **values)
        engine.add_request(name, TokensPrompt(prompt_token_ids=PROMPT), params)
    while engine.has_unfinished_requests():
        outputs: list[Any] = engine.step()
        for output in outputs:
            completion = output.outputs[0]
            words, problem = kept_tokens(completion)
            ids = list(completion.token_ids)
            logprobs = [one[token].logprob for one, token in zip(completion.logprobs or [], ids, strict=False) if one]
            row = {"prompt_ids": PROMPT, "response_ids": ids, "rollout_logprobs": logprobs}
            kept = [one.hex() for one in words]
            print(json.dumps(row | {"name": output.request_id, "kept_tokens": kept, "problem": problem}))


if __name__ == "__main__":
    import_engine(Path(sys.argv[1]))
    if not (fork := os.fork()):
        runner_v2_routes.main(Path(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(fork, 0)[1]:
        sys.exit("the fork failed")
    main(Path(sys.argv[1]))
