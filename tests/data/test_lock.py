"""One process per folder, and a killed process leaves no lock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halopose.data.lock import locked
from halopose.errors import HaloposeError

HOLD = """
import sys, time
from halopose.data.lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"held"
        with pytest.raises(HaloposeError, match=f"process {process.pid} works in"), locked(tmp_path / "work"):
            pass
        process.kill()
    with locked(tmp_path / "work") as folder:
        assert folder == tmp_path / "work"
    with locked(tmp_path / "work"):
        pass


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HaloposeError, match="cannot write to"), locked(tmp_path / "file"):
        pass


def test_a_full_disk_locks_without_a_name(tmp_path: Path, full_disk: Callable[[int | None], None]) -> None:
    full_disk(0)
    with locked(tmp_path / "work"):
        assert (tmp_path / "work" / ".halopose-lock").read_text() == ""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without links and named pipes")
@pytest.mark.parametrize("plant", ["symlink", "hardlink", "pipe"])
def test_a_planted_lock_file_is_refused(plant: str, tmp_path: Path) -> None:
    target = tmp_path / "precious.txt"
    target.write_text("kept")
    (tmp_path / "work").mkdir()
    name = tmp_path / "work" / ".halopose-lock"
    if plant == "symlink":
        name.symlink_to(target)
    elif plant == "hardlink":
        name.hardlink_to(target)
    else:
        os.mkfifo(name)
    with pytest.raises(HaloposeError, match=r"halopose-lock: .*(link|seekable)"), locked(tmp_path / "work"):
        pass
    assert target.read_text() == "kept"
