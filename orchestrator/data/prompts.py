"""The pool of prompts, and the endless, resumable order in which they are drawn from it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from string import ascii_uppercase as LETTERS
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from troupe.orchestrator.data.bad_rows import BadRow, WrongForm
from troupe.orchestrator.data.conversations import chat_messages, require_whole
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.pools import OnBadRow, Pool, Repeats, asked_in, collect, of_source, of_sources
from troupe.orchestrator.data.readers import RawRow, json_safe, read_rows
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.sections import DataConfig
from troupe.orchestrator.spec.sources import DataSource, Prompts
from troupe.workers.contract.messages import PROMPTS

RIGHT_ANSWERS = "right_answers"
"""Key of the metadata under which reward functions find every right answer of a row that has several."""


@dataclass(frozen=True)
class PromptPick:
    """One prompt drawn from a pool."""

    prompt_uid: str
    """Unique in the run."""
    row: int
    epoch: int = 0
    """Pass over its source."""
    draw: int = 0
    """Draws until this one, skipped prompts included: a later prompt of the same order has a higher number."""


OrderT = TypeVar("OrderT", bound="PromptOrder")


class PromptOrder(Protocol):
    """An endless, resumable order of prompts."""

    def next(self) -> PromptPick: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position that `state` returned. Raises DataError."""
        ...


def skipped(order: OrderT, prompts: int) -> OrderT:
    """The order, after its first prompts are drawn. Raises DataError if a mixture has not so many (`repeats`)."""
    for _ in range(prompts):
        order.next()
    return order


class Ordered(Protocol):
    """Rows that can be put in order."""

    @property
    def rows(self) -> int: ...

    @property
    def digest(self) -> str: ...


def load_pools(data: DataConfig, on_bad_row: OnBadRow = "skip", *, plain: bool = False) -> tuple[Pool, dict[str, Pool]]:
    """The pool for training, and those for evaluation by the name of their section in `data`. Raises DataError."""
    train = load_train_pool(data, on_bad_row, plain=plain)
    without = train if data.held_out else None
    held_out: dict[str, Pool] = {}
    for section, source in data.held_out_sets().items():
        pool = load_pool(source, on_bad_row, f"data.{section}", without=without, plain=plain)
        name = section.partition(".")[2]
        held_out[section] = replace(pool, table=of_source(name, pool.table)) if name else pool
    return train, _with_alike(data, train, held_out) if data.held_out else held_out


def _with_alike(data: DataConfig, train: Pool, held_out: Mapping[str, Pool]) -> dict[str, Pool]:
    """The held-out pools with the number of their rows with a training question in another form."""
    pools = list(train.parts.values()) or [train]
    trained = list(zip(data.train_sources().values(), pools, strict=True))
    asked: dict[str, set[bytes]] = {}
    found: dict[str, Pool] = {}
    for section, source in data.held_out_sets().items():
        pool = held_out[section]
        others = [
            (one, rows) for one, rows in trained if (one.system, one.template) != (source.system, source.template)
        ]
        own = _questions(source, pool) if others else []
        for one, rows in others:
            asked.setdefault(rows.digest + one.template, set(_questions(one, rows)))
        known = set[bytes]().union(*(asked[rows.digest + one.template] for one, rows in others))
        found[section] = replace(pool, alike=sum(question in known for question in own))
    return found


def _questions(source: DataSource, pool: Pool) -> list[bytes]:
    """A digest of each row's prompt without the system message and the template of its source."""
    before, _, after = source.template.partition("{prompt}")
    digests = []
    for text in pool.table.column("messages").to_pylist():
        said = json.loads(text)
        said[-1]["content"] = said[-1]["content"].removeprefix(before).removesuffix(after).strip()
        if source.system and said[0] == {"role": "system", "content": source.system}:
            del said[0]
        digests.append(hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest())
    return digests


def load_train_pool(data: DataConfig, on_bad_row: OnBadRow = "skip", *, plain: bool = False) -> Pool:
    """The pool for training: the only source's, or the pools of a mixture one after another. Raises DataError."""
    asked: dict[str, str] = {}

    def load(source: DataSource, label: str) -> Pool:
        return load_pool(source, on_bad_row, label, plain=plain, earlier=asked)

    pool = of_sources(data.train, "data.train", load)
    rows = pa.array(range(pool.rows), pa.int64())
    return replace(pool, table=pool.table.set_column(0, PROMPTS.field("row"), rows))


