"""`roles.policy.lora`: what it may be, what it cannot be combined with, and where other trainers' names lead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from troupe.orchestrator.plan.memory import PlacedWorker, Sizes, of_policy
from troupe.orchestrator.roles.settings import (
    critic_config,
    offline_config,
    policy_config,
    rollout_config,
    scorer_configs,
)
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.checks.adapters import adapter_problems, adapter_template
from troupe.orchestrator.spec.checks.machine import missing, model_problems
from troupe.orchestrator.spec.derived.paths import model_overrides, without_adapters
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.former_fields import without_former_fields
from troupe.orchestrator.spec.load import load_rollout_spec, parse_spec, plan_runs, read_document
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.roles import RoleResources, TrainerRole
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.data.tokenizer import copy_tokenizer, load_tokenizer, render

ROOT = Path(__file__).resolve().parents[3]
SPECS = ROOT / "deploy" / "specs"
FIELD = "roles.policy.lora"


def loaded(*overrides: str) -> RolloutSpec:
    """The tiny GRPO spec with overrides."""
    return load_rollout_spec(SPECS / "tiny-grpo.yaml", list(overrides))


def refusals(*overrides: str, spec: str = "tiny-grpo.yaml") -> str:
    """What is said of a spec with adapters."""
    with pytest.raises(SpecError) as caught:
        parse_spec(read_document(SPECS / spec, [f"{FIELD}={{}}", *overrides]))
    return str(caught.value)


def test_the_section_reaches_policy_and_engines() -> None:
    lora = LoraConfig(rank=4, alpha=4, targets=("q_proj",), rslora=True)
    spec = loaded(f"{FIELD}={json.dumps(lora.model_dump(mode='json'))}")
    assert policy_config(spec).lora == rollout_config(spec).lora == lora
    assert (lora.scaling, lora.reserved_rank) == (2.0, 8)
    assert spec.trains_adapters and not without_adapters(spec).trains_adapters
    assert rollout_config(without_adapters(spec)).lora is None


def test_former_fields_of_an_older_run_are_left_out() -> None:
    """Its folder has every field with its value; 0 and 0.0 are the same number."""
    former = {"rank": 4, "dropout": 0.0, "bias": "none", "modules_to_save": []}
    assert loaded(f"{FIELD}={json.dumps(former)}") == loaded(f"{FIELD}={{rank: 4}}", f"{FIELD}.dropout=0")


def test_arguments_of_the_user_with_such_a_name_stay() -> None:
    args = {"lora": {"dropout": 0.0, "bias": "none"}, "algorithm": {"packing": None}}
    functions = f"roles.reward.functions=[{{name: exact_match, args: {json.dumps(args)}}}]"
    data = read_document(SPECS / "tiny-lora.yaml", [functions]).data
    assert without_former_fields(data)["roles"]["reward"]["functions"][0]["args"] == args


def test_without_the_section_all_weights_train() -> None:
    spec = loaded()
    assert policy_config(spec).lora is rollout_config(spec).lora is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{FIELD}.dropout=0.1", f"{FIELD}.dropout: unknown field (it is 0: an update must compute what the sampler"),
        (f"{FIELD}.dropout=false", f"{FIELD}.dropout: unknown field (it is 0"),
        (f"{FIELD}.bias=all", f"{FIELD}.bias: unknown field (it is none: vLLM loads no biases"),
        (f"{FIELD}.modules_to_save=[lm_head]", f"{FIELD}.modules_to_save: unknown field (there are none: vLLM"),
        (f"{FIELD}.targets=[]", f"{FIELD}.targets: names no layer"),
        (f"{FIELD}.rank=0", f"{FIELD}.rank: must be at least 1"),
        (f"{FIELD}.rank=513", f"{FIELD}.rank: must be at most 512"),
        (f"{FIELD}.alpha=0", f"{FIELD}.alpha: must be greater than 0"),
        (f"{FIELD}.rnak=8", f"{FIELD}.rnak: unknown field (did you mean 'rank'?)"),
        ("weight_sync.backend=gloo", "weight_sync.backend: gloo sends whole models; adapters use shm or store (or"),
        (
            "roles.rollout.engine={max_loras: 2}",
            "roles.rollout.engine.max_loras: Troupe sets it: set roles.",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_its_field(override: str, expected: str) -> None:
    assert expected in refusals(override)


def test_the_steps_of_a_kl_limit_are_those_of_the_adapters() -> None:
    spec = load_rollout_spec(SPECS / "algorithms" / "ppo_kl_limit.yaml", [f"{FIELD}={{}}"])
    assert spec.trains_adapters


SHARED = ("roles.rollout.colocate_with=policy", "roles.rollout.gpus=0.5", "roles.policy.gpus=0.5")


def test_engines_on_the_gpus_of_the_policy_keep_the_model_below() -> None:
    spec = loaded(f"{FIELD}={{}}", *SHARED)
    assert (spec.roles.rollout.resolved_sleep, resolved_backend(spec)) == ("kv_cache", "shm")
    found = refusals(*SHARED, "roles.rollout.sleep=weights")
    assert "roles.rollout.sleep: weights discards the model below, and an update brings only the adapters" in found
    for backend in ("ipc", "nccl"):
        assert f"weight_sync.backend: {backend} sends whole models; adapters use shm" in refusals(
            *SHARED, f"weight_sync.backend={backend}"
        )


def test_engines_of_several_ranks_and_an_object_store_have_adapters(tmp_path: Path) -> None:
    overrides = ("roles.rollout.tensor_parallel_size=2", "roles.rollout.cpus=2", "weight_sync.backend=store")
    spec = loaded(f"{FIELD}={{}}", *overrides, f"weight_sync.url=file://{tmp_path}")
    assert rollout_config(spec).lora is not None and policy_config(spec).weight_store == f"file://{tmp_path}"


@pytest.mark.parametrize("name", ["sft", "dpo", "orpo", "kto", "rrhf", "reward-model"])
def test_offline_algorithms_have_adapters(name: str) -> None:
    spec = parse_spec(read_document(SPECS / f"tiny-{name}.yaml", [f"{FIELD}.rank=4"]))
    assert isinstance(spec, OfflineSpec) and spec.trains_adapters
    assert offline_config(spec).lora == LoraConfig(rank=4)


def test_a_critic_has_adapters_of_its_own() -> None:
    spec = parse_spec(read_document(SPECS / "tiny-ppo.yaml", ["roles.critic.lora.rank=4"]))
    assert isinstance(spec, RolloutSpec) and not spec.trains_adapters
    critic = critic_config(spec)
    assert critic is not None and critic.lora == LoraConfig(rank=4) and policy_config(spec).lora is None
    with pytest.raises(SpecError, match=r"roles\.critic\.lora\.bias: unknown field \(it is none"):
        parse_spec(read_document(SPECS / "tiny-ppo.yaml", ["roles.critic.lora.bias=all"]))


@pytest.mark.parametrize("name", ["lora_rank", "lora_r", "peft_config", "use_peft"])
def test_names_of_other_trainers_lead_to_the_section(name: str) -> None:
    with pytest.raises(SpecError, match=rf"{name}: unknown field \(did you mean 'roles\.policy\.lora\.rank'"):
        loaded(f"{name}=8")


@pytest.mark.parametrize(
    "field", [f"{FIELD}.load_in_4bit", f"{FIELD}.quantize", "load_in_8bit", f"{FIELD}.bits", "roles.policy.qlora"]
)
def test_a_model_in_few_bits_below_adapters_is_refused_with_the_reason(field: str) -> None:
    """On the CPU and on GPUs."""
    why = "The model below adapters stays in bfloat16, float16 or float32: engines"
    with pytest.raises(SpecError, match=rf"{field}: .*{why}"):
        loaded(f"{FIELD}.rank=8", f"{field}=4")


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = json.loads((ROOT / ".cache/models/tiny-llama/config.json").read_text())
    for experts, said in ((0, False), (4, True)):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"num_local_experts": experts} if experts else config)
        )
        spec = loaded(f"{FIELD}={{}}", f"model.path={tmp_path}")
        found = dict(model_problems(spec, {"model": spec.model}))
        refused = "adapters of experts are not supported; name other layers: [q_proj, k_proj, v_proj, o_proj]"
        assert (found.get(f"{FIELD}.targets") == refused) is said
    named = loaded(f"{FIELD}={{targets: [q_proj, k_proj, v_proj, o_proj]}}", f"model.path={tmp_path}")
    assert not model_problems(named, {"model": named.model})


def chain(folder: Path, second: dict[str, Any]) -> Path:
    """A chain of two stages, of which the first trains adapters."""
    grpo = yaml.safe_load((SPECS / "tiny-grpo.yaml").read_text())
    own = {"first": {"roles": {"policy": {"lora": {"rank": 4}}}}, "second": second}
    (folder / "chain.yaml").write_text(yaml.safe_dump(grpo | {"stages": own}))
    return folder / "chain.yaml"


def test_a_stage_hands_its_adapters_on(tmp_path: Path) -> None:
    second = {"model": {"path": "stage:first"}, "roles": {"policy": {"lora": {"rank": 4}}}}
    first, then = plan_runs(read_document(chain(tmp_path, second)), tmp_path / "out")
    assert first.spec.model.adapter is None
    assert then.spec.model.path == first.spec.model.path
    assert then.spec.model.adapter == str(first.model)
    assert then.missing() == []  # the first stage will write it


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "first.jinja"), ({"chat_template": None}, "first.jinja"), ({"chat_template": "x"}, "x")]
)
def test_a_stage_hands_the_chat_template_of_its_adapters_on(
    own: dict[str, str | None], expected: str, tmp_path: Path
) -> None:
    """The model below has another one, and a tokenizer is read from its folder."""
    second = {"model": {"path": "stage:first"} | own, "roles": {"policy": {"lora": {"rank": 4}}}}
    document = read_document(chain(tmp_path, second), ["stages.first.model.chat_template=first.jinja"])
    _, then = plan_runs(document, tmp_path / "out")
    assert then.spec.model.chat_template == expected


@pytest.mark.parametrize("adapters", [True, False])
def test_a_reward_model_reads_texts_as_its_stage_did(adapters: bool) -> None:
    """The critic starts from the same model and reads the policy's tokens; a whole model has its template beside it."""
    changes = ["stages.reward_model.model={path: 'stage:sft', chat_template: own.jinja, allow_special: true}"]
    changes += [f"{FIELD}.rank=8", "stages.ppo.roles.critic.lora.rank=8"] if adapters else []
    ppo = plan_runs(read_document(SPECS / "tiny-three-stage.yaml", changes))[-1].spec
    reward, critic = (ppo.models()[f"roles.{role}.model"] for role in ("reward", "critic"))
    assert (reward.chat_template, reward.allow_special) == ("own.jinja" if adapters else None, True)
    assert (critic.chat_template, critic.allow_special) == (None, False)
    assert (ppo.model.chat_template, ppo.model.allow_special) == (None, False)
    told = [*changes, "stages.ppo.roles.reward.model.allow_special=false"]
    ppo = plan_runs(read_document(SPECS / "tiny-three-stage.yaml", told))[-1].spec
    assert not ppo.models()["roles.reward.model"].allow_special


