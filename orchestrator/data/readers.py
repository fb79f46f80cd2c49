"""Readers of prompt data: one generator of raw rows per kind of source. They do not check the content of rows.

Columns are found by name, also those inside a struct: `reward_model.ground_truth`.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.orchestrator.data.remote import local_files
from troupe.orchestrator.errors import DataError, nearest
from troupe.orchestrator.spec.conditions import Condition
from troupe.orchestrator.spec.sources import (
    Columns,
    DatasetsFolder,
    DataSource,
    HubFiles,
    Prompts,
    ReasoningGymSource,
    RecipeConfig,
    TableFile,
)
from troupe.workers.contract.imports import gym_factory, missing_package, without_collections

if TYPE_CHECKING:
    import pyarrow as pa

MAX_LINE_BYTES = 16 << 20
Tree = Mapping[str, Any]
"""Columns of a row or of a file by name; a struct is a nested tree, a list of structs a list of one; None if it is
unknown whether it is a struct or a value."""

_SHOWN = 20
_SYNONYMS = {"response": "completion", "prompt": "messages", "messages": "conversations"}
"""Names of other layouts for a column."""


@dataclass(frozen=True)
class RawRow:
    """One row of prompts, as it was read."""

    origin: str
    prompt: Any = None
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why the row could not be read; empty if it could."""
    left_out: bool = False
    """Whether the row does not meet `where`."""
    candidates: Any = None
    system: Any = None
    options: Any = None


@dataclass(frozen=True)
class RawValues:
    """One row of a source with named columns."""

    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    """The values by column."""
    error: str = ""
    left_out: bool = False
    padded: bool = False
    """Whether an object's key may be null because the object of another row has it (Arrow)."""


TableSource = TableFile | DatasetsFolder | HubFiles
Fields = Mapping[str, str] | None
"""Column of each field of a source, or None for every column."""


def read_rows(source: DataSource, label: str) -> Iterator[RawRow]:
    """Rows of a source, in its own order. Raises DataError if the source as a whole cannot be used."""
    if isinstance(source, ReasoningGymSource):
        return _reasoning_gym(source, label)
    return _prompt_rows(source, label)


def read_table(
    source: TableSource | Columns, fields: Fields, label: str, *, arrays: bool = False
) -> Iterator[RawValues]:
    """Rows of a source with named columns (None: all), in its own order, and the rows that do not meet `where`.
    Raises DataError if the source as a whole cannot be used. `arrays`: lists of numbers in Parquet become NumPy arrays,
    with no Python object for each."""
    if not isinstance(source, Columns) or source.where is None:
        return _rows(source, fields, label, arrays)
    condition = Condition.parse(source.where)
    own = {f"where.{number}": column for number, column in enumerate(condition.columns)}
    return (_met(condition, row) for row in _rows(source, None if fields is None else {**fields, **own}, label, arrays))


def _met(condition: Condition, row: RawValues) -> RawValues:
    """The row, with whether it meets a condition."""
    try:
        left_out = not (row.error or condition.holds(partial(find_column, row.values)))
    except ValueError as error:
        return RawValues(row.origin, error=f"where {error}")
    return dataclasses.replace(row, left_out=left_out)


def _rows(source: TableSource | Columns, fields: Fields, label: str, arrays: bool) -> Iterator[RawValues]:
    formats = {**_FORMATS, "parquet": partial(_parquet, rows_of=_array_rows if arrays else _python_rows)}
    if isinstance(source, DatasetsFolder):
        rows = _datasets(source, fields, label)
    elif isinstance(source, HubFiles):
        files = map(Path, source.files)  # the run has downloaded them and put their paths here
        rows = chain.from_iterable(formats[file_format(path.name)](path, fields, label) for path in files)
    elif isinstance(source, TableFile):
        files = local_files(source.path)
        rows = chain.from_iterable(formats[source.kind](path, fields, label) for path in files)
    else:
        raise TypeError(f"{label} has no table")
    return islice(rows, source.limit or None)


def _prompt_rows(source: Prompts, label: str) -> Iterator[RawRow]:
    return (prompt_row(source, row) for row in read_table(source, prompt_fields(source), label))


