"""Results survive any interruption of a run, and the next run resumes."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from halopose.data.storage.prediction_log import PredictionLog
from halopose.errors import HaloposeError


def entries(number: int) -> list[dict[str, int]]:
    return [{"image_id": number, "n": n} for n in range(number)]


def read(folder: Path) -> list[dict[str, int]]:
    content: list[dict[str, int]] = json.loads((folder / "predictions.json").read_text())
    return content


def test_a_whole_run_leaves_one_file(tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, {"conf": 0.25})
    for number in range(4):
        log.add(f"{number}.jpg", entries(number))
        log.done(f"{number}.jpg")
    assert log.close(complete=True) == 4
    assert read(tmp_path) == [entry for number in range(4) for entry in entries(number)]
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.json"]


def test_a_run_without_results_is_an_empty_list(tmp_path: Path) -> None:
    PredictionLog(tmp_path, None).close(complete=True)
    assert read(tmp_path) == []


@pytest.mark.parametrize("cut", [0, 7])
def test_interrupted_run_resumes(tmp_path: Path, cut: int) -> None:
    """Killed in the middle of a line or of a film: what was done is kept, what was not is done again."""
    log = PredictionLog(tmp_path, "settings")
    log.add("a.jpg", entries(2))
    log.done("a.jpg")
    log.add("film.mp4", entries(3))  # a frame, and then the end
    partial = tmp_path / ".predictions.jsonl"
    if cut:
        partial.write_bytes(partial.read_bytes()[:-cut])
    again = PredictionLog(tmp_path, "settings")
    assert again.finished == {"a.jpg"}
    again.add("film.mp4", entries(1))
    again.done("film.mp4")
    assert again.close(complete=True) == 2
    assert read(tmp_path) == entries(2) + entries(1)


def test_other_settings_start_anew(tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, {"conf": 0.25})
    log.add("a.jpg", entries(2))
    log.done("a.jpg")
    log.close(complete=False)
    assert PredictionLog(tmp_path, {"conf": 0.25}).finished == {"a.jpg"}
    assert PredictionLog(tmp_path, {"conf": 0.5}).finished == set()


@pytest.mark.parametrize("content", ["", "{", "[]\n", '{"key": 3}\n', "\0" * 100])
def test_a_damaged_log_starts_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / ".predictions.jsonl").write_text(content)
    assert PredictionLog(tmp_path, None).finished == set()


def test_a_folder_where_the_log_belongs_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / ".predictions.jsonl").mkdir()
    with pytest.raises(HaloposeError, match=r"predictions\.jsonl"):
        PredictionLog(tmp_path, None)


def test_a_folder_that_is_none_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="cannot write"):
        PredictionLog(tmp_path / "missing", None)


@pytest.mark.parametrize("place", range(0, 150, 7))
def test_a_flipped_bit_drops_the_later_records(tmp_path: Path, place: int) -> None:
    """Nothing wrong is ever taken over: images whose lines are damaged are predicted again."""
    log = PredictionLog(tmp_path, "settings")
    for number in (1, 2):
        log.add(f"{number}.jpg", entries(number))
        log.done(f"{number}.jpg")
    content = bytearray((tmp_path / ".predictions.jsonl").read_bytes())
    content[place] ^= 4
    (tmp_path / ".predictions.jsonl").write_bytes(content)
    again = PredictionLog(tmp_path, "settings")
    assert again.finished <= {"1.jpg"}
    again.close(complete=False)
    assert read(tmp_path) == (entries(1) if again.finished else [])


@pytest.mark.parametrize(
    "line", [[], 3, None, {}, {"done": 3}, {"source": "1.jpg"}, {"source": "1.jpg", "entries": [3]}, {"entries": []}]
)
def test_a_line_with_a_valid_checksum_and_wrong_content_is_dropped(line: object, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, "settings")
    log.add("1.jpg", entries(1))
    log.done("1.jpg")
    body = json.dumps(line).encode()
    with (tmp_path / ".predictions.jsonl").open("ab") as file:
        file.write(b"%08x " % zlib.crc32(body) + body + b"\n")
    again = PredictionLog(tmp_path, "settings")
    assert again.finished == {"1.jpg"}
    again.close(complete=True)
    assert read(tmp_path) == entries(1)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="a system without links")
@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("name", [".predictions.jsonl", ".predictions.kept", "predictions.writing", "predictions.json"])
def test_planted_links_are_not_followed(name: str, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "precious.txt"
    target.write_text("kept")
    folder = tmp_path / "work"
    folder.mkdir()
    getattr(folder / name, kind)(target)
    for _ in range(2):
        log = PredictionLog(folder, "settings")
        log.add("1.jpg", entries(1))
        log.done("1.jpg")
        log.close(complete=False)
    assert target.read_text() == "kept"
