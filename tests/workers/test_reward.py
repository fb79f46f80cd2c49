"""The reward worker: components into rewards, the reward model, and the files of trajectories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForSequenceClassification,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.judges import JudgeAnswer, Question
from troupe.workers.contract.messages import REWARDS, ROLLOUTS, RewardRequest
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig, RewardModelConfig, ScoringConfig
from troupe.workers.contract.rewards import NO_ANSWER
from troupe.workers.contract.samples import SAMPLES
from troupe.workers.data.chat import encode_prompt
from troupe.workers.data.examples import encode_conversation, encode_response
from troupe.workers.data.trajectories import join_rewards, write_trajectories
from troupe.workers.reward import (
    RewardWorker,
    SampleReward,
    bounded,
    combination,
    combine,
    component_labels,
    sum_faults,
)
from troupe.workers.rewards.loading import RewardFunctionError
from troupe.workers.rewards.model import RewardModel, budget_batches
from troupe.workers.rewards.runner import RewardResult
from troupe.workers.telemetry.peak_memory import FamilyPeak

WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "one", "two", "three", "four", "five"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = 120.0  # seconds: no test depends on how busy the machine is


def rollouts(
    responses: Sequence[str],
    *,
    uid: str = "p0",
    attempt: int = 0,
    answer: str = "5",
    prompt: Sequence[int] = (2, 4, 3),
    ids: Sequence[Sequence[int]] | None = None,
    order: Sequence[int] | None = None,
) -> pa.Table:
    """A ROLLOUTS table of one group whose prompt is the user's word "one"."""
    rows = []
    for index in order or range(len(responses)):
        tokens = list(ids[index]) if ids else [5] * (index + 1)
        rows.append(
            {
                "prompt_uid": uid,
                "sample_index": index,
                "attempt": attempt,
                "segment": 0,
                "prompt_ids": list(prompt),
                "response_ids": tokens,
                "rollout_logprobs": [-1.0] * len(tokens),
                "loss_mask": [True] * len(tokens),
                "weight_versions": [{"version": 0, "start": 0, "end": len(tokens)}],
                "episode_status": "ok",
                "conversation": "",
                "turn_rewards": [],
                "turns": [],
                "finish_reason": "stop",
                "response": responses[index],
                "messages": json.dumps([{"role": "user", "content": "one"}]),
                "answer": answer,
                "metadata": "{}",
                "engine": "rollout-0",
                "generate_s": 0.5,
                "first_token_s": 0.1,
            }
        )
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def function(name: str, **fields: Any) -> RewardFunctionConfig:
    return RewardFunctionConfig(name=name, timeout_s=SPECIAL, **fields)


@pytest.fixture
def worker() -> Iterator[RewardWorker]:
    config = RewardConfig(
        functions=(
            function("last_number", weight=2.0),
            function("letter_share", weight=-0.5, args={"letters": "x"}, label="x"),
        )
    )
    built = RewardWorker(config, "reward-0")
    built.start()
    yield built
    built.close()


def test_reward_is_the_weighted_sum_and_components_are_unweighted(worker: RewardWorker) -> None:
    summary, table = worker.score(rollouts(["xx 5", "6", "x5"]))
    assert summary.components == {"last_number": (1.0, 0.0, 1.0), "x": (0.5, 0.0, 0.5)}
    assert summary.rewards == (1.75, 0.0, 1.75)
    assert summary.statuses == ("ok",) * 3
    assert (summary.prompt_uid, summary.attempt) == ("p0", 0)
    assert table.schema.equals(REWARDS, check_metadata=True)
    assert table["reward"].to_pylist() == [1.75, 0.0, 1.75]
    assert table["components"].to_pylist()[0] == [
        {"name": "last_number", "value": 1.0, "weight": 2.0, "normalize": False},
        {"name": "x", "value": 0.5, "weight": -0.5, "normalize": False},
    ]
    assert table["reward_spans"].to_pylist() == [[], [], []]


