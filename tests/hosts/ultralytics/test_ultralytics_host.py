"""The Ultralytics host: letterbox, sigmas, templates, heads, and checkpoints whole, foreign or damaged."""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from ultralytics.data.augment import LetterBox

from halopose.errors import HaloposeError
from halopose.hosts.ultralytics import ultralytics_host as ultralytics
from halopose.hosts.ultralytics.ultralytics_host import UltralyticsHost, _letterbox
from halopose.hosts.weight_sketch import same_model
from halopose.keypoints import Keypoints
from tests.helpers.checkpoints import Foreign, Payload, one_line
from tests.helpers.models import (
    ASSETS,
    ULTRALYTICS,
    host_of,
    photograph,
    pose_model,
    run_script,
    wants_end2end,
)
from tests.helpers.values import present

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([64, 160, 320, 640]), st.booleans())
def test_letterbox_says_where_the_image_lies(height: int, width: int, size: int, auto: bool) -> None:
    image = np.zeros((height, width, 3), np.uint8)
    transform = LetterBox((size, size), auto=auto, stride=32)
    boxed, box = transform(image=image), _letterbox(transform.get_params({"img": image}))
    rows, columns = np.nonzero((boxed[..., 0] == 0).any(1))[0], np.nonzero((boxed[..., 0] == 0).any(0))[0]
    corners = box.to_input(np.array([[0.0, 0.0], [width, height]]))
    assert np.allclose(corners, [[columns[0], rows[0]], [columns[-1] + 1, rows[-1] + 1]], atol=1e-9)


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([64, 160, 320, 640]), st.booleans(), st.booleans())
def test_pixels_are_the_letterboxs(height: int, width: int, size: int, auto: bool, roomy: bool) -> None:
    """In a new array and in a reused buffer, byte by byte."""
    image = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    room = np.full(3 * 640**2 if roomy else 5, 7, np.uint8)
    for given_room in (None, room):
        pixels, _ = host_of("11").placer()(image, size, auto, given_room)
        assert np.array_equal(pixels, LetterBox((size, size), auto=auto, stride=32)(image=image))
        assert np.shares_memory(pixels, room) == (roomy and given_room is not None)


def test_strides_names_and_sigmas() -> None:
    host = host_of("11")
    assert host.strides == (8, 16, 32)
    assert host.layout == Keypoints.of(17)
    assert host.device == torch.device("cpu")


def test_sigmas_of_the_checkpoint_and_of_an_assignment() -> None:
    model = pose_model("26", (4, 3))
    model.kpt_oks_sigmas = [0.1, 0.2, 0.3, 0.4]
    host = UltralyticsHost(model)
    assert host.layout.sigmas == (0.1, 0.2, 0.3, 0.4)
    others = (0.4, 0.3, 0.2, 0.1)
    torch.testing.assert_close(host._criterion(others).keypoint_loss.sigmas, torch.tensor(others))
    assert host.layout.sigmas == (0.1, 0.2, 0.3, 0.4)  # what the data say stays with the data
    for wrong in ([0.1, 0.2], [0.1, 0.2, 0.3, 0.0]):
        model.kpt_oks_sigmas = wrong
        with pytest.raises(HaloposeError, match="sigmas"):
            UltralyticsHost(model)


@pytest.mark.parametrize("kind", ULTRALYTICS)
def test_templates_are_the_pose_heads_trunk(kind: str) -> None:
    """The trunk of the templates, then the base's own last layer, is the base's keypoint map."""
    host: Any = host_of(kind)
    output = host.forward(host.preprocess([photograph("bus.jpg")], 64, True)[0])
    lasts = host.head.cv4
    if kind.startswith("26"):
        lasts = host.head.one2one_cv4_kpts if host.end2end else host.head.cv4_kpts
    raw = []
    for maps, template, branch in zip(output.features, host.pose_templates(), lasts, strict=True):
        for conv in template:
            maps = torch.nn.functional.conv2d(maps, conv.weight, conv.bias, padding=conv.reach)
            assert conv.activation == "silu"
            maps = torch.nn.functional.silu(maps)
        last = branch if isinstance(branch, nn.Conv2d) else branch[-1]
        raw.append(last(maps).flatten(2))
    torch.testing.assert_close(torch.cat(raw, 2), output.raw[1]["kpts"], rtol=1e-4, atol=1e-4)


def test_fingerprints_know_buffers_and_heads() -> None:
    model = pose_model("26")
    two = [UltralyticsHost(model, end2end=choice).fingerprints for choice in (False, True)]
    assert not same_model(*two)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    present(norm.running_mean)[0] += 0.1
    assert not same_model(two[0], UltralyticsHost(model, end2end=False).fingerprints)


def test_end2end_that_a_model_lacks_is_refused() -> None:
    with pytest.raises(HaloposeError, match="one-to-one"):
        UltralyticsHost(pose_model("11"), end2end=True)
    for kind in ("26", "26-one-to-one"):
        with pytest.raises(HaloposeError, match="one-to-one"):
            UltralyticsHost(vars(host_of(kind))["model"], end2end=not wants_end2end(kind))


