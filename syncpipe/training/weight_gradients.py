"""The backward of one cell in two halves, for zero-bubble schedules.

    input half    gy --> [cell's whole autograd backward] --> gx      puts (x, gy) of layers aside
    weight half   (x, gy) --> weight.grad                             no graph, nobody waits for it

The input half runs the true graph. Only where a linear map or a convolution meets a weight that is
an ordinary leaf does it leave something out: the gradient of that weight, the one product that
nothing else in backward depends on. All other operations do their whole backward in the input
half. So every module is right by construction, and what splits is a matter of speed.

While a cell runs forward, a torch-function mode sees its calls of ``F.linear`` and convolutions
and puts a custom autograd node in the place of PyTorch's. The node behaves like the one it
replaces until it meets a backward that was told to split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from syncpipe.runtime.randomness.private_generator import nobody_looks
from syncpipe.runtime.thread_state import _saved_tensor_hooks
from syncpipe.training.weight_gradients_rules import (
    BINDERS,
    PLAIN,
    Rule,
    autocast_is_on,
    taken_apart,
)

__all__ = ["Casts", "WeightGradients", "can_split"]

#: By identity and dtype: a parameter, its version, and its copy in that dtype.
Casts = dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]]

_C: Any = torch._C


class WeightGradients:
    """The weight gradients of one cell, put off from its input half to its weight half.

    ::

        weights = WeightGradients()
        with weights.recording():
            y = cell(x)
        with weights.splitting():
            torch.autograd.backward(y, gy)  # input half
        weights.accumulate()  # weight half

    Together the halves leave the gradients that one whole backward leaves, to the last bit where
    ``.grad`` was ``None`` before. There are two exceptions, both within rounding: to a gradient
    that exists already a linear layer adds its product in one fused operation; and the gradients of
    a parameter that is used more than once in the cell are summed in another order, under autocast
    also in the parameter's own dtype instead of autocast's.

    The object serves one thread at a time, and one cell: its graph holds it.

    Args:
        casts: copies of weights in autocast's dtype, shared by the cells of one stage in one call.
        hooked: by identity of a parameter whether its node in the graph has hooks; shared as well.
    """

    __slots__ = ("_casts", "_halves", "_hooked", "_splitting")

    def __init__(self, casts: Casts | None = None, hooked: dict[int, bool] | None = None) -> None:
        self._casts: Casts = {} if casts is None else casts
        self._hooked: dict[int, bool] = {} if hooked is None else hooked
        self._halves: deque[_Half] = deque()
        self._splitting = False  # of the object: autograd has device threads of its own

    def recording(self) -> AbstractContextManager[Any]:
        """Around the cell's forward: makes its linear maps and convolutions splittable."""
        below = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if all(isinstance(mode, (DeviceContext, _Recording)) for mode in below):
            return _Recording(self)
        return nullcontext()  # a mode of the user's may give these functions another meaning

    @contextmanager
    def splitting(self) -> Iterator[None]:
        """Around the cell's backward: makes it the input half, which puts weight halves aside.

        It has to be a ``torch.autograd.backward``, which adds to the gradients of parameters;
        an ``autograd.grad``, which returns them, stays whole.
        """
        before, self._splitting = self._splitting, True
        try:
            yield
        finally:
            self._splitting = before

    def accumulate(self) -> None:
        """The weight half: adds to the gradients what was put aside, and lets go of it.

        Unlike autograd's own accumulation it takes no lock: no other thread may add to the same
        gradients meanwhile.

        Raises:
            RuntimeError: the input of a layer was modified in place since the input half.
        """
        with torch.no_grad():
            while self._halves:
                half = self._halves.popleft()
                kind = half.gy.device.type
                with _no_autocast(kind) if autocast_is_on(kind) else nullcontext():
                    half.accumulate()

    @property
    def pending(self) -> int:
        """How many weight halves are put aside."""
        return len(self._halves)

    def _cast(self, parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """A parameter in the dtype to compute in; call it without grad mode."""
        if parameter is None or parameter.dtype is dtype:
            return parameter
        if not parameter.is_leaf:
            return parameter.to(dtype)
        key = (id(parameter), dtype)
        _, version, copy = self._casts.get(key, (None, None, parameter))
        if version != parameter._version:
            copy = parameter.to(dtype)
            self._casts[key] = (parameter, parameter._version, copy)
        return copy


@dataclass(slots=True)
class _Half:
    """The weight half of one call of a layer.

    Attributes:
        rule: of the call.
        gy: gradient of the output.
        x: the input.
        version: of ``x``, from when it was put aside.
        weight: as it was used, perhaps a copy in another dtype.
        into: the parameter that it is.
        bias: the parameter whose gradient comes along, if it does.
    """

    rule: Rule
    gy: Tensor
    x: Tensor
    version: int
    weight: Tensor | None
    into: Tensor
    bias: Tensor | None

    def accumulate(self) -> None:
        if self.x._version != self.version:  # autograd itself only looks until the input half
            raise RuntimeError(
                f"the input (shape {list(self.x.shape)}) of a layer with a weight of shape "
                f"{list(self.into.shape)} was modified in place between the input half of backward "
                "and its weight half, which needs it: let the layer work on a copy"
            )
        self.rule.accumulate(self.gy, self.x, self.weight, self.into, self.bias)


@contextmanager
def _no_autocast(kind: str) -> Iterator[None]:
    """Products in the dtype of their factors, as in a backward after ``with autocast``.

    ``torch.autocast`` itself would clear its cache on the way out, and that of all threads.
    """
    torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, True)


