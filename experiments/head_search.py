"""What helps the heads that ship: one change at a time, judged on images set aside from the heads' own part.

    python -m experiments.head_search --data coco-pose/data.yaml --work work/ -o search.md

A third of the val images that belong to the heads is left out of training here and scores every row, with
calibrations cross-fitted over five folds of it; calibration and evaluation images of the shipped heads are never
touched. Rows are compared with the first by the same bootstrap resamples of images. A rerun keeps finished rows.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from experiments.shipped_heads import SETTINGS, collect_heads, load_splits
from halopose.cli.terminal import progress, say
from halopose.data.files import read_json, write_json, write_text
from halopose.data.splits import hashed_order
from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import resamplings
from halopose.evaluation.calibrations import cross_fitted
from halopose.evaluation.measured import Measured
from halopose.evaluation.protocol import Protocol
from halopose.evaluation.true_positives import match_poses
from halopose.fitting.pipeline import collect_validation, predictions_of
from halopose.fitting.store import MatchStore
from halopose.fitting.training import TrainSettings, train
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.shipped import find_base
from halopose.types import Array
from halopose.uncertainty.heads import ConvTemplate, HeadSettings, ProbabilisticHeads

PROTOCOL = Protocol(area="box")
DRAWS = 300
SCORES = ("skill", "ace", "ence", "nll")


@dataclass(frozen=True)
class Row:
    """One trained variant: its settings, its stores, factor of the head's width, checkpoints averaged."""

    name: str
    train: TrainSettings = SETTINGS.train
    head: HeadSettings = field(default_factory=HeadSettings)
    stores: tuple[str, ...] = ("train", "train_small", "val")
    width: float = 1.0
    averaged: int = 1


