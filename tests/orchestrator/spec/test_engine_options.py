"""vLLM's own options of an engine: those that a spec may set, those that it may not, and why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from troupe.orchestrator.roles.settings import judge_config, rollout_config
from troupe.orchestrator.spec import engine_options, installed_vllm
from troupe.orchestrator.spec.checks.machine import missing
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import EngineConfig
from troupe.workers.isolation.probe import ProbeFailed

SPEC = """\
name: options
model: {path: models/m}
roles:
  rollout: {}
  policy: {}
  judge: {model: {path: models/judge}, max_model_len: 2048}
  reward: {functions: [{name: judge}]}
algorithm: {name: grpo}
schedule: {steps: 5, prompts_per_step: 8}
data: {train: {kind: jsonl, path: train.jsonl}}
"""
GPU = ("roles.rollout.gpus=1", "roles.policy.gpus=1", "roles.judge.gpus=1")
CACHELESS = "roles.rollout.enable_prefix_caching=false"
FIRST = "roles.rollout.engine"
JUDGE = "roles.judge.engine"


def installed_options() -> Mapping[str, tuple[str, ...]]:
    offers = vars(installed_vllm)["_offers"]()
    assert offers is not None
    return offers.options


def load(folder: Path, *overrides: str) -> RolloutSpec:
    path = folder / "spec.yaml"
    path.write_text(SPEC)
    return load_rollout_spec(path, overrides)


def test_options_reach_the_configurations_of_engine_and_judge(tmp_path: Path) -> None:
    own = "{scheduling_policy: priority, stream_interval: 3}"
    spec = load(tmp_path, f"{FIRST}={own}", f"{JUDGE}={{quantization: fp8}}")
    assert rollout_config(spec).engine_options == {"scheduling_policy": "priority", "stream_interval": 3}
    judge = judge_config(spec)
    assert judge is not None
    assert judge.engine_options == {"quantization": "fp8"}


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (FIRST, "{model: other}", f"{FIRST}.model: set model.path"),
        (JUDGE, "{model: other}", f"{JUDGE}.model: set roles.judge.model.path"),
        (FIRST, "{max_model_len: 4096}", f"{FIRST}.max_model_len: set roles.rollout.max_model_len"),
        (JUDGE, "{max_num_seqs: 4}", f"{JUDGE}.max_num_seqs: set roles.judge.max_num_seqs"),
        (FIRST, "{data_parallel_size: 2}", "each worker has one engine; set roles.rollout.workers"),
        (JUDGE, "{data_parallel_rank: 1}", "each worker has one engine; set roles.judge.workers"),
        (FIRST, "{pipeline_parallel_size: 2}", "set roles.rollout.workers for more engines"),
        (FIRST, "{quantization: fp8}", "only a judge's engine can be quantized"),
        (FIRST, "{kv_cache_dtype: fp8}", "a rounded cache changes the log-probs of samples"),
        (FIRST, "{speculative_config: {method: ngram}}", "log-probs of accepted drafts have not been compared"),
        (FIRST, "{kv_offloading_size: 4}", "samples would read entries of old weights"),
        (FIRST, "{logprobs_mode: raw_logprobs}", "those of the distribution that is sampled"),
        (FIRST, "{weight_transfer_config: {backend: nccl}}", "set weight_sync.backend"),
        (FIRST, "{enable_sleep_mode: true}", "set sleep of a role"),
        (FIRST, "{enable_return_routed_experts: true}", "set sampling.router_replay"),
        (FIRST, "{enable_lora: true}", "set roles.policy.lora to train adapters"),
        (FIRST, "{enable_chunked_prefill: true}", "Troupe turns it off on the CPU"),
        (JUDGE, "{generation_config: vllm}", "set roles.judge"),
        (FIRST, "{shceduling_policy: priority}", "than the one that is trained (did you mean 'scheduling_policy'?)"),
        (FIRST, "priority", f"{FIRST}: expected a section, got 'priority'"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_the_reason(
    field: str, value: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, f"{field}={value}")
    (line,) = str(caught.value).splitlines()
    assert why in line


def test_experts_are_recorded_by_engines_on_gpus_with_a_prefix_cache(tmp_path: Path) -> None:
    replays = "sampling.router_replay=true"
    for overrides, field in (((), "sampling.router_replay"), ((*GPU, CACHELESS), CACHELESS.split("=")[0])):
        with pytest.raises(SpecError, match=f"{field}: .*vLLM (does not record|records) the experts"):
            load(tmp_path, *overrides, replays)
    assert rollout_config(load(tmp_path, *GPU, replays)).sampling.router_replay


def test_a_frozen_model_may_round_and_draft_and_a_gpu_may_cut_prompts(tmp_path: Path) -> None:
    free = "{kv_cache_dtype: fp8, speculative_config: {method: ngram}, enable_chunked_prefill: false}"
    spec = load(tmp_path, *GPU, f"{JUDGE}={free}", f"{FIRST}={{enable_chunked_prefill: false}}")
    assert spec.roles.rollout.engine == {"enable_chunked_prefill": False}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scheduling_policy": "priority", "block_size": 64, "attention_config": {}}, ()),
        ({"watermark": 1}, ()),
        ({"block_size": None}, ()),
        (
            {"shceduling_policy": "priority"},
            ("shceduling_policy: the installed vLLM has no such engine option (did you mean 'scheduling_policy'?)",),
        ),
        ({"nonsense": 1}, ("nonsense: the installed vLLM has no such engine option (see the engine arguments of",)),
        ({"block_size": "64"}, ("block_size: expected a whole number, got '64'",)),
        ({"block_size": True}, ("block_size: expected a whole number, got True",)),
        ({"use_fp64_gumbel": 1}, ("use_fp64_gumbel: expected true or false, got 1",)),
    ],
)
def test_names_and_simple_types_are_those_of_the_installed_vllm(
    options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    found = [f"{path}: {message}" for path, message in installed_vllm.unknown_options({"rollout": options})]
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(f"{FIRST}.{start}")


def test_the_files_check_of_a_spec_includes_its_options(tmp_path: Path) -> None:
    spec = load(tmp_path, f"{JUDGE}={{block_sise: 64}}")
    assert f"{JUDGE}.block_sise" in dict(missing(spec))


def test_every_refused_option_is_one_of_vllm_and_no_reason_is_left_open() -> None:
    known = installed_options()
    refused = {*vars(engine_options)["_ALWAYS"], *vars(engine_options)["_ROLLOUT"]}
    own = vars(engine_options)["_OWN_FIELDS"]
    assert len(known) > 100
    assert refused | own <= known.keys()
    assert own <= EngineConfig.model_fields.keys()
    for role in ("rollout", "judge"):
        for _, why in engine_options.refused_options(role, dict.fromkeys(refused), "cpu"):
            assert "{" not in why


def test_the_check_does_not_import_vllm() -> None:
    code = (
        "import sys; from troupe.orchestrator.spec.installed_vllm import unknown_options;"
        "assert list(unknown_options({'rollout': {'block_sise': 1}}));"
        "assert not {'vllm', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_answer_of_vllm_is_kept_by_version_and_asked_for_again_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(entry: str, *_: object) -> list[Any]:
        asked.append(entry)
        return [{"options": {"block_size": ["int"]}, "parsers": {"hermes": True}}]

    monkeypatch.setattr(installed_vllm, "ask", ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh = vars(installed_vllm)["_offers"].__wrapped__
    first = fresh()
    (kept,) = (tmp_path / "troupe").iterdir()
    assert kept.name.startswith("vllm") and kept.suffix == ".json"
    assert fresh() == first and len(asked) == 1
    kept.write_text('{"options": []}')
    assert fresh() == first and len(asked) == 2


@pytest.mark.parametrize("reply", [ProbeFailed("its process ended", []), [{"renamed": {}}]])
def test_a_vllm_that_gives_no_answer_is_reported(
    reply: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(*_: object) -> list[Any]:
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(installed_vllm, "ask", ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert vars(installed_vllm)["_offers"].__wrapped__() is None
    assert "does not tell its engine options and tool parsers, which stay unchecked" in caplog.text


def test_a_policys_engine_takes_only_options_that_are_known_to_change_no_distribution(tmp_path: Path) -> None:
    """Also those of a later vLLM are refused until someone has looked at them; a judge's frozen model may have them."""
    known = installed_options()
    assert known.keys() >= engine_options._OF_POLICY
    free = {name for name in known if not [*engine_options.refused_options("rollout", {name: 1}, "cuda")]}
    assert free == engine_options._OF_POLICY
    for name in ("disable_sliding_window", "model_impl", "scheduler_cls", "kv_sharing_fast_prefill"):
        ((path, why),) = engine_options.refused_options("rollout", {name: 1}, "cuda")
        assert path == f"roles.rollout.engine.{name}" and why.startswith("untested with weights that change")
        assert not [*engine_options.refused_options("judge", {name: 1}, "cuda")]
    with pytest.raises(SpecError, match=r"roles\.rollout\.engine\.model_impl: untested"):
        load(tmp_path, f"{FIRST}.model_impl=transformers")
