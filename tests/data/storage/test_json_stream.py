"""Entries of long JSON equal those of the standard library, for any chunk size."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.data.storage.json_stream import LIST, Entries

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def rebuilt(text: str, chunk: int) -> Any:
    """The value of a text from its entries."""
    whole: dict[str, Any] = {}
    begun: set[str] = set()
    for key, value in Entries(io.StringIO(text), chunk):
        if value is LIST:
            whole[key] = []
            begun.add(key)
        elif key in begun:
            whole[key].append(value)
        else:
            whole[key] = value
    return whole[""] if text.startswith("[") else whole


@given(
    st.dictionaries(st.text(min_size=1, max_size=4), VALUES, min_size=1, max_size=4) | st.lists(VALUES, max_size=5),
    st.integers(1, 30),
    st.sampled_from([None, 0, 2]),
)
def test_entries_are_what_json_reads(content: Any, chunk: int, indent: int | None) -> None:
    assert rebuilt(json.dumps(content, indent=indent), chunk) == content


@given(VALUES.map(lambda value: {"images": [value], "rest": value}), st.data())
def test_text_that_is_cut_is_refused(content: Any, data: st.DataObject) -> None:
    text = json.dumps(content)
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    with pytest.raises(json.JSONDecodeError):
        list(Entries(io.StringIO(cut), 7))


@pytest.mark.parametrize("chunk", [3, 1000])
def test_a_mistake_is_named_by_its_line(chunk: int) -> None:
    text = '{"images": [\n{"id": 1},\n{"id": 2},\n{"id" 3}\n]}'
    with pytest.raises(json.JSONDecodeError) as whole:
        json.loads(text)
    entries = Entries(io.StringIO(text), chunk)
    with pytest.raises(json.JSONDecodeError) as found:
        list(entries)
    assert entries.where(found.value) == (whole.value.lineno, whole.value.colno)


def test_only_requested_entries_are_read() -> None:
    stream = io.StringIO(json.dumps({"images": [{"id": number} for number in range(10_000)]}))
    entries = iter(Entries(stream, 100))
    assert [next(entries) for _ in range(3)] == [("images", LIST), ("images", {"id": 0}), ("images", {"id": 1})]
    assert stream.tell() < 300
