"""Sparse heads against dense heads, cell by cell."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from halopose.uncertainty.distributions import RAW_CHANNELS, Parameterisation
from halopose.uncertainty.heads import (
    Activation,
    ConvTemplate,
    HeadSettings,
    LevelHead,
    ProbabilisticHeads,
    Trunk,
    cut_windows,
)

SIZES = [((7, 5), (3, 4), (1, 1)), ((2, 3), (1, 1), (5, 9)), ((1, 6), (6, 1), (3, 3)), ((11, 13), (8, 8), (2, 2))]
KERNELS = ((3, 3), (1, 3, 3), (1, 3, 3, 3))  # windows 5, 5 and 7 wide, as in YOLO-NAS
STRIDES = (8, 16, 32)
KEYPOINTS = 4


def templates(seed: int = 0, activation: Activation = "silu") -> list[list[ConvTemplate]]:
    generator = torch.Generator().manual_seed(seed)
    result = []
    for number, kernels in enumerate(KERNELS):
        channels = [6 + number, *(8 for _ in kernels)]
        result.append(
            [
                ConvTemplate(
                    torch.randn((into_out[1], into_out[0], k, k), generator=generator) * 0.3,
                    torch.randn(into_out[1], generator=generator),
                    activation,
                )
                for k, into_out in zip(kernels, itertools.pairwise(channels), strict=True)
            ]
        )
    return result


def random_heads(settings: HeadSettings, activation: Activation = "silu") -> ProbabilisticHeads:
    """Heads with random weights in the last layer, which is zero at the start."""
    heads = ProbabilisticHeads(templates(activation=activation), STRIDES, KEYPOINTS, settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        level: Any
        for level in heads.levels:
            for value in level.last.parameters():
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return heads


def random_maps(sizes: tuple[tuple[int, int], ...], batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn((batch, 6 + n, *size), generator=generator) for n, size in enumerate(sizes)]


def everywhere(maps: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Image and cell of every cell, in random order."""
    count = sum(level.shape[2] * level.shape[3] for level in maps)
    order = torch.randperm(len(maps[0]) * count, generator=torch.Generator().manual_seed(3))
    return order // count, order % count


def relative_error(sparse: torch.Tensor, dense: torch.Tensor) -> float:
    """Largest error relative to the largest entry of the same factor."""
    sparse, dense = sparse.detach(), dense.detach()
    return float(((sparse - dense).abs().amax((-1, -2)) / dense.abs().amax((-1, -2))).max())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("parameterisation", RAW_CHANNELS)
@pytest.mark.parametrize("trunk", ["mirrored", "last-layer"])
def test_sparse_is_dense_at_every_cell(
    sizes: tuple[Any, ...], parameterisation: Parameterisation, trunk: Trunk
) -> None:
    heads = random_heads(HeadSettings(parameterisation, trunk))
    assert heads.reaches == (2, 2, 3)
    maps = random_maps(sizes)
    image, cell = everywhere(maps)
    dense = heads.dense(maps)[image, cell]
    assert relative_error(heads.sparse(maps, image, cell), dense) < 1e-5
    doubled = heads.double()
    maps = [level.double() for level in maps]
    assert relative_error(doubled.sparse(maps, image, cell), doubled.dense(maps)[image, cell]) < 1e-12


@pytest.mark.parametrize("activation", ["silu", "relu", "identity"])
def test_cold_start_and_other_activations_agree_too(activation: Activation) -> None:
    heads = random_heads(HeadSettings(warm_start=False), activation).double()
    maps = [level.double() for level in random_maps(SIZES[0])]
    image, cell = everywhere(maps)
    assert relative_error(heads.sparse(maps, image, cell), heads.dense(maps)[image, cell]) < 1e-12


