"""The readers of `weft embed`: good records, bad records, and files that are broken in any way."""

import io
import json
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.jobs.texts.readers import FORMATS, BadRecord, TextRecord, format_of, read

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def records(data, kind, *, column="text", **options):
    return list(read(io.BytesIO(data), kind=kind, column=column, **options))


def good(found):
    return [(r.line, r.text) for r in found if isinstance(r, TextRecord)]


def bad(found):
    return [r.line for r in found if isinstance(r, BadRecord)]


def test_txt():
    found = records("one\r\n\nthrée".encode(), "txt")
    assert good(found) == [(1, "one"), (2, ""), (3, "thrée")]
    assert [r.bytes_read for r in found] == [5, 6, 12]


def test_bad_bytes_are_one_bad_line():
    found = records(b"ok\n\xff\xfe\nok", "txt")
    assert good(found) == [(1, "ok"), (3, "ok")]
    assert found[1].reason == "not UTF-8: byte 1 of the line is 0xff"


def test_long_lines_are_skipped_without_holding_them():
    found = records(b"short\n" + b"x" * 10_000 + b"\nshort", "txt", max_line_bytes=100)
    assert good(found) == [(1, "short"), (3, "short")]
    assert found[1] == BadRecord(2, "the line is too long")
    assert found[2].bytes_read == 6 + 10_001 + 5
    edge = records(b"x" * 100 + b"\n" + b"y" * 101, "txt", max_line_bytes=100)
    assert good(edge) == [(1, "x" * 100)]
    assert bad(edge) == [2]


def test_byte_order_mark_is_no_text():
    assert good(records(b"\xef\xbb\xbfone\n", "txt")) == [(1, "one")]


def test_jsonl():
    data = b'{"text": "a"}\n\n{"id": 1}\n"bare"\n{"text": 5}\n{"text"\n{"text": "\\ud800"}\n{"text": "b", "id": 2}\n'
    found = records(data, "jsonl")
    assert good(found) == [(1, "a"), (4, "bare"), (8, "b")]
    assert {r.line: r.reason for r in found if isinstance(r, BadRecord)} == {
        3: "no key 'text'; there are 'id'",
        5: "the text is int, not a string",
        6: "not JSON: Expecting ':' delimiter: line 1 column 8 (char 7)",
        7: "the text holds half of a surrogate pair",
    }


def test_csv():
    data = 'id,text\n1,plain\n2,"two\nlines"\n3\n\n4,"quo""ted"\n5,é\n'.encode()
    found = records(data, "csv")
    assert good(found) == [(2, "plain"), (3, "two\nlines"), (7, 'quo"ted'), (8, "é")]
    assert found[2] == BadRecord(5, "1 fields, expected 2 as in the header")


def test_csv_with_broken_bytes_and_quotes():
    found = records(b'text\nok\n\xff\nok\n"unclosed\nto the end', "csv")
    assert good(found) == [(2, "ok"), (4, "ok")]
    assert bad(found) == [3, 5]


def test_parquet():
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", None, "b"], "id": [1, 2, 3]}), sink)
    found = records(sink.getvalue(), "parquet")
    assert good(found) == [(1, "a"), (3, "b")]
    assert found[1] == BadRecord(2, "the text is NoneType, not a string")


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"id\n1\n", "csv", r"no column 'text'; there are 'id'"),
        (b"not parquet", "parquet", r"not a Parquet file"),
        (b"x", "pdf", r"expected one of txt, jsonl, csv, parquet"),
    ],
)
def test_hopeless_inputs_are_errors(data, kind, message):
    with pytest.raises(ValueError, match=message):
        records(data, kind)


def test_missing_parquet_column():
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": [1]}), sink)
    with pytest.raises(ValueError, match=r"no column 'text'; there are 'id'"):
        records(sink.getvalue(), "parquet")


def test_format_of(tmp_path):
    assert [format_of(tmp_path / f"a.{e}") for e in ("TXT", "ndjson", "csv", "parquet")] == list(FORMATS)
    with pytest.raises(ValueError, match="expected a name that ends in"):
        format_of(tmp_path / "a.xlsx")


@given(data=st.binary(max_size=400), kind=st.sampled_from(["txt", "jsonl", "csv"]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_end_in_records_or_one_clear_error(data, kind):
    try:
        found = records(data, kind, max_line_bytes=64)
    except ValueError as error:
        if not re.search(r"no column 'text'|header of the input cannot be read|not closed within 64", str(error)):
            raise
        return
    lines = [r.line for r in found]
    assert lines == sorted(lines)
    for record in found:
        assert isinstance(record, BadRecord) or record.text.encode().decode() == record.text


@given(texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=30), max_size=8))
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read(texts):
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    assert [t for _, t in good(records(lines, "jsonl"))] == texts
    quoted = "".join('"' + t.replace('"', '""') + '"\n' for t in ["text", *texts]).encode()
    assert [t for _, t in good(records(quoted, "csv"))] == texts


