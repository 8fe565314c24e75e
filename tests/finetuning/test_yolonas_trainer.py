"""Fine-tuning of YOLO-NAS: only the keypoint term changes, and the trainer runs with the given settings."""

from __future__ import annotations

import io
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.errors import HaloposeError
from halopose.finetuning import poks
from halopose.finetuning import yolonas_trainer as yolonas_training
from halopose.finetuning.finetuning_settings import FinetuneSettings
from halopose.finetuning.poks import poks_loss
from halopose.finetuning.yolonas_trainer import PoksYoloNASLoss, YoloNASFineTuner, save_tuned, tune
from halopose.hosts.loading import load_host
from halopose.hosts.yolonas.yolonas_host import YoloNASHost
from halopose.keypoints import Keypoints
from tests.helpers.models import pose_model, scenes, write_yolo

pytestmark = pytest.mark.usefixtures("one_thread")

KEYPOINTS = 4
TERMS = ("predicted_coords", "target_coords")
SIGMAS = [0.05, 0.08, 0.1, 0.2]
NAMES = ["near_left", "near_right", "far_right", "far_left"]
QUICK = FinetuneSettings(epochs=1, learning_rate=1e-3, warmup_epochs=0, imgsz=60, batch=2, workers=0)


def label(x: float, y: float, seen: list[int]) -> list[float]:
    corners = [(-0.2, 0.2), (0.2, 0.2), (0.1, -0.2), (-0.1, -0.2)]
    points = [[x + dx, y + dy, v] for (dx, dy), v in zip(corners, seen, strict=True)]
    return [0, x, y, 0.5, 0.5, *np.ravel(points).tolist()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as SuperGradients writes it, which differs from that of the trainer."""
    path = tmp_path_factory.mktemp("base") / "base.pth"
    torch.save({"net": pose_model("nas", (KEYPOINTS, 3)).state_dict()}, path)
    return path


@pytest.fixture(scope="module")
def host() -> YoloNASHost:
    """A base model with metadata beyond its weights."""
    model = pose_model("nas", (KEYPOINTS, 3))
    return YoloNASHost(model, sigmas=[0.3] * KEYPOINTS, oks_factor=False, class_names=["runway"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Four images, one of them with two objects and one with none."""
    rows = [[label(0.4, 0.5, [2, 2, 0, 1]), label(0.6, 0.6, [2, 2, 2, 2])], [label(0.5, 0.4, [2] * 4)]]
    rows += [[label(0.3, 0.3, [0, 2, 2, 2])], []]
    items = [(f"{n}.png", image, labels) for n, (image, labels) in enumerate(zip(scenes(4), rows, strict=True))]
    root = tmp_path_factory.mktemp("images") / "images" / "data"  # a folder above may be called images too
    yaml = write_yolo(root, {"train": items}, kpt_shape=[KEYPOINTS, 3], kpt_names={0: NAMES})
    read = load_dataset(yaml, "train")
    return replace(read, layout=replace(read.layout, sigmas=tuple(SIGMAS)))


def weights(path: Path) -> dict[str, Tensor]:
    """Read a checkpoint without our code."""
    content = torch.load(path, weights_only=True)
    return content.get("net") or content["model"]


def changed(before: Path, after: Path) -> set[str]:
    old, new = weights(before), weights(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def criterion(loss: type[Any] | None = None) -> Any:
    from libreyolo.models.yolonas.loss import YoloNASPoseLoss

    plain = YoloNASPoseLoss(SIGMAS)
    return PoksYoloNASLoss.from_plain(plain) if loss is PoksYoloNASLoss else plain


def targets(objects: list[list[float]], side: int = 96) -> Tensor:
    """A batch of two images (2, 100, 5 + 3 K) with objects on the first only."""
    batch = torch.zeros(2, 100, 5 + 3 * KEYPOINTS)
    for number, row in enumerate(objects):
        batch[0, number] = torch.tensor(row) * torch.tensor([1, *[side] * 4, *[side, side, 1] * KEYPOINTS])
    return batch


def forward(model: torch.nn.Module, side: int = 96) -> Any:
    return model.train()(torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0)))


