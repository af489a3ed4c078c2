"""Names as in the model: a converted layer holds modules at their paths, its own index is left out.

the model                       transformer.h.0.ln_1.weight
held by layer 3                 3 / transformer.h.0.ln_1.weight
state_dict, named_parameters        transformer.h.0.ln_1.weight
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from syncpipe.layers.conversion.layer import ConvertedLayer
from syncpipe.layers.conversion.recording.nodes import Node

__all__ = ["distribute", "in_order", "index_keys"]


def index_keys(state_dict: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Puts the index of the converted layer that holds it before each key of a model.

    Args:
        state_dict: the dict to load, changed in place.
        prefix: what stands before the keys of ``module`` in it.
        module: the module that is loaded, whose children are the layers.
    """
    found: dict[str, Any] = {}
    taken = set()
    for name, layer in module._modules.items():
        if isinstance(layer, ConvertedLayer):
            for key in layer.state_dict():
                if prefix + key in state_dict:
                    found[f"{prefix}{name}.{key}"] = state_dict[prefix + key]
                    taken.add(prefix + key)
    for key in taken:
        del state_dict[key]
    state_dict.update(found)


def in_order(
    module: nn.Module, prefix: str, recurse: bool, remove_duplicate: bool
) -> Iterator[tuple[str, nn.Parameter]]:
    """``nn.Module.named_parameters``, in the order of the model that the layers were made of."""
    layers = module._modules.values()
    ranks = next((c.ranks for c in layers if isinstance(c, ConvertedLayer)), None)
    if ranks is None or not recurse:
        yield from nn.Module.named_parameters(module, prefix, recurse, remove_duplicate)
        return
    start = len(prefix) + 1 if prefix else 0
    named = dict(nn.Module.named_parameters(module, prefix, remove_duplicate=False))
    seen: set[nn.Parameter] = set()
    for name in sorted(named, key=lambda name: ranks.get(name[start:], len(ranks))):
        if not (remove_duplicate and named[name] in seen):
            yield name, named[name]
        seen.add(named[name])


def distribute(model: nn.Module, layers: list[ConvertedLayer], nodes: list[list[Node]]) -> None:
    """Gives each layer the modules, parameters and buffers that its nodes use.

    What no layer uses goes to the one that has what stands before it in the model, so that nothing
    is missing in a checkpoint.
    """
    homes: dict[str, int] = {}
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    ranks = {name: k for k, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}

    def hold(k: int, path: str, value: nn.Module | Tensor) -> None:
        layers[k].hold(path, value, path not in unsaved)
        homes.setdefault(path, k)

    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for k, own in enumerate(nodes):
        layers[k].ranks = ranks
        for node in own:
            for used in node.inputs:
                if used.kind == "attribute":
                    hold(k, used.target, tensors[used.target])
            if node.kind == "module":
                hold(k, node.target, model.get_submodule(node.target))
    _hold_the_rest(model, hold, homes)


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
