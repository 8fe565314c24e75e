"""Out-of-distribution model: pooling, whitening and p-values against plain computations, and the file round trip."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import mahalanobis
from torch.nn.functional import normalize

from halopose.uncertainty.heads import cut_windows
from halopose.uncertainty.novelty import (
    Evidence,
    Novelty,
    Pooling,
    Whitening,
    combined_distance,
    pool_images,
    pool_windows,
)
from tests.helpers.outliers import fitted

WIDTHS = (3, 5)


def evidence(count: int = 40, seed: int = 0) -> Evidence:
    generator = torch.Generator().manual_seed(seed)
    level = torch.arange(count) % 2
    window = torch.randn(count, max(WIDTHS), generator=generator)
    window[level == 0, WIDTHS[0] :] = 0
    return Evidence(
        level=level,
        window=window,
        image=torch.randn(count, sum(WIDTHS), generator=generator),
        score=torch.rand(count, generator=generator),
    )


def whitening(width: int, seed: int) -> Whitening:
    generator = torch.Generator().manual_seed(seed)
    return Whitening(
        torch.randn(width, generator=generator) / 10, torch.randn(width, width, generator=generator).tril()
    )


def novelty(known: int = 99) -> Novelty:
    generator = torch.Generator().manual_seed(7)
    inputs = 2 * sum(WIDTHS) + 1 + len(WIDTHS)
    values = torch.linspace(0, 10, known)
    return Novelty(
        windows=tuple(whitening(width, width) for width in WIDTHS),
        images=tuple(whitening(width, 9 + width) for width in WIDTHS),
        odds_centre=torch.zeros(1),
        odds_scale=torch.ones(1),
        weights=torch.randn(2, inputs, generator=generator),
        centre=torch.zeros(2, 4),
        scale=torch.ones(2, 4),
        image_weights=torch.randn(sum(WIDTHS) + 1, generator=generator),
        image_centre=torch.zeros(2),
        image_scale=torch.ones(2),
        known=torch.stack([torch.linspace(0, 1, known), values], dim=1),
        known_images=values,
        knots=torch.tensor([2.0, 4.0]),
        widening=torch.tensor([1.5, 3.0]),
    )


def test_windows_are_pooled_over_their_cells_on_the_map() -> None:
    maps = torch.randn(1, 4, 6, 7)
    cells = torch.tensor([0, 3 * 7 + 3, 6 * 7 - 1])
    pooled = pool_windows(*cut_windows(maps, torch.zeros_like(cells), cells, 2))
    plain = torch.stack(
        [maps[0, :, :3, :3].mean((1, 2)), maps[0, :, 1:6, 1:6].mean((1, 2)), maps[0, :, 3:, 4:].mean((1, 2))]
    )
    torch.testing.assert_close(pooled, plain)


def test_padding_is_no_part_of_an_image() -> None:
    first, second = torch.randn(1, 3, 8, 8), torch.randn(1, 5, 4, 4)
    inner = pool_images([first[:, :, 2:6], second[:, :, 1:3]], (8, 16), [(0, 0, 64, 32)])
    torch.testing.assert_close(pool_images([first, second], (8, 16), [(0, 16, 64, 48)]), inner)
    assert inner.shape == (1, 8)


def test_pooling_keeps_rows_in_their_places() -> None:
    pooling = Pooling(3, WIDTHS, torch.zeros(1))
    windows, inside = torch.randn(2, 3, 5, 5), torch.ones(2, 5, 5)
    pooling(0, torch.tensor([2, 0]), windows, inside)
    torch.testing.assert_close(pooling.window[torch.tensor([2, 0]), :3], windows.mean((2, 3)))
    assert pooling.window[1].abs().sum() == 0


def test_distances_equal_those_of_scipy() -> None:
    given_, fitted = evidence(), novelty()
    _, window, image = fitted.inputs(given_)
    for n in range(4):
        level = int(given_.level[n])
        one = fitted.windows[level]
        unit = given_.window[n, : WIDTHS[level]].numpy()
        precision = (one.factor @ one.factor.T).numpy()
        expected = mahalanobis(unit / np.linalg.norm(unit), one.mean.numpy(), precision)
        assert np.expm1(window[n].item()) == pytest.approx(expected**2, rel=1e-4)
    assert image.shape == (40,)


def test_distances_equal_those_of_pytorch_ood() -> None:
    """Of vectors brought to unit length, with the same mean and covariance."""
    generator = torch.Generator().manual_seed(3)
    usual, new = (scale * torch.randn(200, 8, generator=generator) + 1 for scale in (1.0, 2.0))
    oracle = fitted("Mahalanobis", normalize(usual, dim=1))
    white = Whitening(oracle.mu[0], torch.linalg.cholesky(oracle.precision))(new)
    expected = 2 * oracle.predict_features(normalize(new, dim=1))  # it has half of the square
    torch.testing.assert_close(white.square().sum(1), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**31), st.floats(0.01, 0.5))
def test_p_values_are_valid(count: int, seed: int, rate: float) -> None:
    """Of n + 1 exchangeable values the share with p at or under a rate is at most that rate, whoever is new."""
    values = np.random.default_rng(seed).normal(size=count + 1).round(1)  # with ties
    below = 0
    for new in range(count + 1):
        known = torch.from_numpy(np.sort(np.delete(values, new))).float()
        table = torch.stack([torch.ones(count), known], dim=1)
        fitted = replace(novelty(), known=table, known_images=known)
        value = torch.tensor([values[new]]).float()
        chance = fitted.p_value(value, 0.5)
        assert chance == fitted.image_p_value(value)
        assert 1 / (count + 1) <= float(chance) <= 1 + 1e-6
        below += float(chance) <= rate + 1e-7
    assert below / (count + 1) <= rate + 1e-6


def test_p_values_are_among_detections_as_confident() -> None:
    fitted = novelty()  # scores and values rise together
    assert fitted.p_value(torch.tensor([5.0]), 0.0).item() == pytest.approx(0.51)
    assert fitted.p_value(torch.tensor([5.0]), 0.75).item() == pytest.approx(1.0)
    assert fitted.p_value(torch.tensor([99.0]), 0.0).item() == pytest.approx(0.01)


def test_widening_rises_in_steps() -> None:
    factors = novelty().widen(torch.tensor([0.0, 1.99, 2.0, 3.0, 4.0, 1e6]))
    assert factors.tolist() == [1.0, 1.0, 1.5, 1.5, 3.0, 3.0]


def test_combined_score_rises_with_every_component() -> None:
    unit = torch.randn(20, 4)
    for component in range(4):
        more = unit.clone()
        more[:, component] += 0.5
        assert (combined_distance(more) > combined_distance(unit)).all()


def test_tensors_give_it_back() -> None:
    fitted, given_ = novelty(), evidence()
    again = Novelty.from_tensors(fitted.to_tensors())
    assert torch.equal(again.value(given_), fitted.value(given_))
    assert torch.equal(again.image_value(given_.image), fitted.image_value(given_.image))
    tensors = fitted.to_tensors()
    assert tensors["windows.1.factor"].numel() == 15  # the triangle alone
    with pytest.raises(ValueError, match="finite"):
        Novelty.from_tensors({**tensors, "centre": torch.full((2, 4), torch.nan)})
    with pytest.raises(KeyError):
        Novelty.from_tensors({name: value for name, value in tensors.items() if name != "known"})


def test_nothing_detected_has_no_novelty() -> None:
    nothing = evidence()[torch.zeros(0, dtype=torch.long)]
    assert novelty().value(nothing).shape == (0,)
