"""Pieces side by side: all of them, in order, whatever the number of threads, which stays as it was."""

import sys
from collections.abc import Sequence
from functools import partial
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch

from halopose import parallel as module
from halopose.parallel import blocks, map_chunks, run_parallel, single_threaded, stack_columns


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_order_and_threads_stay(threads: int) -> None:
    before, patience = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(threads)
    try:
        found = run_parallel([partial(lambda n: (n, torch.get_num_threads()), number) for number in range(7)])
        assert [number for number, _ in found] == list(range(7))
        assert {own for _, own in found} == {1}
        assert sys.getswitchinterval() == patience
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_between_pieces_torch_has_one_thread_and_pieces_have_all(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with single_threaded():
            assert torch.get_num_threads() == 1
            with single_threaded():  # as in a calibration within an evaluation
                meet = Barrier(threads)
                assert len(run_parallel([partial(meet.wait, 10)] * threads)) == threads
            found = run_parallel([torch.get_num_threads] * 3)
            assert found == [1, 1, 1]
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("threads", "count", "runs"), [(1, 9, 1), (2, 9, 2), (3, 5, 2), (3, 1, 1)])
def test_items_are_dealt_out_in_runs(threads: int, count: int, runs: int) -> None:
    lengths = []

    def work(items: Sequence[int]) -> list[int]:
        lengths.append(len(items))
        return [10 * item for item in items]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert map_chunks(work, range(count), 2) == [10 * item for item in range(count)]
    finally:
        torch.set_num_threads(before)
    assert len(lengths) == runs
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("wrong", [0, 1, 5])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_mistake_in_one_is_raised(threads: int, wrong: int) -> None:
    def piece(number: int) -> None:
        if number == wrong:
            raise IndexError("wrong")

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(IndexError, match="wrong"):
            run_parallel([partial(piece, number) for number in range(6)])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_pieces_within_pieces_run_one_after_the_other() -> None:
    threads: set[int] = set()

    def inner() -> None:
        threads.add(get_ident())

    def outer(meet: Barrier) -> int:
        meet.wait(10)  # on two threads, of which the one that asks is one
        threads.clear()
        run_parallel([inner] * 5)
        return get_ident()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = run_parallel([partial(outer, Barrier(2))] * 2)
    finally:
        torch.set_num_threads(before)
    assert get_ident() in found
    assert len(set(found)) == 2
    assert threads <= set(found)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 20])
def test_blocks_hold_every_row_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 7)
    found = list(blocks(count))
    assert [row for rows in found for row in range(rows.start, rows.stop)] == list(range(count))
    assert all(rows.stop - rows.start <= 7 for rows in found)
    assert len(found) == max(1, -(-count // 7))


def test_parts_are_gathered_into_columns() -> None:
    """As many rows a part as it has, none among them."""
    values = np.random.default_rng(0).normal(size=(9, 2))
    parts = [{"a": values[rows], "b": np.arange(9)[rows]} for rows in (slice(0, 4), slice(4, 4), slice(4, 9))]
    found = stack_columns(iter(parts), 9)
    np.testing.assert_array_equal(found["a"], values)
    np.testing.assert_array_equal(found["b"], np.arange(9))
    assert found["b"].dtype == np.arange(9).dtype
