"""ONNX files as base models: compared with the frameworks' hosts and with the file run alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from halopose.errors import HaloposeError
from halopose.hosts.base import Host, Selection, Targets
from halopose.hosts.loading import load_host
from halopose.hosts.onnx.onnx_host import OnnxHost, describe
from halopose.hosts.onnx.pose_graph import GivenByHand
from halopose.hosts.weight_sketch import same_model
from tests.helpers import onnx_files
from tests.helpers.models import artifact_for, host_of, make_host, photograph, pose_model, run_script, scenes

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SIZE = 160  # one-to-one outputs need 300 cells
KINDS = ("11", "26-one-to-one", "nas")


@pytest.fixture(scope="module")
def onnx_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def export(kind: str) -> Path:
        return onnx_files.framework_onnx(kind, tmp_path_factory.mktemp(kind), SIZE)

    return export


@cache
def opened(path: Path) -> OnnxHost:
    return OnnxHost(path)


def selected(host: Host, image: np.ndarray, size: int = SIZE) -> Selection:
    batch, boxes = host.preprocess([image], size, True)
    selection = host.select(host.forward(batch), conf=0.25, iou=0.7, letterboxes=boxes)[0]
    return host.to_original(selection, boxes[0], (int(batch.shape[2]), int(batch.shape[3])))


@pytest.mark.parametrize("kind", KINDS)
def test_detections_and_features_equal_those_of_the_framework(kind: str, onnx_of: Callable[[str], Path]) -> None:
    host, framework = opened(onnx_of(kind)), host_of(kind)
    assert host.strides == framework.strides
    for own, theirs in zip(host.pose_templates(), framework.pose_templates(), strict=True):
        for one, other in zip(own, theirs, strict=True):
            assert one.activation == other.activation
            assert torch.allclose(one.weight, other.weight, atol=1e-5)
    for name in ("bus.jpg", "zidane.jpg"):
        batch, _ = host.preprocess([photograph(name)], SIZE, True)
        output, wanted = host.forward(batch), framework.forward(framework.preprocess([photograph(name)], SIZE, True)[0])
        for maps, others in zip(output.features, wanted.features, strict=True):
            assert torch.allclose(maps, others, atol=1e-4)
        assert torch.allclose(output.keypoints, wanted.keypoints, atol=1e-2)
        found, expected = selected(host, photograph(name)), selected(framework, photograph(name))
        assert found.cell.tolist() == expected.cell.tolist()
        assert len(found.cell) > 0
        assert torch.allclose(found.boxes, expected.boxes, atol=0.02)
        assert torch.allclose(found.keypoints, expected.keypoints, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_bit_for_bit_those_of_the_file_alone(kind: str, onnx_of: Callable[[str], Path]) -> None:
    host = opened(onnx_of(kind))
    batch, _ = host.preprocess([photograph("bus.jpg")], SIZE, True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    alone = onnxruntime.InferenceSession(str(onnx_of(kind)), options, providers=["CPUExecutionProvider"])
    raw = host._in_parts(batch.numpy())
    for output, values in zip(
        alone.get_outputs(), alone.run(None, {host.graph.input.name: batch.numpy()}), strict=True
    ):
        assert np.array_equal(raw[output.name], values)


@pytest.mark.parametrize("kind", KINDS)
def test_assigned_cells_equal_those_of_the_framework(kind: str, onnx_of: Callable[[str], Path]) -> None:
    host, framework = opened(onnx_of(kind)), host_of(kind)
    generator = np.random.default_rng(3)
    pairs = 0
    for image in (photograph("bus.jpg"), photograph("zidane.jpg"), *scenes(6, 128)):
        found = selected(framework, image)
        points = found.keypoints[:4] + torch.from_numpy(generator.normal(0, 2, found.keypoints[:4].shape)).float()
        labelled = torch.from_numpy(generator.uniform(size=points.shape[:2]) < 0.7)
        boxes = found.boxes[:4] + torch.from_numpy(generator.normal(0, 2, (len(points), 4))).float()
        batch, letterboxes = host.preprocess([image], SIZE, True)
        gain = torch.tensor(letterboxes[0].gain).float()
        target = Targets(boxes * gain.repeat(2), found.class_ids[:4], points * gain, labelled)
        own = host.assign(host.forward(batch), [target], host.layout.sigmas)
        theirs = framework.assign(
            framework.forward(framework.preprocess([image], SIZE, True)[0]), [target], host.layout.sigmas
        )
        assert set(zip(own.cell.tolist(), own.object.tolist(), strict=True)) == set(
            zip(theirs.cell.tolist(), theirs.object.tolist(), strict=True)
        )
        pairs += len(own.cell)
    assert pairs > 20


def test_the_matched_assignment_takes_retained_detections(onnx_of: Callable[[str], Path]) -> None:
    host = OnnxHost(onnx_of("11"), given=GivenByHand(assigner="matched"))
    batch, boxes = host.preprocess([photograph("bus.jpg")], SIZE, True)
    output = host.forward(batch)
    selection = host.select(output, conf=0.25, iou=0.7, letterboxes=boxes)[0]
    target = Targets(
        selection.boxes + 0.1,
        selection.class_ids,
        selection.keypoints,
        torch.ones(selection.keypoints.shape[:2]).bool(),
    )
    found = host.assign(output, [target], host.layout.sigmas)
    pairs = dict(zip(found.object.tolist(), found.cell.tolist(), strict=True))
    assert len(pairs) == len(found.object)
    assert sum(pairs.get(row) == cell for row, cell in enumerate(selection.cell.tolist())) > len(pairs) / 2


def test_batches_halves_and_eight_bits(onnx_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = onnx_of("11")
    expected = selected(opened(path), photograph("bus.jpg"))
    fixed = OnnxHost(onnx_files.with_fixed_input(path, tmp_path / "fixed.onnx", 4, SIZE))
    assert fixed.graph.input.batch == 4
    batch, _ = fixed.preprocess([photograph("bus.jpg")] * 5, SIZE, True)
    maps = fixed.forward(batch).features[0]
    assert len(maps) == 5
    assert torch.equal(maps[0], maps[4])
    with pytest.raises(HaloposeError, match=f"inputs of {SIZE} x {SIZE} only"):
        fixed.preprocess([photograph("bus.jpg")], 2 * SIZE, True)
    half = OnnxHost(onnx_files.in_half_precision(path, tmp_path / "half.onnx"))
    assert half.half_weights
    assert artifact_for(host_of("11")).fits(half)
    found = selected(half, photograph("bus.jpg"))
    assert np.isin(expected.cell[:3].numpy(), found.cell.numpy()).all()
    swapped = OnnxHost(onnx_files.transposed(path, tmp_path / "swapped.onnx"))
    assert swapped.graph.transposed
    assert torch.equal(selected(swapped, photograph("bus.jpg")).keypoints, expected.keypoints)
    images = np.stack([opened(path).preprocess([image], 64, False)[0][0].numpy() for image in scenes(3)])
    eight = OnnxHost(onnx_files.in_eight_bits(path, tmp_path / "eight.onnx", images))
    assert [len(level) for level in eight.pose_templates()] == [2, 2, 2]
    assert len(selected(eight, photograph("bus.jpg")).cell) > 0
    assert same_model(eight.fingerprints, opened(path).fingerprints)


def test_non_maximum_suppression_in_the_file(tmp_path: Path) -> None:
    host = OnnxHost(onnx_files.with_nms("11", tmp_path, SIZE))
    assert host.graph.suppressed
    image = photograph("bus.jpg")
    batch, boxes = host.preprocess([image], SIZE, True)
    found = host.select(host.forward(batch), conf=0.25, iou=0.7, letterboxes=boxes)[0]
    framework = host_of("11")
    expected = framework.select(framework.forward(framework.preprocess([image], SIZE, False)[0]), conf=0.25, iou=0.7)[0]
    assert found.cell.tolist() == expected.cell.tolist()
    assert torch.allclose(found.boxes, expected.boxes, atol=1e-2)


def test_artifacts_are_interchangeable_where_weights_agree(onnx_of: Callable[[str], Path]) -> None:
    host, framework = opened(onnx_of("11")), host_of("11")
    assert artifact_for(framework).fits(host)
    assert artifact_for(host).fits(framework)
    assert not artifact_for(host).fits(make_host("11", pose_model("11", seed=1)))
    assert not artifact_for(host_of("v8")).fits(host)


@pytest.mark.parametrize("kind", KINDS)
def test_another_backbone_under_the_same_head_is_refused(
    kind: str, onnx_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The channels of the first convolution are reversed, in single and in half precision."""
    path, framework = onnx_of(kind), host_of(kind)
    assert artifact_for(framework).fits(opened(path))
    changed = onnx.load(path)
    view = opened(path).view
    first = next(node for node in view.nodes if node.op_type == "Conv")
    for tensor in changed.graph.initializer:
        if tensor.name == first.input[1]:
            tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)[::-1] * 1.0, tensor.name))
    onnx.save(changed, tmp_path / "changed.onnx")
    other = OnnxHost(tmp_path / "changed.onnx")
    assert same_model([name for name in other.fingerprints if "backbone" not in name], framework.fingerprints)
    with pytest.raises(HaloposeError, match="another base model"):
        artifact_for(framework).check(other)
    half = onnx_files.in_half_precision(tmp_path / "changed.onnx", tmp_path / "half.onnx")
    assert not artifact_for(framework).fits(OnnxHost(half))


