"""Pieces side by side: all of them, in order, whatever the number of threads, which stays as it was."""

from functools import partial

import pytest
import torch

from halopose.evaluation.side_by_side import side_by_side


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_order_and_threads_stay(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = side_by_side([partial(lambda n: (n, torch.get_num_threads()), number) for number in range(7)])
        assert [number for number, _ in found] == list(range(7))
        assert {own for _, own in found} == {1}
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_mistake_in_one_is_raised() -> None:
    def wrong() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        side_by_side([wrong, wrong])
