"""A first spec: valid and planned for every algorithm, commented, and refused where it cannot be written."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import ROOT
from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.table import ALGORITHMS, TAUGHT
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.errors import DoesNotFit, UsageError
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.plan.plan import plan_stages
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.sections import ScheduleConfig
from troupe.orchestrator.starter.choices import Choices, Earned, check_algorithm, environment_section
from troupe.orchestrator.starter.command import InitFlags, complete, text_of, write
from troupe.orchestrator.starter.data import read_data
from troupe.orchestrator.starter.sizing import (
    cluster,
    fitting_document,
    learning_rate,
    nodes,
    response_tokens,
)

DATA = ROOT / "deploy" / "specs" / "data"
ONLINE = sorted(set(ALGORITHMS) - TAUGHT)


def chosen(model: Path, **changes: Any) -> Choices:
    return Choices(**({"model": str(model), "data": "reasoning_gym:chain_sum", "cpus": 2} | changes))


def llama(folder: Path, hidden: int, layers: int, intermediate: int) -> Path:
    """A model folder of which only the size is real: its weights are a header without data."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    config = shape | {"model_type": "llama", "num_attention_heads": hidden // 128, "vocab_size": 128_256}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"model.embed_tokens.weight": 128_256 * hidden, "lm_head.weight": 128_256 * hidden}
    for layer in range(layers):
        tensors[f"model.layers.{layer}.weight"] = hidden * (5 * hidden // 2 + 3 * intermediate)
    header = json.dumps({name: {"shape": [count]} for name, count in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def check(text: str, path: Path, choices: Choices) -> Mapping[str, Any]:
    """The written file, after what `troupe validate` and `troupe plan` do with it."""
    path.write_text(text)
    runs = plan_runs(read_document(path))
    assert [problem for run in runs for problem in run.missing()] == []
    assert [plan.misfit for _, plan in plan_stages(runs, nodes(choices))] == [""]
    return yaml.safe_load(text)


@pytest.mark.parametrize("algorithm", ONLINE)
def test_every_algorithm_on_rollouts_gets_a_spec_that_is_valid_and_fits(
    algorithm: str, tiny_model: Path, tmp_path: Path
) -> None:
    choices = chosen(tiny_model, algorithm=algorithm)
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert ("critic" in document["roles"]) == ("critic" in ALGORITHMS[algorithm].required)
    assert sum(role.get("cpus", 0) * role.get("workers", 1) for role in document["roles"].values()) <= 2


@pytest.mark.parametrize("algorithm", [name for name, row in OFFLINE_ALGORITHMS.items() if not row.teacher])
def test_every_offline_algorithm_gets_a_spec_that_is_valid_and_fits(
    algorithm: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = DATA / f"{OFFLINE_ALGORITHMS[algorithm].formats[0]}-train.jsonl"
    choices = chosen(tiny_model, algorithm=algorithm, data=str(file))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert set(document["roles"]) == {"policy", *(["reference"] if OFFLINE_ALGORITHMS[algorithm].reference else [])}


@pytest.mark.parametrize(
    ("gpus", "algorithm", "workers"),
    [
        (8, "grpo", {"rollout": 6, "policy": 2}),
        (8, "ppo", {"rollout": 4, "policy": 2, "critic": 2}),
        (8, "trpo", {"rollout": 4, "policy": 2, "critic": 2}),
        (2, "grpo", {"rollout": 1, "policy": 1}),
        (2, "ppo", {"rollout": 1, "policy": 1, "critic": 1}),
        (1, "grpo", {"rollout": 1, "policy": 1}),
        (8, "sft", {"policy": 8}),
    ],
)
def test_the_gpus_are_divided_and_none_is_left_over(
    gpus: int, algorithm: str, workers: dict[str, int], tmp_path: Path
) -> None:
    model = llama(tmp_path / "model", 1024, 16, 4096)
    data = str(DATA / "demonstrations-train.jsonl") if algorithm == "sft" else "reasoning_gym:chain_sum"
    choices = chosen(model, algorithm=algorithm, gpus=gpus, gpu_type="H100", cpus=128, data=data)
    check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    roles = plan_runs(read_document(tmp_path / "run.yaml"))[0].spec.roles.present()
    assert {name: role.workers for name, role in roles.items() if role.gpus} == workers
    assert sum(role.gpus * role.workers for role in roles.values()) == gpus


def qwen(folder: Path, hidden: int, layers: int, intermediate: int, key_heads: int) -> Path:
    """A Qwen2.5, with tied embeddings, of which only the size is real."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    heads = {"num_attention_heads": 2 * hidden // 128, "num_key_value_heads": key_heads}
    config = shape | heads | {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    (folder / "tokenizer.json").write_text("{}")
    attention = 2 * hidden * hidden + 2 * hidden * key_heads * 64
    tensors = {f"model.layers.{n}.weight": attention + 3 * hidden * intermediate for n in range(layers)}
    tensors["model.embed_tokens.weight"] = 151_936 * hidden
    header = json.dumps({name: {"shape": [count]} for name, count in tensors.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.mark.parametrize("gpu", ["RTX4090", "L4"])
@pytest.mark.parametrize(
    ("hidden", "layers", "intermediate", "offloads"), [(896, 24, 4864, False), (1536, 28, 8960, True)]
)
def test_one_gpu_of_24_gib_trains_and_samples_a_small_model_in_turn(
    hidden: int, layers: int, intermediate: int, offloads: bool, gpu: str, tmp_path: Path
) -> None:
    """Qwen2.5 of 0.5B and of 1.5B; what the spec leaves open is filled in, and `troupe plan` leaves a tenth free."""
    choices = chosen(qwen(tmp_path / "model", hidden, layers, intermediate, 2), gpus=1, gpu_type=gpu, cpus=16)
    written = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]
    assert written["rollout"].items() >= {"colocate_with": "policy", "sleep": "kv_cache"}.items()
    assert not {"gpus", "gpu_memory_utilization"} & written["rollout"].keys()
    assert written["policy"].get("offload_optimizer", False) is offloads
    runs = plan_runs(read_document(tmp_path / "run.yaml"))
    ((_, plan),) = plan_stages(runs, nodes(choices))
    (use,) = plan.memory.shared
    assert plan.memory.warnings == () and use.most <= 0.9 * use.capacity
    assert plan.memory.caches["rollout-0"].sequences > 100


def test_a_model_that_does_not_fit_one_gpu_names_one_that_would_do(tmp_path: Path) -> None:
    choices = chosen(qwen(tmp_path / "model", 3584, 28, 18944, 4), gpus=1, gpu_type="RTX4090", cpus=16)
    with pytest.raises(DoesNotFit, match=r"does not fit this machine: .*; it fits 1 (A100-40G|L40S)"):
        fitting_document(choices, read_data(choices))


def test_a_larger_model_gets_the_settings_that_make_it_fit(tmp_path: Path) -> None:
    """An 8B model: two engines' worth of GPUs hold it, one trainer alone does not."""
    model = llama(tmp_path / "model", 4096, 32, 14336)
    assert 7e9 < read_size(model).parameters < 9e9
    choices = chosen(model, gpus=8, gpu_type="H100", cpus=128)
    policy = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]["policy"]
    assert policy["zero_stage"] > 1 and policy["workers"] > 1
    with pytest.raises(DoesNotFit, match=r"does not fit this machine: .*GiB"):
        fitting_document(single := chosen(model, gpus=1, gpu_type="L4", cpus=16), read_data(single))


def test_the_fastest_layout_that_leaves_memory_free_is_written(tmp_path: Path) -> None:
    """A 32B model on 8 GPUs: engines of one GPU each fit, have no room for a cache, and are half as fast."""
    choices = chosen(llama(tmp_path / "model", 5120, 64, 27648), gpus=8, gpu_type="H100", cpus=128)
    written = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]
    assert written["rollout"]["tensor_parallel_size"] > 1
    single = ("roles.rollout.tensor_parallel_size=1", "roles.rollout.gpus=1", "roles.rollout.workers=4")
    speeds: list[float] = []
    for changes in ((), (*single, "roles.policy.workers=4")):
        runs = plan_runs(read_document(tmp_path / "run.yaml", list(changes)))
        ((_, found),) = plan_stages(runs, nodes(choices))
        assert found.predicted is not None and found.memory.warnings == ()
        speeds.append(found.predicted.tokens_per_gpu)
    assert speeds[0] > 1.5 * speeds[1]


def test_zero_2_comes_before_zero_3_and_recomputation(tmp_path: Path) -> None:
    """An 8B model on 4 of 8 GPUs of 140 GiB: gradients must be divided, weights need not."""
    choices = chosen(llama(tmp_path / "model", 4096, 32, 14336), gpus=8, gpu_type="H200", cpus=128)
    policy = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]["policy"]
    assert policy["zero_stage"] == 2 and "gradient_checkpointing" not in policy


def test_products_are_kept_where_that_fits_and_is_faster(tmp_path: Path) -> None:
    """An 8B model on one GPU needs recomputation, but not of products, even if its rows are longer then."""
    choices = chosen(llama(tmp_path / "model", 4096, 32, 14336), gpus=1, gpu_type="H100", cpus=128)
    policy = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["roles"]["policy"]
    assert policy["gradient_checkpointing"] is True and policy["recompute_products"] is False
    speeds: list[float] = []
    for changes in ((), ("roles.policy.recompute_products=true", "roles.policy.micro_batch_tokens=16384")):
        ((_, found),) = plan_stages(plan_runs(read_document(tmp_path / "run.yaml", list(changes))), nodes(choices))
        assert found.predicted is not None
        speeds.append(found.predicted.tokens_per_gpu)
    assert speeds[0] > speeds[1]


@pytest.mark.parametrize(("gpus", "described"), [(6, "1x6xH100"), (8, "1x8xH100"), (32, "4x8xH100"), (12, "1x12xH100")])
def test_more_than_eight_gpus_are_nodes_of_eight(gpus: int, described: str, tmp_path: Path) -> None:
    """28 heads: 8 GPUs cannot share the model, and no layout has them do it."""
    choices = chosen(qwen(tmp_path / "model", 1792, 28, 8960, 4), gpus=gpus, gpu_type="H100", cpus=128)
    assert cluster(choices) == described
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["schedule"]["prompts_per_step"] == 64 * max(1, gpus // 8)


@pytest.mark.parametrize(("algorithm", "rate"), [("sft", 1e-4), ("grpo", 1e-5)])
def test_where_all_weights_do_not_fit_the_spec_trains_adapters(algorithm: str, rate: float, tmp_path: Path) -> None:
    """Training in bfloat16 on a CPU takes 20 bytes for each weight, or 2 with adapters, and an engine 2."""
    layers = psutil.virtual_memory().total // 12 // 232_000_000
    model = llama(tmp_path / "model", 4096, layers, 14336)
    data = "reasoning_gym:chain_sum" if algorithm == "grpo" else str(DATA / "demonstrations-train.jsonl")
    choices = chosen(model, algorithm=algorithm, data=data)
    text = text_of(choices, tmp_path / "run.yaml")
    policy = check(text, tmp_path / "run.yaml", choices)["roles"]["policy"]
    assert policy["lora"] == {"rank": 16, "alpha": 32}
    assert policy["learning_rate"] == pytest.approx(rate)
    assert "# All weights do not fit this machine in training: the spec trains adapters" in text
    small = chosen(llama(tmp_path / "small", 512, 2, 1024), algorithm=algorithm, data=data)
    assert "lora" not in check(text_of(small, tmp_path / "x.yaml"), tmp_path / "x.yaml", small)["roles"]["policy"]


@pytest.mark.parametrize("fast", [False, True])
def test_a_spec_for_cpus_has_the_dtype_that_they_multiply_faster(
    fast: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sizing", "command"):
        monkeypatch.setattr(f"troupe.orchestrator.starter.{module}.has_fast_bfloat16", lambda: fast)
    choices = chosen(tiny_model)
    text = text_of(choices, tmp_path / "run.yaml")
    document = check(text, tmp_path / "run.yaml", choices)
    assert document["model"]["dtype"] == ("bfloat16" if fast else "float32")
    assert ("# bfloat16: this processor has instructions" in text) is fast


def test_on_one_gpu_adapters_train_beside_the_engine(tmp_path: Path) -> None:
    choices = chosen(llama(tmp_path / "model", 5120, 26, 13824), gpus=1, gpu_type="A100-40G", cpus=16)
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["roles"]["policy"]["lora"] == {"rank": 16, "alpha": 32}
    assert document["roles"]["rollout"]["colocate_with"] == "policy"


@pytest.mark.parametrize("latent", [False, True])
def test_in_a_model_with_experts_only_attention_has_adapters(latent: bool, tmp_path: Path) -> None:
    """Latent attention has layers of other names."""
    model = llama(tmp_path / "model", 5120, 26, 13824)
    config = json.loads((model / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1728}
    if latent:
        config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    (model / "config.json").write_text(json.dumps(config))
    choices = chosen(model, gpus=1, gpu_type="A100-40G", cpus=16)
    if latent:
        with pytest.raises(DoesNotFit):
            fitting_document(choices, read_data(choices))
        return
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["roles"]["policy"]["lora"]["targets"] == ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(("algorithm", "other"), [("ppo", "critic"), ("xpo", "an engine of the reference")])
def test_an_algorithm_with_a_third_model_of_its_own_needs_two_gpus(
    algorithm: str, other: str, tiny_model: Path, tmp_path: Path
) -> None:
    choices = chosen(tiny_model, algorithm=algorithm, gpus=1)
    message = f"--gpus: {algorithm} needs at least 2 GPUs: policy and {other} have one each"
    with pytest.raises(UsageError, match=re.escape(message)):
        fitting_document(choices, read_data(choices))
    two = replace(choices, gpus=2, gpu_type="H100", cpus=16)
    roles = check(text_of(two, tmp_path / "run.yaml"), tmp_path / "run.yaml", two)["roles"]
    assert {"critic", "reference_engine"} & roles.keys() == {"critic" if algorithm == "ppo" else "reference_engine"}


@pytest.mark.parametrize(
    ("layers", "algorithm", "rate"),
    [
        (10, "grpo", {"learning_rate": 3e-5, "schedule": "linear"}),
        (60, "grpo", {"learning_rate": 1e-5}),
        (250, "grpo", {"learning_rate": 1e-6}),
        (10, "dpo", {"learning_rate": 5e-6}),
        (250, "sft", {"learning_rate": 1e-5}),
    ],
)
def test_a_smaller_model_takes_a_higher_learning_rate(
    layers: int, algorithm: str, rate: dict[str, Any], tmp_path: Path
) -> None:
    model = llama(tmp_path / "model", hidden=576, layers=layers, intermediate=1536)
    assert learning_rate(chosen(model, algorithm=algorithm)) == rate


def test_every_field_has_a_comment(tiny_model: Path, tmp_path: Path) -> None:
    lines = text_of(chosen(tiny_model), tmp_path / "run.yaml").splitlines()
    fields = [index for index, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")]
    assert len(fields) > 30
    assert [lines[i] for i in fields if "# " not in lines[i] and not lines[i - 1].lstrip().startswith("# ")] == []


def test_columns_are_found_under_their_usual_names(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2 + 2?", "solution": "4"}\n{"question": "Half of 9?", "solution": "4.5"}\n')
    choices = chosen(tiny_model, data=str(file))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["data"]["train"] | {"path": ""} == {
        "kind": "jsonl",
        "path": "",
        "prompt": "question",
        "answer": "solution",
    }
    assert document["roles"]["reward"]["functions"] == [{"name": "last_number"}]
    file.write_text('{"prompt": "Capital of France?", "answer": "Paris"}\n')
    assert read_data(choices).reward == Earned("choice", 1, 1)


GSM8K = {"question": "Two and two?", "answer": "Two and two are 2 + 2 = 4.\n#### 4"}
BOXED = "{prompt}\n\nPut the final answer in \\boxed{}."
MATH = {"problem": "Half?", "level": "Level 1", "solution": r"It is $\boxed{\frac{1}{2}}$."}
VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "Two and two?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0, "answer": "2 + 2 = 4"},
}
OPENRLHF = {"input": "Capital of France?", "label": "Paris"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}
TRL_CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
TRL_PAIR = {name: [TRL_CHAT["messages"][0], {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}


@pytest.mark.parametrize(
    ("row", "algorithm", "columns", "reward"),
    [
        (GSM8K, "grpo", {"prompt": "question"}, "last_number"),
        (MATH, "grpo", {"prompt": "problem", "answer": "solution", "template": BOXED}, "numeric"),
        (VERL, "grpo", {"answer": "reward_model.ground_truth"}, "last_number"),
        (OPENRLHF, "grpo", {"prompt": "input", "answer": "label"}, "choice"),
        (SHAREGPT, "sft", {"messages": "conversations"}, None),
        (TRL_CHAT, "sft", {"messages": "messages"}, None),
        (TRL_PAIR, "dpo", {"prompt": None}, None),
    ],
)
def test_rows_of_other_libraries_are_read_as_they_are(
    row: dict[str, Any], algorithm: str, columns: dict[str, Any], reward: str | None, tiny_model: Path, tmp_path: Path
) -> None:
    """The spec is written, its data are loaded by the run's own readers, and their answers earn the reward."""
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "train.parquet")
    choices = chosen(tiny_model, algorithm=algorithm, data=str(tmp_path / "train.parquet"))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    section = document["data"]["train"]
    assert {name: value for name, value in section.items() if name not in {"kind", "path"}} == columns
    spec = plan_runs(read_document(tmp_path / "run.yaml"))[0].spec
    assert load_data(spec).pools["train"].rows == 4
    if reward is not None:
        assert document["roles"]["reward"]["functions"] == [{"name": reward}]
        assert f"# Reward: {reward}: 4 of 4 answers of the data earn 1." in (tmp_path / "run.yaml").read_text()


ALPACA = {"instruction": "Translate", "input": "one", "output": "un", "text": "Below is ..."}
DOLLY = {"instruction": "Who?", "context": "It was X.", "response": "X", "category": "qa"}
MMLU = {"question": "Which?", "choices": ["a", "b"], "answer": "a"}


@pytest.mark.parametrize(
    ("row", "algorithm", "unused"),
    [
        (ALPACA, "sft", "input"),
        (ALPACA | {"input": ""}, "sft", ""),
        (DOLLY, "sft", "context"),
        (MMLU, "grpo", "choices"),
        (GSM8K | {"tools": None, "system": "Be brief.", "image": "x"}, "grpo", "image"),
        (TRL_CHAT | {"system": ["Be brief."], "input": "Hello"}, "sft", "system"),
        (VERL | {"question": "1 + 1?"}, "grpo", ""),
    ],
)
def test_a_column_that_looks_like_a_part_of_the_prompt_is_not_left_out_without_a_word(
    row: dict[str, Any], algorithm: str, unused: str, tiny_model: Path, tmp_path: Path
) -> None:
    pq.write_table(pa.Table.from_pylist([row] * 4), tmp_path / "train.parquet")
    said: list[str] = []
    choices = chosen(tiny_model, algorithm=algorithm, data=str(tmp_path / "train.parquet"))
    text = text_of(choices, tmp_path / "run.yaml", said.append)
    note = f"Not used: {unused}. If the prompt needs more, join it into one column."
    assert [line for line in said if not line.startswith("Columns that")] == ([note] if unused else [])
    assert text.count("Not used:") == text.count(f"\n# {note}\n") == bool(unused)
    check(text, tmp_path / "run.yaml", choices)


def test_what_is_held_out_is_found_beside_the_data_or_the_spec_says_why_not(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]
    for name in ("train-0.csv", "train-1.csv", "test-0.csv", "test-1.csv", "other.csv"):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(rows if name.startswith("train") else [{"prompt": "9 + 9?", "answer": "18"}])
    choices = chosen(tiny_model, data=str(tmp_path / "train-*.csv"))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["data"]["eval"] == {"kind": "csv", "path": str(tmp_path / "test-*.csv")}
    assert document["evaluation"]["every_steps"]
    pools = load_data(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec).pools
    assert {name: pool.rows for name, pool in pools.items()} == {"train": 16, "eval": 2}
    other = text_of(chosen(tiny_model, data=str(tmp_path / "other.csv")), tmp_path / "run.yaml")
    assert (
        "# No evaluation: no file beside other.csv is its held-out part, as test.csv beside train.csv (data.eval)."
        in other
    )


def test_a_folder_of_datasets_and_its_splits_are_found(tiny_model: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([GSM8K] * 3)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "gsm"))
    choices = chosen(tiny_model, data=str(tmp_path / "gsm"))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    source = {"kind": "datasets", "path": str(tmp_path / "gsm"), "prompt": "question"}
    assert document["data"] == {"train": source | {"split": "train"}, "eval": source | {"split": "validation"}}


def test_a_held_out_split_is_evaluated_on_with_the_template_of_the_training_data(
    tiny_model: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"question": f"{n} guests share a cake. How much is a share?", "answer": f"\\frac{{1}}{{{n}}}"}
        for n in range(2, 32)
    ]
    parts = {"train": datasets.Dataset.from_list(rows[:20]), "test": datasets.Dataset.from_list(rows[20:])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "cakes"))
    choices = chosen(tiny_model, data=str(tmp_path / "cakes"))
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    data = document["data"]
    assert "\n" in data["train"]["template"] and data["eval"] == data["train"] | {"split": "test"}


OWN = """\
from troupe.environments import Environment, Message, Observation, Row


class Once(Environment):
    def start(self, row: Row) -> Observation:
        return Observation(row.messages)

    def step(self, message: Message) -> Observation:
        return Observation(reward=1.0, done=True)
"""


@pytest.mark.parametrize(
    ("environment", "section", "reward"),
    [
        ("guess_number", {}, "environment"),
        ("retry", {"args": {"function": "last_number", "attempts": 2}}, "environment"),
        (
            "tools",
            {"args": {"tools": ["calculator"], "function": "last_number"}, "tool_parser": "hermes"},
            "environment",
        ),
        ("single_turn", {}, "last_number"),
        ("my_games:Once", {}, "environment"),
    ],
)
def test_an_environment_gets_a_spec_with_turns(
    environment: str,
    section: dict[str, Any],
    reward: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_games.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    monkeypatch.chdir(tmp_path)
    choices = chosen(tiny_model, data="rows.jsonl", environment=environment)
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["roles"]["environment"].items() >= ({"name": environment, "max_turns": 4} | section).items()
    assert document["roles"]["reward"]["functions"] == [{"name": reward}]
    assert document["roles"]["rollout"]["max_model_len"] == 128 + 4 * 2 * 64
    assert sum(role.get("cpus", 0) * role.get("workers", 1) for role in document["roles"].values()) <= 2
    assert "troupe env check" in (tmp_path / "run.yaml").read_text()


def test_an_environment_that_gives_the_reward_needs_no_answers(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Play."}\n')
    choices = chosen(tiny_model, data=str(tmp_path / "rows.jsonl"), environment="guess_number", gpus=1, cpus=16)
    document = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)
    assert document["data"]["train"]["answer"] is None
    assert document["sampling"]["max_tokens"] == 512
    with pytest.raises(UsageError, match="has no column with the answer"):
        read_data(replace(choices, environment="retry"))


def test_rows_of_an_environments_own_tasks_name_them(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "index": 0, "task": "ab"}\n')
    args = {"taskset": "glossary"}
    choices = chosen(tiny_model, data=str(tmp_path / "rows.jsonl"), environment="verifiers", environment_args=args)
    data = read_data(choices)
    assert data.section["train"]["metadata"] == ["index", "task"]
    assert (response_tokens(choices), response_tokens(replace(choices, max_tokens=64))) == (256, 64), (
        "a call with a thought"
    )
    section = environment_section(choices, data)
    assert (section["name"], section["args"], section["episodes"]) == ("verifiers", args, 8)
    assert (
        section["turn_timeout_s"]
        < section["episode_timeout_s"]
        < 600
        == ScheduleConfig.model_fields["generate_timeout_s"].default
    )


def test_a_simulated_user_is_judged_by_the_model_that_plays_it(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "You want shoes."}\n')
    endpoint = {"url": "http://localhost:1/v1", "model": "m", "api_key_variable": "USER_KEY"}
    inner = {"name": "tools", "args": {"tools": ["calculator"], "function": "last_number"}}
    choices = chosen(tiny_model, data=str(tmp_path / "rows.jsonl"), environment="user_simulator")
    with pytest.raises(UsageError, match="--args: name the user's model"):
        text_of(choices, tmp_path / "run.yaml")
    for args, reward in (({}, "judge"), ({"environment": inner}, "environment")):
        asked = replace(choices, environment_args={"endpoint": endpoint, **args})
        roles = check(text_of(asked, tmp_path / "run.yaml"), tmp_path / "run.yaml", asked)["roles"]
        (function,) = roles["reward"]["functions"]
        assert (function["name"], roles["environment"]["env"], "players" in roles["environment"]) == (
            *(reward, ["USER_KEY"], False),
        )
        assert reward != "judge" or (function["args"]["endpoint"], function["env"]) == (endpoint, ["USER_KEY"])


@pytest.mark.parametrize(
    ("environment", "algorithm", "error"),
    [
        ("gues_number", "grpo", "did you mean 'guess_number'"),
        ("games", "grpo", "built in: agent, guess_number, .*verifiers; your own: package.module:Class"),
        ("verifiers", "grpo", "verifiers needs arguments: --args"),
        ("guess_number", "dpo", "learns from examples and plays no episodes"),
    ],
)
def test_an_environment_without_a_first_spec_is_refused(environment: str, algorithm: str, error: str) -> None:
    flags = InitFlags(model="m", data="rows.jsonl", algorithm=algorithm, gpus=0, environment=environment)
    with pytest.raises(UsageError, match=rf"^--environment: .*{error}"):
        complete(flags, None)


def test_an_environment_that_cannot_be_imported_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"troupe init: roles\.environment\.name: .*no_such_module"):
        text_of(chosen(tiny_model, environment="no_such_module:Game"), tmp_path / "run.yaml")


def test_a_column_without_answers_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": ""}\n{"prompt": "?", "answer": null}\n')
    with pytest.raises(UsageError, match="--data: the column with the answer is empty"):
        read_data(chosen(tiny_model, data=str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize(
    ("algorithm", "row", "named"),
    [
        ("grpo", {"q": "2 + 3?", "ans": "5"}, {"prompt": "q", "answer": "ans"}),
        ("grpo", {"prompt": "2 + 3?", "answer": "about five", "gt": "5"}, {"answer": "gt"}),
        ("sft", {"q": "2 + 3?", "a": "It is 5."}, {"prompt": "q", "response": "a"}),
        ("dpo", {"q": "2 + 3?", "good": "5", "bad": "6"}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
    ],
)
def test_columns_that_nobody_guesses_are_named(
    algorithm: str, row: dict[str, str], named: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    choices = chosen(tiny_model, algorithm=algorithm, data=str(tmp_path / "rows.jsonl"), columns=named)
    train = check(text_of(choices, tmp_path / "run.yaml"), tmp_path / "run.yaml", choices)["data"]["train"]
    assert {field: train[field] for field in named} == named


def test_a_held_out_split_without_a_column_of_the_training_data_is_not_evaluated_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    parts = {"train": rows, "test": [{"prompt": "2 + 3?"}]}
    splits = {name: datasets.Dataset.from_list(own) for name, own in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "sums"))
    data = read_data(chosen(tiny_model, data=str(tmp_path / "sums")))
    assert "eval" not in data.section and data.without_evaluation == "the held-out part has no column answer"


def test_generated_tasks_have_no_columns_to_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--column: generated tasks have no columns"):
        read_data(chosen(tmp_path, columns={"prompt": "q"}))


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"anwser": "ans"}, "--column: no field 'anwser' (did you mean 'answer'?)"),
        ({"answer": "nas"}, "--column: the data have no column 'nas' (they have: q, ans)"),
    ],
)
def test_a_field_or_a_column_that_is_not_there_is_refused(named: dict[str, str], error: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "2 + 3?", "ans": "5"}\n')
    with pytest.raises(UsageError) as refused:
        read_data(chosen(tmp_path, data=str(tmp_path / "rows.jsonl"), columns=named))
    assert str(refused.value) == error


def test_rows_without_an_answer_are_counted_and_too_many_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    def notes(missing: int) -> tuple[str, ...]:
        rows = [{"prompt": f"{n} + {n}?", "answer": None if n < missing else str(2 * n)} for n in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return tuple(read_data(chosen(tiny_model, data=str(tmp_path / "rows.jsonl"))).notes)

    assert notes(0) == ()
    assert "answer has no answer in 1 of 40 rows" in " ".join(notes(1))
    with pytest.raises(UsageError, match="answer has no answer in 3 of 40 rows"):
        notes(3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '{"words": "a"}\n',
            "has no column prompt or answer (it has: words; --column prompt=NAME --column answer=NAME ",
        ),
        ('{"prompt": "a"}\n', "has no column with the answer (it has: prompt)"),
        ('{"prompt": "a"}\n{"prompt\n', "rows.jsonl:2: not JSON"),
        ("\n", "has no rows"),
    ],
)
def test_data_that_do_not_fit_are_refused(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_data(chosen(tmp_path, data=str(file)))
    assert error in str(raised.value) and str(raised.value).startswith("--data: ")


def test_a_missing_model_and_an_unknown_task_are_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"troupe init: model.path: no such folder: .*/none"):
        text_of(chosen(tmp_path / "none"), tmp_path / "run.yaml")
    with pytest.raises(UsageError, match=r"no task 'chain_sun' .did you mean 'chain_sum'"):
        text_of(chosen(tiny_model, data="reasoning_gym:chain_sun"), tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("name", "error"), [("gropo", "did you mean 'grpo'"), ("distill", "as teacher"), ("gkd", "as teacher")]
)
def test_an_algorithm_without_a_first_spec_is_refused(name: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        check_algorithm(name)


def test_what_is_missing_is_asked_in_a_terminal_and_refused_elsewhere() -> None:
    asked: list[str] = []

    def ask(question: str, default: str) -> str:
        asked.append(question.split()[0])
        return default or "/models/my-1b"

    choices = complete(InitFlags(gpus=0), ask)
    assert asked == ["Model", "Data:", "Algorithm"]
    assert (choices.model, choices.data, choices.algorithm) == ("/models/my-1b", "reasoning_gym:chain_sum", "grpo")
    assert choices.name == "my-1b-grpo"
    asked.clear()
    complete(InitFlags(model="m", data="reasoning_gym:gcd", gpus=0), ask)
    assert asked == []
    with pytest.raises(UsageError, match=r"^--model and --data: required where there is no terminal"):
        complete(InitFlags(), None)


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write("a: 1\n", path, force=False)
    with pytest.raises(UsageError, match="--force overwrites it"):
        write("a: 2\n", path, force=False)
    assert path.read_text() == "a: 1\n"
    write("a: 3\n", path, force=True)
    assert path.read_text() == "a: 3\n"
