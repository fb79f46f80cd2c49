"""vLLM's settings for one rollout engine: environment variables and engine arguments."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.config import EngineProcess, RolloutConfig, StructuredConfig
from troupe.workers.contract.config_base import VerifiedModel
from troupe.workers.contract.imports import without_collections
from troupe.workers.contract.model_files import check_model_files
from troupe.workers.contract.trainer_config import ALL_LINEAR, LoraConfig
from troupe.workers.contract.weight_backends import TransferBackend
from troupe.workers.engine.process import (
    FOLDER_VARIABLE,
    OWNER_VARIABLE,
    import_ahead,
    private_shared_memory,
    temporary_folder,
)
from troupe.workers.telemetry.start_activity import Activity, announce

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.metrics.loggers import PrometheusStatLogger

ADAPTER_BACKEND = "troupe_adapter"
"""vLLM's name for the engine of `troupe.workers.weights.vllm_adapter`, which loads adapters."""
ADAPTER_ID = 1
"""vLLM's number for the policy's adapters: an engine has no others."""
_EXTENSION = "troupe.workers.weights.vllm_transfer.EngineExtension"
_ADAPTER_EXTENSION = "troupe.workers.weights.vllm_adapter.AdapterExtension"
_VERIFIED_EXTENSION = "troupe.workers.weights.vllm_verified.VerifiedExtension"
_RECORDING_SCHEDULER = "troupe.workers.engine.kept_tokens.recording_scheduler"
_NO_PATH = "/nowhere/adapters-are-loaded-by-the-weight-update"
"""vLLM looks for an adapter there that it does not have, and the request fails."""
_NO_SHARE = 0.01
_CPU_BLOCK_TOKENS = 32
"""Tokens in one block of the KV cache. Samples of a group share the full blocks of their prompt. The default of vLLM's
CPU build is 128, longer than many prompts; its kernels require multiples of 32."""

_TURN_S = 0.1
"""Time for the event loop to send its answers."""


async def import_vllm(engine: EngineProcess) -> None:
    """Import vLLM in a worker's process, and on the CPU in a fork server beside it."""
    announce(Activity.IMPORT)
    set_environment(engine)
    if engine.device == "cpu":
        import_ahead()
    # The import blocks the event loop: the answer to the previous call must be sent first, by which the
    # node's watch finds this process.
    await asyncio.sleep(_TURN_S)
    with without_collections():
        import vllm.v1.engine.async_llm  # noqa: F401


def set_environment(engine: EngineProcess) -> None:
    """Set the variables that vLLM reads, before its first import. Its processes inherit them, and end with this one."""
    private_shared_memory()
    os.environ |= {OWNER_VARIABLE: str(os.getpid()), FOLDER_VARIABLE: temporary_folder()}
    set_import_environment(engine)


