"""Images and films from a web server that sends no parts of files, and cameras that are not there."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from halopose.data.downloads import web_kind, web_name
from halopose.data.images import read_source
from halopose.data.sources import find_sources
from halopose.errors import HaloposeError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """Address of a folder with a photograph and a film."""
    picture = np.full((48, 64, 3), 90, np.uint8)
    (tmp_path / "photo.jpg").write_bytes(cv2.imencode(".jpg", picture)[1].tobytes())
    (tmp_path / "still").write_bytes((tmp_path / "photo.jpg").read_bytes())
    film = cv2.VideoWriter(str(tmp_path / "film.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for _ in range(5):
        film.write(picture)
    film.release()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_image_at_an_address_is_an_image(site: str) -> None:
    [source] = find_sources([f"{site}/photo.jpg?size=large"])
    assert (source.name, source.is_film) == ("photo", False)
    [image] = source.images()
    assert (image.name, image.pixels.shape) == ("photo", (48, 64, 3))
    [same] = read_source(f"{site}/photo.jpg")
    assert np.array_equal(same.pixels, image.pixels)


def test_a_film_is_downloaded_where_the_server_sends_no_parts(site: str) -> None:
    [source] = find_sources([f"{site}/film.mp4"])
    assert source.is_film
    assert not source.is_endless
    frames = list(source.images(2))
    assert [frame.name for frame in frames] == ["film_000000", "film_000001", "film_000002"]
    assert [(frame.frame, frame.rate, frame.length) for frame in frames] == [(0, 5, 3), (2, 5, 3), (4, 5, 3)]


def test_missing_sources_are_refused_in_one_line(site: str) -> None:
    for source, words in ((f"{site}/none.jpg", "404"), (f"{site}/none.mp4", "404"), (77, "no camera 77")):
        with pytest.raises(HaloposeError, match=words) as error:
            list(read_source(source))
        assert "\n" not in str(error.value)


def test_names_and_kinds_of_addresses() -> None:
    assert web_name("rtsp://user:secret@camera.local:554/live/1?x=2") == "stream_camera.local_554_live_1"
    assert web_name("https://host/a%20b/clip%201.MP4") == "clip_1"
    assert [web_kind(f"https://host.invalid/{name}") for name in ("a.PNG", "b.mov", "c.m3u8")] == [
        "image",
        "film",
        "stream",
    ]
    assert web_kind("rtsp://host/a.jpg") == "stream"


def test_sources_have_distinct_names(site: str, tmp_path: Path) -> None:
    names = [each.name for each in find_sources([str(tmp_path / "photo.jpg"), f"{site}/photo.jpg", f"{site}/still"])]
    assert names[:2] == ["photo", "photo-2"]
    assert len({name.casefold() for name in names}) == 3
