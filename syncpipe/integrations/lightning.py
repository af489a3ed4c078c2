"""A strategy for Lightning's ``Trainer``: pipes in a ``LightningModule`` stay on their devices.

It relies on these members of lightning's ``Strategy`` (seen in 2.6): ``connect``, ``root_device``,
``model_to_device``, ``load_optimizer_state_dict``, ``teardown``, ``model``, ``optimizers`` and
``_lightning_module``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from syncpipe.pipe import Pipe

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(
        'syncpipe.integrations.lightning needs lightning: pip install "syncpipe[lightning]"'
    ) from error

__all__ = ["PipeStrategy"]


class PipeStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a ``LightningModule`` that holds a ``Pipe``, in one process.

    ::

        trainer = lightning.Trainer(strategy=PipeStrategy(), devices=1)
        trainer.fit(module)  # module.pipe = Pipe(...)

    Batches, and modules outside pipes, go to the first device of the first pipe. Pipes are neither
    moved nor copied. Optimizers and checkpoints get their parameters, as of any submodule.
    ``training_step`` calls ``self.pipe(x)``, or ``self.pipe.train_batch`` with manual optimization.

    Args:
        options: ``accelerator``, ``checkpoint_io`` and ``precision_plugin``, as for Lightning's
            strategies.

    Raises:
        TypeError: the ``LightningModule`` holds no ``Pipe`` when training begins.
    """

    strategy_name = "pipe"
    _lightning_module: Any
    optimizers: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @property
    def root_device(self) -> torch.device:
        module: nn.Module | None = self._lightning_module
        pipes = [] if module is None else [m for m in module.modules() if isinstance(m, Pipe)]
        return pipes[0].devices[0] if pipes else self._root_device

    def model_to_device(self) -> None:
        device, found = self.root_device, list(_outside(self.model))
        if all(map(_has_no_pipe, found)):
            raise TypeError(
                f"PipeStrategy is for a LightningModule that holds a Pipe, and "
                f"{type(self.lightning_module).__name__} holds none: set one as an attribute in "
                "__init__ or in configure_model (self.pipe = Pipe.auto(...))"
            )
        each: Any
        for each in found:
            each._apply(lambda tensor: tensor.to(device), recurse=False)
            if hasattr(each, "_device"):  # in modules of Lightning and torchmetrics
                each._device = device

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states, each onto the device of its parameter."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """End training; parameters and states stay on their devices."""
        module, optimizers = self._lightning_module, self.optimizers
        self._lightning_module, self.optimizers = None, []
        try:
            super().teardown()
        finally:
            self._lightning_module, self.optimizers = module, optimizers


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules outside pipes, each once."""
    seen = {id(m) for pipe in module.modules() if isinstance(pipe, Pipe) for m in pipe.modules()}
    return (each for each in module.modules() if id(each) not in seen)


def _has_no_pipe(module: nn.Module) -> bool:
    return not any(isinstance(child, Pipe) for child in module.children())
