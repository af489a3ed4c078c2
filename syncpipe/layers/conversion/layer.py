"""A layer of a converted model: modules of the original, and the code that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncpipe.layers.conversion.code import check
from syncpipe.layers.conversion.signature import Signature
from syncpipe.skip import Namespace, store
from syncpipe.skip.declaration import Declaration

__all__ = ["ConvertedLayer", "Holder"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Holder(nn.Module):
    """Stands where a module of the original was that was opened, and holds what is in it."""

    def __getitem__(self, name: int | str) -> Any:
        return getattr(self, str(name))


class ConvertedLayer(Holder):
    """A run of modules of a model, with the code between them; ``print`` shows it.

    The modules are the model's own, at their paths. What it gives to later layers than the next
    one are skips.

    Args:
        code: of a function of the layer, of what it takes and of what it pops, in this order.
        constants: what the code uses by a name.
        takes: how many values the layer before hands on; None: it is the first one.
        gives: how many values this one hands on; None: it is the last one.
        pops: the names of the skips that it pops.
        stashes: the names of the skips that it stashes.
        namespace: of these.
        signature: of the model, for the first layer.
    """

    _syncpipe_skippable = True

    def __init__(
        self,
        code: str,
        constants: dict[str, Any],
        *,
        takes: int | None,
        gives: int | None,
        pops: tuple[str, ...],
        stashes: tuple[str, ...],
        namespace: Namespace,
        signature: Signature | None,
    ) -> None:
        super().__init__()
        self.code = code
        self.takes, self.gives, self.signature = takes, gives, signature
        self.skips = Declaration(stashes, pops)
        self._skip_namespaces = dict.fromkeys(self.skips.names, namespace)
        self._constants = {}
        self._retyped = False
        self._dtypes: set[torch.dtype] = set()  # of its parameters and buffers, as converted
        for name, value in constants.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                self._constants[name] = value
        self.ranks: dict[str, int] = {}  # the names of the model's parameters, in order
        self._function: Callable[..., Any] = self._compiled()
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _named_as_in_the_model
        )

    def _compiled(self) -> Callable[..., Any]:
        known = {"torch": torch, "F": F, "check": check, **self._constants}
        exec(compile(self.code, "<syncpipe.sequential>", "exec"), known)
        function: Callable[..., Any] = known["forward"]
        return function

    @property
    def device(self) -> torch.device:
        """Where the layer is."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.get_default_device()

    def forward(self, input: Any) -> Any:
        """Runs the code.

        Args:
            input: the value that the layer before hands on, a tuple of all if there is not just
                one; for the first layer the arguments of the model (a tensor, a tuple, a dict).
        """
        if self._retyped:
            raise TypeError(
                "the dtype of the parameters was changed after the model was converted, and the "
                f"code of this layer has the dtype of then in it: change it first, then convert\n"
                f"{self.code}"
            )
        if self.signature is not None:
            values = self.signature.tensors(input)
        else:
            values = [input] if self.takes == 1 else list(input)
        namespaces = self._skip_namespaces
        for name in self.skips.pop:
            values.append(store.take((namespaces[name], name), self))
        results = self._function(self, *values)
        if self.gives is None:
            return results
        for name, value in zip(self.skips.stash, results[self.gives :], strict=True):
            store.put((namespaces[name], name), value, self)
        return results[0] if self.gives == 1 else results[: self.gives]

    def hold(self, path: str, value: nn.Module | Tensor, persistent: bool = True) -> None:
        """Registers a module, parameter or buffer of the original at its path."""
        at: nn.Module = self
        *way, name = path.split(".")
        for part in way:
            if at._modules.get(part) is None:
                at._modules[part] = Holder()
            at = at._modules[part]  # type: ignore[assignment]
        inner = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
        self._dtypes |= {tensor.dtype for tensor in inner if tensor.is_floating_point()}
        if isinstance(value, nn.Module):
            at._modules[name] = value
        elif isinstance(value, nn.Parameter):
            at._parameters[name] = value
        else:
            at._buffers[name] = value
            if not persistent:
                at._non_persistent_buffers_set.add(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; within another one its keys are those of the model."""
        if "prefix" in kwargs:
            kwargs["prefix"] = _outer(kwargs["prefix"])
        return super().state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; within another one the names are those of the model."""
        found = super().named_modules(memo, "", remove_duplicate)
        outer = _outer(f"{prefix}.")
        # Parameters of the model itself have no name before theirs.
        own = outer.removesuffix(".") if self._parameters or self._buffers else prefix
        for name, module in found:
            yield (f"{outer}{name}" if name else own), module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        kinds = {tensor.dtype for tensor in (*self.parameters(), *self.buffers())}
        named = {kind for kind in _FLOATS if str(kind) in self.code}
        # Only a dtype that no parameter has can have been that of the parameters.
        self._retyped = bool(named and self._dtypes and not self._dtypes & kinds)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        self.__dict__["_loading"] = prefix, messages
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n{indent(self.code.rstrip(), '  ')}\n)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._function = self._compiled()


def _named_as_in_the_model(layer: nn.Module, _: Any) -> None:
    """Takes the index of a layer out of what loading it has to say."""
    prefix, messages = layer.__dict__.pop("_loading")
    for texts in messages:
        for k, text in enumerate(texts):
            if text.startswith(prefix):
                texts[k] = _outer(prefix) + text.removeprefix(prefix)
            elif f" {prefix}" in text:
                texts[k] = text.replace(f" {prefix}", f" {_outer(prefix)}")


def _outer(prefix: str) -> str:
    """A prefix without its last part, the name of the layer itself."""
    head = prefix.removesuffix(".").rpartition(".")[0]
    return f"{head}." if head else ""
