"""The context head: its inputs, its zero start, and its bound."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.errors import HaloposeError
from halopose.uncertainty.context_features import ContextFeatures
from halopose.uncertainty.context_head import OVERLAP_INPUTS, ContextHead, overlap_inputs
from halopose.uncertainty.heads import HeadSettings, with_bound
from tests.helpers.models import artifact_for, host_of, photograph

BOTH = HeadSettings(overlaps=True, features=True)


def context_features(count: int = 6, keypoints: int = 3, channels: int = 4, scale: float = 1.0) -> ContextFeatures:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    low = 50 * draw(count, 2)
    root = draw(count, keypoints, 2, 2)
    moment = root @ root.mT
    return ContextFeatures(
        keypoints=scale * (low[:, None] + 60 * draw(count, keypoints, 2)),
        box=scale * torch.cat([low, low + 30 + 40 * draw(count, 2)], dim=1),
        score=draw(count),
        visibility=draw(count, keypoints),
        offset=scale * (draw(count, keypoints, 2) - 0.5),
        moment=scale**2 * torch.stack([moment[..., 0, 0], moment[..., 0, 1], moment[..., 1, 1]], dim=2),
        seen=draw(count, keypoints),
        mass=5 * draw(count),
        features=draw(count, keypoints, channels),
        extent=torch.full((count, 2), 128.0 * scale),
    )


def test_inputs_do_not_change_with_the_unit_of_length() -> None:
    one, two = (overlap_inputs(context_features(scale=s), torch.full((6,), 8.0 * s)) for s in (1.0, 2.0))
    assert one.shape == (6, 3, OVERLAP_INPUTS)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert float(one.abs().max()) < 12


@pytest.mark.parametrize(("channels", "overlaps"), [(4, True), (4, False), (0, True)])
def test_it_starts_at_zero_and_uses_its_inputs(channels: int, overlaps: bool) -> None:
    torch.manual_seed(0)
    head = ContextHead([5, 7], 3, 2, width=8, channels=channels, overlaps=overlaps)
    strides = torch.full((6,), 16.0)
    entered = head.enter(1, torch.randn(6, 7))
    assert float(head.leave(entered, context_features(), strides).detach().abs().max()) == 0
    torch.nn.init.normal_(head.last)
    given, other = context_features(), context_features()
    other.features.mul_(2)
    other.moment.mul_(2)
    first = head.leave(entered, given, strides)
    assert first.shape == (6, 3, 2)
    for name, used in (("features", channels > 0), ("moment", overlaps)):
        changed = ContextFeatures(**{**given.__dict__, name: getattr(other, name)})
        assert torch.equal(head.leave(entered, changed, strides), first) is not used


@given(st.integers(0, 10_000))
def test_a_bound_holds_and_leaves_small_dispersions_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    head = ContextHead([5], 3, 3, width=8, channels=0, overlaps=True, bounded=True)
    head.inverse_bound = torch.from_numpy(rng.uniform(1, 100, 3)).float()
    box = np.cumsum(rng.uniform(2, 60, (6, 2, 2)), 1).reshape(6, 4)
    bound = (box[:, 2:] - box[:, :2]).prod(1)[:, None] / head.inverse_bound.numpy()
    trace = np.sort(bound * np.exp(rng.normal(0, 4, (6, 3))), 0)
    tensors = torch.from_numpy(trace), torch.from_numpy(box)
    shrunk = trace * head.shrinkage(*tensors).numpy() ** 2
    assert np.all(shrunk < bound)
    np.testing.assert_allclose(shrunk, 1 / (1 / trace + 1 / bound), rtol=1e-5)  # as resistors beside each other
    head.inverse_bound.zero_()
    assert torch.all(head.shrinkage(*tensors) == 1)


def test_heads_with_a_bound_are_the_same_heads_shrunk() -> None:
    host = host_of("11")
    heads = artifact_for(host, BOTH).heads
    batch, _ = host.preprocess([photograph("bus.jpg")] * 2, 192, rectangular=False)
    output, cell = host.forward(batch), torch.tensor([0, 700, 740, 5])
    inverse = np.linspace(1, 400, heads.keypoints).astype(np.float32)
    for image in (torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 0, 1])):  # signals as arrays, as tensors
        found = host.context_features(output, image, cell)
        with torch.inference_mode():
            free = heads.sparse(output.features, image, cell, found)
            loose, tight = (
                with_bound(heads, values).sparse(output.features, image, cell, found)
                for values in (0 * inverse, inverse)
            )
        assert torch.equal(free, loose)
        box = torch.as_tensor(found.box)
        area = ((box[:, 2:] - box[:, :2]).clamp_min(1)).prod(1)
        trace = free.square().sum((-1, -2))
        expected = free / (1 + trace * torch.from_numpy(inverse) / area[:, None]).sqrt()[..., None, None]
        torch.testing.assert_close(tight, expected, rtol=2e-3, atol=1e-6)


def test_cells_of_all_levels_at_once_are_each_level_alone() -> None:
    host = host_of("11")
    heads = artifact_for(host, BOTH).heads
    batch, _ = host.preprocess([photograph("bus.jpg")], 192, rectangular=False)
    output = host.forward(batch)
    sizes = [maps.shape[2] * maps.shape[3] for maps in output.features]
    cell = torch.tensor([0, 5, sizes[0] + 3, sizes[0] + sizes[1] + 1])
    image = torch.zeros(4, dtype=torch.long)
    found = host.context_features(output, image, cell)
    with torch.inference_mode():
        together = heads.sparse(output.features, image, cell, found)
        alone = [
            heads.sparse(output.features, image[n : n + 1], cell[n : n + 1], found.select(torch.tensor([n])))
            for n in range(4)
        ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_missing_features_are_refused() -> None:
    host = host_of("11")
    heads = artifact_for(host, BOTH).heads
    batch, _ = host.preprocess([photograph("bus.jpg")], 64, rectangular=False)
    output = host.forward(batch)
    zero = torch.zeros(1, dtype=torch.long)
    with pytest.raises(HaloposeError, match="context features"):
        heads.sparse(output.features, zero, zero)
    with pytest.raises(HaloposeError, match="no dense form"):
        heads.dense(output.features)
    with pytest.raises(HaloposeError, match="context features"):
        with_bound(artifact_for(host).heads, np.ones(heads.keypoints))


def test_one_cell_per_object_has_none_to_compare() -> None:
    host = host_of("26-one-to-one")
    batch, _ = host.preprocess([photograph("bus.jpg")], 192, rectangular=False)
    zero = torch.zeros(1, dtype=torch.long)
    with pytest.raises(HaloposeError, match="one cell per object"):
        host.context_features(host.forward(batch), zero, zero)
