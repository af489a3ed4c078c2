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
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from syncpipe.state import same_bits

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

    A module gets its tensors by its own ``_load_from_state_dict``, so that quantized ones, say,
    make theirs of them.

    Args:
        layers: what the pipe will be made of, on ``meta``. (Not a ``LayerSpec``, which knows no
            names yet: :func:`load` the pipe.)
        path: the folder, or a file of safetensors.
        init_fn: called before with each module that the checkpoint does not fill by itself, for
            adapters or for buffers that are not saved; ``model._init_weights`` of ``transformers``.
        names: takes a name of the model to that in the checkpoint, where they differ.
        strict: whether the checkpoint has to have all that is in the model, but for what
            ``init_fn`` sets, and nothing else.

    Raises:
        FileNotFoundError: there is no checkpoint, or a shard of it is missing.
        ValueError: a file is broken; ``strict``, and names are missing, or too many. And when it
            fills: names of one tensor have different values, or a tensor has NaN in it.
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

    Arguments and errors are those of :func:`reader`.
    """
    fill = _Reader(module, Path(path), None, names or str, strict)
    fill.takes_nan = True
    for part in module.modules():
        fill(part)


def save(module: nn.Module, path: str | os.PathLike[str], *, shard_size: float = 5e9) -> None:
    """Write the tensors of a pipe, or of any module, as ``save_pretrained`` does; tied ones once.

    Args:
        module: the pipe.
        path: the folder, which is made if need be. What else is in it stays there.
        shard_size: bytes of each file, at most, if no tensor is larger; the host holds as many.

    Raises:
        TypeError, ValueError: something to save is no tensor, or one on ``meta``; ``shard_size`` is
            no number of bytes.
    """
    save_file = _safetensors().torch.save_file
    if not (isinstance(shard_size, int | float) and shard_size > 0):
        raise ValueError(f"shard_size={shard_size!r}: give the bytes of a file, such as 5e9")
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
        save_file(here, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
    if not one:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / (_INDEX if one else _ONE)).unlink(missing_ok=True)  # of a checkpoint before


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "checkpoints are files of safetensors, which is not installed: pip install "
            "'syncpipe[safetensors]'"
        ) from error
    return safetensors


def _opened(file: Path, device: torch.device | str = "cpu") -> Any:
    safe_open = _safetensors().safe_open
    try:
        with suppress(Exception):  # safetensors may not know the device
            return safe_open(file, "pt", device=str(device))
        return safe_open(file, "pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{file} is broken, or no file of safetensors: {error}") from error


def _files(path: Path) -> dict[str, Path]:
    """For each tensor of a checkpoint its file."""
    index = path / _INDEX
    if not index.exists() or (path / _ONE).exists():
        file = path / _ONE if path.is_dir() else path
        if file != path and not file.exists():
            raise FileNotFoundError(f"{path} has neither {_ONE} nor {_INDEX} in it")
        return dict.fromkeys(_opened(file).keys(), file)
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: path / file for name, file in found.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{index} is broken ({type(error).__name__}: {error})") from error
    for file in set(files.values()):
        _opened(file)
    return files


class _Reader:
    """Fills modules; see :func:`reader`."""

    takes_nan = False

    def __init__(
        self,
        layers: nn.Module,
        path: Path,
        init_fn: Callable[[nn.Module], Any] | None,
        names: Callable[[str], str],
        strict: bool,
    ) -> None:
        self._files, self._path, self._init_fn = _files(path), path, init_fn
        self._file: tuple[Any, Any] = (None, None)  # what is open
        self._modules = list(layers.named_modules())  # kept, or ids would be those of others
        #: For each module, by id, how its tensors are called there, and in the checkpoint.
        self._sources: dict[int, dict[str, list[str]]] = {}
        self._to_be_set: set[tuple[int, str]] = set()  # by init_fn
        places: dict[int, list[str]] = {}
        for prefix, module in layers.named_modules(remove_duplicate=False):
            for name, tensor in _own(module).items():
                places.setdefault(id(tensor), []).append(names(f"{prefix}.{name}".lstrip(".")))
        missing, known = [], {*chain.from_iterable(places.values())}
        for prefix, module in self._modules:
            itself = _loads_by_itself(module)
            own = self._sources[id(module)] = {}
            for name, tensor in _own(module).items():
                if found := [source for source in places[id(tensor)] if source in self._files]:
                    own[name] = found
                elif name not in module._non_persistent_buffers_set:
                    missing.append(places[id(tensor)][0])
                    if strict and not itself:
                        self._to_be_set.add((id(module), name))
            mark = names(f"{prefix}.x".lstrip("."))[:-1]
            children = tuple(f"{mark}{name}." for name, _ in module.named_children())
            for source in self._files if itself else ():
                if source.startswith(mark) and not source.startswith(children or "\0"):
                    own.setdefault(source.removeprefix(mark), [source])
                    known.add(source)
        if init_fn is not None or any(map(_loads_by_itself, layers.modules())):
            missing = []
        unknown = [name for name in self._files if name not in known]
        if strict and (missing or unknown):
            words = [f"it has no {_some(missing)}"] * bool(missing)
            words += [f"the model has no {_some(unknown)}"] * bool(unknown)
            raise ValueError(
                f"{path} is not a checkpoint of these layers: {', and '.join(words)}. names= takes "
                "names of the model to its own, init_fn= sets others, strict=False loads what fits"
            )

    def __call__(self, module: nn.Module) -> None:
        own, sources = _own(module), self._sources.get(id(module), {})
        if own and id(module) not in self._sources:
            raise ValueError(
                f"{self._path}: a {type(module).__name__} is none of the modules that reader() was "
                "given: give it those of the pipe, after adapters were added, and no copy"
            )
        if self._init_fn is not None and not (own and own.keys() <= sources.keys()):
            for name, tensor in own.items():
                if (id(module), name) in self._to_be_set and tensor.is_floating_point():
                    tensor.fill_(torch.nan)  # which the pipe refuses if init_fn leaves it
            self._init_fn(module)
        place = next((tensor.device for tensor in _own(module).values()), torch.device("cpu"))
        state = {name: self._read(found, place) for name, found in sources.items()}
        errors: list[str] = []
        if state:
            module._load_from_state_dict(state, "", {}, False, [], [], errors)
        if errors:
            read = _some([*chain.from_iterable(sources.values())])
            raise RuntimeError(f"{self._path}, {read}: {'; '.join(errors)}")

    def _read(self, names: list[str], place: torch.device) -> Tensor:
        """A tensor that has all these names, straight to its device."""
        found: list[Tensor] = []
        for name in names:
            if self._file[0] != (self._files[name], place):
                self._file = (self._files[name], place), _opened(self._files[name], place)
            found.append(self._file[1].get_tensor(name))
            if not same_bits(found[0], found[-1]):
                raise ValueError(
                    f"{self._path}: {names[0]} and {name} have different values there, but are one "
                    "tensor of the model: untie them, or take one out of the checkpoint"
                )
        wide = found[0].is_floating_point() and found[0].itemsize > 1
        if wide and not self.takes_nan and found[0].isnan().any():
            raise ValueError(
                f"{self._files[names[0]]}: {names[0]} has NaN in it, which also marks what is not "
                "set: load() the checkpoint into a pipe that has values"
            )
        return found[0]


def _own(module: nn.Module) -> dict[str, Tensor]:
    tensors = chain(module._parameters.items(), module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None}


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