def test_the_chat_template_of_an_adapter_is_that_of_its_training(tiny_model: Path, tmp_path: Path) -> None:
    """Outside of a chain nothing changes but a warning names it; an evaluation of the adapter renders with it."""
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    said: Any = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]

    def rendered(**model: Any) -> str:
        return render(load_tokenizer(ModelConfig(path=str(tiny_model), **model)), said, open_turn=False)

    cases: list[tuple[str | None, str | None]] = [(None, None), ("none", "none")]
    for trained, expected in [*cases, (str(tmp_path / "own.jinja"), str(tmp_path / "adapter" / "chat_template.jinja"))]:
        folder = adapter(tmp_path / "adapter", base_model_name_or_path=tiny_model.name)
        assert adapter_template(folder, tiny_model) is None  # of peft, without a tokenizer
        copy_tokenizer(ModelConfig(path=str(tiny_model), chat_template=trained), folder)
        found = adapter_template(folder, tiny_model)
        assert found == expected
        assert rendered(chat_template=found) == rendered(chat_template=trained)
        starts = (f"{FIELD}={{rank: 4, alpha: 8, targets: [q_proj]}}", f"model.path={tiny_model}")
        warned = [line for line in warnings_of(loaded(*starts, f"model.adapter={folder}")) if "chat_template" in line]
        assert [line.partition("; set it to ")[2] for line in warned] == ([] if expected is None else [expected])
        chosen = loaded(*starts, f"model.adapter={folder}", "model.chat_template=none")
        assert not any("chat_template" in line for line in warnings_of(chosen))
        override = [] if expected is None else [f'model.chat_template="{expected}"']
        assert model_overrides(loaded(*starts), folder) == [f'model.adapter="{folder}"', *override]
        assert model_overrides(chosen, folder) == [f'model.adapter="{folder}"']
        shutil.rmtree(folder)


