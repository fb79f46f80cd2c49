"""Valid specs: the worker configurations they become, and the shipped ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tests.conftest import NO_WEIGHTS
from troupe.orchestrator.algorithms.section import policy_loss
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.roles.settings import (
    critic_config,
    policy_config,
    reward_config,
    rollout_config,
    scorer_configs,
)
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.derived import sampling
from troupe.orchestrator.spec.derived.paths import with_sections
from troupe.orchestrator.spec.derived.sampling import evaluation_metrics, group_settings, held_out_sets, solved_at
from troupe.orchestrator.spec.derived.sizes import group_scoring_s, prompt_room
from troupe.orchestrator.spec.derived.training import (
    needs_whole_samples,
    resolved_backend,
    skips_zero_advantage,
    source_losses,
)
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.errors import Source, SpecError, known_paths, models_in, parse_path
from troupe.orchestrator.spec.load import load_rollout_spec, parse_rollout_spec, plan_runs, read_document, spec_schema
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.algorithm_config import CriticLossConfig
from troupe.workers.contract.rewards import RIGHT_OR_WRONG, SHIPPED

ROOT = Path(__file__).resolve().parents[3]
SHIPPED_SPECS = sorted((ROOT / "deploy" / "specs").glob("*.yaml"))
RUN_HERE = ("laptop-grpo", "laptop-ppo", "tiny-dapo", "tiny-grpo", "tiny-grpo-process", "tiny-ppo")

GRPO = """\
name: base
model: {path: models/m}
roles:
  rollout: {workers: 2, cpus: 2.5, max_model_len: 512}
  policy: {workers: 2, threads: 3}
  reward: {functions: [{name: exact_match}]}
algorithm: {name: grpo}
schedule: {steps: 5, prompts_per_step: 8, minibatches: 2, epochs: 3}
data: {train: {kind: jsonl, path: train.jsonl}}
"""
PPO = """\
name: base
model: {path: models/m}
roles:
  rollout: {}
  policy: {}
  critic: {learning_rate: 2e-5, warmup_steps: 2}
  reference: {cpus: 2, model: {path: models/ref}}
  reward: {model: {path: models/rm}}