def prompt_fields(source: Prompts) -> dict[str, str]:
    named = {name: vars(source)[name] for name in ("prompt", "answer", "candidates", "system_column")}
    fields = {name: column for name, column in named.items() if column is not None}
    options = (source.options,) if isinstance(source.options, str) else source.options or ()
    several = {"options": options, "metadata": source.metadata}
    return fields | {f"{name}.{n}": column for name, own in several.items() for n, column in enumerate(own)}


def prompt_row(source: Prompts, row: RawValues) -> RawRow:
    if row.error or row.left_out:
        return RawRow(row.origin, error=row.error, left_out=row.left_out)
    answer = "" if source.answer is None else row.values[source.answer]
    metadata = {name: row.values[name] for name in source.metadata}
    further = {"candidates": source.candidates, "system": source.system_column, "options": source.options}
    own: dict[str, Any] = {
        name: [row.values[one] for one in column] if isinstance(column, tuple) else row.values[column]
        for name, column in further.items()
        if column is not None
    }
    return RawRow(row.origin, row.values[source.prompt], answer, metadata, **own)


def named_values(fields: Fields, origin: str, row: Tree) -> RawValues:
    """The values of the columns that the spec names, or all of them."""
    if fields is None:
        return RawValues(origin, dict(row))
    values: dict[str, Any] = {}
    for column in fields.values():
        try:
            values[column] = find_column(row, column)
        except KeyError:
            return RawValues(origin, error=f"no column '{column}'")
    return RawValues(origin, values)


def _jsonl(path: Path, fields: Fields, label: str) -> Iterator[RawValues]:
    return _objects(_json_lines(path, label), fields, label)


def _json(path: Path, fields: Fields, label: str) -> Iterator[RawValues]:
    """Rows of one JSON array, alone or in an object around it; another file is read as JSON lines."""
    place = "item" if _begins_with_a_list(path, label) else _place_in_object(path, fields, label)
    return _objects(_json_array(path, label, place) if place else _json_lines(path, label), fields, label)


def _place_in_object(path: Path, fields: Fields, label: str) -> str:
    """Where the rows of a file are that is one object (`{"data": [...]}`); empty if that is a row, or one of many."""
    ijson, keys, lists = _library("ijson", label), set[str](), dict[str, set[str]]()
    with suppress(OSError, EOFError, zlib.error, ijson.JSONError, UnicodeDecodeError), _open(path) as file:
        _skip_bom(file)
        for prefix, event, value in ijson.parse(file, multiple_values=True):
            key = prefix.removesuffix(".item")
            if event == "start_map" and not prefix and keys:
                return ""
            if event == "map_key" and not prefix:
                keys.add(value)
            if event in ("start_map", "map_key") and key != prefix and key in keys:
                lists.setdefault(key, set()).update([value] if value else [])
    messages = any({"role", "content"} <= names or {"from", "value"} <= names for names in lists.values())
    if messages or not lists or (fields and keys.issuperset(fields.values())):
        return ""
    if len(lists) > 1:
        raise DataError(f"{path}: {' and '.join(lists)} are lists of rows: keep one of them; see {label}.path")
    return f"{next(iter(lists))}.item"


def _objects(parsed: Iterator[tuple[str, Any, str]], fields: Fields, label: str) -> Iterator[RawValues]:
    """Rows of parsed values: (origin, value, why there is no value)."""
    checked = False
    for origin, values, error in parsed:
        if error or not isinstance(values, dict):
            yield RawValues(origin, error=error or "not a JSON object")
            continue
        if not checked:
            require_columns(fields, label, origin, values)
            checked = True
        yield named_values(fields, origin, values)


def _json_lines(path: Path, label: str) -> Iterator[tuple[str, Any, str]]:
    for number, line in enumerate(_lines(path, label), start=1):
        origin = f"{path.name}:{number}"
        if line is None:
            yield origin, None, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            yield origin, json.loads(line.decode("utf-8")), ""
        except UnicodeDecodeError:
            yield origin, None, "not UTF-8 text"
        except (ValueError, RecursionError) as error:
            yield origin, None, f"not JSON ({error})"


