"""Checkpoints in the safetensors files of ``from_pretrained`` and ``save_pretrained``.

    model.safetensors                                       one file with all tensors,
    model.safetensors.index.json                            or an index of shards,
    model-00001-of-00002.safetensors ...                    {"weight_map": {name: file}}

A model on ``meta`` is filled stage by stage, one tensor at a time, so that the host holds at most
the largest tensor::

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

from syncpipe.compare import same_bits

__all__ = ["load", "reader", "save"]

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_NAMES = 5


def reader(
    layers: nn.Module,
    path: str | os.PathLike[str],
    *,
    init_fn: Callable[[nn.Module], Any] | None = None,
    names: Callable[[str], str] | None = None,
    strict: bool = True,
) -> Callable[[nn.Module], None]:
    """Make an ``init_fn`` for a ``Pipe`` that fills the modules of its layers from a checkpoint.

    It calls ``_load_from_state_dict`` of each module, so that for example quantized modules can
    convert the tensors.

    Args:
        layers: the layers of the pipe, on ``meta``. (For ``LayerSpec``, whose modules do not exist
            yet, :func:`load` into the pipe instead.)
        path: the folder, or one safetensors file.
        init_fn: called first with each module that the checkpoint does not fill completely: for
            adapters, for buffers that are not saved, ``model._init_weights`` of ``transformers``.
        names: maps a name in the model to its name in the checkpoint. None: they are equal.
        strict: whether the checkpoint must have exactly the tensors of the model. It may lack
            tensors that ``init_fn`` sets.

    Raises:
        FileNotFoundError: there is no checkpoint, or a shard is missing.
        ValueError: a file is broken, or ``strict`` and names do not match. While filling: tied
            names have different values, or a tensor contains NaN.
    """
    return _Reader(layers, Path(path), init_fn, names or str, strict)


def load(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    names: Callable[[str], str] | None = None,
    strict: bool = True,
) -> None:
    """Load a checkpoint into a pipe, or any module, one tensor at a time.

    Arguments and errors are those of :func:`reader`, but NaN is allowed.
    """
    fill = _Reader(module, Path(path), None, names or str, strict)
    fill.allow_nan = True
    for part in module.modules():
        fill(part)


def save(module: nn.Module, path: str | os.PathLike[str], *, shard_size: float = 5e9) -> None:
    """Write the tensors of a pipe, or of any module, as ``save_pretrained`` does; tied ones once.

    Args:
        module: the pipe.
        path: the folder, made if it does not exist. Other files in it stay.
        shard_size: the most bytes of a file, or of its single larger tensor, and of host memory.

    Raises:
        TypeError: an entry of the state is not a tensor, or has a dtype that safetensors lack.
        ValueError: a tensor is on ``meta``, or ``shard_size`` is not a positive number.
    """
    torch_files = _safetensors().torch
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
        try:
            torch_files.save({name: torch.empty(0, dtype=tensor.dtype)})
        except KeyError as error:
            raise TypeError(f"{name} is {tensor.dtype}, which safetensors cannot hold") from error
        place = (
            tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip
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
    files: dict[str, str] = {}
    written, one = list[Path](), len(shards) == 1
    for k, shard in enumerate(shards, 1):
        file = _ONE if one else f"model-{k:05}-of-{len(shards):05}.safetensors"
        here = {n: t.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
                for n, t in shard.items()}  # fmt: skip
        written.append(folder / f"{file}.part")
        torch_files.save_file(here, written[-1], metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
    # An earlier checkpoint stays whole until here, and never becomes a mixture of two.
    for name in _ONE, _INDEX:
        (folder / name).unlink(missing_ok=True)
    for part in written:
        part.replace(part.with_suffix(""))
    if not one:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "syncpipe.checkpoints needs safetensors, which is not installed: pip install "
            "'syncpipe[safetensors]'"
        ) from error
    return safetensors


def _open(file: Path, device: torch.device | str = "cpu") -> Any:
    safe_open = _safetensors().safe_open
    try:
        with suppress(Exception):  # safetensors may not know the device
            return safe_open(file, "pt", device=str(device))
        return safe_open(file, "pt")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{file} is broken, or not a safetensors file: {error}") from error


def _file_of_tensors(path: Path) -> dict[str, Path]:
    index = path / _INDEX
    if not index.exists() or (path / _ONE).exists():
        file = path / _ONE if path.is_dir() else path
        if file != path and not file.exists():
            raise FileNotFoundError(f"{path} has neither {_ONE} nor {_INDEX} in it")
        return dict.fromkeys(_open(file).keys(), file)
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: path / file for name, file in found.items()}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{index} is broken ({type(error).__name__}: {error})") from error
    for file in set(files.values()):
        _open(file)
    return files


class _Reader:
    """Fills modules; see :func:`reader`."""

    allow_nan = False

    def __init__(
        self,
        layers: nn.Module,
        path: Path,
        init_fn: Callable[[nn.Module], Any] | None,
        names: Callable[[str], str],
        strict: bool,
    ) -> None:
        self._files, self._path, self._init_fn = _file_of_tensors(path), path, init_fn
        self._file: tuple[Any, Any] = (None, None)  # (file, device), and the open file
        self._modules = list(layers.named_modules())  # kept alive, because ids are keys below
        #: By the id of a module: names of its tensors -> names in the checkpoint.
        self._sources: dict[int, dict[str, list[str]]] = {}
        self._to_be_set: set[tuple[int, str]] = set()  # (id of a module, name), set by init_fn
        places: dict[int, list[str]] = {}
        for prefix, module in layers.named_modules(remove_duplicate=False):
            for name, tensor in _own_tensors(module).items():
                places.setdefault(id(tensor), []).append(names(f"{prefix}.{name}".lstrip(".")))
        missing, known = [], {*chain.from_iterable(places.values())}
        for prefix, module in self._modules:
            itself = _has_own_loading(module)
            own = self._sources[id(module)] = {}
            for name, tensor in _own_tensors(module).items():
                if found := [source for source in places[id(tensor)] if source in self._files]:
                    own[name] = found
                elif not itself and name not in module._non_persistent_buffers_set:
                    missing.append(places[id(tensor)][0])
                    if strict:
                        self._to_be_set.add((id(module), name))
            if itself:  # it may take other names than those of its tensors
                mark = names(f"{prefix}.x".lstrip("."))[:-1]
                children = tuple(f"{mark}{name}." for name, _ in module.named_children())
                for source in self._files:
                    if source.startswith(mark) and not source.startswith(children or "\0"):
                        own.setdefault(source.removeprefix(mark), [source])
                        known.add(source)
            elif type(module).set_extra_state is not nn.Module.set_extra_state:
                source = names(f"{prefix}._extra_state".lstrip("."))
                if source in self._files:  # not if it is no tensor
                    own["_extra_state"] = [source]
                    known.add(source)
        if init_fn is not None:
            missing = []
        unknown = [name for name in self._files if name not in known]
        if strict and (missing or unknown):
            words = [f"it has no {_shortened(missing)}"] * bool(missing)
            words += [f"the model has no {_shortened(unknown)}"] * bool(unknown)
            raise ValueError(
                f"{path} is not a checkpoint of these layers: {', and '.join(words)}. names= maps "
                "names of the model to its names, init_fn= sets missing tensors, strict=False "
                "loads what fits"
            )

    def __call__(self, module: nn.Module) -> None:
        own, sources = _own_tensors(module), self._sources.get(id(module), {})
        if own and id(module) not in self._sources:
            raise ValueError(
                f"{self._path}: a {type(module).__name__} is none of the modules that reader() was "
                "given: call reader() on the layers of the pipe, not on a copy, after adding "
                "adapters"
            )
        if self._init_fn is not None and not (own and own.keys() <= sources.keys()):
            for name, tensor in own.items():
                if (id(module), name) in self._to_be_set and tensor.is_floating_point():
                    tensor.fill_(torch.nan)  # the pipe refuses NaN that init_fn leaves
            self._init_fn(module)
        device = next((t.device for t in _own_tensors(module).values()), torch.device("cpu"))
        state = {name: self._read(found, device) for name, found in sources.items()}
        errors: list[str] = []
        if state:
            module._load_from_state_dict(state, "", {}, False, [], [], errors)
        if errors:
            read = _shortened([*chain.from_iterable(sources.values())])
            raise RuntimeError(f"{self._path}, {read}: {'; '.join(errors)}")

    def _read(self, names: list[str], device: torch.device) -> Tensor:
        """Reads a tensor that has all these names to its device."""
        found: list[Tensor] = []
        for name in names:
            if self._file[0] != (self._files[name], device):
                self._file = (self._files[name], device), _open(self._files[name], device)
            found.append(self._file[1].get_tensor(name))
            if not same_bits(found[0], found[-1]):
                raise ValueError(
                    f"{self._path}: {names[0]} and {name} have different values there, but are one "
                    "tensor of the model: untie them, or remove one from the checkpoint"
                )
        wide = found[0].is_floating_point() and found[0].itemsize > 1
        if wide and not self.allow_nan and found[0].isnan().any():
            raise ValueError(
                f"{self._files[names[0]]}: {names[0]} contains NaN, which also marks tensors that "
                "are not set: load() the checkpoint into a pipe that has values"
            )
        return found[0]


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = chain(module._parameters.items(), module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None}


def _has_own_loading(module: nn.Module) -> bool:
    """Whether a module converts the tensors of a checkpoint itself."""
    method = type(module)._load_from_state_dict
    return bool(module._load_state_dict_pre_hooks) or (
        method is not nn.Module._load_from_state_dict
        and not type(module).__module__.startswith(("syncpipe.", "torch.nn."))
    )


def _shortened(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + f" and {more} more" * (more > 0)