algorithm: {name: ppo, value_clip: 0}
schedule: {steps: 5, prompts_per_step: 8}
sampling: {temperature: 0.7}
data: {train: {kind: jsonl, path: train.jsonl}}
"""
GPUS = ["roles.rollout.gpus=1", "roles.policy.gpus=1", "roles.critic.gpus=1"]


def load(folder: Path, text: str, *overrides: str) -> RolloutSpec:
    path = folder / "spec.yaml"
    path.write_text(text)
    return load_rollout_spec(path, overrides)


def test_defaults_and_what_follows_from_them(tmp_path: Path) -> None:
    spec = load(tmp_path, GRPO)
    assert (spec.group_size, spec.samples_per_step, spec.kl_coef) == (8, 64, 0.0)
    assert (spec.device, resolved_backend(spec), spec.updates_of("policy")) == ("cpu", "shm", 30)
    assert (critic_config(spec), scorer_configs(spec), spec.reference_in_policy) == (None, {}, False)
    assert spec.run_folder == Path("runs/base")
    assert list(spec.roles.present()) == ["rollout", "policy", "reward"]


def test_a_group_has_time_for_the_timeout_of_every_sample(tmp_path: Path) -> None:
    assert group_scoring_s(load(tmp_path, GRPO)) == 600.0
    hanging = "roles.reward.functions=[{name: exact_match, timeout_s: 50}]"
    assert group_scoring_s(load(tmp_path, GRPO, "algorithm.group_size=16", hanging)) == 16 * (50 + 10)
    assert group_scoring_s(load(tmp_path, PPO)) == 600.0, "a reward model alone"


def test_worker_configurations_follow_from_the_roles(tmp_path: Path) -> None:
    spec = load(tmp_path, GRPO)
    rollout, policy = rollout_config(spec), policy_config(spec)
    assert rollout.engine.max_model_len == 512
    assert (rollout.engine.threads, policy.trainer.threads, reward_config(spec).threads) == (2, 3, 1)
    assert policy.total_updates == 30
    assert policy.reference_model is None
    assert policy.loss.aggregation == "sequence_mean"
    assert [function.name for function in reward_config(spec).functions] == ["exact_match"]


def test_turns_can_have_a_form_where_the_loss_accounts_for_the_sampler(tmp_path: Path) -> None:
    assert rollout_config(load(tmp_path, GRPO, "algorithm.importance.mode=truncate")).turn_forms
    assert not rollout_config(load(tmp_path, GRPO, "algorithm.importance.mode=none")).turn_forms


def test_ppo_has_a_critic_and_a_reference_of_their_own(tmp_path: Path) -> None:
    spec = load(tmp_path, PPO)
    critic, reference = critic_config(spec), scorer_configs(spec)["reference"]
    assert critic is not None and reference is not None
    assert (critic.model.path, critic.trainer.learning_rate) == ("models/m", 2e-5)
    assert critic.loss == CriticLossConfig(value_clip=None)
    assert (critic.total_updates, policy_config(spec).total_updates) == (5, 3)
    assert (reference.model.path, reference.temperature, reference.threads) == ("models/ref", 0.7, 2)
    assert policy_config(spec).advantage.kl_coef == 0.05


def test_the_advice_on_a_clip_of_rewards_turns_it_off(tmp_path: Path) -> None:
    """Null takes the default of ppo_max, which is a clip."""
    steps = ["algorithm.name=ppo_max", "algorithm.reward_scale=none", "roles.reward.model=null"]
    steps.append("roles.reward.functions=[{name: equations, process: true}]")
    with pytest.raises(SpecError) as caught:
        load(tmp_path, PPO, *steps)
    (advice,) = re.findall(r"algorithm\.reward_clip: .*; set (\w+)", str(caught.value))
    spec = load(tmp_path, PPO, *steps, f"algorithm.reward_clip={advice}")
    assert dict(spec.algorithm)["reward_clip"] == 0.0


def test_a_reference_can_run_inside_the_policy(tmp_path: Path) -> None:
    spec = load(tmp_path, PPO, "roles.reference={colocate_with: policy, model: {path: models/ref}}")
    reference = policy_config(spec).reference_model
    assert spec.reference_in_policy and not scorer_configs(spec)
    assert reference is not None and reference.path == "models/ref"
    spec = load(tmp_path, PPO, "roles.reference={colocate_with: policy}")
    assert policy_config(spec).reference_model == spec.model


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ([], "shm"),
        (GPUS, "nccl"),
        ([*GPUS, "weight_sync.backend=shm"], "shm"),
        (["roles.rollout={gpus: 0.5, colocate_with: policy}", "roles.policy.gpus=0.5", "roles.critic.gpus=1"], "ipc"),
    ],
)
def test_the_transfer_backend_follows_from_the_devices(tmp_path: Path, overrides: list[str], backend: str) -> None:
    spec = load(tmp_path, PPO, *overrides)
    assert resolved_backend(spec) == rollout_config(spec).transfer_backend == backend
    assert policy_config(spec).transfer_backend == backend
    assert spec.device == ("cuda" if overrides else "cpu")


@pytest.mark.parametrize(
    ("overrides", "sleep"),
    [
        ([], "none"),
        (["roles.rollout.gpus=1", "roles.policy.gpus=1", "roles.critic.gpus=1"], "none"),
        (
            ["roles.rollout={gpus: 0.5, colocate_with: policy}", "roles.policy.gpus=0.5", "roles.critic.gpus=1"],
            "kv_cache",
        ),
        (
            [
                "roles.rollout={gpus: 0.5, colocate_with: policy, sleep: weights}",
                "roles.policy.gpus=0.5",
                "roles.critic.gpus=1",
            ],
            "weights",
        ),
    ],
)
def test_engines_on_the_policys_gpus_rest_by_default(tmp_path: Path, overrides: list[str], sleep: str) -> None:
    spec = load(tmp_path, PPO, *overrides)
    assert spec.roles.rollout.resolved_sleep == rollout_config(spec).sleep == sleep


def test_a_spec_is_frozen_and_checked_when_parsed(tmp_path: Path) -> None:
    spec = load(tmp_path, GRPO)
    with pytest.raises(ValidationError):
        spec.seed = 4  # pyright: ignore[reportAttributeAccessIssue]
    broken = spec.model_dump() | {"sampling": {"max_tokens": 4096}}
    with pytest.raises(SpecError, match=r"sampling\.max_tokens: 4096 leaves no room"):
        parse_rollout_spec(yaml_reader.Document(broken, Source("memory")))


def test_a_dump_loads_as_the_same_spec(tmp_path: Path) -> None:
    for text in (GRPO, PPO):
        spec = load(tmp_path, text)
        dumped = json.dumps(spec.model_dump(mode="json", exclude_unset=True))
        assert load(tmp_path, dumped) == spec


# Overrides


def test_overrides_replace_and_add(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        GRPO,
        "roles.rollout.workers=4",
        "algorithm.kl.coef=1e-3",
        "roles.reference.colocate_with=policy",
        "roles.reward.functions.0.args={strip: true}",
        "sampling.stop=[a, 'b c']",
        "output.folder=a=b",
        "evaluation=",
    )
    assert spec.roles.rollout.workers == 4
    assert spec.roles.rollout.cpus == 2.5
    assert spec.kl_coef == 1e-3
    assert spec.reference_in_policy
    assert spec.roles.reward.functions[0].args == {"strip": True}
    assert spec.sampling.stop == ("a", "b c")
    assert spec.output.folder == "a=b"
    assert spec.evaluation is None


def test_the_last_override_wins_and_may_set_what_an_earlier_one_made(tmp_path: Path) -> None:
    spec = load(tmp_path, GRPO, "schedule={steps: 1, prompts_per_step: 9}", "schedule.steps=2", "schedule.steps=3")
    assert (spec.schedule.steps, spec.schedule.prompts_per_step, spec.schedule.minibatches) == (3, 9, 1)


def test_an_override_does_not_change_the_document() -> None:
    document = yaml_reader.parse(GRPO, "f")
    before = json.dumps(document.data)
    yaml_reader.override(document, ["roles.rollout.workers=4"])
    assert json.dumps(document.data) == before


# YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1.0e-5", 1e-5),
        ("+3", 3),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("on", "on"),
        ("No", "No"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("'1e-5'", "1e-5"),
        ('"null"', "null"),
        ("1_000", "1_000"),
        ("e5", "e5"),
        (".", "."),
        ("[a, ]", ["a"]),
        ("\n  -", [None]),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = yaml_reader.parse(f"key: {text}", "f").data["key"]
    assert read == value
    assert type(read) is type(value)


def test_keys_are_text() -> None:
    assert yaml_reader.parse("1: a\ntrue: b\nnull: c\n", "f").data == {"1": "a", "true": "b", "null": "c"}


def test_places_are_the_lines_of_keys_and_entries() -> None:
    source = yaml_reader.parse("a:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "f").source
    for dotted, line in (("a", 1), ("a.b", 2), ("a.c", 3), ("a.c.0", 4), ("a.c.1.y", 5), ("a.c.1.none", 5), ("z", 1)):
        assert source.find(parse_path(dotted)).line == line


_scalars = st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.floats(allow_nan=False, allow_infinity=False)
# YAML 1.1 scanners end a line at U+2028 and U+2029, and a key must stand on one line; nobody names a field so.
_text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
_data = st.recursive(
    _scalars | _text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(_text, _data, min_size=1, max_size=5))
def test_json_reads_as_itself(data: dict[str, Any]) -> None:
    """JSON is YAML: what json writes comes back equal, types included."""
    text = json.dumps(data, ensure_ascii=False).replace("\x7f", "")
    assert yaml_reader.parse(text, "f").data == json.loads(text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=12), st.integers(0, len(PPO)), st.integers(0, 12))
def test_spoilt_bytes_give_a_spec_or_a_spec_error(junk: bytes, at: int, cut: int) -> None:
    text = (PPO.encode()[:at] + junk + PPO.encode()[at + cut :]).decode("utf-8", "replace")
    try:
        document = yaml_reader.parse(text, "f")
        parse_rollout_spec(document)
    except SpecError as error:
        assert all(line.startswith("f:") for line in str(error).splitlines())


_PATHS = sorted(
    {path for path in known_paths(RolloutSpec) if not path.startswith(("data.eval.", "roles.critic.model."))}
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([GRPO, PPO]), st.sampled_from(_PATHS), _data)
def test_any_value_in_any_field_gives_a_spec_or_a_spec_error(text: str, path: str, value: Any) -> None:
    document = yaml_reader.parse(text, "f")
    try:
        document = yaml_reader.override(document, [f"{path}={json.dumps(value)}"])
        parse_rollout_spec(document)
    except SpecError as error:
        assert str(error)
        assert all(line.startswith(("f:", "--set: ")) for line in str(error).splitlines())


# Shipped specs and documents


@pytest.fixture(scope="module")
def documented() -> jsonschema.Draft202012Validator:
    """The schema of specs."""
    return jsonschema.Draft202012Validator(spec_schema())


@pytest.mark.parametrize("path", SHIPPED_SPECS, ids=lambda path: path.stem)
def test_shipped_specs_load(path: Path, documented: jsonschema.Draft202012Validator) -> None:
    document = yaml_reader.read_file(path)
    assert document.data["name"] == path.stem
    assert plan_runs(document)
    documented.validate(document.data)


def test_the_shipped_specs_are_there() -> None:
    assert {*RUN_HERE, "node-8gpu-grpo", "multinode-ppo"} <= {path.stem for path in SHIPPED_SPECS}


@pytest.mark.parametrize("name", RUN_HERE)
def test_specs_for_this_machine_fit_on_two_cores(name: str) -> None:
    spec = load_rollout_spec(ROOT / "deploy" / "specs" / f"{name}.yaml")
    apart = [role for role in spec.roles.present().values() if role.colocate_with is None]
    assert sum(role.workers * role.cpus for role in apart) <= 2.0
    assert spec.device == "cpu"


def test_the_big_specs_fit_what_they_are_named_after() -> None:
    for name, gpus in (("node-8gpu-grpo", 8), ("multinode-ppo", 32)):
        roles = load_rollout_spec(ROOT / "deploy" / "specs" / f"{name}.yaml").roles.present().values()
        assert sum(role.workers * role.gpus for role in roles) == gpus


def test_the_demo_has_what_it_needs(demo_model: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in RUN_HERE:
        assert plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml"))[0].missing() == []


def test_every_field_has_a_description() -> None:
    def walk(model: type[BaseModel]) -> list[str]:
        silent = [f"{model.__name__}.{name}" for name, info in model.model_fields.items() if not info.description]
        return silent + [
            f for info in model.model_fields.values() for inner in models_in(info.annotation) for f in walk(inner)
        ]

    assert walk(RolloutSpec) == []


def test_the_schema_is_valid_and_refuses_unknown_fields(tmp_path: Path) -> None:
    schema = RolloutSpec.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    data = load(tmp_path, GRPO).model_dump(mode="json", exclude_unset=True)
    jsonschema.validate(data, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"sed": 1}, schema)


def test_what_tells_right_from_wrong_is_a_shipped_reward_function() -> None:
    assert set(RIGHT_OR_WRONG) < set(SHIPPED)


@pytest.mark.parametrize(
    ("functions", "solved_at"),
    [
        ("[{name: numeric}]", 1.0),
        ("[{name: reasoning_gym, weight: 0.5}]", 0.5),
        ("[{name: exact_match, weight: 2}, {name: overlong, weight: 0, args: {limit: 9, buffer: 2}}]", 2.0),
        ("[{name: numeric}, {name: regex, weight: 0.2, args: {pattern: x}}]", None),
        ("[{name: regex, weight: -1.0, args: {pattern: x}}]", None),
        ("[{name: letter_share, args: {letters: a}}]", None),
        ("[{name: 'mine.rewards:numeric'}]", None),
    ],
)
def test_what_counts_as_solved_follows_from_the_reward_unless_it_is_set(
    tmp_path: Path, functions: str, solved_at: float | None
) -> None:
    """Only a right-or-wrong function that is the whole reward says which of its values is right."""
    reward = f"roles.reward.functions={functions}"
    data = "data.train={kind: reasoning_gym, recipes: [{name: chain_sum}], size: 9, seed: 1}"
    held = "data.eval={kind: reasoning_gym, recipes: [{name: chain_sum}], size: 9, seed: 2}"
    assert sampling.solved_at(load(tmp_path, GRPO, reward, data, held)) == solved_at
    assert sampling.solved_at(load(tmp_path, GRPO, reward, data, held, "evaluation={solved_at: 0.7}")) == 0.7


@pytest.mark.parametrize(
    ("functions", "curriculum", "solved_at"),
    [
        ("[{name: numeric}]", "", 1.0),
        ("[{name: reasoning_gym, weight: 0.5}]", "", 0.5),
        ("[{name: reasoning_gym, weight: 0.5}]", "solved_at: 0.4", 0.4),
        ("[{name: letter_share, args: {letters: a}}]", "solved_at: 0.4", 0.4),
        ("[{name: letter_share, args: {letters: a}}, {name: numeric, weight: 0.2}]", "component: numeric", 1.0),
    ],
)
def test_a_curriculum_follows_the_reward_unless_it_says_what_is_solved(
    tmp_path: Path, functions: str, curriculum: str, solved_at: float
) -> None:
    """A component is compared without its weight."""
    reward, given = f"roles.reward.functions={functions}", f"data.curriculum={{{curriculum}}}"
    data = "data.train={kind: reasoning_gym, recipes: [{name: chain_sum}], size: 9, seed: 1}"
    spec = load(tmp_path, GRPO, reward, data, given)
    assert [one.solved_at for one in group_settings(spec)] == [solved_at]


def test_a_curriculum_that_nothing_tells_what_is_solved_is_refused(tmp_path: Path) -> None:
    shaped = "roles.reward.functions=[{name: numeric}, {name: length, weight: 0.1}]"
    with pytest.raises(
        SpecError, match=r"data\.curriculum\.solved_at: the reward does not say which samples are solved"
    ):
        load(tmp_path, GRPO, shaped, "data.curriculum={}")
    with pytest.raises(SpecError, match="the component 'length' does not say which samples are solved"):
        load(tmp_path, GRPO, shaped, "data.curriculum={component: length}")
    with pytest.raises(SpecError) as several:  # one thing is wrong
        load(tmp_path, GRPO, shaped, "data.curriculum={component: lenght}")
    assert "solved_at" not in str(several.value)
    held = ("data.eval={kind: jsonl, path: eval.jsonl}", "evaluation={solved_at: 0.9}")
    assert group_settings(load(tmp_path, GRPO, shaped, "data.curriculum={}", *held))[0].solved_at == 0.9


def test_a_curriculum_over_a_mixture_asks_each_source_what_is_solved(tmp_path: Path) -> None:
    sums = "{name: sums, kind: jsonl, path: s.jsonl, rewards: [{name: numeric, weight: 2}]}"
    own = "{name: own, kind: jsonl, path: o.jsonl, rewards: [{name: length}]OWN}"
    train = f"data.train=[{sums}, {{name: role, kind: jsonl, path: r.jsonl}}, {own}]"

    def solved(own: str, curriculum: str) -> list[float | None]:
        spec = load(tmp_path, GRPO, train.replace("OWN", own), f"data.curriculum={{{curriculum}}}")
        return [one.solved_at for one in group_settings(spec)]

    assert solved(", solved_at: 30", "") == [2.0, 1.0, 30.0]
    assert solved(", solved_at: 30", "solved_at: 1.5") == [1.5, 1.5, 30.0]
    with pytest.raises(SpecError, match=r"data\.train\.2\.solved_at: the reward of this source does not say"):
        solved("", "")


SETS = """\
  eval:
    sums:
      {kind: reasoning_gym, recipes: [{name: chain_sum}], size: 9, seed: 2, rewards: [{name: reasoning_gym, weight: 2}],
       sampling: {temperature: 0.7, top_p: 0.9, top_k: 20, samples: 6, max_tokens: 400}, level: recipe}
    math-500: {kind: jsonl, path: math.jsonl, metadata: [level], solved_at: 0.5}
    form: {kind: jsonl, path: form.jsonl, rewards: [{name: regex, args: {pattern: x}}, {name: length}]}
