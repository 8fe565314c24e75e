"""Images in tar archives: unchanged bytes with the labels of their sample; damaged archives are refused."""

import io
import tarfile
import time
from pathlib import Path
from typing import Any

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
    for pattern in ("{5..1}.tar", "{0..999999}{0..999999}.tar", "{0..99999999}.tar", "{0..9}{5..1}.tar"):
        with pytest.raises(HaloposeError, match="the smaller number first"):
            find_archives(tmp_path / pattern)


@pytest.mark.parametrize("content", [b"nonsense" * 200, archive_of({"1.jpg": b"x" * 9000}, "w:gz")])
def test_files_that_are_not_archives_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(HaloposeError, match="plain tar"):
        list(read_samples(tmp_path / "0.tar", SUFFIXES))


def test_a_missing_archive_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match=r"cannot read .*0\.tar"):
        list(read_samples(tmp_path / "0.tar", SUFFIXES))


LABELLED = {f"{n}.{suffix}": b"0 .5 .5 .2 .2" for n in range(6) for suffix in ("jpg", "txt")}


def read(content: bytes, folder: Path) -> list[tuple[str, str | None]]:
    (folder / "0.tar").write_bytes(content)
    return [(image.file, text) for image, text in read_samples(folder / "0.tar", SUFFIXES)]


def test_every_flipped_bit_in_a_header_is_refused(tmp_path: Path) -> None:
    content = archive_of(LABELLED)
    expected = read(content, tmp_path)
    assert len(expected) == 6
    refused = 0
    for header in range(0, 12 * 1024, 1024):
        for place in (0, 101, 125, 137, 150, 156, 260, 400):
            damaged = bytearray(content)
            damaged[header + place] ^= 4
            try:
                found = read(bytes(damaged), tmp_path)
            except HaloposeError:
                refused += 1
            else:
                assert found == expected  # a bit without a meaning
    assert refused > 80


@pytest.mark.parametrize("cut", [512, 1024, 2048, 2048 + 512, 4096, 6 * 2048])
def test_a_cut_archive_is_refused(cut: int, tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match=r"0\.tar .*(cut|damaged)"):
        read(archive_of(LABELLED)[:cut], tmp_path)


def test_joined_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match="after its end marker"):
        read(archive_of({"1.jpg": b"x"}) + archive_of({"2.jpg": b"x"}), tmp_path)


def test_names_with_dots_are_samples_of_their_own(tmp_path: Path) -> None:
    files = {f"cam.{n:04d}.{suffix}": str(n).encode() for n in range(8) for suffix in ("jpg", "txt")}
    assert read(archive_of(files), tmp_path) == [(f"cam.{n:04d}.jpg", str(n)) for n in range(8)]


def test_labels_are_found_in_a_folder_and_under_other_names(tmp_path: Path) -> None:
    files = {"a/images/1.jpg": b"x", "a/labels/1.TXT": b"one", "2.jpg": b"x", "2.pose.txt": b"two", "3.jpg": b"x"}
    assert read(archive_of(files), tmp_path) == [("a/images/1.jpg", "one"), ("2.jpg", "two"), ("3.jpg", None)]


@pytest.mark.parametrize(
    "names", [("a.jpg", "a.png"), ("a.jpg", "a.seg.png"), ("a.jpg", "a.txt", "a.TXT"), ("a.jpg", "./a.jpg")]
)
def test_colliding_samples_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(HaloposeError, match=r"sample|label files"):
        read(archive_of(dict.fromkeys(names, b"x")), tmp_path)


def test_an_archive_without_labels_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="halopose"):
        read(archive_of({"1.jpg": b"x", "2.txt": b"x"}), tmp_path)
    assert "1 images has a label" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"pax_headers": {"mtime": "nan"}},
        {"pax_headers": {"mtime": "1e400"}},
        {"pax_headers": {"size": "999999999999"}},
        {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "3000000000"}},
        {"type": tarfile.SYMTYPE, "linkname": "2.txt"},
        {"type": tarfile.LNKTYPE, "linkname": "2.txt"},
        {"type": tarfile.GNUTYPE_SPARSE},
        {"type": tarfile.FIFOTYPE},
        {"pax_headers": {"size": "9" * 30}},
    ],
)
@pytest.mark.parametrize("name", ["1.jpg", "1.txt"])
@pytest.mark.parametrize("kind", ["path", "memory"])
def test_odd_members_are_refused(kind: str, name: str, change: dict[str, Any], tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as opened:
        entry = tarfile.TarInfo(name)
        for key, value in change.items():
            setattr(entry, key, value)
        entry.size = 0 if entry.type in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE) else 1024
        opened.addfile(entry, io.BytesIO(b"x" * 1024) if entry.size else None)
    place: Place = tmp_path / "0.tar" if kind == "path" else Address(f"memory://{tmp_path.name}/0.tar")
    if isinstance(place, Address):
        pytest.importorskip("fsspec")
    place.write_bytes(buffer.getvalue())
    begin = time.perf_counter()
    with pytest.raises(HaloposeError, match=r"0\.tar") as error:
        list(read_samples(place, SUFFIXES))
    assert "\n" not in str(error.value)
    assert time.perf_counter() - begin < 5
