"""Settings of an evaluation: invalid values are one-line errors."""

from __future__ import annotations

from typing import Any

import pytest

from halopose.errors import HaloposeError
from halopose.protocol import Protocol


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"area": "foo"}, "annotation or box, got 'foo'"),
        ({"covariance": "foo"}, "auto or moment or paper, got 'foo'"),
        ({"scalarisation": "foo"}, "determinant or eigenvalue, got 'foo'"),
        ({"threshold_rule": "foo"}, "unknown threshold rule 'foo'"),
        ({"gamma_ks": 2.0}, "from 0 to 1, got 2.0"),
        ({"gamma_ks": float("nan")}, "from 0 to 1, got nan"),
        ({"scale_edges": (96.0, 32.0)}, "in rising order"),
        ({"scale_edges": (32.0, 32.0)}, "in rising order"),
        ({"scale_edges": (-1.0, float("inf"))}, "positive areas"),
    ],
)
def test_invalid_settings_are_refused(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(HaloposeError, match=words) as error:
        Protocol(**setting)
    assert "\n" not in str(error.value)


def test_one_scale_needs_no_edges() -> None:
    assert Protocol(scale_edges=(), gamma_ks=1.0).scale_edges == ()
