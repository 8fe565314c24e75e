"""Convert a fused track to positions in runway axes, on the earth, and as ILS deviations; write them as csv."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halopose.data.files import write_text
from halopose.geometry.camera import rotation_from_angles
from halopose.landing.flight import Flight
from halopose.landing.navigation.sensors import IlsSite
from halopose.landing.recordings.runway_sites import Site
from halopose.types import Array

_FLU = np.diag([1.0, -1.0, -1.0])  # forward-right-down to forward-left-up, the body axes of ROS
_ILS_LIMITS = np.radians([35.0, 8.0])  # degrees of coverage of an ILS: lateral, and up or down


@dataclass(frozen=True)
class Positions:
    """The fused track at N frames.

    Attributes:
        times: frame times (N,) in seconds.
        position: positions (N, 3) in runway axes.
        covariance: covariances (N, 3, 3) in runway axes.
        enu: positions (N, 3) east, north and up of the threshold.
        enu_covariance: covariances (N, 3, 3) in east, north, up.
        places: latitude and longitude in degrees, height in metres (N, 3).
        body: rotations (N, 3, 3) from body axes (forward, left, up) to runway axes; NaN without an attitude.
        turn_variance: variances (3,) of yaw, pitch and roll.
        deviations: localizer (left) and glide slope (above) deviations (N, 2) in radians.
        sigma: standard deviations (N, 2) of the deviations.
        overbound: covariances (N, 3, 3) that include an undetected GNSS drift.
        levels: protection levels (N, 3) in metres.
        available: whether a position (N,) may be used for the chosen operation: no alert, and protection levels within
            its alert limits.
        valid: whether the ILS deviations (N,) may be used: an available position inside the coverage of an ILS.
        flags: flags (N) in words.
        site: the runway.
    """

    times: Array
    position: Array
    covariance: Array
    enu: Array
    enu_covariance: Array
    places: Array
    body: Array
    turn_variance: Array
    deviations: Array
    sigma: Array
    overbound: Array
    levels: Array
    available: Array
    valid: Array
    flags: tuple[tuple[str, ...], ...]
    site: Site

    def __len__(self) -> int:
        return len(self.times)


def positions_of(flight: Flight, site: Site) -> Positions:
    """Return the fused position of a flight at every frame."""
    position, covariance = flight.fused, flight.fused_covariance
    ils = IlsSite.of_runway(site.far_end)
    angles, gradients = zip(ils.localizer_angle(position), ils.glide_slope_angle(position), strict=True)
    gradient = np.stack(gradients, axis=1)  # (N, 2, 3)
    spread = np.einsum("nia,nab,nib->ni", gradient, covariance, gradient)
    deviations = np.stack(angles, axis=1)
    answers = flight.track.output
    served = (np.abs(deviations) <= _ILS_LIMITS).all(1) & (position[:, 0] < ils.localizer[0])
    available = np.isfinite(position).all(1) & answers.valid(flight.settings.approach_requirement)
    sensor = flight.settings.sensors.attitude
    sigma = np.full(3, np.pi) if sensor is None else np.asarray(sensor.bias.sigma)
    return Positions(
        times=flight.frame_times,
        position=position,
        covariance=covariance,
        enu=site.to_enu(position),
        enu_covariance=site.turn @ covariance @ site.turn.T,
        places=site.to_wgs84(position),
        body=np.swapaxes(_FLU @ rotation_from_angles(*flight.attitude.T), 1, 2),
        turn_variance=np.square(sigma),
        deviations=deviations,
        sigma=np.sqrt(spread),
        overbound=answers.overbounds,
        levels=answers.levels,
        available=available,
        valid=available & served,
        flags=answers.flags,
        site=site,
    )


_COLUMNS = (
    "time_s", "x_m", "y_m", "z_m", "xx_m2", "xy_m2", "xz_m2", "yy_m2", "yz_m2", "zz_m2",
    "east_m", "north_m", "up_m", "east_sigma_m", "north_sigma_m", "up_sigma_m",
    "latitude_deg", "longitude_deg", "height_m",
    "localizer_deg", "localizer_sigma_deg", "glide_slope_deg", "glide_slope_sigma_deg", "valid",
    "x_overbound_m", "y_overbound_m", "z_overbound_m",
    "level_along_m", "level_lateral_m", "level_across_m", "flags",
)  # fmt: skip


def write_csv(positions: Positions, path: Path) -> Path:
    """Write one row per frame: position, sigmas and overbounds in runway axes, WGS84, and deviations in degrees."""
    upper = np.triu_indices(3)
    angles = np.degrees(np.stack([positions.deviations, positions.sigma], axis=2)).reshape(-1, 4)
    numbers = np.concatenate(
        [
            positions.times[:, None],
            positions.position,
            positions.covariance[:, upper[0], upper[1]],
            positions.enu,
            np.sqrt(np.diagonal(positions.enu_covariance, axis1=1, axis2=2)),
            positions.places,
            angles,
        ],
        axis=1,
    )
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    for n, row in enumerate(numbers.tolist()):
        bounds = [*np.sqrt(np.diagonal(positions.overbound[n])), *positions.levels[n]]
        told = [*map(repr, row), str(int(positions.valid[n])), *(repr(float(bound)) for bound in bounds)]
        told.append("; ".join(positions.flags[n]))
        rows.writerow(told)
    write_text(path, text.getvalue())
    return path
