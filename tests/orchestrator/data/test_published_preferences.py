"""Preferences in the layouts of published sets: `troupe init` writes their columns, and the better answer is chosen.

The rows are made up. Better answers begin with `good`, worse ones with `bad`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from troupe.orchestrator.data.conversations import chat_messages
from troupe.orchestrator.data.summary import describe, load_data
from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.sources import Prompts
from troupe.orchestrator.starter.choices import Choices
from troupe.orchestrator.starter.command import text_of

Row = dict[str, Any]


def chat(*texts: str) -> list[Row]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 4, texts, strict=False)]


def hh(answer: str) -> str:
    return f"\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: And now?\n\nAssistant: {answer}"


SHP = [
    {"post_id": "a", "history": "How?", "human_ref_A": "bad a", "human_ref_B": "good b", "score_A": 2, "score_B": 9}
    | {"labels": 0, "score_ratio": 4.5},
    {"post_id": "b", "history": "Why?", "human_ref_A": "good a", "human_ref_B": "bad b", "score_A": 5, "score_B": 4}
    | {"labels": 1, "score_ratio": 1.25},
]
WEBGPT = [
    {"question": {"dataset": "x", "full_text": "Why?"}, "answer_0": "bad 0", "answer_1": "good 1"}
    | {"score_0": -1.0, "score_1": 1.0, "quotes_0": {"title": ["t"]}},
    {"question": {"dataset": "x", "full_text": "How?"}, "answer_0": "good 0", "answer_1": "bad 1"}
    | {"score_0": 0.5, "score_1": -0.5, "quotes_0": {"title": ["t"]}},
    {"question": {"dataset": "x", "full_text": "Who?"}, "answer_0": "tie 0", "answer_1": "tie 1"}
    | {"score_0": 0.0, "score_1": 0.0, "quotes_0": {"title": ["t"]}},
]
HELPSTEER2 = [
    {"split": "train", "prompt": "A?", "response_1": "good 1", "response_2": "bad 2", "preference_strength": -2},
    {"split": "train", "prompt": "B?", "response_1": "bad 1", "response_2": "good 2", "preference_strength": 1},
    {"split": "train", "prompt": "C?", "response_1": "tie 1", "response_2": "tie 2", "preference_strength": 0},
]
HELPSTEER3 = [
    {"domain": "x", "context": chat("A?"), "response1": "bad 1", "response2": "good 2", "overall_preference": 3},
    {"domain": "x", "context": chat("B?", "b", "C?"), "response1": "good 1", "response2": "bad 2"}
    | {"overall_preference": -1},
]
ARENA = [
    {"winner": winner, "conversation_a": chat("Q", first), "conversation_b": chat("Q", second), "turn": 1}
    for winner, first, second in (
        *(("model_b", "bad", "good"), ("model_a", "good", "bad"), ("tie", "tie 1", "tie 2")),
        ("tie (bothbad)", "tie 3", "tie 4"),
    )
]
KAGGLE = [
    {"id": 1, "prompt": '["Q", "And?"]', "response_a": '["a", "good"]', "response_b": '["b", "bad"]'}
    | {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0},
    {"id": 2, "prompt": '["R"]', "response_a": '["bad"]', "response_b": '["good"]'}
    | {"winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0},
    {"id": 3, "prompt": '["S"]', "response_a": '["tie a"]', "response_b": '["tie b"]'}
    | {"winner_model_a": 0, "winner_model_b": 0, "winner_tie": 1},
]
PKU = [
    {"prompt": f"{better}?", "response_0": first, "response_1": second, "better_response_id": better}
    | {"safer_response_id": 0}
    for better, first, second in ((1, "bad", "good"), (0, "good", "bad"))
]
SUMMARIZE = [
    {"info": {"id": "x", "post": f"P{choice}"}, "summaries": [{"text": text, "policy": "p"} for text in texts]}
    | {"choice": choice, "worker": "w"}
    for choice, texts in ((1, ("bad", "good")), (0, ("good", "bad")))
]
ULTRAFEEDBACK = [
    {"source": "s", "instruction": f"Do {n}", "models": ["a"], "completions": [
        {"model": "m", "response": text, "overall_score": score} for text, score in answers
    ]} for n, answers in enumerate([
        [("bad 1", 4.0), ("good", 8.5), ("fair", 5.0), ("bad 2", 3.0)],
        [("tie 1", 5.0), ("tie 2", 5.0)],
    ])
]  # fmt: skip
NECTAR = [
    {"prompt": "\n\nHuman: Q\n\nAssistant: ", "turns": 1, "answers": [
        {"answer": text, "model": "m", "rank": rank} for text, rank in (("fair", 2.0), ("good", 1.0), ("bad", 3.0))
    ]}
]  # fmt: skip
ALPACAFARM = [
    {"instruction": f"Do {n}", "output_1": first, "output_2": second, "preference": n}
    for n, first, second in ((1, "good", "bad"), (2, "bad", "good"))
]
BINARIZED = [
    {"prompt": "Do", "chosen": chat("Do", "good"), "rejected": chat("Do", "bad"), "score_chosen": 8.0}
    | {"score_rejected": 3.0, "messages": chat("Do", "good")}
]
ORCA = [{"system": "Be brief.", "question": "Q", "chosen": "good", "rejected": "bad"}]
LABELS = {
    "bool": (True, False),
    "number": (1, 0),
    "float": (1.0, 0.0),
    "text": ("True", "False"),
    "digit": ("1", "0"),
    "word": ("yes", "No"),
}


def signed(column: str) -> Row:
    return {"column": column, "first": "negative", "second": "positive"}


def preferred(column: str, first: Any, second: Any) -> Row:
    return {"column": column, "first": first, "second": second}


WINNER = preferred("winner", "model_a", "model_b") | {"ties": ["tie", "tie (bothbad)", "both_bad"]}


def write(rows: Sequence[Row], path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*rows]), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec(path: Path, algorithm: str, columns: str) -> Any:
    """The spec of a run on rows with these fields of `data.train`."""
    reference = "\n  reference: {colocate_with: policy}" if algorithm in ("dpo", "kto") else ""
    text = f"""
