"""Training of the heads on a feature cache with the importance-weighted Gaussian NLL (paper, section 3.1).

The heads of the epoch with the lowest loss on held-out training images are kept. Every epoch writes a checkpoint.
An interrupted training that resumes from it gives exactly the same result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from halopose.data.splits import hashed_order
from halopose.data.tensors import check_seal, read_content, write_tensors
from halopose.errors import HaloposeError
from halopose.fitting.callbacks import Callback, Epoch
from halopose.fitting.feature_cache import CachedCells, MatchStore, among
from halopose.fitting.settings import TrainSettings
from halopose.fitting.workers import ProcessGroup
from halopose.parallel import run_parallel, single_threaded
from halopose.types import Array
from halopose.uncertainty.distributions import Gaussian, StudentT
from halopose.uncertainty.heads import ProbabilisticHeads

log = logging.getLogger(__name__)

PIECE = 256  # largest number of rows of a batch that a core processes at a time


@dataclass(frozen=True)
class TrainingHistory:
    """Losses of a training run.

    Attributes:
        train_loss: Mean loss of each epoch on training images.
        holdout_loss: Loss after each epoch on held-out images.
        best_epoch: Index of the epoch whose weights were kept.
    """

    train_loss: tuple[float, ...]
    holdout_loss: tuple[float, ...]
    best_epoch: int


def importance_weights(confidence: Tensor, area: Tensor, alpha: float, scale_weight: bool) -> Tensor:
    """Return weights w (N,) = c^alpha / s^2 (eq. 10), up to a factor.

    Args:
        confidence: Scores c of the cells (N,).
        area: Object areas s^2 (N,).
        alpha: Exponent of the confidence.
        scale_weight: Divide by the area.
    """
    weight = confidence.clamp_min(1e-6) ** alpha
    return weight / area.clamp_min(1.0) if scale_weight else weight


def weighted_nll(
    factors: Tensor, residual: Tensor, labelled: Tensor, weight: Tensor, dof: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the weighted NLL over labelled keypoints, and the sum of the weights (eq. 10).

    Args:
        factors: Cholesky factors (N, K, 2, 2).
        residual: Residuals (N, K, 2).
        labelled: Whether each keypoint is labelled (N, K).
        weight: Importance weights (N,).
        dof: Degrees of freedom of a Student-t; None: Gaussian.
    """
    distribution = Gaussian(factors) if dof is None else StudentT(factors, factors.new_full((factors.shape[1],), dof))
    nll = -distribution.log_prob(residual)
    mass = weight[:, None] * labelled
    return (mass * nll).sum(), mass.sum()


