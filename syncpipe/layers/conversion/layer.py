"""A layer of a converted model: modules of the original at their paths, and code that calls them.

the model                           transformer.h.0.ln_1.weight
held by layer 3                 3 / transformer.h.0.ln_1.weight
state_dict, named_parameters        transformer.h.0.ln_1.weight, in the order of the model
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from textwrap import indent
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx.graph import _custom_builtins

from syncpipe.layers.conversion.segments import Segment
from syncpipe.layers.conversion.signature import Signature
from syncpipe.skip import Namespace, store
from syncpipe.skip.skippable import Declaration

__all__ = ["ConvertedLayer", "Holder", "distribute", "in_order", "index_keys"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Holder(nn.Module):
    """Stands where a module of the original was that was inlined, and holds what is in it."""


class ConvertedLayer(Holder):
    """A run of modules of a model, with the code between them; ``print`` shows it.

    The modules are the model's own, at their paths. What it gives to later layers than the next
    one are skips.

    Args:
        code: of a function of the layer, of what it takes and of what it pops, in this order.
        objects: what the code uses by a name.
        tensors: what the code uses as attributes of the layer, and the model does not have.
        segment: what it takes and gives.
        namespace: of the skips.
        signature: of the model, for the first layer.
    """

    _syncpipe_skippable = True

    def __init__(
        self,
        code: str,
        objects: dict[str, Any],
        tensors: dict[str, Tensor],
        segment: Segment,
        namespace: Namespace,
        signature: Signature | None,
    ) -> None:
        super().__init__()
        self._code, self._objects, self._signature = code, objects, signature
        self._takes = None if signature is not None else len(segment.takes)
        self._gives = None if segment.gives is None else len(segment.gives)
        stashes, pops = ([name for name, _ in those] for those in (segment.stashes, segment.pops))
        self._syncpipe_skips = Declaration(tuple(stashes), tuple(pops))
        self._skip_namespaces = dict.fromkeys(self._syncpipe_skips.names, namespace)
        self._retyped = False
        self._dtypes: set[torch.dtype] = set()  # of its parameters and buffers, as converted
        for name, value in tensors.items():
            self.register_buffer(name, value, persistent=False)
        self._ranks: dict[str, int] = {}  # the names in the model, in order
        self._function: Callable[..., Any] = self._compiled()
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _named_as_in_the_model
        )

    def _compiled(self) -> Callable[..., Any]:
        known: dict[str, Any] = {name: each.obj for name, each in _custom_builtins.items()}
        known.update(self._objects)
        exec(compile(self._code, "<syncpipe.sequential>", "exec"), known)
        function: Callable[..., Any] = known["forward"]
        return function

    @property
    def _device(self) -> torch.device:
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
                f"{self._code}"
            )
        if self._signature is not None:
            values = self._signature.tensors(input)
        else:
            values = [input] if self._takes == 1 else list(input)
        namespaces = self._skip_namespaces
        for name in self._syncpipe_skips.pop:
            values.append(store.take((namespaces[name], name), self))
        graded = torch.is_grad_enabled()
        try:
            results = self._function(self, *values)
        finally:
            torch._C._set_grad_enabled(graded)
        if self._gives is None:
            return results
        for name, value in zip(self._syncpipe_skips.stash, results[self._gives :], strict=True):
            store.put((namespaces[name], name), value, self)
        return results[0] if self._gives == 1 else results[: self._gives]

    def _hold(self, path: str, value: nn.Module | Tensor, persistent: bool = True) -> None:
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
        """As of any module; within another one its keys are those of the model, in its order."""
        if "prefix" not in kwargs:
            return super().state_dict(*args, **kwargs)
        kwargs["prefix"] = outer = _outer(kwargs["prefix"])
        found = super().state_dict(*args, **kwargs)
        if self._gives is None:  # the last layer, which finds what the others have put there
            for key in sorted(
                (key for key in found if key.removeprefix(outer) in self._ranks),
                key=lambda key: self._ranks[key.removeprefix(outer)],
            ):
                found[key] = found.pop(key)
        return found

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
        named = {kind for kind in _FLOATS if str(kind) in self._code}
        # Only a dtype that no parameter has can have been that of the parameters.
        self._retyped = bool(named and self._dtypes and not self._dtypes & kinds)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        self.__dict__["_loading"] = prefix, messages
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)

    def __repr__(self) -> str:
        code, indexed = "", self._code.rstrip()
        while code != indexed:
            code, indexed = indexed, re.sub(r'getattr\(([\w.\[\]]+), "(\d+)"\)', r"\1[\2]", indexed)
        return f"{type(self).__name__}(\n{indent(code, '  ')}\n)"

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


# What holds such layers


def index_keys(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Puts the index of the converted layer that holds it before each key of a model.

    Args:
        state_dict: the dict to load, changed in place.
        prefix: what stands before the keys of ``module`` in it.
        module: the module that is loaded, whose children are the layers.
    """
    found: dict[str, Any] = {}
    for name, layer in module._modules.items():
        if isinstance(layer, ConvertedLayer):
            for key in layer.state_dict():
                if prefix + key in state_dict:
                    found[f"{prefix}{name}.{key}"] = state_dict[prefix + key]
                    found.setdefault(prefix + key, None)
    for key in [key for key, value in found.items() if value is None]:
        del state_dict[key], found[key]
    state_dict.update(found)