name: t
seed: 3
model: {{path: m}}
roles:
  policy: {{micro_batch_tokens: 4096}}{reference}
algorithm: {{name: {algorithm}}}
schedule: {{steps: 1, examples_per_step: 2}}
data: {{train: {{kind: {path.suffix[1:]}, path: {path}{columns and ", " + columns}}}}}
checkpoint: {{every_steps: 0}}
"""
    return plan_runs(yaml_reader.parse(text, "spec.yaml"))[0].spec


def texts(run: Any) -> list[tuple[list[str], list[str], float]]:
    """Texts of the prompt and of the last turn of each answer, and the margin, of each row that is used."""
    rows = load_data(run).pools["train"].table.to_pylist()
    return [
        (
            [message["content"] for message in json.loads(row["messages"])],
            [json.loads(turns)[-1]["content"] for turns in row["responses"]],
            row["margin"],
        )
        for row in rows
    ]


_NAMES = (
    *("hh", "hh-prompt", "guanaco", "shp", "webgpt", "helpsteer2", "helpsteer3", "arena", "kaggle", "pku"),
    *("summarize", "ultrafeedback", "nectar", "alpacafarm", "binarized", "orca"),
)
PAIRS: dict[str, tuple[list[Row], Row, list[str], int, str]] = dict(
    zip(
        _NAMES,
        [
            ([{"chosen": hh("good"), "rejected": hh("bad")}], {"prompt": None}, ["Hello", "Hi.", "And now?"], 1, ""),
            (
                [{"prompt": "\n\nHuman: Q\n\nAssistant:", "chosen": " good", "rejected": " bad"}],
                *({}, ["Q"], 1, ""),
            ),
            (
                [
                    {
                        "text": "x",
                        "chosen": "### Human: Q### Assistant: good",
                        "rejected": "### Human: Q### Assistant: bad",
                    }
                ],
                *({"prompt": None}, ["Q"], 1, ""),
            ),
            (
                SHP,
                {
                    "prompt": "history",
                    "answers": ["human_ref_A", "human_ref_B"],
                    "preferred": preferred("labels", 1, 0),
                },
                *(["How?"], 2, ""),
            ),
            (
                WEBGPT,
                {"prompt": "question.full_text", "answers": ["answer_0", "answer_1"], "scores": ["score_0", "score_1"]},
                *(["Why?"], 2, "1 ties"),
            ),
            (
                HELPSTEER2,
                {"answers": ["response_1", "response_2"], "preferred": signed("preference_strength")},
                *(["A?"], 2, "1 ties"),
            ),
            (
                HELPSTEER3,
                {"prompt": "context", "answers": ["response1", "response2"], "preferred": signed("overall_preference")},
                *(["A?"], 2, ""),
            ),
            (
                ARENA,
                {"prompt": None, "answers": ["conversation_a", "conversation_b"], "preferred": WINNER},
                *(["Q"], 2, "2 ties"),
            ),
            (
                KAGGLE,
                {"answers": ["response_a", "response_b"], "scores": ["winner_model_a", "winner_model_b"]},
                *(["Q"], 2, "1 ties"),
            ),
            (
                PKU,
                {"answers": ["response_0", "response_1"], "preferred": preferred("better_response_id", 0, 1)},
                *(["1?"], 2, ""),
            ),
            (
                SUMMARIZE,
                {"prompt": "info.post", "answers": "summaries.text", "preferred": preferred("choice", 0, 1)},
                *(["P1"], 2, ""),
            ),
            (
                ULTRAFEEDBACK,
                {"prompt": "instruction", "answers": "completions.response", "scores": "completions.overall_score"},
                *(["Do 0"], 1, "1 ties"),
            ),
            (NECTAR, {"answers": "answers.answer", "ranks": "answers.rank"}, ["Q"], 1, ""),
            (
                ALPACAFARM,
                {
                    "prompt": "instruction",
                    "answers": ["output_1", "output_2"],
                    "preferred": preferred("preference", 1, 2),
                },
                *(["Do 1"], 2, ""),
            ),
            (BINARIZED, {}, ["Do"], 1, ""),
            (ORCA, {"prompt": "question", "system_column": "system"}, ["Be brief.", "Q"], 1, ""),
        ],
        strict=True,
    )
)
"""Layouts of pairs: rows, the columns that `init` writes, the prompt of the first, used rows, and what is left out."""


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("rows", "columns", "first_prompt", "used", "left_out"), PAIRS.values(), ids=PAIRS)
def test_init_reads_pairs_as_they_are_published(
    rows: list[Row],
    columns: Row,
    first_prompt: list[str],
    used: int,
    left_out: str,
    suffix: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    file, said = write(rows, tmp_path / f"rows{suffix}"), list[str]()
    choices = Choices(model=str(tiny_model), data=str(file), algorithm="dpo", cpus=2)
    written = text_of(choices, tmp_path / "run.yaml", said.append)
    section = yaml.safe_load(written)["data"]["train"]
    assert {name: value for name, value in section.items() if name not in {"kind", "path"}} == columns
    assert [note for note in said if "left out" in note] == (
        [f"Of the first {len(rows)} rows are left out: {left_out}."] if left_out else []
    )
    (tmp_path / "run.yaml").write_text(written)
    found = texts(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec)
    assert len(found) == used and found[0][0] == first_prompt
    for _, answers, _ in found:
        assert answers[0].startswith("good") and answers[-1].startswith("bad")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_may_be_written_as_text(labels: tuple[Any, Any], suffix: str, tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "completion": f"A {n}", "label": label} for n, label in enumerate(labels)]
    file = write(rows, tmp_path / f"rows{suffix}")
    choices = Choices(model=str(tiny_model), data=str(file), algorithm="kto", cpus=2)
    (tmp_path / "run.yaml").write_text(text_of(choices, tmp_path / "run.yaml"))
    pool = load_data(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec).pools["train"]
    assert pool.table.column("desirable").to_pylist() == [True, False] and pool.bad_rows == 0


@pytest.mark.parametrize("label", [-1, 2, "thumbs_down", "-1", 0.5])
def test_labels_of_another_form_refuse_the_file(label: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Skipped as bad rows, they would leave the desirable ones alone to train on."""
    rows = [{"prompt": "Q", "response": f"A {n}", "label": one} for n, one in enumerate((1, label, label))]
    file = write(rows, tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"^data\.train\.label: does not fit 2 rows; the first: rows\.jsonl:2: the l"):
        load_data(spec(file, "kto", ""))
    with pytest.raises(UsageError, match=r"data\.train\.label: does not fit 2 rows"):
        text_of(Choices(model=str(tiny_model), data=str(file), algorithm="kto", cpus=2), tmp_path / "run.yaml")


