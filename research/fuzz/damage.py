"""Damage valid content as a disk, a network or another program might.

Functions take values or bytes and a seeded generator, and return them with a few changes.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 2**31, 2**63, 10**30, -(10**400), 1e308, -1e-320, math.nan, math.inf, "",
    "nan", "inf", "1e400", "٣", "²", "\0", "\ud800", "../../x", "a" * 5000, "<script>", [], {}, [[]], [None],
    [[[[[]]]]], {"": ""}, [1, [2, 3]], ["a", 1, None], {"names": 1}, [math.nan] * 4, [0] * 60,
    [["1", "0", "1"]] * 4,
]  # fmt: skip
WORDS = [
    "nan",
    "inf",
    "1e999",
    "-1",
    "0.5",
    "x",
    "٣",
    "640",
    "1e-320",
    "",
    '"',
    "1e300",
    "-0",
    "\0",
    "9" * 400,
    "1_0",
]


class Wrong(Exception):
    """A result is silently wrong."""


@dataclass(frozen=True)
class Reader:
    """Functions that make a valid input in a folder, damage it and read it."""

    name: str
    share: float
    prepare: Callable[[Path], None]
    damage: Callable[[Path, random.Random], None]
    read: Callable[[Path], object]


def mangle(content: Any, rng: random.Random) -> Any:
    """Content with one to three values anywhere in it replaced, removed, repeated or shuffled."""
    content = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        node = content
        while isinstance(node, (dict, list)) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.75:
                node = node[key]
                continue
            action = rng.choice(["replace", "replace", "remove", "repeat", "shuffle"])
            if action == "replace":
                node[key] = copy.deepcopy(rng.choice(ODD))
            elif action == "remove":
                del node[key]
            elif action == "repeat" and isinstance(node, list):
                node.extend(copy.deepcopy(node[key]) for _ in range(rng.choice([1, 2, 50])))
            elif isinstance(node, list):
                rng.shuffle(node)
            break
    return content


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Bytes with bits flipped, with parts cut out, repeated or overwritten, or other bytes."""
    content = bytearray(data)
    action = rng.choice(["flip", "flip", "flip", "cut", "remove", "repeat", "zero", "noise", "prefix", "other"])
    place = rng.randrange(len(content) or 1)
    length = rng.choice([1, 8, 100, 1000])
    if action == "flip":
        for _ in range(rng.choice([1, 1, 3, 20])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif action == "cut":
        del content[place:]
    elif action == "remove":
        del content[place : place + length]
    elif action == "repeat":
        content[place:place] = content[place : place + length]
    elif action == "zero":
        content[place : place + length] = bytes(length)
    elif action == "noise":
        content[place : place + length] = rng.randbytes(length)
    elif action == "prefix":
        content[:0] = rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0" * 8, b"PK\x03\x04"])
    else:
        content = bytearray(rng.choice([b"", b"{", b"[" * 100_000, b"null", b"\x80\x04.", rng.randbytes(300)]))
    return bytes(content)


def dump(path: Path, content: Any) -> None:
    """Json as other programs might write it: NaN, infinities and lone surrogates included."""
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))


def damaged_json(name: str) -> Callable[[Path, random.Random], None]:
    """Damage a JSON file: its values, or in one of four cases its bytes."""

    def damage(folder: Path, rng: random.Random) -> None:
        whole = (folder / f"good-{name}").read_bytes()
        if rng.random() < 0.25:
            (folder / name).write_bytes(spoil(whole, rng))
        else:
            dump(folder / name, mangle(json.loads(whole), rng))

    return damage


def damaged_yaml(name: str) -> Callable[[Path, random.Random], None]:
    """Damage a YAML file: its values, or in one of three cases its bytes."""

    def damage(folder: Path, rng: random.Random) -> None:
        whole = (folder / f"good-{name}").read_bytes()
        if rng.random() < 0.3:
            (folder / name).write_bytes(spoil(whole, rng))
        else:
            text = yaml.dump(mangle(yaml.safe_load(whole), rng), allow_unicode=False)
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))

    return damage


def damaged_words(text: str, rng: random.Random, between: str) -> bytes:
    """Lines of words with one to three words replaced, or their bytes damaged."""
    if rng.random() < 0.3:
        return spoil(text.encode(), rng)
    lines = [line.split(between) for line in text.splitlines()]
    for _ in range(rng.randint(1, 3)):
        line = rng.choice(lines)
        line[rng.randrange(len(line))] = rng.choice(WORDS)
    return "\n".join(between.join(line) for line in lines).encode("utf-8", "surrogatepass")


def damaged_bytes(*names: str) -> Callable[[Path, random.Random], None]:
    """Damage the bytes of one of several files and restore the others."""

    def damage(folder: Path, rng: random.Random) -> None:
        chosen = rng.choice(names)
        for name in names:
            whole = (folder / f"good-{name}").read_bytes()
            (folder / name).write_bytes(spoil(whole, rng) if name == chosen else whole)

    return damage
