"""From rows of data to rows of tokens: bad rows are named and counted, prompt ids equal those of a rollout."""

from __future__ import annotations

import asyncio
import io
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes import FakeTrainer, FaultyWorker
from tests.tokenizers import new_tokenizer
from troupe.orchestrator.cluster.worker_group import ExampleGroup
from troupe.orchestrator.data.examples import load_examples, load_pool
from troupe.orchestrator.data.summary import RunData
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.roles.settings import offline_config
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.offline import OfflineRun
from troupe.orchestrator.runs.session import RunRequest, Session
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.offline_source import ExampleEvaluator
from troupe.workers.algorithms.offline_objectives import OBJECTIVES, Scored, Totals
from troupe.workers.contract.messages import RankPlan
from troupe.workers.contract.offline_config import ExampleConfig, OfflineLossConfig, RewardLossConfig, RrhfLossConfig
from troupe.workers.contract.offline_messages import EXAMPLE_BATCH, EXAMPLES
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import ExampleTable, assemble, attach, tokenize
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs
from troupe.workers.models.token_batch import score_table

CONFIG = ExampleConfig(max_length=64, micro_batch_tokens=128)
PADDED = RankPlan((), 0, 0)
ROOMY = CONFIG.model_copy(update={"micro_batch_tokens": 4096})


def spec(path: Path, algorithm: str, *, on_bad_row: str = "skip", **source: Any) -> OfflineSpec:
    reference = {"reference": {"colocate_with": "policy"}} if algorithm in ("dpo", "ipo", "kto") else {}
    return OfflineSpec.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "roles": {"policy": {}, **reference},
            "algorithm": {"name": algorithm},
            "schedule": {"steps": 1, "examples_per_step": 2},
            "data": {"train": {"kind": path.suffix[1:], "path": str(path), **source}},
            "failures": {"on_bad_row": on_bad_row},
        }
    )


