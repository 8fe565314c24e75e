"""One epoch of training on the feature cache against an epoch that runs the frozen base model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.interleave import Comparison, compare
from benchmarks.overhead import PHOTOGRAPH, make_model
from halopose.data.dataset import Dataset, Objects, Record
from halopose.fitting.collecting import collect, to_targets
from halopose.fitting.feature_cache import CollectSettings, MatchStore
from halopose.fitting.head_training import train, weighted_nll
from halopose.fitting.settings import TrainSettings
from halopose.prediction.uncertain_pose import UncertainPose
from halopose.uncertainty.heads import LevelHead, ProbabilisticHeads, convolve_windows

IMAGES = 24
EPOCHS = 4


def compare_epoch(rounds: int = 5) -> tuple[Comparison, Comparison, Comparison]:
    """Compare an epoch on the same images and assigned cells.

    Returns:
        1. An epoch with base model, assigner and dense heads, against the epoch on the feature cache.
        2. The convolutions of the epoch, against the whole epoch.
        3. Matrix products with the same number of multiplications, against the whole epoch.
    """
    model = make_model()
    host = model.host
    photographs = [PHOTOGRAPH, PHOTOGRAPH.with_name("zidane.jpg")]  # three persons per image, as in COCO
    labels = [_objects(model, path) for path in photographs]
    records = tuple(Record(photographs[number % 2], number, labels[number % 2], False, 1.0) for number in range(IMAGES))
    dataset = Dataset(records, host.layout, "annotation")
    with tempfile.TemporaryDirectory() as folder:
        store = collect(host, dataset, Path(folder), CollectSettings())
        heads = model.artifact.heads

        def ours() -> None:
            train(heads, store, TrainSettings(epochs=EPOCHS, holdout=0.01))

        def peer() -> None:
            optimizer = torch.optim.AdamW(heads.parameters())
            for record in dataset.records:
                pixels, truth = record.read()
                batch, boxes = host.preprocess([pixels], 640, rectangular=True)
                output = host.forward(batch)
                targets = to_targets(truth, boxes[0])
                cells = host.assign(output, [targets], dataset.layout.sigmas)
                maps = [features.clone() for features in output.features]
                image, cell, object = cells.image.clone(), cells.cell.clone(), cells.object.clone()
                factors = heads.dense(maps)[image, cell]
                residual = targets.keypoints[object] - output.keypoints.clone()[image, cell]
                labelled = targets.labelled[object].float()
                total, mass = weighted_nll(factors, residual, labelled, torch.ones(len(factors)))
                optimizer.zero_grad()
                (total / mass).backward()
                optimizer.step()

        result = compare(ours, peer, rounds)
        limits = [
            compare(lambda: _convolutions(heads, store), ours, rounds),
            compare(_products(heads, store), ours, rounds),
        ]
    alone, products = (one.divided(peer=EPOCHS) for one in limits)
    return result.divided(ours=EPOCHS), alone, products


def _convolutions(heads: ProbabilisticHeads, store: MatchStore) -> None:
    """Forward and backward pass of the trunks on all rows of the feature cache."""
    for cells in store.cells("assigned"):
        values = cells.windows.float().permute(0, 2, 3, 1)
        for convolution in _trunk(heads, cells.level):
            values = convolve_windows(values, convolution)
        torch.autograd.backward(values, values)


def _products(heads: ProbabilisticHeads, store: MatchStore) -> Callable[[], None]:
    """Matrix products with the same number of multiplications: rows by weights, and rows by gradients.

    All convolutions but the first also need the gradient of their input.
    """
    pairs = []
    for cells in store.cells("assigned"):
        width = cells.windows.shape[-1]
        for number, convolution in enumerate(_trunk(heads, cells.level)):
            out, into, kernel, _ = convolution.weight.shape
            width -= kernel - 1
            rows, weights = (
                torch.randn(len(cells) * width**2, into * kernel**2),
                torch.randn(into * kernel**2, out),
            )
            gradient = torch.randn(len(rows), out)
            pairs += [(rows, weights), (rows.T, gradient), *([(gradient, weights.T)] if number else [])]

    def multiply() -> None:
        for one, other in pairs:
            _ = one @ other

    return multiply


def _trunk(heads: ProbabilisticHeads, level: int) -> list[nn.Conv2d]:
    head = heads.levels[level]
    assert isinstance(head, LevelHead)
    return [convolution for convolution in head.trunk if isinstance(convolution, nn.Conv2d)]


def _objects(model: UncertainPose, path: Path) -> Objects:
    """Annotations made of the base model's detections with noise."""
    found = model.predict(path, conf=0.4)[0]
    return Objects(
        boxes=found.boxes.astype(float),
        class_ids=np.zeros(len(found), dtype=np.int64),
        keypoints=found.keypoints + np.random.default_rng(0).normal(0, 3, found.keypoints.shape),
        labelled=np.ones(found.keypoints.shape[:2], dtype=bool),
        area=np.full(len(found), 1e4),
        crowd=np.zeros(len(found), dtype=bool),
    )
