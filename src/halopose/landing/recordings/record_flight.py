"""Write a simulated approach as a recording (video, camera, runway, logs) for ``halopose land replay``."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from halopose.data.files import make_folder, write_json, write_text
from halopose.data.films import FilmWriter
from halopose.landing.flight import Flight, SimulatedFlight, simulate_sensors
from halopose.landing.navigation.terrain import LEVEL
from halopose.landing.recordings.cameras import camera_text
from halopose.landing.recordings.logs import write_logs, write_terrain
from halopose.landing.recordings.runway_sites import Site, runway_content

ORIGIN = (37.6135380, -122.3571600, 4.0)  # latitude, longitude and height, as at San Francisco


def site_of(flight: Flight) -> Site:
    """Place the runway of a flight at San Francisco, in the direction of its designator."""
    heading = np.radians(10.0 * int(flight.scenario.designator[:2]))
    return Site(flight.scenario.designator, flight.scenario.corners, *ORIGIN, float(heading))


def record(flight: SimulatedFlight, folder: Path) -> Path:
    """Write all files to a folder; the true positions are a separate log."""
    make_folder(folder)
    site = site_of(flight)
    _, measured = simulate_sensors(flight.approach, flight.truth, flight.settings)
    world = flight.approach.world
    camera, mount = flight.settings.camera.believed(world.camera, world.mount, flight.settings.seed)
    write_text(folder / "camera.yaml", camera_text(camera, mount))
    write_json(folder / "runway.json", runway_content(site))
    write_logs(folder, measured, site)
    write_terrain(folder / "terrain.csv", LEVEL)
    places = site.to_wgs84(flight.position)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["time_s", "latitude_deg", "longitude_deg", "height_m"])
    rows.writerows(
        [repr(float(value)) for value in (time, *place)]
        for time, place in zip(flight.frame_times.tolist(), places.tolist(), strict=True)
    )
    write_text(folder / "truth.csv", text.getvalue())
    if flight.images:
        with FilmWriter(folder / "video.mp4", flight.settings.rate) as film:
            for image in flight.images:
                film.write(image)
    return folder