def test_what_functions_say_of_a_sample_is_in_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a line; a function that gives no text adds none, and a lone surrogate is escaped."""
    (tmp_path / "speaking.py").write_text(
        "from troupe.rewards import Feedback, Steps\n"
        "def says(response, answer, metadata):\n"
        "    texts = {'no': 'is wrong', 'bad': 'caf\\udce9', 'yes': '', 'odd': 7, 'none': 'lost'}\n"
        "    return Feedback(None if response == 'none' else float(response == 'yes'), texts[response])\n"
        "async def steps(response, answer, metadata):\n"
        "    return Feedback(Steps([(len(response), 1.0)]), f'has {len(response)} letters')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = (function("speaking:says"), function("last_number"), function("speaking:steps", weight=0.0))
    worker = RewardWorker(RewardConfig(functions=functions), "reward-0")
    worker.start()
    summary, table = worker.score(rollouts(["no", "bad", "yes", "odd", "none"]))
    worker.close()
    lines = ["is wrong\nhas 2 letters", "caf\\udce9\nhas 3 letters", "has 3 letters", "has 3 letters", "has 4 letters"]
    assert table["feedback"].to_pylist() == lines
    assert summary.components["says"][:3] == (0.0, 0.0, 1.0)
    assert "feedback that is not text: 7 (int)" in summary.statuses[3] and "not a number" in summary.statuses[4]


def test_what_an_environment_says_of_turns_is_in_its_samples_row() -> None:
    """Also without weight, for a run whose functions score the episode."""
    rows = rollouts(["a", "b"]).to_pylist()
    said = [{"end": 1, "reward": 0.5, "feedback": "too slow"}, {"end": 2, "reward": 0.25, "feedback": None}]
    rows[1]["turn_rewards"] = [*said, {"end": 3, "reward": 0.0, "feedback": "and lost"}]
    worker = RewardWorker(
        RewardConfig(functions=(function("environment", weight=0.0), function("exact_match"))), "reward-0"
    )
    worker.start()
    summary, table = worker.score(pa.Table.from_pylist(rows, schema=ROLLOUTS))
    worker.close()
    assert table["feedback"].to_pylist() == [None, "too slow\nand lost"]
    assert summary.components["environment"] == (0.0, 0.75)


def test_a_group_is_scored_with_the_functions_that_are_named() -> None:
    """The named functions replace those of the role; the same function in both has one process."""
    config = ScoringConfig(
        functions=(function("last_number", weight=2.0), function("last_number", label="again", weight=0.0)),
        sets={"data.eval.words": (function("exact_match"), function("last_number", weight=3.0, label="number"))},
    )
    worker = RewardWorker(config, "reward-0")
    worker.start()
    try:
        own, _ = worker.score(rollouts(["5", "x 5", "6"]))
        named, table = worker.score(rollouts(["5", "x 5", "6"]), "data.eval.words")
        peers = [process.pid for process in worker._processes]
        with pytest.raises(KeyError, match="other"):
            worker.score(rollouts(["5"]), "other")
    finally:
        worker.close()
    assert own.components == {"last_number": (1.0, 1.0, 0.0), "again": (1.0, 1.0, 0.0)}
    assert own.rewards == (2.0, 2.0, 0.0)
    assert named.components == {"exact_match": (1.0, 0.0, 0.0), "number": (1.0, 1.0, 0.0)}
    assert named.rewards == (4.0, 3.0, 0.0)
    assert [entry["name"] for entry in table["components"].to_pylist()[0]] == ["exact_match", "number"]
    assert len(set(peers)) == 3  # last_number twice, as components of one reward run at the same time


class FirstIsBetter:
    """A judge that prefers the response that it reads first."""

    name = "first"

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        return [JudgeAnswer("Better: A")] * len(questions)


def test_a_judge_that_compares_reports_whether_both_orders_agree() -> None:
    args = {"rubric": "Which is kinder?", "compare": "pairs"}
    built = RewardWorker(RewardConfig(functions=(function("judge", args=args, label="kind", weight=2.0),)), "reward-0")
    built.start()
    built.connect_judge(FirstIsBetter())
    summary, _ = built.score(rollouts(["a", "b", "c"]))
    built.close()
    assert summary.rewards == (1.0, 1.0, 1.0), "its bias makes no difference"
    assert summary.components == {"kind": (0.5, 0.5, 0.5), "kind_consistency": (0.0, 0.0, 0.0)}


def test_a_vote_says_which_samples_give_the_same_answer(worker: RewardWorker) -> None:
    """It has a process, which starts with the first vote."""
    assert worker.score(rollouts(["5", "x 5.0"]))[0].answers == ()
    before = len(worker._processes)
    for _ in range(2):
        summary, _ = worker.score(rollouts(["5", "x 5.0", "6", "x"]), vote=True)
        assert summary.answers == (0, 0, 1, int(NO_ANSWER))
    assert len(worker._processes) == before + 1


def test_a_failed_component_fails_the_reward_and_says_which(worker: RewardWorker) -> None:
    summary, table = worker.score(rollouts(["x", ""], answer="five"))
    assert summary.rewards == (None, None)
    assert summary.components == {"last_number": (None, None), "x": (1.0, 0.0)}
    assert summary.statuses[0] == "last_number: error: ValueError: the answer is not a number: 'five'"
    assert table["reward"].null_count == 2
    assert table["status"].to_pylist() == list(summary.statuses)


def test_an_answer_whose_value_takes_forever_is_wrong() -> None:
    worker = RewardWorker(RewardConfig(functions=(function("numeric"),)), "reward-0")
    worker.start()
    try:
        summary, _ = worker.score(rollouts(["9^9^9^9", "It is 7.", r"\boxed{99999999!}", "It is 8."], answer="7"))
    finally:
        worker.close()
    assert summary.rewards == (0.0, 1.0, 0.0, 0.0)


def test_a_long_response_takes_no_square_of_its_length() -> None:
    """At the square of their lengths, each of these would take ten minutes."""
    worker = RewardWorker(RewardConfig(functions=(function("numeric"),)), "reward-0")
    worker.start()
    try:
        ends = (" ", "\n", " \n", " _a")
        summary, _ = worker.score(rollouts([f"The answer is 7{end * 200_000}" for end in ends], answer="7"))
    finally:
        worker.close()
    assert summary.statuses == ("ok",) * 4
    assert summary.rewards[:3] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("opening", "args", "rewards"),
    [
        ("<assistant> <think>", {}, [0.0, 1.0]),
        ("<assistant> <think>", {"opens_thought": False}, [1.0, 1.0]),
        ("<assistant> <think> </think>", {}, [1.0, 1.0]),
        ("<assistant>", {}, [1.0, 1.0]),
    ],
)
def test_a_cut_thought_that_the_template_opened_is_no_answer(
    tmp_path: Path, opening: str, args: dict[str, Any], rewards: list[float]
) -> None:
    tokenizer(WORDS, TEMPLATE.replace("<assistant>", opening)).save_pretrained(tmp_path)
    config = RewardConfig(functions=(function("last_number", args=args),))
    scoring = RewardWorker(config, "reward-0", policy=ModelConfig(path=str(tmp_path)))
    try:
        scoring.start()
        summary, _ = scoring.score(rollouts(["It may be 5", "It is 5. </think> 5"]))
    finally:
        scoring.close()
    assert list(summary.rewards) == rewards


def test_samples_come_back_in_order_of_sample_index(worker: RewardWorker) -> None:
    summary, table = worker.score(rollouts(["5", "0", "x"], order=[2, 0, 1]))
    assert table["sample_index"].to_pylist() == [0, 1, 2]
    assert summary.rewards == (2.0, 0.0, -0.5)


@pytest.mark.parametrize(("seconds", "groups"), [(60.0, 3), (-1.0, 1)])
def test_a_call_scores_its_first_group_and_others_while_there_is_time(
    worker: RewardWorker, monkeypatch: pytest.MonkeyPatch, seconds: float, groups: int
) -> None:
    monkeypatch.setattr("troupe.workers.reward.SHARED_CALL_S", seconds)
    worker.start()
    table = rollouts(["5", "0", "x"])
    alone, rewards = worker.score(table)
    scored, *tables = worker.score_groups(
        [RewardRequest(vote=one) for one in (False, True, False)], table, table, table
    )
    assert [bool(summary.answers) for summary in scored.groups] == [False, True, False][:groups]
    assert replace(scored.groups[0], seconds=alone.seconds) == alone and scored.peak is not None
    assert tables == [rewards] * groups + [None] * (3 - groups)


def test_a_table_that_is_not_one_group_is_refused(worker: RewardWorker) -> None:
    two = pa.concat_tables([rollouts(["5"]), rollouts(["5"], uid="p1")])
    with pytest.raises(ValueError, match="one group at a time, got 2"):
        worker.score(two)
    with pytest.raises(ValueError, match="one group at a time, got 0"):
        worker.score(ROLLOUTS.empty_table())
    with pytest.raises(ValueError, match="missing columns prompt_ids"):
        worker.score(rollouts(["5"]).drop_columns(["prompt_ids"]))


def test_health_names_the_worker(worker: RewardWorker) -> None:
    health = worker.health()
    assert health.name == "reward-0"
    assert health.peak is not None and health.peak.host > FamilyPeak().read([])  # with the functions' processes


def test_labels_must_differ() -> None:
    with pytest.raises(ValueError, match="more than once: exact_match"):
        component_labels((function("exact_match"), function("a.b:exact_match")))
    with pytest.raises(ValueError, match="more than once: reward_model"):
        component_labels((function("exact_match", label="reward_model"), function("reward_model")))
    with pytest.raises(ValueError, match="needs at least one function or a model"):
        RewardWorker(RewardConfig(), "reward-0")


def test_a_function_that_cannot_be_loaded_stops_the_start() -> None:
    worker = RewardWorker(RewardConfig(functions=(function("exact_match"), function("os:nope"))), "reward-0")
    with pytest.raises(RewardFunctionError, match="module os has no 'nope'"):
        worker.start()
    assert all(process.pid is None for process in worker._processes)


def test_a_sum_that_overflows_is_a_failure() -> None:
    reward = combine(["a", "b"], [1e308, 1e308], [RewardResult(1.0), RewardResult(1.0)])
    assert (reward.reward, reward.status) == (None, "sum: not a finite number: inf")
    assert combine(["a"], [1e10], [RewardResult(1e10)]).status.startswith("sum: too large: 1e+20 (at most 1e+15")


def enormous(response: str, answer: str, metadata: Any) -> float:
    """A reward that is finite and unusable for one response."""
    return -1e308 if response == "2" else 1.0


def test_a_finite_reward_that_breaks_the_statistics_is_its_samples_fault() -> None:
    worker = RewardWorker(RewardConfig(functions=(function(f"{__name__}:enormous"),)), "reward-0")
    worker.start()
    try:
        summary, table = worker.score(rollouts(["1", "2", "3"]))
    finally:
        worker.close()
    assert summary.rewards == (1.0, None, 1.0)
    assert summary.statuses[1].startswith("enormous: too large: -1e+308 (at most 1e+15")
    assert [(fault.cause, fault.samples) for fault in summary.faults] == [("enormous: too large", 1)]
    assert table["reward"].to_pylist() == [1.0, None, 1.0]


def test_the_reward_of_a_step_is_bounded_too() -> None:
    assert bounded(RewardResult(0.0, steps=((1, 1e200), (2, -1e200)))).status.startswith("too large: 1e+200")
    assert bounded(RewardResult(1e15, steps=((1, 1e15),))).status == "ok"
    assert bounded(RewardResult(None, "error", cause="x")) == RewardResult(None, "error", cause="x")


def test_sums_that_fail_are_counted() -> None:
    parts = [(RewardResult(1.0),), (RewardResult(None, "error"),)]
    rewards = [SampleReward("sum: too large: 1e+20", None), SampleReward("a: error", None)]
    assert [(fault.cause, fault.samples) for fault in sum_faults(rewards, parts)] == [("sum", 1)]


# Reward model


def tokenizer(words: Sequence[str], template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = template
    return made


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaConfig(
        **sizes, vocab_size=64, max_position_embeddings=32, pad_token_id=0, initializer_range=0.5, **changes
    )


def save_reward_model(
    folder: Path, words: Sequence[str] = WORDS, template: str | None = TEMPLATE, **changes: Any
) -> str:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(tiny_config(num_labels=1, **changes))
    model.save_pretrained(folder)
    tokenizer(words, template).save_pretrained(folder)
    return str(folder)


def reward_model(path: str, tokens: int = 64) -> RewardModel:
    return RewardModel(ModelConfig(path=path, dtype="float32"), tokens, "cpu")


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("budget", [8, 17, 1000])
def test_scores_do_not_depend_on_the_batches(tmp_path: Path, budget: int, packs: bool) -> None:
    """Packed as padded, the score is read at the last token that is not the padding token, which is 0."""
    path = save_reward_model(tmp_path)
    responses = [[4], [5, 6, 7, 8, 1], [6, 1, 0], [8, 8, 8, 8, 8, 8, 8]]
    table = rollouts(["-"] * 4, ids=responses)
    reference = LlamaForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        expected = [reference(torch.tensor([[2, 4, 3, *ids]])).logits[0, 0].item() for ids in responses]
    model = reward_model(path, budget)
    assert model.packs
    model.packs = packs
    outcomes = model.score(table)
    assert [outcome.value for outcome in outcomes] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == 4


def test_sampled_ids_are_used_where_the_vocabulary_is_the_same(tmp_path: Path) -> None:
    model = reward_model(save_reward_model(tmp_path))
    assert model.encode(rollouts(["not the text of these"], ids=[[5, 1]])) == [[2, 4, 3, 5, 1]]


def test_another_vocabulary_is_given_the_text(tmp_path: Path) -> None:
    words = list(reversed(WORDS))
    model = reward_model(save_reward_model(tmp_path, words))
    expected = [words.index(word) for word in ("<user>", "one", "<assistant>", "two", "three", "<eos>")]
    assert model.encode(rollouts(["two three"], ids=[[5, 6]])) == [expected]


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> four {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}",
        "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} four {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}",
    ],
    ids=["no end", "text behind the end", "text and no end"],
)
def test_the_score_is_read_where_training_read_it(tmp_path: Path, template: str) -> None:
    """Sampled ids, an episode's conversation and a response of another tokenizer all end as an example does."""
    model = reward_model(save_reward_model(tmp_path, template=template))
    asked = [{"role": "user", "content": "one"}]
    prompt = encode_prompt(model.tokenizer, json.dumps(asked), 32)
    trained = [*prompt, *encode_response(model.tokenizer, json.dumps(asked), prompt, "two three")]
    assert trained[-3:] == [5, 6, 1]
    sampled = rollouts(["two three"], prompt=prompt, ids=[[5, 6, 1]])
    other = rollouts(["two three"], prompt=[*prompt, 8], ids=[[5, 6]])
    played = json.dumps([*asked, {"role": "assistant", "content": "two three"}])
    place = sampled.schema.get_field_index("conversation")
    episode = sampled.set_column(place, sampled.schema.field(place), [[played]])
    for table in (sampled, other, episode):
        assert model.encode(table) == [trained]