evaluation: {sampling: {temperature: 1.0, samples: 2}, solved_at: 0.8}
"""
NAMED = GRPO.replace(
    "{train: {kind: jsonl, path: train.jsonl}}", "\n  train: {kind: jsonl, path: train.jsonl}\n" + SETS
)


def test_a_source_replaces_settings_of_the_loss(tmp_path: Path) -> None:
    """The others stay the run's. Rows without an advantage are left out only if no source has a KL term for them."""
    rows = "kind: jsonl, path: a.jsonl, answer: answer"
    sources = f"data.train=[{{name: a, {rows}}}, {{name: b, {rows}, algorithm: {{clip_high: 0.5, kl_coef: %s}}}}]"
    reference, run = (
        "roles.reference={colocate_with: policy}",
        "algorithm={name: grpo, clip_low: 0.1, kl: {estimator: k2}}",
    )
    spec = load(tmp_path, GRPO, run, reference, sources % 0.3)
    assert [own.own_algorithm for own in group_settings(spec)] == [False, True]
    expected = policy_loss(spec.algorithm).model_copy(update={"clip_high": 0.5, "kl_coef": 0.3})
    assert source_losses(spec) == {"b": expected} and expected.clip_low == 0.1 and expected.kl_estimator == "k2"
    assert not skips_zero_advantage(spec)
    assert skips_zero_advantage(load(tmp_path, GRPO, run, reference, sources % 0.0))
    assert load(tmp_path, spec.as_yaml()) == spec


