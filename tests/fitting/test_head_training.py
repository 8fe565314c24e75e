"""Training on synthetic stores whose truth is known, and resuming it after any interruption."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from scipy import stats

from halopose.errors import HaloposeError
from halopose.fitting import head_training
from halopose.fitting.collecting import _write_shard
from halopose.fitting.feature_cache import FORMAT, MatchStore
from halopose.fitting.head_training import importance_weights, train, weighted_nll
from halopose.fitting.pipeline import train_heads
from halopose.fitting.settings import FitSettings, TrainSettings
from halopose.fitting.workers import ProcessGroup
from halopose.keypoints import Keypoints
from halopose.uncertainty.heads import ConvTemplate, HeadSettings, ProbabilisticHeads
from tests.helpers.models import run_script
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")
STRIDES, CHANNELS, KEYPOINTS = (8, 16), 3, 2
SETTINGS = TrainSettings(
    epochs=10, batch=128, learning_rate=1e-2, alpha=0.0, scale_weight=False, holdout=0.1, patience=99
)


def true_factors(windows: torch.Tensor, stride: int) -> torch.Tensor:
    """The distribution of the residuals of a window, which depends on the window's centre."""
    value = windows[:, 0, 2, 2, None].double() * torch.tensor([1.0, 0.5]) + torch.tensor([0.0, -0.7])
    a, b, c = 0.5 * value, 0.3 * torch.ones_like(value), -0.3 * value
    rows = torch.stack([a.exp(), torch.zeros_like(a), b, c.exp()], -1)
    return stride * rows.unflatten(-1, (2, 2))


