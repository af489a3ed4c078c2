"""Loops of Accelerate and Lightning; those of PyTorch run in docs/how-to.md."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncpipe import Pipe
from tests.integrations.loops import assert_trained_alike, batches, data, pipe_and_model


def steps(module: nn.Module, optimizer: Any, pairs: Any, accelerator: Any = None) -> None:
    """The loop that everybody writes, by ``train_batch`` if it can, or Accelerate's."""
    for x, y in pairs:
        optimizer.zero_grad()
        if isinstance(module, Pipe) and accelerator is None:
            module.train_batch(x, y, loss_fn=F.cross_entropy)
        else:
            loss = F.cross_entropy(module(x), y)
            loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()


def assert_trains_as(model: nn.Module, pipe: Pipe) -> None:
    """A pipe was trained on all mini-batches once, by ``SGD`` at a rate of 0.1."""
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    assert_trained_alike(pipe, model)


# --- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pipe(x)", "train_batch"])
@pytest.mark.parametrize("placement", [True, False])
def test_accelerate_takes_a_pipe_as_it_is(placement: bool, how: str) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    pipe, model = pipe_and_model()
    accelerator = accelerate.Accelerator(cpu=True, device_placement=placement)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(pipe, optimizer, data())
    assert isinstance(prepared, Pipe)
    steps(prepared, optimizer, loader, accelerator if how == "pipe(x)" else None)
    assert_trains_as(model, pipe)
    norms, grads = [], []
    for clip, module in (
        (accelerator.clip_grad_norm_, prepared), (torch.nn.utils.clip_grad_norm_, model)
    ):  # fmt: skip
        norms.append(clip(module.parameters(), 0.1))
        grads.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*grads)


# --- Lightning -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", [False, True])
@pytest.mark.parametrize("automatic", [False, True])
def test_lightning_trains_an_attribute_and_its_checkpoint_is_one_of_the_model(
    automatic, strategy, tmp_path
):
    """Under manual optimization, or it goes back by itself, through ``pipe(x)``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning: Any = pytest.importorskip("lightning")

    class Trained(lightning.LightningModule):  # type: ignore[misc]
        automatic_optimization = automatic

        def __init__(self, pipe: Pipe) -> None:
            super().__init__()
            self.pipe = pipe

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            if automatic:
                return F.cross_entropy(self.pipe(batch[0]), batch[1])
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.log("loss", self.pipe.train_batch(*batch, loss_fn=F.cross_entropy))
            optimizer.step()
            return None

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.log("validation loss", self.pipe.eval_batch(*batch, loss_fn=F.cross_entropy))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    pipe, model = pipe_and_model()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        **({"strategy": pipe_strategy()} if strategy else {}),
    )  # fmt: skip
    trainer.fit(Trained(pipe), data(), data())
    assert_trains_as(model, pipe)
    trainer.save_checkpoint(tmp_path / "step.ckpt")
    state = torch.load(tmp_path / "step.ckpt", weights_only=True)["state_dict"]
    plain = nn.ModuleDict({"pipe": pipe_and_model()[1]})
    plain.load_state_dict(state)
    assert_trained_alike(plain, pipe, exact=True)


def pipe_strategy() -> Any:
    from syncpipe.integrations.lightning import PipeStrategy

    return PipeStrategy()


@pytest.mark.filterwarnings("ignore")
def test_a_strategy_moves_what_is_in_no_pipe_and_resumes(tmp_path):
    lightning: Any = pytest.importorskip("lightning")

    class Both(lightning.LightningModule):  # type: ignore[misc]
        """A pipe made late, and a head beside it."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.head = nn.Linear(3, 3)

        def configure_model(self) -> None:
            if not hasattr(self, "pipe"):
                self.pipe = pipe_and_model()[0]

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.head(self.pipe(batch[0])), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def trained(epochs: int, resume: Any = None, module: Any = None) -> Any:
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, strategy=pipe_strategy(),
        )  # fmt: skip
        module = module or Both()
        trainer.fit(module, data(), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    trained(1)
    assert_trained_alike(trained(2, tmp_path / "1.ckpt"), trained(2), exact=True)
    from lightning.pytorch.demos.boring_classes import BoringModel

    with pytest.raises(TypeError, match="holds a Pipe, and BoringModel holds none"):
        trained(1, module=BoringModel())
