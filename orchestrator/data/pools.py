"""A pool: every usable row of a source, with what is wrong with the others; and several sources as one pool."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, Literal, Protocol, TypeVar

import pyarrow as pa

from troupe.orchestrator.data.bad_rows import BadRow, SkippedRow, WrongForm
from troupe.orchestrator.data.readers import RawRow, RawValues
from troupe.orchestrator.errors import DataError

MAX_REPORTED = 20
_ESCAPED = re.compile(r"\\(.)")

OnBadRow = Literal["skip", "stop"]
"""What a row that cannot be used does: it is skipped and reported, or is an error."""
T = TypeVar("T")
RawT = TypeVar("RawT", RawRow, RawValues)
RowT = TypeVar("RowT")
SourceT = TypeVar("SourceT")
NamedT = TypeVar("NamedT", bound="Named")


@dataclass(frozen=True)
class Pool:
    """Every usable row of a source."""

    table: pa.Table
    """Prompts, examples or texts."""
    digest: str
    """Digest of the rows' content; equal pools have equal digests."""
    bad_rows: int = 0
    problems: tuple[str, ...] = ()
    """`file:row: reason` of the first unusable rows."""
    left_out: int = 0
    """Rows excluded because another pool has the same prompt."""
    repeated: int = 0
    """Rows that repeat an earlier one."""
    deduped: int = 0
    """Further rows of that kind, left out."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Rows that the spec leaves out, by their kind."""
    doubts: tuple[str, ...] = ()
    """Contradictions between unread columns and the spec's reading."""
    alike: int = 0
    """Rows with another pool's question in another form: with another system message or template."""
    shared: int = 0
    """Rows whose prompt an earlier source of the mixture has."""
    contradicted: int = 0
    """Rows whose prompt has another answer in an earlier row, of this source or another, those left out among them."""
    parts: Mapping[str, Pool] = field(default_factory=dict)
    """The pools of a mixture by the name of their source, in the order of their rows; empty if there is one source."""

    @property
    def rows(self) -> int:
        return self.table.num_rows


@dataclass
class Collected(Generic[RowT]):
    """The usable rows of a source, and how many others there are."""

    rows: list[RowT] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    bad_rows: int = 0
    left_out: int = 0
    repeated: int = 0
    deduped: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Field and reason of each row in another form than the spec's."""
    shared: int = 0
    contradicted: int = 0

    def pool(self, table: pa.Table, contents: Iterable[bytes]) -> Pool:
        """The pool of these rows, as a table; `contents` is what the digest covers."""
        digest = hashlib.blake2b(digest_size=16)
        for content in contents:
            digest.update(len(content).to_bytes(8, "little") + content)
        return Pool(
            table=table,
            digest=digest.hexdigest(),
            bad_rows=self.bad_rows,
            problems=tuple(self.problems),
            left_out=self.left_out,
            repeated=self.repeated,
            deduped=self.deduped,
            skipped=dict(self.skipped),
            shared=self.shared,
            contradicted=self.contradicted,
        )


class Repeats(Generic[RowT]):
    """Finds rows that repeat an earlier one, or that answer its prompt in another way."""

    def __init__(
        self,
        content: Callable[[RowT], str],
        leave_out: bool,
        answer: Callable[[RowT], str] = lambda row: "",
        earlier: dict[str, str] | None = None,
    ) -> None:
        """`content`: what a row repeats; `leave_out`: whether a pool has it once; `answer`: what is said to it;
        `earlier`: contents of the sources before, with their answers; `end` adds this one's."""
        self._content = content
        self._answer = answer
        self.leave_out = leave_out
        self._earlier = {} if earlier is None else earlier
        self._seen: dict[str, str] = {}
        self.shared = self.contradicted = 0

    def __call__(self, row: RowT) -> bool:
        """Whether an earlier row of the source has the content of this one."""
        content, answer = compared(self._content(row)), self._answer(row)
        forms = {content, _caseless(content, answer)}
        repeated = not forms.isdisjoint(self._seen)
        known = self._seen.get(content, self._earlier.get(content))
        self.shared += not forms.isdisjoint(self._earlier) and not (repeated and self.leave_out)
        self.contradicted += known is not None and known != answer
        for form in forms:
            self._seen.setdefault(form, answer)
        return repeated

    def end(self) -> None:
        """The source has been read: the next one's rows are compared with its rows."""
        self._earlier |= self._seen


