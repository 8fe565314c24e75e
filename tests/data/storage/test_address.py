"""Addresses behave as paths do, in memory and on a disk; errors are one line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from halopose.data.dataset_loading import load_dataset
from halopose.data.storage.address import Address, Place, beside, read_many, to_place
from halopose.errors import HaloposeError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Address]:
    yield Address(f"memory://{tmp_path.name}" if request.param == "memory" else tmp_path.as_uri())
    fsspec.filesystem("memory").store.clear()


def test_written_files_are_read_back(root: Address) -> None:
    file = root / "images" / "1.jpg"
    assert not file.is_file()
    file.write_bytes(b"0123456789")
    assert file.is_file()
    assert not file.is_dir()
    assert (root / "images").is_dir()
    assert file.read_bytes() == b"0123456789"
    assert file.part(2, 5) == b"234"
    with file.open() as stream:
        assert stream.read(3) == b"012"
    assert file.stamp()[0] == 10
    assert file.local().read_bytes() == b"0123456789"
    before = file.stamp(), file.local()
    file.write_bytes(b"abcdefghij")
    assert file.stamp() != before[0]
    assert file.local().read_bytes() == b"abcdefghij"
    assert [str(found) for found in root.files()] == [str(file)]
    file.unlink()
    assert not file.is_file()


def test_many_are_read_many(root: Address) -> None:
    files = [root / f"{number}.txt" for number in range(5)]
    for number, file in enumerate(files[:4]):
        file.write_bytes(str(number).encode())
    assert read_many(files) == {str(file): str(number).encode() for number, file in enumerate(files[:4])}
    assert read_many(files[:1]) == {str(files[0]): b"0"}
    assert sorted(str(found) for found in (root / "[12].txt").glob()) == [str(file) for file in files[1:3]]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/a/b.json", "s3://bucket/a/b.json"),
        (Path("s3://bucket/a/b.json"), "s3://bucket/a/b.json"),
        (Path("file:///tmp/a"), "file:///tmp/a"),
        ("file:///tmp/a", "file:///tmp/a"),
        (Path("memory://a"), "memory://a"),
        (Path("simplecache::s3://bucket/a"), "simplecache::s3://bucket/a"),
        (Address("gs://b"), "gs://b"),
    ],
)
def test_addresses_are_known(given: Place | str, url: str) -> None:
    assert to_place(given) == Address(url)


@pytest.mark.parametrize("given", ["a/b.json", "/tmp/x", "C:/images/1.jpg", "a:b", "12:/x"])
def test_paths_stay_paths(given: str) -> None:
    assert to_place(given) == Path(given)


def test_parts_of_an_address() -> None:
    file = Address("s3://bucket/images/train/1.jpg")
    assert (file.name, file.stem, file.suffix) == ("1.jpg", "1", ".jpg")
    assert file.parts == ("s3://", "bucket", "images", "train", "1.jpg")
    assert file.parent == Address("s3://bucket/images/train")
    assert file.parent / "../val/2.jpg" == Address("s3://bucket/images/val/2.jpg")
    assert beside(file, "2.jpg") == Address("s3://bucket/images/train/2.jpg")
    assert beside(file, "gs://other/2.jpg") == Address("gs://other/2.jpg")
    assert beside(Path("a/b.yaml"), "c") == Path("a/c")


@pytest.mark.parametrize(
    "url",
    [
        "nonsense://x",
        "reference::file:///tmp/evil.json",
        "simplecache::s3://bucket/a",
        "file:///tmp/a::reference://",
        "reference://x",
        "REFERENCE://x",
        "zip://a.zip",
        "github://a:b@c/d",
        "local:///etc/passwd",
    ],
)
def test_other_protocols_and_chains_are_refused(url: str, tmp_path: Path) -> None:
    address = to_place(url)
    assert isinstance(address, Address)
    for read in (address.read_bytes, address.is_dir, address.files, address.open, address.glob):
        with pytest.raises(HaloposeError, match=r"cannot open .*: (chained|\w+ is not one of)"):
            read()
    (tmp_path / "data.yaml").write_text(f'kpt_shape: [1, 3]\nval: "{url}"\n')
    with pytest.raises(HaloposeError, match="cannot open"):
        load_dataset(tmp_path / "data.yaml", "val")


def test_without_fsspec_it_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(HaloposeError, match="fsspec"):
        Address("memory://unseen").read_bytes()
