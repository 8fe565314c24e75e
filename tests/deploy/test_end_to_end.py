"""The end2end form: one graph whose detections are those of the topk form and its runtime."""

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from halopose.deploy.deployed_model import Deployed
from halopose.deploy.exporting import export_model
from halopose.deploy.graph import TopkSettings
from halopose.deploy.onnx_file import DetectionSettings, ExportSettings, write_model
from halopose.errors import HaloposeError
from halopose.hosts.base import Host
from halopose.hosts.onnx.onnx_host import OnnxHost
from halopose.runtime import predict
from halopose.types import Family
from tests.helpers import onnx_files
from tests.helpers.models import artifact_for, host_of, photograph, with_split_student

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SIZE = 96
TOPK = TopkSettings(189, 144)  # all cells


@pytest.mark.parametrize(
    ("kind", "family"), [("nas", "gaussian"), ("26-one-to-one", "student-t"), ("file", "gaussian")]
)
def test_detections_equal_those_of_the_topk_form(kind: str, family: Family, tmp_path: Path) -> None:
    host: Host = host_of(kind) if kind != "file" else OnnxHost(onnx_files.framework_onnx("11", tmp_path, SIZE))
    size, topk = (160, TopkSettings(525, 400)) if kind == "26-one-to-one" else (SIZE, TOPK)
    artifact = with_split_student(artifact_for(host, imgsz=size))
    forms = ExportSettings("topk", topk), ExportSettings("end2end", topk, None, DetectionSettings(0.3, 0.6, family))
    models = []
    for settings in forms:
        model = export_model(host, artifact, settings)
        domains = {node.domain for node in model.graph.node}
        assert domains <= {"", "ai.onnx"}
        path = tmp_path / f"{settings.form}.onnx"
        write_model(model, path)
        models.append(predict.Model(str(path)))
    for name in ("bus.jpg", "zidane.jpg"):
        wanted, found = (model.predict(photograph(name), 0.3, 0.6, family) for model in models)
        assert len(found) == len(wanted) > 0
        assert np.array_equal(found.class_ids, wanted.class_ids)
        assert np.allclose(found.boxes, wanted.boxes, atol=1e-2)
        assert np.allclose(found.keypoints, wanted.keypoints, atol=1e-2)
        assert (found.keep == wanted.keep).mean() > 0.99
        same = found.keep == wanted.keep
        for part in ("covariance", "scale"):
            own, theirs = (getattr(poses, part)[same] for poses in (found, wanted))
            assert (np.abs(own - theirs) <= 1e-4 * np.trace(theirs, axis1=1, axis2=2)[:, None, None]).all()
    with pytest.raises(predict.Problem, match="exported for"):
        models[1].predict(photograph("bus.jpg"), 0.1, family=family)
    with pytest.raises(HaloposeError, match="as topk"):
        Deployed(tmp_path / "end2end.onnx")


def test_images_of_a_batch_of_eight_do_not_see_each_other(tmp_path: Path) -> None:
    host = host_of("11")
    settings = ExportSettings("end2end", TOPK, None, DetectionSettings(0.3, 0.6, "gaussian"))
    model = predict.Model("", *_opened(export_model(host, artifact_for(host, imgsz=SIZE), settings), tmp_path))
    placed = [
        predict.prepare(photograph(name)[shift:, shift:], model.facts, SIZE)
        for name in ("bus.jpg", "zidane.jpg")
        for shift in (0, 40, 80, 120)
    ]
    room = max(pixels.shape[1] for pixels, _ in placed), max(pixels.shape[2] for pixels, _ in placed)
    batch = np.full((8, 3, *room), 114 / 255, np.float32)
    for image, (pixels, _) in zip(batch, placed, strict=True):
        image[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    boxes = np.array([[*box.gain, *box.pad, box.shape[1], box.shape[0]] for _, box in placed], np.float32)
    whole = model.run(batch, boxes)
    assert set(whole["image"]) == set(range(8))
    for number in range(8):
        alone = model.run(batch[number : number + 1], boxes[number : number + 1])
        own = whole["image"] == number
        assert own.sum() == len(alone["scores"])
        for name in ("boxes", "keypoints", "covariance"):
            assert np.allclose(whole[name][own], alone[name], atol=1e-2, rtol=1e-3), name


def _opened(model: ModelProto, folder: Path) -> tuple[predict.Run, predict.Facts]:
    write_model(model, folder / "model.onnx")
    opened = predict.Model(str(folder / "model.onnx"))
    return opened.run, opened.facts
