"""Conversational data, compared with what TRL makes of the same rows."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from trl.data_utils import apply_chat_template, extract_prompt, maybe_convert_to_chatml, maybe_extract_prompt

from tests.tokenizers import new_tokenizer
from troupe.orchestrator.data.examples import load_pool
from troupe.orchestrator.data.pools import Pool
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.workers.contract.offline_config import ExampleConfig
from troupe.workers.data.examples import assemble, tokenize

ROOMY = ExampleConfig(max_length=512, micro_batch_tokens=4096)

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What color is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREEN = {"role": "assistant", "content": "It is green."}
AGAIN = {"role": "user", "content": "At night?"}
BLACK = {"role": "assistant", "content": "Black."}
PREFERENCES = {
    "explicit prompt": {"prompt": [SYSTEM, ASK], "chosen": [BLUE], "rejected": [GREEN]},
    "implicit prompt": {"chosen": [SYSTEM, ASK, BLUE], "rejected": [SYSTEM, ASK, GREEN]},
    "text beside whole conversations": {"prompt": ASK["content"], "chosen": [ASK, BLUE], "rejected": [ASK, GREEN]},
    "several turns in common": {"chosen": [ASK, BLUE, AGAIN, BLACK], "rejected": [ASK, BLUE, AGAIN, GREEN]},
    "one longer than the other": {"chosen": [ASK, BLUE], "rejected": [ASK, GREEN, AGAIN, BLACK]},
}


def spec(path: Path, algorithm: str, template: str | None = None, **source: Any) -> OfflineSpec:
    reference = {"reference": {"colocate_with": "policy"}} if algorithm in ("dpo", "ipo", "kto") else {}
    return OfflineSpec.model_validate(
        {
            "name": "x",
            "model": {"path": "m", "chat_template": template},
            "roles": {"policy": {}, **reference},
            "algorithm": {"name": algorithm},
            "schedule": {"steps": 1, "examples_per_step": 2},
            "data": {"train": {"kind": "jsonl", "path": str(path), **source}},
        }
    )


def pool(folder: Path, rows: list[dict[str, Any]], algorithm: str, **fields: Any) -> Pool:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = spec(path, algorithm, **fields)
    source: Any = loaded.data.train
    return load_pool(loaded, source, "data.train")


def said(loaded: Pool) -> list[tuple[Any, list[Any]]]:
    """Prompt and responses of every row, as messages."""
    columns = (loaded.table.column(name).to_pylist() for name in ("messages", "responses"))
    return [(json.loads(prompt), list(map(json.loads, turns))) for prompt, turns in zip(*columns, strict=True)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return new_tokenizer(tiny_model)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def ended(text: str) -> str:
    """A completion as a policy samples it: up to the token that ends its turn, without the line break behind it."""
    return text.removesuffix("\n")


@pytest.mark.parametrize("form", PREFERENCES)
@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_preferences_have_the_tokens_of_trl(tmp_path: Path, tokenizer: Any, form: str, algorithm: str) -> None:
    row = PREFERENCES[form]
    loaded = pool(tmp_path, [row], algorithm, prompt="prompt" if "prompt" in row else None)
    assert loaded.problems == ()
    theirs: Any = maybe_extract_prompt(copy.deepcopy(row))
    assert said(loaded) == [(theirs["prompt"], [theirs["chosen"], theirs["rejected"]])]
    rendered = apply_chat_template(theirs, tokenizer)
    summary, table = tokenize(tokenizer, loaded.table, ROOMY)
    assert summary.problems == ()
    for made, name in zip(table.to_pylist(), ("chosen", "rejected"), strict=True):
        assert made["prompt_ids"] == ids(tokenizer, rendered["prompt"])
        assert made["response_ids"] == ids(tokenizer, ended(rendered[name]))


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
def test_prompt_and_completion_have_the_tokens_of_trl(tmp_path: Path, tokenizer: Any, algorithm: str) -> None:
    row: dict[str, Any] = {"prompt": [SYSTEM, ASK], "completion": [BLUE], "label": False}
    loaded = pool(tmp_path, [row], algorithm, response="completion")
    rendered = apply_chat_template(row, tokenizer)
    (made,) = tokenize(tokenizer, loaded.table, ROOMY)[1].to_pylist()
    assert made["prompt_ids"] == ids(tokenizer, rendered["prompt"])
    assert made["response_ids"] == ids(tokenizer, ended(rendered["completion"]))
    assert made["desirable"] is (algorithm == "sft")


CONVERSATION = [SYSTEM, ASK, BLUE, AGAIN, BLACK, {"role": "user", "content": "Thanks"}, GREEN]
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of the tiny model, with the marks by which transformers finds the assistant's tokens (the option
`assistant_only_loss` of TRL)."""


