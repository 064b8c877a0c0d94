"""CSV text becomes columns, by pyarrow: the file's style (delimiter, header, names, types), and the parsing itself."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from oars.data.errors import DataError
from oars.data.reader import File

DELIMITERS = ",\t;|"
_HEAD, _LONGEST_HEAD = 1 << 16, 1 << 26
_BLOCK = 1 << 18  # what pyarrow parses at a time: more does not fit the caches, and takes twice as long
MISSING = ["", "#N/A", "N/A", "n/a", "NA", "NULL", "null", "NaN", "nan", "-NaN", "-nan"]  # in columns of numbers


@dataclass
class Style:
    """How a file is written. ``first`` is where its rows begin, ``types`` what the user says of columns."""

    delimiter: str
    names: list[str]
    first: int
    types: dict[str, np.dtype] = field(default_factory=dict)


class Parsed(NamedTuple):
    """A table with the rows left out for their number of fields, or None and what is wrong."""

    table: Any
    unfit: list[tuple[int, str]]
    trouble: str


def style_of(file: File, delimiter: str | None, header: bool | None, types: dict[Any, Any]) -> Style:
    """Find out how ``file`` is written; what is given is not guessed."""
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\n\r' or not delimiter.isascii()):
        raise ValueError(f"delimiter={delimiter!r} is no single character that can part fields")
    size = _HEAD
    raw = file.read(0, min(size, file.size))
    while raw.count(b"\n") < 2 and size < min(file.size, _LONGEST_HEAD):  # thousands of columns
        size *= 4
        raw = file.read(0, min(size, file.size))
    bom = 3 if raw.startswith(b"\xef\xbb\xbf") else 0
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{file.path}, byte 0: this is UTF-16; save it as UTF-8 (iconv -f utf-16 -t utf-8)")
    text = raw[bom:].decode("utf-8", "replace")
    if "\n" not in text and "\r" in text and len(raw) == file.size:
        raise DataError(f"{file.path}: lines end with carriage returns alone; convert them to line feeds")
    if len(raw) < file.size and "\n" in text:
        text = text[: text.rindex("\n") + 1]
    delimiter = delimiter or _delimiter(text, file.path)
    sample = _records(text, delimiter)
    if not sample:
        return Style(delimiter, [], file.size, {})
    if header is None:
        header = any(sample[0]) and not any(map(is_number, sample[0]))
    names = _names(sample[0]) if header else [f"column{at}" for at in range(len(sample[0]))]
    first = bom + (_first_line(raw[bom:], delimiter) if header else 0)
    return Style(delimiter, names, first, _types(types, names, file.path))


def _delimiter(text: str, path: str) -> str:
    """The one that cuts the first rows into the same number of fields, the more the better."""
    best, most = "\t" if path.lower().endswith((".tsv", ".tab")) else ",", 1
    for candidate in DELIMITERS:
        widths = Counter(len(record) for record in _records(text, candidate)[:100])
        width, times = widths.most_common(1)[0] if widths else (0, 0)
        if width > most and times * 10 >= sum(widths.values()) * 9:
            best, most = candidate, width
    return best


def _records(text: str, delimiter: str) -> list[list[str]]:
    old = csv.field_size_limit(1 << 20)
    try:
        return [record for record in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if record]
    except csv.Error:  # a field that is too long
        return [line.split(delimiter) for line in text.splitlines() if line]
    finally:
        csv.field_size_limit(old)


def _first_line(raw: bytes, delimiter: str) -> int:
    """The number of bytes up to the end of the first record, blank lines before it included."""
    at, inside = 0, False
    while at < len(raw):
        byte = raw[at : at + 1]
        at += 1
        if byte == b'"':
            inside = not inside
        elif byte == b"\n" and not inside and raw[:at].strip(b"\r\n"):
            return at
    return len(raw)


def is_number(text: str) -> bool:
    """Whether a field reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names(record: list[str]) -> list[str]:
    names: list[str] = []
    for at, name in enumerate(record):
        name = name.strip() or f"column{at}"
        tries, given = 2, name
        while name in names:
            name, tries = f"{given}_{tries}", tries + 1
        names.append(name)
    return names


