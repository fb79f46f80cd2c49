"""Process rewards: equations as steps, what a function may return, characters to tokens, and from there to GRPO's
advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes import FakeTable
from tests.tokenizers import new_tokenizer
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.workers.algorithms.train_batch import prepare
from troupe.workers.contract.algorithm_config import AdvantageConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import ROLLOUTS, GroupSummary, PrepareRequest, RewardSummary
from troupe.workers.contract.reward_config import RewardConfig, RewardFunctionConfig
from troupe.workers.data.plain_text import token_counts
from troupe.workers.reward import RewardWorker, reward_spans
from troupe.workers.rewards.equations import equations, evaluate
from troupe.workers.rewards.functions import letter_share
from troupe.workers.rewards.results import Steps, checked_steps
from troupe.workers.rewards.runner import RewardProcess, RewardResult, Sample

FAR_OFF = 120.0  # seconds: no test depends on how busy the machine is
TABLES = (FakeTable("rollouts", ("p0",)), FakeTable("rewards", ("p0",)))


# Equations


def steps_of(text: str, **args: float) -> list[tuple[str, float]]:
    """The steps of a text, each as the part of the text that it is."""
    found = equations(text, "", {}, **args).rewards
    starts = [0, *(end for end, _ in found)]
    return [(text[start:end], reward) for start, (end, reward) in zip(starts, found, strict=False)]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("2 + 3 = 5", [("2 + 3 = 5", 1)]),
        ("2 + 3 = 6", [("2 + 3 = 6", 0)]),
        ("5 = 2+3", [("5 = 2+3", 1)]),
        ("So 2 + 3 = 5, and 5 * 2 = 11. Done", [("So 2 + 3 = 5", 1), (", and 5 * 2 = 11", 0)]),
        ("2 + 3 = 5 = 10 / 2", [("2 + 3 = 5", 1), (" = 10 / 2", 1)]),
        ("2 + 3 * 4 = 14", [("2 + 3 * 4 = 14", 1)]),
        ("(2 + 3) * 4 = 20", [("(2 + 3) * 4 = 20", 1)]),
        ("12 - 4 - 3 = 5", [("12 - 4 - 3 = 5", 1)]),
        ("24 / 4 / 2 = 3", [("24 / 4 / 2 = 3", 1)]),
        ("6 / -2 = -3", [("6 / -2 = -3", 1)]),
        ("-(2 + 1) * 2 = -6", [("-(2 + 1) * 2 = -6", 1)]),
        ("7-5=2", [("7-5=2", 1)]),
        ("0.1 + 0.2 = 0.3", [("0.1 + 0.2 = 0.3", 1)]),
        ("1,000 + 250 = 1,250", [("1,000 + 250 = 1,250", 1)]),
        ("3 x 4 = 12, 2x4=8", [("3 x 4 = 12", 1), (", 2x4=8", 1)]),
        ("3 × 4 ÷ 2 − 1 = 5", [("3 × 4 ÷ 2 − 1 = 5", 1)]),
        (r"\(3 \times 4 = 12\) and $8 \div 2 = 4$", [(r"\(3 \times 4 = 12", 1), (r"\) and $8 \div 2 = 4", 1)]),
        (r"\boxed{2+3=5}", [(r"\boxed{2+3=5", 1)]),
        ("$5 + $3 = $8", [("$5 + $3 = $8", 1)]),
        ("<<5+3=8>>8", [("<<5+3=8", 1)]),
        ("(since 2 + 3 = 5) and (2 + 2 = 5)", [("(since 2 + 3 = 5", 1), (") and (2 + 2 = 5", 0)]),
        ("2 + 3 = (5)", [("2 + 3 = (5)", 1)]),
        ("2 + 3 = **5** apples", [("2 + 3 = **5", 1)]),
        ("**2 + 3 = 5**", [("**2 + 3 = 5", 1)]),
        ("- 2 + 3 = 5\n- 4 + 4 = 8", [("- 2 + 3 = 5", 1), ("\n- 4 + 4 = 8", 1)]),
        ("1. 2 + 3 = 5\n2) 4 + 4 = 8", [("1. 2 + 3 = 5", 1), ("\n2) 4 + 4 = 8", 1)]),
        ("x = 2 + 3 = 5", [("x = 2 + 3 = 5", 1)]),
        ("2 + 3 == 5", [("2 + 3 == 5", 1)]),
        ("2 + 3 = 5; then 2+3 = 5 again", [("2 + 3 = 5", 1)]),
        ("I get -2 + 3 = 1!", [("I get -2 + 3 = 1", 1)]),
    ],
)
def test_equations_are_found_and_verified(text: str, steps: list[tuple[str, float]]) -> None:
    assert steps_of(text) == steps


@pytest.mark.parametrize(
    "text",
    [
        *("", "nothing", "3 = 3", "5", "2 + 3", "= 5", "2 + 3 =", "2 + = 5", "2 + 3 = 5 +", "()=(1+1)"),
        *("x + 2 = 5", "x - 2 = 5", "3x + 2 = 11", "2 + 3x = 11", "2 + 3 = 5x", "(x + 2) * 3 = 9", "a2 + 3 = 5"),
        *("2^3 + 1 = 9", "2**3 + 1 = 9", "2 + 2 = 2^2", "50% * 4 = 2", "5! + 1 = 121", "2² + 1 = 5", "2 + 2 = 2²"),
        *("sqrt(4) + 1 = 3", r"\frac{1}{2} + 3 = 3.5", "2 + 3 >= 4", "2 + 3 => 5", "5 != 2 + 2", "2 + 3 ≈ 5"),
        *("1,5 + 1 = 2", "1 + 1 = 2,5", "1.2.3 + 1 = 2", ".5 + 1 = 1.5", "2 apples + 3 apples = 5 apples"),
        *("4 / 0 = 4", "2 3 + 1 = 4", "2(3 + 4) = 14", "2 + 3 = 5km", "2 +\n3 = 5"),
        *("__import__('os').abort() + 1 = 2", "1 + " * 100 + "1 = 101", "9" * 5000 + " + 1 = 1", "(" * 9000 + "1+1=2"),
    ],
)
def test_text_without_an_equation_is_one_step_of_zero(text: str) -> None:
    assert equations(text, "", {}) == Steps([(len(text), 0.0)])


def test_rewards_and_tolerance_of_equations_are_configurable() -> None:
    text = "1 / 3 = 0.33, 1 + 1 = 3"
    assert [reward for _, reward in steps_of(text)] == [0, 0]
    assert [reward for _, reward in steps_of(text, right=0.5, wrong=-1, tolerance=0.005)] == [0.5, -1]


Tree = int | tuple["Tree", str, "Tree"]
trees = st.recursive(st.integers(-99, 99), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner), max_leaves=7)


def written(tree: Tree, gap: str) -> str:
    """A tree as text, with parentheses around every operation."""
    if isinstance(tree, int):
        return str(tree)
    left, operator, right = tree
    return f"({written(left, gap)}{gap}{operator}{gap}{written(right, gap)})"


def worked_out(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    left, right = worked_out(tree[0]), worked_out(tree[2])
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[tree[1]](right)


@given(trees, st.sampled_from(["", " ", "  "]))
def test_arithmetic_is_that_of_fractions(tree: Tree, gap: str) -> None:
    text = written(tree, gap)
    try:
        value = worked_out(tree)
    except ZeroDivisionError:
        assert evaluate(text) is None
        return
    assert evaluate(text) == value
    if isinstance(tree, int):
        return
    for offset, reward in ((0, 1.0), (1, 0.0)):
        line = f"We see: {text} = {value.numerator + offset * value.denominator}/{value.denominator}"
        assert equations(f"{line}, then.", "", {}).rewards == [(len(line), reward)]


@given(st.text(alphabet="0123456789.,+-*/x×=() \n^%$a*", max_size=60))
@example("() + 7 = 7")
@example("-() = 1")
@example("4 - (2,3) = 1")
def test_any_text_has_steps_within_it(text: str) -> None:
    assert checked_steps(equations(text, "", {}).rewards, len(text))


# Letters


def test_chunks_of_characters_are_steps() -> None:
    assert letter_share("aab", "", {}, letters="a", every=2) == Steps([(2, 1.0), (3, 0.0)], outcome=2 / 3)
    assert letter_share("", "", {}, letters="a", every=2) == Steps([(0, 0.0)], outcome=0.0)
    assert letter_share("AXa", "", {}, letters="A", ignore_case=True, every=3) == Steps([(3, 2 / 3)], outcome=2 / 3)
    with pytest.raises(ValueError, match="must not be negative"):
        letter_share("a", "", {}, letters="a", every=-1)


# What a function may return


def test_checked_steps_are_plain_numbers() -> None:
    assert checked_steps([[1, True], (3, -2)], 3) == ((1, 1.0), (3, -2.0))
    assert checked_steps([(0, 1.0)], 0) == ((0, 1.0),)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([], "there are no steps"),
        ([(0, 1.0)], "step 1 ends at 0; expected 1 to 4"),
        ([(2, 1.0), (2, 1.0)], "step 2 ends at 2; expected 3 to 4"),
        ([(3, 1.0), (2, 1.0)], "step 2 ends at 2; expected 4 to 4"),
        ([(5, 1.0)], "step 1 ends at 5; expected 1 to 4"),
        ([(1, math.nan)], "the reward of step 1 is not a finite number: nan"),
        ([(1, 1.0), (2, "1")], r"step 2 is not (end, reward): (2, '1')"),
        ([(1.0, 1.0)], r"step 1 is not (end, reward): (1.0, 1.0)"),
        ([1], r"step 1 is not (end, reward): 1"),
        ([(1, 1.0, 1.0)], r"step 1 is not (end, reward): (1, 1.0, 1.0)"),
    ],
)
def test_invalid_steps_are_refused(rewards: list[object], why: str) -> None:
    with pytest.raises(ValueError) as error:
        checked_steps(rewards, 4)
    assert str(error.value) == why


BEHAVIOURS = """
import os
from troupe.workers.rewards.results import Steps