def write_store(
    folder: Path, shards: int = 4, rows: int = 150, seed: int = 0, images: Sequence[int] | None = None
) -> MatchStore:
    """A feature cache with ``shards`` x ``rows`` cells per level and eight images per shard."""
    generator = torch.Generator().manual_seed(seed)
    images = range(1, 8 * shards + 1) if images is None else images
    for number in range(shards):
        tensors: dict[str, torch.Tensor] = {}
        for level, stride in enumerate(STRIDES):
            windows = torch.randn((rows, CHANNELS, 5, 5), generator=generator).half()
            noise = torch.randn((rows, KEYPOINTS, 2, 1), generator=generator).double()
            mine = torch.tensor(list(images)[8 * number : 8 * number + 8])
            columns = {
                "windows": windows,
                "inside": torch.ones((rows, 5, 5), dtype=torch.uint8),
                "residual": (true_factors(windows, stride) @ noise)[..., 0].float(),
                "labelled": (torch.rand((rows, KEYPOINTS), generator=generator) < 0.8).to(torch.uint8),
                "confidence": torch.rand(rows, generator=generator),
                "area": torch.rand(rows, generator=generator) * 5000 + 100,
                "image_id": mine[torch.arange(rows) % len(mine)],
                "object": torch.zeros(rows, dtype=torch.long),
            }
            tensors |= {f"assigned.{level}.{name}": value for name, value in columns.items()}
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"skipped": [], "views": [[seed, number, rows]]}
        _write_shard(folder / f"shard-{number:05d}.safetensors", tensors, metadata)
    manifest = {
        "format": FORMAT,
        "base": ["synthetic"],
        "layout": Keypoints.of(KEYPOINTS).to_json(),
        "levels": len(STRIDES),
        "strides": list(STRIDES),
        "settings": {"imgsz": [64]},
        "images": list(images),
        "area": "box",
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return MatchStore(folder)


def new_heads(settings: HeadSettings | None = None) -> ProbabilisticHeads:
    generator = torch.Generator().manual_seed(1)
    template = [
        ConvTemplate(torch.randn((16, into, 3, 3), generator=generator) * 0.15, torch.zeros(16), "silu")
        for into in (CHANNELS, 16)
    ]
    torch.manual_seed(0)
    return ProbabilisticHeads([template, template], STRIDES, KEYPOINTS, settings)


def trained_bytes(store: MatchStore, settings: TrainSettings, checkpoint: Path | None = None, **options: Any) -> bytes:
    heads = new_heads()
    train(heads, store, settings, checkpoint=checkpoint, **options)
    return save({name: value.contiguous() for name, value in heads.state_dict().items()})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> MatchStore:
    return write_store(tmp_path_factory.mktemp("synthetic"))


# The loss --------------------------------------------------------------------------------------------------


def naive_nll(
    factors: torch.Tensor, residual: torch.Tensor, labelled: torch.Tensor, weight: torch.Tensor
) -> tuple[float, float]:
    total = mass = 0.0
    for n, k in itertools.product(range(len(weight)), range(labelled.shape[1])):
        if labelled[n, k]:
            covariance = factors[n, k].numpy() @ factors[n, k].numpy().T
            r = residual[n, k].numpy()
            log_det = math.log(np.linalg.det(2 * math.pi * covariance))
            nll = (r @ np.linalg.solve(covariance, r) + log_det) / 2
            total += float(weight[n] * nll)
            mass += float(weight[n])
    return total, mass


def sample(seed: int, count: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn((count, 3, 2, 2), generator=generator, dtype=torch.float64).tril()
    factors.diagonal(dim1=-2, dim2=-1).abs_().add_(0.1)
    residual = torch.randn((count, 3, 2), generator=generator, dtype=torch.float64) * 3
    labelled = (torch.rand((count, 3), generator=generator) < 0.6).to(torch.uint8)
    return factors, residual, labelled, torch.rand(count, generator=generator, dtype=torch.float64)


@given(st.integers(0, 10_000))
def test_weighted_nll_is_the_naive_loop(seed: int) -> None:
    total, mass = weighted_nll(*sample(seed))
    expected = naive_nll(*sample(seed))
    assert float(total) == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
    assert float(mass) == pytest.approx(expected[1], rel=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([2.5, 4.0, 12.0]))
def test_a_loss_with_tails_is_that_of_scipys_student(seed: int, dof: float) -> None:
    factors, residual, labelled, weight = sample(seed)
    total, mass = weighted_nll(factors, residual, labelled, weight, dof)
    distributions = (
        (weight[n], stats.multivariate_t(shape=factors[n, k] @ factors[n, k].T, df=dof).logpdf(residual[n, k]))
        for n, k in torch.nonzero(labelled).tolist()
    )
    assert float(total) == pytest.approx(
        -sum(float(each * density) for each, density in distributions), rel=1e-9, abs=1e-9
    )
    assert float(mass) == float(weighted_nll(factors, residual, labelled, weight)[1])


@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
def test_scaling_all_weights_changes_nothing(seed: int, scale: float) -> None:
    factors, residual, labelled, weight = sample(seed)
    total, mass = weighted_nll(factors, residual, labelled, weight)
    scaled, scaled_mass = weighted_nll(factors, residual, labelled, weight * scale)
    assert float(scaled / scaled_mass) == pytest.approx(float(total / mass), rel=1e-9, abs=1e-9)


def test_importance_weights() -> None:
    confidence, area = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([100.0, 0.0, 4.0])
    assert importance_weights(confidence, area, 0.0, False).tolist() == [1, 1, 1]
    assert importance_weights(confidence, area, 1.0, False)[:2].tolist() == [0.5, 0.25]
    assert importance_weights(confidence, area, 2.0, True)[0].item() == pytest.approx(0.25 / 100)
    assert importance_weights(confidence, area, 0.0, True).tolist() == pytest.approx([0.01, 1, 0.25])
    assert torch.isfinite(importance_weights(confidence, area, -1.0, True)).all()


def test_unlabelled_keypoints_do_not_count() -> None:
    factors, residual, labelled, weight = sample(3)
    residual.requires_grad_()
    weighted_nll(factors, residual, labelled, weight)[0].backward()
    assert not present(residual.grad)[labelled == 0].any()
    assert present(residual.grad)[labelled == 1].any(1).all()


# Learning --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "bias"), [({}, 0.05), ({"alpha": 1.0, "scale_weight": True}, 0.12)])
def test_known_dispersion_is_recovered(tmp_path: Path, options: dict[str, Any], bias: float) -> None:
    store = write_store(tmp_path, shards=4, rows=2000)
    heads = new_heads()
    trained = train(heads, store, replace(SETTINGS, epochs=14, batch=256, **options))
    assert trained.train_loss[-1] < trained.train_loss[0] - 0.1
    assert min(trained.holdout_loss) < trained.holdout_loss[0]
    windows = torch.randn((2000, CHANNELS, 5, 5), generator=torch.Generator().manual_seed(99))
    for level, stride in enumerate(STRIDES):
        with torch.no_grad():
            found = heads.at_windows(level, windows, torch.ones(2000, 5, 5)).double()
        found, expected = found @ found.mT, true_factors(windows, stride) @ true_factors(windows, stride).mT
        for axis in range(2):
            error = (found[..., axis, axis] / expected[..., axis, axis]).sqrt() - 1
            assert error.abs().mean() < 0.15
            assert error.mean().abs() < bias  # nor is it off on the whole
        correlation = [c[..., 0, 1] / (c[..., 0, 0] * c[..., 1, 1]).sqrt() for c in (found, expected)]
        assert (correlation[0] - correlation[1]).abs().mean() < 0.1


def test_the_best_epoch_is_kept_and_patience_ends_it(store: MatchStore) -> None:
    heads = new_heads()
    trained = train(heads, store, replace(SETTINGS, epochs=40, patience=2, learning_rate=0.05))
    assert trained.best_epoch == int(np.argmin(trained.holdout_loss))
    assert len(trained.holdout_loss) < 40
    assert len(trained.holdout_loss) - 1 - trained.best_epoch == 2
    again = new_heads()
    until_best = replace(SETTINGS, epochs=40, patience=2, learning_rate=0.05)
    losses: list[float] = []
    train(again, store, until_best, progress=lambda done, total, note: losses.append(done))
    assert losses == list(range(1, len(trained.holdout_loss) + 1))
    for one, other in zip(heads.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_seed_decides_everything(store: MatchStore) -> None:
    assert trained_bytes(store, SETTINGS) == trained_bytes(store, SETTINGS)
    assert trained_bytes(store, SETTINGS) != trained_bytes(store, replace(SETTINGS, seed=1))


def test_last_layer_trunk_never_changes(store: MatchStore) -> None:
    heads = new_heads(HeadSettings(trunk="last-layer"))
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    train(heads, store, replace(SETTINGS, epochs=2))
    for name, value in heads.state_dict().items():
        assert torch.equal(value, before[name]) is ("trunk" in name), name


@pytest.mark.parametrize("pool_bytes", [1, 100_000, 2**31])
def test_any_pool_learns(store: MatchStore, pool_bytes: int) -> None:
    trained = train(new_heads(), store, replace(SETTINGS, epochs=4, pool_bytes=pool_bytes))
    assert trained.holdout_loss[-1] < trained.holdout_loss[0]


def test_every_row_is_used_once_an_epoch(store: MatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from halopose.fitting import head_training

    shards = list(store.shards("assigned"))
    held_out = head_training._held_out_images(shards, 0.1)
    for pool_bytes in (1, 2**31):
        settings = replace(SETTINGS, pool_bytes=pool_bytes)
        batches = list(head_training._batches(shards, held_out, settings, 0, ProcessGroup()))
        seen = torch.cat([cells.columns["confidence"] for batch in batches for cells in batch.taken()])
        everything = [cells for shard in shards for cells in shard]
        wanted = [c.columns["confidence"][~torch.isin(c.columns["image_id"], held_out)] for c in everything]
        assert torch.equal(seen.sort().values, torch.cat(wanted).sort().values)
        assert 0 < len(held_out) < 32


def test_threads_change_nothing_and_pieces_the_order_of_sums(
    store: MatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:

    def learnt(threads: int, piece: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(head_training, "PIECE", piece)
        before, heads = torch.get_num_threads(), new_heads()
        torch.set_num_threads(threads)
        try:
            train(heads, store, replace(SETTINGS, epochs=3))
        finally:
            torch.set_num_threads(before)
        return heads.state_dict()

    alone, together, whole = learnt(1, 7), learnt(3, 7), learnt(1, 10_000)
    for name, value in alone.items():
        assert torch.equal(value, together[name]), name
        assert torch.allclose(value, whole[name], atol=1e-5), name


# Interruptions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_interrupted_training_ends_the_same(store: MatchStore, tmp_path: Path, seed: int) -> None:
    whole = trained_bytes(store, SETTINGS, tmp_path / "whole.safetensors")
    assert whole == trained_bytes(store, SETTINGS)
    path = tmp_path / "interrupted.safetensors"
    for epoch in sorted(random.Random(seed).sample(range(1, 10), 3)):

        def interrupt(done: int, total: int, note: Any, epoch: int = epoch) -> None:
            if done == epoch:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            trained_bytes(store, SETTINGS, path, progress=interrupt)
    assert trained_bytes(store, SETTINGS, path) == whole
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert trained_bytes(store, SETTINGS, path) == whole  # finished: nothing left to do


KILLED = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.helpers.models import survive_kills
from tests.fitting.test_head_training import SETTINGS, MatchStore, trained_bytes
root, store = Path(sys.argv[1]), MatchStore(sys.argv[2])
settings, log = replace(SETTINGS, epochs=24), root / "log"
log.touch()
def work():
    def note(*_):
        with log.open("a") as stream:
            stream.write(".")
    (root / "killed").write_bytes(trained_bytes(store, settings, root / "killed.safetensors", progress=note))
(root / "whole").write_bytes(trained_bytes(store, settings, root / "whole.safetensors"))
survive_kills(work, lambda: log.stat().st_size, [0, 1, 4, 7, 11, 14])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_training_ends_the_same(store: MatchStore, tmp_path: Path) -> None:
    reached = json.loads(run_script(KILLED, tmp_path, store.folder))
    assert len(reached) == 6
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert (tmp_path / "killed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_a_checkpoint_that_cannot_be_written_is_a_one_line_error(store: MatchStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HaloposeError, match="cannot write"):
        trained_bytes(store, replace(SETTINGS, epochs=1), tmp_path / "file" / "checkpoint.safetensors")


def test_a_checkpoint_of_another_training_is_left_behind(
    store: MatchStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other settings, heads, images or data: training starts anew, says so, and ends as without a checkpoint."""
    caplog.set_level("INFO", "halopose")
    settings = replace(SETTINGS, epochs=1)
    others = [replace(settings, seed=1), replace(settings, alpha=0.5)]
    for number, other in enumerate(others):
        path = tmp_path / f"{number}.safetensors"
        trained_bytes(store, settings, path)
        assert trained_bytes(store, other, path) == trained_bytes(store, other)
        assert "other data" in caplog.text
    path = tmp_path / "images.safetensors"
    trained_bytes(store, settings, path)
    some = np.array(store.manifest["images"][::2])
    assert trained_bytes(store, settings, path, images=some) == trained_bytes(store, settings, images=some)
    path = tmp_path / "data.safetensors"
    trained_bytes(store, settings, path)
    changed = write_store(tmp_path / "changed", seed=1)
    assert trained_bytes(changed, settings, path) == trained_bytes(changed, settings)


@pytest.mark.parametrize("size", [0, 500])
def test_a_damaged_checkpoint_is_a_one_line_error(store: MatchStore, tmp_path: Path, size: int) -> None:
    path = tmp_path / "checkpoint.safetensors"
    trained_bytes(store, replace(SETTINGS, epochs=1), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(HaloposeError, match="checkpoint") as error:
        trained_bytes(store, replace(SETTINGS, epochs=1), path)
    assert "\n" not in str(error.value)


# Refusals --------------------------------------------------------------------------------------------------


def test_a_store_without_cells_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path)
    for path in tmp_path.glob("shard*"):
        _write_shard(path, {"views.image_id": torch.tensor([1])}, {"skipped": [], "views": []})
    with pytest.raises(HaloposeError, match="no assigned cells"):
        train(new_heads(), store, SETTINGS)


def test_divergence_is_a_one_line_error(store: MatchStore) -> None:
    with pytest.raises(HaloposeError, match="diverged") as error:
        train(new_heads(), store, replace(SETTINGS, learning_rate=1e38))
    assert "\n" not in str(error.value)


def test_a_single_image_is_refused(tmp_path: Path) -> None:
    """Not "lower the learning rate": there is nothing to train on beside what is held out."""
    store = write_store(tmp_path, shards=1, images=[7])
    with pytest.raises(HaloposeError, match="image") as error:
        train(new_heads(), store, replace(SETTINGS, epochs=3))
    assert "learning rate" not in str(error.value)


def test_pipeline_trains_on_every_store_and_only_on_given_images(tmp_path: Path) -> None:
    stores = [write_store(tmp_path / "a"), write_store(tmp_path / "b", seed=1, images=range(101, 133))]
    host: Any = SimpleNamespace(
        pose_templates=lambda: [
            [ConvTemplate(torch.zeros(4, CHANNELS, 5, 5), torch.zeros(4), "silu")] for _ in STRIDES
        ],
        strides=STRIDES,
        keypoint_count=KEYPOINTS,
        device=torch.device("cpu"),
        fingerprints=("synthetic",),
    )
    settings = FitSettings(train=replace(SETTINGS, epochs=2), head=HeadSettings(warm_start=False))
    both, first, second = (train_heads(host, part, settings)[1] for part in (stores, stores[:1], stores[1:]))
    assert both.train_loss != first.train_loss
    assert both.train_loss != second.train_loss
    chosen = train_heads(host, stores, settings, images=np.arange(101, 133))[1]
    assert chosen.train_loss == second.train_loss


# Process groups ---------------------------------------------------------------------------------------------


def train_group(folder: Path, name: str, size: int, stop: int = -1) -> list[int]:
    """Train in forked processes with the environment of torchrun; return their exit statuses.

    The last one kills itself after `stop` epochs, if `stop` is given.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ |= {**address, "RANK": str(rank)}
            ended = 1
            try:
                train_in_group(folder, name, stop)
                ended = 0
            finally:
                os._exit(ended)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def train_in_group(folder: Path, name: str, stop: int) -> None:
    group = ProcessGroup.joined()

    def progress(epoch: int, epochs: int, text: str) -> None:
        if epoch == stop and group.rank == group.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    heads = new_heads()
    settings = replace(SETTINGS, epochs=3, alpha=1.0, scale_weight=True)
    checkpoint = folder / f"{name}.training"
    train(heads, MatchStore(folder / "store"), settings, checkpoint=checkpoint, progress=progress, group=group)
    if group.first:
        (folder / name).write_bytes(save({key: value.contiguous() for key, value in heads.state_dict().items()}))


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the ranks")
def test_a_process_group_trains_the_heads_of_one_process(tmp_path: Path) -> None:
    """Within 1e-5: each batch's sums are the same numbers in another order. A kill changes nothing at all."""
    write_store(tmp_path / "store", shards=5, rows=60)
    for name, size in (("one", 1), ("two", 2), ("three", 3)):
        assert train_group(tmp_path, name, size) == [0] * size
    one, two, three = (load_file(tmp_path / name) for name in ("one", "two", "three"))
    for others in (two, three):
        assert max(float((one[name] - others[name]).abs().max()) for name in one) < 1e-5
    assert any((one[name] != new_heads().state_dict()[name]).any() for name in one)
    assert train_group(tmp_path, "killed", 2, stop=2) == [256, signal.SIGKILL]  # the other one cannot go on alone
    assert not (tmp_path / "killed").exists()
    assert train_group(tmp_path, "killed", 2) == [0, 0]
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "two").read_bytes()
