"""Names of :mod:`syncpipe.data`, for imports that are not yet from there."""

from syncpipe.data import (
    NoChunk,
    gather,
    scatter,
    scatter_pair,
    unwrapped,
)

__all__ = ["NoChunk", "gather", "scatter", "scatter_pair", "unwrapped"]
