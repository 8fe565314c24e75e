"""Exported graph: against plain greedy suppression and the sparse heads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.deploy.graph import (
    OVERLAP,
    Deployable,
    TopkSettings,
    WindowHead,
    cells_around,
    rows_of,
    sampled,
    suppression_mask,
    windows_of,
)
from halopose.errors import HaloposeError
from halopose.runtime.predict import suppress
from halopose.uncertainty.context_features import features_at
from halopose.uncertainty.heads import HeadSettings, cut_windows, with_bound, with_conditional_scale
from halopose.uncertainty.novelty import pool_windows
from tests.helpers.models import KINDS, artifact_for, host_of, photograph, random_scale

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_the_suppression_mask_is_that_of_greedy_suppression(seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    corner = generator.uniform(0, 30, (24, 2))
    boxes = np.concatenate([corner, corner + generator.uniform(20, 40, (24, 2))], axis=1).astype(np.float32)
    classes = generator.integers(0, count, 24)
    better = torch.ones(24, 24).tril(-1)
    kept = suppression_mask(torch.from_numpy(boxes)[None], torch.from_numpy(classes)[None], better)[0].bool().numpy()
    expected = np.isin(np.arange(24), suppress(boxes, -np.arange(24.0), classes, OVERLAP))
    assert np.array_equal(kept, expected)


@pytest.mark.parametrize("settings", [HeadSettings(), HeadSettings("diagonal"), HeadSettings("isotropic")])
@pytest.mark.parametrize("kind", ["11", "nas"])
def test_windows_give_what_the_heads_give_at_every_cell(kind: str, settings: HeadSettings) -> None:
    """All cells of small maps, which include every border."""
    heads = artifact_for(host_of(kind), settings).heads
    generator = torch.Generator().manual_seed(3)
    level: Any
    for number, level in enumerate(heads.levels):
        maps = torch.randn((2, level.trunk[0].weight.shape[1], 4, 3), generator=generator)
        cell = torch.arange(12).expand(2, -1)
        with torch.no_grad():
            places, inside = windows_of(cell[:, None], torch.tensor([[4, 3]]), max(heads.reaches))
            hidden, pooled = WindowHead(level)(maps, places[:, 0], inside[:, 0])
            image = torch.arange(2).repeat_interleave(12)
            windows, inside = cut_windows(maps, image, cell.reshape(-1), heads.reaches[number])
            expected = level.hidden_at(windows, inside)
        assert torch.allclose(hidden.flatten(0, 1), expected, atol=1e-5, rtol=1e-5)
        assert torch.allclose(pooled.flatten(0, 1), pool_windows(windows, inside), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_traced_model_is_the_framework_and_its_cells_have_their_factors(kind: str) -> None:
    host = host_of(kind)
    artifact = artifact_for(host)
    batch, _ = host.preprocess([photograph("bus.jpg")], 192, rectangular=False)
    graph = Deployable(host.traceable(), artifact, "topk", TopkSettings(64, 8)).eval()
    with torch.inference_mode():
        outputs = dict(zip(graph.output_names, graph(batch), strict=True))
        native = host.forward(batch)
        expected = artifact.calibrations.gaussian(artifact.heads.dense(native.features)).scale_tril.float()
    first = native.raw[0] if kind != "nas" else native.raw[0][0]
    assert torch.allclose(outputs[graph.output_names[0]], first, atol=1e-3)
    cells, factors = outputs["cells"][0], outputs["factors"][0]
    found = cells >= 0
    assert len(torch.unique(cells[found])) == found.sum() > 0
    wanted = expected[0, cells[found]]
    entries = torch.stack([wanted[..., 0, 0], wanted[..., 1, 0], wanted[..., 1, 1]], dim=-1)
    assert torch.allclose(factors[found], entries, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "overlaps", "features", "bound"),
    [("11", True, True, 0), ("nas", True, True, 50), ("11", True, False, 0), ("11", False, True, 50)],
)
def test_context_features_in_the_graph_equal_those_of_the_host(
    kind: str, overlaps: bool, features: bool, bound: float
) -> None:
    host = host_of(kind)
    artifact = artifact_for(host, HeadSettings(overlaps=overlaps, features=features))
    if bound:
        artifact = replace(artifact, heads=with_bound(artifact.heads, np.full(host.keypoint_count, bound)))
        artifact = replace(artifact, heads=with_conditional_scale(artifact.heads, random_scale(host.keypoint_count)))
    batch, _ = host.preprocess([photograph("bus.jpg"), photograph("zidane.jpg")], 192, rectangular=False)
    graph = Deployable(host.traceable(), artifact, "topk", TopkSettings(64, 8)).eval()
    with torch.inference_mode():
        outputs = dict(zip(graph.output_names, graph(batch), strict=True))
        native = host.forward(batch)
        image, row = torch.nonzero(outputs["cells"] >= 0, as_tuple=True)
        cell = outputs["cells"][image, row]
        context_features = host.context_features(native, image, cell)
        sparse = artifact.heads.sparse(native.features, image, cell, context_features)
        wanted = artifact.calibrations.gaussian(sparse).scale_tril.float()
    assert len(cell) > 10
    entries = torch.stack([wanted[..., 0, 0], wanted[..., 1, 0], wanted[..., 1, 1]], dim=-1)
    assert torch.allclose(outputs["factors"][image, row], entries, rtol=2e-3, atol=1e-3)


@given(st.integers(0, 10_000))
def test_cells_and_shares_of_the_graph_sample_as_torch_does(seed: int) -> None:
    """Including points off the map."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn((2, 3 + n, 4 >> n, 6 >> n), generator=generator) for n in range(2)]
    points = torch.rand((2, 3, 5, 2), generator=generator) * 60 - 8
    cell, share = cells_around(maps, (8, 16), torch.arange(2).repeat_interleave(3), points.flatten(0, 1))
    found = [sampled(rows_of(level), cell[n], share[n], 5) for n, level in enumerate(maps)]
    torch.testing.assert_close(torch.cat(found, 2), features_at(maps, (8, 16), points), atol=1e-4, rtol=1e-4)


def test_dense_heads_have_no_context_features() -> None:
    host = host_of("11")
    artifact = artifact_for(host, HeadSettings(overlaps=True))
    with pytest.raises(HaloposeError, match="topk"):
        Deployable(host.traceable(), artifact, "dense", TopkSettings())


def test_the_best_cells_of_each_level_come_first() -> None:
    host = host_of("11")
    batch, _ = host.preprocess([photograph("zidane.jpg")], 192, rectangular=False)
    graph = Deployable(host.traceable(), artifact_for(host), "topk", TopkSettings(300, 5)).eval()
    with torch.inference_mode():
        cells = dict(zip(graph.output_names, graph(batch), strict=True))["cells"][0]
        output = host.forward(batch)
        kept = host.select(output, conf=0.0, iou=OVERLAP, max_detections=300)[0].cell
    bounds = [0, 576, 720, 756]
    for level in range(3):
        own = kept[(kept >= bounds[level]) & (kept < bounds[level + 1])][:5]  # best first
        assert set(own.tolist()) <= set(cells[5 * level : 5 * level + 5].tolist())