def in_order(
    module: nn.Module,
    members: Callable[[nn.Module], Any],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Any]]:
    """``nn.Module._named_members``, in the order of the model that the layers were made of."""
    layers = module._modules.values()
    ranks = next((c._ranks for c in layers if isinstance(c, ConvertedLayer)), None)
    if ranks is None or not recurse:
        yield from nn.Module._named_members(module, members, prefix, recurse, remove_duplicate)
        return
    start = len(prefix) + 1 if prefix else 0
    named = dict(nn.Module._named_members(module, members, prefix, True, False))
    seen: set[Any] = set()
    for name in sorted(named, key=lambda name: ranks.get(name[start:], len(ranks))):
        if not (remove_duplicate and named[name] in seen):
            yield name, named[name]
        seen.add(named[name])


def distribute(model: nn.Module, layers: list[ConvertedLayer], segments: list[Segment]) -> None:
    """Gives each layer the modules, parameters and buffers that its segment uses.

    What no layer uses goes to the one that has what stands before it in the model, so that nothing
    is missing in a checkpoint.
    """
    homes: dict[str, int] = {}
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }

    def hold(k: int, path: str, value: nn.Module | Tensor) -> None:
        layers[k]._hold(path, value, path not in unsaved)
        homes.setdefault(path, k)

    ranks = _ranks(model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for k, segment in enumerate(segments):
        layers[k]._ranks = ranks
        for node in segment.nodes:
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used.target in tensors:
                    hold(k, str(used.target), tensors[str(used.target)])
            if node.op == "call_module":
                hold(k, str(node.target), model.get_submodule(str(node.target)))
    _hold_the_rest(model, hold, homes)


def _ranks(model: nn.Module) -> dict[str, int]:
    """The place of each name of a model: its parameters, buffers, and what else it saves."""
    names: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = f"{path}." if path else ""
        names += [own + name for name in (*module._parameters, *module._buffers)]
    known, last = {name: float(k) for k, name in enumerate(names)}, -1.0
    for key in model.state_dict():
        last = known.setdefault(key, last + 2**-20)
    return {name: k for k, name in enumerate(sorted(known, key=known.__getitem__))}


def _hold_the_rest(model: nn.Module, hold: Any, homes: dict[str, int]) -> None:
    where = {id(model.get_submodule(p)): k for p, k in homes.items() if _is_module(model, p)}
    held = [path for path in homes if _is_module(model, path)]
    last = 0
    for path, module in model.named_modules(remove_duplicate=False):
        if any(path == p or path.startswith(f"{p}.") for p in held):
            last = homes.get(path, last)
            continue
        if path and not any(p == path or p.startswith(f"{path}.") for p in homes):
            last = where.get(id(module), last)
            hold(last, path, module)
            held.append(path)
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            own = f"{path}.{name}" if path else name
            if tensor is not None and own not in homes:
                hold(last, own, tensor)
            last = homes.get(own, last)


def _is_module(model: nn.Module, path: str) -> bool:
    try:
        return isinstance(model.get_submodule(path), nn.Module)
    except AttributeError:
        return False
