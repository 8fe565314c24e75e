"""Plug-ins: packages that add commands, hosts, metrics, dataset readers and named models through entry points.

A distribution offers a plug-in with an entry point of the group ``halopose.plugins`` that names a `Plugin`:

    [project.entry-points."halopose.plugins"]
    mine = "my_plugin.plugin:PLUGIN"

The module that holds the `Plugin` is imported by every command, so it should import heavy packages only inside
functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Protocol

if TYPE_CHECKING:
    import typer

    from halopose.data.dataset import Dataset
    from halopose.hosts.base import Host
    from halopose.types import Array
    from halopose.uncertainty.distributions import Bivariate

log = logging.getLogger(__name__)

GROUP = "halopose.plugins"

# From the categories of a COCO file: the keypoint categories to use instead, and a function that converts an
# annotation. None if the file is of another kind.
CocoConverter = Callable[[list[Any]], Optional[tuple[list[Any], Callable[[Any], Any]]]]


class DatasetReader(Protocol):
    """Reader of a dataset format that the core does not support."""

    @property
    def name(self) -> str:
        """Name of the format in messages."""

    def reads(self, path: Path) -> bool:
        """Return whether the path is a dataset of this format."""

    def read(self, path: Path) -> Dataset:
        """Read the dataset; raise `HaloposeError` if a file is not usable."""


class HostLoader(Protocol):
    """Loader of base models of a framework that the core does not support."""

    @property
    def name(self) -> str:
        """Name of the framework in messages."""

    def loads(self, base: Any) -> bool:
        """Return whether a base model (path or module) is of this framework."""

    def load(self, base: Any, *, device: Any, unsafe: bool, end2end: bool | None) -> Host:
        """Load the base model; raise `HaloposeError` if the file is not usable."""


@dataclass(frozen=True)
class CustomMetric:
    """A metric that evaluations compute in addition to those of the protocol.

    Attributes:
        name: Key in ``Scores.custom`` and metrics.json.
        title: Label in reports, at most nine characters.
        compute: Returns the value from residuals (n, 2) in pixels, their distribution (a `Bivariate` of n keypoints),
            and integer weights (n,). A weight of 2 counts as two copies of the keypoint; the bootstrap uses it.
    """

    name: str
    title: str
    compute: Callable[[Array, Bivariate, Array], float]


@dataclass(frozen=True)
class PublishedFigures:
    """Figures of a model that the documentation publishes, on images that neither heads nor calibration have seen.

    Attributes:
        ap: Average precision of the base model's keypoints.
        coverage: Which 95 % ellipses hold how many keypoints.
        akp: Average keypoint precision of ranking by the covariance.
        time: Time per image, relative to the base model alone on two CPU cores.
        pages: Evidence pages with conditions and commands, in `docs/evidence`.
    """

    ap: float
    coverage: str
    akp: float
    time: float
    pages: tuple[str, ...]

    def __str__(self) -> str:
        return f"AP {self.ap:.3f}, 95 % ellipses hold: {self.coverage}, AKP {self.akp:.3f}, time {self.time:.2f}x"


@dataclass(frozen=True)
class NamedModel:
    """A model that loads by its name.

    Attributes:
        name: Name on the command line and in `UncertainPose.load`.
        about: One line for `halopose models`.
        base: Returns the path of the base model; it may download it.
        artifact: Returns the path of the artifact made for the base model.
        licence: SPDX identifier of the licence of base model and artifact.
        network: Architecture of the base model.
        figures: Published figures.
    """

    name: str
    about: str
    base: Callable[[], Path]
    artifact: Callable[[], Path]
    licence: str = "unknown"
    network: str = "unknown"
    figures: PublishedFigures | None = None


@dataclass(frozen=True)
class PluginExtra:
    """An extra of the distribution that only the plug-in needs.

    Attributes:
        name: Name of the extra.
        modules: Modules that it installs.
        use: One line for `halopose doctor`.
    """

    name: str
    modules: tuple[str, ...]
    use: str


def _no_commands(app: typer.Typer) -> None:
    """Register nothing."""


@dataclass(frozen=True)
class Plugin:
    """Extensions of halopose that a plug-in registers.

    Attributes:
        name: Name in messages.
        register: Adds commands to the command line; called once with the Typer application.
        dataset_readers: Readers tried in order before the formats of the core.
        coco_converters: Converters of COCO files whose annotations are not keypoints.
        models: Models that load by name.
        hosts: Loaders of base models, tried in order before those of the core.
        metrics: Metrics for ``halopose evaluate`` and ``halopose score``.
        extras: Optional requirements, which ``halopose doctor`` lists.
    """

    name: str
    register: Callable[[typer.Typer], None] = _no_commands
    dataset_readers: tuple[DatasetReader, ...] = ()
    coco_converters: tuple[CocoConverter, ...] = ()
    models: tuple[NamedModel, ...] = ()
    hosts: tuple[HostLoader, ...] = ()
    metrics: tuple[CustomMetric, ...] = ()
    extras: tuple[PluginExtra, ...] = ()


@cache
def load_plugins() -> tuple[Plugin, ...]:
    """Load the installed plug-ins once; a plug-in that fails to import is skipped with one warning."""
    loaded = []
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    for _, entry in sorted(installed.items()):
        try:
            plugin = entry.load()
        except Exception as error:  # noqa: BLE001  a broken plug-in may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            log.warning("plug-in %s cannot be loaded and is skipped (%s)", entry.name, reason)
            continue
        if isinstance(plugin, Plugin):
            loaded.append(plugin)
        else:
            log.warning("plug-in %s is skipped: %s is not a Plugin", entry.name, entry.value)
    return tuple(loaded)


def dataset_reader(path: Path) -> DatasetReader | None:
    """Return the plug-in reader that reads a path, if there is one."""
    readers = (reader for plugin in load_plugins() for reader in plugin.dataset_readers)
    return next((reader for reader in readers if reader.reads(path)), None)


def host_loader(base: Any) -> HostLoader | None:
    """Return the plug-in loader of a base model, if there is one."""
    loaders = (loader for plugin in load_plugins() for loader in plugin.hosts)
    return next((loader for loader in loaders if loader.loads(base)), None)


def custom_metrics() -> tuple[CustomMetric, ...]:
    """Return the metrics of all plug-ins."""
    return tuple(metric for plugin in load_plugins() for metric in plugin.metrics)


def convert_coco(categories: list[Any]) -> tuple[list[Any], Callable[[Any], Any]] | None:
    """Convert COCO categories by the first plug-in that supports them.

    Returns:
        The keypoint categories to use and a function that converts an annotation; None without such a plug-in.
    """
    converters = (converter for plugin in load_plugins() for converter in plugin.coco_converters)
    return next((made for made in (converter(categories) for converter in converters) if made is not None), None)