def load_pool(
    source: DataSource,
    on_bad_row: OnBadRow = "skip",
    label: str = "data.train",
    without: Pool | None = None,
    *,
    plain: bool = False,
    earlier: dict[str, str] | None = None,
) -> Pool:
    """Read a source into a pool with schema PROMPTS, `without` another's; this one's prompts are added to `earlier`.
    Raises DataError if it cannot be read, a row is bad with `stop`, or none is left."""
    is_asked = asked_in(without)
    found = collect(
        read_rows(source, label),
        lambda raw: read_prompt(raw, source, plain=plain),
        label,
        on_bad_row,
        lambda row: is_asked(row.messages, row.answer),
        Repeats(lambda row: row.messages, source.dedupe, lambda row: row.answer, earlier),
    )
    rows = found.rows
    texts = [[row.messages for row in rows], [row.answer for row in rows], [row.metadata for row in rows]]
    candidates = [list(row.candidates) or None for row in rows]
    columns = [*texts, [row.origin for row in rows]]
    table = pa.table([range(len(rows)), *columns, candidates, pa.nulls(len(rows), pa.string())], schema=PROMPTS)
    if any(candidates):
        texts.append([json.dumps(row.candidates, ensure_ascii=False) for row in rows])
    return found.pool(table, (text.encode() for column in texts for text in column))


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A usable row, as the pool holds it."""

    messages: str
    answer: str
    metadata: str
    candidates: tuple[str, ...]
    origin: str


def read_prompt(raw: RawRow, source: DataSource, *, plain: bool) -> PromptRow:
    """The row as the pool holds it. Raises BadRow."""
    prompt, right = raw.prompt, raw.answer
    if isinstance(source, Prompts) and source.options is not None:
        mixed = not isinstance(source.options, str) and source.answer in source.options
        prompt, right = with_options(prompt, raw.options, right, mixed=mixed)
    messages = json.dumps(chat_messages(prompt, source, raw.system, plain=plain), ensure_ascii=False)
    answers = _answers(right)
    answer, longest = answers[0], max(map(len, answers))
    if longest > source.max_chars:
        raise BadRow(f"the answer has {longest} characters, more than max_chars {source.max_chars}")
    several = {RIGHT_ANSWERS: answers} if len(answers) > 1 else {}
    if several and RIGHT_ANSWERS in raw.metadata:
        raise BadRow(f"several right answers, but also a metadata column '{RIGHT_ANSWERS}', which is where they go")
    try:
        metadata = json.dumps(json_safe(raw.metadata) | several, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the metadata cannot be held as JSON ({error})") from None
    for name, text in (("the prompt", messages), ("the answer", answer), ("the metadata", metadata)):
        require_whole(text, name)
    return PromptRow(messages, answer, metadata, _candidates(raw.candidates, source.max_chars), raw.origin)


def _candidates(texts: Any, max_chars: int) -> tuple[str, ...]:
    """The answers from other sources. Raises BadRow."""
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRow("the candidates are not a list of texts")
    for number, text in enumerate(texts):
        if len(text) > max_chars:
            raise BadRow(f"candidate {number} has {len(text)} characters, more than max_chars {max_chars}")
        require_whole(text, f"candidate {number}")
    return tuple(texts)


def _answers(answer: Any) -> list[str]:
    """The right answers of a row: one, or a list's."""
    if not isinstance(answer, list):
        return [_answer(answer)]
    if not answer or any(one is None for one in answer):
        raise BadRow("the list of answers is empty" if not answer else "the list of answers has a null")
    return [_answer(one) for one in answer]


def _answer(answer: Any) -> str:
    if answer is None:
        return ""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, float) and not math.isfinite(answer):  # how pandas writes a missing number
        raise BadRow(f"the answer is {'not a number (NaN)' if math.isnan(answer) else 'infinite'}")
    if isinstance(answer, (bool, int, float)):
        return json.dumps(answer)
    raise BadRow("the answer is not text, a number or a list of these")