def rows_of(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pool(loaded: OfflineSpec) -> Any:
    source: Any = loaded.data.train
    return load_pool(loaded, source, "data.train")


GOOD = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
PROCESS = "process_reward_model"
STEPS = {"prompt": "1+1+1?", "completions": ["1 + 1 = 2.", " 2 + 1 = 4."], "labels": [True, 0]}
MARKED = {"prompt": None, "steps": "input", "step_labels": "label"}


@pytest.mark.parametrize(
    ("algorithm", "columns", "bad", "why"),
    [
        ("dpo", {}, GOOD | {"rejected": "2"}, "the chosen and the rejected answer are the same"),
        ("dpo", {}, GOOD | {"chosen": " "}, "the chosen answer is empty"),
        ("dpo", {}, GOOD | {"rejected": 3}, "the rejected answer is neither text nor messages"),
        ("dpo", {}, {"prompt": "1+1?", "chosen": "2"}, "no column 'rejected'"),
        ("dpo", {}, GOOD | {"prompt": ""}, "the prompt is empty"),
        ("reward_model", {"margin": "m"}, GOOD | {"m": float("nan")}, "the margin is not a finite number: nan"),
        ("reward_model", {"margin": "m"}, GOOD | {"m": True}, "the margin is not a finite number: True"),
        ("rrhf", {"scores": "s"}, {"prompt": "1?", "answers": ["a"], "s": [1]}, "the answers are not a list of two"),
        ("rrhf", {"scores": "s"}, {"prompt": "1?", "answers": ["a", "a"], "s": [1, 2]}, "two answers are the same"),
        ("rrhf", {"scores": "s"}, {"prompt": "1?", "answers": ["a", "b"], "s": [1]}, "the scores are not a list of 2"),
        ("kto", {}, {"prompt": "1?", "response": "a", "label": ""}, "the label is empty"),
        ("sft", {}, {"prompt": "1?", "response": ""}, "the response is empty"),
    ],
)
def test_a_bad_row_is_named_counted_and_skipped_or_refused(
    tmp_path: Path, algorithm: str, columns: dict[str, str], bad: dict[str, Any], why: str
) -> None:
    good = GOOD | {"response": "2", "label": 1, "answers": ["a", "b", "c"], "s": [1, 3, 2], "m": 0.5}
    path = rows_of(tmp_path / "d.jsonl", [good, bad, good | {"prompt": "2+2?"}])
    found = pool(spec(path, algorithm, **columns))
    assert (found.rows, found.bad_rows) == (2, 1)
    assert found.problems[0].startswith(f"d.jsonl:2: {why}")
    with pytest.raises(DataError, match=r"^d\.jsonl:2: "):
        pool(spec(path, algorithm, on_bad_row="stop", **columns))


def test_an_unknown_column_is_named_with_its_field(tmp_path: Path) -> None:
    path = rows_of(tmp_path / "d.jsonl", [GOOD])
    with pytest.raises(DataError, match=r"no column 'choosen' \(data\.train\.chosen\); columns there: .*did you mean"):
        pool(spec(path, "dpo", chosen="choosen"))


def test_answers_with_scores_are_put_in_order_and_parquet_reads_alike(tmp_path: Path) -> None:
    row = {"prompt": "1?", "answers": ["low", "high", "mid"], "scores": [1.0, 3.0, 2.0]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
    one, two = (
        pool(spec(path, "rrhf", scores="scores"))
        for path in (rows_of(tmp_path / "d.jsonl", [row]), tmp_path / "d.parquet")
    )
    said = [[{"role": "assistant", "content": text}] for text in ("high", "mid", "low")]
    assert [json.loads(turns) for turns in one.table.column("responses").to_pylist()[0]] == said
    assert one.table.column("scores").to_pylist() == [[3.0, 2.0, 1.0]]
    assert one.digest == two.digest


def test_held_out_examples_are_not_trained_on(tmp_path: Path) -> None:
    path = rows_of(tmp_path / "d.jsonl", [GOOD, GOOD | {"prompt": "2+2?"}])
    loaded = spec(rows_of(tmp_path / "t.jsonl", [GOOD]), "dpo")
    train_source: Any = loaded.data.train
    source = train_source.model_copy(update={"path": str(path)})
    loaded = loaded.model_copy(update={"data": loaded.data.model_copy(update={"eval": source})})
    train, held_out = load_examples(loaded)
    assert held_out is not None
    assert (train.rows, held_out.rows, held_out.left_out) == (1, 1, 1)


@pytest.fixture
def tokenizer(demo_model: Path) -> Any:
    """That of the model whose large vocabulary the lengths here are of."""
    return new_tokenizer(demo_model)


def texts(tmp_path: Path, rows: list[dict[str, Any]], algorithm: str = "dpo", **columns: str) -> pa.Table:
    return pool(spec(rows_of(tmp_path / "texts.jsonl", rows), algorithm, **columns)).table


def test_prompt_ids_are_a_rollouts_and_the_response_ends_its_turn(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "What is 1 + 1?", "response": "It is 2."}]
    table = tokenize(tokenizer, texts(tmp_path, rows, "sft"), CONFIG)[1]
    assert table.schema.equals(EXAMPLES, check_metadata=True)
    row = table.to_pylist()[0]
    messages = json.dumps([{"role": "user", "content": "What is 1 + 1?"}])
    assert row["prompt_ids"] == encode_prompt(tokenizer, messages, 64)
    assert tokenizer.decode(row["response_ids"]) == "It is 2.<|im_end|>"
    said = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    whole = tokenizer.apply_chat_template(said, tokenize=True, return_dict=True)["input_ids"]
    assert whole[: len(row["prompt_ids"]) + len(row["response_ids"])] == row["prompt_ids"] + row["response_ids"]


def marked(steps: str, labels: str) -> dict[str, str]:
    """A row of Math-Shepherd."""
    return {"input": f"Add (x). {steps}", "label": f"Add (x). {labels}", "task": "GSM8K"}


@pytest.mark.parametrize(
    ("row", "columns", "text", "ends", "labels"),
    [
        (STEPS, {}, "1 + 1 = 2.\n\n2 + 1 = 4.", ["1 + 1 = 2.\n\n", None], [1.0, 0.0]),
        (STEPS, {"separator": "\n"}, "1 + 1 = 2.\n2 + 1 = 4.", ["1 + 1 = 2.\n", None], [1.0, 0.0]),
        (STEPS | {"labels": ["0.25", 1.0]}, {}, "1 + 1 = 2.\n\n2 + 1 = 4.", ["1 + 1 = 2.\n\n", None], [0.25, 1.0]),
        (STEPS | {"completions": ["é"], "labels": [0.5]}, {}, "é", [None], [0.5]),
        (
            marked("Step 1: a (b) ки\nStep 2: c ки", "Step 1: a (b) +\nStep 2: c -"),
            MARKED | {"separator": "\n"},
            "Step 1: a (b)\nStep 2: c",
            ["Step 1: a (b)\n", None],
            [1.0, 0.0],
        ),
    ],
)
def test_steps_are_one_response_with_a_label_where_each_ends(
    row: dict[str, Any], columns: dict[str, Any], text: str, ends: list[Any], labels: list[float],
    tokenizer: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """The tokens are those of SFT on the whole response, and the last step ends where the turn does."""
    read = texts(tmp_path, [row], PROCESS, **columns)
    summary, table = tokenize(tokenizer, read, CONFIG.model_copy(update={"steps": True}))
    assert (summary.usable, table.num_rows) == (1, 1)
    (found,) = table.to_pylist()
    question = row.get("prompt", "Add (x).")
    whole = tokenize(tokenizer, texts(tmp_path, [{"prompt": question, "response": text}], "sft"), CONFIG)[1]
    assert (found["prompt_ids"], found["response_ids"]) == tuple(
        whole.to_pylist()[0][name] for name in ("prompt_ids", "response_ids")
    )
    places = [place for place, is_end in enumerate(found["loss_mask"]) if is_end]
    shown = [tokenizer.decode(found["response_ids"][: place + 1]) for place in places]
    assert shown == [end or f"{text}<|im_end|>" for end in ends]
    assert found["step_labels"] == labels
    batch_summary, batch = assemble([("a", 0)], table, CONFIG)
    assert [row.loss_tokens for row in batch_summary.rows] == [len(labels)]
    cut = ExampleTable(batch).cut([0], PADDED, "cpu")
    assert cut.step_labels.tolist() == labels and int(cut.tokens.loss_mask.sum()) == len(labels)


@pytest.mark.parametrize(
    ("columns", "bad", "why"),
    [
        ({}, STEPS | {"completions": "a"}, "the steps are not a list of texts"),
        ({}, STEPS | {"completions": ["a", " "]}, "the steps are not a list of texts"),
        ({}, STEPS | {"labels": [1]}, "the labels are not a list of 2 labels"),
        ({}, STEPS | {"labels": [1, None]}, "the label of a step is empty"),
        ({"separator": ", "}, STEPS | {"completions": ["a", "b, c"]}, "a step has the separator, ', '"),
        (MARKED, {"input": "Q? a ки\nb ки", "label": "Q? a +\nc -"}, "the labels are not the text of the steps"),
        (MARKED, {"input": "Q? a ки\nb", "label": "Q? a +\nb"}, "the labels are not the text of the steps"),
        (MARKED, {"input": "1 ки\n2 ки", "label": "1 +\n2 -"}, "the prompt is empty"),
    ],
)
def test_a_row_whose_steps_cannot_be_told_apart_is_bad(
    columns: dict[str, Any], bad: dict[str, Any], why: str, tmp_path: Path
) -> None:
    good = STEPS | marked("Step 1: a ки\nb ки", "Step 1: a +\nb -")
    found = pool(spec(rows_of(tmp_path / "d.jsonl", [good, good | bad]), PROCESS, **columns))
    assert (found.rows, found.bad_rows) == (1, 1)
    assert f"d.jsonl:2: {why}" in found.problems[0]


@pytest.mark.parametrize("label", [-1, 2, "good", "-1"])
def test_a_label_of_a_step_in_another_form_refuses_the_file(label: Any, tmp_path: Path) -> None:
    rows = [STEPS, STEPS | {"labels": [label, 1]}]
    with pytest.raises(DataError, match=r"data.train.step_labels: does not fit 1 rows"):
        pool(spec(rows_of(tmp_path / "r.jsonl", rows), PROCESS))


def test_examples_that_do_not_fit_are_named(tokenizer: Any, tmp_path: Path) -> None:
    rows = [GOOD, GOOD | {"chosen": "word " * 100}, GOOD | {"prompt": "word " * 100}]
    summary, table = tokenize(tokenizer, texts(tmp_path, rows), CONFIG)
    assert (summary.usable, summary.refused, table.num_rows) == (1, 2, 2)
    assert "texts.jsonl:2: prompt and response have" in summary.problems[0]
    assert "texts.jsonl:3: " in summary.problems[1]


def test_usable_examples_are_counted_by_source(tokenizer: Any, tmp_path: Path) -> None:
    pool = texts(tmp_path, [GOOD, GOOD | {"chosen": "word " * 100}, GOOD, GOOD])
    assert tokenize(tokenizer, pool, CONFIG)[0].sources == {}
    named = pool.set_column(pool.column_names.index("source"), "source", pa.array(["a", "a", "b", "b"]))
    summary, table = tokenize(tokenizer, named, CONFIG)
    assert (summary.usable, summary.sources) == (3, {"a": 1, "b": 2})
    assert table.schema.equals(EXAMPLES, check_metadata=True)


@pytest.mark.parametrize("algorithm", ["reward_model", "rrhf"])
def test_ranked_answers_that_do_not_fit_in_one_micro_batch_are_named(
    tokenizer: Any, tmp_path: Path, algorithm: str
) -> None:
    """Padded to the longest, as they are computed; to the token."""
    scores = {"scores": "s"} if algorithm == "rrhf" else {}
    rows = [
        {"prompt": "1?", "answers": ["a", "b", "c", "word " * length][:count], "s": [4, 3, 2, 1][:count]}
        for count, length in ((3, 1), (4, 12), (4, 1))
    ]
    loaded = texts(tmp_path, rows, algorithm, answers="answers", **scores)
    lengths = [
        max(len(row["prompt_ids"] + row["response_ids"]) for row in example)
        for example in by_example(
            tokenize(tokenizer, loaded, CONFIG.model_copy(update={"micro_batch_tokens": 4096}))[1]
        )
    ]
    assert lengths[1] > lengths[2] >= lengths[0]
    budget = 4 * lengths[1] - 1
    summary, table = tokenize(tokenizer, loaded, CONFIG.model_copy(update={"micro_batch_tokens": budget}))
    assert (summary.usable, summary.refused, len(by_example(table))) == (2, 1, 2)
    assert summary.problems == (
        f"texts.jsonl:2: 4 answers, {lengths[1]} tokens the longest with its prompt, take {budget + 1}, more than "
        f"roles.policy.micro_batch_tokens, {budget}",
    )
    assert tokenize(tokenizer, loaded, CONFIG.model_copy(update={"micro_batch_tokens": budget + 1}))[0].refused == 0


@pytest.mark.parametrize("on_bad_row", ["skip", "stop"])
def test_a_run_counts_or_refuses_what_does_not_fit_into_its_micro_batches(
    tokenizer: Any, tmp_path: Path, on_bad_row: str
) -> None:
    rows = [{"prompt": "1?", "answers": [f"answer {n}" for n in range(count)]} for count in (2, 9)]
    loaded = spec(rows_of(tmp_path / "d.jsonl", rows), "reward_model", on_bad_row=on_bad_row, answers="answers")
    roles = loaded.roles.model_copy(
        update={"policy": loaded.roles.policy.model_copy(update={"micro_batch_tokens": 256})}
    )
    loaded = loaded.model_copy(update={"roles": roles})
    said = io.StringIO()
    problem = r"d\.jsonl:2: 9 answers, \d+ tokens the longest with its prompt, take \d+, more than roles\.policy\."
    refused = pytest.raises(DataError, match=f"^{problem}") if on_bad_row == "stop" else nullcontext()
    with refused:
        asyncio.run(evaluator_of(loaded, tokenizer, said))
    counted = re.search(rf"data\.eval: 1 rows do not fit and are skipped; the first: {problem}", said.getvalue())
    assert bool(counted) == (on_bad_row == "skip")


async def evaluator_of(loaded: OfflineSpec, tokenizer: Any, said: io.StringIO) -> ExampleEvaluator:
    """The evaluator of a run whose only worker tokenizes."""

    class Tokenizer(FakeTrainer):
        async def tokenize(self, texts: pa.Table) -> Any:
            return tokenize(tokenizer, texts, offline_config(loaded).examples)

    worker: Any = FaultyWorker("policy-0", Tokenizer())
    workers: Any = SimpleNamespace(examples=ExampleGroup("policy", [worker], 256), reference=None)
    cluster: Any = SimpleNamespace(put=lambda table: table)
    launcher: Any = None
    request, checkpoints = RunRequest(loaded, Path(), False, None), cast("RunCheckpoints", None)
    opened = (request, loaded, cluster, launcher, workers, Console(said), asyncio.Event(), checkpoints)
    return await OfflineRun(Session(*opened, read=RunData(pool(loaded), {"eval": pool(loaded)}))).evaluator()


def by_example(table: pa.Table) -> list[list[dict[str, Any]]]:
    """Rows of an EXAMPLES table, example by example."""
    rows = table.to_pylist()
    return [[row for row in rows if row["example"] == number] for number in range(rows[-1]["example"] + 1)]


def test_a_batch_keeps_the_rows_of_an_example_together(tokenizer: Any, tmp_path: Path) -> None:
    rows = [GOOD | {"prompt": f"{n}+1?", "chosen": f"{n + 1}"} for n in range(5)]
    _, examples = tokenize(tokenizer, texts(tmp_path, rows), CONFIG)
    summary, batch = assemble([("b", 3), ("a", 0)], examples, CONFIG)
    assert batch.schema.equals(EXAMPLE_BATCH, check_metadata=True)
    assert summary.members == (2, 2)
    assert batch.column("prompt_uid").to_pylist() == ["b", "b", "a", "a"]
    assert batch.column("sample_index").to_pylist() == [0, 1, 0, 1]
    assert [row.loss_tokens > 0 for row in summary.rows] == [True, False, True, False]
    micro = ExampleTable(batch).cut([2, 3, 0, 1], PADDED, "cpu")
    assert (micro.groups.group.tolist(), micro.groups.member.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert ExampleTable(batch).cut([], PADDED, "cpu").groups.count == 0


def test_scores_say_which_answers_are_better_and_which_are_tied(tokenizer: Any, tmp_path: Path) -> None:
    """Without scores the order in the data is strict; scores that differ by less than float32 holds still differ."""
    close = 1.0 + 1e-12
    rows = [{"prompt": "1?", "answers": ["a", "b", "c", "d"], "s": [1.0, 2.0, 1.0, close]}]
    cases = (
        (texts(tmp_path, rows, "reward_model", answers="answers", scores="s"), [2.0, close, 1.0, 1.0]),
        (texts(tmp_path, rows, "reward_model", answers="answers"), [0.0, -1.0, -2.0, -3.0]),
        (texts(tmp_path, [GOOD]), [0.0, -1.0]),
    )
    for loaded, wanted in cases:
        _, batch = assemble([("x", 0)], tokenize(tokenizer, loaded, ROOMY)[1], ROOMY)
        assert batch.column("score").to_pylist() == wanted
        micro = ExampleTable(batch).cut(range(len(wanted)), PADDED, "cpu")
        better = micro.groups.better(micro.score)[0].tolist()
        assert better == [[one > other for other in wanted] for one in wanted]


def test_two_ranked_answers_become_the_rows_of_a_pair(tokenizer: Any, tmp_path: Path) -> None:
    ranked = [{"prompt": GOOD["prompt"], "answers": [GOOD["chosen"], GOOD["rejected"]]}]
    pair, two = (
        tokenize(tokenizer, loaded, CONFIG)[1]
        for loaded in (texts(tmp_path, [GOOD]), texts(tmp_path, ranked, "dpo", answers="answers"))
    )
    assert pair.equals(two)


@pytest.mark.parametrize(
    ("algorithm", "config"), [("reward_model", RewardLossConfig(lm_coef=0.5)), ("rrhf", RrhfLossConfig())]
)
def test_the_order_of_tied_answers_in_the_data_does_not_matter(
    tokenizer: Any, tmp_path: Path, algorithm: str, config: OfflineLossConfig
) -> None:
    """From the file to the loss, the likelihood of the best answers included."""
    said = [("good", 1.0), ("right", 1.0), ("so so", 0.5), ("bad", 0.5), ("worse", 0.0)]
    found = []
    for order in ((0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (4, 3, 1, 2, 0)):
        rows = [{"prompt": "1?", "answers": [said[n][0] for n in order], "s": [said[n][1] for n in order]}]
        loaded = texts(tmp_path, rows, algorithm, answers="answers", scores="s")
        summary, batch = assemble([("x", 0)], tokenize(tokenizer, loaded, ROOMY)[1], ROOMY)
        micro = ExampleTable(batch).cut(range(5), PADDED, "cpu")
        tokens = micro.tokens
        scored = Scored(
            groups=micro.groups,
            sequence=tokens.sequence,
            loss_mask=tokens.loss_mask,
            score=micro.score,
            margin=micro.margin,
            desirable=micro.desirable,
            logprobs=-(tokens.targets % 7).double(),
            rewards=torch.zeros(5).double().index_add(0, tokens.sequence, (tokens.targets % 5).double()),
        )
        totals = Totals(1, sum(row.loss_tokens for row in summary.rows))
        found.append(OBJECTIVES[type(config)](scored, config, totals).loss.item())
        assert [row.loss_tokens > 0 for row in summary.rows] == [True, True, False, False, False]
    assert found == pytest.approx([found[0]] * 3, rel=1e-14)


def test_only_tokens_from_the_first_difference_on_carry_the_loss(tokenizer: Any, tmp_path: Path) -> None:
    rows = [GOOD | {"chosen": "It is 2", "rejected": "It is 3"}]
    late = CONFIG.model_copy(update={"from_divergence": True})
    ranked = [{"prompt": "1+1?", "answers": ["It is 2", "It is 3", "It was 4"]}]
    loaded = texts(tmp_path, ranked, "dpo", answers="answers")
    masks = tokenize(tokenizer, loaded, late)[1].column("loss_mask").to_pylist()
    assert [mask.index(True) for mask in masks] == [1, 1, 1]
    masks = tokenize(tokenizer, texts(tmp_path, rows), late)[1].column("loss_mask").to_pylist()
    assert [mask.index(True) for mask in masks] == [3, 3] or masks[0].index(True) > 0
    assert masks[0].index(True) == masks[1].index(True)


def test_kto_pairs_every_prompt_with_the_previous_response(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "response": f"answer {n}", "label": n % 2 == 0} for n in range(3)]
    config = CONFIG.model_copy(update={"mismatched": True})
    _, examples = tokenize(tokenizer, texts(tmp_path, rows, "kto"), config)
    summary, batch = assemble([("a", 0), ("b", 1), ("c", 2)], examples, config)
    said = batch.to_pylist()
    assert summary.members == (2, 2, 2)
    assert [row.loss_tokens > 0 for row in summary.rows] == [True, False] * 3
    for number in range(3):
        own, other = said[2 * number : 2 * number + 2]
        assert own["prompt_ids"] == other["prompt_ids"]
        assert other["response_ids"] == said[2 * ((number - 1) % 3)]["response_ids"]


def test_reference_logprobs_join_by_identity_in_any_order(tokenizer: Any, tmp_path: Path) -> None:
    _, examples = tokenize(tokenizer, texts(tmp_path, [GOOD]), CONFIG)
    _, batch = assemble([("a", 0)], examples, CONFIG)
    lengths = torch.tensor([len(ids) for ids in batch.column("response_ids").to_pylist()])
    parts = []
    for row in (1, 0):
        values = torch.full((int(lengths[row]),), float(row))
        parts.append(score_table("ref_logprobs", batch.slice(row, 1), values, lengths[row : row + 1]))
    joined = attach(batch, parts).column("ref_logprobs").to_pylist()
    assert [set(values) for values in joined] == [{0.0}, {1.0}]
    with pytest.raises(ValueError, match=r"example a\[0\] was not scored"):
        attach(batch, parts[:1])


def test_packed_examples_are_isolated(tmp_path: Path, tiny_model: Path) -> None:
    """The same log-probs and gradients, without padding."""
    rows = [{"prompt": f"{n}?", "response": "word " * (1 + 3 * n)} for n in range(4)]
    _, examples = tokenize(new_tokenizer(tiny_model), texts(tmp_path, rows, "sft"), CONFIG)
    _, batch = assemble([(str(n), n) for n in range(4)], examples, CONFIG)
    table = ExampleTable(batch)
    tokens, packed = (table.cut(range(4), plan, "cpu").tokens for plan in (PADDED, replace(PADDED, packed=True)))
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    module = CausalLogprobs(model, 1.0)
    padded = module(batch=tokens)[0]
    assert adapt(module, model, "cpu", packing=True)
    assert tokens.padding == tokens.input_ids.numel() - packed.input_ids.numel() > packed.padding == 0
    together = module(batch=packed)[0]
    assert torch.allclose(together, padded, atol=1e-5)
    gradients = [torch.autograd.grad(found.sum(), list(model.parameters())) for found in (padded, together)]
    for one, two in zip(*gradients, strict=True):
        assert torch.allclose(one, two, atol=1e-3)