@pytest.mark.parametrize("label", ["", None, float("nan")])
def test_a_row_without_a_label_is_a_bad_row(label: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "response": f"A {n}", "label": one} for n, one in enumerate((1, label, 0))]
    pool = load_data(spec(write(rows, tmp_path / "rows.jsonl"), "kto", "")).pools["train"]
    assert (pool.rows, pool.bad_rows) == (2, 1)


TWO = "answers: [response_1, response_2], preferred: {column: preference_strength, first: negative, second: positive}"
SCORED = "prompt: question.full_text, answers: [answer_0, answer_1], scores: [score_0, score_1]"
OF_SHP = "prompt: history, answers: [human_ref_A, human_ref_B], preferred: {column: labels, first: 1, second: 0}"
LISTED = "prompt: instruction, answers: completions.response, scores: completions.overall_score"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize(
    ("rows", "columns", "margins", "left_out"),
    [
        (HELPSTEER2, f"{TWO}, margin: preference_strength", [2.0, 1.0], {"ties": 1}),
        (HELPSTEER2, f"{TWO}, min_margin: 2", [0.0], {"pairs with a margin below 2": 1, "ties": 1}),
        (SHP, f"{OF_SHP}, margin: score_ratio, min_margin: 2", [4.5], {"pairs with a margin below 2": 1}),
        (SHP, f"{OF_SHP}, margin: [score_A, score_B]", [7.0, 1.0], {}),
    ],
)
def test_strength_is_the_margin_or_decides_which_pairs_are_used(
    rows: list[Row], columns: str, margins: list[float], left_out: dict[str, int], suffix: str, tmp_path: Path
) -> None:
    run = spec(write(rows, tmp_path / f"rows{suffix}"), "reward_model", columns)
    assert [margin for _, _, margin in texts(run)] == margins
    pool = load_data(run).pools["train"]
    assert pool.skipped == left_out and pool.bad_rows == 0
    assert describe({"train": pool}) == [
        ", ".join([f"data.train: {len(margins)} rows", *(f"{n} {kind} left out" for kind, n in left_out.items())])
    ]


