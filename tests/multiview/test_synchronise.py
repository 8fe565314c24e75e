"""Time offsets between films: estimated from clear motion, refused otherwise."""

import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.multiview.synchronise import estimate_offsets
from halopose.types import Array
from tests.helpers.rigs import film, rig, walk

VIEWS = rig(3)
LONG = walk(70, speed=3.0)


@pytest.mark.parametrize(
    "films",
    [
        pytest.param([np.repeat(walk(1), 25, 0)] * 3, id="nothing moves"),
        pytest.param([LONG[:30], LONG[30:60], LONG[:30]], id="farther apart"),
        pytest.param([LONG[:3]] * 3, id="too short"),
    ],
)
def test_offsets_without_clear_motion_are_refused(films: list[Array]) -> None:
    seen = [film(view, [truth], n) for n, (view, truth) in enumerate(zip(VIEWS, films, strict=True))]
    with pytest.raises(HaloposeError, match="offsets"):
        estimate_offsets(VIEWS, seen, reach=6)


def test_offsets_of_a_walk() -> None:
    shifts = (5, 3, 6)
    seen = [film(view, [LONG[n : n + 40]], n, 0.5, 2.0) for n, view in zip(shifts, VIEWS, strict=True)]
    assert estimate_offsets(VIEWS, seen, reach=4).whole.tolist() == [0, 2, -1]
