"""Results of evaluations that are used again: only where nothing that they depend on has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.fakes import fake_spec
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.rollouts.evaluation_cache import cache_folder, cached, keep, model_digest, result_of, set_keys
from troupe.orchestrator.rollouts.evaluation_log import EvaluationLog, described_sets, read_evaluations
from troupe.orchestrator.rollouts.held_out import PromptResult, SetResult, summarize
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import PROMPTS

SETS = {
    "math": {"kind": "jsonl", "path": "math", "sampling": {"temperature": 1.0, "samples": 4}},
    "form": {"kind": "jsonl", "path": "form", "rewards": [{"name": "regex", "args": {"pattern": "x"}}]},
}


def spec_of(**sections: object) -> RolloutSpec:
    data = {"train": {"kind": "jsonl", "path": "train"}, "eval": sections.pop("sets", SETS)}
    return fake_spec(data=data, **({"evaluation": {"every_steps": 1}} | sections))  # type: ignore[arg-type]


def keys(spec: RolloutSpec, model: str = "m", digest: str = "d") -> dict[str, str]:
    pools = {one.section: Pool(PROMPTS.empty_table(), digest) for one in spec.held_out_sets()}
    return set_keys(spec, model, described_sets(spec, pools))


def result() -> SetResult:
    prompts = [PromptResult((1.0, 0.0), (3, 4), 1, (0, 1), "2"), PromptResult((1.0, 1.0), (3, 4), 0, (0, 0), "3")]
    return summarize(prompts, refused=1, samples=2, solved_at=1.0, average="avg", pass_at=[2])


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (lambda: keys(spec_of(), model="other"), set()),
        (lambda: keys(spec_of(), digest="other"), set()),
        (lambda: keys(spec_of().model_copy(update={"seed": 8})), set()),
        (lambda: keys(spec_of(evaluation={"prompts": 3})), set()),
        (lambda: keys(spec_of(roles={"policy": {"gpus": 1}, "rollout": {"gpus": 1}})), set()),
        (lambda: keys(spec_of(sampling={"max_tokens": 7})), set()),
        (lambda: keys(spec_of(evaluation={"sampling": {"temperature": 0.5}})), {"math"}),
        (lambda: keys(spec_of(evaluation={"solved_at": 0.5})), {"form"}),
        (lambda: keys(spec_of(sets=SETS | {"math": SETS["math"] | {"level": "topic"}})), {"form"}),
        (lambda: keys(spec_of(sets=SETS | {"more": SETS["math"]})), {"math", "form"}),
    ],
)
def test_a_key_changes_with_what_a_result_depends_on(changed: Callable[[], dict[str, str]], same: set[str]) -> None:
    before, after = keys(spec_of()), changed()
    assert keys(spec_of()) == before
    assert {label for label in before if after.get(label) == before[label]} == same


def test_answers_of_others_have_no_key() -> None:
    asking = {"name": "judge", "args": {"rubric": "r", "endpoint": {"url": "http://localhost", "model": "m"}}}
    assert list(keys(spec_of(sets=SETS | {"form": SETS["form"] | {"rewards": [asking]}}))) == ["math"]
    assert keys(spec_of(roles={"environment": {"name": "single_turn"}})) == {}


def test_own_code_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, or every module of its package; code that is not found has no key."""
    monkeypatch.chdir(tmp_path)
    sets = {name: SETS["form"] | {"rewards": [{"name": f"{name}:score"}]} for name in ("alone", "inside", "gone")}
    sets["inside"]["rewards"] = [{"name": "package.inner:score"}]
    (tmp_path / "package").mkdir()
    files = [tmp_path / name for name in ("alone.py", "package/__init__.py", "package/inner.py", "package/other.py")]
    for file in files:
        file.write_text("")
    spec = spec_of(sets=sets)
    before = keys(spec)
    assert [*before] == ["alone", "inside"]
    files[3].write_text("changed = True")
    assert keys(spec)["alone"] == before["alone"] and keys(spec)["inside"] != before["inside"]
    files[0].write_text("changed = True")
    assert keys(spec)["alone"] != before["alone"]


def test_a_digest_covers_every_file_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "inner" / "weights").write_text("weights")
    digest = model_digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert model_digest(tmp_path / "copy") == digest
    (folder / "inner" / "weights").write_text("weightz")
    assert model_digest(folder) != digest
    (tmp_path / "copy" / "config.json").rename(tmp_path / "copy" / "other.json")
    assert model_digest(tmp_path / "copy") != digest


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    keep(tmp_path / "cache", "key", result())
    assert cached(tmp_path / "cache", "key") == result()
    assert cached(tmp_path / "cache", "other") is None
    (tmp_path / "cache" / "key.json").write_text('{"prompts": 3')
    assert cached(tmp_path / "cache", "key") is None
    assert result_of(json.loads(json.dumps(asdict(result())))) == result()


def test_the_cache_is_beside_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_MODELS", str(tmp_path / "models"))
    assert cache_folder() == tmp_path / "evaluations"


def test_a_resumed_run_replaces_evaluations_after_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    log = EvaluationLog(file, {"math": {}}, 0)
    for step in (0, 2, 4):
        log.add(step, {"math": result()})
    log = EvaluationLog(file, {"math": {}}, 2)
    log.add(3, {"math": result()})
    log.add(3, {"math": result()})
    content = read_evaluations(file)
    assert [one["step"] for one in content["evaluations"]] == [0, 2, 3]
    assert result_of(content["evaluations"][0]["sets"]["math"]) == result()
    file.write_text("[]")
    assert read_evaluations(file) == read_evaluations(tmp_path / "none") == {}


def test_the_reward_model_is_part_of_the_key_with_its_adapter_and_template(tmp_path: Path) -> None:
    files = {name: tmp_path / name / "config.json" for name in ("model", "one", "two")}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text(name)
    template = tmp_path / "template.jinja"
    template.write_text("a")

    def key(**model: str) -> str:
        path = {"path": str(tmp_path / "model")}
        return keys(spec_of(roles={"reward": {"functions": [], "model": path | model}}))["math"]

    settings = [{}, {"adapter": str(tmp_path / "one")}, {"adapter": str(tmp_path / "two")}]
    settings.append({"chat_template": str(template)})
    found = [key(**one) for one in settings]
    assert len(set(found)) == 4
    template.write_text("b")
    assert key(**settings[3]) != found[3]
