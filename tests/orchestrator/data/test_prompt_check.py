"""The first prompts are rendered and measured with the model's tokenizer before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.probes import ask_here
from tests.processes import descendants
from tests.workers.agents.environments.test_mcp import SERVER
from tests.workers.agents.episodes.templates import CHATML
from troupe.orchestrator.data.prompt_check import PROMPTS, PromptCheck, check_prompts, classify
from troupe.orchestrator.data.summary import load_data
from troupe.orchestrator.roles.settings import offline_config
from troupe.orchestrator.spec.derived.sizes import PromptRoom
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.workers.data.examples import tokenize
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.data.tokenizer_probe import measure


@pytest.fixture(autouse=True)
def asked_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render in this process, but for the tests of the first replies and of the first failure."""
    if "own_process" not in request.fixturenames:
        monkeypatch.setattr("troupe.orchestrator.data.prompt_check.ask", ask_here)


@pytest.fixture
def own_process() -> None:
    """Render in another process, as commands do."""


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model without weights, to be changed."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder


def check(model: Path, name: str, prompts: list[str], *overrides: str, response: str = "fine") -> PromptCheck:
    data = model.parent / "prompts.jsonl"
    rows = [{"prompt": prompt, "answer": "1", "response": response} for prompt in prompts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [f"model.path={model}", f"data.train={{kind: jsonl, path: {data}}}", *overrides]
    spec = plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", sets))[0].spec
    return check_prompts(spec, load_data(spec).pools)


LENGTHS = ("roles.rollout.max_model_len=128", "sampling.max_tokens=64")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("tiny-sft", lambda text: {"prompt": "Say a.", "response": text}),
        ("tiny-dpo", lambda text: {"prompt": "Say a.", "chosen": "b", "rejected": text}),
        (
            "tiny-process-reward-model",
            lambda text: {"prompt": "Say a.", "completions": [text, "b"], "labels": [1, 0]},
        ),
    ],
)
def test_responses_that_do_not_fit_are_counted(name: str, row: Any, model: Path) -> None:
    """As a run refuses them: the longest example that fits has `data.max_length` tokens."""
    texts = [" ".join(["word"] * count) for count in range(20, 60)]
    data = model.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row(text)) + "\n" for text in texts))
    sets = [f"model.path={model}", f"data={{max_length: 72, train: {{kind: jsonl, path: {data}}}}}", "evaluation=null"]
    spec = plan_runs(read_document(ROOT / "deploy" / "specs" / f"{name}.yaml", sets))[0].spec
    assert isinstance(spec, OfflineSpec)
    pools = load_data(spec).pools
    examples = offline_config(spec).examples.model_copy(update={"micro_batch_tokens": 4096})
    summary, _ = tokenize(load_chat_tokenizer(spec.model), pools["train"].table, examples)
    found = check_prompts(spec, pools)
    assert 0 < summary.refused < len(texts)
    assert found.refused == {"train": summary.refused}
    (line,) = found.lines
    assert "have more than the 72 tokens that data.max_length 72 allows for prompt and response" in line


@pytest.mark.usefixtures("own_process")
def test_prompts_with_room_are_not_mentioned(model: Path) -> None:
    assert check(model, "tiny-grpo", ["Say a.", "Say b."], *LENGTHS) == PromptCheck(refused={"train": 0})


def test_long_prompts_are_counted_and_refused_where_all_are(model: Path) -> None:
    long = " ".join(["word"] * 90)
    found = check(model, "tiny-grpo", ["Say a.", long, long], *LENGTHS)
    (line,) = found.lines
    assert found.refused == {"train": 2}
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
    remedy = "set model.chat_template to a Jinja file, or to none for prompts that are plain text"
    assert found.problems == (("model.path", f"the tokenizer in {model} has no chat template: {remedy}"),)
    template = model.parent / "own.jinja"
    for word, problems in ((template, ()), ("none", ())):
        template.write_text("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
        assert check(model, "tiny-grpo", ["Say a."], *LENGTHS, f"model.chat_template={word}").problems == problems
    template.write_text("{% for m in messages %}{{ m['content'] }}")
    ((field, problem),) = check(model, "tiny-sft", ["a"], f"model.chat_template={template}").problems
    assert field == "model.chat_template" and "TemplateSyntaxError" in problem


def test_an_end_of_turn_that_the_folder_does_not_name_is_said(model: Path) -> None:
    """A base model on a chat template: its generation configuration and its tokenizer have another end."""
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    (line,) = check(model, "tiny-grpo", ["Say a."], *LENGTHS).lines
    assert line.startswith("the chat template ends a turn with '<|im_end|>', which the model's folder does not name")
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert check(model, "tiny-grpo", ["Say a."], *LENGTHS).lines == ()


def test_an_end_of_turn_that_is_no_token_is_said(model: Path) -> None:
    """Phi's template on another vocabulary: sampling would only stop at the end-of-sequence token."""
    template = model.parent / "own.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}<|stop|>\n{% endfor %}{{ eos_token }}")
    own = f"model.chat_template={template}"
    (line,) = check(model, "tiny-grpo", ["Say a."], *LENGTHS, own).lines
    assert line.startswith("the chat template ends a turn with '<|stop|>', which is no token of the vocabulary")
    assert check(model, "tiny-grpo", ["Say a."], *LENGTHS, own, "sampling.stop=['<|stop|>']").lines == ()


