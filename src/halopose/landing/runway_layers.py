"""A runway as layers for ``halopose.geometry.plane_alignment``: pavement, markings, surroundings and lamps."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from halopose.geometry.plane_alignment import GroundPoints, LampRow, Layer
from halopose.landing.runway import runway_corners
from halopose.landing.world.runway_layout import centreline_lamps, edge_lamps, end_markings, stripe_width
from halopose.types import Array, Mask

_SHOULDERS = ((0.0, 3.0), (3.0, 7.5))  # metres beside the pavement that may differ from the ground
_TRACKS = 6.5  # metres from the centreline to the outside of the wheel tracks
_DASHES = 0.6  # painted share of the centreline
_LAMP_HEIGHT = 0.4
_RESOLVED = 15.0  # metres per pixel along the runway below which dashes of the centreline are resolved


class RunwayLayers:
    """Layers of a runway with markings after ICAO Annex 14, in runway axes.

    Args:
        length: Length in metres.
        width: Width in metres between the outsides of the side stripes.
    """

    def __init__(self, length: float, width: float) -> None:
        self.length, self.width, self._half = length, width, width / 2
        near = end_markings(length, width)
        far = [((length - x1, length - x0), tuple((-high, -low) for low, high in bars)) for (x0, x1), bars in near]
        self._markings = near + far

    @cached_property
    def corners(self) -> Array:
        """Corners (4, 3)."""
        return runway_corners(self.length, self.width)

    @cached_property
    def lamps(self) -> tuple[LampRow, ...]:
        """White and amber edge lamps, threshold, end and centreline lamps."""
        left_white, left_amber, right_white, right_amber, green, red = (
            places for places, _, _ in edge_lamps(self.length, self.width)
        )
        rows = [
            (np.concatenate([left_white, right_white]), 0, True),
            (np.concatenate([left_amber, right_amber]), 1, False),
            (green, 1, True),
            (red, 1, False),
            (centreline_lamps(self.length), 1, True),
        ]
        return tuple(
            LampRow(np.column_stack([places, np.full(len(places), _LAMP_HEIGHT)]), knots, bright)
            for places, knots, bright in rows
        )

    def informative(self, ground: GroundPoints, band: float) -> Mask:
        """Return the pixels (N,) near edges, ends and markings, without designator, dashes and approach lights."""
        x, y = ground.x, ground.y
        reach_x, reach_y = band * ground.pixel_x, band * ground.pixel_y
        beside, along = np.abs(y) < self._half + reach_y, (x > -reach_x) & (x < self.length + reach_x)
        edges = np.minimum(np.abs(y - self._half), np.abs(y + self._half)) < reach_y
        ends = np.minimum(np.abs(x), np.abs(x - self.length)) < reach_x
        taken = (edges & along) | (ends & beside)
        for (low, high), _ in self._markings:
            taken |= (x > low - reach_x) & (x < high + reach_x) & beside
        fine = ground.pixel_x < _RESOLVED
        dashes = fine & (ground.pixel_y < 8) & (x > 70) & (np.abs(y) < 0.45 + 1.2 * ground.pixel_y)
        designator = (x > 40) & (x < 78) & (np.abs(y) < 9 + ground.pixel_y) & (ground.pixel_x < 20)
        approach_lights = (x < -12 - 1.5 * ground.pixel_x) & (np.abs(y) < 3 + 1.5 * ground.pixel_y)
        return np.asarray(taken & ~(dashes | (designator & (ground.pixel_y < 10)) | approach_lights))

    def layers(self, ground: GroundPoints) -> list[Layer]:
        """Return ground left and right, shoulders, pavement, wheel tracks, ground before and beyond, and paint."""
        half, length = self._half, self.length
        inside = ground.y_share(-half, half)
        right = ground.y_share(-np.inf, -half)
        between, before = ground.x_share(0, length), ground.x_share(-np.inf, 0)
        paint = self._paint(ground, between)
        layers = [Layer(1 - inside - right, 8), Layer(right, 8)]
        for low, high in _SHOULDERS:
            layers += [
                Layer(ground.y_share(half + low, half + high) * between, 3, 0.3),
                Layer(ground.y_share(-half - high, -half - low) * between, 3, 0.3),
            ]
        return [
            *layers,
            Layer(inside * between - paint, 8),
            Layer(ground.y_share(-_TRACKS, _TRACKS) * between, 4, 0.3),
            Layer(inside * before, 4),
            Layer(inside * (1 - between - before), 1),
            Layer(paint, 0),
        ]

    def _paint(self, ground: GroundPoints, between: Array) -> Array:
        half, stripe = self._half, stripe_width(self.width)
        paint = (ground.y_share(half - stripe, half) + ground.y_share(-half, stripe - half)) * between
        paint += _DASHES * ground.y_share(-0.45, 0.45) * ground.x_share(75.0, self.length - 75.0)
        for (low, high), bars in self._markings:
            rows = np.flatnonzero((ground.x > low - 5 * ground.blur_x) & (ground.x < high + 5 * ground.blur_x))
            if len(rows):
                part = ground.select(rows)
                paint[rows] += part.x_share(low, high) * sum(part.y_share(*bar) for bar in bars)
        return np.asarray(paint)
