"""Small hostile yaml and toml files are refused quickly, and plain ones are read."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

import halopose
from halopose.data.bounded_text import MAX_BYTES, read_toml, read_yaml
from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.multiview.rig import read_calibration

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("\ufeffbase: &base {k: 1}\nmore: {<<: *base, m: [2.5, no]}\n", encoding="utf-8")
    assert read_yaml(tmp_path / "a.yaml") == {"base": {"k": 1}, "more": {"k": 1, "m": [2.5, False]}}
    (tmp_path / "a.toml").write_text('[cam.one]\nmatrix = [[1.5, 2], [3, 4]]\nname = "a.b.c"\n')
    assert read_toml(tmp_path / "a.toml") == {"cam": {"one": {"matrix": [[1.5, 2], [3, 4]], "name": "a.b.c"}}}


@pytest.mark.parametrize(
    "text",
    [
        ALIASES,
        MERGES,
        "a: &a [*a]",
        "a: " + "[" * 50_000,
        "a: " + "1" * 100_000,
        "a: " + "1:" * 200_000 + "1",
        "- 1\n" * 200_000,
        "a: " + "x" * (MAX_BYTES + 1),
        "? [a, b]\n: 1",
        "a: 2001-99-99",
        "a: !!python/object/apply:os.system [echo]",
        "a: [1",
    ],
)
def test_hostile_yaml_is_refused_quickly(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_text(text)
    begin = time.perf_counter()
    for read in (read_yaml, lambda path: load_dataset(path, "train")):
        with pytest.raises(HaloposeError, match=r"data\.yaml") as error:
            read(path)
        assert "\n" not in str(error.value)
    assert time.perf_counter() - begin < 40


@pytest.mark.parametrize("name", ["camera.yaml", "rig.yml"])
def test_camera_files_are_bounded_too(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("%YAML:1.0\n---\n" + ALIASES)
    with pytest.raises(HaloposeError, match="describes more than"):
        read_calibration(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 50_000 + "a = 1",
        '"a".' * 20_000 + "a = 1",
        "[" + "a . " * 20_000 + "a]",
        "x = {" + "a." * 20_000 + "a = 1}",
        "a = " + "[" * 20_000,
        "a = " + "1" * 100_000,
        "a" * 900_000,
        "a = 1\na = 2",
    ],
)
def test_hostile_toml_is_refused_quickly(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rig.toml"
    path.write_text(text)
    begin = time.perf_counter()
    for read in (read_toml, read_calibration):
        with pytest.raises(HaloposeError, match=r"rig\.toml") as error:
            read(path)
        assert "\n" not in str(error.value)
    assert time.perf_counter() - begin < 10


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without named pipes")
def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.yaml")
    with pytest.raises(HaloposeError, match="regular file"):
        read_yaml(tmp_path / "data.yaml")


def test_no_other_module_parses_yaml_or_toml() -> None:
    parsers = re.compile(r"yaml\.(safe_)?load|yaml\.(full_|unsafe_)load|tomll?i?b?\.loads?\b|tomllib\.load")
    root = Path(halopose.__file__).parent
    found = [path.name for path in root.rglob("*.py") if parsers.search(path.read_text(encoding="utf-8"))]
    assert found == ["bounded_text.py"]