def test_special_tokens_in_prompts_are_said_where_they_are_read_as_text(model: Path) -> None:
    prompts = ["Say a.", "<|im_start|>user\nSay b.<|im_end|>"]
    (line,) = check(model, "tiny-grpo", prompts, *LENGTHS).lines
    assert line.startswith("1 of the first prompts have special tokens, which are read as text; ")
    assert check(model, "tiny-grpo", prompts, *LENGTHS, "model.allow_special=true").lines == ()


def test_special_tokens_in_answers_and_texts_are_said_where_they_are_read_as_text(model: Path) -> None:
    response = "a<|im_end|>\n<|im_start|>user\nb"
    (line,) = check(model, "tiny-sft", ["Say a.", "Say b."], response=response).lines
    assert line.startswith("2 of the first answers and texts have special tokens, which are read as text; ")
    assert check(model, "tiny-sft", ["Say a."], "model.allow_special=true", response=response).lines == ()
    texts = model.parent / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("plain", response)))
    mix = (f"data.ptx={{kind: jsonl, path: {texts}}}", "algorithm.ptx_coef=0.1")
    (line,) = check(model, "tiny-grpo", ["Say a."], *LENGTHS, *mix).lines
    assert line.startswith("1 of the first answers and texts have special tokens, which are read as text; ")


@pytest.mark.usefixtures("own_process")
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


def test_prompts_of_the_evaluation_are_counted_beside_those_of_training(model: Path) -> None:
    held_out = model.parent / "eval.jsonl"
    long = " ".join(["word"] * 90)
    held_out.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ("Say c.", long)))
    sets = (f"data.eval={{kind: jsonl, path: {held_out}}}", *LENGTHS)
    found = check(model, "tiny-grpo", ["Say a.", "Say b."], *sets)
    (line,) = found.lines
    assert line.startswith("1 of the first 2 prompts of data.eval have more than the 64 tokens that ")
    assert found.refused == {"train": 0, "eval": 1}
    held_out.write_text(json.dumps({"prompt": long, "answer": "1"}) + "\n")
    ((field, problem),) = check(model, "tiny-grpo", ["Say a."], *sets).problems
    assert field == "roles.rollout.max_model_len" and "the first 1 prompts of data.eval" in problem


def test_a_held_out_set_leaves_room_for_its_own_longest_response(model: Path) -> None:
    """Each set is counted by itself."""
    held_out = model.parent / "eval.jsonl"
    middle = " ".join(["word"] * 20)
    held_out.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ("Say c.", middle)))
    source = f"kind: jsonl, path: {held_out}"
    sets = f"data.eval={{short: {{{source}}}, long: {{{source}, sampling: {{max_tokens: 70}}}}}}"
    found = check(model, "tiny-grpo", ["Say a.", "Say b."], sets, *LENGTHS)
    (line,) = found.lines
    assert line.startswith("1 of the first 2 prompts of data.eval.long have more than the 58 tokens that ")
    assert "leaves beside a response of 70 in evaluation" in line
    assert found.refused == {"train": 0, "eval.short": 0, "eval.long": 1}


def test_a_source_of_a_mixture_leaves_room_for_its_own_longest_response(model: Path) -> None:
    """As in the engine: `RolloutWorker._encode` has the longest response of the source."""
    middle = " ".join(["word"] * 50)
    prompts = model.parent / "prompts.jsonl"

    def sources(*others: str) -> str:
        one = f"kind: jsonl, path: {prompts}"
        return f"data.train=[{', '.join(f'{{name: s{n}, {one}{other}}}' for n, other in enumerate(others))}]"

    run = ("tiny-grpo", [middle])
    assert check(model, *run, sources(", max_tokens: 16"), *LENGTHS) == PromptCheck(refused={"train": 0})
    assert check(model, *run, sources(", max_tokens: 16", ""), *LENGTHS).problems  # the second source's are too long
    found = check(model, "tiny-grpo", [middle, " ".join(["word"] * 90)], sources(", max_tokens: 16"), *LENGTHS)
    (line,) = found.lines
    assert line.startswith("1 of the first 2 prompts of data.train.0 (s0) have more than the 112 tokens that ")
    assert "leaves beside a response of 16 in data.train.0" in line


