"""PyTorch Lightning: a pipe is an attribute of a LightningModule, under manual optimization."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.integrations.loops import assert_trains_as_the_model, data, pipe_and_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning: Any = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")


class Trained(lightning.LightningModule):  # type: ignore[misc]
    """Steps by itself, as ``train_batch`` goes back by itself."""

    automatic_optimization = False

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe = pipe

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.log("loss", self.pipe.train_batch(*batch, loss_fn=F.cross_entropy))
        optimizer.step()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation loss", self.pipe.eval_batch(*batch, loss_fn=F.cross_entropy))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Automatic(Trained):
    """Lets Lightning go back, through ``pipe(x)``."""

    automatic_optimization = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.pipe(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [Trained, Automatic])
def test_it_trains_as_a_plain_loop_does_and_its_checkpoint_is_one_of_the_model(kind, tmp_path):
    pipe, model = pipe_and_model()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(kind(pipe), data(), data())
    assert_trains_as_the_model(pipe, model)
    trainer.save_checkpoint(tmp_path / "step.ckpt")
    state = torch.load(tmp_path / "step.ckpt", weights_only=True)["state_dict"]
    plain = nn.ModuleDict({"pipe": pipe_and_model()[1]})
    plain.load_state_dict(state)
    for actual, expected in zip(plain.parameters(), pipe.parameters(), strict=True):
        assert torch.equal(actual, expected)
