"""Names of :mod:`syncpipe.data`, for imports that are not yet from there."""

from syncpipe.data import (
    attributes_of,
    could_be_cut,
    hidden_tensor,
)

__all__ = ["attributes_of", "could_be_cut", "hidden_tensor"]
