"""The frame buffer keeps a bounded number of evenly spaced images, close to the originals."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halopose.landing.frame_buffer import FrameBuffer

BLANK = np.zeros((2, 2, 3), np.uint8)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 40))
def test_no_more_are_kept_than_a_film_shows_and_evenly(expected: int, frames: int, most: int) -> None:
    """A container may state fewer or more frames than a film has."""
    buffer = FrameBuffer(expected, most)
    for _ in range(frames):
        buffer.add(BLANK)
    kept = buffer.kept
    assert len(buffer) == frames
    assert len(kept) <= most
    assert len(set(np.diff(kept).tolist())) <= 1
    assert kept[:1] == [0][:frames]
    if expected == frames:
        assert kept == list(range(0, frames, -(-frames // most) or 1))
        assert [n for n, image in enumerate(buffer) if image.size] == kept


def test_images_come_back_as_they_were_but_for_compression() -> None:
    rng = np.random.default_rng(0)
    pictures = [cv2.GaussianBlur(rng.integers(0, 256, (48, 64, 3), np.uint8), (0, 0), 4) for _ in range(3)]
    buffer = FrameBuffer(3)
    for picture in pictures:
        buffer.add(picture)
    for own, theirs in zip(buffer, pictures, strict=True):
        assert np.abs(own.astype(int) - theirs).mean() < 1
    assert len(buffer[1:]) == 2
    with pytest.raises(IndexError):
        buffer[3]
