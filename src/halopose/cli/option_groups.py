"""Groups of options in the help of commands with many options."""

from __future__ import annotations

from collections.abc import Iterable

MANY_OPTIONS = 10  # a command with more has groups

_GROUPS = {
    "Model": "base artifact tuned deployed family end2end unsafe uncalibrated visibility imgsz widen",
    "Data": "data frames split train val images val_images truth against file_format size sizes calibration overlap",
    "Detections": "conf iou classes max_det detections alarm score monitor",
    "Film": "rate confirm gap camera_motion causal responsive vid_stride offsets smooth frame_rate",
    "Pictures": "probability hide_pruned boxes legend pictures picture show animation",
    "Output": "output joint exist_ok save_txt save_csv report log work write record unit up cells web",
    "Training": (
        "epochs alpha alphas seeds scale_weight dof dispersion trunk warm_start context train_sizes loss sigma lr "
        "freeze mirror control heads head_epochs amp novelty_images features"
    ),
    "Calibration": (
        "preset match source share calibration_share fraction rule region_scales offset area scalarisation sigmas "
        "covariance ignore_covariance"
    ),
    "Evaluation": "bootstrap folds scale_edges shift kinds",
    "Export": "form windows int8",
    "Machine": "device runtime half workers batch engine part seed",
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}
# Options that mean something else in one command.
_SPECIAL = {
    ("fit", "calibration"): "Calibration",
    ("ablate", "calibration"): "Calibration",
    ("evaluate", "area"): "Evaluation",
}


def add_option_group(title: str, names: str, *, commands: Iterable[str]) -> None:
    """Add a group for the commands of a plug-in.

    Args:
        title: Title above the options.
        names: Names of the parameters, separated by spaces.
        commands: Commands whose options are meant.
    """
    _SPECIAL.update({(command, name): title for command in commands for name in names.split()})


def option_group(command: str, option: str) -> str | None:
    """Return the group of an option of a command; None if it has none.

    Args:
        command: Name of the command.
        option: Name of the parameter.
    """
    return _SPECIAL.get((command, option), _GROUP_OF.get(option))
