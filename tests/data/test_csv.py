"""CSV: whatever a file looks like, row i is row i, types are the whole file's, and bad rows are told by number."""

from __future__ import annotations

import csv
import io
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oars.data
from oars.data import cache, csv_index
from oars.data.errors import DataError


def write(folder, text, name="a.csv"):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def rows_of(path, **options):
    data = oars.data.open(path, **options)
    return [list(sample.values()) if isinstance(sample, dict) else sample for sample in data]


TEXTS = st.text(st.sampled_from('ab1.,;"\n\r\t é漢🙂-'), max_size=6)


@settings(max_examples=150, deadline=None)
@given(table=st.lists(st.lists(TEXTS, min_size=2, max_size=2), min_size=1, max_size=30), block=st.integers(1, 60),
       style=st.sampled_from([("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]))
def test_what_the_csv_module_writes_is_read_row_by_row(tmp_path_factory, table, block, style):
    """With quotes, line feeds in fields and any text, and whatever the size of the blocks that are indexed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=style[0], quoting=style[1])
    writer.writerow(["first", "second"])
    for row in table:
        writer.writerow([f"x{row[0]}", f"x{row[1]}"])
    path = write(tmp_path_factory.mktemp("t"), out.getvalue())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_index, "BLOCK", block)
        data = oars.data.open(path, header=True, delimiter=",")
        assert data.numpy()["second"].tolist() == [f"x{row[1]}" for row in table]
        assert [data[i]["first"] for i in range(len(data))] == [f"x{row[0]}" for row in table]


def test_types_are_those_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_index, "BLOCK", 64)  # later rows are in other blocks
    lines = [f"{i},{i},{i},true,,{i}" for i in range(100)]
    lines[90] = "90,90.5,x,,,"
    path = write(tmp_path, "int,float,text,flag,nothing,gap\n" + "\n".join(lines))
    data = oars.data.open(path)
    assert {name: str(kind) for name, kind in data.dtype.items()} == {
        "int": "int64", "float": "float64", "text": "object", "flag": "float64", "nothing": "float64", "gap": "float64"}
    assert data[3]["text"] == "3" and data[90]["text"] == "x" and np.isnan(data[90]["gap"]) and data[89]["flag"] == 1


@pytest.mark.parametrize("text, names, first", [
    ("1,2\n3,4\n", ["column0", "column1"], [1, 2]),
    ("a;b\n1;2\n", ["a", "b"], [1, 2]),
    ("\ufeffa|b|a|\n1|2|3|4\n", ["a", "b", "a_2", "column3"], [1, 2, 3, 4]),
    ("\n\r\na\tb\n\n1\t2\n\n\r\n", ["a", "b"], [1, 2]),
    ("value\n7\n8\n", ["value"], 7),
    ('"a\nb",c\n1,2\n', ["a\nb", "c"], [1, 2]),
])
def test_delimiter_header_and_names_are_found_out(tmp_path, text, names, first):
    data = oars.data.open(write(tmp_path, text))
    assert data.columns == names
    np.testing.assert_array_equal(data[0], first)


def test_quotes_within_fields_open_nothing(tmp_path):
    """Only a quote at a field's beginning does; counting quotes alone would join these rows."""
    path = write(tmp_path, 'size,n\n5" pipe,1\n"a\nb",2\n6" pipe,3\nx,4\n')
    assert rows_of(path) == [['5" pipe', 1], ["a\nb", 2], ['6" pipe', 3], ["x", 4]]


def test_labels_of_text_become_numbers_in_sorted_order(tmp_path):
    data = oars.data.open(write(tmp_path, "x,kind\n1,pear\n2,apple\n3,pear\n4,fig\n"), label="kind")
    assert data.classes == ["apple", "fig", "pear"] and data.numpy()[1].tolist() == [2, 0, 2, 1]


def test_a_label_is_named_or_numbered(tmp_path):
    path = write(tmp_path, "a,b,c\n1,2,3\n")
    for label in ("a", 0, -3):
        x, y = oars.data.open(path, label=label)[0]
        assert y == 1 and x.tolist() == [2, 3]
    x, y = oars.data.open(path, label=["a", "c"], dtype=np.float32)[0]
    assert x == 2 and y.tolist() == [1, 3]
    with pytest.raises(ValueError, match="column 3 of 3"):
        oars.data.open(path, label=3)


BAD = "a,b\n1,2\n3\n4,5,6\n7,8\nx,9\n\n10,11\n"


def test_a_bad_row_is_told_by_row_and_byte_before_training_begins(tmp_path):
    path = write(tmp_path, BAD)
    with pytest.raises(DataError) as error:
        oars.data.open(path)
    assert str(error.value) == (f"{path}, row 1, byte 8: wrong number of fields: 1, not 2 (and 1 more; on_bad='skip' "
                                "leaves them out)")


def test_bad_rows_are_left_out_and_counted(tmp_path):
    path = write(tmp_path, BAD)
    data = oars.data.open(path, types={"a": int}, on_bad="quarantine")
    assert data.numpy().tolist() == [[1, 2], [7, 8], [10, 11]] and data[2].tolist() == [10, 11]
    assert [(bad.row, bad.byte) for bad in data.bad] == [(1, 8), (2, 10), (4, 20)]
    assert "3 bad rows left out (2 wrong number of fields, 1 int64" in data.summary()
    listed = [json.loads(line) for line in (tmp_path / "a.csv.bad.jsonl").read_text().splitlines()]
    assert [bad["row"] for bad in listed] == [1, 2, 4] and "'x'" in listed[2]["reason"]
    assert len(oars.data.open(path, types={"a": int}, on_bad="skip")) == 3


def test_bad_rows_are_numbered_rightly_in_large_files(tmp_path):
    lines = [f"{i},{'y' * 50}" for i in range(40_000)]  # 2 MB: several of the parser's blocks
    for row in (7, 12_345, 39_999):
        lines[row] += ",more"
    data = oars.data.open(write(tmp_path, "a,b\n" + "\n".join(lines) + "\n"), on_bad="skip")
    assert [bad.row for bad in data.bad] == [7, 12_345, 39_999] and len(data) == 39_997
    found = data.values("a")
    assert found.tolist() == [i for i in range(40_000) if i not in (7, 12_345, 39_999)]
    assert data[12_344]["a"] == 12_346 and data[-1]["a"] == 39_998


@pytest.mark.parametrize("text, reason", [
    (b"a,b\n1,x\n2,\xff\xfe\n3,z\n", "row 1, byte 8: not UTF-8"),
    (b"a,b\n1,x\n2,\"never\nclosed\n", "row 1, byte 8: a quote is opened and never closed"),
    (b"a,b\n1,x\n2,y\rz,3\n", "row 1, byte 8: a carriage return"),
    (b"a,b\r1,2\r", "lines end with carriage returns alone"),
    ("a,b\n1,2\n".encode("utf-16"), "this is UTF-16"),
])
def test_text_that_is_no_csv_is_told(tmp_path, text, reason):
    with pytest.raises(DataError, match=reason):
        oars.data.open(write(tmp_path, text))


def test_thousands_of_columns(tmp_path):
    wide = 20_000
    lines = [",".join(f"column number {at}" for at in range(wide))] + [",".join([str(row)] * wide) for row in range(3)]
    data = oars.data.open(write(tmp_path, "\n".join(lines)), label=0, dtype=np.float32)
    assert data.shape == (3, wide - 1) and data[2][0].sum() == 2 * (wide - 1) and data[1][1] == 1


def test_a_row_of_many_megabytes(tmp_path):
    long = "y" * (20 << 20)
    path = write(tmp_path, f"a,b\n1,x\n2,{long}\n3,z\n")
    data = oars.data.open(path)
    assert data[1]["b"] == long and data[2]["b"] == "z"


# ---- the index ------------------------------------------------------------------------------------------------------


def test_the_index_is_built_once_and_again_when_the_file_changes(tmp_path, monkeypatch):
    built = []
    build = csv_index.build
    monkeypatch.setattr("oars.data.csv.build", lambda *args: (built.append(1), build(*args))[1])
    path = write(tmp_path, "a,b\n" + "1,2\n" * 50)
    assert len(oars.data.open(path)) == len(oars.data.open(path)) == 50 and len(built) == 1
    os.utime(path, (1, 1))
    oars.data.open(path)
    assert len(built) == 2  # another time
    stat = path.stat()
    path.write_text("a,b\n" + "7,2\n" * 50)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert oars.data.open(path)[0].tolist() == [7, 2] and len(built) == 3  # same size and time, another checksum
    assert len([f for f in cache.folder().iterdir() if not f.name.endswith(".lock")]) == 1


def test_many_that_open_at_once_build_one_index(tmp_path, monkeypatch):
    built = []
    build = csv_index.build
    monkeypatch.setattr("oars.data.csv.build", lambda *args: (built.append(1), build(*args))[1])
    path = write(tmp_path, "a,b\n" + "1,2\n" * 5000)
    threads = [threading.Thread(target=oars.data.open, args=(path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_a_file_that_changes_under_us_is_an_error(tmp_path):
    path = write(tmp_path, "a,b\n" + "1,2\n" * 50)
    data = oars.data.open(path)
    path.write_text("a,b\n" + "1,2,3\n" * 40)
    with pytest.raises(DataError, match="a.csv: has changed since it was opened"):
        data[3]


def test_an_unwritable_cache_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("OARS_CACHE", str(tmp_path / "taken" / "cache"))
    with pytest.raises(DataError, match="set OARS_CACHE to a folder with room"):
        oars.data.open(write(tmp_path, "a,b\n1,2\n"))
