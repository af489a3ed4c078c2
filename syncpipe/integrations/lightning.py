"""A strategy for Lightning's ``Trainer``: pipes in a ``LightningModule`` stay on their devices.

What this relies on. lightning: ``Strategy`` has ``connect``, ``root_device``, ``model_to_device``,
``load_optimizer_state_dict`` and ``teardown``, and the attributes ``model``, ``optimizers`` and
``_lightning_module``. Seen in lightning 2.6.
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

    Batches, and modules that are in no pipe, go to the first device of the (first) pipe. Pipes are
    neither moved nor copied; their parameters are the module's, so they go to the optimizer and
    into checkpoints. ``training_step`` calls ``self.pipe(x)``, or ``self.pipe.train_batch`` under
    manual optimization.

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
        """Where batches go."""
        module: nn.Module | None = self._lightning_module
        pipes = [] if module is None else [m for m in module.modules() if isinstance(m, Pipe)]
        return pipes[0].devices[0] if pipes else self._root_device

    def model_to_device(self) -> None:
        """Moves what is in no pipe."""
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
            if hasattr(each, "_device"):  # of Lightning, and of torchmetrics
                each._device = device

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads states, each to the device of its parameter."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Ends training; parameters and states stay where they are."""
        module, optimizers = self._lightning_module, self.optimizers
        self._lightning_module, self.optimizers = None, []
        try:
            super().teardown()
        finally:
            self._lightning_module, self.optimizers = module, optimizers


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in no pipe, each once."""
    seen = {id(m) for pipe in module.modules() if isinstance(pipe, Pipe) for m in pipe.modules()}
    return (each for each in module.modules() if id(each) not in seen)


def _has_no_pipe(module: nn.Module) -> bool:
    return not any(isinstance(child, Pipe) for child in module.children())