def train(
    heads: ProbabilisticHeads,
    stores: MatchStore | Sequence[MatchStore],
    settings: TrainSettings | None = None,
    *,
    images: Array | None = None,
    device: torch.device | str = "cpu",
    checkpoint: Path | str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    group: ProcessGroup | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingHistory:
    """Train heads in place and keep the weights of the best epoch.

    Several ranks use the same batches as a single process. Each processes the rows of its shards, and losses, weights
    and gradients are summed over the ranks. The result differs only by the order of floating-point sums.

    Args:
        heads: Heads to train.
        stores: One or several feature caches.
        settings: Settings of the training.
        images: Image ids to train on; default: all.
        device: Torch device.
        checkpoint: File to write after every epoch and to resume from.
        progress: Called with the finished epochs, all epochs and a message.
        group: Ranks of a distributed training.
        callbacks: Called after every epoch, on rank 0.

    Raises:
        HaloposeError: There are no assigned cells, the training diverges, or the checkpoint is damaged.
    """
    settings, group = settings or TrainSettings(), group or ProcessGroup()
    stores = [stores] if isinstance(stores, MatchStore) else list(stores)
    heads.to(device).train()
    wanted = None if images is None else np.sort(images)
    shards = [chosen for store in stores for shard in store.shards("assigned") if (chosen := _only(shard, wanted))]
    rows = sum(len(cells) for shard in shards for cells in shard)
    if not rows:
        raise HaloposeError(
            "the feature cache has no assigned cells: check that the training images have labelled objects"
        )
    held_out = _held_out_images(shards, settings.holdout)
    run = _TrainingRun.start(heads, settings, rows, stores, images, Path(checkpoint) if checkpoint else None, group)
    while not run.finished:
        began = time.monotonic()
        with single_threaded():
            steps = [run.step(batch) for batch in _batches(shards, held_out, settings, run.epoch, group)]
            losses = torch.stack(steps).tolist()
            held_out_loss = _holdout_loss(heads, shards, held_out, settings, device, group)
        run.end_epoch(float(np.mean(losses)), held_out_loss)
        losses_so_far = run.holdout_loss
        epoch = Epoch(
            run.epoch,
            settings.epochs,
            run.train_loss[-1],
            losses_so_far[-1],
            losses_so_far[-1] <= min(losses_so_far),
            time.monotonic() - began,
        )
        if progress:
            progress(run.epoch, settings.epochs, f"held-out loss {epoch.holdout_loss:.4f}")
        if group.first:
            log.info("%s", epoch)
            for callback in callbacks:
                callback.on_epoch(epoch)
    if not settings.last:
        heads.load_state_dict(run.best)
    heads.eval()
    kept = run.epoch - 1 if settings.last else int(np.argmin(run.holdout_loss))
    return TrainingHistory(tuple(run.train_loss), tuple(run.holdout_loss), kept)


def _only(shard: list[CachedCells], images: Array | None) -> list[CachedCells]:
    """Select a shard's rows of some images; levels whose rows are all selected stay memory-mapped.

    Args:
        shard: Cells by level.
        images: Sorted image ids; None: all rows.
    """
    if images is None:
        return shard
    wanted = torch.from_numpy(images)
    kept = [(cells, among(cells.columns["image_id"], wanted)) for cells in shard]
    return [
        cells if bool(mask.all()) else _take(cells, torch.nonzero(mask).flatten().numpy())
        for cells, mask in kept
        if bool(mask.any())
    ]


def _held_out_images(shards: list[list[CachedCells]], share: float) -> Tensor:
    """Choose the held-out images by a hash of their ids."""
    images = np.unique(np.concatenate([cells.columns["image_id"].numpy() for shard in shards for cells in shard]))
    if len(images) < 2:
        raise HaloposeError(
            "one training image is too few: give at least two, because early stopping needs a held-out image"
        )
    order = hashed_order(images)
    return torch.from_numpy(np.sort(order[: min(max(1, round(share * len(order))), len(order) - 1)]))


@dataclass(frozen=True)
class _Batch:
    """References to the rows of a batch, which are copied on use.

    Attributes:
        cells: Cells by level.
        level: Level of each row (N,).
        row: Index of each row in the cells of its level (N,).
    """

    cells: Mapping[int, CachedCells]
    level: Array
    row: Array

    def pieces(self, most: int) -> list[_Batch]:
        """Split into equal pieces; at least two, so that small batches use two cores.

        Args:
            most: Largest number of rows per piece.
        """
        count = max(2, math.ceil(len(self.row) / most))
        parts = zip(np.array_split(self.level, count), np.array_split(self.row, count), strict=True)
        return [_Batch(self.cells, level, row) for level, row in parts]

    def taken(self) -> Iterator[CachedCells]:
        """Yield copies of the rows, level by level."""
        for level in np.unique(self.level).tolist():
            yield _take(self.cells[level], self.row[self.level == level])

    def loss(self, heads: ProbabilisticHeads, settings: TrainSettings, device: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the weighted NLL and the sum of the weights."""
        total, mass = torch.zeros((), device=device), torch.zeros((), device=device)
        for cells in self.taken():
            columns = {name: value.to(device) for name, value in cells.columns.items()}
            factors = cells.factors(heads)
            weight = importance_weights(columns["confidence"], columns["area"], settings.alpha, settings.scale_weight)
            part, part_mass = weighted_nll(factors, columns["residual"], columns["labelled"], weight, settings.dof)
            total, mass = total + part, mass + part_mass
        return total, mass


def _batches(
    shards: list[list[CachedCells]], held_out: Tensor, settings: TrainSettings, epoch: int, group: ProcessGroup
) -> Iterator[_Batch]:
    """Yield shuffled batches of training rows; their order depends only on seed and epoch.

    Each batch contains only the rows of this rank's shards.
    """
    generator = np.random.default_rng([settings.seed, epoch])
    sizes = [sum(cells.nbytes for cells in shard) for shard in shards]
    pool: list[int] = []
    filled = 0
    for place, number in enumerate(generator.permutation(len(shards)).tolist()):
        pool.append(number)
        filled += sizes[number]
        last = place == len(shards) - 1
        if last or filled >= settings.pool_bytes:
            own = {number for number in pool if number % group.size == group.rank}
            pieces = [(cells, n in own) for n in sorted(pool) for cells in shards[n]]
            yield from _pool_batches(pieces, held_out, settings.batch, generator)
            pool, filled = [], 0


def _pool_batches(
    pieces: list[tuple[CachedCells, bool]], held_out: Tensor, size: int, generator: np.random.Generator
) -> Iterator[_Batch]:
    """Shuffle the rows of all ranks and yield batches of the rows of this rank.

    Args:
        pieces: Rows, and whether they belong to this rank.
        held_out: Sorted ids of held-out images, which are skipped.
        size: Rows per batch over all ranks.
        generator: Random generator.
    """
    levels = _by_level([cells for cells, own in pieces if own])
    table = _row_table(pieces, held_out)
    order = generator.permutation(table.shape[1])
    for begin in range(0, len(order), size):
        chosen = table[:, order[begin : begin + size]]
        level, row = chosen[:, chosen[1] >= 0]
        yield _Batch(levels, level, row)


def _row_table(pieces: list[tuple[CachedCells, bool]], held_out: Tensor) -> Array:
    """Return level and index (2, N) of the training rows.

    The index counts this rank's rows of the level. It is -1 for rows of other ranks.
    """
    columns: dict[int, list[Array]] = {}
    filled: dict[int, int] = {}
    for cells, own in pieces:
        begin = filled.get(cells.level, 0)
        place = np.arange(begin, begin + len(cells)) if own else np.full(len(cells), -1)
        filled[cells.level] = begin + len(cells) * own
        keep = ~among(cells.columns["image_id"], held_out).numpy()
        columns.setdefault(cells.level, []).append(place[keep])
    rows = {level: np.concatenate(parts) for level, parts in sorted(columns.items())}
    return np.stack([np.repeat(list(rows), [len(row) for row in rows.values()]), np.concatenate(list(rows.values()))])


def _by_level(pieces: list[CachedCells]) -> dict[int, CachedCells]:
    """Concatenate the rows of several shards by level."""
    found: dict[int, list[CachedCells]] = {}
    for cells in pieces:
        found.setdefault(cells.level, []).append(cells)
    return {
        level: CachedCells(
            level,
            torch.cat([cells.windows for cells in parts]),
            torch.cat([cells.inside for cells in parts]),
            {name: torch.cat([cells.columns[name] for cells in parts]) for name in parts[0].columns},
        )
        for level, parts in found.items()
    }


def _take(cells: CachedCells, index: Any) -> CachedCells:
    """Copy rows in ascending order."""
    rows = torch.from_numpy(np.sort(index))
    return CachedCells(
        cells.level,
        cells.windows[rows],
        cells.inside[rows],
        {name: value[rows] for name, value in cells.columns.items()},
    )


def _holdout_loss(
    heads: ProbabilisticHeads,
    shards: list[list[CachedCells]],
    held_out: Tensor,
    settings: TrainSettings,
    device: Any,
    group: ProcessGroup,
) -> float:
    """Return the loss on held-out images, over all ranks."""

    @torch.no_grad()
    def sums(shard: list[CachedCells]) -> tuple[float, float]:
        total = mass = 0.0
        for cells in shard:
            index = torch.nonzero(among(cells.columns["image_id"], held_out)).flatten().numpy()
            if len(index):
                rows = _Batch({cells.level: cells}, np.full(len(index), cells.level), index)
                part, part_mass = rows.loss(heads, settings, device)
                total, mass = total + float(part), mass + float(part_mass)
        return total, mass

    heads.eval()
    found = run_parallel([partial(sums, shard) for shard in shards[group.rank :: group.size]])
    heads.train()
    both = torch.tensor(found, dtype=torch.float64, device=device).reshape(-1, 2).sum(0)
    total, mass = group.total(both).tolist()
    return total / mass if mass else float("nan")


class _TrainingRun:
    """State of a training run: optimiser, learning-rate schedule, best weights and checkpoint."""

    def __init__(
        self, heads: ProbabilisticHeads, settings: TrainSettings, rows: int, path: Path | None, group: ProcessGroup
    ) -> None:
        self.heads, self.settings, self.path, self.group = heads, settings, path, group
        self.parameters = [p for p in heads.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.total_steps = max(1, settings.epochs * math.ceil(rows / settings.batch))
        self.steps = self.epoch = 0
        self.train_loss: list[float] = []
        self.holdout_loss: list[float] = []
        self.best: dict[str, Tensor] = {}
        self.key = ""

    @classmethod
    def start(
        cls,
        heads: ProbabilisticHeads,
        settings: TrainSettings,
        rows: int,
        stores: list[MatchStore],
        images: Array | None,
        path: Path | None,
        group: ProcessGroup,
    ) -> _TrainingRun:
        """Start a run, or resume from the checkpoint; the number of ranks may have changed."""
        run = cls(heads, settings, rows, path, group)
        collected = [store.digest() for store in stores]
        chosen = None if images is None else np.sort(images).tolist()
        key = json.dumps([asdict(settings), asdict(heads.settings), collected, chosen, rows])
        run.key = hashlib.sha256(key.encode()).hexdigest()
        if path is not None and path.is_file():
            run._resume(path)
        return run

    @property
    def finished(self) -> bool:
        """Whether the last epoch or early stopping has been reached."""
        if self.epoch >= self.settings.epochs:
            return True
        return self.epoch > 0 and self.epoch - 1 - int(np.argmin(self.holdout_loss)) >= self.settings.patience

    def step(self, batch: _Batch) -> Tensor:
        """Take one optimiser step and return the loss of the batch, which stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._schedule(self.steps)
        loss = self._backward(batch)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        self.steps += 1
        return loss

    def _backward(self, batch: _Batch) -> Tensor:
        """Compute the self-normalised loss (eq. 10) and the gradients of a batch over all ranks.

        On a CPU each core processes separate pieces of the batch, because windows are too small for parallel
        operators. The importance weights are constants, so the sums are divided at the end.
        """
        pieces = batch.pieces(PIECE) if self.parameters[0].device.type == "cpu" else [batch]
        parts = run_parallel([partial(self._gradients, piece) for piece in pieces])
        sums = self.group.total(torch.stack(parts).sum(0))
        sizes = [parameter.numel() for parameter in self.parameters]
        *gradients, used, total, mass = sums.split([*sizes, len(sizes), 1, 1])
        mass = mass.clamp_min(1e-12)
        for parameter, gradient, users in zip(self.parameters, gradients, used.tolist(), strict=True):
            # Unused parameters get no gradient instead of zero, so that the optimiser skips them.
            parameter.grad = (gradient / mass).view_as(parameter) if users else None
        return (total / mass)[0]

    def _gradients(self, piece: _Batch) -> Tensor:
        """Return one vector: gradients of all parameters, which parameters were used, sum of losses, of weights."""
        total, mass = piece.loss(self.heads, self.settings, self.parameters[0].device)
        found: Sequence[Tensor | None] = [None] * len(self.parameters)
        if total.requires_grad:  # false if the piece has no rows of this rank
            found = torch.autograd.grad(total, self.parameters, allow_unused=True)
        used = total.new_tensor([float(gradient is not None) for gradient in found])
        known = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, found, strict=True)
        ]
        return torch.cat([*(each.flatten() for each in known), used, total.detach()[None], mass[None]])

    def _schedule(self, step: int) -> float:
        """Return the factor of the learning rate: linear warm-up, then half a cosine."""
        warmup = max(1, round(self.settings.warmup * self.total_steps))
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, self.total_steps - warmup))))

    def end_epoch(self, train_loss: float, holdout_loss: float) -> None:
        """Record the losses, keep the best weights and write the checkpoint."""
        if not math.isfinite(train_loss) or not math.isfinite(holdout_loss):
            raise HaloposeError("training diverged (loss is not finite): check for labels far outside their images")
        self.train_loss.append(train_loss)
        self.holdout_loss.append(holdout_loss)
        if self.holdout_loss.index(min(self.holdout_loss)) == self.epoch:  # the first of equal losses
            self.best = {name: value.detach().clone() for name, value in self.heads.state_dict().items()}
        self.epoch += 1
        if self.path is not None and self.group.first:
            self._save(self.path)

    def _save(self, path: Path) -> None:
        tensors = {f"heads.{name}": value for name, value in self.heads.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for number, parameter in enumerate(self.parameters):
            state = self.optimizer.state[parameter]
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
        content = {
            "key": self.key,
            "epoch": self.epoch,
            "steps": self.steps,
            "train_loss": self.train_loss,
            "holdout_loss": self.holdout_loss,
        }
        try:
            write_tensors(path, tensors, content)
        except HaloposeError as error:
            raise HaloposeError(f"{error}: free disk space and run the command again to resume") from None

    def _resume(self, path: Path) -> None:
        try:
            content = read_content(path)
            check_seal(path)
            tensors = load_file(path)
        except (HaloposeError, SafetensorError):
            raise HaloposeError(f"{path} is damaged: remove it to start the training again") from None
        if not isinstance(content, dict) or content.get("key") != self.key:
            log.info("%s was written with other data or settings: training starts from the beginning", path)
            return
        self.heads.load_state_dict({n[6:]: v for n, v in tensors.items() if n.startswith("heads.")})
        device = self.parameters[0].device
        self.best = {n[5:]: v.to(device) for n, v in tensors.items() if n.startswith("best.")}
        for number, parameter in enumerate(self.parameters):
            prefix = f"optimizer.{number}."
            self.optimizer.state[parameter] = {
                name[len(prefix) :]: value.to(device) if not name.endswith("step") else value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
        self.epoch, self.steps = content["epoch"], content["steps"]
        self.train_loss, self.holdout_loss = content["train_loss"], content["holdout_loss"]