def _types(types: dict[Any, Any], names: list[str], path: str) -> dict[str, np.dtype]:
    named = {}
    for key, given in types.items():
        name = names[key] if isinstance(key, int) and -len(names) <= key < len(names) else key
        if name not in names:
            raise ValueError(f"types: {path} has no column {key!r}; it has {', '.join(names)}")
        named[name] = np.dtype(object) if given in (str, "text") else np.dtype(given)
    return named


def kind_of(arrow_type: Any) -> str:
    """A column's kind: int, float, bool, text, or empty."""
    import pyarrow.types as t

    if t.is_null(arrow_type):
        return "empty"
    if t.is_boolean(arrow_type):
        return "bool"
    if t.is_integer(arrow_type):
        return "int"
    return "float" if t.is_floating(arrow_type) else "text"


def arrow_type(kind: str | np.dtype) -> Any:
    """What pyarrow is to make of a column of this kind, or of the type that the user gave."""
    import pyarrow as pa

    if isinstance(kind, np.dtype):
        return pa.string() if kind.hasobject else pa.from_numpy_dtype(kind)
    return {"int": pa.int64(), "float": pa.float64(), "empty": pa.float64(), "text": pa.string()}.get(kind, pa.bool_())


def options(style: Style, types: dict[str, Any], names: list[str], missing: list[str]) -> tuple[Any, Any]:
    """How pyarrow is to parse and convert; ``names``: only these columns, empty: all."""
    from pyarrow import csv as arrow_csv

    return (
        arrow_csv.ParseOptions(delimiter=style.delimiter, newlines_in_values=True),
        arrow_csv.ConvertOptions(column_types=types, include_columns=names, null_values=missing),
    )


def parse(data: Any, names: list[str], how: tuple[Any, Any], rows: int, longest: int, threads: bool = False) -> Parsed:
    """Some whole rows, none above ``longest`` bytes, as a table."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    unfit: list[tuple[int, str]] = []

    def handler(row: Any) -> str:
        fields = f"wrong number of fields: {row.actual_columns}, not {row.expected_columns}"
        unfit.append((row.number - 1 if row.number is not None else -1, fields))
        return "skip"

    parsing, converting = how
    parsing.invalid_row_handler = handler
    block = max(_BLOCK, 2 * longest + 2)
    reading = arrow_csv.ReadOptions(use_threads=threads, column_names=names, block_size=block)
    try:
        table = arrow_csv.read_csv(pa.BufferReader(data), reading, parsing, converting)
    except (pa.ArrowException, ValueError) as error:
        return Parsed(None, [], _reason(str(error)))
    if len(table) + len(unfit) != rows:
        return Parsed(None, [], "a carriage return or a quote in the middle of a field breaks the row")
    return Parsed(table, unfit, "")


def check(found: Parsed, style: Style) -> Parsed:
    """The same, or what is wrong with values that pyarrow takes."""
    import pyarrow as pa

    if found.table is None:
        return found
    if any(pa.types.is_binary(column.type) for column in found.table.columns):
        return Parsed(None, [], "not UTF-8")
    for name, kind in style.types.items():
        if kind.kind in "iub" and found.table[name].null_count:
            return Parsed(None, [], f"no value in column {name}, which cannot hold a missing one as {kind}")
    return found


def _reason(message: str) -> str:
    message = message.splitlines()[0]
    if "invalid UTF8" in message or "UTF-8" in message:
        return "not UTF-8"
    return (
        message.split("CSV conversion error ")[-1].removeprefix("to ").strip() if "conversion" in message else message
    )


def to_numpy(column: Any, kind: str | np.dtype) -> np.ndarray:
    """A parsed column: missing numbers are NaN, missing texts are empty."""
    import pyarrow as pa

    if kind == "bool or missing":
        column = column.cast(pa.int8())
    values = column.to_numpy()
    if kind == "text" or (isinstance(kind, np.dtype) and kind.hasobject):
        return values if values.dtype == object else values.astype(object)
    if not isinstance(kind, np.dtype):
        kind = np.dtype({"int": np.int64, "bool": np.bool_}.get(kind, np.float64))
    return values.astype(kind, copy=False)