def collect(
    source: Iterable[RawT],
    read: Callable[[RawT], RowT],
    label: str,
    on_bad_row: OnBadRow,
    is_left_out: Callable[[RowT], bool] = lambda row: False,
    repeats: Repeats[RowT] | None = None,
) -> Collected[RowT]:
    """The usable rows of a source, read by `read`, which raises BadRow. Raises DataError if it cannot be read, a row
    has another form than the spec's or is bad with `stop`, or no row is left."""
    found = Collected[RowT]()
    for raw in source:
        try:
            if raw.error:
                raise BadRow(raw.error)
            if raw.left_out:
                raise SkippedRow("rows by where")
            row = read(raw)
        except SkippedRow as kind:
            found.skipped[str(kind)] += 1
            continue
        except BadRow as bad:
            problem = f"{raw.origin}: {bad}"
            if on_bad_row == "stop":
                raise DataError(problem) from None
            if isinstance(bad, WrongForm):
                found.wrong.append((bad.field, problem))
            found.bad_rows += 1
            if len(found.problems) < MAX_REPORTED:
                found.problems.append(problem)
            continue
        if is_left_out(row):
            found.left_out += 1
            continue
        repeated = repeats is not None and repeats(row)
        if repeated and repeats is not None and repeats.leave_out:
            found.deduped += 1
            continue
        found.repeated += repeated
        found.rows.append(row)
    if found.wrong:
        field_, problem = found.wrong[0]
        raise DataError(f"{label}.{field_}: does not fit {len(found.wrong)} rows; the first: {problem}")
    if repeats is not None:
        repeats.end()
        found.shared, found.contradicted = repeats.shared, repeats.contradicted
    if not found.rows:
        raise DataError(f"{label}: {_why_empty(found)}")
    return found


def compared(text: str) -> str:
    """JSON as prompts and examples are compared: composed (NFC), white space as one space, none at the ends."""
    spaced = _ESCAPED.sub(lambda found: " " if found[1] in "nrt" else found[0], text)
    words = " ".join(unicodedata.normalize("NFC", spaced).split())
    return words.replace('" ', '"').replace(' "', '"')


def _caseless(content: str, answer: str) -> str:
    """A prompt without case, with its answer: questions about letters are others in another case, and have another."""
    return f"{content.casefold()}\0{answer}"


def asked_in(pool: Pool | None) -> Callable[[str, str], bool]:
    """Whether a pool has the prompt of messages in JSON, also in another case if its answer is this one."""
    asked = set[str]()
    if pool is not None:
        contents = [compared(messages) for messages in pool.table.column("messages").to_pylist()]
        has_answers = "answer" in pool.table.column_names
        answers = pool.table.column("answer").to_pylist() if has_answers else [""] * pool.rows
        asked = {*contents, *map(_caseless, contents, answers)}

    def is_asked(messages: str, answer: str) -> bool:
        content = compared(messages) if asked else ""
        return content in asked or _caseless(content, answer) in asked

    return is_asked


def _why_empty(found: Collected[RowT]) -> str:
    if found.left_out:
        return "every prompt is also in the training data (data.held_out)"
    if found.skipped:
        return f"every row is left out: {', '.join(f'{count} {kind}' for kind, count in found.skipped.items())}"
    if found.bad_rows:
        return f"no row can be used ({found.bad_rows} bad; the first: {found.problems[0]})"
    return "there are no rows"


class Named(Protocol):
    """A source among several."""

    @property
    def name(self) -> str: ...


def of_sources(
    given: SourceT | tuple[NamedT, ...], section: str, load: Callable[[SourceT | NamedT, str], Pool]
) -> Pool:
    """The pool of a source, or one pool of several in their order, whose column `source` names each row's source."""
    if not isinstance(given, tuple):
        return load(given, section)
    parts = {source.name: load(source, f"{section}.{number}") for number, source in enumerate(given)}
    pools = list(parts.values())
    tables = [of_source(name, pool.table) for name, pool in parts.items()]
    content = json.dumps([[name, pool.digest] for name, pool in parts.items()])
    return Pool(
        table=pa.concat_tables(tables),
        digest=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        bad_rows=sum(pool.bad_rows for pool in pools),
        problems=tuple(problem for pool in pools for problem in pool.problems),
        left_out=sum(pool.left_out for pool in pools),
        repeated=sum(pool.repeated for pool in pools),
        deduped=sum(pool.deduped for pool in pools),
        skipped=sum((Counter(pool.skipped) for pool in pools), Counter()),
        parts=parts,
    )


def of_source(name: str, table: pa.Table) -> pa.Table:
    """The table with the name of its source, if it has a column for that."""
    if "source" not in table.column_names:
        return table
    column = table.column_names.index("source")
    return table.set_column(column, table.field(column), pa.repeat(pa.scalar(name), table.num_rows))


@dataclass(frozen=True)
class RowTable(Generic[T]):
    """One entry for each source of a pool, found by the number of a row: sources follow each other."""

    starts: tuple[int, ...]
    """First row of each source, ascending from 0."""
    entries: tuple[T, ...]

    @classmethod
    def of(cls, sizes: Iterable[int], entries: Iterable[T]) -> RowTable[T]:
        """The table of sources with these numbers of rows."""
        return cls((0, *accumulate(sizes))[:-1], tuple(entries))

    def __getitem__(self, row: int) -> T:
        """The entry of the source that has the row."""
        return self.entries[bisect_right(self.starts, row) - 1]