def poks_by_hand(terms: dict[str, Tensor]) -> float:
    """By keypoint and object, in double precision."""
    predicted, true, seen, area = (
        terms[name].detach().double().numpy()
        for name in ("predicted_coords", "target_coords", "target_visibility", "area")
    )
    scores = terms.get("assigned_scores")
    weight = np.ones(len(true)) if scores is None else scores.double().numpy().ravel()
    similarities = []
    for k, sigma in enumerate(SIGMAS):
        rows = [i for i in range(len(true)) if seen[i, k, 0] > 0 and weight[i] > 0]
        energies = [np.sum((predicted[i, k] - true[i, k]) ** 2) / (2 * area[i, 0] * (2 * sigma) ** 2) for i in rows]
        if energies:
            similarities.append(np.exp(-np.average(energies, weights=weight[rows])))
    return float(1 - np.mean(similarities))


def test_only_the_keypoint_term_changes() -> None:
    outputs = forward(pose_model("nas", (KEYPOINTS, 3)))
    truth = targets([label(0.4, 0.5, [2, 2, 0, 1]), label(0.6, 0.6, [0, 2, 0, 2])])
    plain, tuned = criterion(), criterion(PoksYoloNASLoss)
    seen: list[tuple[dict[str, Any], Tensor]] = []
    tuned.poks.register_forward_hook(
        lambda module, inputs, output: seen.append(
            (dict(zip((*TERMS, "labelled", "area", "assigned_scores"), inputs, strict=True)), output)
        )
    )
    _, before = plain(outputs, truth)
    total, after = tuned(outputs, truth)
    names = plain.component_names
    assert {name for name, a, b in zip(names, before, after, strict=True) if a != b} == {"pose_reg", "loss"}
    terms, value = seen[0][0], seen[0][1].detach()
    terms["target_visibility"] = terms["labelled"][..., None]
    assert not terms["labelled"][:, 2].any()  # a keypoint that no object has is left out of the mean
    assert float(value) == pytest.approx(poks_by_hand(terms), abs=1e-5)
    assert 0 < float(value) < 1
    assert float(after[4]) == pytest.approx(plain.pose_reg_loss_weight * float(value), rel=1e-5)
    total.backward()


def test_cell_weights_enter_the_means() -> None:
    """The weights are those of the original term; a cell with weight 0 has no effect."""
    generator = torch.Generator().manual_seed(1)
    terms: dict[str, Any] = {
        "predicted_coords": 20 * torch.rand(6, KEYPOINTS, 2, generator=generator),
        "target_coords": 20 * torch.rand(6, KEYPOINTS, 2, generator=generator),
        "predicted_logits": torch.randn(6, KEYPOINTS, 1, generator=generator),
        "target_visibility": torch.tensor([0.0, 1, 2, 2]).repeat(6, 1)[..., None],
        "area": 1000 * torch.rand(6, 1, generator=generator),
        "sigmas": torch.tensor(SIGMAS),
    }
    scores = torch.rand(6, 1, generator=generator)
    scores[2] = 0
    given: dict[str, Any] = {"assigned_scores": scores, "assigned_scores_sum": 2.0}
    (plain, own), (weighted, alike) = (
        (
            criterion()._keypoint_loss(**terms, **more)[0],
            criterion(PoksYoloNASLoss)._keypoint_loss(**terms, **more)[0],
        )
        for more in ({}, given)
    )
    assert plain != weighted
    assert float(own) == pytest.approx(poks_by_hand(terms), abs=1e-5)
    assert float(alike) == pytest.approx(poks_by_hand(terms | given), abs=1e-5)
    assert own != alike


