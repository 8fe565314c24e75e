"""Freed memory is used again: a large array that follows another one of its size costs no fresh pages."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from halopose.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [np.ones(200_000) for _ in range(4)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own ways")
def test_arrays_are_made_of_what_others_left() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = (int(word) for word in done.stdout.split())
    assert after < before / 10