def test_no_framework_is_imported(onnx_of: Callable[[str], Path]) -> None:
    text = """
import sys, numpy as np
from halopose.hosts.loading import load_host
host = load_host(sys.argv[1])
batch, boxes = host.preprocess([np.zeros((64, 64, 3), np.uint8)], 64, True)
host.select(host.forward(batch), conf=0.25, iou=0.7, letterboxes=boxes)
print(sorted({"ultralytics", "libreyolo"} & set(sys.modules)))
"""
    assert run_script(text, onnx_of("11")).strip() == "[]"


def test_detected_outputs_are_described_and_can_be_overridden(onnx_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_of("11").read_bytes())
    host = OnnxHost(path)
    text = describe(host)
    for level in host.graph.levels:
        assert level.trunk[0][0].name in text
    starts = tuple(level.trunk[0][0].name for level in host.graph.levels)
    assert GivenByHand(features=starts, assigner="matched").save(path).is_file()
    again = OnnxHost(path)
    assert again.graph.assigner == "matched"
    assert again.features == host.features
    with pytest.raises(HaloposeError, match="nowhere"):
        OnnxHost(path, given=GivenByHand(features=("nowhere", *starts[1:])))
    Path(f"{path}.json").write_text("[1]")
    with pytest.raises(HaloposeError, match="damaged"):
        OnnxHost(path)


def test_foreign_and_damaged_files_are_one_line_errors(onnx_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "foreign.onnx"
    node = onnx.helper.make_node("Relu", ["images"], ["found"], name="only")
    value = [onnx.helper.make_tensor_value_info(name, 1, [1, 3, 64, 64]) for name in ("images", "found")]
    graph = onnx.helper.make_graph([node], "foreign", value[:1], value[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    with pytest.raises(HaloposeError, match="not computed from boxes"):
        load_host(path)
    path.write_bytes(b"no model")
    with pytest.raises(HaloposeError, match="no ONNX model"):
        load_host(path)
    path.write_bytes(onnx_of("11").read_bytes()[:100_000])
    with pytest.raises(HaloposeError, match="foreign"):
        load_host(path)
    with pytest.raises(HaloposeError, match="no file"):
        load_host(tmp_path / "missing.onnx")
    with pytest.raises(HaloposeError, match="leave --end2end off"):
        load_host(onnx_of("11"), end2end=True)
