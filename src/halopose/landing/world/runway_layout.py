"""Layout of a runway: pavement, markings, taxiways and lights, in order of painting.

Sizes of markings and places of lights follow ICAO Annex 14.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from halopose.landing.world.scenes import Runway
from halopose.types import Array

Colour = tuple[float, float, float]  # blue, green, red, linear
Span = tuple[float, float]

WHITE: Colour = (0.62, 0.66, 0.66)
YELLOW: Colour = (0.05, 0.42, 0.55)
_KEYS = {18: 4, 23: 6, 30: 8, 40: 10, 45: 12, 50: 14, 60: 16}  # threshold bars by width of the runway
_SEGMENTS = {  # strokes of a figure: top, top left, top right, middle, bottom left, bottom right, bottom
    "0": "1110111", "1": "0010010", "2": "1011101", "3": "1011011", "4": "0111010", "5": "1101011", "6": "1101111",
    "7": "1010010", "8": "1111111", "9": "1111011", "L": "0100101", "R": "1111110", "C": "1100101",
}  # fmt: skip


@dataclass(frozen=True)
class Patch:
    """Rectangles of paint or pavement over the same range of x.

    Attributes:
        x: range of x.
        bars: ranges of y.
        colour: colour.
        opacity: opacity.
        dash: length of paint and of the gap.
        slant: change of y per metre of x.
    """

    x: Span
    bars: tuple[Span, ...]
    colour: Colour
    opacity: float = 1.0
    dash: Span | None = None
    slant: float = 0.0


@dataclass(frozen=True)
class Lights:
    """Places (L, 3), colours (L, 3) blue, green, red, and intensities (L,) in candela at full power."""

    place: Array
    colour: Array
    candela: Array


def _turned(patch: Patch, length: float) -> Patch:
    """Return the same patch at the other end of the runway."""
    bars = tuple((-high, -low) for low, high in patch.bars)
    return replace(patch, x=(length - patch.x[1], length - patch.x[0]), bars=bars)


def _moved(patch: Patch, runway: Runway) -> Patch:
    dx, dy = runway.threshold
    bars = tuple((low + dy, high + dy) for low, high in patch.bars)
    return replace(patch, x=(patch.x[0] + dx, patch.x[1] + dx), bars=bars)


def opposite(designator: str) -> str:
    """Return the designator of the other end."""
    letter = {"L": "R", "R": "L"}.get(designator[2:], designator[2:])
    return f"{(int(designator[:2]) + 17) % 36 + 1:02d}{letter}"


def runway_patches(runway: Runway, paint: float) -> list[Patch]:
    """Return markings of both ends, edges and centreline; ``paint`` is their opacity, lower on an old runway."""
    half, length = runway.width / 2, runway.length
    first, last = (_end_patches(name, runway, paint) for name in (runway.designator, opposite(runway.designator)))
    stripe = stripe_width(runway.width)
    left, right = runway.before
    between = [
        Patch((-left, length), ((half - stripe, half),), WHITE, paint),
        Patch((-right, length), ((-half, -half + stripe),), WHITE, paint),
        Patch((75.0, length - 75.0), ((-0.45, 0.45),), WHITE, paint, dash=(30.0, 20.0)),
    ]
    if any(runway.before):
        between.append(Patch((-max(runway.before), -12.0), ((-0.45, 0.45),), WHITE, paint, dash=(30.0, 20.0)))
    patches = between + first + [_turned(patch, length) for patch in last]
    return [_moved(patch, runway) for patch in patches]


def _end_patches(name: str, runway: Runway, paint: float) -> list[Patch]:
    bars, *others = (Patch(x, across, WHITE, paint) for x, across in end_markings(runway.length, runway.width))
    return [bars, *_name(name, paint), *others]


def stripe_width(width: float) -> float:
    """Return the width of a runway's side stripes."""
    return 0.9 if width >= 30 else 0.45


