"""A small random network in the form in which MoveNet MultiPose is published, and its maps in PyTorch."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

CHANNELS = {"center": 1, "box_scale": 2, "box_offset": 2, "kpt_heatmap": 17, "kpt_regress": 34, "kpt_offset": 34}
WIDTH = 8
BIAS = {"center": -0.5, "box_scale": 14.0, "kpt_heatmap": -0.5}  # large boxes and a few clear maxima


class Network:
    """Nodes, weights and, for a batch of images, the maps that they give."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[dict[str, Any]] = [_node("input", "Placeholder"), _node("Cast", "Cast", ["input"])]
        self.weights: dict[str, np.ndarray] = {}
        for name, kind, value in (("mean", "Sub", 0.0), ("scale", "Mul", 2 / 255), ("shift", "Sub", 1.0)):
            self.weight(f"P/{name}/y", np.full((1, 1, 1, 3) if name != "shift" else (), value))
            self.nodes.append(_node(f"P/{name}", kind, [self.nodes[-1]["name"], f"P/{name}/y"]))
        fine = self.convolution("P/stem/Relu6", "P/shift", 3, WIDTH, 3, stride=2, activation="Relu6")
        fine = self.depthwise("P/block/depthwise", fine, stride=2, activation="Relu6")
        coarse = self.convolution("P/deep/Relu", fine, WIDTH, WIDTH, 3, stride=2, activation="Relu")
        half = {"align_corners": {"b": False}, "half_pixel_centers": {"b": True}}
        self.nodes.append(_node("P/up/ResizeBilinear", "ResizeBilinear", [coarse, "P/up/size"], **half))
        self.nodes.append(_node("P/add", "AddV2", ["P/up/ResizeBilinear", fine]))
        features = self.convolution("P/features/Relu", self.depthwise("P/features/d", "P/add"), WIDTH, WIDTH, 1)
        for branch, channels in CHANNELS.items():
            inner = self.depthwise(f"P/{branch}_0/depthwise", features)
            inner = self.convolution(f"P/{branch}_0/Relu", inner, WIDTH, 12, 1)
            self.convolution(f"P/{branch}_0/BiasAdd", inner, 12, channels, 1, activation=None, bias=BIAS.get(branch, 0))

    def weight(self, name: str, values: np.ndarray) -> str:
        self.weights[name] = np.asarray(values, np.float16)
        return name

    def convolution(
        self, name: str, source: str, into: int, out: int, side: int, *, stride: int = 1,
        activation: str | None = "Relu", bias: float = 0.0,
    ) -> str:  # fmt: skip
        spread = 2 / np.sqrt(into * side * side)
        self.weight(f"{name}/w", self.rng.normal(0, spread, (side, side, into, out)))
        self.weight(f"{name}/b", bias + self.rng.normal(0, 0.3, out))
        fused = ["BiasAdd", *([activation] if activation else [])]
        self.nodes.append(_convolution(name, "_FusedConv2D", [source, f"{name}/w", f"{name}/b"], stride, fused))
        return name

    def depthwise(self, name: str, source: str, stride: int = 1, activation: str | None = None) -> str:
        self.weight(f"{name}/w", self.rng.normal(0, 0.5, (3, 3, WIDTH, 1)))
        inputs, fused = [source, f"{name}/w"], []
        if activation:
            self.weight(f"{name}/b", self.rng.normal(0, 0.3, WIDTH))
            inputs, fused = [*inputs, f"{name}/b"], ["BiasAdd", activation]
        kind = "FusedDepthwiseConv2dNative" if activation else "DepthwiseConv2dNative"
        self.nodes.append(_convolution(name, kind, inputs, stride, fused))
        return name

    def write(self, folder: Path) -> Path:
        entries = [
            {"name": name, "shape": list(w.shape), "dtype": "float32",
             "quantization": {"dtype": "float16", "original_dtype": "float32"}}
            for name, w in self.weights.items()
        ]  # fmt: skip
        (folder / "tiny.bin").write_bytes(b"".join(w.tobytes() for w in self.weights.values()))
        manifest = [{"paths": ["tiny.bin"], "weights": entries}]
        content = {"format": "graph-model", "modelTopology": {"node": self.nodes}, "weightsManifest": manifest}
        path = folder / "tiny.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def maps(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Maps of images (n, 3, h, w) from 0 to 255, layer by layer in PyTorch."""
        values = {"Cast": images}
        for node in self.nodes[2:]:
            name, kind, source = node["name"], node["op"], values[node["input"][0]]
            if kind in ("Sub", "Mul"):
                other = float(self.weights[node["input"][1]].ravel()[0])
                values[name] = source - other if kind == "Sub" else source * other
            elif kind == "AddV2":
                values[name] = source + values[node["input"][1]]
            elif kind == "ResizeBilinear":
                values[name] = F.interpolate(source, scale_factor=2, mode="bilinear", align_corners=False)
            else:
                values[name] = self._convolved(node, source)
        return {branch: values[f"P/{branch}_0/BiasAdd"] for branch in CHANNELS}

    def _convolved(self, node: dict[str, Any], source: torch.Tensor) -> torch.Tensor:
        name, stride = node["name"], int(node["attr"]["strides"]["list"]["i"][1])
        weight = torch.from_numpy(self.weights[f"{name}/w"].astype(np.float32))
        grouped = node["op"] != "_FusedConv2D"
        kernel = weight.permute(2, 3, 0, 1) if grouped else weight.permute(3, 2, 0, 1)
        bias = torch.from_numpy(self.weights[f"{name}/b"].astype(np.float32)) if f"{name}/b" in self.weights else None
        need = [max((-(-side // stride) - 1) * stride + weight.shape[0] - side, 0) for side in source.shape[2:]]
        rows, columns = need  # TensorFlow pads an odd row or column after the image
        source = F.pad(source, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        found = F.conv2d(source, kernel, bias, stride, groups=WIDTH if grouped else 1)
        fused = [base64.b64decode(each).decode() for each in node["attr"]["fused_ops"]["list"]["s"]]
        return found.clamp(0, 6) if "Relu6" in fused else found.relu() if "Relu" in fused else found


def _node(name: str, kind: str, inputs: list[str] | None = None, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "op": kind, "input": inputs or [], "attr": attributes}


def _convolution(name: str, kind: str, inputs: list[str], stride: int, fused: list[str]) -> dict[str, Any]:
    steps = ["1", str(stride), str(stride), "1"]
    return _node(
        name, kind, inputs,
        strides={"list": {"i": steps}},
        padding={"s": base64.b64encode(b"SAME").decode()},
        fused_ops={"list": {"s": [base64.b64encode(each.encode()).decode() for each in fused]}},
    )  # fmt: skip
