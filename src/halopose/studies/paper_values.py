"""Values of the paper's tables, for YOLO-NAS-Pose Nano and Large on COCO.

Reference:
    From Keypoints to Predictive Distributions: Post-Hoc Uncertainty for YOLO-Pose Models, tables 1 to 5.
"""

from __future__ import annotations

from collections.abc import Mapping

MODELS = ("Nano", "Large")

# Table 1 by model and distribution.
CORE: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("Nano", "uncalibrated"): {"ace": 0.0374, "ence": 0.1061, "nll": 5.67, "akp": 0.935},
    ("Nano", "gaussian"): {"ace": 0.0582, "ence": 0.0570, "nll": 5.62, "akp": 0.935},
    ("Nano", "student_t"): {"ace": 0.0016, "ence": 0.0434, "nll": 5.50, "akp": 0.935},
    ("Large", "uncalibrated"): {"ace": 0.0252, "ence": 0.1538, "nll": 5.47, "akp": 0.948},
    ("Large", "gaussian"): {"ace": 0.0602, "ence": 0.0813, "nll": 5.42, "akp": 0.948},
    ("Large", "student_t"): {"ace": 0.0020, "ence": 0.0770, "nll": 5.27, "akp": 0.948},
}
AKP_RANDOM = {"Nano": 0.791, "Large": 0.831}

# Table 2: after pruning.
PRUNED: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("Nano", "gaussian"): {"ace": 0.0539, "ence": 0.0467, "nll": 5.35},
    ("Nano", "student_t"): {"ace": 0.0049, "ence": 0.0488, "nll": 5.25},
    ("Large", "gaussian"): {"ace": 0.0604, "ence": 0.0608, "nll": 5.20},
    ("Large", "student_t"): {"ace": 0.0040, "ence": 0.0560, "nll": 5.08},
}

# Table 3: ACE, ENCE, NLL and AKP after Gaussian calibration, by row of ``halopose ablate`` and model.
ABLATION: Mapping[str, Mapping[str, tuple[float, float, float, float]]] = {
    "default": {"Nano": (0.0582, 0.0570, 5.62, 0.935), "Large": (0.0602, 0.0813, 5.42, 0.948)},
    "no-scale-weights": {"Nano": (0.0596, 0.0579, 5.64, 0.936), "Large": (0.0699, 0.0861, 5.43, 0.948)},
    "no-importance-weights": {"Nano": (0.0689, 0.0637, 5.64, 0.935), "Large": (0.0796, 0.0868, 5.43, 0.947)},
    "diagonal": {"Nano": (0.0617, 0.0629, 5.67, 0.934), "Large": (0.0658, 0.0778, 5.44, 0.948)},
    "isotropic": {"Nano": (0.0652, 0.0603, 5.71, 0.935), "Large": (0.0678, 0.0762, 5.48, 0.948)},
    "last-layer": {"Nano": (0.1017, 0.0536, 5.85, 0.916), "Large": (0.0770, 0.0811, 5.56, 0.933)},
}

# Table 4: AKP with Gaussian and Student-t covariances.
SCALARISATION: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "default": {"Nano": (0.935, 0.935), "Large": (0.948, 0.948)},
    "determinant": {"Nano": (0.935, 0.934), "Large": (0.948, 0.948)},
    "eigenvalue": {"Nano": (0.933, 0.933), "Large": (0.946, 0.946)},
}

# Table 5: ACE, ENCE and NLL after pruning, each Gaussian and Student-t.
THRESHOLD: Mapping[str, Mapping[str, tuple[float, float, float, float, float, float]]] = {
    "default": {
        "Nano": (0.0539, 0.0049, 0.0467, 0.0488, 5.35, 5.25),
        "Large": (0.0604, 0.0040, 0.0608, 0.0560, 5.20, 5.08),
    },
    "distance": {
        "Nano": (0.0540, 0.0049, 0.0465, 0.0488, 5.36, 5.25),
        "Large": (0.0604, 0.0040, 0.0608, 0.0560, 5.20, 5.08),
    },
    "f1": {
        "Nano": (0.0580, 0.0016, 0.0584, 0.0446, 5.65, 5.50),
        "Large": (0.0602, 0.0021, 0.0815, 0.0771, 5.42, 5.26),
    },
}
