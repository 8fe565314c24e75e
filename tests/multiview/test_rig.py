"""Calibration files of four tools."""

from pathlib import Path

import cv2
import numpy as np
import pytest

from halopose.errors import HaloposeError
from halopose.multiview.rig import CalibratedView, read_calibration
from tests.helpers.rigs import rig


def same(views: list[CalibratedView], expected: list[CalibratedView]) -> None:
    for one, other in zip(views, expected, strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(one.position, other.position, atol=1e-6)
        np.testing.assert_allclose(one.rotation, other.rotation, atol=1e-6)
        np.testing.assert_allclose(one.camera.parameters, other.camera.parameters, atol=1e-6)


def test_projection_equals_opencv() -> None:
    points = np.random.default_rng(0).normal([0.0, 0.0, 1.0], 0.5, (9, 3))
    for view in rig():
        rvec = cv2.Rodrigues(view.rotation)[0]
        lens = np.array(view.camera.distortion)
        theirs = cv2.projectPoints(points, rvec, -view.rotation @ view.position, view.camera.matrix, lens)[0]
        np.testing.assert_allclose(view.project(points), np.asarray(theirs).reshape(-1, 2), atol=1e-6)
        step = 1e-6
        ahead, behind = (view.project(points + sign * step * np.eye(3)[:, None]) for sign in (1, -1))
        np.testing.assert_allclose(view.jacobian(points), np.moveaxis((ahead - behind) / (2 * step), 0, -1), rtol=1e-4)


def toml_of(views: list[CalibratedView], scale: float = 1.0) -> str:
    tables = []
    for n, view in enumerate(views):
        rvec = np.asarray(cv2.Rodrigues(view.rotation)[0]).ravel().tolist()
        offset = (-view.rotation @ view.position * scale).tolist()
        tables.append(
            f'[cam_{n}]\nname = "{view.name}"\nsize = [960.0, 720.0]\nmatrix = {view.camera.matrix.tolist()}\n'
            f"distortions = {list(view.camera.distortion)}\nrotation = {rvec}\ntranslation = {offset}\n"
        )
    return "\n".join([*tables, "[metadata]\nerror = 0.0\n"])


def test_pose2sim_and_anipose(tmp_path: Path) -> None:
    path = tmp_path / "calibration.toml"
    path.write_text(toml_of(rig()))
    same(read_calibration(path), rig())
    path.write_text(toml_of(rig(), 1000.0))
    same(read_calibration(path, "mm"), rig())


def test_qualisys(tmp_path: Path) -> None:
    cameras = []
    for view in rig():
        rows = np.diag([1.0, -1.0, -1.0]) @ view.rotation
        turn = " ".join(f'r{i + 1}{j + 1}="{rows[i, j]}"' for i in range(3) for j in range(3))
        x, y, z = 1000 * view.position
        k1, k2, p1, p2, k3 = view.camera.distortion
        cameras.append(
            f'<camera active="1" serial="{view.name}"><fov_video left="0" top="0" right="959" bottom="719"/>'
            f'<transform {turn} x="{x}" y="{y}" z="{z}"/><intrinsic focalLengthU="{64 * view.camera.fx}" '
            f'focalLengthV="{64 * view.camera.fy}" centerPointU="{64 * view.camera.cx}" '
            f'centerPointV="{64 * view.camera.cy}" radialDistortion1="{k1}" radialDistortion2="{k2}" '
            f'radialDistortion3="{k3}" tangentalDistortion1="{p1}" tangentalDistortion2="{p2}"/></camera>'
        )
    path = tmp_path / "Calib.qca.txt"
    path.write_text(f"<calibration><cameras>{''.join(cameras)}</cameras></calibration>")
    same(read_calibration(path), rig())


@pytest.mark.parametrize("name", ["cameras.yml", "cameras.xml"])
def test_opencv(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    store = cv2.FileStorage(str(path), cv2.FILE_STORAGE_WRITE)
    store.startWriteStruct("names", cv2.FileNode_SEQ)
    for view in rig():
        store.write("", view.name)
    store.endWriteStruct()
    for view in rig():
        store.write(f"K_{view.name}", view.camera.matrix)
        store.write(f"dist_{view.name}", np.array([view.camera.distortion]))
        store.write(f"R_{view.name}", np.asarray(cv2.Rodrigues(view.rotation)[0]))
        store.write(f"T_{view.name}", -view.rotation @ view.position)
    store.release()
    same(read_calibration(path), rig())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[one]\nx = 1\n", "0 cameras"),
        ("a.toml", "nonsense", "not a readable calibration"),
        ("a.toml", f"[{'a.' * 50_000}a]\nx = 1\n", "parts"),
        ("a.toml", f"x = {{{'a.' * 50_000}a = 1}}\n", "parts"),
        ("a.toml", "#" + "x" * 2_000_000, "bytes"),
        ("a.toml", f"[c]\nmatrix = [[1, 0, 1{'0' * 400}], [0, 1, 0], [0, 0, 1]]\nrotation=[0,0,0]\n", "calibration"),
        ("a.qca.txt", "<calibration>", "not a readable calibration"),
        ("a.qca.txt", '<?xml version="1.0" encoding="klingon"?><calibration/>', "unknown encoding"),
        ("a.txt", "", "extension"),
        ("a.toml", "[c]\nmatrix = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]\nfisheye = true\n", "fisheye"),
    ],
)
def test_unusable_files_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(HaloposeError, match=message):
        read_calibration(path)
    with pytest.raises(HaloposeError, match="no file"):
        read_calibration(tmp_path / "none.toml")


def test_impossible_cameras_are_refused(tmp_path: Path) -> None:
    view = rig()[0]
    mirrored = np.diag([1.0, 1.0, -1.0]) @ view.rotation
    with pytest.raises(HaloposeError, match="reflection"):
        CalibratedView.from_opencv("left", view.camera.matrix, None, mirrored, np.zeros(3))
    path = tmp_path / "calibration.toml"
    path.write_text(toml_of([view, *rig()]))
    with pytest.raises(HaloposeError, match="2 cameras called cam0"):
        read_calibration(path)
