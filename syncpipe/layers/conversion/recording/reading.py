"""What PyTorch's functions tell Python, what is in a result, and where in the model one is."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any

import torch

from syncpipe.layers.conversion.recording.nodes import fields_of

__all__ = ["DECIDES", "READS", "TELLS_NOTHING", "line_in_model", "parts_of"]

#: What tells nothing that a recording for other sizes and values would not tell as well.
TELLS_NOTHING = frozenset(
    {
        "dim", "ndim", "ndimension", "device", "dtype", "layout", "requires_grad", "is_cuda",
        "is_leaf", "grad_fn", "is_contiguous", "is_floating_point", "is_complex", "is_sparse",
        "is_quantized", "is_nested", "is_meta", "is_cpu", "is_xpu", "is_mps", "itemsize",
        "element_size", "get_device", "type", "_version", "is_tensor", "is_inference", "names",
        "is_conj", "is_neg", "__repr__", "__format__", "__hash__", "has_names", "stride",
        "storage_offset", "is_signed", "is_shared", "is_pinned", "_is_view", "retains_grad",
        "_set_grad_enabled", "set_grad_enabled", "is_grad_enabled", "finfo", "_assert",
        "is_same_size", "result_type", "promote_types", "can_cast", "broadcast_shapes", "data_ptr",
        "is_mkldnn", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "is_xla", "is_hpu",
    }
)  # fmt: skip
#: Python takes a value out of a tensor, or decides by it.
DECIDES = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__len__", "is_nonzero", "equal", "allclose",
     "__contains__"}
)  # fmt: skip
READS = frozenset({"tolist", "numpy", "__array__", "untyped_storage", "storage", "__set__",
                    "__complex__", "__delete__", "backward", "register_hook"})  # fmt: skip
#: What stands between the model and here.
_NOT_THE_MODEL = (torch.__file__.rpartition("/")[0], __file__.rpartition("/")[0])


def parts_of(result: Any) -> dict[Any, Any] | None:
    """The parts of a result with how one gets at each; None for what is no container."""
    fields = fields_of(result)
    if fields is not None:
        return {("attribute", name): value for name, value in fields.items()}
    if isinstance(result, (tuple, list)):
        return {("item", k): value for k, value in enumerate(result)}
    if isinstance(result, dict):
        return {("item", key): value for key, value in result.items()}
    return None


def line_in_model() -> str:
    """Where in the model's code this happens."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_MODEL):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}: {code}"
        frame = frame.f_back
    return ""
