"""Images in tar archives: the bytes that were put there, with the labels of their sample."""

import io
import tarfile
from pathlib import Path

import pytest

from halopose.data.storage.address import Address, Place
from halopose.data.storage.archive import find_archives, read_samples
from halopose.errors import HaloposeError

SUFFIXES = {".jpg", ".png"}


def archive_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as opened:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), 7
            opened.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["path", "memory"])
def test_members_are_what_was_put_there(kind: str, tmp_path: Path) -> None:
    files = {
        "a/1.jpg": b"first", "a/1.txt": b"0 .5", "a/1.json": b"{}", "b/1.png": b"second", "2.x.JPG": b"third",
        "2.x.txt": "ü".encode(),
    }  # fmt: skip
    place: Place = tmp_path / "0.tar" if kind == "path" else Address(f"memory://{tmp_path.name}/0.tar")
    if isinstance(place, Address):
        pytest.importorskip("fsspec")
    place.write_bytes(archive_of(files))
    found = list(read_samples(place, SUFFIXES))
    assert [(image.file, image.read_bytes(), text) for image, text in found] == [
        ("a/1.jpg", b"first", "0 .5"), ("b/1.png", b"second", None), ("2.x.JPG", b"third", "ü"),
    ]  # fmt: skip
    assert str(found[0][0]) == f"{place}/a/1.jpg"
    assert (found[0][0].name, found[0][0].stem, found[0][0].suffix) == ("1.jpg", "1", ".jpg")
    assert found[0][0].stamp() == (5, 7)
    assert [text for _, text in read_samples(place, SUFFIXES, labels=False)] == [None] * 3


def test_patterns_stand_for_archives(tmp_path: Path) -> None:
    for number in (0, 1, 2, 10):
        (tmp_path / f"train-{number:03d}.tar").touch()
    names = [path.name for path in find_archives(tmp_path / "train-*.tar")]
    assert names == [f"train-{number:03d}.tar" for number in (0, 1, 2, 10)]
    assert find_archives(tmp_path / "x-{008..011}.tar") == [tmp_path / f"x-{n:03d}.tar" for n in range(8, 12)]
    assert find_archives(tmp_path / "{0..1}-{0..1}.tar") == [
        tmp_path / f"{a}-{b}.tar" for a in range(2) for b in range(2)
    ]
    assert find_archives(Address("s3://b/{8..9}.tar")) == [Address("s3://b/8.tar"), Address("s3://b/9.tar")]
    with pytest.raises(HaloposeError, match="the smaller one first"):
        find_archives(tmp_path / "{5..1}.tar")


@pytest.mark.parametrize("content", [b"nonsense" * 200, archive_of({"1.jpg": b"x" * 9000}, "w:gz")])
def test_what_is_no_archive_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(HaloposeError, match="write it as plain tar"):
        list(read_samples(tmp_path / "0.tar", SUFFIXES))


def test_a_missing_archive_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match=r"cannot read .*0\.tar"):
        list(read_samples(tmp_path / "0.tar", SUFFIXES))
