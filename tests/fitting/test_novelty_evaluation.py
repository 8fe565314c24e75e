"""Out-of-distribution flags of a feature cache against direct counting, on images not used in fitting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halopose.data.dataset_loading import load_dataset
from halopose.evaluation.region_scores import ALARM_RATES, NoveltyScores
from halopose.fitting import novelty_evaluation
from halopose.fitting.artifact import Artifact
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.novelty_evaluation import held_share, score_novelty
from halopose.fitting.novelty_fitting import collect_copies, fit_novelty, rows_of
from halopose.fitting.pipeline import collect_validation, evaluate_artifact
from halopose.fitting.settings import FitSettings, NoveltySettings
from tests.helpers.models import artifact_for, host_of, write_scenes
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
KIND = "v8"
SETTINGS = NoveltySettings(images=10, fewest=5, conf=0.2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, MatchStore]:
    """An artifact with novelty, and a store of which half gave its p-values."""
    folder, host = tmp_path_factory.mktemp("alarms"), host_of(KIND)
    data = write_scenes(folder, host, {"train": 10, "val": 16})
    copies = collect_copies(host, load_dataset(data, "train"), folder / "copies", 64, SETTINGS)
    store = collect_validation(host, load_dataset(data, "val"), folder / "val", FitSettings(imgsz=64))
    return fit_novelty(artifact_for(host), copies, store, store.images[:8], SETTINGS), store


def test_shares_are_counted(made: tuple[Artifact, MatchStore], monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, store = made
    novelty, found = present(artifact.novelty), present(score_novelty(artifact, store))
    rows = rows_of(artifact, store, 0.25, store.images[8:])
    chance = novelty.p_value(novelty.value(rows.evidence), 0.25).numpy()
    images = novelty.image_p_value(novelty.image_value(rows.vectors)).numpy()
    assert (found.confidence, found.detections.count, found.images.count) == (0.25, len(chance), 8)
    for place, rate in enumerate(ALARM_RATES):
        flagged = chance <= rate / 100
        assert found.detections.share[place] == flagged.mean()
        assert found.images.share[place] == (images <= rate / 100).mean()
        assert found.held_kept[place] == pytest.approx(held_share(rows.square[~flagged]), nan_ok=True)
        assert found.held_flagged[place] == pytest.approx(held_share(rows.square[flagged]), nan_ok=True)
    monkeypatch.setattr(novelty_evaluation, "SHARDS_AT_ONCE", 1)
    np.testing.assert_equal(present(score_novelty(artifact, store)).to_json(), found.to_json())


def test_images_that_gave_the_p_values_are_left_out(made: tuple[Artifact, MatchStore]) -> None:
    artifact, store = made
    assert score_novelty(artifact, store, store.images[:8]) is None
    assert present(score_novelty(artifact, store, store.images[6:11])).images.count == 3
    assert score_novelty(replace(artifact, novelty=None), store) is None


def test_without_detections_images_count_still(made: tuple[Artifact, MatchStore]) -> None:
    artifact, store = made
    found = present(score_novelty(artifact, store, conf=0.9999))
    assert (found.detections.count, found.images.count) == (0, 8)
    assert np.isnan([*found.detections.share, *found.held_kept, *found.held_flagged]).all()


def test_every_evaluation_counts_alarms_and_keeps_them_in_json(made: tuple[Artifact, MatchStore]) -> None:
    artifact, store = made
    scores = evaluate_artifact(artifact, host_of(KIND), store)
    content = scores.to_json()["novelty"]
    np.testing.assert_equal(NoveltyScores.from_json(content).to_json(), content)
    np.testing.assert_equal(present(score_novelty(artifact, store)).to_json(), content)
    assert "novelty" not in evaluate_artifact(replace(artifact, novelty=None), host_of(KIND), store).to_json()


def test_ellipses_hold_what_is_near() -> None:
    square = np.array([[1.0, np.nan], [5.99, 6.0]])
    assert held_share(square) == pytest.approx(2 / 3)
    assert np.isnan(held_share(square[:0]))