def test_algorithms_on_pairs_take_the_best_and_the_worst_of_several_answers(tmp_path: Path) -> None:
    file = write(ULTRAFEEDBACK, tmp_path / "rows.jsonl")
    assert [answers for _, answers, _ in texts(spec(file, "orpo", LISTED))] == [["good", "bad 2"]]
    ranked = [answers for _, answers, _ in texts(spec(file, "reward_model", LISTED))]
    assert ranked == [["good", "fair", "bad 1", "bad 2"]]


@pytest.mark.parametrize(
    ("rows", "columns", "problem"),
    [
        (WEBGPT, "prompt: question.full_text, chosen: answer_0, rejected: answer_1, margin: score_0",
         "margin: does not fit 1 rows; the first: rows.jsonl:1: the margin is -1"),
        (SHP, "prompt: history, chosen: human_ref_A, rejected: human_ref_B, margin: [score_A, score_B]",
         "margin: does not fit 1 rows; the first: rows.jsonl:1: the margin is -7"),
        (SHP, "prompt: history, answers: [human_ref_A, human_ref_B], preferred: {column: labels, first: 1, second: 2}",
         "preferred: does not fit 1 rows; the first: rows.jsonl:1: labels is 0, which is none of first, second and"),
        (ARENA, "prompt: null, answers: [conversation_a, conversation_b], "
         "preferred: {column: winner, first: model_a, second: model_b, ties: [tie]}",
         "preferred: does not fit 1 rows; the first: rows.jsonl:4: winner is 'tie (bothbad)'"),
    ],
)  # fmt: skip
def test_signs_and_values_that_disagree_with_the_order_refuse_the_file(
    rows: list[Row], columns: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        load_data(spec(write(rows, tmp_path / "rows.jsonl"), "reward_model", columns))
    assert str(error.value).startswith(f"data.train.{problem}")


RATED = [{"prompt": "Q", "chosen": f"a {n}", "rejected": f"b {n}", "chosen_rating": n, "rejected_rating": 1}
         for n in range(3)]  # fmt: skip
RANKED = [{"prompt": "Q", "chosen": f"a {n}", "rejected": f"b {n}", "rank_chosen": 1, "rank_rejected": n}
         for n in range(3)]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "columns", "warned"),
    [
        (SHP, "prompt: history, chosen: human_ref_A, rejected: human_ref_B",
         ["1 of the first 2 rows prefer human_ref_B, by score_A and score_B",
          "labels may say which answer is better (answers, preferred), and is not read"]),
        (WEBGPT, "prompt: question.full_text, chosen: answer_0, rejected: answer_1",
         ["1 of the first 3 rows prefer answer_1, by score_0 and score_1"]),
        (RATED, "", ["1 of the first 3 rows prefer rejected, by chosen_rating and rejected_rating"]),
        (RANKED, "", ["1 of the first 3 rows prefer rejected, by rank_chosen and rank_rejected"]),
        (BINARIZED, "", []),
        ([{"prompt": "Q", "chosen": "a", "rejected": "b", "length_chosen": 1, "length_rejected": 2}], "", []),
    ],
)  # fmt: skip
def test_unread_columns_that_disagree_with_the_order_are_warned_of(
    rows: list[Row], columns: str, warned: list[str], tmp_path: Path
) -> None:
    pools = load_data(spec(write(rows, tmp_path / "rows.jsonl"), "orpo", columns)).pools
    assert describe(pools) == [", ".join([f"data.train: {len(rows)} rows", *(f"warning: {one}" for one in warned)])]