def test_a_source_has_the_loss_of_another_algorithm(tmp_path: Path) -> None:
    """With its defaults and what the source adds; the correction and the terms of the update stay the run's."""
    rows = "kind: jsonl, path: a.jsonl, answer: answer"
    own = "algorithm: {loss: gspo, clip_high: 0.5, kl_estimator: k1}"
    sources = f"data.train=[{{name: a, {rows}}}, {{name: b, {rows}, {own}}}]"
    run = "algorithm={name: grpo, clip_range: 0.1, entropy_coef: 0.2, importance: {cap: 3.0}, kl: {coef: 0.3}}"
    spec = load(tmp_path, GRPO, "roles.reference={colocate_with: policy}", run, sources)
    shared = {name: getattr(policy_loss(spec.algorithm), name) for name in ("entropy_coef", "importance", "kl_coef")}
    expected = ALGORITHMS["gspo"].loss.model_copy(update={**shared, "clip_high": 0.5, "kl_estimator": "k1"})
    assert source_losses(spec) == {"b": expected}
    assert shared["kl_coef"] == 0.3 and shared["importance"].cap == 3.0 and shared["entropy_coef"] == 0.2
    assert needs_whole_samples(spec) and not needs_whole_samples(
        load(tmp_path, GRPO, run, sources.replace("gspo", "dapo"), "roles.reference={colocate_with: policy}")
    )
    assert load(tmp_path, spec.as_yaml()) == spec