def set_import_environment(engine: EngineProcess) -> None:
    """Set the variables that do not depend on the process; forks of a process that has imported vLLM share them."""
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # A fork of a process with threads and an event loop can deadlock.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONFAULTHANDLER": "1",  # ranks that an engine spawns write where a signal has met them
    }
    for name, value in {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}.items():
        os.environ.setdefault(name, value)
    if engine.device == "cuda":
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the actor's CPUs, and vLLM would keep it
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several actors share the cores
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override `kv_cache_gib`
        if engine.threads:
            os.environ["OMP_NUM_THREADS"] = str(engine.threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        if engine.enforce_eager:
            # Even then vLLM compiles one small function in the first `generate`: it takes seconds and needs a compiler.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"


def engine_args(config: RolloutConfig) -> AsyncEngineArgs:
    """Arguments of vLLM's asynchronous engine for this rollout worker."""
    from vllm.config import StructuredOutputsConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    check_model_files(config.model.path)
    engine = config.engine
    return AsyncEngineArgs(
        model=config.model.path,
        dtype=config.model.dtype,
        load_format="safetensors",  # not the pickles that a folder may hold besides
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed & 0xFFFFFFFF,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        hf_overrides={"head_dtype": "float32"} if config.model.computes_float32_logits else {},
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled: after temperature and top-p
        weight_transfer_config=WeightTransferConfig(
            backend=receiver_name(config.transfer_backend) if config.lora is None else ADAPTER_BACKEND
        ),
        max_logprobs=-1,  # requests ask for what is read
        worker_extension_cls=_extension(config),
        # Without white space between the parts of JSON: a response could consist of it.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
        enable_return_routed_experts=config.sampling.router_replay,
        scheduler_cls=_RECORDING_SCHEDULER if config.sampling.truncates else None,
        enable_log_requests=False,
        use_tqdm_on_load=False,
        disable_log_stats=False,  # the timings of each sample come from them
        **(_device_args(config) | _adapter_args(config.lora) | config.engine_options),
    )


def _extension(config: RolloutConfig) -> str:
    """The class whose methods vLLM adds to the workers of the engine."""
    if isinstance(config.model, VerifiedModel):
        return _VERIFIED_EXTENSION
    return _EXTENSION if config.lora is None else _ADAPTER_EXTENSION


def unread_metrics() -> type[PrometheusStatLogger]:
    """The stat logger of an engine that records nothing. A timed engine also updates some thirty Prometheus metrics
    after every iteration, and one for every token, unless `AsyncLLM` receives other loggers. Imports vLLM."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class UnreadMetrics(PrometheusStatLogger):
        def __init__(self, *_: object, **__: object) -> None:
            """Creates no metric."""

        def record(self, *_: object, **__: object) -> None:
            """Records nothing."""

        record_sleep_state = record_admission_rejection = log_engine_initialized = record

    return UnreadMetrics


def receiver_name(backend: TransferBackend) -> str:
    """vLLM's name for the receiver of a weight-transfer back-end."""
    return f"troupe_{backend}"


def adapter_request(version: int, digest: str) -> LoRARequest:
    """vLLM's reference to the policy's adapters, for every request. The prefix cache identifies adapters by name:
    with one for every version, no request reads what an earlier version has computed."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy-{version}-{digest}", ADAPTER_ID, _NO_PATH)


def _adapter_args(lora: LoraConfig | None) -> dict[str, Any]:
    """Arguments of an engine with adapters. Unless layers are named, vLLM also prepares experts for them."""
    if lora is None:
        return {}
    targets = None if lora.targets == ALL_LINEAR else list(lora.targets)
    arguments = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": lora.reserved_rank}
    return arguments | {"lora_target_modules": targets}


def structured_outputs(config: StructuredConfig | None) -> StructuredOutputsParams | None:
    """vLLM's constraint of one request, which keeps state, or None for any text."""
    if config is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    choice = None if config.choice is None else list(config.choice)
    return StructuredOutputsParams(json=config.json_schema, regex=config.regex, choice=choice, grammar=config.grammar)


def check_structured(config: StructuredConfig | None) -> None:
    """Verify that vLLM understands the form. Raises ValueError."""
    params = structured_outputs(config)
    if params is None:
        return
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=params))
    except (ValueError, VLLMValidationError) as error:
        raise ValueError(f"structured: {error}") from error


def _device_args(config: RolloutConfig) -> dict[str, Any]:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    engine = config.engine
    if config.device == "cuda":
        return {
            # Of a cache whose size is given vLLM still requires this share to be free when it starts. On a shared GPU,
            # the memory free at that time means nothing.
            "gpu_memory_utilization": engine.gpu_share if config.kv_cache_bytes is None else _NO_SHARE,
            # In a placement group vLLM would choose Ray, and wants a bundle for every GPU. An engine's GPUs are on one
            # node and in one bundle.
            "distributed_executor_backend": "mp" if engine.tensor_parallel_size > 1 else "uni",
            "max_num_batched_tokens": engine.gpu_batch_tokens,
            "enable_sleep_mode": config.sleep != "none",
            "kv_cache_memory_bytes": config.kv_cache_bytes,
        }
    args: dict[str, Any] = {
        "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
        # Chunked prefill makes vLLM rewind its sampler's generator. A CPU generator cannot be rewound, and the engine
        # dies. On the CPU prompts are therefore prefilled whole.
        "enable_chunked_prefill": False,
        "block_size": _CPU_BLOCK_TOKENS,
        "max_num_batched_tokens": engine.cpu_batch_tokens,
    }
    if engine.tensor_parallel_size == 1:
        # Run the model in the engine's own process. By default vLLM's CPU build starts another process for it, to set
        # the compute threads there; `set_environment` sets them for all. One process less starts sooner and samples
        # faster.
        args["distributed_executor_backend"] = UniProcExecutor
    return args