def rows() -> list[Row]:
    base = SETTINGS.train
    return [
        Row("without mirrored copies"),
        Row("another seed", replace(base, seed=1)),
        Row("as shipped: with mirrored copies", stores=("train", "train_small", "val", "mirrored")),
        Row("diagonal dispersion", head=HeadSettings(parameterisation="diagonal")),
        Row("isotropic dispersion", head=HeadSettings(parameterisation="isotropic")),
        Row("last 3 checkpoints averaged", averaged=3),
        Row("learning rate 1e-4", replace(base, learning_rate=1e-4)),
        Row("learning rate 1e-3", replace(base, learning_rate=1e-3)),
        Row("20 epochs", replace(base, epochs=20, patience=20)),
        Row("alpha 0", replace(base, alpha=0.0)),
        Row("alpha 2", replace(base, alpha=2.0)),
        Row("with scale weights", replace(base, scale_weight=True)),
        Row("no warm start", head=HeadSettings(warm_start=False)),
        Row("without train_small (256 px images)", stores=("train", "val")),
        Row("heads twice as wide", width=2.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="the folder of experiments.shipped_heads will do")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    host = load_host(find_base())
    splits = load_splits(arguments.data)
    order = hashed_order(splits.heads["val"].image_ids)
    scored = np.sort(order[: len(order) // 3])
    trained_on = np.concatenate(
        [np.setdiff1d(part.image_ids, scored) for part in splits.heads.values()], dtype=np.int64
    )
    with progress() as step:
        stores = collect_heads(host, splits, arguments.work, step)
        judge = splits.heads["val"].subset(scored)
        judge_store = collect_validation(host, judge, arguments.work / "search", SETTINGS, step)
    draws: dict[str, dict[str, list[float]]] = {}
    for row in rows():
        path = arguments.work / "search-rows" / f"{row.name.replace(' ', '-')}.json"
        found = finished(path, row)
        if found is None:
            found = score(heads_of(host, row, stores, trained_on), judge_store)
            write_json(path, {"row": read_back(row), "draws": found})
        draws[row.name] = found
        say(line(row.name, draws[row.name], draws["without mirrored copies"]))
        write_text(arguments.output, table(draws))
    say(f"-> {arguments.output}")


def heads_of(host: Host, row: Row, stores: dict[str, MatchStore], images: Array) -> ProbabilisticHeads:
    """Trained heads of a row; the mean of the last checkpoints if it says so."""
    torch.manual_seed(row.train.seed)
    templates = [widened(template, row.width) for template in host.pose_templates()]
    heads = ProbabilisticHeads(templates, host.strides, host.keypoint_count, row.head)
    checkpoints: list[dict[str, torch.Tensor]] = []

    def keep(done: int, total: int, note: str) -> None:
        checkpoints.append({name: value.detach().clone() for name, value in heads.state_dict().items()})

    train(
        heads, [stores[name] for name in row.stores], row.train, images=images, device=host.device, progress=keep
    )
    if row.averaged > 1:
        last = checkpoints[-row.averaged :]
        heads.load_state_dict({name: torch.stack([c[name] for c in last]).mean(0) for name in last[0]})
    return heads.eval()


def widened(template: list[ConvTemplate], factor: float) -> list[ConvTemplate]:
    """The template with more channels: the pose head's own first, random ones after."""
    result, inputs = [], int(template[0].weight.shape[1])
    for conv in template:
        out, old, kernel, _ = conv.weight.shape
        wide = round(out * factor)
        fresh = torch.nn.Conv2d(inputs, wide, kernel)
        weight, bias = fresh.weight.detach().clone(), torch.zeros(wide)
        weight[:out, :old], bias[:out] = conv.weight, conv.bias
        weight[:out, old:] = 0
        result.append(ConvTemplate(weight, bias, conv.activation))
        inputs = wide
    return result


def score(heads: ProbabilisticHeads, store: MatchStore) -> dict[str, list[float]]:
    """Each score and its bootstrap draws: skill, Student-t ACE, Gaussian ENCE, Student-t NLL."""
    matched = match_poses(predictions_of(heads, store), store.ground_truth(), PROTOCOL)
    edges = np.asarray(PROTOCOL.scale_edges)
    measured = Measured.of(matched, cross_fitted(matched, PROTOCOL), PROTOCOL, edges)
    gaussian, student = measured.statistics["gaussian"], measured.statistics["student_t"]
    count = measured.image_count
    found: dict[str, list[float]] = {name: [] for name in SCORES}
    for number, images in enumerate([np.arange(count), *resamplings(count, DRAWS)]):
        weight = np.bincount(images, minlength=count)[measured.image]
        g, t = gaussian.resampled(weight), student.resampled(weight)
        chance = metrics.random_keypoint_precision(measured.similarity, weight, rounds=1, seed=number)
        values = (metrics.skill(g["akp"], chance), t["ace"], g["ence"], t["nll"])
        for name, value in zip(SCORES, values, strict=True):
            found[name].append(value)
    return found


def finished(path: Path, row: Row) -> dict[str, list[float]] | None:
    if not path.is_file():
        return None
    content = read_json(path)
    return content["draws"] if content["row"] == read_back(row) else None


def read_back(row: Row) -> dict[str, object]:
    """The row as json gives it back."""
    return {**asdict(row), "stores": list(row.stores)}


def line(name: str, draws: dict[str, list[float]], base: dict[str, list[float]]) -> str:
    """A row of the table: each score, and its paired difference to the first row with its 95 % interval."""
    cells = []
    for score in SCORES:
        value, difference = draws[score][0], np.array(draws[score]) - np.array(base[score])
        margin = 1.96 * difference[1:].std(ddof=1)
        cells += [f"{value:.3f}", "" if draws is base else f"{difference[0]:+.3f} ± {margin:.3f}"]
    return f"| {name} | " + " | ".join(cells) + " |"


def table(draws: dict[str, dict[str, list[float]]]) -> str:
    head = "| | skill | Δ | ACE, Student-t | Δ | ENCE, Gaussian | Δ | NLL, Student-t | Δ |\n" + "|---" * 9 + "|\n"
    return head + "".join(
        line(name, each, draws["without mirrored copies"]) + "\n" for name, each in draws.items()
    )


if __name__ == "__main__":
    main()
