"""The two halves of the layers whose backward can be split: linear maps and convolutions.

A rule knows three things of one call: its forward; the gradients of its input, weight and bias,
any of them alone; and how to add the gradient of its weight to ``weight.grad``. All of it is
what PyTorch's own backward computes, in the same order of the same operations, since the results
have to be equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BINDERS", "PLAIN", "Rule", "autocast_is_on", "taken_apart"]

#: The types of tensors that have no behaviour of their own.
PLAIN = (Tensor, nn.Parameter)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia")  # that lower linears and convolutions
_AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that autocast converts

#: For each of input, weight and bias its gradient, or ``None``.
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Rule(Protocol):
    """How one call of a layer's function is computed, forward and backward.

    Attributes:
        defers_bias: whether the gradient of the bias belongs to the weight half.
        reads_weight: whether the gradient of the weight depends on (the shape of) the weight.
    """

    defers_bias: bool
    reads_weight: bool

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The function itself."""

    def gradients(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, mask: Sequence[bool]
    ) -> _Gradients:
        """The gradients that ``mask`` asks for; differentiable when grad mode is on."""

    def accumulate(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, into: Tensor, bias: Tensor | None
    ) -> None:
        """Adds the gradient of the weight to ``into.grad``, and that of the bias if given."""


_Bound = tuple[Rule, Tensor, Tensor, Tensor | None]  # rule, input, weight, bias
_Call = tuple[Rule, Tensor, Tensor, Tensor | None, torch.dtype]


class _Linear:
    """``F.linear``: ``y = x @ w.T + b``, for inputs of any number of dimensions."""

    defers_bias = False
    reads_weight = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def gradients(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, mask: Sequence[bool]
    ) -> _Gradients:
        gy_rows, x_rows = _rows(gy), _rows(x)
        gx = gw = gb = None
        if mask[0]:
            assert weight is not None
            gx = _input_gradient(gy_rows, x_rows, weight)
            gx = gx if x.dim() == 2 else gx.view(x.shape)
        if mask[1]:
            gw = _weight_gradient(gy_rows, x_rows, weight)
        if mask[2]:  # summed by autograd, which brings every gradient to the shape of its tensor
            gb = gy_rows if x.is_contiguous() else gy
        return gx, gw, gb

    def accumulate(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, into: Tensor, bias: Tensor | None
    ) -> None:
        grad = into.grad
        gy, x = _rows(gy), _rows(x)
        if grad is not None and grad.dtype is x.dtype and grad.layout is torch.strided:
            grad.addmm_(gy.t(), x.conj())  # no temporary, and no pass over memory to add it
        else:
            _add(into, _weight_gradient(gy, x, into))