def test_named_held_out_sets_have_their_own_sampling_and_rewards(tmp_path: Path) -> None:
    spec = load(tmp_path, NAMED)
    sums, math, form = held_out_sets(spec)
    assert [one.prefix for one in (sums, math, form)] == ["eval/sums/", "eval/math-500/", "eval/form/"]
    assert (sums.sampling.top_k, sums.sampling.max_tokens, sums.pass_at, sums.level) == (20, 400, [2, 4, 6], "recipe")
    assert math.sampling == form.sampling == spec.evaluation.sampling  # type: ignore[union-attr]
    assert (sums.solved_at, math.solved_at, form.solved_at) == (2.0, 0.5, None)  # of their own rewards
    config = reward_config(spec)
    assert [sums.rewards, math.rewards, form.rewards] == ["data.eval.sums", "", "data.eval.form"]
    assert {name: [f.name for f in functions] for name, functions in config.sets.items()} == {
        "data.eval.sums": ["reasoning_gym"],
        "data.eval.form": ["regex", "length"],
    }
    names = evaluation_metrics(spec)
    assert {"eval/sums/avg", "eval/sums/pass@6", "eval/sums/maj@6", "eval/math-500/maj@2", "eval/form/reward"} <= {
        *names
    }
    assert not {"eval/form/avg", "eval/form/maj@2", "eval/sums/accuracy", "eval/sums/pass@1"} & {*names}
    assert list(spec.data.sources()) == ["train", "eval.sums", "eval.math-500", "eval.form"]
    assert prompt_room(spec, "eval.sums").tokens == 112 and prompt_room(spec, "train").tokens == 256


