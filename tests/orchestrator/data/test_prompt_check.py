"""The first prompts are rendered and measured with the model's tokenizer before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from orchestrator.data.prompt_check import PROMPTS, PromptCheck, check_prompts
from orchestrator.data.survey import read_pools
from orchestrator.spec.stages import plan_runs, read_document
from tests.conftest import ROOT


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model without weights, to be changed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


def check(model: Path, name: str, prompts: list[str], *overrides: str) -> PromptCheck:
    data = model.parent / "prompts.jsonl"
    rows = [{"prompt": prompt, "answer": "1", "response": "fine"} for prompt in prompts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [f"model.path={model}", f"data.train={{kind: jsonl, path: {data}}}", *overrides]
    spec = plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", sets))[0].spec
    return check_prompts(spec, read_pools(spec)["train"])


LENGTHS = ("roles.rollout.max_model_len=128", "sampling.max_tokens=64")


def test_prompts_with_room_are_not_mentioned(model: Path) -> None:
    assert check(model, "tiny-grpo", ["Say a.", "Say b."], *LENGTHS) == PromptCheck()


def test_long_prompts_are_counted_and_refused_where_all_are(model: Path) -> None:
    long = " ".join(["word"] * 90)
    (line,) = check(model, "tiny-grpo", ["Say a.", long, long], *LENGTHS).lines
    assert line.startswith("2 of the first 3 prompts of data.train have more than the 64 tokens that ")
    assert line.endswith("such prompts are dropped") and "(longest: 1" in line
    ((field, problem),) = check(model, "tiny-grpo", [long] * (PROMPTS + 5), *LENGTHS).problems
    assert field == "roles.rollout.max_model_len"
    assert problem.startswith(f"the first {PROMPTS} prompts of data.train have more than the 64 tokens that ")
    ((field, _),) = check(model, "tiny-sft", [long], "data.max_length=32").problems
    assert field == "data.max_length"


def test_a_tokenizer_without_a_chat_template_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    found = check(model, "tiny-grpo", ["Say a."], *LENGTHS)
    assert found.problems == (("model.path", f"the tokenizer in {model} has no chat template"),)


def test_a_tokenizer_that_cannot_be_loaded_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    ((field, problem),) = check(model, "tiny-grpo", ["Say a."], *LENGTHS).problems
    assert field == "model.path" and problem.startswith(f"the tokenizer in {model} cannot be loaded: ")


def test_a_chat_template_that_fails_is_refused_where_it_fails_for_all(model: Path) -> None:
    template = (
        "{% if 'bad' in messages[0].content %}{{ raise_exception('no bad') }}{% endif %}{{ messages[0].content }}"
    )
    (model / "chat_template.jinja").write_text(template)
    (line,) = check(model, "tiny-grpo", ["bad a", "good b"], *LENGTHS).lines
    assert line.startswith("1 of the first 2 prompts of data.train are not rendered: prompts.jsonl:1: ")
    ((field, problem),) = check(model, "tiny-grpo", ["bad a", "bad b"], *LENGTHS).problems
    assert field == "model.path" and "renders none of the first 2 prompts" in problem and "no bad" in problem


def test_a_model_that_an_earlier_stage_will_write_is_not_checked(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "chat_template.jinja").unlink()
    assert check(model, "tiny-grpo", ["Say a."], *LENGTHS) == PromptCheck()
