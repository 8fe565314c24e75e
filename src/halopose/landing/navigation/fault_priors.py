"""Prior probabilities of faulty sensors, and the fault hypotheses that the protection levels cover.

A hypothesis is a set of sources that are wrong together. Single faults are always covered. Two at once are covered if
they have a common cause, or if two independent faults are likelier than ``threshold``. What is left is not covered and
is taken from the integrity risk (``unmonitored``), as in ARAIM.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import combinations

from halopose.geometry.integrity import check_risk
from halopose.landing.navigation.sensors import SIZES, Source

Hypothesis = frozenset[Source]

# Assumed, per approach. Nobody has measured these for an installation: set your own.
VISION_FAULT = 1e-3  # of the detector
_SINGLE: dict[Source, float] = {
    "gnss": 1e-4,
    "localizer": 1e-5,
    "glide_slope": 1e-5,
    "radio": 1e-3,
    "irs": 1e-5,
    "vision": VISION_FAULT,
}
_COMMON: dict[Hypothesis, float] = {
    frozenset({"gnss", "localizer"}): 1e-6,
    frozenset({"gnss", "glide_slope"}): 1e-6,
    frozenset({"localizer", "glide_slope"}): 1e-6,
}


@dataclass(frozen=True)
class FaultPriors:
    """Probabilities of faults in one approach.

    Attributes:
        single: probability by source.
        common: probability by set of sources that fail from one cause.
        threshold: probability from which two independent faults at once are a hypothesis.
    """

    single: dict[Source, float] = field(default_factory=lambda: dict(_SINGLE), hash=False)
    common: dict[Hypothesis, float] = field(default_factory=lambda: dict(_COMMON), hash=False)
    threshold: float = 8e-8

    def __post_init__(self) -> None:
        for name, value in (*self.single.items(), *self.common.items(), ("threshold", self.threshold)):
            check_risk(f"the fault probability of {name}", value)

    def with_single(self, source: Source, probability: float) -> FaultPriors:
        """Return the priors with another probability of one source."""
        return replace(self, single={**self.single, source: probability})

    def of(self, hypothesis: Hypothesis) -> float:
        """Probability of a hypothesis; 1 of the empty one."""
        if hypothesis in self.common:
            return self.common[hypothesis]
        product = 1.0
        for source in hypothesis:
            product *= self.single[source]
        return product

    def covered(self, sources: Collection[Source]) -> list[Hypothesis]:
        """Hypotheses, single ones first, that the levels cover with these sources on board."""
        known = [source for source in SIZES if source in sources and source in self.single]
        pairs = [frozenset(pair) for pair in combinations(known, 2)]
        return [
            *(frozenset({source}) for source in known),
            *(pair for pair in pairs if pair in self.common or self.of(pair) > self.threshold),
        ]

    def unmonitored(self, sources: Collection[Source]) -> float:
        """Probability of two or more faults at once that no hypothesis covers."""
        known = [source for source in SIZES if source in sources and source in self.single]
        covered = set(self.covered(known))
        pairs = sum(self.of(frozenset(pair)) for pair in combinations(known, 2) if frozenset(pair) not in covered)
        return pairs + sum(self.of(frozenset(three)) for three in combinations(known, 3))