def test_named_held_out_sets_survive_a_resolved_spec_and_replaced_sections(tmp_path: Path) -> None:
    spec = load(tmp_path, NAMED, "data.eval.form.limit=3")
    again = load(tmp_path, spec.as_yaml())
    assert again == spec
    sums = dict(spec.data.held_out_sets())["eval.form"]
    replaced = with_sections(spec, {"data.eval.form": sums.model_copy(update={"limit": 4})})
    assert [getattr(one, "limit", None) for one in replaced.data.held_out_sets().values()] == [None, 0, 4]


def test_one_source_keeps_its_names(tmp_path: Path) -> None:
    held = "data.eval={kind: jsonl, path: eval.jsonl}"
    (only,) = held_out_sets(load(tmp_path, GRPO, held, "evaluation={sampling: {temperature: 1, samples: 4}}"))
    assert (only.prefix, only.rewards, only.label) == ("eval/", "", "eval")
    today = ("prompts", "refused", "failed_samples", "reward", "response_tokens", "accuracy", "solved_at", "pass@2")
    assert {f"eval/{name}" for name in (*today, "pass@4")} <= {*only.metric_names()}


BEST = "checkpoint={best: {metric: eval/sums/avg}, patience: 2}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.eval.sums.sampling.samples=0", "data.eval.sums.sampling.samples: must be at least 1, got 0"),
        ("data.eval.sums.sampel=0", "data.eval.sums.sampel: unknown field (did you mean 'sampling'?)"),
        ("data.eval.sums.rewards=[]", "data.eval.sums.rewards: needs 1 or more entries, got 0"),
        ("data.eval.sums.sampling.max_tokens=512", "leaves no room for a prompt in roles.rollout.max_model_len, 512"),
        ("data.eval.sums.seed=1", "data.eval.sums.seed: must differ from data.train.seed"),
        ("data.eval.form.rewards.0.name=regexx", "data.eval.form.rewards.0.name: no reward function 'regexx' (did you"),
        ("data.eval.form.rewards.1.label=regex", "data.eval.form.rewards.1.label: two components have the label"),
        ("data.eval.form.rewards.0.name=reasoning_gym", "scores reasoning_gym tasks only, but data.eval.form is jsonl"),
        ("data.eval.form.rewards.0.name=judge", "data.eval.form.rewards.0.name: needs a role `judge`"),
        ("data.eval.form.rewards.0.process=true", "rewards.0.process: only training uses the rewards of steps; remove"),
        ("data.eval.form.rewards=[{name: length, weight: 0}]", "data.eval.form.rewards: every weight is 0"),
        ("data.eval.form.kind=jsno", "data.eval.form.kind: expected one of"),
        (
            "data.eval.Form={kind: jsonl, path: x}",
            "data.eval.Form: may hold lowercase letters, digits and, between them, '-', got 'Form'",
        ),
        ("data.eval=3", "data.eval: expected a section, got 3"),
        ("roles.teacher={a: null}", "roles.teacher.a: expected a section, got nothing"),
        ("roles.teacher={a: 3}", "roles.teacher.a: expected a section, got 3"),
        (
            "roles.teacher={a: {kind: x}}",
            "roles.teacher.a.kind: expected one of 'forward', 'engine', 'endpoint', got 'x'",
        ),
        ("data.eval=[]", "data.eval: expected a section or sections by name, got a list"),
        ("data.train={a: {kind: jsonl, path: x}}", "data.train: expected a section or a list, got sections by name"),
        ("data.eval.form=3", "data.eval.form: "),
        ("checkpoint={patience: 3}", "checkpoint.patience: needs checkpoint.best: the metric that is to become better"),
        ("evaluation.every_steps=0", "checkpoint.best: needs evaluations during the run"),
        ("checkpoint.best.metric=eval/sum/avg", "no evaluation reports 'eval/sum/avg' (did you mean 'eval/sums/avg'?)"),
        ("checkpoint.best.metric=eval/form/avg", "checkpoint.best.metric: no evaluation reports 'eval/form/avg'"),
        (
            "checkpoint.best.metric=eval/sums/truncated",
            "checkpoint.best.mode: the highest eval/sums/truncated would be",
        ),
    ],
)
def test_bad_held_out_sets_and_best_checkpoints_are_refused_at_their_field(
    tmp_path: Path, override: str, line: str
) -> None:
    train = "data.train={kind: reasoning_gym, recipes: [{name: chain_sum}], size: 9, seed: 1}"
    given = [BEST, *([train, "roles.reward.functions.0.name=reasoning_gym"] if "seed=1" in override else [])]
    with pytest.raises(SpecError) as caught:
        load(tmp_path, NAMED, *given, override)
    assert line in str(caught.value)
    assert ": data.eval.named" not in str(caught.value) and "one source" not in str(caught.value)


