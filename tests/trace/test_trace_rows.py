"""Recorded traces are read unchanged, or refused with the number of the invalid line."""

import gzip
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.trace.rows import LINE_MAX, BadTrace, TraceReader, TraceRow, encode

GOOD = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1], "session_id": "x"}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text(text)
    return path


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_mooncake_trace_is_read_plain_and_compressed(tmp_path: Path, newline: str) -> None:
    text = newline.join([GOOD, "", GOOD, ""])
    compressed = tmp_path / "trace.gz"
    compressed.write_bytes(gzip.compress(text.encode("utf-8-sig")))
    expected = [TraceRow(0, 1000, 5, [0, 1])] * 2
    assert list(TraceReader(written(tmp_path, text))) == list(TraceReader(compressed)) == expected


def test_an_azure_trace_counts_time_from_its_first_request(tmp_path: Path) -> None:
    lines = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    first, second = TraceReader(written(tmp_path, AZURE + lines))
    assert first == TraceRow(0.0, 374, 44, [])
    assert (second.timestamp, second.input_length) == pytest.approx((4314.579, 396), abs=0.01)
    zones = "2024-05-10 00:00:00+00:00,1,2\n2024-05-10 02:00:01+02:00,3,4\n"
    assert list(TraceReader(written(tmp_path, AZURE + zones))) == [
        TraceRow(0, 1, 2, []),
        TraceRow(1000, 3, 4, []),
    ]


BAD = {
    GOOD[:40]: "truncated",
    "not json": "malformed",
    '{"timestamp": 0, "input_length": 1}': "required field `output_length`",
    '{"timestamp": 0, "input_length": "many", "output_length": 1}': "got `str`",
    '{"timestamp": -1, "input_length": 1, "output_length": 1}': "a timestamp of -1 ms",
    '{"timestamp": 1e300, "input_length": 1, "output_length": 1}': "a timestamp of 1e+300 ms",
    '{"timestamp": NaN, "input_length": 1, "output_length": 1}': "malformed",
    '{"timestamp": 1e400, "input_length": 1, "output_length": 1}': "out of range",
    '{"timestamp": 0, "input_length": -1, "output_length": 1}': "a length cannot be below 0",
    '{"timestamp": 0, "input_length": 1, "output_length": -1}': "a length cannot be below 0",
    '{"timestamp": 0, "input_length": 99999999999, "output_length": 1}': "a length cannot be above 16777216",
    '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [99999999999999999999]}': "a hash id outside 0 to",
    '{"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [0]}': "1 hash_ids for 1000 tokens",
    '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0, 1]}': "that is 1 blocks of 512",
    '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}': "no hash_ids for 9 tokens",
    '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}': "a hash id outside 0 to",
}


@pytest.mark.parametrize(("line", "says"), BAD.items())
def test_a_bad_line_is_named_or_skipped_and_counted(line: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(BadTrace, match="line 2: ") as refused:
        list(TraceReader(path))
    assert says in str(refused.value)
    reading = TraceReader(path, skip_bad=True)
    assert len(list(reading)) == reading.rows == 2
    assert reading.skipped == 1 and reading.first_error == str(refused.value)


def test_times_must_not_decrease(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("0,", "5000,", 1) + "\n" + GOOD)
    with pytest.raises(BadTrace, match="line 2: a timestamp of 0 ms after one of 5000"):
        list(TraceReader(path))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2023-11-16 18:15:46.68", "line 2: 1 fields; a line is TIMESTAMP,"),
        ("yesterday,1,2", "line 2: Invalid isoformat string: 'yesterday'"),
        ("2023-11-16 18:15:46,many,2", "line 2: 'many' is not a number of tokens; a line is TIMESTAMP,"),
        ("2023-11-16 18:15:46,1_0,2", "line 2: '1_0' is not a number of tokens"),
        (f"2023-11-16 18:15:46,{'9' * 5000},2", "line 2: '9{40}' is not a number of tokens"),
        ("2023-11-16 18:15:46,-4,2", "line 2: lengths of -4 and 2 tokens"),
    ],
)
def test_a_bad_line_of_an_azure_trace_is_named(line: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=says):
        list(TraceReader(written(tmp_path, AZURE + line + "\n")))


@pytest.mark.parametrize(
    "header", ["TIMESTAMP,GeneratedTokens,ContextTokens", "TIMESTAMP,ContextTokens", "a,b,c"]
)
def test_columns_with_other_names_or_order_are_refused(header: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{header}\n2023-11-16 18:15:46,1000,5\n")
    with pytest.raises(BadTrace, match=f"line 1: it is neither the header {AZURE.strip()} nor a request"):
        list(TraceReader(path))
    with pytest.raises(BadTrace, match=r"holds no request: .*line 1: it is neither"):
        list(TraceReader(path, skip_bad=True))


@pytest.mark.parametrize("text", ["", "\n\n", AZURE])
def test_an_empty_trace_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="holds no request"):
        list(TraceReader(written(tmp_path, text)))


def test_a_trace_with_only_bad_lines_reports_the_first(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"holds no request: .*line 1: "):
        list(TraceReader(written(tmp_path, "a\nb\n"), skip_bad=True))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(f"{GOOD}\n".encode() * 50)
    cut, broken = tmp_path / "cut.gz", tmp_path / "broken.gz"
    cut.write_bytes(whole[:-12])
    broken.write_bytes(whole[:12] + b"\0" * 20)
    for path in (cut, broken, tmp_path, tmp_path / "none"):
        with pytest.raises(BadTrace, match=rf"{path.name} cannot be read: \w"):
            list(TraceReader(path, skip_bad=True))


def test_a_line_without_end_is_one_bad_line(tmp_path: Path) -> None:
    reading = TraceReader(written(tmp_path, f"{GOOD}\n{'x' * (LINE_MAX + 1000)}\n{GOOD}\n"), skip_bad=True)
    assert len(list(reading)) == 2 and reading.skipped == 1
    assert f"line 2: it is longer than {LINE_MAX} characters" in reading.first_error


times = st.floats(0, 1e12).map(lambda ms: round(ms, 3))
lengths = st.integers(1, 2000)


@settings(max_examples=50)
@given(times, lengths, st.integers(0, 10**6), st.booleans())
def test_written_rows_are_read_back(ms: float, tokens: int, output: int, known: bool) -> None:
    row = TraceRow(ms, tokens, output, list(range(-(-tokens // 512))) if known else [])
    with NamedTemporaryFile() as file:
        Path(file.name).write_bytes(encode(row))
        assert list(TraceReader(Path(file.name))) == [row]


lines = st.lists(
    st.one_of(st.binary(max_size=40), st.sampled_from([*map(str.encode, BAD), GOOD.encode(), AZURE.encode()]))
)


@settings(max_examples=60)
@given(lines, st.booleans())
def test_any_file_is_read_or_refused(content: list[bytes], compressed: bool) -> None:
    data = b"\n".join(content)
    with NamedTemporaryFile() as file:
        Path(file.name).write_bytes(gzip.compress(data)[: len(data)] if compressed else data)
        reading = TraceReader(Path(file.name), skip_bad=True)
        try:
            assert all(isinstance(row, TraceRow) for row in reading) and reading.rows > 0
        except BadTrace as error:
            assert str(error).startswith(file.name)