def test_a_stage_with_other_adapters_than_those_it_starts_from_is_refused(tmp_path: Path) -> None:
    second = {"model": {"path": "stage:first"}, "roles": {"policy": {"lora": {"rank": 8}}}}
    expected = r"stages\.second\.roles\.policy\.lora\.rank: is 8, but 4 in the adapter that training starts from"
    with pytest.raises(SpecError, match=expected):
        plan_runs(read_document(chain(tmp_path, second)))


def test_a_stage_that_trains_all_weights_cannot_start_from_adapters(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"stages\.second\.model\.adapter: needs roles\.policy\.lora"):
        plan_runs(read_document(chain(tmp_path, {"model": {"path": "stage:first"}})))


def adapter(folder: Path, **changes: Any) -> Path:
    """peft's folder of an adapter, with an empty file of weights."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("changes", "lora", "expected"),
    [
        ({}, {}, {}),
        ({}, {"rank": 8}, {f"{FIELD}.rank": "is 8, but 4 in the adapter that training starts from"}),
        ({}, {"alpha": 4}, {f"{FIELD}.alpha": "is 4.0, but 8 in the adapter that training starts from"}),
        ({"use_rslora": True}, {}, {f"{FIELD}.rslora": "is False, but True in the adapter that training starts from"}),
        (
            {},
            {"targets": ["v_proj"]},
            {f"{FIELD}.targets": "are not those of the adapter that training starts from: q_proj"},
        ),
        ({"use_dora": True}, {}, {"model.adapter": "it has use_dora, which is not supported"}),
        ({"rank_pattern": {"q_proj": 8}}, {}, {"model.adapter": "it has rank_pattern, which is not supported"}),
        ({"bias": "all"}, {}, {"model.adapter": "it has biases (all), which are not supported"}),
        ({"peft_type": "IA3"}, {}, {"model.adapter": "its peft_type is IA3: only LORA is supported"}),
        (
            {"modules_to_save": ["lm_head"]},
            {},
            {"model.adapter": "it has modules that were trained whole (lm_head): only score is supported"},
        ),
        (
            {"task_type": "SEQ_CLS"},
            {},
            {"model.adapter": "is the adapter of a reward model; a language model is needed here"},
        ),
    ],
)
def test_an_adapter_to_start_from_is_compared_with_the_section(
    changes: dict[str, Any], lora: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    section = json.dumps({"rank": 4, "alpha": 8, "targets": ["q_proj"]} | lora)
    spec = loaded(f"{FIELD}={section}", f"model.adapter={adapter(tmp_path / 'adapter', **changes)}")
    assert {
        path: why for path, why in missing(spec) if "adapter" in why or "adapter" in path or FIELD in path
    } == expected
    assert policy_config(spec).model.adapter == str(tmp_path / "adapter")


def test_folders_without_an_adapter_are_named(tmp_path: Path) -> None:
    found = dict(missing(loaded(f"{FIELD}={{}}", f"model.adapter={tmp_path}")))
    assert found["model.adapter"] == f"{tmp_path} is not the folder of an adapter: it has no adapter_config.json"
    found = dict(missing(loaded(f"{FIELD}={{}}", f"model.adapter={tmp_path}/none")))
    assert found["model.adapter"] == f"no such folder: {tmp_path}/none"


@pytest.mark.parametrize(
    ("trained_on", "metadata", "warned"),
    [
        ("org/Other-7B", None, True),
        ("/elsewhere/TINY", None, False),
        ("", None, False),
        ("org/Other-7B", {"base_digest": "0"}, False),  # compared when it is loaded
    ],
)
def test_an_adapter_of_another_model_that_nothing_verifies_is_a_warning(
    tmp_path: Path, trained_on: str, metadata: dict[str, str] | None, warned: bool
) -> None:
    folder = adapter(tmp_path / "adapter", base_model_name_or_path=trained_on)
    save_file({"a": np.zeros(1)}, folder / "adapter_model.safetensors", metadata)
    spec = loaded(f"{FIELD}={{}}", f"model.adapter={folder}", "model.path=models/tiny")
    found = [line for line in warnings_of(spec) if "adapter" in line]
    assert len(found) == warned
    assert all(f"model.adapter: was trained on {trained_on}, and is added to models/tiny" in line for line in found)


def test_adapters_are_refused_where_they_cannot_be_loaded() -> None:
    with pytest.raises(SpecError, match=r"model\.adapter: needs roles\.policy\.lora"):
        loaded("model.adapter=x")
    starts = ("model.adapter=x", "algorithm.kl.coef=0.1")
    other = "roles.reference={colocate_with: policy, model: {path: other, adapter: x}}"
    found = refusals(f"{FIELD}={{}}", "algorithm.kl.coef=0.1", other, "roles.policy.zero_stage=3")
    assert "roles.policy.zero_stage: an adapter cannot be added to a model that is divided over workers" in found
    found = refusals(*starts, "roles.reference={workers: 1, cpus: 2, shards: 2}")
    assert "roles.reference.shards: an adapter cannot be added to a model that is divided" in found


def test_a_reference_and_a_teacher_with_the_trained_adapters_base_may_be_divided() -> None:
    """Neither is a model of its own: adapters are computed beside the policy's layers."""
    divided = (f"{FIELD}={{}}", "model.adapter=x", "roles.policy.zero_stage=3")
    loaded(*divided, "algorithm.kl.coef=0.1", "roles.reference.colocate_with=policy")
    model = loaded(*divided).model.model_copy(update={"adapter": "y"}).model_dump_json()
    taught = ("algorithm={name: distill}", f"roles.teacher.math={{colocate_with: policy, model: {model}}}")
    spec = loaded(*divided, *taught)
    assert policy_config(spec).teacher_adapters == {"teacher.math": "y"}
    assert set(policy_config(spec).teachers) == {"teacher.math"} and scorer_configs(spec) == {}
    prompted = f"roles.teacher.math={{colocate_with: policy, prompt: '{{prompt}}!', model: {model}}}"
    found = refusals(*divided, taught[0], prompted)
    assert "roles.policy.zero_stage: roles.teacher.math scores in the policy's workers" in found


