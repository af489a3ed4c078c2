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

from syncpipe.layers.conversion.segments import Code, Segment
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
        codes: what it does in training, and in evaluation.
        segment: what it takes and gives.
        namespace: of the skips.
        signature: of the model, for the first layer.
    """

    _syncpipe_skippable = True

    def __init__(
        self,
        codes: list[Code],
        segment: Segment,
        namespace: Namespace,
        signature: Signature | None,
    ) -> None:
        super().__init__()
        self._codes, self._signature = codes, signature
        self._takes = None if signature is not None else len(segment.takes)
        self._gives = None if segment.gives is None else len(segment.gives)
        stashes, pops = ([name for name, _ in those] for those in (segment.stashes, segment.pops))
        self._syncpipe_skips = Declaration(tuple(stashes), tuple(pops))
        self._skip_namespaces = dict.fromkeys(self._syncpipe_skips.names, namespace)
        self._retyped = False
        self._dtypes: set[torch.dtype] = set()  # of its parameters and buffers, as converted
        for name, value in {**codes[0].attributes, **codes[1].attributes}.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                self.__dict__[name] = value
            codes[0].attributes = codes[1].attributes = {}
        self._ranks: dict[str, int] = {}  # the names in the model, in order
        self._functions = [_compiled(code) for code in codes]
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            _named_as_in_the_model
        )

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
        mode = 0 if self.training else 1
        if self._retyped:
            raise TypeError(
                "the dtype of the parameters was changed after the model was converted, and the "
                f"code of this layer has the dtype of then in it: change it first, then convert\n"
                f"{self._codes[mode].text}"
            )
        if self._signature is not None:
            values: list[Any] = [*self._signature.tensors(input)]
        else:
            values = [input] if self._takes == 1 else list(input)
        namespaces = self._skip_namespaces
        for name in self._syncpipe_skips.pop:
            values.append(store.take((namespaces[name], name), self))
        if any(values[k] is ... for k in self._codes[mode].needed):
            raise RuntimeError(
                f"this layer is in {('training', 'evaluation')[mode]}, and one before it is not: "
                "the model does something else in training than in evaluation here, so all of its "
                "layers must be in one mode"
            )
        graded = torch.is_grad_enabled()
        try:
            results = self._functions[mode](self, *values)
        finally:
            torch._C._set_grad_enabled(graded)
        if self._gives is None:
            return results
        for name, value in zip(self._syncpipe_skips.stash, results[self._gives :], strict=True):
            store.put((namespaces[name], name), value, self)
        return results[0] if self._gives == 1 else results[: self._gives]

    def hold(self, path: str, value: nn.Module | Tensor, *, persistent: bool = True) -> None:
        """Registers a module, parameter or buffer of the original at its path."""
        at: nn.Module = self
        *way, name = path.split(".")
        for part in way:
            if at._modules.get(part) is None:
                at._modules[part] = Holder()
            at = at._modules[part]  # type: ignore[assignment]
        if isinstance(value, nn.Module):
            at._modules[name] = value
        elif isinstance(value, nn.Parameter):
            at._parameters[name] = value
        else:
            at._buffers[name] = value
            if not persistent:
                at._non_persistent_buffers_set.add(name)
        inner = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
        self._dtypes |= {tensor.dtype for tensor in inner if tensor.is_floating_point()}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; within another one its keys are those of the model, in its order."""
        if "prefix" not in kwargs:
            return super().state_dict(*args, **kwargs)
        kwargs["prefix"] = outer = _outer(kwargs["prefix"])
        found = super().state_dict(*args, **kwargs)
        if self._gives is None:  # the last layer, which finds what the others have put there
            ranks = {outer + name: rank for name, rank in self._ranks.items()}
            for key in sorted((key for key in found if key in ranks), key=ranks.__getitem__):
                found[key] = found.pop(key)
        return found

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As of any module; within another one the names are those of the model."""
        outer = _outer(f"{prefix}.")
        # Parameters of the model itself have no name before theirs.
        own = outer.removesuffix(".") if self._parameters or self._buffers else prefix
        for name, module in super().named_modules(memo, "", remove_duplicate):
            yield (f"{outer}{name}" if name else own), module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        kinds = {tensor.dtype for tensor in (*self.parameters(), *self.buffers())}
        text = self._codes[0].text + self._codes[1].text
        named = any(str(kind) in text for kind in _FLOATS)
        # Only a dtype that no parameter has can have been that of the parameters.
        self._retyped = bool(named and self._dtypes and not self._dtypes & kinds)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        self.__dict__["_loading"] = prefix, messages
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)

    def __repr__(self) -> str:
        texts = [code.text.rstrip() for code in self._codes]
        if texts[0] == texts[1]:
            del texts[1]
        else:
            texts = [
                f"# in {m}\n{t}" for m, t in zip(("training", "evaluation"), texts, strict=True)
            ]
        code, indexed = "", "\n".join(texts)
        while code != indexed:
            code, indexed = indexed, re.sub(r'getattr\(([\w.\[\]]+), "(\d+)"\)', r"\1[\2]", indexed)
        return f"{type(self).__name__}(\n{indent(code, '  ')}\n)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_functions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._functions = [_compiled(code) for code in self._codes]


def _compiled(code: Code) -> Callable[..., Any]:
    known: dict[str, Any] = {name: each.obj for name, each in _custom_builtins.items()}
    known.update(code.known)
    exec(compile(code.text, "<syncpipe.sequential>", "exec"), known)
    function: Callable[..., Any] = known["forward"]
    return function


def _named_as_in_the_model(layer: nn.Module, _: Any) -> None:
    """Takes the index of a layer out of what loading it has to say."""
    prefix, messages = layer.__dict__.pop("_loading")
    own = re.compile(rf"(^| ){re.escape(prefix)}")
    for texts in messages:
        texts[:] = [own.sub(rf"\1{_outer(prefix)}", text) for text in texts]


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
    taken: set[str] = set()
    for name, layer in module._modules.items():
        for key in layer.state_dict() if isinstance(layer, ConvertedLayer) else ():
            if prefix + key in state_dict:
                found[f"{prefix}{name}.{key}"] = state_dict[prefix + key]
                taken.add(prefix + key)
    for key in taken - found.keys():
        del state_dict[key]
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

    What no layer uses goes to the last one, so that nothing is missing in a checkpoint; a module
    that is in the model twice goes to the layer that has it.
    """
    ranks = _ranks(model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    unsaved = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    homes: dict[str, int] = {}
    held: dict[Any, int] = {}

    def hold(k: int, path: str, value: nn.Module | Tensor) -> None:
        layers[k].hold(path, value, persistent=path not in unsaved)
        homes[path] = held[value] = k

    for k, segment in enumerate(segments):
        layers[k]._ranks = ranks
        for node in (node for nodes in segment.nodes for node in nodes):
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used.target in tensors:
                    hold(k, str(used.target), tensors[str(used.target)])
            if node.op == "call_module":
                hold(k, str(node.target), model.get_submodule(str(node.target)))
    for path, module in model.named_modules(remove_duplicate=False):
        if any(f"{path}.".startswith(f"{p}.") for p in homes if p not in tensors):
            continue  # inside of what is held
        if path and not any(p.startswith(f"{path}.") for p in homes):
            hold(held.get(module, len(layers) - 1), path, module)
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            own = f"{path}.{name}".lstrip(".")
            if tensor is not None and own not in homes:
                hold(held.get(tensor, len(layers) - 1), own, tensor)


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
