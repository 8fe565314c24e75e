"""Output files: complete or absent, and one-line errors."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from halopose.data.files import (
    check_regular,
    check_target,
    in_bytes,
    make_folder,
    make_room,
    read_json,
    remove_partial,
    write_json,
)
from halopose.data.storage.address import Address
from halopose.errors import HaloposeError


def test_json_holds_arrays_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    content = {"a": np.array([1.5, np.nan]), 2: (np.int64(3), np.float32(0.5), math.inf), "b": None, "c": True}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json") == {"a": [1.5, None], "2": [3, 0.5, None], "b": None, "c": True}


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"  \n", "empty"), (b'[{"image_id": 1', "not complete"), (b"\xff\xfe\x00", "UTF-8")],
)
def test_broken_files_are_one_line_errors(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(HaloposeError, match=words):
        read_json(path)


def test_writing_where_nothing_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HaloposeError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", "small")
    with pytest.raises(HaloposeError, match=r"cannot write .*x\.json"):
        write_json(tmp_path / "x.json", "large" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert read_json(tmp_path / "x.json") == "small"


def test_a_folder_is_made_or_refused_in_one_line(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "new" / "folder").is_dir()
    assert make_folder(tmp_path / "new" / "folder") == make_room(tmp_path / "new" / "folder" / "file").parent
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(HaloposeError, match="cannot write to"):
            make_folder(path)
    with pytest.raises(HaloposeError, match="cannot write to"):
        make_room(tmp_path / "file" / "x")
    with pytest.raises(HaloposeError, match="it is a folder"):
        make_room(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(HaloposeError, match="Permission denied"):
        make_folder(tmp_path)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "x.json") == {"a": 1}


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\udcff"])
def test_names_that_no_file_has_are_one_line_errors(name: str, tmp_path: Path) -> None:
    for read in (read_json, check_regular):
        with pytest.raises(HaloposeError, match="cannot read") as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(HaloposeError, match="regular file"):
        check_regular(tmp_path / "pipe")
    with pytest.raises(HaloposeError, match="it is a folder"):
        check_regular(tmp_path)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3.5 * 2**20, "3.5 MiB"), (2**45, "32.0 TiB")],
)
def test_sizes_have_a_unit_that_shows_them(count: float, words: str) -> None:
    assert in_bytes(count) == words


def test_partial_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in (".a.jpg.0a_9zzzz", ".b.jpg.0a_9zzzz", ".a.jpg.short", "a.jpg"):
        (tmp_path / name).touch()
    remove_partial([tmp_path / "a.jpg", tmp_path / "missing" / "c.jpg"])
    assert {path.name for path in tmp_path.iterdir()} == {".b.jpg.0a_9zzzz", ".a.jpg.short", "a.jpg"}


def test_outputs_that_end_with_the_process_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="when the command ends"):
        check_target(Path("memory://out/a.json"))
    assert check_target("s3://bucket/a.json") == Address("s3://bucket/a.json")
    assert check_target(tmp_path / "new" / "a.json").parent == tmp_path / "new"


@pytest.mark.parametrize("address", ["s3://bucket/out", "memory://out", "gs://bucket", "file:///tmp/out"])
def test_folders_at_addresses_are_refused(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for make in (make_folder, make_room):
        with pytest.raises(HaloposeError, match="on this machine"):
            make(Path(f"{address}/x"))
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_json_from_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.json")
    with pytest.raises(HaloposeError, match="regular file"):
        read_json(tmp_path / "p.json")