def test_the_plan_counts_the_adapter_of_a_teacher_alone(tiny_model: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter")
    save_file({"a": np.zeros((3, 5)), "b": np.zeros(7)}, folder / "adapter_model.safetensors")
    model = f"{{path: {tiny_model}, dtype: float32, adapter: {folder}}}"
    taught = f"roles.teacher.math={{colocate_with: policy, model: {model}}}"
    specs = [
        loaded(f"{FIELD}={{}}", f"model.path={tiny_model}", "algorithm={name: distill}", *own)
        for own in ((taught,), ("roles.reference={colocate_with: policy}",))
    ]
    placed = PlacedWorker("policy-0", 1.0, 0.0, "", 0, "")
    with_teacher, without = (sum(m.total for m in of_policy(one, placed, 0, Sizes())[0]) for one in specs)
    assert with_teacher - without == 4 * (3 * 5 + 7)


_DIVIDED, _IN_AN_ENGINE = "an adapter cannot be added to a model that is divided", "is not supported in an engine"
_FROZEN: list[tuple[str, str, str, str]] = [
    ("tiny-grpo.yaml", "roles.reference", "{model: MODEL, shards: 2}", f"shards: {_DIVIDED}"),
    ("tiny-dpo.yaml", "roles.reference", "{model: MODEL, shards: 2}", f"shards: {_DIVIDED}"),
    ("tiny-grpo.yaml", "roles.teacher.t", "{model: MODEL, shards: 2}", f"shards: {_DIVIDED}"),
    ("tiny-grpo.yaml", "roles.teacher.t", "{kind: engine, model: MODEL}", f"model.adapter: {_IN_AN_ENGINE}"),
    ("tiny-grpo.yaml", "roles.judge", "{model: MODEL}", f"model.adapter: {_IN_AN_ENGINE}"),
]
"""Each role with a frozen model, where no adapter can be added to it: spec, path, section and refusal."""


def constructed(spec: str, path: str, section: str, *others: str) -> RunSpec:
    """A spec with this section, whose fields are valid, whatever its combinations."""
    document = read_document(SPECS / spec, [*others, f"{path}={section}"]).data
    return (OfflineSpec if spec == "tiny-dpo.yaml" else RolloutSpec).model_validate(document)


@pytest.mark.parametrize(("spec", "path", "section", "refusal"), _FROZEN)
def test_an_adapter_is_refused_in_every_role_whose_frozen_model_cannot_take_it(
    spec: str, path: str, section: str, refusal: str
) -> None:
    def found(section: str, *others: str) -> list[str]:
        given = constructed(spec, path, section, *others)
        return [f"{field}: {why}" for field, why in adapter_problems(given) if field.startswith(path)]

    (said,) = found(section.replace("MODEL", "{path: m, adapter: a}"))
    assert said.startswith(f"{path}.{refusal}")
    assert found(section.replace("MODEL", "{path: m}"), "model.adapter=a") == []
    if "shards" in section:
        assert found(section.replace("MODEL", "null"), "model.adapter=a") == [said], "it starts from the trained model"
        assert found("{model: {path: m, adapter: a}, shards: 1}") == []


def test_no_role_with_a_frozen_model_is_left_out() -> None:
    def below(role: type[RoleResources]) -> set[type[RoleResources]]:
        return {role}.union(*map(below, role.__subclasses__()))

    frozen = {
        role
        for role in below(RoleResources) - below(TrainerRole)
        if "model" in role.model_fields and role.model_fields["model"].annotation in (ModelConfig, ModelConfig | None)
    }
    given = [constructed(spec, path, section.replace("MODEL", "{path: m}")) for spec, path, section, _ in _FROZEN]
    assert frozen <= {type(role) for one in given for role in one.roles.present().values()}