def test_every_turn_of_the_assistant_has_a_loss_and_nothing_else(tmp_path: Path, tokenizer: Any) -> None:
    loaded = pool(tmp_path, [{"messages": CONVERSATION}], "sft", messages="messages")
    (made,) = tokenize(tokenizer, loaded.table, ROOMY)[1].to_pylist()
    whole = apply_chat_template({"messages": CONVERSATION}, tokenizer)["text"]
    assert made["prompt_ids"] + made["response_ids"] == ids(tokenizer, ended(whole))
    marked = tokenizer.apply_chat_template(
        CONVERSATION, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [0] * len(made["prompt_ids"]) + [int(value) for value in made["loss_mask"]]
    assert mask == marked["assistant_masks"][: len(mask)] and not any(marked["assistant_masks"][len(mask) :])
    assert sum(mask) == sum(len(ids(tokenizer, turn["content"])) + 1 for turn in (BLUE, BLACK, GREEN))


def test_only_the_last_turn_has_a_loss_where_the_spec_says_so(tmp_path: Path, tokenizer: Any) -> None:
    loaded = pool(tmp_path, [{"messages": CONVERSATION}], "sft", messages="messages", loss_on="last")
    assert said(loaded) == [(CONVERSATION[:-1], [CONVERSATION[-1:]])]
    (made,) = tokenize(tokenizer, loaded.table, ROOMY)[1].to_pylist()
    assert all(made["loss_mask"]) and tokenizer.decode(made["response_ids"]) == "It is green.<|im_end|>"


def test_sharegpt_rows_are_read_as_trl_converts_them(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "conversations": [{"from": turn["role"], "value": turn["content"]} for turn in CONVERSATION],
        "id": 7,
    }
    theirs = maybe_convert_to_chatml(copy.deepcopy(row))["messages"]
    named = {"user": "human", "assistant": "gpt", "system": "system"}
    other = [{"from": named[turn["role"]], "value": turn["content"]} for turn in CONVERSATION]
    for rows in ([row], [{"conversations": other}]):
        loaded = pool(tmp_path, rows, "sft", messages="conversations", loss_on="last")
        assert said(loaded) == [(theirs[:-1], [theirs[-1:]])]


def test_conversations_in_a_folder_of_datasets_have_no_null_fields(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, BLUE]}, {"messages": [{**SYSTEM, "name": None}, ASK, GREEN]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    loaded = spec(tmp_path / "rows", "sft", kind="datasets", messages="messages")
    source: Any = loaded.data.train
    found = load_pool(loaded, source, "data.train")
    assert [prompt[-1] for prompt, _ in said(found)] == [ASK, ASK]
    assert found.bad_rows == 0


def test_ranked_answers_may_be_conversations(tmp_path: Path) -> None:
    whole = {"answers": [[ASK, GREEN], [ASK, BLUE], [ASK, BLACK]], "scores": [1, 3, 2]}
    loaded = pool(tmp_path, [whole], "rrhf", prompt=None, scores="scores")
    assert said(loaded) == [([ASK], [[BLUE], [BLACK], [GREEN]])]


@pytest.mark.parametrize(
    ("algorithm", "columns", "row", "why"),
    [
        ("dpo", {"prompt": None}, {"chosen": "It is blue.", "rejected": "Green."}, "the chosen answer is not a conv"),
        (
            "dpo",
            {"prompt": None},
            {"chosen": [ASK, BLUE], "rejected": [AGAIN, GREEN]},
            "the chosen answer does not begin with the prompt of the other: message 0 differs",
        ),
        ("dpo", {"prompt": None}, {"chosen": [ASK, BLUE], "rejected": [ASK, BLUE]}, "the chosen and the rejected ans"),
        ("dpo", {}, {"prompt": [ASK], "chosen": [BLUE, AGAIN], "rejected": [GREEN]}, "the last message of the chosen"),
        ("dpo", {}, {"prompt": [ASK], "chosen": [], "rejected": [GREEN]}, "the chosen answer is empty"),
        ("sft", {"messages": "m"}, {"m": [ASK, BLUE, AGAIN]}, "the last message of the conversation is the user's"),
        ("sft", {"messages": "m"}, {"m": [ASK]}, "the conversation has no message of the assistant"),
        ("sft", {"messages": "m"}, {"m": [SYSTEM, BLUE]}, "the last message is the system's, so there is nothing"),
        ("sft", {"messages": "m"}, {"m": "text"}, "the conversation is not a list of messages"),
        ("sft", {"messages": "m"}, {"m": [{"from": "narrator", "value": "x"}]}, "message 0 has role 'narrator'"),
        ("kto", {}, {"prompt": [ASK], "response": [AGAIN, BLUE], "label": 1}, "the first message of the response"),
        ("sft", {"template": "none"}, {"prompt": [ASK], "response": "x"}, "a list of messages needs a chat template"),
        ("sft", {"template": "none"}, {"prompt": "x", "response": [BLUE]}, "a list of messages needs a chat template"),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_is_a_bad_row(
    tmp_path: Path, algorithm: str, columns: dict[str, Any], row: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataError) as refused:
        pool(tmp_path, [row], algorithm, **columns)
    assert f"no row can be used (1 bad; the first: rows.jsonl:1: {why}" in str(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "columns", "row", "hint"),
    [
        ("sft", {}, {"prompt": "p", "completion": "c"}, "did you mean 'completion'?"),
        ("sft", {}, {"messages": [ASK, BLUE]}, "did you mean 'messages'?"),
        ("sft", {"messages": "messages"}, {"conversations": [ASK, BLUE]}, "did you mean 'conversations'?"),
        ("dpo", {}, {"chosen": [], "rejected": []}, "null: the prompt is the common beginning of the answers"),
    ],
)
def test_a_column_of_another_layout_is_named_where_the_spec_s_own_is_missing(
    tmp_path: Path, algorithm: str, columns: dict[str, Any], row: dict[str, Any], hint: str
) -> None:
    with pytest.raises(DataError) as refused:
        pool(tmp_path, [row], algorithm, **columns)
    assert str(refused.value).endswith(f"({hint})")


def test_a_template_that_rewrites_earlier_turns_refuses_all_turns_and_not_the_last(
    tmp_path: Path, tiny_model: Path
) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.chat_template = MARKED.replace(
        "{{ message['content'] + '<|im_end|>' }}{% endgen",
        "{{ (message['content'] if loop.last else 'cut') + '<|im_end|>' }}{% endgen",
    )
    rows = [{"messages": CONVERSATION}]
    summary, _ = tokenize(tokenizer, pool(tmp_path, rows, "sft", messages="messages").table, ROOMY)
    assert "the chat template renders earlier turns differently when others follow" in summary.problems[0]
    last = pool(tmp_path, rows, "sft", messages="messages", loss_on="last")
    assert tokenize(tokenizer, last.table, ROOMY)[0].usable == 1


def test_a_template_that_trims_keeps_the_conversation_together(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = new_tokenizer(tiny_model)
    tokenizer.chat_template = MARKED.replace("message['content']", "(message['content'] | trim)")
    messages = [ASK, {"role": "assistant", "content": " It is blue.\n"}, AGAIN, BLACK]
    (made,) = tokenize(tokenizer, pool(tmp_path, [{"m": messages}], "sft", messages="m").table, ROOMY)[1].to_pylist()
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert made["prompt_ids"] + made["response_ids"] == ids(tokenizer, ended(whole))


def test_the_users_turns_have_no_loss_where_answers_are_compared_or_mismatched(tmp_path: Path, tokenizer: Any) -> None:
    row = {"prompt": [ASK], "chosen": [BLUE, AGAIN, BLACK], "rejected": [BLUE, AGAIN, GREEN]}
    config = ROOMY.model_copy(update={"from_divergence": True})
    table = tokenize(tokenizer, pool(tmp_path, [row], "dpo").table, config)[1]
    for made, last in zip(table.to_pylist(), ("Black.", "It is green."), strict=True):
        trained = [token for token, on in zip(made["response_ids"], made["loss_mask"], strict=True) if on]
        assert tokenizer.decode(trained) == f"{last}<|im_end|>"

    rows = [{"m": [ASK, BLUE, AGAIN, BLACK], "label": True}, {"m": [ASK, GREEN], "label": False}]
    config = ROOMY.model_copy(update={"mismatched": True})
    table = tokenize(tokenizer, pool(tmp_path, rows, "kto", messages="m").table, config)[1]
    _, batch = assemble([("a", 0), ("b", 1)], table, config)
    masks = batch.column("loss_mask").to_pylist()
    assert masks[3] == masks[0] and not all(masks[0])  # the second example with the first one's response


def test_extract_prompt_of_trl_says_the_same_of_every_split(tmp_path: Path) -> None:
    turns = [ASK, BLUE, AGAIN, BLACK]
    for shared in (1, 3):
        row: Any = {"chosen": turns, "rejected": [*turns[:shared], GREEN]}
        theirs = extract_prompt(copy.deepcopy(row))
        loaded = pool(tmp_path, [row], "dpo", prompt=None)
        assert said(loaded) == [(theirs["prompt"], [theirs["chosen"], theirs["rejected"]])]
