"""What a whole fit tells the user; that it fits is in tests/test_predictor.py."""

import numpy as np
import pytest

from halopose.fitting.pipeline import FEW_OBJECTS, _warn_of_few


def test_a_calibration_on_few_objects_says_so_and_what_it_would_take(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_few(np.array([FEW_OBJECTS, 200]), ("nose", "hip"), 100)
    assert not caplog.text
    _warn_of_few(np.array([10, 200]), ("nose", "hip"), 100)
    assert "calibrated on few objects: 10 of nose (1 of 2 keypoints have under 50)" in caplog.text
    assert "takes about 500 images like these" in caplog.text
    caplog.clear()
    _warn_of_few(np.array([0, 200]), ("nose", "hip"), 100)
    assert "images that show it" in caplog.text