def _json_array(path: Path, label: str, place: str) -> Iterator[tuple[str, Any, str]]:
    """Values of the array at a place of ijson's, parsed one by one: the file may be larger than the memory."""
    ijson = _library("ijson", label)
    taken, exact = 0, ijson.get_backend("python")
    try:
        for parser in (ijson, exact):  # the fast one has integers of 64 bits; the other resumes at its end
            try:
                with _open(path) as file:
                    _skip_bom(file)
                    rows = enumerate(parser.items(file, place, use_float=True), start=1)
                    for number, value in islice(rows, taken, None):
                        taken = number
                        yield f"{path.name}:{number}", value, ""
                return
            except ijson.JSONError as error:
                if parser is exact or "integer overflow" not in str(error):
                    raise
    except (OSError, EOFError, zlib.error, ijson.JSONError, UnicodeDecodeError) as error:
        raise _unreadable(path, label, error) from None


def _begins_with_a_list(path: Path, label: str) -> bool:
    try:
        with _open(path) as file:
            _skip_bom(file)
            while (byte := file.read(1)).isspace():
                pass
            return byte == b"["
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, label, error) from None


def _skip_bom(file: Opened) -> None:
    """Read the byte order mark that a file may begin with."""
    if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))


def _lines(path: Path, label: str) -> Iterator[bytes | None]:
    """Lines of a file; None for a line of more than `MAX_LINE_BYTES`."""
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
                    yield line
                    continue
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield None
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, label, error) from None


Opened = io.BufferedReader | gzip.GzipFile


def _open(path: Path) -> Opened:
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _csv(path: Path, fields: Fields, label: str) -> Iterator[RawValues]:
    """Rows of RFC 4180: a quoted value may hold commas and line breaks. What the first line has most separates."""
    csv.field_size_limit(MAX_LINE_BYTES)  # of the whole process; the default of 128 KiB would end the file
    try:
        with _open(path) as data:
            is_utf16 = data.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            encoding = "utf-16" if is_utf16 else "utf-8-sig"
            file = io.TextIOWrapper(data, encoding, newline="")
            header = file.readline()
            separator = max([one for one in "\t;," if one in header] or [","], key=header.count)
            rows = csv.reader(chain([header], file), strict=True, delimiter=separator)
            columns = next(rows, [])
            require_columns(fields, label, path.name, dict.fromkeys(columns, ""))
            for row in rows:
                if row:  # an empty line is no row
                    # A row may span lines: it is named by its last one.
                    yield _csv_row(fields, f"{path.name}:{rows.line_num}", columns, row)
    except (OSError, EOFError, zlib.error, UnicodeError, csv.Error) as error:
        raise _unreadable(path, label, error) from None


def _csv_row(fields: Fields, origin: str, columns: Sequence[str], row: Sequence[str]) -> RawValues:
    if len(row) != len(columns):
        return RawValues(origin, error=f"{len(row)} values for {len(columns)} columns")
    return named_values(fields, origin, dict(zip(columns, row, strict=True)))


def _python_rows(batch: pa.RecordBatch) -> Iterable[dict[str, Any]]:
    return batch.to_pylist(maps_as_pydicts="lossy")


def _array_rows(batch: pa.RecordBatch) -> Iterable[dict[str, Any]]:
    """The rows of a batch, whose lists of numbers without null are NumPy arrays."""
    columns = [_arrays(column) or column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns]
    return (dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True))


def _arrays(column: pa.Array) -> list[Any] | None:
    """A NumPy array for each list of a column, None for none; None if these are no lists of numbers."""
    import pyarrow as pa

    if not isinstance(column, pa.ListArray) or column.flatten().null_count:
        return None
    kind = column.type.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    return [one.values.to_numpy(zero_copy_only=False) if one.is_valid else None for one in column]


def _parquet(
    path: Path, fields: Fields, label: str, rows_of: Callable[[pa.RecordBatch], Iterable[dict[str, Any]]] = _python_rows
) -> Iterator[RawValues]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            there = arrow_columns(file.schema_arrow)
            require_columns(fields, label, path.name, there)
            # A dotted name reads one field of a struct, and also a column of this very name; a list is read whole.
            lists = [name for name, inner in there.items() if isinstance(inner, list) and _reads(fields, name)]
            columns = None if fields is None else list({*fields.values(), *lists})
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for values in rows_of(batch):
                    number += 1
                    yield dataclasses.replace(named_values(fields, f"{path.name}:{number}", values), padded=True)
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:  # text that is no UTF-8, odd times
        raise _unreadable(path, label, error) from None


