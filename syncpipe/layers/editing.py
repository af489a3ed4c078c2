"""Changing the layers of a pipe as in a list: ``pipe[3] = layer``, ``append``, ``pop``."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Self, cast

from torch import nn

from syncpipe.layers.listing import Layer, as_layer

__all__ = ["Editable"]

#: For each stage the number of its layers, or how to find it; None: as the change suggests.
Balance = Iterable[int] | str | None


class Editable(nn.Module):
    """Layers in stages that can be changed, by the methods and names of ``nn.Sequential``.

    A layer is a module, a callable or a spec. A new one goes to the device of its stage; a spec is
    built there. Layers that stay keep their parameters, those of an optimizer included: tell it of
    new ones by ``optimizer.add_param_group``. What is refused changes nothing. As with
    ``pipe.balance = ...`` nothing may run meanwhile, and hooks on ``pipe.partitions`` stand in the
    way of another balance.
    """

    _balance: list[int]

    def _edit(self, layers: dict[str, nn.Module], balance: Iterable[int] | str) -> None:
        """Takes over other layers with another balance, or changes nothing."""
        raise NotImplementedError

    def __setitem__(self, index: int, layer: Layer) -> None:
        """Puts another layer in the place of one, in its stage and under its name."""
        index = self._index(index)
        layers: dict[str, Any] = dict(self._modules)
        layers[list(layers)[index]] = as_layer(layer, f"the new layer {index}")
        self._edit(layers, self._balance)

    def __delitem__(self, index: int | slice) -> None:
        """Takes layers out; the others are numbered anew, as in ``nn.Sequential``.

        Raises:
            ValueError: a stage would have no layers any more.
        """
        self._remove(index, None)

    def append(self, layer: Layer, *, balance: Balance = None) -> Self:
        """Adds a layer to the last stage.

        Args:
            layer: a module, a callable or a spec.
            balance: another balance for the layers that there are then.
        """
        return self.extend([layer], balance=balance)

    def extend(self, layers: Iterable[Layer], *, balance: Balance = None) -> Self:
        """Adds layers to the last stage.

        Args:
            layers: as for :meth:`append`.
            balance: likewise.
        """
        module, start = self._plain(), len(self._modules)
        for index, layer in enumerate(layers, start):
            if str(index) in module._modules:
                raise ValueError(
                    f"a layer that is appended here is named {str(index)!r}, and there is one of "
                    "that name already: make a pipe of all layers under names of their own"
                )
            module.append(as_layer(layer, f"the new layer {index}"))
        sizes = list(self._balance) or [0]
        sizes[-1] += len(module) - start
        self._edit(dict(module._modules), sizes if balance is None else balance)
        return self

    def insert(self, index: int, layer: Layer, *, balance: Balance = None) -> Self:
        """Inserts a layer before another one, in the stage of that one; at the end, in the last.

        Args:
            index: of the layer that it comes before.
            layer: a module, a callable or a spec.
            balance: another balance for the layers that there are then.
        """
        n = len(self._modules)
        index = operator.index(index)
        if not -n <= index <= n:
            raise IndexError(f"insert({index}, ...): the pipe has {n} layers")
        index += n if index < 0 else 0
        if list(self._modules) != [str(k) for k in range(n)]:
            raise ValueError(
                f"insert({index}, ...): it would number the layers anew, and they have names "
                f"({', '.join(self._modules)}): make a pipe of the layers in their new order"
            )
        module = self._plain()
        module.insert(index, as_layer(layer, f"the new layer {index}"))
        sizes = list(self._balance) or [0]
        sizes[min(self._stage(index), len(sizes) - 1)] += 1
        self._edit(dict(module._modules), sizes if balance is None else balance)
        return self

    def pop(self, index: int | slice = -1, *, balance: Balance = None) -> nn.Module:
        """Takes a layer out, and returns it as it is; the others are numbered anew.

        Args:
            index: of the layer.
            balance: another balance for the layers that are left.

        Raises:
            ValueError: a stage would have no layers any more.
        """
        return self._remove(index, balance)

    def _remove(self, index: int | slice, balance: Balance) -> nn.Module:
        shown = index
        index = index if isinstance(index, slice) else self._index(index)
        module, sizes = self._plain(), list(self._balance)
        gone = range(len(module))[index]
        for k in [gone] if isinstance(gone, int) else gone:
            sizes[self._stage(k)] -= 1
        taken = module.pop(index)
        if not len(module):
            sizes = []
        left = [size for size in sizes if size]
        if balance is None and left != sizes:
            raise ValueError(
                f"without layer {shown} stage {sizes.index(0)} would have no layers: give the "
                f"others another balance, pipe.pop({shown}, balance={left}) for example"
            )
        self._edit(dict(module._modules), sizes if balance is None else balance)
        return taken

    def _plain(self) -> nn.Sequential:
        """The layers as an ``nn.Sequential``, which knows how they are named after a change."""
        module = nn.Sequential()
        module._modules.update(cast("dict[str, nn.Module]", self._modules))
        return module

    def _index(self, index: Any) -> int:
        try:
            return range(len(self._modules))[operator.index(index)]
        except IndexError:
            raise IndexError(
                f"layer {index} does not exist: the pipe has {len(self._modules)}"
            ) from None

    def _stage(self, index: int) -> int:
        """The stage of a layer; of the one after the last: how many stages there are."""
        return sum(index >= end for end in accumulate(self._balance))
