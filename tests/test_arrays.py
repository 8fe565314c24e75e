"""Each function on arrays and on tensors against what it says."""

import warnings

import numpy as np
import pytest
import torch
from scipy import special

from halopose import arrays
from halopose.types import Array

VALUES = np.random.default_rng(0).normal(size=(3, 4, 5))


@pytest.mark.parametrize("change", [np.array, torch.tensor])
def test_both_libraries_do_what_is_said(change: type) -> None:
    given = change(VALUES)

    def check(found: arrays.Values, expected: Array) -> None:
        assert isinstance(found, type(given))
        np.testing.assert_array_equal(np.asarray(found), expected)

    check(arrays.at_least(given, 0.1), np.clip(VALUES, 0.1, None))
    check(arrays.between(given, -0.2, 0.1), np.clip(VALUES, -0.2, 0.1))
    check(arrays.joined([given, given], 1), np.concatenate([VALUES, VALUES], axis=1))
    check(arrays.stacked([given, given]), np.stack([VALUES, VALUES], axis=3))
    check(arrays.zeros_like(given), np.zeros_like(VALUES))
    check(arrays.turned(given), np.swapaxes(VALUES, 1, 2))
    check(arrays.turned(given, 0), np.swapaxes(VALUES, 0, 1))
    check(arrays.repeated(given[:, 0], 7), np.repeat(VALUES[:, :1], 7, axis=1))
    check(arrays.alike(torch.tensor(VALUES), given), VALUES)
    check(arrays.of_kind(VALUES, given), VALUES)
    check(arrays.converted(given > 0, "float32"), (VALUES > 0).astype(np.float32))
    np.testing.assert_array_equal(arrays.as_array(given), VALUES)
    assert arrays.library_of(given).exp(given).shape == VALUES.shape


@pytest.mark.parametrize("change", [np.array, torch.tensor])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_largest_and_where_they_are(change: type, count: int) -> None:
    best, place = arrays.largest(change(VALUES), count)
    assert best.shape == place.shape == (3, 4, count)
    np.testing.assert_array_equal(np.take_along_axis(VALUES, np.asarray(place), axis=2), best)
    np.testing.assert_array_equal(np.sort(np.asarray(best)), np.sort(VALUES)[..., -count:])


@pytest.mark.parametrize("change", [np.array, torch.tensor])
@pytest.mark.parametrize("values", [VALUES, VALUES[..., None].repeat(2, axis=3)])
def test_rows_are_taken_from_their_own_image(change: type, values: Array) -> None:
    place = np.array([[0, 3], [2, 2], [1, 0]])
    found = arrays.take(change(values), change(place))
    np.testing.assert_array_equal(found, np.stack([rows[index] for rows, index in zip(values, place, strict=True)]))


@pytest.mark.parametrize("array", [VALUES, VALUES.T])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_repeated_view_is_numpys_own(array: Array, count: int) -> None:
    found = arrays.repeated_view(array, count)
    np.testing.assert_array_equal(found, np.broadcast_to(array, (count, *array.shape)))
    assert not found.flags.writeable


@pytest.mark.parametrize("change", [np.array, torch.tensor])
def test_a_layer_and_its_activation(change: type) -> None:
    weight, bias = VALUES[0], VALUES[1, :, 0]
    found = arrays.linear(change(VALUES), change(weight), change(bias))
    np.testing.assert_allclose(found, np.einsum("nka,ba->nkb", VALUES, weight) + bias, atol=1e-12)
    np.testing.assert_allclose(
        arrays.linear(change(VALUES), change(weight)), np.einsum("nka,ba->nkb", VALUES, weight), atol=1e-12
    )
    values = np.concatenate([np.linspace(-30, 30, 1001), [-1e30, -200, 200, 1e30]]).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it never overflows
        found = arrays.silu(change(values))
    np.testing.assert_allclose(found, values * special.expit(values), rtol=1e-6, atol=2e-6)
    assert np.asarray(found).dtype == np.float32
