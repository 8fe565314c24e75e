"""Check whether the covariances in a prediction file are calibrated.

python examples/score_a_file.py                                # on synthetic data with known truth
python examples/score_a_file.py predictions.json truth.json    # on your files, see docs/reference/files.md

`halopose score predictions.json truth.json -o report/` does the same and writes a report with charts.
"""

import json
import sys
from pathlib import Path
from tempfile import mkdtemp

from halopose import Protocol, evaluate
from halopose.data.coco import read_ground_truth, read_predictions
from halopose.data.synthetic_poses import World, synthesize
from halopose.matching.matched_poses import match_poses

if len(sys.argv) > 2:
    predictions, truth = map(Path, sys.argv[1:3])
else:  # the errors are 1.5 times as large as stated, with heavy tails
    folder = Path(mkdtemp())
    predictions, truth = folder / "predictions.json", folder / "truth.json"
    for path, content in zip((truth, predictions), synthesize(World(dof=4, overconfidence=1.5)), strict=True):
        path.write_text(json.dumps(content), encoding="utf-8")

objects = read_ground_truth(truth)
matched = match_poses(read_predictions(predictions, objects), objects)
scores = evaluate(matched, protocol=Protocol(bootstrap=50))

print(f"{scores.keypoints} keypoints of {scores.matched_instances} matched instances")
print(f"{'':14}{'ACE':>8}{'ENCE':>8}{'NLL':>8}")
for name in ("uncalibrated", "gaussian", "student_t"):
    distribution = scores.distribution(name)
    print(f"{name:14}{distribution.ace:8.3f}{distribution.ence:8.3f}{distribution.nll:8.3f}")
print(f"ranking skill {scores.akp_skill:.2f} (0: no better than chance, 1: perfect)")
