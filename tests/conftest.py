"""Settings of all tests: hypothesis draws the same examples in every run and has no deadline."""

import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# With parallel workers each process gets one thread. The variables must be set before numpy and torch are imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import pytest
from hypothesis import settings

from halopose.cli import terminal

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=30, database=None)
# Longer hunts for rare failures: HYPOTHESIS_PROFILE=hunt pytest
settings.register_profile("hunt", deadline=None, max_examples=1000, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_log = logging.getLogger("halopose")
LOG_AT_FIRST = list(_log.handlers), _log.level, _log.propagate


@pytest.fixture
def full_disk() -> Iterator[Callable[[int | None], None]]:
    """Imitate a full disk: no file may grow beyond 100 bytes. Call the fixture with another limit; None lifts it."""
    resource = pytest.importorskip("resource", reason="Windows sets no limit to the size of files")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(room: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits if room is None else (room, limits[1]))

    leave(100)
    yield leave
    leave(None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, object, object]:
    """Lift the limit of ``full_disk`` after the test, because pytest may write files before fixtures end."""
    try:
        return (yield)
    finally:
        if "full_disk" in item.funcargs:
            item.funcargs["full_disk"](None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: results are bit-identical only for the same number of threads, which ultralytics changes."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def published_base() -> Path:
    """The published YOLO11n-pose checkpoint; skips the test if it can neither be found nor fetched."""
    from halopose.errors import HaloposeError
    from halopose.hosts.model_zoo import find_base

    try:
        return find_base()
    except HaloposeError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """Seed torch, so that tensors drawn without a generator do not depend on earlier tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_log() -> None:
    """Reset the log of the library, which commands reconfigure."""
    log = logging.getLogger("halopose")
    log.handlers, log.propagate = list(LOG_AT_FIRST[0]), LOG_AT_FIRST[2]
    log.setLevel(LOG_AT_FIRST[1])
    terminal.listen.__globals__["_quiet"] = False
