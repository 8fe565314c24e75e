"""What a whole fit tells the user, and the bound that calibration gives heads; that it fits is in
tests/prediction/test_uncertain_pose.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from halopose.data.dataset_loading import load_dataset
from halopose.fitting.card import Card, ImageRoles
from halopose.fitting.pipeline import (
    bound_heads,
    calibrate_artifact,
    collect_validation,
)
from halopose.fitting.settings import FitSettings
from halopose.uncertainty.heads import HeadSettings, with_bound
from tests.helpers.models import artifact_for, host_of, write_scenes
from tests.helpers.values import present


def test_calibration_replaces_the_bound_of_bounded_heads(tmp_path: Path, one_thread: None) -> None:
    """Random heads state far too large covariances for some detections: a bound has the higher likelihood."""
    host = host_of("11")
    settings = FitSettings(imgsz=64, train_sizes=(64,), head=HeadSettings(overlaps=True, features=True, bounded=True))
    data = load_dataset(write_scenes(tmp_path, host, {"val": 40}), "val")
    store = collect_validation(host, data, tmp_path / "store", settings)
    card = Card(images=ImageRoles(heads=()), settings=settings)
    trained = replace(artifact_for(host, settings.head), card=card)
    found = calibrate_artifact(trained, host, store, "matched").heads
    bound = present(present(found.context_head).inverse_bound)
    assert float(bound.min()) > 0
    assert not present(present(trained.heads.context_head).inverse_bound).any()  # of the heads that were given
    tight = with_bound(trained.heads, np.full(host.keypoint_count, 1e4))
    again = bound_heads(tight, store, store.images, settings.protocol)
    assert torch.equal(present(present(again.context_head).inverse_bound), bound)
    plain = replace(trained, heads=artifact_for(host, HeadSettings(overlaps=True, features=True)).heads)
    assert present(calibrate_artifact(plain, host, store, "matched").heads.context_head).inverse_bound is None