def end_markings(length: float, width: float) -> list[tuple[Span, tuple[Span, ...]]]:
    """Return ranges of x and y of an end's threshold bars, aiming point and touchdown marks, without the designator."""
    pairs = _KEYS.get(int(width), 12) // 2
    pitch = (width / 2 - 1.5) / pairs
    keys = [(0.9 + pitch * k, 0.9 + pitch * k + 0.55 * pitch) for k in range(pairs)]
    large = length >= 2400 and width > 30
    aim, inner, wide = (400.0, 9.0, 9.0) if large else (300.0, 7.5, 6.0)
    if width < 30:
        inner, wide = 4.5, 3.0
    long = 60.0 if wide > 6 else 45.0
    markings = [((6.0, 36.0), _both_sides(keys)), ((aim, aim + long), _both_sides([(inner, inner + wide)]))]
    counts = (3, 3, 2, 2, 1, 1) if large else (2, 2, 1, 1) if length >= 1500 else (1, 1)
    for zone, count in enumerate(counts, start=1):
        x = 150.0 * zone
        if abs(x - aim) < 80 or width < 30:
            continue
        bars = [(inner + 3.3 * k, inner + 3.3 * k + 1.8) for k in range(count)]
        markings.append(((x, x + 22.5), _both_sides(bars)))
    return markings


def _both_sides(bars: Iterable[Span]) -> tuple[Span, ...]:
    bars = list(bars)
    return (*bars, *((-high, -low) for low, high in bars))


def _name(name: str, paint: float) -> list[Patch]:
    """Return figures 9 m high, read in the landing direction, with the letter below them if there is one."""
    patches = []
    digits, letter = name[:2].lstrip("0"), name[2:]
    start = 48.0
    for text in filter(None, (letter, digits)):
        left = (len(text) * 3.6 + (len(text) - 1) * 1.8) / 2
        for place, sign in enumerate(text):
            patches += _figure(sign, start, left - place * 5.4, paint)
        start += 15.0
    return patches


def _figure(sign: str, x: float, left: float, paint: float) -> list[Patch]:
    """Return the strokes of one sign whose lower left corner is (x, left)."""
    right, top, thick = left - 3.6, x + 9.0, 0.9
    middle = x + 4.5
    strokes = [
        ((top - 1.2, top), (right, left)), ((middle, top), (left - thick, left)),
        ((middle, top), (right, right + thick)),
        ((middle - 0.6, middle + 0.6), (right, left)), ((x, middle), (left - thick, left)),
        ((x, middle), (right, right + thick)), ((x, x + 1.2), (right, left)),
    ]  # fmt: skip
    return [
        Patch(along, (across,), WHITE, paint)
        for on, (along, across) in zip(_SEGMENTS[sign], strokes, strict=True)
        if on == "1"
    ]


def field_patches(runway: Runway, rng: np.random.Generator) -> list[Patch]:
    """Return taxiways, aprons and the paved ends of a runway, below its own pavement."""
    length, half = runway.length, runway.width / 2
    side = int(rng.choice([-1, 1]))
    grey = rng.uniform(0.10, 0.26)
    colour = _tinted(grey, rng)
    off, wide = float(rng.uniform(120.0, 240.0)), float(rng.choice([15.0, 23.0, 30.0]))

    def across(near: float, far: float) -> Span:
        return (near, far) if side > 0 else (-far, -near)

    patches = [Patch((-5.0, length + 5.0), (across(off, off + wide),), colour)]
    line = across(off + wide / 2 - 0.15, off + wide / 2 + 0.15)
    exits = [4.0, *rng.uniform(500.0, length - 500.0, rng.integers(2, 5)).tolist(), length - 30.0]
    patches += [Patch((x, x + wide), (across(half, off + wide / 2),), colour) for x in exits]
    patches.append(Patch((-5.0, length + 5.0), (line,), YELLOW, 0.8))
    for x in rng.uniform(900.0, length - 300.0, rng.integers(1, 3)).tolist():  # rapid exits, slanted
        run = off / 0.55
        patches.append(Patch((x, x + run), (across(-4.0, wide - 4.0),), colour, slant=side * 0.55))
    begin, deep = rng.uniform(0.1, 0.6) * length, rng.uniform(100.0, 300.0)
    stands, close = (begin, begin + rng.uniform(300.0, 900.0)), off + wide + 20
    patches.append(Patch(stands, (across(close, close + deep),), _tinted(rng.uniform(0.15, 0.35), rng)))
    paved = float(rng.choice([0.0, 60.0, 60.0, 150.0]))
    if paved:
        ends = ((-half, half),)
        patches += [Patch(x, ends, _tinted(0.11, rng)) for x in ((-paved, 0.0), (length, length + paved))]
    return [_moved(patch, runway) for patch in patches]