def test_a_conversation_that_ends_with_a_tool_ends_as_the_template_writes_it(tmp_path: Path) -> None:
    model = reward_model(save_reward_model(tmp_path))
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    said.append({"role": "user", "content": "four"})
    assert encode_conversation(model.tokenizer, said) == [2, 4, 3, 5, 2, 7]


def test_without_a_chat_template_the_vocabulary_must_be_the_same(tmp_path: Path) -> None:
    model = reward_model(save_reward_model(tmp_path, template=None))
    assert model.encode(rollouts(["two three"], ids=[[5, 6, 1]])) == [[2, 4, 3, 5, 6, 1]]
    episode = rollouts(["two three"], ids=[[6, 1, 4, 3, 5, 6, 1]])
    place = episode.schema.get_field_index("conversation")
    played = episode.set_column(place, episode.schema.field(place), [["[]"]])
    assert model.encode(played) == [[2, 4, 3, 6, 1, 4, 3, 5, 6, 1]], "all of an episode's turns"
    for wrong in (episode, played.set_column(place, episode.schema.field(place), [[""]])):
        with pytest.raises(ValueError, match="vocabulary differs"):
            model.encode(wrong)
    with pytest.raises(ValueError, match="vocabulary differs"):
        model.encode(rollouts(["four"], ids=[[5]]))
    with pytest.raises(ValueError, match="vocabulary differs"):
        model.encode(rollouts(["four"], ids=[[50_000]]))


