"""One epoch of training on the match store against one that runs the frozen base every time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch

from benchmarks.interleave import Comparison, compare
from benchmarks.overhead import PHOTOGRAPH, make_model
from halopose.datasets import Dataset, Objects, Record
from halopose.matches import CollectSettings, collect
from halopose.training import TrainSettings, train, weighted_nll

IMAGES = 24


def compare_epoch(rounds: int = 3) -> Comparison:
    """The same images, the same assigned cells; the peer runs base, assigner and dense heads with backward."""
    model = make_model()
    host = model.host
    image = cv2.imread(str(PHOTOGRAPH))
    found = model.predict(image, conf=0.5)[0]
    objects = Objects(
        boxes=found.boxes.astype(float),
        class_ids=np.zeros(len(found), dtype=np.int64),
        keypoints=found.keypoints + np.random.default_rng(0).normal(0, 3, found.keypoints.shape),
        labelled=np.ones(found.keypoints.shape[:2], dtype=bool),
        area=np.full(len(found), 1e4),
        crowd=np.zeros(len(found), dtype=bool),
    )
    records = tuple(Record(PHOTOGRAPH, number, objects, False, 1.0) for number in range(IMAGES))
    dataset = Dataset(records, host.keypoint_names, None, "annotation")
    with tempfile.TemporaryDirectory() as folder:
        store = collect(host, dataset, Path(folder), CollectSettings())
        heads = model.artifact.heads

        def ours() -> None:
            train(heads, store, TrainSettings(epochs=1, holdout=0.01))

        def peer() -> None:
            optimizer = torch.optim.AdamW(heads.parameters())
            for record in dataset.records:
                pixels, truth = record.read()
                batch, boxes = host.preprocess([pixels], 640, rectangular=True)
                output = host.forward(batch)
                from halopose.matches import _targets

                targets = _targets(truth, boxes[0])
                cells = host.assign(output, [targets])
                maps = [features.clone() for features in output.features]
                factors = heads.dense(maps)[cells.image, cells.cell]
                residual = targets.keypoints[cells.object] - output.keypoints[cells.image, cells.cell].clone()
                labelled = targets.labelled[cells.object].float()
                total, mass = weighted_nll(factors, residual, labelled, torch.ones(len(factors)))
                optimizer.zero_grad()
                (total / mass).backward()
                optimizer.step()

        return compare(ours, peer, rounds)
