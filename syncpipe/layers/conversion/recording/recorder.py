"""Records what a model does while it runs for real.

PyTorch's functions, the methods and sizes of tensors, and calls of modules are written down as
nodes, the values are those of an ordinary run. A module that is left whole is one node. Of the
others, which are opened, the forward runs as it is, and what it does is written down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from syncpipe.layers.conversion.recording.nodes import (
    HERE,
    Frame,
    Node,
    leaves_of,
    map_tree,
    rebuilt,
)
from syncpipe.layers.conversion.recording.reading import (
    DECIDES,
    READS,
    TELLS_NOTHING,
    line_in_model,
    parts_of,
)
from syncpipe.layers.conversion.recording.scalars import TracedFloat, TracedInt, plain
from syncpipe.tree import storage_of

__all__ = ["Recorder"]


class Recorder(TorchFunctionMode):
    """One recording.

    Args:
        model: the model.
        whole: the paths of the modules that are left whole.
        paths: the path of every module of the model.
        device: where the model is.
        names: of the tensors that are its inputs.
        copies: keep copies of values, as they are when they are given.

    Attributes:
        frame: what the model did.
        faults: what the recording cannot stand for: owner, line, what.
        inputs: the nodes of the caller's tensors.
        output: what the model gave, with nodes for values.
    """

    def __init__(
        self,
        model: nn.Module,
        whole: set[str],
        paths: Mapping[nn.Module, str],
        device: torch.device,
        names: list[str],
        *,
        copies: bool = False,
    ) -> None:
        super().__init__()
        self.copies = copies
        self._names = names
        self._model, self._whole, self._paths, self._device = model, whole, paths, device
        self.frame = self._frame = Frame("", ())
        self.faults: list[tuple[str, str, str]] = []
        self.inputs: list[Node] = []
        self.output: Any = None
        self._values: dict[int, Node] = {}
        self._kept: list[Any] = []  # so that no id is used again
        self._pending: nn.Module | None = None
        self._quiet = False
        self._thread = threading.get_ident()
        self._state = _state(device)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            node = Node("attribute", name, key=("attribute", name))
            node.value = tensor
            self._know(tensor, node)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs the model; tensors in the arguments are its inputs, in order.

        Raises:
            Exception: what the model raises.
        """

        def entering(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = leaf.detach().requires_grad_(leaf.requires_grad)
            node = Node("input", self._names[len(self.inputs)], key=("input", len(self.inputs)))
            node.value = own
            self._know(own, node)
            self.inputs.append(node)
            return own

        args, kwargs = rebuilt(entering, (args, kwargs))
        with self._recording():
            self.output = self.lift(self._model(*args, **kwargs))
        self._state = None

    @contextmanager
    def _recording(self) -> Iterator[None]:
        classes = {cls for module in self._paths for cls in type(module).__mro__}
        called = [
            cls for cls in classes if issubclass(cls, nn.Module) and "__call__" in cls.__dict__
        ]
        with ExitStack() as stack:
            for cls in called:
                stack.enter_context(patch.object(cls, "__call__", self._calling(cls.__call__)))
            applied = classmethod(self._applying(torch.autograd.Function.__dict__["apply"]))
            stack.enter_context(patch.object(torch.autograd.Function, "apply", applied))
            # Code that looks at values where it is not traced stays away from them.
            if hasattr(torch.compiler, "_is_compiling_flag"):
                stack.enter_context(patch.object(torch.compiler, "_is_compiling_flag", True))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self)
            yield

    # What happens

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if (
                self._quiet
                or threading.get_ident() != self._thread
                or module is self._pending
                or module not in self._paths
            ):
                return call(module, *args, **kwargs)
            path = self._paths[module]
            if path in self._whole:
                return self._perform(
                    Node("module", path), lambda *a, **k: call(module, *a, **k), args, kwargs
                )
            outer, outer_pending = self._frame, self._pending
            self._frame = Frame(path, (*outer.key, len(outer.entries)))
            outer.entries.append(self._frame)
            self._pending = module
            try:
                return call(module, *args, **kwargs)
            finally:
                self._frame, self._pending = outer, outer_pending

        return called

    def _applying(self, apply: Any) -> Callable[..., Any]:
        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = apply.__get__(None, cls)
            if self._quiet or threading.get_ident() != self._thread:
                return own(*args, **kwargs)
            return self._perform(Node("call", own), own, args, kwargs)

        return applied

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name == "shape":
                return self._sizes(args[0], func(args[0]))
            return self._perform(Node("get", name), func, args, kwargs)
        if name in READS:
            self._fault(f"Python takes values out of a tensor, or puts them in ({name})")
            return func(*args, **kwargs)
        if name in TELLS_NOTHING and not (name == "type" and len(args) > 1):
            return func(*map(plain, args), **kwargs)
        if name == "size" and len(args) == 1 and not kwargs:
            return self._sizes(args[0], func(args[0]))
        own = getattr(torch.Tensor, name, None) is func
        node = Node("method", name) if own else Node("call", func)
        return self._perform(node, func, args, kwargs)

    def _sizes(self, tensor: Tensor, sizes: torch.Size) -> torch.Size:
        node = self._values.get(id(tensor))
        if node is None or node.kind == "attribute":  # sizes of parameters are the model's own
            return sizes
        given = []
        for k, size in enumerate(sizes):
            part = self._place(Node("method", "size", (node, k)))
            given.append(self._number(part, size))
        return torch.Size(given)

    def _perform(
        self, node: Node, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Does one thing, and writes it down."""
        node.args, node.kwargs = self.lift(args), self.lift(kwargs)
        taken = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        taken = [tensor for tensor in taken if not tensor.is_inference()]
        versions = [tensor._version for tensor in taken]
        state = _state(self._device)
        self._quiet = True
        try:
            result = fn(*rebuilt(plain, args), **rebuilt(plain, kwargs))
        finally:
            self._quiet = False
        written = [t for t, v in zip(taken, versions, strict=True) if v != t._version]
        name = node.target
        if node.kind in ("call", "method", "get"):
            bare = name if isinstance(name, str) else getattr(name, "__name__", "")
            if bare in DECIDES:
                self._place(node).value = result
                if bare == "__len__":
                    self.decided(node, result)
                else:
                    self._fault("what it does next depends on the values in a tensor")
                return result
            if node.kind == "get" and not isinstance(result, Tensor):
                return result
            if not node.inputs and not _has_tensor(result):
                return result
        self._place(node)
        node.writes = bool(written)
        node.grad = torch.is_grad_enabled()
        if state != self._state:
            self._fault("the model runs this under another mode (autocast, inference_mode)")
        return self._given(node, result, written)

    def _given(self, node: Node, result: Any, written: list[Tensor]) -> Any:
        for tensor in written:  # from here on it is what this node made of it
            old = self._values.get(id(tensor))
            given_back = any(tensor is leaf for leaf in leaves_of(result))
            if old is not None and old.kind != "attribute" and not given_back:
                key = (*node.key, "after", old.key)
                part = Node("item", ("after", old), (node, old), key=key)
                part.owner, part.line, part.value = node.owner, node.line, tensor
                node.items.append(part)
                self._know(tensor, part)
        return self._bound(node, result, written)

    def _bound(self, node: Node, result: Any, written: list[Tensor]) -> Any:
        """What a node gave, known from here on."""
        if isinstance(result, Tensor):
            if id(result) in self._values and not any(result is tensor for tensor in written):
                result = _alias(result)  # the very tensor that it was given
            node.value = result.detach().clone() if self.copies else result
            self._know(result, node)
            return result
        if isinstance(result, bool) or result is None or isinstance(result, str):
            return result
        if isinstance(result, (int, float)):
            return self._number(node, result)
        parts = parts_of(result)
        if parts is None:
            if not isinstance(result, (torch.dtype, torch.device, torch.layout)):
                node.value = result
                self._know(result, node)
            return result
        node.value = node
        new = {}
        for accessor, value in parts.items():
            part = Node("item", accessor, (node,), key=(*node.key, accessor))
            part.owner, part.line, part.grad = node.owner, node.line, node.grad
            node.items.append(part)
            new[accessor] = self._bound(part, value, written)
        if all(new[accessor] is value for accessor, value in parts.items()):
            return result
        if type(result) in (tuple, list):
            return type(result)(new.values())
        if type(result) is torch.Size:
            return torch.Size(list(new.values()))
        if type(result) is dict:
            return dict(zip(result, new.values(), strict=True))
        return result

    # What is written down

    def _place(self, node: Node) -> Node:
        frame = self._frame
        node.key, node.owner = (*frame.key, len(frame.entries)), frame.owner
        node.line = line_in_model()
        frame.entries.append(node)
        return node

    def _know(self, value: Any, node: Node) -> None:
        self._values[id(value)] = node
        self._kept.append(value)

    def _number(self, node: Node, value: Any) -> Any:
        traced = (TracedInt if isinstance(value, int) else TracedFloat)(plain(value))
        traced.node, traced.notes = node, self
        node.value = plain(value)
        return traced

    def computed(self, fn: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Any:
        """A number was computed of others."""
        if self._state is None or self._quiet:
            return value
        node = self._place(Node("call", fn, self.lift(args)))
        return self._number(node, value)

    def decided(self, node: Any, value: Any) -> None:
        """Python used the value of a node, or of a comparison."""
        if self._state is None or self._quiet:
            return
        if not isinstance(node, Node):
            fn, args = node
            node = self._place(Node("call", fn, self.lift(args)))
            node.value = value
        self._place(Node("check", None, (node, value)))

    def lift(self, tree: Any) -> Any:
        """A tree of values with nodes in their place."""
        return map_tree(self._lifted, tree)

    def _lifted(self, leaf: Any) -> Any:
        if isinstance(leaf, (TracedInt, TracedFloat)):
            return leaf.node
        if isinstance(leaf, torch.device):
            same = leaf.type == self._device.type and leaf.index in (None, self._device.index)
            return HERE if same else leaf
        if isinstance(leaf, _CONSTANTS):
            return leaf
        node = self._values.get(id(leaf))
        if node is None:
            if isinstance(leaf, nn.Module) or (isinstance(leaf, Tensor) and leaf.requires_grad):
                self._fault(f"a {type(leaf).__name__} that is no part of the model is used")
            node = Node("constant", leaf, key=("constant", id(leaf)), line=line_in_model())
            node.owner, node.value = self._frame.owner, leaf
            self._know(leaf, node)
        return node

    def _fault(self, what: str) -> None:
        self.faults.append((self._frame.owner, line_in_model(), what))


_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), torch.dtype,
              torch.layout, torch.memory_format, type)  # fmt: skip


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves_of(tree))


def _alias(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.view_as(tensor) if storage_of(tensor) else tensor


def _state(device: torch.device) -> Any:
    """What an operation depends on besides its arguments, but for gradients."""
    mixed = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.is_inference_mode_enabled(), mixed, torch.get_default_dtype()
