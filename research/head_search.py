"""Search settings of the shipped heads: change one at a time and score the change on the selection images.

    python -m research.head_search --data pose.yaml --extra extra.yaml --many many.yaml --work work/ -o s.md

Heads train on ``IMAGES`` photographs at 640 pixels unless a row says otherwise. They are scored on the selection
images of ``shipped_data`` with calibrations cross-fitted over five folds; the evaluation images are not used. Every
row is compared with the first by the same bootstrap resamples of images. A rerun keeps finished rows. A chart shows
skill over the number of photographs, extrapolated to all of train2017.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from halopose.calibration.calibrate import DistributionSet, cross_fitted
from halopose.cli.terminal import progress, say
from halopose.data.files import read_json, write_json, write_text
from halopose.data.splits import hashed_order
from halopose.evaluation import metrics
from halopose.evaluation.bootstrap import resample_images
from halopose.evaluation.resampling import ResampledMetrics
from halopose.fitting.feature_cache import MatchStore
from halopose.fitting.head_training import train
from halopose.fitting.pipeline import predictions_of
from halopose.fitting.settings import TrainSettings
from halopose.hosts.base import Host
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import find_base
from halopose.matching.matched_poses import MatchedPoses, match_poses
from halopose.protocol import Protocol
from halopose.types import Array
from halopose.uncertainty.heads import ConvTemplate, HeadSettings, ProbabilisticHeads
from research.figures import learning_figure
from research.shipped_data import PARTS, Part, Splits, arguments, collect_part, collect_val, load_splits
from research.shipped_heads import SETTINGS

IMAGES = 4000
FIRST = "both context features"
DRAWS = 300
SCORES = ("skill", "ace", "ence", "nll")
PLAIN = HeadSettings()
BOTH = HeadSettings(overlaps=True, features=True)
WHOLE = 56_599  # images of train2017 with labelled keypoints
STEADY = 2000  # photographs above which the gain per doubling is assumed constant
MIRRORED = Part("extra", 640, 0.5, mirrored=True)
SHORT = replace(SETTINGS.train, epochs=5, patience=5, dof=None)


@dataclass(frozen=True)
class Row:
    """One trained variant: settings, number of photographs, further parts, averaged checkpoints."""

    name: str
    train: TrainSettings = SHORT
    head: HeadSettings = BOTH
    images: int = IMAGES
    parts: tuple[str, ...] = field(default=())
    trunk: float = 1.0
    averaged: int = 1


def rows() -> list[Row]:
    return [
        Row(FIRST),
        Row("another seed", replace(SHORT, seed=1)),
        Row("the window alone (the paper's head)", head=PLAIN),
        *(Row(f"{count:,} photographs", images=count) for count in (500, 1000, 2000)),
        Row("all 11,088 photographs", images=20_000),
        Row("with half of them at 448 too", parts=("extra-448",)),
        Row("with the disagreement of claims alone", head=HeadSettings(overlaps=True)),
        Row("with features at the keypoints alone", head=HeadSettings(features=True)),
        Row("the window alone, all photographs", head=PLAIN, images=20_000),
        Row("network 128 wide", head=replace(BOTH, width=128)),
        Row("learning rate 3e-4", replace(SHORT, learning_rate=3e-4)),
        Row("alpha 0", replace(SHORT, alpha=0.0)),
        Row("with scale weights", replace(SHORT, scale_weight=True)),
        Row("with train_small at 320", parts=("train_small-320",)),
        Row("10 epochs", replace(SHORT, epochs=10, patience=10)),
        Row("last 3 checkpoints averaged", averaged=3),
        Row("no warm start", head=replace(BOTH, warm_start=False)),
        Row("alpha 2", replace(SHORT, alpha=2.0)),
        Row("trunk twice as wide", trunk=2.0),
        Row("diagonal dispersion", head=replace(BOTH, parameterisation="diagonal")),
        Row("with half of them mirrored too", parts=(MIRRORED.name,)),
        *(Row(f"loss of a Student-t, nu {nu:g}", replace(SHORT, dof=nu)) for nu in (4.0, 12.0)),
        Row("with many more small images at 320", parts=("many-320",)),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="rows with these words in their names, beside the first")
    given = parser.parse_args()
    host, splits = load_host(find_base()), load_splits(given.data, given.extra, given.many)
    with progress() as step:
        val = collect_val(host, splits, given.work, step)
    known = {part.name: part for part in (*PARTS, MIRRORED)}
    draws: dict[str, dict[str, list[float]]] = {}
    for row in rows():
        if row.name != FIRST and given.only not in row.name:
            continue
        path = given.work / "search" / f"{slug(row.name)}.json"
        found = finished(path, row)
        if found is None:
            names = ("train-640", "extra-640", *row.parts)
            stores = [collect_part(host, splits, known[name], given.work) for name in names]
            found = score(heads_of(host, row, stores, splits), val, splits.choosing)
            write_json(path, {"row": read_back(row), "draws": found})
        draws[row.name] = found
        say(line(row.name, found, draws[FIRST]))
        write_text(given.output, table(draws))
    if given.only:
        return
    large = sum(len(splits.heads[name].image_ids) for name in ("train", "extra"))
    curve = {min(row.images, large): draws[row.name]["skill"] for row in rows() if row == amount(row)}
    say(learnt(curve, given.output.with_name("learning.png")))
    say(f"-> {given.output}")


def amount(row: Row) -> Row:
    """The first row with another number of photographs."""
    return replace(rows()[0], name=row.name, images=row.images)


def learnt(curve: dict[int, list[float]], path: Path) -> str:
    """Gain from doubling the photographs, measured and extrapolated to train2017; draws a chart.

    curve: skill and its bootstrap draws by number of photographs. Intervals cover images, not random seeds.
    """
    counts = np.array(sorted(curve))
    skill = np.array([curve[int(count)] for count in counts])
    steady = counts >= STEADY
    slope, level = np.polyfit(np.log2(counts[steady] / WHOLE), skill[steady], 1)
    margin = 1.96 * np.std([slope[1:], level[1:]], axis=1, ddof=1)
    learning_figure(counts, skill, (float(slope[0]), float(level[0]), float(margin[1])), WHOLE, path)
    return (
        f"skill rises by {slope[0]:.3f} ± {margin[0]:.3f} with every doubling from {STEADY:,} photographs on: "
        f"{level[0]:.3f} ± {margin[1]:.3f} with {WHOLE:,}"
    )


def heads_of(host: Host, row: Row, stores: list[MatchStore], splits: Splits) -> ProbabilisticHeads:
    """Trained heads of a row, averaged over the last checkpoints if the row asks for it."""
    torch.manual_seed(row.train.seed)
    templates = [widened(template, row.trunk) for template in host.pose_templates()]
    heads = ProbabilisticHeads(templates, host.strides, host.keypoint_count, row.head)
    checkpoints: list[dict[str, torch.Tensor]] = []

    def keep(done: int, total: int, note: str) -> None:
        checkpoints.append({name: value.detach().clone() for name, value in heads.state_dict().items()})

    train(heads, stores, row.train, images=images_of(splits, row), device=host.device, progress=keep)
    if row.averaged > 1:
        last = checkpoints[-row.averaged :]
        heads.load_state_dict({name: torch.stack([c[name] for c in last]).mean(0) for name in last[0]})
    return heads.eval()


def images_of(splits: Splits, row: Row) -> Array:
    """A number of photographs, nested for increasing numbers, and all small ones."""
    large = np.concatenate([splits.heads["train"].image_ids, splits.heads["extra"].image_ids])
    small = [splits.heads[name].image_ids for name in ("train_small", "many") if name in splits.heads]
    return np.concatenate([hashed_order(large)[: row.images], *small])


def widened(template: list[ConvTemplate], factor: float) -> list[ConvTemplate]:
    """The template with more channels: first those of the pose head, then random ones."""
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


def score(heads: ProbabilisticHeads, store: MatchStore, images: Array) -> dict[str, list[float]]:
    """``score_matched`` of heads on some images, cross-fitted."""
    protocol = SETTINGS.protocol
    matched = match_poses(predictions_of(heads, store, images), store.ground_truth(images), protocol)
    return score_matched(matched, cross_fitted(matched, protocol), protocol)


def score_matched(
    matched: MatchedPoses, distributions: DistributionSet, protocol: Protocol, draws: int = DRAWS
) -> dict[str, list[float]]:
    """Each score and its bootstrap draws: skill, Student-t ACE, Gaussian ENCE, Student-t NLL."""
    edges = np.asarray(protocol.scale_edges)
    measured = ResampledMetrics.of(matched, distributions, protocol, edges)
    gaussian, student = measured.statistics["gaussian"], measured.statistics["student_t"]
    count = measured.image_count
    found: dict[str, list[float]] = {name: [] for name in SCORES}
    for number, drawn in enumerate([np.arange(count), *resample_images(count, draws)]):
        weight = np.bincount(drawn, minlength=count)[measured.image]
        g, t = gaussian.resampled(weight), student.resampled(weight)
        chance = metrics.random_keypoint_precision(measured.similarity, weight, rounds=1, seed=number)
        values = (metrics.skill(g["akp"], chance), t["ace"], g["ence"], t["nll"])
        for name, value in zip(SCORES, values, strict=True):
            found[name].append(value)
    return found


def slug(name: str) -> str:
    """A name as a file name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def finished(path: Path, row: Row) -> dict[str, list[float]] | None:
    if not path.is_file():
        return None
    content = read_json(path)
    return content["draws"] if content["row"] == read_back(row) else None


def read_back(row: Row) -> dict[str, object]:
    """The row after a round trip through JSON."""
    return {**asdict(row), "parts": list(row.parts)}


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
    return head + "".join(line(name, each, draws[FIRST]) + "\n" for name, each in draws.items())


if __name__ == "__main__":
    main()
