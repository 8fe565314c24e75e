"""Round trips of real files of other tools: read, written in the tool's format, and read again.

    python -m research.tool_files FILE_OR_FOLDER ... --size 1280x720
    python -m research.tool_files labels.slp --oracle

Prints a line for each tool: files, poses, keypoints, and the largest difference after the round trip. SLEAP's own files
(HDF5) are written as SLEAP's csv. ``--oracle`` compares with sleap-io for ``.slp`` and with the csv file beside an h5
file of DeepLabCut. The files are not part of this repository; docs/evidence/other-tools.md says where they are from.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from halopose.cli.terminal import say
from halopose.data.formats.pose_table import PoseTable
from halopose.data.formats.reading import Format, parse_size, read_foreign, read_table, write_table
from halopose.errors import HaloposeError
from halopose.types import Array
from research.tables import markdown

SUFFIXES = {"deeplabcut": ".csv", "sleap": ".csv", "openpose": "", "mmpose": ".json", "mediapipe": ".json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--size", help="width and height of the images, for MediaPipe")
    parser.add_argument("--oracle", action="store_true", help="compare with another reader")
    given = parser.parse_args()
    figures: dict[str, list[Array]] = defaultdict(list)
    for path in given.paths:
        try:
            found = read_foreign(path, size=parse_size(given.size))
        except HaloposeError as error:
            say(str(error))
            continue
        assert found is not None, path
        table, kind = found
        known = ~table.missing
        other = against(path, table) if given.oracle else np.nan
        figures[kind].append(np.array([1, len(known), known.sum(), round_trip(table, kind), other]))
    rows = []
    for tool, lists in figures.items():
        values = np.array(lists)
        counts = [f"{count:.0f}" for count in values[:, :3].sum(0)]
        checked = values[np.isfinite(values[:, 4]), 4]
        oracle = f"{checked.max():.1e} px in {len(checked)} files" if len(checked) else ""
        rows.append([tool, *counts, f"{values[:, 3].max():.1e}", oracle])
    head = ["format", "files or folders", "poses", "keypoints", "largest difference", "to another reader"]
    say(markdown(head, rows))


def round_trip(table: PoseTable, kind: Format) -> float:
    """Largest difference of keypoints in pixels and of scores after writing and reading; infinite for other poses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"written{SUFFIXES[kind]}"
        write_table(table, path, kind)
        again = read_table(path, size=table.size)
    if again.keypoints.shape != table.keypoints.shape or (again.missing != table.missing).any():
        return float("inf")
    known = ~table.missing
    gaps = np.abs(again.keypoints[known] - table.keypoints[known]).max(), np.abs(again.scores - table.scores).max()
    return float(max(gaps))


def against(path: Path, table: PoseTable) -> float:
    """Largest difference in pixels to sleap-io, or to the csv file beside a file of DeepLabCut; NaN without either."""
    if path.suffix == ".slp":
        import sleap_io  # type: ignore[import-not-found]

        labels = sleap_io.load_slp(str(path), open_videos=False)
        predicted = any(frame.predicted_instances for frame in labels)
        kind = "predicted_instances" if predicted else "user_instances"
        places = np.concatenate([one.numpy() for frame in labels for one in getattr(frame, kind)])
        return _gap(places, table.keypoints.reshape(-1, 2))
    beside = path.with_suffix(".csv")
    if path.suffix != ".h5" or not beside.exists():
        return float("nan")
    return _gap(read_table(beside).keypoints.reshape(-1, 2), table.keypoints.reshape(-1, 2))


def _gap(a: Array, b: Array) -> float:
    """Largest difference of the points (N, 2) of two readers, in any order; infinite if their numbers differ."""
    a, b = (points[np.isfinite(points).all(1)] for points in (a, b))
    if a.shape != b.shape:
        return float("inf")
    a, b = (points[np.lexsort(np.round(points, 3).T)] for points in (a, b))
    return float(np.abs(a - b).max(initial=0.0))


if __name__ == "__main__":
    main()
