"""Two processes under a real torchrun score exactly what one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import base, run
from tests.helpers.models import ROOT, host_of, write_scenes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun needs libuv there")
def test_evaluate_of_two_ranks_is_that_of_one(work: Path, tmp_path: Path) -> None:
    """Forty images are two shards, one for each; rounding depends on threads, so both have one."""
    data = write_scenes(tmp_path / "data", host_of("11"), {"val": 40})
    words = ["evaluate", data, *base(work), "--artifact", work / "a.safetensors", "--overlap", "allow",
             "--bootstrap", 3, "--pictures", 0, "--workers", 1]  # fmt: skip
    run(*words, "-o", tmp_path / "one")
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT / "models" / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "halopose",
         *map(str, words), "-o", str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = ((tmp_path / name / "metrics.json").read_text() for name in ("one", "two"))
    assert json.loads(one) == json.loads(two)
    stores = [sorted((tmp_path / name / "store").iterdir()) for name in ("one", "two")]
    assert [path.name for path in stores[0]] == [path.name for path in stores[1]]
    assert len(stores[0]) == 3
    assert all(mine.read_bytes() == theirs.read_bytes() for mine, theirs in zip(*stores, strict=True))
