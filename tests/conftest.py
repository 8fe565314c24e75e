"""Settings of all tests: hypothesis draws the same examples every time, and never by the clock."""

import os
import resource
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60, database=None)
# Longer hunts for rare failures: HYPOTHESIS_PROFILE=hunt pytest
settings.register_profile("hunt", deadline=None, max_examples=1000, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """The system lets no file grow beyond a hundred bytes, as a full disk would; call it for room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(room: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))

    leave(100)
    yield leave
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Float results are equal bit by bit only under the same number of threads, which ultralytics changes."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
