"""Names of :mod:`syncpipe.data`, for imports that are not yet from there."""

from syncpipe.data import (
    Structure,
    clones,
    compact,
    described,
    distinct,
    extent,
    flatten,
    leaf_names,
    map_tensors,
    objects_in,
    overlap,
    place_of,
    storage_of,
    tensors_in,
    unflatten,
)

__all__ = [
    "Structure",
    "clones",
    "compact",
    "described",
    "distinct",
    "extent",
    "flatten",
    "leaf_names",
    "map_tensors",
    "objects_in",
    "overlap",
    "place_of",
    "storage_of",
    "tensors_in",
    "unflatten",
]
