"""An entry of the zoo: where a model is from, how it is made, and what it is called with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Arguments", "Model", "Sample", "ids", "lengths", "mask", "takes", "times"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Sample = Callable[[int], Arguments]


@dataclass(frozen=True)
class Model:
    """A model of a package, with a sample.

    Attributes:
        package: where it is from, or empty for one that is written here.
        build: makes it, of the package.
        sample: makes arguments for so many samples.
    """

    package: str
    build: Callable[[Any], nn.Module]
    sample: Sample

    def make(self, batch: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, and arguments for so many samples.

        Raises:
            ImportError: the package is not installed.
        """
        package = importlib.import_module(self.package) if self.package else None
        return self.build(package), *self.sample(batch)


def takes(*args: Any, **kwargs: Any) -> Sample:
    """Arguments for a number of samples.

    A tuple of numbers is the shape of a sample of normal floats; a function makes the argument of
    the number of samples; anything else is the argument itself.
    """

    def made(value: Any, batch: int) -> Any:
        if isinstance(value, tuple):
            return torch.randn(batch, *value)
        return value(batch) if callable(value) else value

    return lambda batch: (
        tuple(made(value, batch) for value in args),
        {name: made(value, batch) for name, value in kwargs.items()},
    )


def ids(*shape: int, below: int = 90) -> Callable[[int], Tensor]:
    """Token ids or labels, of so many for each sample."""
    return lambda batch: torch.randint(2, below, (batch, *shape))


def mask(length: int, padding: int = 3, dtype: torch.dtype = torch.long) -> Callable[[int], Tensor]:
    """Ones, and zeros where a sample ends."""
    return lambda batch: (torch.arange(length) < length - padding).expand(batch, -1).to(dtype)


def times(batch: int) -> Tensor:
    """Another time for each sample."""
    return torch.arange(1, batch + 1)


def lengths(length: int) -> Callable[[int], Tensor]:
    """The lengths of sequences."""
    return lambda batch: torch.full((batch,), length)