def test_a_checkpoint_loads(tmp_path: Path) -> None:
    model = pose_model("11")
    torch.save({"model": copy.deepcopy(model).half(), "ema": None}, tmp_path / "base.pt")
    torch.save({"model": None, "ema": model}, tmp_path / "ema.pt")
    assert UltralyticsHost.load(tmp_path / "base.pt").description == "base.pt"
    assert set(UltralyticsHost.load(tmp_path / "ema.pt").fingerprints) & set(host_of("11").fingerprints)


@pytest.mark.parametrize(
    ("fetched", "expected"),
    [
        (lambda path: path.write_bytes(b"weights"), b"weights"),
        (lambda path: None, None),
        (lambda path: path.read_bytes(), None),  # fails with an OSError
    ],
)
def test_a_download_or_nothing(
    monkeypatch: pytest.MonkeyPatch, fetched: Callable[..., Any], expected: bytes | None
) -> None:
    monkeypatch.setattr(ultralytics, "attempt_download_asset", fetched)
    assert ultralytics.download("yolo11n-pose.pt") == expected


def test_no_host_is_looked_up_when_the_framework_is_imported() -> None:
    script = (
        "import socket\n"
        "def refuse(*given, **more): raise SystemExit('looked up a host')\n"
        "socket.getaddrinfo = refuse\n"
        "import halopose.hosts.ultralytics.ultralytics_host\n"
    )
    run_script(script)


def test_foreign_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    contents = {
        "payload.pt": Payload(marker),
        "hidden.pt": {"model": pose_model("11"), "extra": Payload(marker)},
        "foreign.pt": {"model": Foreign()},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(HaloposeError, match=name) as error:
            UltralyticsHost.load(tmp_path / name)
        assert "--unsafe" in one_line(error)
        assert not marker.exists()
    UltralyticsHost.load(tmp_path / "hidden.pt", unsafe=True)
    assert marker.exists()  # the payload does work


def with_pickle(content: bytes, pickled: bytes) -> bytes:
    """The archive of a checkpoint with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as whole, zipfile.ZipFile(buffer, "w") as archive:
        for name in whole.namelist():
            archive.writestr(name, pickled if name.endswith("data.pkl") else whole.read(name))
    return buffer.getvalue()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut.pt": lambda content: content[: len(content) // 2],
    "start.pt": lambda content: content[:100],
    "empty.pt": lambda content: b"",
    "text.pt": lambda content: b"hello",
    "picture.pt": lambda content: (ASSETS / "bus.jpg").read_bytes(),
    "whole.bin": lambda content: content,
    "pickle.pt": lambda content: with_pickle(content, b"\x80\x02X\x01"),  # a text without its length
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_one_line_errors(tmp_path: Path, name: str) -> None:
    torch.save({"model": pose_model("11")}, tmp_path / "whole.pt")
    (tmp_path / name).write_bytes(DAMAGE[name]((tmp_path / "whole.pt").read_bytes()))
    with pytest.raises(HaloposeError, match=name) as error:
        UltralyticsHost.load(tmp_path / name)
    assert "unsafe" not in one_line(error)  # which would not help


def test_checkpoints_without_a_model_are_one_line_errors(tmp_path: Path) -> None:
    torch.save({"weights": 1}, tmp_path / "none.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": pose_model("11").state_dict()}, tmp_path / "state.pt")
    for name in ("none.pt", "list.pt", "state.pt", "missing.pt"):
        with pytest.raises(HaloposeError, match=name) as error:
            UltralyticsHost.load(tmp_path / name)
        one_line(error)


def test_a_checkpoint_whose_parts_are_not_what_they_are_named_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a few changed bytes of a pickle can do, and safe loading lets pass."""
    model = pose_model("11")
    model.model[0]._state_dict_pre_hooks = dict
    (tmp_path / "mine.pt").write_bytes(b"PK")
    monkeypatch.setattr("halopose.hosts.ultralytics.ultralytics_host.load_model", lambda *_: model)
    with pytest.raises(HaloposeError, match=r"mine.pt is damaged \(TypeError\)"):
        UltralyticsHost.load(tmp_path / "mine.pt")


def test_weights_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    """A tensor with stride 0 takes four bytes in the file and gigabytes once it is copied."""
    model = pose_model("11")
    first = next(model.parameters())
    first.data = torch.zeros(1).as_strided((30_000, 30_000), (0, 0))
    torch.save({"model": model}, tmp_path / "large.pt")
    torch.save({"model": pose_model("11")}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "packed.pt", "w", 8) as packed:
        for entry in whole.infolist():
            packed.writestr(entry.filename, whole.read(entry))
        packed.writestr("archive/data/bomb", bytes(50_000_000))
    for name in ("large.pt", "packed.pt"):
        with pytest.raises(HaloposeError, match=name) as error:
            UltralyticsHost.load(tmp_path / name)
        one_line(error)
        assert "larger than" in str(error.value) or "more than" in str(error.value)


def test_a_head_that_cannot_be_mirrored_is_a_one_line_error() -> None:
    from ultralytics.nn.modules import Conv

    with pytest.raises(HaloposeError, match="cannot be mirrored") as error:
        ultralytics._template(Conv(4, 4, 3, 2))
    assert "\n" not in str(error.value)