def _rows(x: Tensor) -> Tensor:
    """All but the last dimension as one."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def _input_gradient(gy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if x.stride() == (1, x.shape[0]):  # autograd keeps a transposed matrix transposed
        return weight.t().conj().mm(gy.t()).t()
    return gy.mm(weight.conj())


def _weight_gradient(gy: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None or weight.stride() == (weight.shape[1], 1):
        return gy.t().mm(x.conj())
    return x.t().conj().mm(gy).t()


class _Convolution:
    """``F.conv1d`` and its kin, transposed ones included.

    The gradient of the bias goes with that of the weight: oneDNN (CPU) computes them in one pass,
    so that to ask for the one is to pay for both.
    """

    defers_bias = True
    reads_weight = True

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        settings: tuple[list[int], list[int], list[int], bool, list[int], int],
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._settings = settings

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._function(x, weight, bias, *self._arguments)

    def gradients(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, mask: Sequence[bool]
    ) -> _Gradients:
        assert weight is not None
        batched = x.dim() == weight.dim()
        if not batched:
            gy, x = gy.unsqueeze(0), x.unsqueeze(0)
        gx, gw, gb = torch.ops.aten.convolution_backward(
            gy, x, weight, [gy.shape[1]] if mask[2] else None, *self._settings, mask
        )
        if gx is not None and not batched:
            gx = gx.squeeze(0)
        return gx, gw, gb

    def accumulate(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, into: Tensor, bias: Tensor | None
    ) -> None:
        _, gw, gb = self.gradients(gy, x, weight, (False, True, bias is not None))
        assert gw is not None
        _add(into, gw)
        if bias is not None:
            assert gb is not None
            _add(bias, gb)


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to ``parameter.grad`` as autograd does."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    elif parameter.grad.layout is torch.strided:
        parameter.grad.add_(gradient)
    else:  # a sparse one cannot take up a dense one
        parameter.grad = gradient + parameter.grad


def _bind_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Bound | None:
    return (_LINEAR, input, weight, bias) if weight.dim() == 2 else None


def _conv_binder(function: Callable[..., Tensor]) -> Callable[..., _Bound | None]:
    def bind(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> _Bound | None:
        n = weight.dim() - 2
        strides, dilations = _spread(stride, n), _spread(dilation, n)
        pads = _pads(padding, weight, dilations)
        if weight.is_complex() or pads is None:  # several convolutions, or a padded input
            return None
        settings = (strides, pads, dilations, False, [0] * n, groups)
        arguments = (stride, padding, dilation, groups)
        return _Convolution(function, arguments, settings), input, weight, bias

    return bind


def _transposed_binder(function: Callable[..., Tensor]) -> Callable[..., _Bound | None]:
    def bind(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> _Bound | None:
        if weight.is_complex():
            return None
        n = weight.dim() - 2
        strides, pads, dilations, out = (
            _spread(value, n) for value in (stride, padding, dilation, output_padding)
        )
        settings = (strides, pads, dilations, True, out, groups)
        arguments = (stride, padding, output_padding, groups, dilation)
        return _Convolution(function, arguments, settings), input, weight, bias

    return bind


def _spread(value: Any, n: int) -> list[int]:
    """One number for each of ``n`` dimensions."""
    if isinstance(value, int):
        return [value] * n
    return list(value) * n if len(value) == 1 else list(value)


def _pads(padding: Any, weight: Tensor, dilations: list[int]) -> list[int] | None:
    """The padding in numbers; ``None`` where the two sides differ."""
    if padding == "valid":
        return [0] * len(dilations)
    if padding != "same":
        return _spread(padding, len(dilations))
    totals = [d * (size - 1) for d, size in zip(dilations, weight.shape[2:], strict=True)]
    return None if any(total % 2 for total in totals) else [total // 2 for total in totals]


_LINEAR = _Linear()

#: What takes the arguments of a function apart; ``None`` from it means that it cannot be split.
BINDERS: dict[Callable[..., Any], Callable[..., _Bound | None]] = {
    F.linear: _bind_linear,
    **{function: _conv_binder(function) for function in (F.conv1d, F.conv2d, F.conv3d)},
    **{
        function: _transposed_binder(function)
        for function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    },
}


def taken_apart(
    bind: Callable[..., _Bound | None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call | None:
    """A call taken apart, unless it is one for PyTorch itself, perhaps to refuse."""
    try:
        call = bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    if call is None:
        return None
    rule, x, weight, bias = call
    ordinary = (
        type(weight) in PLAIN
        and type(x) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and weight.requires_grad
        and weight.is_leaf
        and weight.layout is torch.strided
        and x.layout is torch.strided
        and not x.is_nested
    )
    dtype = _dtype(x, weight, bias) if ordinary else None
    return None if dtype is None else (rule, x, weight, bias, dtype)


def _dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype that a call is computed in, or ``None`` where it is not for us to tell."""
    kind = x.device.type
    if autocast_is_on(kind):
        dtypes = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        known = kind in _AUTOCAST_DEVICES and all(dtype in _AUTOCAST_DTYPES for dtype in dtypes)
        shared = x.is_leaf and x.requires_grad  # autocast converts it once for all that use it
        return torch.get_autocast_dtype(kind) if known and not shared else None
    dtype = weight.dtype
    return dtype if x.dtype is dtype and (bias is None or bias.dtype is dtype) else None


def autocast_is_on(kind: str) -> bool:
    """Whether autocast is on for a type of device."""
    return (
        torch._C._is_any_autocast_enabled() and kind != "meta" and torch.is_autocast_enabled(kind)
    )
