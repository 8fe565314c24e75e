"""Files of a landing: page, log, animation, and positions in formats of other tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halopose.data.files import make_folder, write_json, write_text
from halopose.errors import HaloposeError
from halopose.landing.flight import Flight
from halopose.landing.recordings import need
from halopose.landing.recordings.position_log import positions_of, write_csv
from halopose.landing.recordings.record_flight import site_of
from halopose.landing.recordings.rerun_file import write_rerun
from halopose.landing.recordings.ros_messages import write_mcap
from halopose.landing.recordings.runway_sites import Site
from halopose.landing.reports import flight_page, flight_pictures

FORMATS = {"csv": "positions.csv", "mcap": "positions.mcap", "rerun": "landing.rrd"}


@dataclass(frozen=True)
class Landing:
    """Result of a simulated or replayed approach.

    Attributes:
        flight: all frames, vision fixes and the fused track.
        summary: counts, errors and consistency, from ``summarise``.
        site: the runway on the earth; None for a simulated flight, which is placed at San Francisco.
        advice: hints for the user about frames that were not used.
    """

    flight: Flight
    summary: dict[str, Any]
    site: Site | None = None
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class LandingOutputs:
    """Folder and formats of the files; raises `HaloposeError` at once if a format or a package is missing.

    Attributes:
        folder: folder of all files.
        animation: whether to draw the animation.
        formats: further files, keys of `FORMATS`.
    """

    folder: Path
    animation: bool = True
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise HaloposeError(f"unknown format {name!r} of --write: give {', '.join(FORMATS)}")
        if self.formats:
            need("pymap3d")
        if "mcap" in self.formats:
            need("mcap_ros2.writer"), need("rosbags.typesys")
        if "rerun" in self.formats:
            need("rerun", "rerun")
        if self.animation:
            flight_pictures.check_animation(self.folder / "landing.webp")

    @property
    def need_images(self) -> bool:
        """Whether the files show camera images."""
        return self.animation or "rerun" in self.formats

    def make_folder(self) -> None:
        """Create the folder, so that a folder without write permission is refused before the flight."""
        make_folder(self.folder)

    def write(self, landing: Landing) -> list[Path]:
        """Write all files and return their paths."""
        self.make_folder()
        flight, folder = landing.flight, self.folder
        write_json(folder / "log.json", {"summary": landing.summary, **flight_page.log_of(flight)})
        pictures = flight_pictures.draw_film(flight) if self.animation else []
        film = flight_pictures.write_film(pictures, folder / "landing.webp") if self.animation else None
        page = flight_page.render_page(flight, landing.summary, flight_pictures.stills(pictures))
        write_text(folder / "landing.html", page)
        written = [path for path in (film, folder / "landing.html", folder / "log.json") if path]
        return [*written, *self._write_positions(landing)]

    def _write_positions(self, landing: Landing) -> list[Path]:
        if not self.formats:
            return []
        positions = positions_of(landing.flight, landing.site or site_of(landing.flight))
        paths = {name: self.folder / FORMATS[name] for name in self.formats}
        if "csv" in paths:
            write_csv(positions, paths["csv"])
        if "mcap" in paths:
            write_mcap(positions, paths["mcap"])
        if "rerun" in paths:
            write_rerun(landing.flight, positions, paths["rerun"])
        return list(paths.values())
