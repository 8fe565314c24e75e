"""pOKS against its formula, its gradient, and over several processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halopose.finetuning.poks import PoksLoss, poks_loss, residual_energy
from tests.helpers.models import run_script
from tests.helpers.values import present

shapes = st.tuples(st.integers(0, 6), st.integers(1, 5))
seeds = st.integers(0, 2**31)


def batch(objects: int, keypoints: int, seed: int, spread: float = 8.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return {
        "residual": spread * torch.randn(objects, keypoints, 2, **draw),
        "area": 30 + 3000 * torch.rand(objects, **draw),
        "sigmas": 0.02 + 0.1 * torch.rand(keypoints, **draw),
        "labelled": torch.rand(objects, keypoints, generator=generator) < 0.6,
    }


def loss_of(data: dict[str, torch.Tensor]) -> torch.Tensor:
    return poks_loss(residual_energy(data["residual"], data["area"], data["sigmas"]), data["labelled"])


def formula(data: dict[str, torch.Tensor]) -> float:
    """Appendix B in loops."""
    residual, labelled = data["residual"].tolist(), data["labelled"].tolist()
    area, sigmas = data["area"].tolist(), data["sigmas"].tolist()
    similarities = []
    for k, sigma in enumerate(sigmas):
        exponents = [
            (residual[i][k][0] ** 2 + residual[i][k][1] ** 2) / (2 * area[i] * (2 * sigma) ** 2)
            for i in range(len(area))
            if labelled[i][k]
        ]
        if exponents:
            similarities.append(math.exp(-sum(exponents) / len(exponents)))
    return 1 - sum(similarities) / len(similarities) if similarities else 0.0


@given(shapes, seeds)
def test_equals_the_formula_and_is_bounded(shape: tuple[int, int], seed: int) -> None:
    data = batch(*shape, seed)
    loss = loss_of(data).item()
    assert loss == pytest.approx(formula(data), abs=1e-12)
    assert 0 <= loss <= 1


@given(shapes, seeds)
def test_whole_weights_are_copies(shape: tuple[int, int], seed: int) -> None:
    data = batch(*shape, seed)
    weight = torch.randint(0, 4, (shape[0],), generator=torch.Generator().manual_seed(seed))
    copies = {name: value if name == "sigmas" else value.repeat_interleave(weight, 0) for name, value in data.items()}
    energy = residual_energy(data["residual"], data["area"], data["sigmas"])
    energy = torch.where(weight[:, None] > 0, energy, torch.inf)  # what has no weight may be anything
    assert poks_loss(energy, data["labelled"], 0.3 * weight).item() == pytest.approx(formula(copies), abs=1e-6)


@given(st.tuples(st.integers(1, 6), st.integers(1, 5)), seeds)
def test_gradient_is_the_analytic_one(shape: tuple[int, int], seed: int) -> None:
    """d L / d r_ik = exp(-E_k) r_ik / (|K*| |B_k| s_i^2 kappa_k^2) for labelled keypoints, else 0."""
    data = batch(*shape, seed)
    residual = data["residual"].requires_grad_()
    loss_of(data).backward()
    energy = residual_energy(residual.detach(), data["area"], data["sigmas"]).numpy()
    labelled, area = data["labelled"].numpy(), data["area"].numpy()
    kappa = 2 * data["sigmas"].numpy()
    count = labelled.sum(0)
    similarity = np.exp(-(labelled * energy).sum(0) / np.maximum(count, 1))
    weight = labelled * similarity / (np.maximum(count, 1) * kappa**2) / area[:, None]
    expected = weight[..., None] * residual.detach().numpy() / max((count > 0).sum(), 1)
    np.testing.assert_allclose(present(residual.grad), expected, rtol=1e-9, atol=1e-15)


def test_gradient_equals_central_differences() -> None:
    data = batch(4, 3, seed=3, spread=4.0)
    residual = data["residual"].requires_grad_()
    assert torch.autograd.gradcheck(lambda r: loss_of(data | {"residual": r}), (residual,))


def test_empty_keypoints_and_empty_batches() -> None:
    data = batch(3, 4, seed=0)
    data["labelled"][:, 2] = False
    without = {name: value[:, [0, 1, 3]] if value.ndim > 1 else value for name, value in data.items()}
    without["sigmas"] = data["sigmas"][[0, 1, 3]]
    assert loss_of(data).item() == pytest.approx(loss_of(without).item(), abs=1e-14)
    for labelled in (torch.zeros(3, 4, dtype=torch.bool), torch.zeros(0, 4, dtype=torch.bool)):
        residual = data["residual"][: len(labelled)].clone().requires_grad_()
        loss = poks_loss(residual_energy(residual, data["area"][: len(labelled)], data["sigmas"]), labelled)
        loss.backward()
        assert loss.item() == 0
        assert residual.grad is not None
        assert not residual.grad.any()


def test_one_object_is_one_minus_its_mean_similarity() -> None:
    data = batch(1, 5, seed=2)
    data["labelled"][:] = True
    energy = residual_energy(data["residual"], data["area"], data["sigmas"])
    assert loss_of(data).item() == pytest.approx(1 - torch.exp(-energy).mean().item(), abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_computes_in_float32_for_every_input_type(dtype: torch.dtype) -> None:
    data = batch(3, 4, seed=1)
    true = torch.zeros(3, 4, 3)
    predicted = torch.cat([-data["residual"], torch.zeros(3, 4, 1)], dim=2).to(dtype).requires_grad_()
    module = PoksLoss(data["sigmas"].float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(predicted, true, data["labelled"], data["area"][:, None].float())
    rounded = data | {"residual": -predicted.detach().double()[..., :2]}
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(formula(rounded), abs=1e-5)
    far = torch.full((1, 1, 2), 6e4, dtype=dtype, requires_grad=True)  # its square is infinite in half precision
    loss = PoksLoss(torch.tensor([0.05]))(far, torch.zeros(1, 1, 2), torch.ones(1, 1), torch.zeros(1, 1))
    loss.backward()
    assert loss.item() == 1
    assert far.grad is not None
    assert torch.isfinite(far.grad).all()


def test_unlabelled_keypoints_may_be_anything() -> None:
    data = batch(3, 4, seed=4)
    wanted = formula(data)
    residual = torch.where(data["labelled"][..., None], data["residual"], torch.inf).requires_grad_()
    loss = loss_of(data | {"residual": residual})
    assert loss.item() == pytest.approx(wanted, abs=1e-12)


PROCESSES = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from halopose.finetuning.poks import PoksLoss
from tests.finetuning.test_poks import batch, loss_of

def work(rank, path, split):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    whole = batch(7, 4, seed=5)
    whole["labelled"][:, 3] = False
    rows = slice(0, split) if rank == 0 else slice(split, 7)
    part = {name: value if name == "sigmas" else value[rows].clone() for name, value in whole.items()}
    part["residual"].requires_grad_()
    if len(part["area"]):
        loss = loss_of(part)
        loss.backward()
        torch.save((loss.detach(), part["residual"].grad), f"{path}.{rank}")
    else:  # as the framework does: without objects it asks for no loss
        PoksLoss(part["sigmas"]).end_batch()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1], int(sys.argv[2])), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("split", [3, 0])
def test_two_processes_equal_one(tmp_path: Any, split: int) -> None:
    """Loss and DDP-averaged gradient equal those of the whole batch, also if one process has no object."""
    run_script(PROCESSES, tmp_path / "meet", split)
    data = batch(7, 4, seed=5)
    data["labelled"][:, 3] = False
    residual = data["residual"].requires_grad_()
    whole = loss_of(data)
    whole.backward()
    parts = [torch.load(tmp_path / f"meet.{rank}") for rank in (0, 1) if split or rank]
    for loss, _ in parts:
        assert loss.item() == pytest.approx(whole.item(), abs=1e-14)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]) / 2, residual.grad)