@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=4))
@settings(max_examples=100, deadline=None)
def test_broken_parquet_is_an_error_or_read(cut, flips):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(50)]}), sink)
    data = bytearray(sink.getvalue())
    for at, change in flips:
        data[at % len(data)] ^= change
    try:
        found = records(bytes(data[: len(data) - cut]), "parquet")
    except ValueError as error:
        if not re.search("Parquet|column", str(error)):
            raise
        return
    assert cut == 0  # what is cut has no table of contents
    assert [r.line for r in found] == list(range(1, len(found) + 1))
    if not flips:
        assert good(found) == [(i + 1, f"text {i}") for i in range(50)]


def test_a_column_whose_name_is_not_text():
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"]}), sink, store_schema=False)
    with pytest.raises(ValueError, match="not a Parquet file"):
        records(sink.getvalue().replace(b"text", b"te\xf4t"), "parquet")


# ---- what must not become another text -------------------------------------------------------------------------------


def test_the_ends_of_lines_inside_of_a_text_stay():
    assert good(records(b'text\r\n"two\r\nlines"\r\nplain\r\n', "csv")) == [(2, "two\r\nlines"), (4, "plain")]
    assert good(records(b"one\r\r\ntwo\r", "txt")) == [(1, "one\r"), (2, "two")]


def test_a_bad_line_makes_its_whole_record_bad():
    """And not a record with a hole in it, or one that begins in the middle of another."""
    found = records(b'text\n"one\n\xff\nthree"\nok\n', "csv")
    assert good(found) == [(5, "ok")]
    assert bad(found) == [2]
    found = records(b'text,id\n\xff"a,1\n"\xff\nmore",2\nok,3\n', "csv")
    assert good(found) == [(5, "ok")]
    assert bad(found) == [2, 3]
    long = b"x" * 200
    for line in (b'"one\n' + long + b'\nthree"\n', b'"one\n' + long + b'"\n', long + b"\n", b'"' + long + b'"\n'):
        found = records(b"text\n" + line + b"ok\n", "csv", max_line_bytes=100)
        assert [t for _, t in good(found)] == ["ok"]
        assert bad(found) == [2]


def test_a_header_that_cannot_be_read_is_not_skipped():
    with pytest.raises(ValueError, match=r"header of the input cannot be read: not UTF-8"):
        records(b"\xff,text\ntext,id\na,b\n", "csv")


def test_long_texts_of_csv():
    long = "x" * 200_000
    assert good(records(f"text\n{long}\nb\n".encode(), "csv")) == [(2, long), (3, "b")]
    many = "\n".join(["y" * 1000] * 200)
    assert good(records(f'text\n"{many}"\nb\n'.encode(), "csv")) == [(2, many), (202, "b")]
    with pytest.raises(ValueError, match=r"quote is opened on line 3 .* not closed within 50"):
        records(b'text\na\n"' + b"z" * 40 + b"\n" + b"z" * 40 + b"\nb\n", "csv", max_line_bytes=50)


def test_how_far_a_broken_record_goes():
    (first, rest) = records(b'text\na\n"b\nc\nd\n', "csv")
    assert first.text == "a"
    assert rest == BadRecord(3, "no CSV: unexpected end of data, on lines 3 to 5")


def test_columns_of_the_same_name_are_refused():
    with pytest.raises(ValueError, match=r"2 columns 'text'"):
        records(b"text,text\na,b\n", "csv")
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), sink)
    with pytest.raises(ValueError, match=r"2 columns 'text'"):
        records(sink.getvalue(), "parquet")


@pytest.mark.parametrize(
    "column",
    [pa.array(["a", "b"], pa.large_string()), pa.array(["a", "b"]).dictionary_encode(),
     pa.chunked_array([["a"], ["b"]])],
)  # fmt: skip
def test_columns_of_parquet(column):
    sink = io.BytesIO()
    pq.write_table(pa.table({"other": [1, 2], "a.text": column}), sink)
    assert good(records(sink.getvalue(), "parquet", column="a.text")) == [(1, "a"), (2, "b")]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [{"text": "x"}], "id": [1]}), sink)
    assert bad(records(sink.getvalue(), "parquet")) == [1]


def test_parquet_from_a_pipe_is_refused_by_name():
    read_end, write_end = os.pipe()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe, pytest.raises(ValueError, match=r"cannot be read from a pipe"):
        list(read(pipe, kind="parquet", column="text"))


def test_odd_characters():
    texts = ["nul\0byte", "\u2028", "\x0b\x0c\x1c", "\ufeff", "e\u0301", "\U0001f600", "tab\t"]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    assert [t for _, t in good(records(lines, "jsonl"))] == texts
    assert [t for _, t in good(records("\n".join(["x", *texts]).encode(), "txt"))] == ["x", *texts]