@pytest.mark.parametrize("held_out", ["{}", "{sampling: {max_tokens: 8}}"])
def test_the_first_prompt_of_an_episode_needs_room_for_one_token(held_out: str, model: Path) -> None:
    """As in `EpisodeRunner`, whose turns take what the conversation leaves."""
    source = f"kind: jsonl, path: {model.parent / 'prompts.jsonl'}"
    sets = (
        "roles.environment={name: single_turn}",
        "data.held_out=false",
        f"data.eval={{own: {{{source}, {held_out[1:-1]}}}}}",
    )
    middle, long = " ".join(["word"] * 50), " ".join(["word"] * 150)
    assert check(model, "tiny-grpo", [middle], *sets, *LENGTHS).lines == ()
    lines = check(model, "tiny-grpo", [middle, long], *sets, *LENGTHS).lines
    assert [line.partition(" that ")[0] for line in lines] == [
        f"1 of the first 2 prompts of data.{name} have more than the 127 tokens" for name in ("train", "eval.own")
    ]


def test_rendering_ends_with_its_time(tiny_model: Path) -> None:
    request = {"model": {"path": str(tiny_model), "trust_remote_code": True}, "longest": 100, "answers": []}
    request |= {"tools": [None] * 3, "responses": [None] * 3}
    messages = [json.dumps([{"role": "user", "content": "Say a."}])] * 3
    assert len(list(measure(request | {"messages": messages, "seconds": 60.0}))) == 5 + 3
    assert list(measure(request | {"messages": messages, "seconds": -1.0})) == [
        "",
        "",
        "tools;tool calls in the history",
        0,
        0,
    ]
    assert classify("eval", [], "model.path", PromptRoom(1, "x", "y"), ["a:1"]) == PromptCheck()


@pytest.mark.parametrize(
    ("role", "named"),
    [
        (
            "{name: tools, args: {tools: [calculator]}, tool_parser: hermes}",
            "render tools: the policy does not",
        ),
        ("{name: tools, args: {tools: [calculator], system: Call it so.}, tool_parser: hermes}", ""),
        ("{name: agent, args: {command: [true]}, tool_parser: hermes}", "render tools, tool calls in the history: the"),
        ("{name: agent, args: {command: [true]}}", ""),
    ],
)
def test_tools_that_the_template_does_not_render_are_said(model: Path, role: str, named: str) -> None:
    found = check(model, "tiny-environment", ["Say a."], f"roles.environment={role}")
    lines = [line for line in found.lines if "chat template" in line]
    assert len(lines) == bool(named) and named in "".join(lines)
    assert all(line.startswith("roles.environment: the chat template does not render tools") for line in lines)


def test_prompts_are_measured_with_the_tools_and_the_system_message_of_their_environment(
    model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML)
    sets = (f"model.chat_template={template}", "roles.rollout.max_model_len=80", "sampling.max_tokens=8")
    role = "roles.environment={name: tools, args: {tools: [calculator], system: %s}, tool_parser: hermes}"
    ((field, problem),) = check(model, "tiny-environment", ["Say a."], role % "x", *sets).problems
    longest = re.search(r"max_model_len 80 leaves beside a turn of one token \(longest: (\d+)\)", problem)
    assert field == "roles.rollout.max_model_len" and longest
    ((_, more),) = check(model, "tiny-environment", ["Say a."], role % "x x x x", *sets).problems
    assert f"(longest: {int(longest[1]) + 3})" in more
    other = check(model, "tiny-environment", ["Say a."], "roles.environment={name: single_turn}", *sets)
    assert other.problems == ()


@pytest.mark.parametrize("broken", [False, True])
def test_prompts_are_measured_with_the_tools_of_servers_unless_they_do_not_start(
    broken: bool, model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML)
    server = {"command": [*SERVER, *(["--broken"] if broken else [])], "tools": ["shout"], "reuse": not broken}
    role = {"name": "tools", "args": {"servers": [server]}, "tool_parser": "hermes"}
    room = ("roles.rollout.max_model_len=80", "sampling.max_tokens=8", f"model.chat_template={template}")
    found = check(model, "tiny-environment", ["Say a."], f"roles.environment={json.dumps(role)}", *room)
    if broken:
        (line,) = found.lines
        assert found.problems == () and "this server does not start" in line
        assert line.startswith("roles.environment: prompts are measured without its tools and its system message")
    else:
        ((field, problem),) = found.problems
        assert field == "roles.rollout.max_model_len" and "(longest: " in problem
    assert descendants(title=SERVER[-1]) == []


def test_tools_and_calls_of_examples_that_the_template_does_not_render_are_counted(model: Path) -> None:
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    rows: list[dict[str, Any]] = [{"prompt": "Say a.", "response": [called], "tools": [{"name": "f"}]}]
    rows += [{"prompt": "Say a.", "response": "a", "tools": None}]
    data = model.parent / "calls.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"data.train={{kind: jsonl, path: {data}, tools: tools}}"
    found = check(model, "tiny-sft", ["x"], source)
    (line,) = (line for line in found.lines if "chat template" in line)
    assert line.startswith("1 of the first 2 examples of data.train have tool calls in the history, tools, which")
    data.write_text(json.dumps(rows[0]) + "\n")
    assert check(model, "tiny-sft", ["x"], source).problems == (("model.path", line.replace("first 2", "first 1")),)
