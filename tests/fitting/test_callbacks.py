"""Callbacks of a fit: order of the calls, loggers of other packages, and what is refused."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halopose.errors import HaloposeError
from halopose.fitting.callbacks import Callback, CsvLogger, Epoch, duration, flat, loggers

EPOCHS = [Epoch(1, 3, 4.5, 4.25, True, 30.0), Epoch(2, 3, 4.0, 4.5, False, 30.0)]


def tell(callback: Callback) -> None:
    callback.on_start({"train.epochs": 3})
    for epoch in EPOCHS:
        callback.on_epoch(epoch)
    callback.on_scores({"student_t/ace": 0.01})
    callback.on_end()


def test_an_epoch_prints_its_losses_and_the_time_left() -> None:
    assert str(EPOCHS[0]) == "epoch 1 of 3: loss 4.5000, held-out 4.2500 (best), at most 60 s left"
    assert str(Epoch(3, 3, 4.0, 4.5, False, 30.0)) == "epoch 3 of 3: loss 4.0000, held-out 4.5000"
    assert [duration(seconds) for seconds in (40, 180, 9000)] == ["40 s", "3 min", "2.5 h"]


def test_losses_are_written_as_csv(tmp_path: Path) -> None:
    (made,) = loggers(["csv"], tmp_path)
    tell(made)
    assert (tmp_path / "training.csv").read_text().splitlines() == [
        "epoch,train_loss,holdout_loss,seconds", "1,4.5,4.25,30.0", "2,4.0,4.5,30.0",
    ]  # fmt: skip


class Recorder(SimpleNamespace):
    """Stands for a module of a logging package: it notes every call."""

    def __init__(self, **given: Any) -> None:
        super().__init__(calls=[], **given)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.calls.append((name, *arguments, *named.values()))


def test_mlflow_and_wandb_receive_the_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mlflow = Recorder(active_run=lambda: None)
    run = SimpleNamespace(summary={})
    wandb = Recorder(run=None)
    wandb.init = lambda **named: setattr(wandb, "run", run)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for made in loggers(["mlflow", "wandb"], tmp_path):
        tell(made)
    assert [call[0] for call in mlflow.calls] == [
        "start_run", "log_params", "log_metrics", "log_metrics", "log_metrics", "end_run",
    ]  # fmt: skip
    assert mlflow.calls[2][1:] == ({"train_loss": 4.5, "holdout_loss": 4.25}, 1)
    assert [call[0] for call in wandb.calls] == ["log", "log", "finish"]
    assert run.summary == {"student_t/ace": 0.01}
    mlflow.calls.clear()
    mlflow.active_run = lambda: "a run of the user"
    tell(loggers(["mlflow"], tmp_path)[0])
    assert {"start_run", "end_run"}.isdisjoint(call[0] for call in mlflow.calls)


def test_tensorboard_receives_the_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writer = Recorder()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    tell(loggers(["tensorboard"], tmp_path)[0])
    assert ("add_scalar", "loss/held-out", 4.25, 1) in writer.calls
    assert writer.calls[-1] == ("close",)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HaloposeError, match=f"pip install {name}"):
        loggers([name], tmp_path)
    with pytest.raises(HaloposeError, match="unknown logger"):
        loggers(["csvv"], tmp_path)


def test_nested_settings_become_flat() -> None:
    given: Mapping[str, Any] = {"train": {"epochs": 2, "dof": None}, "train_sizes": (640, 320)}
    assert flat(given) == {"train.epochs": 2, "train.dof": None, "train_sizes": [640, 320]}


def test_base_class_does_nothing_and_csv_starts_anew(tmp_path: Path) -> None:
    tell(Callback())
    for _ in range(2):
        tell(CsvLogger(tmp_path))
    assert len((tmp_path / "training.csv").read_text().splitlines()) == 3
