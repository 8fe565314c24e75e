"""The feature-conditional scale: its basis against interpolation, its inputs against plain formulas."""

import numpy as np
import torch

from halopose.uncertainty.conditional_scale import INPUTS, KNOTS, scale_basis, scale_inputs
from tests.helpers.models import random_scale


def test_the_basis_spans_what_interpolation_between_knots_gives() -> None:
    rng = np.random.default_rng(0)
    knots = np.sort(rng.normal(size=(1, KNOTS)), axis=1)
    values = rng.normal(size=KNOTS)

    def basis(inputs: np.ndarray) -> np.ndarray:
        found = scale_basis(torch.from_numpy(inputs), torch.from_numpy(knots))[:, 0].numpy()
        return np.c_[found, np.ones(len(found))]

    weights, *_ = np.linalg.lstsq(basis(knots.T), values, rcond=None)
    inputs = rng.uniform(-4, 4, (50, 1))
    np.testing.assert_allclose(basis(inputs) @ weights, np.interp(inputs[:, 0], knots[0], values), atol=1e-12)


def test_inputs_do_not_depend_on_the_unit_of_length_but_for_the_object_size() -> None:
    rng = np.random.default_rng(1)
    corner = rng.uniform(0, 100, (5, 2))
    box = torch.from_numpy(np.c_[corner, corner + rng.uniform(5, 90, (5, 2))])
    trace, score = torch.from_numpy(rng.uniform(1, 50, (5, 3))), torch.from_numpy(rng.uniform(0, 1, 5))
    visibility = torch.from_numpy(rng.uniform(0, 1, (5, 3)))
    one, two = (scale_inputs(trace * k * k, box * k, score, visibility, visibility) for k in (1, 2))
    torch.testing.assert_close(two[..., :5], one[..., :5])
    torch.testing.assert_close(two[..., 5], one[..., 5] + np.log(2))
    assert random_scale(3).log_scale(one.float()).shape == (5, 3)
    assert one.shape == (5, 3, len(INPUTS))