def test_a_chat_template_of_the_spec_replaces_the_reward_model_s_own(tmp_path: Path) -> None:
    path, words = save_reward_model(tmp_path / "model", list(reversed(WORDS)), template=None), list(reversed(WORDS))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }} <eos> {% endfor %}")
    for chosen, said in ((str(tmp_path / "own.jinja"), "one <eos> two three <eos>"), ("none", "one two three <eos>")):
        model = RewardModel(ModelConfig(path=path, dtype="float32", chat_template=chosen), 64, "cpu")
        table = rollouts([" two three"], ids=[[5, 6]])
        assert model.encode(table) == [[words.index(word) for word in said.split()]]


def test_a_sample_the_model_cannot_take_fails_alone(tmp_path: Path) -> None:
    model = reward_model(save_reward_model(tmp_path))
    short, long = model.score(rollouts(["a", "b"], ids=[[4], [5] * 40]))
    assert short.status == "ok"
    assert long == RewardResult(None, "error: 43 tokens; the reward model takes 1 to 32")
    rows = model.vocab_size
    short, unknown = model.score(rollouts(["a", "b"], ids=[[4], [rows]]))
    assert short.status == "ok"
    assert unknown == RewardResult(None, f"error: token {rows}; the reward model's embedding has {rows} rows")