def test_a_reward_model_does_not_say_what_counts_as_solved(tmp_path: Path) -> None:
    assert solved_at(load(tmp_path, GRPO, "roles.reward.model={path: judge}")) is None
    assert solved_at(load(tmp_path, GRPO, "roles.reward.model={path: judge}", "roles.reward.model_weight=0")) == 1.0


# Files


def _problems(folder: Path, text: str, *overrides: str) -> list[str]:
    path = folder / "spec.yaml"
    path.write_text(text)
    return [
        str(problem).replace(str(folder), "DIR") for problem in plan_runs(read_document(path, overrides))[0].missing()
    ]


def test_chat_templates_that_cannot_be_used_are_refused_with_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [line for line in _problems(tmp_path, PPO, "model.chat_template=non") if "chat_template" in line]
    assert found == ["--set: model.chat_template: no such file: non (did you mean 'none'?)"]
    (tmp_path / "own.jinja").write_text("x")
    for word in ("own.jinja", "none"):
        assert not [line for line in _problems(tmp_path, PPO, f"model.chat_template={word}") if "template" in line]
    for override, message in (
        ("roles.reference.model.chat_template=none", "has no effect: this model reads the policy's tokens; remove it"),
        ("model={path: m, chat_templte: none}", "unknown field (did you mean 'chat_template'?)"),
        ("model={path: m, chat_template: ''}", "may not be empty"),
    ):
        with pytest.raises(SpecError, match=re.escape(message)):
            _problems(tmp_path, PPO, override)
    with pytest.raises(SpecError, match=r"data\.train\.system: model\.chat_template none has no system message"):
        _problems(tmp_path, PPO, "model.chat_template=none", "data.train.system=Be brief.")


def test_missing_files_are_named_with_their_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _problems(tmp_path, PPO, "data.eval={kind: datasets, path: held}") == [
        "DIR/spec.yaml:2: model.path: no such folder: models/m",
        "DIR/spec.yaml:7: roles.reference.model.path: no such folder: models/ref",
        "DIR/spec.yaml:8: roles.reward.model.path: no such folder: models/rm",
        "DIR/spec.yaml:12: data.train.path: no such file: train.jsonl",
        "--set: data.eval.path: no such folder: held",
    ]


