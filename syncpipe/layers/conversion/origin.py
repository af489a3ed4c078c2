"""What the layers of a converted model share with it: modes, attributes, tensors.

The forward of an inlined module no longer runs, but user code may still change the module. Each
call of the layers follows such a change, or refuses it::

    model.eval(), model.backbone.eval()     followed
    model.temperature = 0.5                 followed if the number only flows into operations
    model.pos = nn.Parameter(...)           followed
    model.depth = 3, other children, hooks  refused
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from syncpipe.state import same_value

__all__ = ["CALL_HOOKS", "MISSING", "PLAIN", "Origin", "Read", "alike", "attribute"]

#: Types of values that are compared by ``==``.
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), torch.dtype,
         torch.layout, torch.memory_format, torch.device)  # fmt: skip
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "not there"})()
#: Where a module keeps the hooks around its forward.
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Containers whose entries may change.
_MUTABLE = (list, dict, set, SimpleNamespace)
#: Entries above which only the size of a container is compared.
_ENTRIES = 1000


class Read(NamedTuple):
    """An attribute that an inlined forward read.

    Attributes:
        name: its path from the model.
        owner: the object that has it, itself or by its class.
        key: its name in ``owner``.
        value: the value that was read, or ``MISSING``.
    """

    name: str
    owner: Any
    key: str
    value: Any

    def now(self) -> Any:
        return attribute(self.owner, self.key)


def attribute(owner: Any, key: str) -> Any:
    """The attribute that an object, or its class, has itself, or ``MISSING``."""
    own = getattr(owner, "__dict__", {})
    if key in own:
        return own[key]
    found = next((vars(cls)[key] for cls in type(owner).__mro__ if key in vars(cls)), MISSING)
    if not isinstance(found, MemberDescriptorType):  # of __slots__
        return found
    try:
        return found.__get__(owner)
    except AttributeError:
        return MISSING


class Origin:
    """The inlined modules of a model, and the attributes that its forward read.

    All layers share it. Copies of layers get an empty one, without a model.

    Attributes:
        modules: the inlined modules by path.
        numbers: the numbers of these that layers read in each call, by name.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        reads: Iterable[Read] = (),
        numbers: Iterable[str] = (),
    ) -> None:
        self.modules = dict(modules or {})
        by_name = {read.name: read for read in reads}
        self.numbers = {name: by_name.pop(name) for name in numbers}
        self._reads = list(by_name.values())
        self._layers: list[weakref.ref[Any]] = []
        self._tensors: list[tuple[weakref.ref[Any], dict[str, Any], str, str]] = []
        self.begin(())

    def __reduce__(self) -> Any:
        return Origin, ()

    def hold(self, holder: nn.Module, module: nn.Module, kind: str, name: str) -> None:
        """Register a parameter or buffer that an inlined module and a layer share."""
        self._tensors.append((weakref.ref(holder), getattr(module, kind), kind, name))

    def begin(self, layers: Iterable[Any]) -> None:
        """Take the current state as the unchanged one, after the conversion has restored it."""
        self._layers = list(map(weakref.ref, layers))
        self._children = {path: [*m._modules.values()] for path, m in self.modules.items()}
        self._forwards = {path: vars(m).get("forward") for path, m in self.modules.items()}
        self._known: list[Any] = [own.get(name) for _, own, _, name in self._tensors]
        self._values = [read.now() for read in self._reads]
        self._seen = list(self._values)
        self._last: dict[str, float] = {}
        mutable = [(read, each) for read, each in zip(self._reads, self._values, strict=True)]
        self._contents = [(r, _snapshot(each)) for r, each in mutable if isinstance(each, _MUTABLE)]
        self.follow_numbers()

    def refresh(self) -> None:
        """Follow what was changed since the last call, or raise a ``ValueError``."""
        for path, module in self.modules.items():
            if self._children[path] != [*module._modules.values()]:
                _refuse(f"the submodules of {path or 'the model'} were replaced")
            if any(getattr(module, kind) for kind in CALL_HOOKS):
                _refuse(f"{path or 'the model'} has hooks now, which its layers do not run")
            forward = vars(module).get("forward")
            if forward is not self._forwards[path] and not _runs_layers(forward):
                _refuse(f"the forward of {path or 'the model'} was replaced")
        for k, read in enumerate(self._reads):
            if (now := read.now()) is not self._seen[k]:
                if not (alike(now, self._values[k]) or alike(now, read.value)):
                    _refuse_value(read.name, self._values[k], now)
                self._seen[k] = now
        for read, then in self._contents:
            if (found := _snapshot(read.now())) != then:
                _refuse_value(read.name, then, found)
        for k, (holder, own, kind, name) in enumerate(self._tensors):
            if (tensor := own.get(name)) is not self._known[k] and (to := holder()) is not None:
                self._known[k] = getattr(to, kind)[name] = tensor
        self.follow_numbers()

    def share(self) -> None:
        """Give the inlined modules the tensors of the layers."""
        for k, (holder, own, kind, name) in enumerate(self._tensors):
            if (there := holder()) is not None:
                own[name] = self._known[k] = getattr(there, kind)[name]

    def follow_numbers(self) -> None:
        numbers = {name: read.now() for name, read in self.numbers.items()}
        for name, number in numbers.items():
            if type(number) not in (int, float):
                _refuse_value(name, self.numbers[name].value, number)
        if numbers != self._last:
            self._last = numbers
        for layer in filter(None, [layer() for layer in self._layers]):
            if layer._numbers is not self._last:
                layer._numbers = self._last


def _runs_layers(forward: Any) -> bool:
    """Whether a forward set on a model, or one that it wraps, runs its layers in a pipe."""
    while forward is not None and not hasattr(forward, "_syncpipe_runs_layers"):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _refuse(what: str) -> None:
    raise ValueError(
        f"the model was changed after its conversion: {what}. Undo that, or convert the model again"
    )


def _refuse_value(name: str, then: Any, now: Any) -> None:
    _refuse(
        f"{name} was {then!r:.100} and is {now!r:.100}, and the code of the layers depends on it"
    )


def alike(a: Any, b: Any) -> bool:
    """Whether two values are interchangeable."""
    if isinstance(a, (tuple, *_MUTABLE)) and type(a) is type(b):
        return bool(_snapshot(a) == _snapshot(b))
    return same_value(a, b) or (type(a) is type(b) and isinstance(a, PLAIN) and bool(a == b))


def _snapshot(value: Any, outer: tuple[Any, ...] = ()) -> Any:
    """A comparable copy of a container: other objects in it are compared by identity, and the
    containers around it (``outer``) by their depth."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    for depth, each in enumerate(outer):
        if each is value:
            return depth
    if isinstance(value, (list, tuple, set, dict)):
        if len(value) > _ENTRIES:
            return len(value)
        if isinstance(value, set):
            return frozenset(value)  # in any order
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: _snapshot(each, (*outer, value)) for key, each in items}
    return value if isinstance(value, PLAIN) else _Identity(value)


class _Identity(NamedTuple):
    """A wrapper that compares by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value