def behave(response, answer, metadata):
    word, _, rest = response.partition(" ")
    if word == "noise":
        for fd in range(3, 4096):
            try: os.write(fd, rest.encode() + b"\\n")
            except OSError: pass
    return {
        "good": Steps([(2, 1.0), (4, 0.5)]), "whole": Steps([(1, 1.0)], outcome=-3),
        "falling": Steps([(2, 1.0), (1, 1.0)]),
        "inf": Steps([(1, float("inf"))]), "outcome": Steps([(1, 1.0)], outcome="much"), "one": Steps(7), "half": 0.5,
        "many": Steps([(i + 1, 1 / 3) for i in range(len(response))]), "pairs": [(1, 1.0)],
    }.get(word, 0.0)
"""


@pytest.fixture
def behaviours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stepwise.py").write_text(BEHAVIOURS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "stepwise:behave"


@pytest.fixture
def process(behaviours: str) -> Iterator[RewardProcess]:
    running = RewardProcess(RewardFunctionConfig(name=behaviours, timeout_s=FAR_OFF, process=True), 256)
    yield running
    running.close()


def outcomes(process: RewardProcess, *responses: str) -> list[RewardResult]:
    return process.score([Sample(response, "", "{}", 3, "stop") for response in responses])


def test_steps_pass_and_faults_cost_one_sample(process: RewardProcess) -> None:
    assert outcomes(process, "good", "falling", "inf", "outcome", "one", "half", "pairs", "whole") == [
        RewardResult(0.75, steps=((2, 1.0), (4, 0.5))),
        RewardResult(None, "not steps: step 2 ends at 1; expected 3 to 7"),
        RewardResult(None, "not steps: the reward of step 1 is not a finite number: inf"),
        RewardResult(None, "not a number: 'much' (str)"),
        RewardResult(None, "error: TypeError: 'int' object is not iterable"),
        RewardResult(None, "expected steps, got a number: 0.5"),
        RewardResult(None, "not a number: [(1, 1.0)] (list)"),
        RewardResult(-3.0, steps=((1, 1.0),)),
    ]


def test_a_long_response_may_have_a_step_at_every_character(process: RewardProcess) -> None:
    [outcome] = outcomes(process, "many " + "x" * 20_000)
    assert (outcome.status, len(outcome.steps)) == ("ok", 20_005)


@pytest.mark.parametrize("steps", ["[]", "7", "[[1]]", "[[1, 1.0], [1, 1.0]]", "[[99, 1.0]]", "[[1, 1e999]]", "{}"])
def test_steps_that_the_child_sends_are_checked_again(process: RewardProcess, steps: str) -> None:
    reply = f'{{"id": 1, "results": [{{"value": 1.0, "steps": {steps}}}]}}'
    [outcome] = outcomes(process, f"noise {reply}")
    assert outcome.value is None
    assert outcome.status.startswith("error: the reward process replied invalid steps")
    assert outcomes(process, "good")[0].status == "ok"


def test_a_function_that_is_not_asked_for_steps_has_an_outcome(behaviours: str) -> None:
    process = RewardProcess(RewardFunctionConfig(name=behaviours, timeout_s=FAR_OFF), 256)
    try:
        assert outcomes(process, "good", "whole", "half") == [RewardResult(0.75), RewardResult(-3.0), RewardResult(0.5)]
        assert outcomes(process, "falling")[0].status.startswith("not steps: ")
    finally:
        process.close()


# Characters to tokens


def decoder(pieces: Sequence[bytes], errors: str) -> Callable[[list[int]], str]:
    """Of a tokenizer whose tokens are these bytes; special tokens print none."""
    return lambda ids: b"".join(pieces[number] for number in ids).decode("utf-8", errors)


def test_steps_end_at_the_token_they_fall_in() -> None:
    # "a", the four bytes of an emoji in three tokens, a special token, "bcd", "é" with "f" in two, end of sequence
    pieces = [b"a", b"\xf0", b"\x9f\x99", b"\x82", b"", b"bcd", b"\xc3", b"\xa9f", b""]
    text = "a🙂bcdéf"
    for errors in ("replace", "ignore"):
        counts = token_counts(range(1, len(text) + 1), text, list(range(len(pieces))), decoder(pieces, errors))
        assert counts == [1, 4, 6, 6, 6, 8, 9]


def test_an_empty_response_and_a_text_of_other_tokens() -> None:
    assert token_counts([0], "", [], decoder([], "replace")) == [0]
    assert token_counts([0], "", [0, 1], decoder([b"", b""], "replace")) == [2]
    with pytest.raises(ValueError, match="do not decode to its text"):
        token_counts([1], "b", [0], decoder([b"a"], "replace"))


@given(st.text(alphabet="aé東🙂 \n", min_size=1), st.data())
def test_a_token_covers_what_its_bytes_cover(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=12).map(sorted))  # twice the same: prints nothing
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    ends = sorted(data.draw(st.sets(st.integers(1, len(text)), min_size=1)))
    covered = list(accumulate(map(len, pieces)))
    expected = [
        len(pieces) if end == len(text) else 1 + sum(size < len(text[:end].encode()) for size in covered)
        for end in ends
    ]
    assert token_counts(ends, text, list(range(len(pieces))), decoder(pieces, "replace")) == expected


# The reward worker


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return new_tokenizer(tiny_model)


def rollouts(tokenizer: Any, *responses: Sequence[str] | None) -> pa.Table:
    """One group; a response is given by the texts of its tokens, and ends as a policy's does; None has no token."""
    rows: list[dict[str, Any]] = []
    for index, pieces in enumerate(responses):
        ids = [token for piece in pieces or () for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
        assert len(ids) == len(pieces or ())
        ids += [] if pieces is None else [tokenizer.eos_token_id]
        rows.append(
            {
                "prompt_uid": "p0",
                "sample_index": index,
                "attempt": 0,
                "segment": 0,
                "prompt_ids": [1],
                "response_ids": ids,
                "rollout_logprobs": [-1.0] * len(ids),
                "loss_mask": [True] * len(ids),
                "weight_versions": [],
                "episode_status": "ok",
                "conversation": "",
                "turn_rewards": [],
                "turns": [],
                "finish_reason": "stop",
                "response": "".join(pieces or ()),
                "messages": "[]",
                "answer": "5",
                "metadata": "{}",
                "engine": "rollout-0",
                "generate_s": 0.5,
                "first_token_s": 0.1,
            }
        )
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


@pytest.fixture
def worker_of(tiny_model: Path) -> Iterator[Callable[..., RewardWorker]]:
    started: list[RewardWorker] = []

    def start(*functions: dict[str, Any]) -> RewardWorker:
        config = RewardConfig(functions=tuple(RewardFunctionConfig(timeout_s=FAR_OFF, **one) for one in functions))
        started.append(RewardWorker(config, "reward-0", policy=ModelConfig(path=str(tiny_model))))
        started[-1].start()
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def spans_of(table: pa.Table) -> list[list[tuple[int, float]]]:
    return [[(span["end"], span["reward"]) for span in spans] for spans in table["reward_spans"].to_pylist()]


def test_from_a_functions_steps_to_the_advantages_of_grpo(
    worker_of: Callable[..., RewardWorker], tokenizer: Any
) -> None:
    worker = worker_of(
        {"name": "equations", "process": True, "weight": 2.0},
        {"name": "last_number", "weight": 0.5},
        {"name": "exact_match", "weight": 0.0},
    )
    table = rollouts(tokenizer, "2+3=5;2+2=5", "2+3=5.", None, "")
    summary, rewards = worker.score(table)
    assert summary.components["equations"] == (0.5, 1.0, 0.0, 0.0)
    assert summary.rewards == (1.5, 2.5, 0.0, 0.0)
    # The last step of the first response ends with the text, so its end of sequence is that step's as well: twice 0,
    # and half of last_number's 1. In the second the full stop and the end of sequence stand behind the step.
    assert spans_of(rewards) == [[(5, 2.0), (12, 0.5)], [(5, 2.0), (7, 0.5)], [], [(1, 0.0)]]
    assert summary.steps_differ

    keep = tuple(("p0", index) for index in range(4))
    config = AdvantageConfig(estimator="group", normalize_by_std=False)
    _, train = prepare(config, PrepareRequest(keep), [table, rewards])
    # The steps' rewards less their mean, which is 1: 1 and -0.5, 1 and -0.5, and -1.
    by_hand = [[0.5] * 5 + [-0.5] * 7, [0.5] * 5 + [-0.5] * 2, [], [-1.0]]
    assert train["advantages"].to_pylist() == by_hand
    scaled = prepare(config.model_copy(update={"normalize_by_std": True}), PrepareRequest(keep), [table, rewards])[1]
    deviation = math.sqrt(3.5 / 4) + 1e-4
    for row, numbers in zip(scaled["advantages"].to_pylist(), by_hand, strict=True):
        assert row == pytest.approx([number / deviation for number in numbers])


def test_steps_within_a_token_are_added_up(worker_of: Callable[..., RewardWorker], tokenizer: Any) -> None:
    table = rollouts(tokenizer, [" always", " are", " red"])
    args = {"letters": "ae"}
    four = worker_of({"name": "letter_share", "process": True, "args": {**args, "every": 4}})
    # " alw" ends in the first token, "ays " in the second, "are " in the third, "red" with the text.
    assert spans_of(four.score(table)[1]) == [[(1, 0.25), (2, 0.25), (3, 0.5), (4, pytest.approx(1 / 3))]]
    three = worker_of({"name": "letter_share", "process": True, "weight": 3.0, "args": {**args, "every": 3}})
    # " al" and "way" both end in the first token.
    expected = [(1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert spans_of(three.score(table)[1]) == [[(end, pytest.approx(reward)) for end, reward in expected]]


def test_characters_of_several_tokens_in_a_real_vocabulary(tokenizer: Any) -> None:
    text = "2+3=5 🙂 naïve 𝔘 東京 end"
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    decode: Callable[[list[int]], str] = lambda part: tokenizer.decode(part, skip_special_tokens=True)  # noqa: E731
    counts = token_counts(range(1, len(text) + 1), text, ids, decode)
    assert counts[-1] == len(ids)
    for end, count in enumerate(counts[:-1], 1):
        assert decode(ids[:count]).startswith(text[:end])
        assert not decode(ids[: count - 1]).startswith(text[:end])
    assert any("\ufffd" in decode(ids[:count]) for count in range(len(ids)))


def test_without_process_an_outcome_counts(worker_of: Callable[..., RewardWorker], tokenizer: Any) -> None:
    worker = worker_of({"name": "equations"})
    summary, table = worker.score(rollouts(tokenizer, "2+3=5;2+2=5"))
    assert (summary.rewards, spans_of(table), summary.steps_differ) == ((0.5,), [[]], False)


def test_a_sample_with_unmappable_steps_fails_alone(worker_of: Callable[..., RewardWorker], tokenizer: Any) -> None:
    worker = worker_of({"name": "equations", "process": True}, {"name": "numeric", "weight": 0.0})
    table = rollouts(tokenizer, "1+1=2", "1+1=2")
    texts = pa.array(["1+1=2", "1+1=3"])
    table = table.set_column(ROLLOUTS.get_field_index("response"), ROLLOUTS.field("response"), texts)
    summary, scored = worker.score(table)
    assert summary.statuses == ("ok", "steps: the response's tokens do not decode to its text")
    assert summary.rewards == (1.0, None)
    assert spans_of(scored) == [[(6, 1.0)], []]


def test_the_end_of_a_turn_is_that_of_the_specs_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    """Without the template, the token is text, and no response's tokens decode to its text."""
    own = new_tokenizer(tiny_model)
    own.add_tokens(["<|done|>"])
    own.save_pretrained(tmp_path)
    template = tmp_path / "other.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'assistant' %}<|done|>{% endif %}{% endfor %}"
    )
    policy = ModelConfig(path=str(tmp_path), chat_template=str(template))
    function = RewardFunctionConfig(name="equations", process=True, timeout_s=FAR_OFF)
    worker = RewardWorker(RewardConfig(functions=(function,)), "reward-0", policy=policy)
    table = rollouts(own, "1+1=2")
    ids = pa.array([[*table["response_ids"][0].as_py()[:-1], own.convert_tokens_to_ids("<|done|>")]])
    field = ROLLOUTS.field("response_ids")
    table = table.set_column(ROLLOUTS.get_field_index("response_ids"), field, ids.cast(field.type))
    try:
        worker.start()
        summary, scored = worker.score(table)
    finally:
        worker.close()
    assert (summary.statuses, spans_of(scored)) == (("ok",), [[(6, 1.0)]])


def test_process_rewards_need_the_policy(tokenizer: Any) -> None:
    functions = (RewardFunctionConfig(name="equations", process=True, timeout_s=FAR_OFF),)
    worker = RewardWorker(RewardConfig(functions=functions), "reward-0")
    with pytest.raises(ValueError, match="need the policy's tokenizer"):
        worker.start()
    try:
        with pytest.raises(RuntimeError, match=r"the policy's tokenizer is not loaded"):
            worker.score(rollouts(tokenizer, "1+1=2"))
    finally:
        worker.close()


def test_steps_of_components_are_added_per_token() -> None:
    first, second = RewardResult(0.5, steps=((3, 1.0), (6, 0.0))), RewardResult(2.0, steps=((3, 2.0),))
    outcome, failed = RewardResult(1.0), RewardResult(0.0, steps=((2, 1e308),))

    def halves(ends: Sequence[int]) -> list[int]:
        return [(end + 1) // 2 for end in ends]

    def spans(*parts: tuple[float, RewardResult]) -> list[tuple[int, float]]:
        return list(reward_spans([weight for weight, _ in parts], [one for _, one in parts], 4, halves))

    assert spans((1.0, first), (-1.0, second), (3.0, outcome)) == [(2, -1.0), (3, 0.0), (4, 3.0)]
    assert spans((1.0, outcome)) == []
    assert spans((1.0, outcome), (0.0, first)) == []
    assert spans((0.0, outcome), (1.0, first)) == [(2, 1.0), (3, 0.0)]
    assert reward_spans([1.0], [first], 0, halves) == ()
    with pytest.raises(ValueError, match="not a finite number: inf"):
        spans((10.0, failed))


def test_a_group_of_equal_outcomes_may_have_a_signal_in_its_steps(
    worker_of: Callable[..., RewardWorker], tokenizer: Any
) -> None:
    worker = worker_of({"name": "equations", "process": True})
    summary = GroupSummary("p0", 0, "engine-0", (), 0.0)

    def signal(*responses: str) -> bool:
        rewards = worker.score(rollouts(tokenizer, *responses))[0]
        return ScoredGroup(summary, rewards, *TABLES, ()).has_signal

    assert signal("2+3=5;2+2=5", "2+2=5;2+3=5")
    assert not signal("2+3=5", "1+1=2;2+1=3")
    same = RewardSummary("p0", 0, ("ok", "ok"), (1.0, 1.0), {})
    assert not ScoredGroup(summary, same, *TABLES, ()).has_signal
