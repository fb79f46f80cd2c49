"""vLLM's own options of an engine (`engine` in `roles.rollout`, `roles.judge`, a teacher): which a spec may set.

Names and types are compared with the installed vLLM (`installed_vllm.py`), which checks the values when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.orchestrator.errors import Finding, nearest
from troupe.workers.contract.config import GPU_BATCH_TOKENS
from troupe.workers.contract.config_base import Device

_ONE_NODE = "an engine has the GPUs of tensor_parallel_size, on one node; set {role}.workers for more engines"
_LORA = "Troupe sets it: set roles.policy.lora to train adapters"
_MODEL = "set {model}.path"
_REVISION = "set {model}.revision"
_CACHE = "set {role}.gpu_memory_utilization (GPU) or {role}.kv_cache_gib (CPU)"
_SLEEP = "set sleep of a role whose engines are on the policy's GPUs"
_SAMPLING = "Troupe sets the parameters of every request: set {sampling}"
_ROUTES = "set {sampling}.router_replay"
_TOKENIZER = "Troupe tokenizes prompts with the tokenizer of {model}"
_STATISTICS = "Troupe sets it: the timings of samples and the run's log depend on it"
_CALLED = "Troupe calls the engine without a server: it has no effect"

_ALWAYS = {
    "model": _MODEL,
    "model_weights": _MODEL,
    "hf_config_path": _MODEL,
    "load_format": "Troupe reads safetensors only; set {model}.path",
    "revision": _REVISION,
    "code_revision": _REVISION,
    "tokenizer_revision": _REVISION,
    "download_dir": "Troupe downloads models itself; set {model}.path",
    "hf_token": "Troupe downloads models itself; set {model}.path",
    "hf_overrides": "Troupe sets it for {model}.float32_head; change config.json in the model's folder",
    "dtype": "set {model}.dtype",
    "trust_remote_code": "set {model}.trust_remote_code",
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "skip_tokenizer_init": _TOKENIZER,
    "runner": "an engine of Troupe generates text",
    "convert": "an engine of Troupe generates text",
    "seed": "set seed",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "structured_outputs_config": "set {sampling}.structured",
    "enable_return_routed_experts": _ROUTES,
    "aux_output_config": _ROUTES,
    "logprobs_mode": "Troupe sets processed_logprobs: those of the distribution that is sampled",
    "max_logprobs": "Troupe sets it: a request asks for as many as are read",
    "kv_cache_memory_bytes": _CACHE,
    "num_gpu_blocks_override": _CACHE,
    "max_num_batched_tokens": f"Troupe sets it, and the memory plan counts on it ({GPU_BATCH_TOKENS} on a GPU)",
    "max_num_queued_reqs": "Troupe bounds the queue of an engine by {role}.max_num_seqs",
    "max_num_queued_tokens": "Troupe bounds the queue of an engine by {role}.max_num_seqs",
    "weight_transfer_config": "set weight_sync.backend",
    "enable_sleep_mode": _SLEEP,
    "sleep_mode_offload_cudagraph": _SLEEP,
    "sleep_preserve_parameter_names": _SLEEP,
    "worker_cls": "Troupe sets the worker, which receives new weights",
    "worker_extension_cls": "Troupe sets the worker, which receives new weights",
    "distributed_executor_backend": "Troupe places engines with Ray; set {role}.tensor_parallel_size and gpus",
    "served_model_name": _CALLED,
    "shutdown_timeout": "Troupe ends the engine with its worker",
    "use_tqdm_on_load": _STATISTICS,
    "disable_log_stats": _STATISTICS,
    "enable_log_requests": _STATISTICS,
    "aggregate_engine_logging": _STATISTICS,
    "pipeline_parallel_size": _ONE_NODE,
    "prefill_context_parallel_size": _ONE_NODE,
    "decode_context_parallel_size": _ONE_NODE,
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "device_ids": "Troupe places engines with Ray; set {role}.gpus, accelerator or node_labels",
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "max_cpu_loras": _LORA,
    "lora_dtype": _LORA,
    "lora_target_modules": _LORA,
    "fully_sharded_loras": _LORA,
    "default_mm_loras": _LORA,
}
"""Options of any engine that Troupe sets, or that cannot work with it, and what to do instead."""
_OWN_FIELDS = frozenset(
    (
        *("tensor_parallel_size", "max_num_seqs", "max_model_len", "enforce_eager", "enable_prefix_caching"),
        "gpu_memory_utilization",
    )
)
"""Options that are fields of the role."""

_QUANTIZED = (
    "engines would round the weights after their digest is verified, and sample from another policy than the one that "
    "is trained; only a judge's engine can be quantized"
)
_ROUNDED = "a rounded cache changes the log-probs of samples, and the trainer computes without it"
_DRAFTS = (
    "untested: a draft model would not get new weights, and log-probs of accepted drafts have not been compared with "
    "the trainer's"
)
_OUTSIDE = "a weight update empties the engine's own cache only: samples would read entries of old weights"
_OFFLOADED = "untested: new weights are written in place, to the device that runs the model"
_EXPERTS = "untested: new weights are loaded by the place of each expert"
_DISTRIBUTION = "changes the distribution that is sampled, which the trainer does not know of"

_ROLLOUT = {
    "quantization": _QUANTIZED,
    "quantization_config": _QUANTIZED,
    "allow_deprecated_quantization": _QUANTIZED,
    "kv_cache_dtype": _ROUNDED,
    "kv_cache_dtype_skip_layers": _ROUNDED,
    "mamba_cache_dtype": _ROUNDED,
    "mamba_ssm_cache_dtype": _ROUNDED,
    "enable_mamba_cache_stochastic_rounding": _ROUNDED,
    "speculative_config": _DRAFTS,
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "kv_transfer_config": _OUTSIDE,
    "kv_offloading_size": _OUTSIDE,
    "kv_offloading_backend": _OUTSIDE,
    "ec_transfer_config": _OUTSIDE,
    "cpu_offload_gb": _OFFLOADED,
    "cpu_offload_params": _OFFLOADED,
    "offload_backend": _OFFLOADED,
    "offload_group_size": _OFFLOADED,
    "offload_num_in_group": _OFFLOADED,
    "offload_params": _OFFLOADED,
    "enable_expert_parallel": _EXPERTS,
    "enable_eplb": _EXPERTS,
    "eplb_config": _EXPERTS,
    "logits_processors": _DISTRIBUTION,
    "watermark_config": _DISTRIBUTION,
    "diffusion_config": _DISTRIBUTION,
}
"""Options that a frozen model may have, but not the policy, whose weights change and whose log-probs are trained on."""
_UNTESTED = (
    "untested with weights that change while the engine runs, and it may sample from another distribution than the one "
    "that is trained"
)
_OF_POLICY = frozenset(
    (
        *("attention_backend", "moe_backend", "linear_backend", "mamba_backend", "gdn_prefill_backend"),
        *("kda_prefill_backend", "kda_decode_backend", "kernel_config", "enable_flashinfer_autotune"),
        *("compilation_config", "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
        *("block_size", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager", "watermark"),
        *("scheduling_policy", "async_scheduling", "stream_interval", "max_num_scheduled_tokens"),
        *("enable_chunked_prefill", "long_prefill_token_threshold", "disable_cascade_attn"),
        *("disable_custom_all_reduce", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
        *("numa_bind", "numa_bind_nodes", "numa_bind_cpus", "max_parallel_loading_workers"),
        *("safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        *("kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics", "enable_mfu_metrics"),
        *("show_hidden_metrics_for_version", "custom_histogram_buckets", "otlp_traces_endpoint"),
        *("collect_detailed_traces", "enable_layerwise_nvtx_tracing", "profiler_config"),
    )
)
"""Options of the policy's engine: how it computes and is observed, not what. All others are refused."""