@pytest.mark.parametrize(
    ("columns", "margin"),
    [("answers: answers, scores: scores, margin: [x, y]", None), ("chosen: x, rejected: y, margin: scores", [1])],
)
def test_a_margin_has_a_number_for_each_answer(columns: str, margin: Any, tmp_path: Path) -> None:
    row = {"prompt": "Q", "answers": ["a", "b", "c"], "scores": margin or [1, 2, 9], "x": "4", "y": "1"}
    path = write([row], tmp_path / "rows.jsonl")
    run = spec(path, "orpo", f"{columns}, min_margin: 1")
    with pytest.raises(DataError, match=r"the margins are not a list of \d numbers, one per answer"):
        load_data(run)


@pytest.mark.parametrize(
    ("algorithm", "columns", "problem"),
    [
        ("dpo", "answers: [a]", "answers: needs two or more columns"),
        ("dpo", "answers: [a, b], scores: [x, y, z]", "scores: must name one column for each column of answers"),
        ("dpo", "answers: a, ranks: [x, y]", "ranks: must name one column for each column of answers"),
        ("dpo", "answers: [a, b], scores: [x, y], ranks: [z, w]", "ranks: scores already orders the answers"),
        ("dpo", "answers: [a, b, c], preferred: {column: d, first: 0, second: 1}", "preferred: says which of two"),
        ("dpo", "answers: [a, b], preferred: {column: d, first: negative, second: 1}", "preferred: negative and pos"),
        ("dpo", "answers: [a, b], preferred: {column: d, first: 1, second: [2, '1']}", "preferred: has a value twice"),
        ("dpo", f"{TWO[:-1]}, ties: [9]}}", "preferred.ties: has no effect on signed numbers"),
        ("dpo", "preferred: {column: d, first: 0, second: 1}", "preferred: dpo on pairs does not use it"),
        ("dpo", "answers: [a, b], chosen: x", "chosen: dpo on pairs does not use it"),
        ("dpo", "min_margin: 1", "min_margin: needs margin, scores or signed preferred"),
        ("dpo", "answers: a, scores: b, min_margin: 1", "min_margin: dpo on ranked does not use it"),
        ("dpo", "margin: m", "margin: dpo on pairs does not use it"),
        ("kto", "answers: [a, b]", "answers: kto on labelled does not use it"),
        ("rrhf", "answers: a", "scores: is required"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(
    algorithm: str, columns: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as error:
        spec(tmp_path / "rows.jsonl", algorithm, columns)
    assert f"data.train.{problem}" in str(error.value)


def test_step_labels_name_their_algorithm(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "completions": ["Step 1", "Step 2"], "labels": [True, False]}]
    choices = Choices(model=str(tiny_model), data=str(write(rows, tmp_path / "r.jsonl")), algorithm="reward_model")
    with pytest.raises(UsageError, match="a label for each step: --algorithm process_reward_model"):
        text_of(choices, tmp_path / "run.yaml")


def one_in_a_row(*scores: int) -> list[Row]:
    """HelpSteer2 as it is published: two answers to a prompt follow each other."""
    return [
        {"prompt": f"{number // 2}?", "response": f"{'good' if score > 1 else 'bad'} {number}", "helpfulness": score}
        for number, score in enumerate(scores)
    ]


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "reward_model", "rrhf"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_answers_in_rows_of_their_own_are_joined_by_their_prompt(
    algorithm: str, suffix: str, tiny_model: Path, tmp_path: Path
) -> None:
    """A tie, and a prompt with one answer, are left out and counted."""
    rows = one_in_a_row(0, 4, 3, 1, 2, 2, 4)
    data = write(rows, tmp_path / f"r{suffix}")
    choices = Choices(model=str(tiny_model), data=str(data), algorithm=algorithm, cpus=2)
    said: list[str] = []
    (tmp_path / "run.yaml").write_text(text_of(choices, tmp_path / "run.yaml", said.append))
    document = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert document["data"]["train"]["one_in_a_row"] is True
    assert "Of the first 7 rows are left out: 1 ties, 1 prompts with one answer." in said
    table = load_data(plan_runs(read_document(tmp_path / "run.yaml"))[0].spec).pools["train"].table.to_pylist()
    assert [[json.loads(one)[-1]["content"] for one in row["responses"]] for row in table] == [
        ["good 1", "bad 0"],
        ["good 2", "bad 3"],
    ]


def test_rows_with_one_answer_each_need_their_number(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"data\.train\.one_in_a_row: needs prompt, answers"):
        spec(tmp_path / "rows.jsonl", "dpo", "answers: response, one_in_a_row: true")


def test_one_answer_in_a_row_is_refused_with_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Q {n}", "response": text, "helpfulness": n} for n, text in enumerate(("A", "B"))]
    choices = Choices(model=str(tiny_model), data=str(write(rows, tmp_path / "r.jsonl")), algorithm="dpo")
    with pytest.raises(UsageError, match=r"one answer in a row, .* in one row, as a list `answers` beside"):
        text_of(choices, tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: Q\n\nAssistant:", chat("Q")),
        ("\n\nHuman: Q\n\nAssistant: A\n\nHuman: R\n\nAssistant:", chat("Q", "A", "R")),
        ("Human: 1\n2\n\nAssistant: ", chat("1\n2")),
        ("### Human: Q### Assistant: A### Human: R", chat("Q", "A", "R")),
        *(
            (text, chat(text))
            for text in ("Human: what is that?", "Who said: \n\nHuman: Q\n\nAssistant:?", "A Human: B")
        ),
    ],
)
def test_turns_in_the_text_of_a_prompt_are_turns(text: str, turns: list[Row]) -> None:
    source = Prompts.model_construct()
    assert chat_messages(text, source) == turns
    assert chat_messages(text, source, plain=True) == [{"role": "user", "content": text}]


def test_a_column_has_the_system_message_of_a_row(tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "chosen": "a", "rejected": "b", "sys": text} for text in ("Be brief.", "", None)]
    run = spec(write(rows, tmp_path / "rows.jsonl"), "orpo", "system_column: sys, system: Be kind.")
    assert [prompt[0] for prompt, _, _ in texts(run)] == ["Be brief.", "Be kind.", "Be kind."]


@pytest.mark.parametrize(
    ("algorithm", "columns", "row", "others"),
    [
        ("kto", "", {"response": "A", "label": True}, [{"label": False}, {"response": "a"}]),
        (
            "process_reward_model",
            "",
            {"completions": ["A", "B"], "labels": [1, 0]},
            [{"labels": [1, 1]}, {"completions": ["A", "b"]}],
        ),
        ("reward_model", "margin: by", {"chosen": "A", "rejected": "B", "by": 1.0}, [{"by": 2.0}, {"chosen": "a"}]),
        (
            "reward_model",
            "answers: all, scores: scores",
            {"all": ["A", "B"], "scores": [2, 1]},
            [{"scores": [3, 1]}, {"all": ["A", "b"]}],
        ),
        ("sft", "", {"response": "A"}, [{"response": "a"}, {"prompt": "R"}]),
    ],
    ids=["kto", "steps", "pairs", "ranked", "sft"],
)
def test_examples_with_other_labels_or_answers_in_another_case_are_no_doubles(
    algorithm: str, columns: str, row: Row, others: list[Row], tmp_path: Path
) -> None:
    rows = [{"prompt": "Q", **row}, *({"prompt": "Q", **row, **one} for one in others), {"prompt": "q ", **row}]
    file = write(rows, tmp_path / "rows.jsonl")
    pool = load_data(spec(file, algorithm, ", ".join([part for part in (columns, "dedupe: true") if part]))).pools
    assert (pool["train"].rows, pool["train"].deduped) == (3, 1)


def rated(text: str, rating: int | None = 1) -> Row:
    return {"text": text, "rating": rating, "flagged": False}


def step(*completions: Row, chosen: int | None = None, human: str | None = None) -> Row:
    written = None if human is None else {"text": human, "rating": None}
    return {"completions": list(completions), "chosen_completion": chosen, "human_completion": written}


def tree() -> list[Row]:
    """Two steps of PRM800K, one of them with three completions, and one that a person wrote."""
    return [
        step(rated("a"), rated("b", -1), rated("c", None), chosen=0),
        step(rated("d", 0), chosen=0),
        step(rated("e", -1), human="f"),
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("steps", "ways"),
    [
        (tree(), {"b": [0], "a d e": [1, 0.25, 0], "a d f": [1, 0.25, 1]}),
        ([step(rated("a"), chosen=0), step(rated("b", 0), chosen=0)], {"a b": [1, 0.25]}),
        # The solution ends with a wrong step: what is before it is part of that way.
        ([step(rated("a"), chosen=0), step(rated("b", -1))], {"a b": [1, 0]}),
        # Nobody has rated the way on.
        ([step(rated("a"), chosen=0), step(rated("b", None), chosen=0), step(rated("c"), chosen=0)], {"a": [1]}),
        ([step(rated("a"), rated("b", -1)), step(rated("c"), chosen=0)], {"a": [1], "b": [0]}),
        ([step(human="a"), step()], {"a": [1]}),
    ],
)
def test_every_way_through_a_tree_of_steps_is_an_example(
    steps: list[Row], ways: dict[str, list[float]], suffix: str, tmp_path: Path
) -> None:
    rows = [{"question": {"problem": "1?"}, "label": {"steps": one, "finish_reason": "x"}} for one in (steps, tree())]
    columns = 'prompt: question.problem, steps: label.steps, step_labels: null, neutral: 0.25, separator: "\\n"'
    pool = load_data(spec(write(rows, tmp_path / f"rows{suffix}"), "process_reward_model", columns)).pools["train"]
    found = {
        " ".join(json.loads(turns)[0]["content"].strip() for turns in row["responses"]): row["scores"]
        for row in pool.table.to_pylist()
        if row["origin"].endswith(":1")
    }
    assert found == ways and pool.bad_rows == 0


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([], "no step has a rating"),
        ([step(rated("a", None))], "no step has a rating"),
        ("text", "the steps are no list"),
        ([{"completions": "a"}], "the completions are no list"),
        ([["a"]], "a step is no object"),
        ([step(rated("a"), chosen=1)], "the chosen completion is 1, of 1"),
        ([{"completions": [{"rating": 1}]}], "a completion of a step has no text"),
        ([step(rated(" "), chosen=0)], "the steps are not a list of texts"),
    ],
)
def test_a_tree_without_ways_is_a_bad_row(steps: Any, why: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1?", "steps": one} for one in (tree(), steps)]
    columns = "steps: steps, step_labels: null"
    pool = load_data(spec(write(rows, tmp_path / "rows.jsonl"), "process_reward_model", columns)).pools["train"]
    assert (pool.rows, pool.bad_rows) == (3, 1) and f"rows.jsonl:2: {why}" in pool.problems[0]


@pytest.mark.parametrize("rating", [2, "good", 0.5])
def test_a_rating_of_another_scale_refuses_the_file(rating: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1?", "steps": [step(rated("a"), rated("b", rating), chosen=0)]}]
    file = write(rows, tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"^data\.train\.steps: does not fit 1 rows; .*neither -1, 0 nor 1"):
        load_data(spec(file, "process_reward_model", "steps: steps, step_labels: null"))