def test_gradients_of_sparse_equal_those_of_dense() -> None:
    heads = random_heads(HeadSettings()).double()
    maps = [level.double().requires_grad_() for level in random_maps(SIZES[0])]
    image, cell = everywhere(maps)
    weight = torch.randn((len(cell), KEYPOINTS, 2, 2), dtype=torch.float64)
    wanted = [*maps, *heads.parameters()]
    sparse = torch.autograd.grad((heads.sparse(maps, image, cell) * weight).sum(), wanted)
    dense = torch.autograd.grad((heads.dense(maps)[image, cell] * weight).sum(), wanted)
    for one, other in zip(sparse, dense, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * float(other.abs().max()))


def test_a_few_cells_and_none() -> None:
    heads = random_heads(HeadSettings())
    maps = random_maps(SIZES[0])
    dense = heads.dense(maps)
    image, cell = torch.tensor([1, 0, 1, 1]), torch.tensor([0, 34, 47, 0])  # corners, levels, twice the same
    assert relative_error(heads.sparse(maps, image, cell), dense[image, cell]) < 1e-5
    none = torch.zeros(0, dtype=torch.long)
    assert heads.sparse(maps, none, none).shape == (0, KEYPOINTS, 2, 2)


@pytest.mark.parametrize("reach", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4)])
def test_cut_windows_is_the_naive_loop(size: tuple[int, int], reach: int) -> None:
    maps = random_maps((size,))[0]
    image, cell = everywhere([maps])
    windows, inside = cut_windows(maps, image, cell, reach)
    height, width = size
    for number, (b, where) in enumerate(zip(image.tolist(), cell.tolist(), strict=True)):
        for i, j in itertools.product(range(2 * reach + 1), repeat=2):
            row, column = where // width + i - reach, where % width + j - reach
            on_map = 0 <= row < height and 0 <= column < width
            assert bool(inside[number, i, j]) is on_map
            expected = maps[b, :, row, column] if on_map else torch.zeros(maps.shape[1])
            assert torch.equal(windows[number, :, i, j], expected)


def test_first_output_is_one_stride_everywhere() -> None:
    heads = ProbabilisticHeads(templates(), STRIDES, KEYPOINTS)
    dense = heads.dense(random_maps(SIZES[0]))
    cells = [35, 12, 1]
    expected = torch.cat([torch.full((n,), float(stride)) for n, stride in zip(cells, STRIDES, strict=True)])
    assert torch.equal(dense, (expected[:, None, None, None] * torch.eye(2)).expand(2, -1, KEYPOINTS, -1, -1))


@pytest.mark.parametrize("parameterisation", RAW_CHANNELS)
def test_parameterisations_have_their_structure(parameterisation: Parameterisation) -> None:
    heads = random_heads(HeadSettings(parameterisation))
    dense = heads.dense(random_maps(SIZES[0]))
    xx, yx, yy = dense[..., 0, 0], dense[..., 1, 0], dense[..., 1, 1]
    assert (xx > 0).all()
    assert (yy > 0).all()
    assert not dense[..., 0, 1].any()
    assert bool(yx.any()) is (parameterisation == "full")
    assert torch.equal(xx, yy) is (parameterisation == "isotropic")


@pytest.mark.parametrize("warm_start", [True, False])
def test_last_layer_trunk_is_the_frozen_base(warm_start: bool) -> None:
    heads = ProbabilisticHeads(templates(), STRIDES, KEYPOINTS, HeadSettings("full", "last-layer", warm_start))
    trainable = [name for name, value in heads.named_parameters() if value.requires_grad]
    assert trainable == [f"levels.{n}.last.{kind}" for n in range(3) for kind in ("weight", "bias")]
    level: Any
    for level, template in zip(heads.levels, templates(), strict=True):
        for convolution, base in zip(level.trunk, template, strict=True):
            assert torch.equal(convolution.weight, base.weight)
            assert torch.equal(convolution.bias, base.bias)


def test_mirrored_trunk_starts_at_the_base_only_if_warm() -> None:
    template = templates()[0]
    for warm in (True, False):
        level: Any = LevelHead(template, KEYPOINTS, HeadSettings(warm_start=warm))
        assert torch.equal(level.trunk[0].weight, template[0].weight) is warm
        assert all(value.requires_grad for value in level.parameters())
