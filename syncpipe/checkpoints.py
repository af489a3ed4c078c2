"""Checkpoints of safetensors, in the files that ``from_pretrained`` reads and writes.

    model.safetensors                                       a file with all tensors
    model.safetensors.index.json                            or shards, and which tensor is where:
    model-00001-of-00002.safetensors ...                    {"weight_map": {name: file}}

A model on ``meta`` is filled from them stage by stage, one tensor at a time, so that the host never
holds more of it than the largest tensor::

    with torch.device("meta"):
        model = Model(config)
    layers = syncpipe.sequential(model, sample.to("meta"), verify=False)
    pipe = Pipe(layers, "parameters", init_fn=checkpoints.reader(layers, "folder"))
    ...
    checkpoints.save(pipe, "tuned")
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["load", "reader", "save"]

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5


def reader(
    layers: nn.Module,
    path: str | os.PathLike[str],
    *,
    init_fn: Callable[[nn.Module], Any] | None = None,
    names: Callable[[str], str] | None = None,
    strict: bool = True,
) -> Callable[[nn.Module], None]:
    """Make an ``init_fn`` for a ``Pipe`` that fills the modules of its layers from a checkpoint.

    A module gets its tensors by its own ``_load_from_state_dict``, as of any checkpoint. So one
    that has its weights in another form, such as quantized ones, makes that of them there.

    Args:
        layers: what the pipe will be made of, on ``meta``: the layers of
            :func:`syncpipe.sequential`, or an ``nn.Sequential``. (Not a ``LayerSpec``, which knows
            no names yet: :func:`load` the pipe.)
        path: the folder, or a file of safetensors.
        init_fn: called before with each module that the checkpoint does not fill by itself, for
            adapters or for buffers that are not saved. For a model of ``transformers`` that is
            ``model._init_weights``.
        names: takes a name of the model to that in the checkpoint, where they differ.
        strict: whether the checkpoint has to have all that is in the model, but for what
            ``init_fn`` sets, and nothing else.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no checkpoint, or a shard of it is missing.
        ValueError: ``strict``, and names are missing, or too many.
    """
    return _Reader(layers, Path(path), init_fn, names or str, strict)


def load(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    names: Callable[[str], str] | None = None,
    strict: bool = True,
) -> None:
    """Load a checkpoint into a pipe, or any module, that has values, one tensor at a time.

    Args:
        module: the pipe.
        path: as for :func:`reader`.
        names: as for :func:`reader`.
        strict: as for :func:`reader`.

    Raises:
        ImportError, FileNotFoundError, ValueError: as :func:`reader`.
        RuntimeError: a tensor has another shape.
    """
    fill = reader(module, path, names=names, strict=strict)
    for part in module.modules():
        fill(part)


def save(module: nn.Module, path: str | os.PathLike[str], *, shard_size: float = 5e9) -> None:
    """Write the tensors of a pipe, or of any module, as ``save_pretrained`` does; tied ones once.

    The host holds a shard at a time.

    Args:
        module: the pipe.
        path: the folder, which is made if need be. What else is in it stays there.
        shard_size: bytes of each file, at most, if no tensor is larger.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: what the module saves is not all tensors.
        ValueError: a tensor is on ``meta``.
    """
    write = _safetensors().torch.save_file
    shards: list[dict[str, Tensor]] = [{}]
    seen: set[Any] = set()
    held = total = 0
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: safetensors hold tensors only")
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta, and has no values to save")
        place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        if held and held + tensor.nbytes > shard_size:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    files, one = {}, len(shards) == 1
    for k, shard in enumerate(shards, 1):
        file = _ONE if one else f"model-{k:05}-of-{len(shards):05}.safetensors"
        here = {n: t.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
                for n, t in shard.items()}  # fmt: skip
        write(here, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
    if not one:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / (_INDEX if one else _ONE)).unlink(missing_ok=True)  # of a checkpoint before


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    return safetensors


def _files(path: Path) -> dict[str, Path]:
    """For each tensor of a checkpoint its file."""
    if path.is_dir() and not (path / _ONE).exists():
        if not (path / _INDEX).exists():
            raise FileNotFoundError(f"{path} has neither {_ONE} nor {_INDEX}")
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        found = {name: path / file for name, file in index["weight_map"].items()}
        for file in set(found.values()):
            if not file.exists():
                raise FileNotFoundError(f"{file} is missing, a shard of {path / _INDEX}")
        return found
    file = path / _ONE if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    with _safetensors().safe_open(file, "pt") as opened:
        return dict.fromkeys(opened.keys(), file)


class _Reader:
    """Fills modules; see :func:`reader`."""

    def __init__(
        self,
        layers: nn.Module,
        path: Path,
        init_fn: Callable[[nn.Module], Any] | None,
        names: Callable[[str], str],
        strict: bool,
    ) -> None:
        self._files, self._path, self._init_fn = _files(path), path, init_fn
        self._opened: tuple[Any, Any] = (None, None)
        #: What is not in the checkpoint, as it was before init_fn was called.
        self._whole = set(map(id, layers.children()))
        self._before: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        #: For each module, by id, how its tensors are called there, and in the checkpoint.
        self._sources: dict[int, dict[str, str]] = {}
        self._modules = list(layers.named_modules())  # kept, or ids would be those of others
        places: dict[int, list[str]] = {}
        for prefix, module in layers.named_modules(remove_duplicate=False):
            for name, tensor in _own(module):
                places.setdefault(id(tensor), []).append(names(f"{prefix}.{name}".lstrip(".")))
        missing = []
        self._strict, self._missing = strict, dict[tuple[int, str], str]()
        for prefix, module in self._modules:
            own = self._sources[id(module)] = {}
            for name, tensor in _own(module):
                source = next((x for x in places[id(tensor)] if x in self._files), None)
                if source is not None:
                    own[name] = source
                elif name not in module._non_persistent_buffers_set:
                    missing.append(names(f"{prefix}.{name}".lstrip(".")))
                    if not _loads_by_itself(module):
                        self._missing[id(module), name] = missing[-1]
            if _loads_by_itself(module):
                mark = names(f"{prefix}.x".lstrip("."))[:-1]
                children = tuple(f"{mark}{name}." for name, _ in module.named_children())
                for source in self._files:
                    if source.startswith(mark) and not source.startswith(children or "\0"):
                        own.setdefault(source.removeprefix(mark), source)
        used = {*chain.from_iterable(own.values() for own in self._sources.values())}
        known = used | {*chain.from_iterable(places.values())}
        unknown = [name for name in self._files if name not in known]
        if init_fn is not None or any(map(_loads_by_itself, layers.modules())):
            missing = []
        if strict and (missing or unknown):
            words = [f"it has no {_some(missing)}"] * bool(missing)
            words += [f"the model has no {_some(unknown)}"] * bool(unknown)
            raise ValueError(
                f"{path} is not a checkpoint of these layers: {', and '.join(words)}. names= says "
                "how names of the model are called there, init_fn= sets what it has not, and "
                "strict=False loads what there is"
            )

    def __call__(self, module: nn.Module) -> None:
        own = [name for name, _ in _own(module)]
        if own and id(module) not in self._sources:
            raise ValueError(
                f"{self._path} cannot be read for a {type(module).__name__} that is none of the "
                "modules that reader() was given: give it those of the pipe, after adapters were "
                "added, and make another one instead of a copy"
            )
        sources = self._sources.get(id(module), {})
        if self._init_fn is not None and not (own and all(name in sources for name in own)):
            self._init(module, self._init_fn)
        if not sources:
            return
        place = next((tensor.device for _, tensor in _own(module)), torch.device("cpu"))
        state = {name: self._read(source, place) for name, source in sources.items()}
        errors: list[str] = []
        module._load_from_state_dict(state, "", {}, False, [], [], errors)
        if errors:
            raise RuntimeError(
                f"{self._path}, {_some(list(sources.values()))}: {'; '.join(errors)}"
            )

    def _init(self, module: nn.Module, init_fn: Callable[[nn.Module], Any]) -> None:
        """Lets ``init_fn`` set what the checkpoint does not have, here or in a module below."""
        for part in module.modules():
            for name, tensor in _own(part):
                if self._strict and (id(part), name) in self._missing:
                    old = tensor, tensor._version, tensor.detach().clone()
                    self._before.setdefault((id(part), name), old)
        init_fn(module)
        if id(module) not in self._whole:
            return  # init_fn is called for children first, and may set them with their parent
        for part in module.modules():
            for name, tensor in _own(part):
                before, version, values = self._before.pop((id(part), name), (None, 0, tensor))
                if before is tensor and tensor._version == version and torch.equal(tensor, values):
                    raise ValueError(
                        f"{self._path} has no {self._missing[id(part), name]}, and init_fn does "
                        "not set it: names= says how it is called there, and strict=False leaves "
                        "it as the reset_parameters() of its module does"
                    )

    def _read(self, name: str, place: torch.device) -> Tensor:
        """A tensor, straight to its device where safetensors knows that."""
        file = self._files[name]
        if self._opened[0] != (file, place):
            opened = None
            with suppress(Exception):
                opened = _safetensors().safe_open(file, "pt", device=str(place))
            self._opened = (file, place), opened or _safetensors().safe_open(file, "pt")
        tensor: Tensor = self._opened[1].get_tensor(name)
        return tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def _loads_by_itself(module: nn.Module) -> bool:
    """Whether it makes something of its own of the tensors of a checkpoint."""
    method = type(module)._load_from_state_dict
    return bool(module._load_state_dict_pre_hooks) or (
        method is not nn.Module._load_from_state_dict
        and not type(module).__module__.startswith(("syncpipe.", "torch.nn."))
    )


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + f" and {more} more" * (more > 0)