def _datasets(source: DatasetsFolder, fields: Fields, label: str) -> Iterator[RawValues]:
    datasets = _library("datasets", label)
    path = Path(source.path)
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many types for a damaged folder
        raise _unreadable(path, label, error) from None
    if isinstance(data, datasets.DatasetDict):
        if source.split not in data:
            raise DataError(f"{path}: set {label}.split to one of its splits: {', '.join(map(str, data))}")
        data = data[source.split]
    elif source.split is not None:
        raise DataError(f"{path}: has no splits; remove {label}.split")
    columns = arrow_columns(data.features.arrow_schema)
    require_columns(fields, label, str(path), columns)
    # A whole struct is read for a field of it.
    data = data.select_columns([name for name in columns if _reads(fields, name)])
    for number in range(len(data)):
        try:
            values = dict(data[number])
        except Exception as error:  # as above
            raise _unreadable(path, label, error) from None
        yield dataclasses.replace(named_values(fields, f"{path.name}:{number + 1}", values), padded=True)


def _reads(fields: Fields, column: str) -> bool:
    return fields is None or any(name == column or name.startswith(f"{column}.") for name in fields.values())


def find_column(row: Tree, name: str) -> Any:
    """Value of a column of a row. A column of exactly this name comes first. Otherwise a dot leads into a struct, or
    into each struct of a list; a struct that is null has null values. Raises KeyError if the row has no such column."""
    if name in row:
        return row[name]
    end = name.rfind(".")
    while end > 0:
        outer, inner = name[:end], name[end + 1 :]
        if outer in row and row[outer] is None:
            return None
        found = row.get(outer)
        with suppress(KeyError):
            if isinstance(found, Mapping):
                return find_column(found, inner)
            if isinstance(found, list) and all(isinstance(item, Mapping) for item in found):
                return [find_column(item, inner) for item in found]
        end = name.rfind(".", 0, end)
    raise KeyError(name)


def has_column(row: Tree, name: str) -> bool:
    """Whether a row has a column of this name, which may lead into a struct."""
    try:
        find_column(row, name)
    except KeyError:
        return False
    return True


def require_columns(fields: Mapping[str, str] | None, label: str, where: str, there: Tree) -> None:
    """Raise DataError for a source without the columns that the spec names."""
    for name, column in (fields or {}).items():
        if not has_column(there, column):
            field_ = "where" if name.startswith("where.") else name
            raise DataError(_missing(f"{label}.{field_}", column, where, there))


def _missing(field: str, column: str, where: str, there: Tree) -> str:
    names = list(_names(there))
    listed = ", ".join(names[:_SHOWN]) or "none"
    # No distance between words leads from `ground_truth` to `reward_model.ground_truth`, or to TRL's `completion`.
    known = [name for name in names if name.endswith(f".{column}") or name == _SYNONYMS.get(column)]
    hint = f"did you mean '{known[0]}'?" if known else nearest(column, names)
    if column == "prompt" and {"chosen", "rejected"} <= set(names):
        hint = "null: the prompt is the common beginning of the answers"
    words = f"{where}: no column '{column}' ({field}); columns there: {listed}"
    return f"{words} ({hint})" if hint else words


