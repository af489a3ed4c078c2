"""Says where in the pipeline an exception came from, without changing the exception."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

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
    pending = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen: set[Any] = {x.grad_fn for x in inputs if x.grad_fn is not None}
    found = False
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found = True
            if "apply" not in node.__dict__:
                node.apply = _annotated(weakref.ref(node), note)
        pending += [following for following, _ in node.next_functions if following is not None]
    return found


def _annotated(reference: weakref.ref[Any], note: str) -> Any:
    def apply(*grads: Any) -> Any:
        node: Any = reference()
        try:
            return type(node).apply(node, *grads)
        except BaseException as error:
            annotate(error, note)
            raise

    return apply