class _Split(torch.autograd.Function):
    """A layer's function, with a backward that can leave the gradient of the weight out."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        x: Tensor,
        bias: Tensor | None,
        rule: Rule,
        cell: WeightGradients,
        dtype: torch.dtype,
    ) -> Tensor:
        used = cell._cast(weight, dtype)
        assert used is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, used if rule.reads_weight or ctx.needs_input_grad[1] else None)
        ctx.call = (cell, rule, weight, bias)
        ctx.version = None if used is weight else weight._version
        y = rule.forward(x, used, cell._cast(bias, dtype))
        # Autograd forbids to modify a view in place that was made in here.
        return y.detach() if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None) -> tuple[Tensor | None, ...]:
        if gy is None:
            return (None,) * 6
        cell, rule, weight, bias = ctx.call
        x, used = ctx.saved_tensors
        _, needs_x, needs_b, *_ = ctx.needs_input_grad
        along = bias if needs_b and rule.defers_bias else None
        graph = torch.is_grad_enabled()
        off = (
            cell._splitting
            and not graph
            and _adds(ctx, 0, weight, cell)
            and _adds(ctx, 2, along, cell)
        )
        if off:
            factor = weight if ctx.version is None else used  # not what hooks made of it
            half = _Half(rule, gy, x.detach(), x._version, factor, weight, along)
            cell._halves.append(half)
            needs_b = needs_b and along is None
            if not needs_x and not needs_b:
                return (None,) * 6
        elif graph and ctx.version is not None and used is not None:
            used = _differentiable(used, weight, ctx.version)
        gx, gw, gb = rule.gradients(gy, x, used, (needs_x, not off, needs_b))
        return gw, gx, gb, None, None, None


def _adds(ctx: Any, k: int, parameter: Tensor | None, cell: WeightGradients) -> bool:
    """Whether all that this very backward does with input ``k`` is to add to its ``.grad``.

    A node can also be in a backward that asks for the gradient (a layer that calls
    ``autograd.grad``), and what watches the accumulation has to see all of the gradient.
    """
    if parameter is None:
        return True
    if not parameter.is_leaf or type(parameter) not in PLAIN:
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    if getattr(parameter, "grad_dtype", parameter.dtype) is not parameter.dtype:
        return False
    node = ctx.next_functions[k][0]
    hooked = cell._hooked.get(id(parameter))
    if hooked is None:
        hooked = cell._hooked[id(parameter)] = _has_hooks(node)
    if hooked:
        return False
    try:
        return bool(_C._will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf that autograd.grad was asked for
        return False


def _has_hooks(node: Any) -> bool:
    """Whether somebody has put hooks on a node, as Megatron and Apex do to start collectives."""
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)  # the only way to see the others
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _differentiable(copy: Tensor, weight: Tensor, version: int) -> Tensor:
    """The copy of a weight once more, as a function of the weight (for double backward)."""
    if weight._version != version:
        raise RuntimeError(
            f"a weight of shape {list(weight.shape)} was modified in place between forward and a "
            "backward with create_graph=True, which needs it as it was"
        )
    return weight.to(copy.dtype)


class _Recording(TorchFunctionMode):
    """Puts :class:`_Split` in the place of the functions it stands for."""

    def __init__(self, cell: WeightGradients) -> None:
        super().__init__()
        self._cell = cell

    def __enter__(self) -> _Recording:
        self._hooks = _saved_tensor_hooks()
        # In one line: Ctrl-C may come between two, and before the end of it there is no __exit__.
        return cast("_Recording", super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *exc_info: object) -> None:
        # Ctrl-C may have come while PyTorch had taken it off.
        if self in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        bind = BINDERS.get(func)
        if bind is not None:
            call = taken_apart(bind, args, kwargs) if self._may_split(types) else None
            if call is not None:
                return self._split(*call)
        elif func is F.multi_head_attention_forward and self._may_split(types):
            with self:
                return _opened(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _split(
        self, rule: Rule, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Any:
        if x.dtype is not dtype:
            x = x.to(dtype)
        return _Split.apply(weight, x, bias, rule, self._cell, dtype)  # type: ignore[no-untyped-call]

    def _may_split(self, types: Any) -> bool:
        """Whether nothing is in force that an autograd node of ours could get wrong.

        Saved-tensor hooks that a layer installs itself may count what is stored, in a forward and
        in a recomputation that we do not see (``torch.utils.checkpoint`` does).
        """
        return (
            all(kind in PLAIN for kind in types)
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and nobody_looks()
            and _C._functorch.peek_interpreter_stack() is None
            and torch.autograd.forward_ad._current_level < 0
            and _saved_tensor_hooks() == self._hooks
        )


def _opened(function: Any) -> FunctionType:
    """A composite function without its own look for modes, so that its parts meet them."""
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


#: Modules that compute with weights of their own in functions that do not split.
_WHOLE = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
#: Modules with a fast path for inference, which torch-function modes close.
_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def can_split(module: nn.Module) -> bool:
    """Whether a module's backward may be split, and anything may come of it.

    Not where the forward is no plain Python (compiled, TorchScript); not around
    ``DistributedDataParallel`` and its kin, which watch the gradients of parameters from where
    nobody can see; and not where the mere watching would change the result.
    """
    modules = list(module.modules())
    if any(_must_stay_whole(child) for child in modules):
        return False
    return any(
        p.requires_grad and (nn.parameter.is_lazy(p) or p.dim() > 1)
        for child in modules
        if not isinstance(child, _WHOLE)
        for p in child.parameters(recurse=False)
    )


def _must_stay_whole(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        return True
    if hasattr(module.forward, "_torchdynamo_orig_callable"):
        return True
    if isinstance(module, _FAST_PATH) and not module.training:
        return not any(p.requires_grad for p in module.parameters())
    homes = [base.__module__ for base in type(module).__mro__]
    return any(home.startswith(("torch.nn.parallel", "torch.distributed")) for home in homes)