def test_a_revision_of_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sections = ("model", "roles.reference.model", "roles.reward.model")
    found = _problems(tmp_path, PPO, *(f"{section}.revision=main" for section in sections))
    folders = ("models/m", "models/ref", "models/rm")
    for section, folder in zip(sections, folders, strict=True):
        assert f"--set: {section}.revision: is of a model on the hub, and {folder} is a folder: remove it" in found
    on_hub = (f"{section}.{value}" for section in sections for value in ("revision=main", "path=acme/tiny"))
    assert not [line for line in _problems(tmp_path, PPO, *on_hub) if "model" in line]


def test_a_model_folder_must_hold_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "m"
    folder.mkdir(parents=True)
    (tmp_path / "train.jsonl").write_text("")
    line = "DIR/spec.yaml:2: model.path: models/m"
    assert _problems(tmp_path, GRPO) == [f"{line} is not a model folder: it has no config.json"]
    (folder / "config.json").write_text('{"max_position_embeddings": 256}')
    short = "DIR/spec.yaml:4: roles.rollout.max_model_len: 512 is more than the model's 256 positions"
    assert _problems(tmp_path, GRPO) == [f"{line} has no *.safetensors", short]
    (folder / "model.safetensors").write_text("")
    assert _problems(tmp_path, GRPO)[0].startswith(f"{line} has no tokenizer")
    (folder / "tokenizer.json").write_text("")
    (folder / "config.json").write_text("[not json")
    assert _problems(tmp_path, GRPO) == [
        f"{line}/model.safetensors is not a safetensors file: a header of 0 bytes in 0"
    ]
    (folder / "model.safetensors").write_bytes(NO_WEIGHTS)
    assert _problems(tmp_path, GRPO) == []
    generation = folder / "generation_config.json"
    generation.write_text("no JSON")
    assert _problems(tmp_path, GRPO) == []
    generation.write_text("[]")
    why = "is not a JSON object: transformers and vLLM load no model beside it; remove it"
    assert _problems(tmp_path, GRPO) == [f"{line}/generation_config.json {why}"]
    generation.unlink()
    (folder / "config.json").write_text("[" * (2 << 20))
    config = "DIR/spec.yaml:2: model.path: models/m/config.json"
    assert _problems(tmp_path, GRPO) == [f"{config} is larger than 1 MiB: this is no model's configuration"]


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("config", "bound", "kind"),
    [
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 256}}, 256, "longrope"),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 256}, 256, "su"),
        ({"rope_parameters": {"full_attention": LONGROPE}, "original_max_position_embeddings": 256}, 256, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 256}, 256, "dynamic"),
        ({"text_config": {"rope_parameters": LONGROPE, "max_position_embeddings": 256}}, 256, "longrope"),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1024}}, None, ""),
        ({"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 256}}, None, ""),
        ({"rope_scaling": None}, None, ""),
    ],
)
def test_frequencies_that_depend_on_the_batch_bound_the_length(
    config: dict[str, Any], bound: int | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m", "ref", "rm"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096} | config))
    found = [problem for problem in _problems(tmp_path, PPO) if "max_model_len" in problem]
    message = "DIR/spec.yaml:4: roles.rollout.max_model_len: 1024 is more than {}, the original positions of {}: beyond"
    owners = ["the model", "roles.reference.model", "roles.reward.model"] if bound else []
    assert [problem[: len(message.format(bound, owner))] for problem, owner in zip(found, owners, strict=True)] == [
        message.format(bound, owner) for owner in owners
    ]
    assert all(f"({kind})" in problem for problem in found)


def test_a_reference_needs_positions_for_the_longest_sequence_and_a_reward_model_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, positions in {"m": 1024, "ref": 256, "rm": 256}.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    assert [problem for problem in _problems(tmp_path, PPO) if "positions" in problem] == [
        "DIR/spec.yaml:4: roles.rollout.max_model_len: 1024 is more than roles.reference.model's 256 positions"
    ]


def test_a_problem_without_a_place_is_at_the_top_of_the_file() -> None:
    assert str(Source("f").problem("a.b", "is wrong")) == "f:1: a.b: is wrong"


@pytest.mark.parametrize("name", ["tiny-grpo", "tiny-dpo"])
def test_a_trial_of_fewer_updates_than_the_warm_up_is_valid_with_a_warning(name: str) -> None:
    def warnings(*overrides: str) -> list[str]:
        path, sets = ROOT / "deploy" / "specs" / f"{name}.yaml", ["roles.policy.warmup_updates=5", *overrides]
        return warnings_of(plan_runs(read_document(path, sets))[0].spec)

    assert warnings("schedule.steps=6") == []
    (line,) = warnings("schedule.steps=5")
    assert line.startswith("roles.policy.warmup_updates: 5, but the run has 5: the learning rate stays below")
    with pytest.raises(SpecError, match="must be less than the run's 5 updates"):
        warnings("schedule.steps=5", "roles.policy.schedule=linear")