class PromptSource:
    """Draws prompts endlessly: an epoch is a permutation of the pool by seed, or of what a curriculum draws."""

    def __init__(self, pool: Ordered, seed: int, curriculum: Curriculum | None = None) -> None:
        self._pool_digest = pool.digest
        self._rows = pool.rows
        self._seed = seed
        self._curriculum = curriculum
        self._epoch: int = 0
        self._position: int = 0
        self._order = permutation(self._rows, seed, 0)

    def next(self) -> PromptPick:
        row = self._advance()
        while self._curriculum is not None and not self._curriculum.draws(row, self._epoch):
            row = self._advance()
        return PromptPick(f"e{self._epoch}-r{row}", row, self._epoch, self.draws)

    @property
    def rows(self) -> int:
        return self._rows

    @property
    def draws(self) -> int:
        return self._epoch * self._rows + self._position

    def exhausted(self, passes: int) -> bool:
        """Whether so many passes over the pool are drawn; 0: never."""
        return passes > 0 and (self._epoch, self._position) >= (passes - 1, self._rows)

    def _advance(self) -> int:
        if self._position == self._rows:
            self._epoch += 1
            self._position = 0
            self._order = permutation(self._rows, self._seed, self._epoch)
        row = int(self._order[self._position])
        self._position += 1
        return row

    def state(self) -> dict[str, Any]:
        """Position in the order, JSON-ready; without a curriculum, its size does not depend on the pool's."""
        curriculum = {} if self._curriculum is None else {"curriculum": self._curriculum.state()}
        return curriculum | {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "rows": self._rows,
            "digest": self._pool_digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a position; a curriculum new to it starts without results. Raises DataError."""
        for name, mine in (("rows", self._rows), ("digest", self._pool_digest), ("seed", self._seed)):
            if state.get(name) != mine:
                what = "the seed is" if name == "seed" else "the training data are"
                was = state.get(name)
                raise DataError(f"cannot resume: {what} not the checkpoint's ({name} {was!r}, now {mine!r})")
        epoch, position = _count(state, "epoch"), _count(state, "position")
        if position > self._rows:
            raise DataError(f"cannot resume: position {position} is past the pool's {self._rows} rows")
        if self._curriculum is not None and "curriculum" in state:
            self._curriculum.restore(state["curriculum"], self._rows)
        self._epoch, self._position = epoch, position
        self._order = permutation(self._rows, self._seed, epoch)


def evaluation_picks(pool: Ordered, seed: int, prompts: int = 0, name: str = "") -> list[PromptPick]:
    """The same prompts of every evaluation: `prompts` of the pool (0: all), chosen by the seed. Their `prompt_uid`
    is `eval-rROW`, or `eval-NAME-rROW`."""
    order = permutation(pool.rows, seed, 0)
    uid = f"eval-{name}-r" if name else "eval-r"
    return [PromptPick(f"{uid}{row}", int(row)) for row in order[: prompts or pool.rows]]


def permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Row numbers in the order of an epoch, int64[rows]. Sorts raw Philox output, a stream that numpy guarantees for
    all versions, unlike `Generator.permutation`."""
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    return np.argsort(keys, kind="stable")


def _count(state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(f"cannot resume: the order's state is damaged ({name} {value!r})")
    return value


def with_options(prompt: Any, options: Any, answer: Any, *, mixed: bool) -> tuple[str, str]:
    """The prompt with its options, and the letter of the right one, given by text, letter, or number from 0 on.
    Raises BadRow. `mixed`: it is one of the options itself, which are ordered by the question alone."""
    texts = [str(one).strip() for one in options] if isinstance(options, list) and None not in options else []
    if not isinstance(prompt, str):
        raise BadRow("the prompt with options is not text")
    if not 2 <= len(texts) <= len(LETTERS) or len(set(texts)) < len(texts):
        raise BadRow(f"the options are not 2 to {len(LETTERS)} different texts")
    places = {texts.index(str(answer).strip())} if mixed else {*_places(answer, options, texts)}
    if len(places) != 1:
        raise BadRow(f"the answer, {answer!r:.60}, {'names several' if places else 'is none'} of the options")
    right = texts[places.pop()]
    if mixed:
        texts.sort(key=lambda text: hashlib.blake2b(f"{prompt}\0{text}".encode()).digest())
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    return f"{prompt}\n\n{listed}", LETTERS[texts.index(right)]


def _places(answer: Any, options: list[Any], texts: list[str]) -> Iterator[int]:
    """What an answer may mean, as numbers of options."""
    word = str(answer).strip()
    is_text = word in texts and (isinstance(answer, str) or answer in options)
    if is_text:
        yield texts.index(word)
    if len(word) == 1 and word in LETTERS[: len(texts)]:
        yield LETTERS.index(word)
    if word.isdecimal() and int(word) < len(texts):
        yield int(word)
    elif word.isdecimal() and not is_text:
        raise WrongForm("answer", f"the answer is option {word} of {len(texts)}, which are counted from 0")