def test_a_score_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    model = reward_model(save_reward_model(tmp_path))
    with torch.no_grad():
        model.model.score.weight.fill_(torch.nan)
    assert model.score(rollouts(["a"])) == [RewardResult(None, "not a finite number: nan")]


def test_a_language_model_is_not_a_reward_model(tmp_path: Path) -> None:
    LlamaForCausalLM(tiny_config(num_labels=1)).save_pretrained(tmp_path)
    tokenizer(WORDS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no weights for score\.weight"):
        reward_model(str(tmp_path))
    LlamaForSequenceClassification(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs exactly one label, got 3"):
        reward_model(str(tmp_path))


def test_the_score_of_tokens_is_their_mean_and_an_offset_is_subtracted(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    reference = LlamaForSequenceClassification.from_pretrained(path).eval()
    responses = [[5, 6, 1], [7, 1]]
    expected = []
    with torch.no_grad():
        for ids in responses:
            hidden = reference.model(torch.tensor([[2, 4, 3, *ids]])).last_hidden_state
            expected.append(reference.score(hidden[0, 3:]).mean().item())
    model, table = reward_model(path), rollouts(["two three", "four"], ids=responses)
    for packs in (True, False):
        model.packs = packs
        found = [outcome.value for outcome in model.score(table, "token_mean", offset=0.25)]
        assert found == pytest.approx([value - 0.25 for value in expected], rel=1e-4, abs=1e-5)
    plain = [outcome.value or 0.0 for outcome in model.score(table)]
    assert [outcome.value for outcome in model.score(table, offset=-1.5)] == pytest.approx([v + 1.5 for v in plain])


@pytest.mark.parametrize(
    ("name", "coef", "values", "expected"),
    [
        ("product", 1.0, [1.0, 0.5, -4.0], -2.0),
        ("gate", 1.0, [1.0, 0.5, -4.0], -4.0),
        ("gate", 1.0, [1.0, 0.0, -4.0], 0.0),
        ("min", 1.0, [1.0, 0.5, -4.0], -4.0),
        ("max", 1.0, [1.0, 0.5, -4.0], 1.0),
        ("mean", 1.0, [1.0, 3.0, 8.0], 4.0),
        ("mean_minus_variance", 0.5, [1.0, 3.0, 8.0], 4.0 - 0.5 * 26.0 / 3.0),
        ("mean_minus_std", 2.0, [1.0, 3.0, 8.0], 4.0 - 2.0 * (26.0 / 3.0) ** 0.5),
    ],
)
def test_what_combinations_make_of_values(name: str, coef: float, values: list[float], expected: float) -> None:
    """The variance is that of the ensemble's members (not of a larger population): 9 + 1 + 16 over 3."""
    one = function(name, args={"of": ["a", "b", "c"], "coef": coef})
    assert combination(one, [RewardResult(value) for value in values]).value == pytest.approx(expected)
    assert combination(one, [RewardResult(1e15)] * 3).value in (None, 1e15)


def test_components_are_combined_and_a_failed_one_fails_the_sample_once(tmp_path: Path) -> None:
    """Two models are an ensemble, and one of them counts where the response is right. The set of a source names one."""
    paths = [save_reward_model(tmp_path / name, hidden_act=act) for name, act in (("a", "silu"), ("b", "relu"))]
    models = {name: RewardModelConfig(path=path, dtype="float32") for name, path in zip("ab", paths, strict=True)}
    models["b"] = models["b"].model_copy(update={"offset": 1.0})
    a, b = (function("reward_model", weight=0.0, args={"model": name}) for name in "ab")
    functions = (
        function("last_number", label="right"),
        *(a, b),
        function("min", args={"of": ["a", "b"]}, label="worst", weight=0.0),
        function("product", args={"of": ["right", "worst"]}, label="gated", weight=0.5, normalize=True),
    )
    beside = {"data.train.0": (function("last_number"), a.model_copy(update={"weight": 2.0}))}
    worker = RewardWorker(ScoringConfig(functions=functions, models=models, sets=beside), "reward-0")
    table = rollouts(["5", "6", "5"], ids=[[4], [5, 6], [63] * 40])
    try:
        worker.start()
        summary, rewards = worker.score(table)
        named, _ = worker.score(table, "data.train.0")
        alone = [[outcome.value or 0.0 for outcome in worker._models[name].score(table)] for name in "ab"]
    finally:
        worker.close()
    first, second = alone[0][:2], [value - 1.0 for value in alone[1][:2]]
    assert summary.components["a"][:2] == pytest.approx(first) and summary.components["b"][:2] == pytest.approx(second)
    worst = [min(pair) for pair in zip(first, second, strict=True)]
    assert summary.components["worst"] == (pytest.approx(worst[0]), pytest.approx(worst[1]), None)
    assert summary.components["gated"] == (pytest.approx(worst[0]), 0.0, None)
    assert summary.rewards == (pytest.approx(1.0 + 0.5 * worst[0]), 0.0, None)
    assert "has no value" not in summary.statuses[2]
    assert summary.statuses[2].count("tokens; the reward model takes 1 to 32") == 2  # of each model, of no combination
    assert [(fault.cause[0], fault.samples) for fault in summary.faults] == [("a", 1), ("b", 1)]
    assert named.rewards[:2] == (pytest.approx(1.0 + 2 * first[0]), pytest.approx(2 * first[1]))
    (one, *_) = rewards["components"].to_pylist()
    assert [part["name"] for part in one if part["normalize"]] == ["gated"]


def test_the_model_is_one_component_among_the_functions(tmp_path: Path) -> None:
    model = RewardModelConfig(path=save_reward_model(tmp_path), dtype="float32")
    worker = RewardWorker(RewardConfig(functions=(function("last_number"),), model=model, model_weight=3.0), "reward-0")
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        worker.score(rollouts(["5"]))
    try:
        worker.start()
        summary, _ = worker.score(rollouts(["5", "6"]))
    finally:
        worker.close()
    first, second = summary.components["reward_model"]
    assert first is not None and second is not None
    assert summary.rewards == pytest.approx((1.0 + 3 * first, 3 * second))


def test_batches_keep_to_the_budget() -> None:
    lengths = {0: 9, 1: 2, 2: 3, 3: 30, 4: 2}
    batches = list(budget_batches(lengths, 10))
    assert sorted(row for batch in batches for row in batch) == sorted(lengths)
    assert all(len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= 10 for batch in batches)
    assert batches == [[1, 4, 2], [0], [3]]
    assert list(budget_batches(lengths, 15, packed=True)) == [[1, 4, 2], [0], [3]]
    assert list(budget_batches(lengths, 16, packed=True)) == [[1, 4, 2, 0], [3]]


HIDDEN: dict[str, Any] = {"hidden_size": 16, "vocab_size": 64, "pad_token_id": 0}
WINDOWS: dict[str, tuple[PreTrainedConfig, bool]] = {
    "sliding": (
        MistralConfig(
            **HIDDEN, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            sliding_window=4,
        ),
        True,
    ),
    "local": (
        GPTNeoConfig(**HIDDEN, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=4),
        False,
    ),
}  # fmt: skip
"""Reward models whose layers attend to the last 4 tokens, and whether they pack."""


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_reward_model_with_windows_of_attention_scores_like_the_model(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config, packs = WINDOWS[kind]
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer(WORDS).save_pretrained(tmp_path)
    model = reward_model(str(tmp_path))
    assert model.packs == packs
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = [reference(torch.tensor([[2, 4, 3, *ids]])).logits[0, 0].item() for ids in ([5], [6, 7, 8])]
    outcomes = model.score(rollouts(["-"] * 2, ids=[[5], [6, 7, 8]]))
    assert [outcome.value for outcome in outcomes] == pytest.approx(expected, rel=1e-4, abs=1e-5)


# Trajectories


def scored(table: pa.Table, worker: RewardWorker) -> pa.Table:
    return worker.score(table)[1]


def test_trajectories_join_on_identity_whatever_the_order(worker: RewardWorker, tmp_path: Path) -> None:
    first, second = rollouts(["5", "6"], order=[1, 0]), rollouts(["x", "5"], uid="p1", attempt=2)
    path = tmp_path / "trajectories" / "step-000001.parquet"
    rows = worker.write_trajectories(str(path), 1, {}, scored(second, worker), first, scored(first, worker), second)
    assert rows == 4
    written = pq.read_table(path)
    assert written.column_names == SAMPLES.names
    assert written["step"].to_pylist() == [1] * 4
    assert written["trained"].to_pylist() == [False] * 4 and written["advantages"].null_count == 4
    assert written["response"].to_pylist() == ["6", "5", "x", "5"]
    assert written["reward"].to_pylist() == [0.0, 2.0, -0.5, 2.0]
    assert written["attempt"].to_pylist() == [0, 0, 2, 2]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_samples_of_an_evaluation_are_written_for_reading(worker: RewardWorker, tmp_path: Path) -> None:
    table = rollouts(["xx 5", "6"])
    path = tmp_path / "evaluation" / "step-000030.parquet"
    assert worker.write_evaluation(str(path), 30, table, scored(table, worker)) == 2
    first, second = pq.read_table(path).to_pylist()
    assert first == {
        "step": 30,
        "prompt_uid": "p0",
        "sample_index": 0,
        "messages": '[{"role": "user", "content": "one"}]',
        "response": "xx 5",
        "answer": "5",
        "finish_reason": "stop",
        "conversation": "",
        "status": "ok",
        "reward": 1.75,
        "components": [
            {"name": "last_number", "value": 1.0, "weight": 2.0, "normalize": False},
            {"name": "x", "value": 0.5, "weight": -0.5, "normalize": False},
        ],
        "source": None,
    }
    assert (second["sample_index"], second["reward"]) == (1, 0.0)


def test_a_sample_without_its_reward_is_an_error(worker: RewardWorker) -> None:
    table = rollouts(["5"])
    with pytest.raises(ValueError, match=r"1 samples have no reward row; the first is \('p0', 0, 1\)"):
        join_rewards([rollouts(["5"], attempt=1), scored(table, worker)])
    with pytest.raises(ValueError, match="a sample occurs twice"):
        join_rewards([table, table, scored(table, worker)])
    with pytest.raises(ValueError, match="neither a rollouts nor a rewards table"):
        join_rewards([table.select(["prompt_uid"])])


def test_a_file_that_cannot_be_written_leaves_nothing(worker: RewardWorker, tmp_path: Path) -> None:
    table = rollouts(["5"])
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_trajectories(tmp_path / "taken", 1, {}, [table, scored(table, worker)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
