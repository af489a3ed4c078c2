"""Says where in the pipeline an exception came from, without changing the exception."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from syncpipe.runtime.graph import nodes_of

__all__ = ["annotate", "annotate_backward"]


def annotate(error: BaseException, note: str) -> None:
    """Adds a note to an exception, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def annotate_backward(outputs: Iterable[Tensor], inputs: Iterable[Tensor], note: str) -> bool:
    """Lets exceptions of the Python nodes between ``inputs`` and ``outputs`` carry a note.

    Backward runs inside autograd, where no frame of ours could catch anything. Its only Python
    code, apart from hooks, are custom ``autograd.Function``s, whose nodes look ``apply`` up on
    themselves: there we put one that adds the note.

    Returns:
        Whether there was any such node.
    """
    nodes = nodes_of([y.grad_fn for y in outputs], [x.grad_fn for x in inputs])
    custom: list[Any] = [node for node in nodes if isinstance(node, BackwardCFunction)]
    for node in custom:
        if "apply" not in node.__dict__:
            node.apply = _annotated(weakref.ref(node), note)
    return bool(custom)


def _annotated(reference: weakref.ref[Any], note: str) -> Any:
    def apply(*grads: Any) -> Any:
        node: Any = reference()
        try:
            return type(node).apply(node, *grads)
        except BaseException as error:
            annotate(error, note)
            raise

    return apply
