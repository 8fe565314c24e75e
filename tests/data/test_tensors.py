"""Files with a checksum: equal bytes for equal content, and any flipped bit is detected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from halopose.data.tensors import check_seal, read_content, write_tensors
from halopose.errors import HaloposeError

TENSORS = {"b": torch.arange(7.0), "a": torch.ones((2, 3), dtype=torch.float16)}
CONTENT = {"name": "0" * 64, "text": '"halopose":"' + "1" * 64, "list": [1, 2.5, None]}


def test_equal_content_is_equal_bytes_and_reads_back(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tensors(tmp_path / name, dict(reversed(TENSORS.items())), CONTENT)
        check_seal(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert read_content(tmp_path / "one") == CONTENT
    assert all(torch.equal(value, TENSORS[name]) for name, value in load_file(tmp_path / "one").items())


@given(st.data())
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("sealed") / "file"
    write_tensors(path, TENSORS, CONTENT)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(HaloposeError, match="damaged"):
        check_seal(path)


def test_foreign_files_have_no_seal(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "plain")
    (tmp_path / "short").write_bytes(b"123")
    for name in ("plain", "short"):
        with pytest.raises(HaloposeError, match="no checksum"):
            check_seal(tmp_path / name)
    assert read_content(tmp_path / "plain") is None
    with pytest.raises(HaloposeError, match="cannot read"):
        check_seal(tmp_path / "missing")
