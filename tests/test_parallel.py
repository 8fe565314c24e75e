"""Parallel tasks: results in order for any number of threads, and the number of threads is restored."""

from functools import partial
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch

from halopose import parallel as module
from halopose.parallel import blocks, run_parallel, single_threaded, stack_columns


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_are_in_order_and_thread_count_is_restored(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = run_parallel([partial(lambda n: (n, torch.get_num_threads()), number) for number in range(7)])
        assert [number for number, _ in found] == list(range(7))
        assert {own for _, own in found} == {1}
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_single_threaded_limits_torch_but_not_parallel_tasks(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with single_threaded():
            assert torch.get_num_threads() == 1
            with single_threaded():  # as a calibration inside an evaluation
                meet = Barrier(threads)
                assert len(run_parallel([partial(meet.wait, 10)] * threads)) == threads
            found = run_parallel([torch.get_num_threads] * 3)
            assert found == [1, 1, 1]
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [0, 1, 5])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_error_in_a_task_is_raised(threads: int, wrong: int) -> None:
    def task(number: int) -> None:
        if number == wrong:
            raise IndexError("wrong")

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(IndexError, match="wrong"):
            run_parallel([partial(task, number) for number in range(6)])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_nested_tasks_run_sequentially() -> None:
    threads: set[int] = set()

    def inner() -> None:
        threads.add(get_ident())

    def outer(meet: Barrier) -> int:
        meet.wait(10)  # both outer tasks run at the same time
        threads.clear()
        run_parallel([inner] * 5)
        return get_ident()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = run_parallel([partial(outer, Barrier(2))] * 2)
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 2
    assert threads <= set(found)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 20])
def test_blocks_cover_every_row_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    found = list(blocks(count))
    assert [row for rows in found for row in range(rows.start, rows.stop)] == list(range(count))
    assert all(rows.stop - rows.start <= 7 for rows in found)
    assert len(found) == max(1, -(-count // 7))


def test_stack_columns_concatenates_parts() -> None:
    """Parts may have different lengths, or none."""
    values = np.random.default_rng(0).normal(size=(9, 2))
    parts = [{"a": values[rows], "b": np.arange(9)[rows]} for rows in (slice(0, 4), slice(4, 4), slice(4, 9))]
    found = stack_columns(iter(parts), 9)
    np.testing.assert_array_equal(found["a"], values)
    np.testing.assert_array_equal(found["b"], np.arange(9))
    assert found["b"].dtype == np.arange(9).dtype
