"""The prompt of the data is shown whole, however the environment shows it; what else a message says is bounded."""

from __future__ import annotations

import random
import re
import time

import pytest

from troupe.workers.agents.episodes.observations import cut_observation

LONGEST = 200
MARK = re.compile(r"\n\[\.\.\. [0-9,]+ characters cut\]")


def _words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join("".join(chosen.choices("abcdefghij", k=chosen.randint(2, 9))) for _ in range(count))


SYSTEM, LONG = _words(1, 100), _words(2, 100)
TASK = _words(3, 100) + "\n\n" + _words(4, 100) + "\nWhat is 2 + 2?"

WHOLE: dict[str, tuple[list[str], str]] = {
    "as it is": ([TASK], TASK),
    "trimmed": ([f"\n{TASK}\n\n"], TASK),
    "with blanks behind it": ([TASK], TASK + "\n"),
    "system and user in one message": ([SYSTEM, TASK], f"{SYSTEM}\n\n{TASK}"),
    "under titles": ([SYSTEM, TASK], f"# Rules\n{SYSTEM}\n\n# Task\n{TASK}\n\nAnswer in one word."),
    "the end of the prompt": ([f"Introduction.\n{TASK}"], TASK),
    "the start of the prompt": ([TASK], TASK[:700] + " ..."),
    "a paragraph less": ([f"{LONG}\n\n{SYSTEM}\n\n{TASK}"], f"{LONG}\n\n{TASK}"),
    "other blanks between paragraphs": ([f"{SYSTEM}\n\n\n{TASK}"], f"{SYSTEM}\n{TASK}"),
    "one character again and again": (["intro\n" + "q" * 3000 + "?"], "q" * 3000 + "?"),
    "behind a short text": ([TASK], f"{LONG[:150]}\n{TASK}"),
}
"""Texts of a prompt, and a message that shows them with little else."""


@pytest.mark.parametrize("case", WHOLE)
def test_a_message_that_shows_the_prompt_with_little_else_is_not_cut(case: str) -> None:
    prompts, message = WHOLE[case]
    assert len(message) > LONGEST
    assert cut_observation(message, LONGEST, prompts) == message


@pytest.mark.parametrize("shown", [TASK, TASK.replace("\n\n", "\n"), "2 + 2?"], ids=["whole", "changed", "short"])
def test_a_question_behind_a_long_text_stays(shown: str) -> None:
    prompt = TASK if shown != "2 + 2?" else shown
    text = _words(5, 500)
    cut = cut_observation(f"{text}\n{shown}\nAnswer in one word.", LONGEST, [prompt])
    beginning, behind = re.split(MARK.pattern + "\n", cut)
    assert text.startswith(beginning)
    assert behind == f"{shown}\nAnswer in one word."
    assert LONGEST - 40 < len(beginning) <= LONGEST


def test_what_is_not_of_the_prompt_is_bounded() -> None:
    for seed in range(200):
        chosen = random.Random(seed)
        prompts = [_words(chosen.randrange(9), chosen.randint(0, 60)) for _ in range(chosen.randint(0, 3))]
        pieces = [*prompts, *prompts, _words(chosen.randrange(99), chosen.randint(0, 90)), "x" * chosen.randint(0, 300)]
        message = "\n".join(chosen.choices(pieces, k=chosen.randint(0, 8)))
        cut = cut_observation(message, LONGEST, prompts)
        bare, marks = MARK.subn("", cut)
        assert (cut == message) or len(bare) <= LONGEST + sum(map(len, prompts)) + marks
        if not marks:
            assert cut == message


def test_a_prompt_that_is_shown_again_and_again_counts_once() -> None:
    message = "\n".join([TASK] * 20)
    cut = cut_observation(message, LONGEST, [TASK])
    assert cut.endswith(TASK)
    assert len(MARK.sub("", cut)) <= LONGEST + len(TASK) + 1


@pytest.mark.parametrize("piece", ["q", "ab", "0\n", "word "])
def test_long_texts_take_little_time(piece: str) -> None:
    text, prompt = piece * (300_000 // len(piece)), piece * (200_000 // len(piece)) + "?"
    started = time.process_time()
    cut_observation(text, LONGEST, [prompt, _words(7, 20_000)])
    assert time.process_time() - started < 2.0