def _tinted(grey: float, rng: np.random.Generator) -> Colour:
    warm = rng.uniform(-0.06, 0.06)
    return (grey * (1 - warm), grey, grey * (1 + warm))


# --- lights -----------------------------------------------------------------------------------------------

_LAMP = {"white": (0.72, 0.92, 1), "amber": (0.08, 0.62, 1), "green": (0.45, 1, 0.12), "red": (0.05, 0.06, 1)}


def runway_lights(runway: Runway, viewer: Array, rng: np.random.Generator) -> Lights:
    """Return edge, threshold, end and approach lights and PAPI of a runway, as seen from the viewer (3,)."""
    groups = edge_lamps(runway.length, runway.width)
    if runway.width >= 45 and rng.random() < 0.6:
        groups.append((centreline_lamps(runway.length), "white", 3e3))
    groups += _approach_lights(rng)
    groups += _papi(runway, viewer, -1 if rng.random() < 0.2 else 1)
    place = np.concatenate([g[0] for g in groups]) + runway.threshold
    counts = [len(g[0]) for g in groups]
    candela = np.repeat([g[2] for g in groups], counts) * np.exp(rng.normal(0, 0.12, sum(counts)))
    colour = np.repeat(np.array([_LAMP[g[1]] for g in groups]), counts, axis=0)
    return Lights(np.column_stack([place, np.full(len(place), 0.4)]), colour, candela)


def edge_lamps(length: float, width: float) -> list[tuple[Array, str, float]]:
    """Return places (L, 2), colour and candela of edge, threshold and end lights: for the left and then the right edge
    white and amber lamps, then the green and the red bar.
    """
    groups: list[tuple[Array, str, float]] = []
    half = width / 2 + 1.5
    along = np.arange(0.0, length + 1, 60.0)
    for y in (half, -half):
        edge = np.stack([along, np.full_like(along, y)], axis=1)
        amber = along > length - 600
        groups += [(edge[~amber], "white", 6e3), (edge[amber], "amber", 4e3)]
    bar = np.arange(-half, half + 0.1, 3.0)
    groups.append((np.stack([np.full_like(bar, -1.0), bar], axis=1), "green", 8e3))
    groups.append((np.stack([np.full_like(bar[::2], length + 1), bar[::2]], axis=1), "red", 3e3))
    return groups


def centreline_lamps(length: float) -> Array:
    """Return places (L, 2) of centreline lights."""
    along = np.arange(30.0, length, 30.0)
    return np.stack([along, np.zeros_like(along)], axis=1)


def _approach_lights(rng: np.random.Generator) -> list[tuple[Array, str, float]]:
    """Return barrettes every 30 m out to 900 or 420 m with crossbars, or none at a simple runway."""
    reach = float(rng.choice([900.0, 900.0, 420.0, 0.0]))
    rows = np.arange(30.0, reach + 1, 30.0)
    across = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    lamps = [np.stack([np.repeat(-rows, 5), np.tile(across, len(rows))], axis=1)]
    for far in (300.0, 150.0):
        if far <= reach:
            wings = np.concatenate([np.arange(4.5, 15.1, 1.5), -np.arange(4.5, 15.1, 1.5)])
            lamps.append(np.stack([np.full_like(wings, -far), wings], axis=1))
    return [(np.concatenate(lamps), "white", 1.2e4)] if reach else []


def _papi(runway: Runway, viewer: Array, side: int) -> list[tuple[Array, str, float]]:
    """Return four units beside the aiming point that show white above their angle and red below it."""
    x = 400.0 if runway.length >= 2400 else 300.0
    away = np.array([x + runway.threshold[0], runway.threshold[1]]) - viewer[:2]
    angle = np.degrees(np.arctan2(viewer[2], np.hypot(*away)))
    settings = [2.5, 2.83, 3.17, 3.5]  # from the outermost unit inwards
    units = []
    for place, setting in enumerate(settings):
        y = side * (runway.width / 2 + 15 + 9 * (3 - place))
        units.append((np.array([[x, y]]), "white" if angle > setting else "red", 1.5e4))
    return units