@pytest.mark.parametrize("seen", [None, [0, 0, 0, 0]])
def test_a_batch_without_objects_or_keypoints(seen: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is 0; the sums are joined once per batch for the other processes."""
    sums: list[int] = []

    def counted(*terms: Any) -> Any:
        sums.append(1)
        return poks_loss(*terms)

    monkeypatch.setattr(poks, "poks_loss", counted)
    model = pose_model("nas", (KEYPOINTS, 3))
    tuned = criterion(PoksYoloNASLoss)
    total, items = tuned(forward(model), targets([label(0.5, 0.5, seen)] if seen else []))
    assert items[4] == 0
    assert len(sums) == 1
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_the_trainer_uses_it(
    host: YoloNASHost, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pOKS by hand on the batches of the trainer, and a checkpoint that loads elsewhere."""
    calls: list[tuple[dict[str, Tensor], float]] = []
    batches: list[Tensor] = []
    original, whole = PoksYoloNASLoss._keypoint_loss, PoksYoloNASLoss.forward

    def spy(self: Any, **terms: Any) -> Any:
        result = original(self, **terms)
        calls.append((terms, float(result[0].detach())))
        return result

    def watch(self: Any, outputs: Any, given: Tensor) -> Any:
        batches.append(given)
        return whole(self, outputs, given)

    monkeypatch.setattr(PoksYoloNASLoss, "_keypoint_loss", spy)
    monkeypatch.setattr(PoksYoloNASLoss, "forward", watch)
    before, after = tmp_path / "base.pt", tmp_path / "new" / "tuned.pt"
    save_file(host.model.state_dict(), tmp_path / "weights.safetensors")
    save_tuned(host, tmp_path / "weights.safetensors", 64, before)
    steps: list[tuple[str, int, int]] = []
    settings = replace(QUICK, batch=1)  # so that one batch has no objects
    tune(before, dataset, after, tmp_path / "images", settings, progress=lambda *step: steps.append(step))
    assert len(batches) == 4
    assert any(not batch.any() for batch in batches)
    assert 0 < len(calls) < 4
    for terms, value in calls:
        assert value == pytest.approx(poks_by_hand(terms), abs=1e-5)
        assert terms["sigmas"].tolist() == pytest.approx(SIGMAS)
    assert [step[1:] for step in steps] == [(1, 1)]
    assert "pose_reg" in steps[0][0]
    monkeypatch.setattr(PoksYoloNASLoss, "forward", None)  # would fail if it trained again
    again = tmp_path / "again.pt"
    tune(before, dataset, again, tmp_path / "images", settings)
    assert changed(after, again) == set()
    tuned = load_host(after)
    assert isinstance(tuned, YoloNASHost)
    assert tuned.fingerprints != host.fingerprints
    for name in ("keypoint_count", "class_names", "oks_factor", "strides"):
        assert getattr(tuned, name) == getattr(host, name)
    assert tuned.layout.sigmas == host.layout.sigmas  # the data set's are for the tuning alone
    from libreyolo.models.yolonas.model import LibreYOLONAS

    theirs = LibreYOLONAS(str(after), size="n", task="pose", device="cpu")
    assert (theirs.num_keypoints, theirs.names) == (KEYPOINTS, {0: "runway"})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_control(base: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework's own loss: the same result after a kill, frozen parts unchanged, no progress bars."""
    monkeypatch.setattr(PoksYoloNASLoss, "forward", None)  # would fail if it were used
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    settings = replace(QUICK, loss="oks", freeze=2, epochs=2)
    whole, resumed = tmp_path / "a.pt", tmp_path / "b.pt"
    tune(base, dataset, whole, tmp_path / "a", settings)
    ordinary, epochs = YoloNASFineTuner._train_epoch, []

    def killed(trainer: YoloNASFineTuner, epoch: int) -> Any:
        epochs.append(epoch)
        if epochs == [0, 1]:
            raise KeyboardInterrupt
        return ordinary(trainer, epoch)

    monkeypatch.setattr(YoloNASFineTuner, "_train_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        tune(base, dataset, resumed, tmp_path / "b", settings)
    assert not resumed.exists()
    random.seed()
    tune(base, dataset, resumed, tmp_path / "b", settings)
    assert epochs == [0, 1, 1]
    assert changed(whole, resumed) == set()
    assert {name.split(".")[0] for name in changed(base, whole)} == {"heads"}
    assert screen.getvalue() == ""


class Weights(SimpleNamespace):
    def state_dict(self) -> dict[str, Tensor]:
        return vars(self)


def test_untrained_weights_are_not_averaged(host: YoloNASHost) -> None:
    before = host.model.state_dict()
    name = "heads.head1.pose_pred.bias"
    last, averaged = Weights(**before | {name: before[name] + 1}), Weights(**{n: v + 2 for n, v in before.items()})
    trainer: Any = SimpleNamespace(model=last, ema_model=SimpleNamespace(ema=averaged))
    tuned = yolonas_training._tuned_weights(host, trainer)
    assert {n for n in before if not torch.equal(tuned[n], before[n])} == {name}
    assert torch.equal(tuned[name], before[name] + 2)


def test_refusals(base: Path, host: YoloNASHost, dataset: Dataset, tmp_path: Path) -> None:
    def refused(match: str, given: Dataset = dataset, device: str | None = None, **options: Any) -> None:
        with pytest.raises(HaloposeError, match=match):
            tune(base, given, tmp_path / "out.pt", tmp_path, replace(QUICK, **options), device=device)
        assert not (tmp_path / "out.pt").exists()

    refused("freeze 3", freeze=3)
    refused("several devices", device="0,1")
    refused("5 keypoints, the model 4", replace(dataset, layout=Keypoints.of(5)))
    other = replace(dataset.records[0], path=Path("image.jp2"))
    refused("jp2", replace(dataset, records=(other,)))
    weights = {name: value * float("nan") for name, value in host.model.state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(HaloposeError, match="diverged"):
        save_tuned(host, tmp_path / "weights.safetensors", 64, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_disk_that_refuses_is_a_one_line_error(
    base: Path, host: YoloNASHost, dataset: Dataset, tmp_path: Path, full_disk: Callable[[int | None], None]
) -> None:
    """No partial files remain, and a rerun continues when there is space."""
    work, output, weights = (tmp_path / name for name in ("work", "out.pt", "weights.safetensors"))

    def refused(match: str, action: Callable[..., None], *given: Any) -> None:
        with pytest.raises(HaloposeError, match=match) as error:
            action(*given)
        assert "\n" not in str(error.value)
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".") or path.suffix == ".partial"]

    tuning = tune, base, dataset, output, work, QUICK
    refused(r"cannot write .*labels.*\.txt: File too large", *tuning)
    full_disk(1_000_000)
    refused(r"cannot write .*state\.pt: File too large", *tuning)
    run = next(work.glob("tuning-*")) / "run"
    shutil.rmtree(run)
    run.write_text("in the way")
    refused("fine-tuning stopped: File exists .*run", *tuning)
    full_disk(None)
    save_file(host.model.state_dict(), weights)
    refused(r"cannot write .*out\.pt: File exists", save_tuned, host, weights, 64, run / "out.pt")
    full_disk(1_000_000)
    output.write_text("before")
    refused(r"cannot write .*out\.pt: File too large", save_tuned, host, weights, 64, output)
    assert output.read_text() == "before"


def test_settings_reach_the_trainer(host: YoloNASHost) -> None:
    given = replace(QUICK, imgsz=100, learning_rate=3e-5, warmup_epochs=1.5, batch=7, amp=True, mirror=False)
    overrides = yolonas_training._overrides(host, host.layout, Path("d.yaml"), Path("w"), given)
    config = YoloNASFineTuner(host.model, **overrides, device="cpu").config
    assert (config.imgsz, config.lr0, config.warmup_epochs, config.batch) == (128, 3e-5, 1.5, 7)
    assert (config.optimizer, config.amp_dtype, config.eval_interval) == ("adamw", "bfloat16", 0)
    assert (config.flip_prob, config.mosaic_prob, config.oks_sigmas) == (0, 0, [0.3] * KEYPOINTS)