def refused_options(role: str, options: Mapping[str, Any], device: Device) -> Iterator[Finding]:
    """Options that a spec cannot set, each with the reason or with the field to set instead."""
    for name in options:
        if why := _refusal(name, role, device):
            model, sampling = ("model", "sampling") if role == "rollout" else (f"roles.{role}.model", f"roles.{role}")
            yield f"roles.{role}.engine.{name}", why.format(role=f"roles.{role}", model=model, sampling=sampling)


def engine_option(path: Sequence[str]) -> str:
    """Where an option of vLLM that is written among the fields of an engine's role belongs; empty if unknown."""
    engine = len(path) == 3 and path[0] == "roles" and path[1] in ("rollout", "judge")
    return "vLLM's own options are in 'engine'" if engine and path[2] in {*_ALWAYS, *_ROLLOUT, *_OF_POLICY} else ""


def _refusal(name: str, role: str, device: Device) -> str:
    """Why an option is refused; empty if it is not."""
    if name in _OWN_FIELDS:
        return f"set {{role}}.{name}"
    if name.startswith("data_parallel_"):
        return "each worker has one engine; set {role}.workers"
    if name == "enable_chunked_prefill" and device == "cpu":
        return "Troupe turns it off on the CPU, where vLLM cannot resume a request that has a seed"
    if name in _ALWAYS or role != "rollout" or name in _OF_POLICY:
        return _ALWAYS.get(name, "")
    hint = nearest(name, _OF_POLICY)
    return _ROLLOUT.get(name, f"{_UNTESTED} ({hint})" if hint else _UNTESTED)
