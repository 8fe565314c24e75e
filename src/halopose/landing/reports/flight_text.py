"""Format the summary of a landing: labels with units and rounding, for terminal and page."""

from __future__ import annotations

from typing import Any

import numpy as np

from halopose.reports.html import number, percent

LABELS = {
    "frames": "frames of the camera",
    "frames_with_detections": "frames with a detection",
    "runway_detected": "frames with the runway identified",
    "position_solved": "frames with a position",
    "trusted": "frames with a trusted position",
    "truth_known": "frames with a known true position (errors refer to these)",
    "corner_excluded": "of these, frames with a corner left out",
    "vision_outside_95": "positions by vision outside their 95 % ellipsoid",
    "trusted_vision_outside_95": "trusted ones outside it",
    "beyond_protection_level": "trusted frames beyond a protection level",
    "available": "frames by alert limit (Stanford diagram)",
    "fused_nees": "NEES of the fused position, mean; should be 3",
    "fused_nees_inside_95": "frames with a NEES inside its 95 % bounds",
    "root_mean_square_error": "root mean square error, m",
    "rejected_by_filter": "measurements rejected by the filter",
    "frames_not_used_because": "frames not used, and why",
    "levels_overdrawn": "levels of single frames are infinite: uncovered faults are likelier than the risk allows",
    "valid": "frames with a valid fused position: no alert, levels within the alert limits",
    "seconds_flagged_because": "seconds flagged, and why",
    "monitor": "calibration monitor, one frame per second",
    "x": "x, along the runway",
    "y": "y, to the left",
    "z": "z, up",
}
_SHARES = ("valid", "vision_outside_95", "trusted_vision_outside_95", "fused_nees_inside_95")
_DIGITS = {"fused_nees": 2, "root_mean_square_error": 2, "seconds_flagged_because": 1}


def format_value(key: str, value: Any) -> str:
    """Return a value of the summary as text."""
    if value is None:
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple, np.ndarray)):
        return ", ".join(format_value(key, entry) for entry in value)
    if key in _SHARES:
        return percent(float(value))
    if key in _DIGITS:
        return number(float(value), _DIGITS[key])
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return "–"
        text = f"{value:.0f}" if abs(float(value)) >= 1000 else f"{value:.3g}"
        return text.replace("-", "−")
    return str(value)


def to_text(summary: dict[str, Any]) -> str:
    """Return the summary for the terminal."""
    lines = [
        f"{summary['frames']} frames: detections in {summary['frames_with_detections']}, runway identified in "
        f"{summary['runway_detected']}, position solved in {summary['position_solved']}, trusted in "
        f"{summary['trusted']}"
    ]
    if np.isnan(summary["fused_nees"]):
        lines.append("no true positions, so no errors; the page shows the estimated uncertainty")
        return "\n".join([*lines, *_reasons(summary)])
    if "truth_known" in summary:
        lines.append(f"errors are of the {summary['truth_known']} frames with a known truth")
    errors = summary["root_mean_square_error"]
    lines.append(f"{'RMSE, metres':16}" + "".join(f"{axis:>10}" for axis in errors))
    for source, name in (("vision", "trusted vision"), ("fused", "fused")):
        cells = [format_value("root_mean_square_error", row[source]) for row in errors.values()]
        lines.append(f"{name:16}" + "".join(f"{cell:>10}" for cell in cells))
    if summary["position_solved"]:
        outside = f"outside its 95 % ellipsoid: {_of(summary, 'vision_outside_95')} of vision"
        if summary["trusted"]:
            outside += f", {_of(summary, 'trusted_vision_outside_95')} of what is trusted"
        lines.append(outside)
    inside = f"{_of(summary, 'fused_nees_inside_95')} inside its 95 % bounds"
    lines.append(f"fused NEES {_of(summary, 'fused_nees')}, where 3 is expected, {inside}")
    return "\n".join([*lines, *_reasons(summary)])


def _of(summary: dict[str, Any], key: str) -> str:
    return format_value(key, summary[key])


def _reasons(summary: dict[str, Any]) -> list[str]:
    lost = [f"{count} frames not used: {why}" for why, count in summary["frames_not_used_because"].items()]
    lost.append(f"valid in {_of(summary, 'valid')} of the frames: no alert, and levels within the alert limits")
    if summary["levels_overdrawn"]:
        lost.append("levels of single frames are infinite: uncovered faults are likelier than the risk allows")
    if "monitor" in summary:
        lost.append(f"monitor: {summary['monitor']}")
    return lost + [
        f"flagged for {format_value('seconds_flagged_because', time)} s: {why}"
        for why, time in summary["seconds_flagged_because"].items()
    ]
