"""Loading checkpoints in which a skippable layer was wrapped in another module.

In torchgpipe the decorator put a wrapper around the layer, so a state dict that it wrote says
``0.module.conv.weight`` where ours says ``0.conv.weight``.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from typing import Any

from torch import nn

_OLD = "module."
_METHOD = "_load_from_state_dict"


def accept_old_keys(cls: type[nn.Module]) -> None:
    """Lets the layers of a class load state dicts of either kind."""
    own: Any = cls.__dict__.get(_METHOD)
    if own is None and getattr(cls, "_syncpipe_skippable", False):
        return  # inherits it

    def load(
        self: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        _rename_old_keys(self, state_dict, prefix)
        inner = own.__get__(self) if own else getattr(super(cls, self), _METHOD)
        inner(state_dict, prefix, *args, **kwargs)

    setattr(cls, _METHOD, functools.wraps(getattr(cls, _METHOD))(load))


def _rename_old_keys(layer: nn.Module, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    if any("module" in own for own in (layer._modules, layer._parameters, layer._buffers)):
        return
    old_prefix = prefix + _OLD
    for old in [key for key in state_dict if key.startswith(old_prefix)]:
        new = prefix + old[len(old_prefix) :]
        if new not in state_dict:
            state_dict[new] = state_dict.pop(old)