def _names(there: Tree, prefix: str = "") -> Iterator[str]:
    """Every name that a spec can give, a struct's fields instead of the struct."""
    for name, inner in there.items():
        if isinstance(inner, Mapping) and inner:
            yield from _names(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def arrow_columns(schema: pa.Schema | pa.StructType) -> Tree:
    import pyarrow as pa

    def below(kind: pa.DataType) -> Any:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            inner = below(kind.value_type)
            return [inner] if inner else ""
        return arrow_columns(kind) if pa.types.is_struct(kind) else ""

    columns = [schema.field(index) for index in range(len(schema.names))]
    return {field.name: below(field.type) for field in columns}


_FORMATS: Mapping[str, Callable[[Path, Fields, str], Iterator[RawValues]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "csv": _csv,
    "json": _json,
}
_SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".csv": "csv", ".tsv": "csv", ".json": "json"}
"""Format of a file by the end of its name, without the suffix of a compression."""
_COMPRESSED = (".gz", ".zst")
_NOT_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""Files that describe a dataset."""


def file_format(name: str) -> str:
    """Format of a file, by its name; empty if no reader reads it."""
    if name.endswith(_NOT_DATA):
        return ""
    plain = next((name.removesuffix(suffix) for suffix in _COMPRESSED if name.endswith(suffix)), name)
    return next((kind for suffix, kind in _SUFFIXES.items() if plain.endswith(suffix)), "")


def _library(name: str, label: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """A library of an extra, imported when it is used. Raises DataError."""
    try:
        with without_collections():
            return load(name)
    except ImportError as error:
        problem = missing_package(name) or f"{name} cannot be imported ({error})"
        raise DataError(f"{label}.kind: {problem}") from None


def _unreadable(path: Path, label: str, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
    reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else reason or type(error).__name__
    return DataError(f"{path}: cannot be read ({reason}); see {label}.path")


def _reasoning_gym(source: ReasoningGymSource, label: str) -> Iterator[RawRow]:
    recipes = source.recipes
    sizes = shares(source.size, [recipe.weight for recipe in recipes])
    families = [
        _tasks(recipe, sizes[index], task_seed(source.seed, index, recipe.name), f"{label}.recipes.{index}")
        for index, recipe in enumerate(recipes)
    ]
    # Recipes alternate in proportion to their sizes, so that any prefix of the pool has the mixture of the whole.
    order = [((number + 0.5) / size, index, number) for index, size in enumerate(sizes) for number in range(size)]
    for _, index, number in sorted(order):
        name = recipes[index].name
        origin = f"reasoning_gym/{name}:{number + 1}"
        try:
            entry = families[index][number]
        except Exception as error:  # generators raise anything; it costs one task, not the run
            yield RawRow(origin, error=f"the task cannot be generated ({type(error).__name__}: {error})")
            continue
        metadata = {"recipe": name, "entry": json_safe(entry)}
        yield RawRow(origin, entry["question"], entry["answer"], metadata)


def _tasks(recipe: RecipeConfig, size: int, seed: int, label: str) -> Any:
    """A task family. Its errors (TypeError, bare AssertionError) become a DataError that names the field."""
    factory = _library("reasoning_gym", label, lambda _: gym_factory())
    families = factory.DATASETS
    if recipe.name not in families:
        hint = nearest(recipe.name, families)
        raise DataError(f"{label}.name: reasoning-gym has no task '{recipe.name}'" + (f" ({hint})" if hint else ""))
    takes = [f.name for f in dataclasses.fields(families[recipe.name][1]) if f.name not in ("seed", "size")]
    for key in recipe.args:
        if key not in takes:
            hint = nearest(key, takes) or f"it has: {', '.join(takes)}"
            raise DataError(f"{label}.args.{key}: {recipe.name} has no such setting ({hint})")
    try:
        return factory.create_dataset(recipe.name, size=size, seed=seed, **recipe.args)
    except Exception as error:  # wrong values end in AssertionError, TypeError, ValueError, KeyError, ...
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{label}.args: {recipe.name} rejects its settings: {reason}") from None


def task_seed(seed: int, index: int, name: str) -> int:
    """Seed of one recipe's tasks, below 2**31 with room for indices. reasoning-gym generates task i from seed + i:
    neighbouring seeds would give the same tasks shifted by one."""
    high = zlib.crc32(f"{seed}:{index}:{name}".encode())
    return (high * 2_654_435_761 + seed) % (2**31 - 10_000_001)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` in proportion to weights by largest remainders; every share is at least one."""
    free = total - len(weights)
    exact = [free * weight / sum(weights) for weight in weights]
    counts = [int(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: free - sum(counts)]:
        counts[i] += 1
    return [count + 1 for count in counts]


def without_nulls(value: Any) -> Any:
    """The value without keys of objects that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def json_safe(value: Any) -> Any:
    """The value in JSON types: tuples and sets become lists; keys and values of other types become text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((json_safe(item) for item in value), key=str)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        raise ValueError("bytes are no text")
    return str(value)
