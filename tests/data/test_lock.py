"""One at a time in a folder, and a killed process holds nothing."""

from __future__ import annotations

import subprocess
import sys
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
