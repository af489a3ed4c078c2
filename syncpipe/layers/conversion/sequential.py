"""``syncpipe.sequential``: any ``nn.Module`` as an ``nn.Sequential``.

model, sample -> traces -> inlined modules and leaves -> segments -> layers -> compare

A module is inlined if traces of other runs, also with other sizes, are equal, line by line.
Otherwise it stays a leaf and runs its own code, which gives fewer layers but the same results. A
module with most of the model in it must be inlined, or there would be nothing to cut. In it, each
value that Python decided by becomes a guard, and a size that matters must be the sample's. Training
and evaluation are traced separately where code reads the mode.
"""

from __future__ import annotations

import mmap
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointFunction

from syncpipe.compare import Comparison, compare
from syncpipe.data.batch_classes import batch_kind, repeated_batch
from syncpipe.data.trees import by_name, described, flatten, leaf_names, tensors_in
from syncpipe.layers.conversion.layer import ModelNames, layers_of
from syncpipe.layers.conversion.origin import CALL_HOOKS, Origin, Read
from syncpipe.layers.conversion.patches import Patches
from syncpipe.layers.conversion.signature import Signature, call_input, shape_of
from syncpipe.layers.conversion.trace import CHECKS, Tracer, Whole, guard, tracing
from syncpipe.progress import progress_bar
from syncpipe.runtime.random_numbers import Generators, is_compiled
from syncpipe.skip.skippable import is_skippable
from syncpipe.state import State, restorer, restoring_module
from syncpipe.storage import places_of

__all__ = ["HOOKS", "Converted", "hooks_of", "sequential", "values_of"]

_GRADIENT = "the gradient of "
#: Makes new arguments of a call.
_Arguments = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
#: Attributes in which ``nn.Module`` keeps hooks; those of forward and backward come first.
HOOKS = (
    *CALL_HOOKS,
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip
#: Modules of PyTorch with fast paths in evaluation, or that code finds by their class.
_LAYERS = (
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention, _NormBase,
)  # fmt: skip
_COMPILED = "it is compiled"
#: The dimension of the input that has a size of the weight, counted from the end.
_FEATURES = {nn.Linear: -1, nn.LayerNorm: -1, nn.Conv1d: -2, nn.Conv2d: -3, nn.Conv3d: -4}
_STATE_METHODS = ("get_extra_state", "set_extra_state", "_save_to_state_dict")
#: Bytes up to which a tensor on ``meta`` gets memory of its own for the conversion.
_SMALL = 2**20
#: What a run changes: sizes by (index of the tensor, dimension), and numbers by name.
_Change = dict[Any, Any]


class Converted(ModelNames, nn.Sequential):
    """The layers that :func:`sequential` made of a model; called as the model is.

    Parameters and buffers have the names and the order of the model.

    Attributes:
        whole: the modules with submodules that were not inlined, each with the line of code and the
            reason. No layer begins inside them.
    """

    whole: Sequence[Whole] = ()

    @property
    def origin(self) -> Origin:
        first: Any = self[0]
        return first._origin  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and output are the model's."""
        return super().forward(call_input(self, args, kwargs))  # type: ignore[no-untyped-call]


def sequential(
    model: nn.Module,
    *sample_args: Any,
    verify: bool = True,
    eval_sample: Any = None,
    **sample_kwargs: Any,
) -> Converted:
    """Make an ``nn.Sequential`` of any model, for ``Pipe``::

        layers = syncpipe.sequential(model, input_ids, attention_mask=mask)
        pipe = Pipe(layers, balance="parameters", chunks=8)
        pipe(input_ids, attention_mask=mask).logits
        pipe.train_batch({"input_ids": ids, "attention_mask": mask}, labels, loss_fn=loss_fn)

    The model runs a few times with the sample and is traced. Leaf modules (modules without
    children, with hooks, or that cannot be traced) are called as they are, with their hooks. Other
    modules are inlined: their ``forward`` becomes code between these calls, which ``print`` shows,
    and does not run any more.

    Inputs of other sizes work if the model took the same code path with other sizes during the
    conversion. Otherwise a call with another size raises. Flags and None must be equal to the
    sample's. Outputs made of parameters alone (``logit_scale.exp()``) are the same in every
    micro-batch and returned once. The layers follow ``.train()``, ``.eval()`` and the devices of
    stages, but not a new dtype: call ``model.half()`` before.

    The next call follows changes of the model: modes, parameters, buffers, and numbers that only
    flow into operations (``model.temperature = 0.5``). A change of anything else that its forward
    has read (flags, lists, a config, children), or a hook on an inlined module, raises an error
    that names it.

    Args:
        model: any module. It is left unchanged, and shares its modules with the layers.
        sample_args: arguments of one call of the model. Small tensors suffice, with more than one
            sample. A ``Pipe`` cuts tensors whose dimension 0 has the batch size of the first one
            into micro-batches, and passes others, and any in :class:`NoChunk`, whole to each. (A
            model on ``meta`` runs with values that take no memory, if the sample has values.)
        verify: compare outputs, gradients and buffers with the model's, for the sample.
        eval_sample: the arguments of a call in evaluation, a tuple or a dict of keyword arguments,
            if these are others: ``sequential(model, x, labels, eval_sample=(x,))``. Its tensors
            are some of the sample's.
        sample_kwargs: keyword arguments of the call (none can be named ``verify`` or
            ``eval_sample``).

    Returns:
        As many layers as possible. Names in ``state_dict()`` and ``named_parameters()`` are the
        model's, also in a ``Pipe``. ``layers.whole`` lists modules that were not inlined, and why.

    Raises:
        TypeError: ``model`` is no module, or the sample does not fit its signature.
        ValueError: the model has no parameters, it fails with the sample, the sample does not show
            which tensors have the batch, an output has the batch in another dimension than 0, or
            the model cannot be cut (the message quotes the line of its code).
        RuntimeError: results of the layers differ from the model's (``verify``).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"sequential() takes an nn.Module, not {type(model).__name__}")
    if getattr(model, "_syncpipe_skips_are_internal", False):
        raise TypeError("this is a Pipe already: give the model that it was made of")
    compiled = _is_compiled(model)
    model = getattr(model, "_orig_mod", model)
    name = type(model).__name__
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"{name} has no parameters, so there is nothing to train and nothing to balance: give "
            "the model that has them"
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ValueError(f"{name} has lazy modules without sizes: run it once before")
    if verify and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} is on meta, where nothing can be compared: pass verify=False")

    def convert(as_compiled: bool) -> tuple[_Conversion, Converted]:
        signature = Signature(model.forward, name)
        sample = signature.take(sample_args, sample_kwargs)
        if eval_sample is not None:
            signature.take_evaluation(*_as_arguments(eval_sample))
        restoring = restorer(model)
        found = restoring(partial(_Conversion, model, signature, sample, as_compiled))
        layers = found.layers()
        layers.origin.begin(layers)
        if verify:
            _check_layers(model, layers, signature, sample, restoring)
        layers.training = model.training
        return found, layers

    eager = any(map(_is_compiled, model.modules()))
    with torch.compiler.set_stance("force_eager") if eager else nullcontext():
        try:
            found, layers = convert(True)
        except RuntimeError as error:  # some do something else while they are compiled
            try:
                found, layers = convert(False)
            except Exception:
                raise error from None
    if compiled:
        found.notes.append(f"{name} is compiled, and its layers are not: call pipe.compile()")
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return layers


# Leaf modules and inlined modules


class _Conversion:
    """A model, run until it is known which of its modules can be inlined.

    It also determines which sizes may change (``signature.free``).

    Attributes:
        runs: the traces of the sample, by the mode (True: training).
        leaves: by path the reasons why modules are not inlined.
        notes: warnings for the user.
    """

    def __init__(
        self, model: nn.Module, signature: Signature, tensors: list[Tensor], as_compiled: bool
    ) -> None:
        if not any(tensor.is_meta for tensor in tensors_in(tensors)):
            _materialize(model)
        self.model, self.signature, self.tensors = model, signature, tensors
        self.name, self._objects = type(model).__name__, dict[str, Any]()
        self._paths = {module: path for path, module in model.named_modules()}
        #: Paths of modules with parameters, with a final dot.
        self._owners = [f"{path}." for module, path in self._paths.items() if module._parameters]
        self.leaves = {
            path: Whole(path, "", reason)
            for module, path in self._paths.items()
            if path
            and (reason := _must_be_leaf(module))
            and not (reason == _COMPILED and self._holds_most(path))
        }
        self._refuse_root()
        #: Whether a mode is only a flag: other methods train() may set more.
        self._one_train = signature.evaluation is None and all(
            type(module).train is nn.Module.train and not isinstance(module, torch.jit.ScriptModule)
            for module in model.modules()
        )
        self._as_compiled = as_compiled  #: whether the model is told that it is compiled
        self._numbers: set[str] | None = None  # None: not known yet, follow all
        #: Sizes and numbers that may change, numbers that may not, changes that the model refuses.
        self._free, self._decisive, self._refused = set[Any](), set[str](), list[_Change]()
        self._pinned = list[_Change]()  # sizes for which it does something else
        self._fixed = set[tuple[int, int]]()  # sizes of weights
        self._harmless, self._at_once = dict[fx.Node, bool](), True
        self.runs: dict[bool, Tracer] = {}
        with progress_bar(f"sequential({self.name})", "run", 20) as self._bar:
            try:  # let the model do what it does in its first run only
                args, kwargs = signature.call(tensors)
                self._seed()
                self._first = by_name("output", model.train()(*args, **kwargs))
            except Exception as error:
                raise ValueError(
                    f"{self.name} itself, called with the sample ({signature.shown(tensors)}), "
                    f"raises {type(error).__name__}: {error}"
                ) from error
            self._find_batch_inputs()
            tracing(model, self._trace_runs)
        self.notes += [*self._large_modules(), *self._shared_norms()]
        if any(run.reentrant for run in self.runs.values()):
            self.notes.append(
                f"{self.name} recomputes by PyTorch's reentrant checkpoint, which is left out: a "
                "Pipe recomputes itself (checkpoint=). Layers get gradients also where no input "
                "requires one, as with use_reentrant=False"
            )

    def _trace_runs(self) -> None:
        while self._make_leaves(self._faults()):
            pass
        self._numbers = self._floats() & self._free
        self._follow_dtypes()
        for run in self.runs.values():
            run.fold(self._numbers)

    def layers(self) -> Converted:
        runs = [self.runs[True], self.runs[False]]
        inlined = {
            path: module
            for module, path in self._paths.items()
            if not any(f"{path}.".startswith(f"{leaf}.") for leaf in self.leaves)
        }
        origin = Origin(
            inlined, self._reads(), self._floats() if self._numbers is None else self._numbers
        )
        layers = Converted(*layers_of(self.model, runs, self.signature, origin))
        layers.whole = self.whole
        return layers

    def _reads(self) -> list[Read]:
        return list({**self.runs[True].reads, **self.runs[False].reads}.values())

    def _floats(self) -> set[str]:
        return {read.name for read in self._reads() if type(read.value) is float}

    def _follow_dtypes(self) -> None:
        """Replace dtypes in the traces by those of tensors, if a run under autocast shows them."""
        kind = tensors_in(self.tensors)[0].device.type
        if kind == "meta" or not any(n.meta["dtypes"] for r in self.runs.values() for n in r.nodes):
            return
        mixed = torch.autocast(kind, torch.bfloat16, enabled=not torch.is_autocast_enabled(kind))
        with suppress(Exception), mixed:
            steps = [[(n.meta["key"], f"{n.target!r}") for n in r.live] for r in self.runs.values()]
            others = self._run(self.tensors, lambda _: steps[0] == steps[1])
            for mode, run in self.runs.items():
                run.follow_dtypes(others.get(mode, others[True]))

    def _faults(self) -> list[Whole]:
        """Run the sample and other sizes; returns why modules cannot be inlined."""
        self.notes: list[str] = []
        if not self.runs:
            own = [*self.model.parameters(), *self.model.buffers()]
            self._state = State({"": self.model}, own, objects=False)
            try:
                self._seed()
                self.runs = self._run(self.tensors, self._needs_another)
            except Exception:  # some leave out more than checks while they are compiled
                if not self._as_compiled:
                    raise
                self._as_compiled = False
                self.runs = self._run(self.tensors, self._needs_another)
            self._changed = self._state.changes()
        faults = list(chain(*map(self._faults_of, self.runs.values())))
        return faults or [*self._writes()] or self._vary()

    def _needs_another(self, run: Tracer) -> bool:
        """Whether the modules at fault in a run cannot be made leaves in its trace."""
        if self._as_compiled and not compare(by_name("output", run.result), self._first).same:
            raise RuntimeError("it does something else while it is compiled")
        self._fixed |= set(self._features(run))
        small = self._leafable(self._faults_of(run))
        return bool(small) and not self._keep(small, {True: run})

    def _faults_of(self, run: Tracer) -> list[Whole]:
        """Faults in a run; modules without blocks inside may not decide by a size or a value."""
        return run.faults + [
            Whole(node.meta["owner"], node.meta["line"], "Python decides by a size or a value")
            for node in run.nodes
            if node.target is guard and not self._has_blocks(node.meta["owner"])
        ]

    @property
    def whole(self) -> list[Whole]:
        """The outermost leaf modules with submodules."""
        outer = tuple(f"{path}." for path in self.leaves)
        found = [leaf for path, leaf in self.leaves.items() if not path.startswith(outer)]
        return [leaf for leaf in found if self.model.get_submodule(leaf.path)._modules]

    def _run(
        self, tensors: list[Tensor], enough: Callable[[Tracer], Any] = lambda _: False
    ) -> dict[bool, Tracer]:
        """Trace a call in training, and in evaluation unless the trace in training is ``enough``.

        If nothing depends on the mode, it is one run and one trace.
        """
        training = self._trace(tensors, True)
        done = enough(training)
        if self._one_train and not training.mode_matters:
            return {True: training, False: training}
        if done:
            return {True: training}
        return {True: training, False: self._trace(tensors, False)}

    def _seed(self) -> None:
        """Let the first run and that as compiled draw the same, to compare their outputs."""
        for device in {parameter.device for parameter in self.model.parameters()}:
            for generator in Generators(device).own:
                generator.manual_seed(0)

    def _trace(self, tensors: list[Tensor], mode: bool) -> Tracer:
        self._bar.update()
        call, names = self.signature.call(tensors, mode), self.signature.of(mode).names
        given = self.leaves, self._paths, self._objects, names, self._as_compiled
        return Tracer(self.model.train(mode), *given, *call)

    def _make_leaves(self, faults: list[Whole]) -> bool:
        """Make the modules at fault leaves; returns whether any were, and raises if none can be."""
        small = self._leafable(faults)
        if small or not faults:
            return bool(small) and (self._keep(small, {}) or True)
        owner, line, what = faults[0]
        name = type(self.model.get_submodule(owner)).__name__
        at = f" ({owner})" if owner else ""
        where = f":\n  {line}\n" if line else ". "
        raise ValueError(
            f"{name}{at} cannot be cut into layers, {what}{where}{self._remedy(what, line)}"
        )

    def _keep(self, faults: list[Whole], others: dict[bool, Tracer]) -> bool:
        """Make modules leaves, also in the traces; False if the sample must be run again."""
        new = dict[str, Whole]()
        for fault in faults:
            if fault.path not in self.leaves:
                new.setdefault(fault.path, fault)
        self.leaves |= new
        kept = [run.keep(new) for run in (*self.runs.values(), *others.values())]
        if not (new and all(kept)):
            self.runs = {}
        return bool(new) and all(kept)

    def _remedy(self, what: str, line: str) -> str:
        config, peft = (
            getattr(self.model, name, None) for name in ("config", "active_peft_config")
        )
        remedies = {
            "Prefix and prompt tuning hand their prefix to all layers in a cache: take adapters "
            "that sit in the layers (LoraConfig, IA3Config)":
                getattr(peft, "is_prompt_learning", False),
            "A cache is one object that all layers write into, and training needs none: call "
            f"{self.name} with use_cache=False, or set model.config.use_cache = False":
                "Cache" in what,
            "Layers that are dropped at random cannot be cut: make the model of a config with "
            "layerdrop=0.0": getattr(config, "layerdrop", 0),
            "Drawn masks cannot be cut: set model.config.apply_spec_augment = False":
                "mask_hidden_states" in line and getattr(config, "apply_spec_augment", False),
            "PyTorch Geometric reads the number of graphs out of the values: pass it, "
            "global_mean_pool(x, data.batch, size=data.num_graphs)":
                "torch_geometric" in line and ".max()" in line,
            "Move this into a module of its own (which is kept as one layer), or convert the "
            "modules in it one by one": True,
        }  # fmt: skip
        return next(remedy for remedy, helps in remedies.items() if helps)

    def _holds_most(self, path: str) -> bool:
        """Whether a module has more than half of the modules with parameters inside."""
        inside = sum(owner.startswith(f"{path}.") for owner in self._owners)
        return not path or 2 * inside > len(self._owners)

    def _has_blocks(self, path: str) -> bool:
        """Whether a module is no layer, though it decides by sizes: it holds most of the model, or
        a list of blocks and more than a quarter of it (the encoder of a translator).
        """
        inside = [owner for owner in self._owners if owner.startswith(f"{path}.")]
        lists = (nn.ModuleList, nn.Sequential)
        return self._holds_most(path) or (
            4 * len(inside) > len(self._owners)
            and any(
                isinstance(part, lists)
                and len({type(block) for block in part}) < len(part)
                and any(block._modules for block in part)
                for part in self.model.get_submodule(path).modules()
            )
        )

    def _leafable(self, faults: list[Whole]) -> list[Whole]:
        return [fault for fault in faults if not self._holds_most(fault.path)]

    def _writes(self) -> Iterator[Whole]:
        """Faults of inlined modules that set attributes, or call a leaf that does several times."""
        uses = Counter(node.target for node in self.runs[True].nodes if node.op == "call_module")
        for kind, name in self._changed:
            module, own = self.model, name
            while (child := module._modules.get(own.partition(".")[0])) is not None:
                module, own = child, own.partition(".")[2]
            path = self._paths[module]
            leaf = next((p for p in self.leaves if f"{path}.".startswith(f"{p}.")), None)
            if kind == "generator" or own == "training":
                continue
            if leaf is None:
                yield Whole(path, "", f"its forward sets the attribute {own}")
            elif kind == "attribute" and uses[leaf] > 1:
                caller = next(n for n in self.runs[True].nodes if n.target == leaf)
                what = f"it calls {leaf} several times, which keeps {own} from one call to the next"
                yield Whole(caller.meta["owner"], caller.meta["line"], what)

    # Other runs

    def _find_batch_inputs(self) -> None:
        """Find the tensors with the batch if other dimensions have the size of the batch, too.

        Of several guesses with another batch size, the first that the model accepts is taken.
        """
        signature, n = self.signature, self.signature.batch
        cut = [k for k, is_cut in enumerate(signature.is_cut) if is_cut]
        if len(cut) < 2 or not any(n in shape_of(tensor)[1:] for tensor in self.tensors):
            return
        may_be_whole = [k for k in cut[1:] if isinstance(self.tensors[k], Tensor)]
        for few in ([], *([k] for k in reversed(may_be_whole)), may_be_whole):  # not cut
            tensors = self._resized({(k, 0): n + 1 for k in cut if k not in few})
            args, kwargs = signature.call(tensors)
            with suppress(Exception):
                self.model(*args, **kwargs)
                is_cut = [k in cut and k not in few for k in range(len(tensors))]
                signature.settle(is_cut=is_cut, free=signature.free)
                return

    def _other_sizes(self) -> list[list[_Change]]:
        """Sizes to try, each with alternatives: of the batch, then of dimensions of equal size.

        The first one is even where the sample's is odd, so that ratios and remainders differ, too.
        """
        n = self.signature.batch
        cut = [(k, 0) for k, is_cut in enumerate(self.signature.is_cut) if is_cut]
        groups: dict[Any, set[tuple[int, int]]] = {}
        for k, tensor in enumerate(self.tensors):
            for d, size in enumerate(shape_of(tensor)):
                for key in ("all", f"input {k}", d) if (k, d) not in cut and size > 1 else ():
                    groups.setdefault((key, size), set()).add((k, d))
        found = {frozenset(cut): [size for size in (1, 2 * n, n + 1) if size != n]}
        for (_, size), group in groups.items():  # first all of this size, then some of them
            if not group & self._fixed:
                half = size // 2
                other = half + ((size - half) % 2 == 0)
                found.setdefault(frozenset(group), [*dict.fromkeys((other, half, 2 * size))])
        return [[dict.fromkeys(group, size) for size in sizes] for group, sizes in found.items()]

    def _features(self, run: Tracer) -> Iterator[tuple[int, int]]:
        """Dimensions of inputs whose size a weight has, too: the model refuses any other."""
        for node in (node for node in run.nodes if node.op == "call_module"):
            module, first = self.model.get_submodule(str(node.target)), next(iter(node.args), None)
            at, given = _FEATURES.get(type(module)), first
            if at is None or not isinstance(first, fx.Node) or hooks_of(module):
                continue
            inner = first.meta["value"].shape
            while isinstance(given, fx.Node) and given.op != "placeholder":  # permuted, cast
                value = given.meta["value"]
                same = isinstance(value, Tensor) and value.shape.numel() == inner.numel()
                given = given.args[0] if same and given.args else None
            if isinstance(given, fx.Node):
                shape = shape_of(given.meta["value"])
                dims = [d for d, size in enumerate(shape) if size == inner[at]]
                if shape == inner or len(dims) == 1:
                    d = len(shape) + at if shape == inner else dims[0]
                    yield self.signature.names.index(str(given.target)), d

    def _vary(self) -> list[Whole]:
        """Run with other sizes and numbers; returns faults of modules that can be leaves instead.

        Sizes that could not be varied must be the sample's in every call. All that may vary is
        varied at once first, which tells nothing if something differs.
        """
        batch, *others = sizes = self._other_sizes()
        if self._at_once:
            self._at_once = False
            most = {**batch[0], **self._other_numbers()}
            every = {key: size for tries in others for key, size in tries[0].items()}
            if (not every or self._differing({**every, **most})) and len(most) > len(batch[0]):
                self._differing(most)
        for tries in sizes:
            if found := self._vary_sizes(tries, tries is batch):
                return found
        for _ in range(2):
            if numbers := self._other_numbers():
                owners = self._differing(numbers)
                self._decisive |= {n for n in numbers if n.rpartition(".")[0] in owners}
        self.signature.settle(free={key for key in self._free if not isinstance(key, str)})
        for node, same in self._harmless.items():
            node.meta["pure"] = same
        return []

    def _other_numbers(self) -> _Change:
        """Values for the numbers by which Python did not decide, and that may not vary yet."""
        decisive = self._decisive | self.runs[True].decisive | self.runs[False].decisive
        reads = [r for r in self._reads() if r.name in self._floats() - decisive - self._free]
        return {  # no two by the same factor
            read.name: (1 - 0.25 / k) * read.value or 0.25 / k for k, read in enumerate(reads, 1)
        }

    def _differing(self, change: _Change) -> set[str]:
        """Paths of the modules that do something else; if there are none, all of this may vary."""
        try:
            others = self._run_with(change, self._differs)
            faults, _ = self._compare_runs(others)
            if not faults:
                self._check_batch(others, change)
        except Exception:  # the model itself refuses this
            return {name.rpartition(".")[0] for name in change if isinstance(name, str)} or {""}
        self._decisive |= set[str]().union(*(run.decisive for run in others.values()))
        if not faults:
            self._free |= change.keys() - self._decisive
        return {fault.path for fault in faults}

    def _vary_sizes(self, tries: list[_Change], is_batch: bool) -> list[Whole]:
        """Vary dimensions that change together; returns faults as ``_vary``."""
        pinned, half_known, guarded = list[Whole](), list[_Change](), True
        for number, change in enumerate(tries):
            larger = any(change.keys() < each.keys() for each in self._refused + self._pinned)
            if change.keys() <= self._free or (larger and number) or change in self._refused:
                continue
            try:
                others = self._run_with(change, self._is_refused)
            except Exception:  # the model itself refuses this size
                self._refused.append(change)
                continue
            half_known += [] if False in others else [change]
            faults, guards = self._compare_runs(others)
            while small := self._leafable(faults):
                if not self._keep(small, others):
                    return small
                faults, guards = self._compare_runs(others)
            if faults:
                pinned, guarded = pinned + faults, bool(guards)
                self._pinned.append(change)
                if not guards:
                    break
                dims = {key for key in self._free | change.keys() if not isinstance(key, str)}
                self.signature.settle(free=dims)
                same = self._needless(guards, self._resized(change))
                known = self._harmless
                known |= {node: same and known.get(node, True) for node in guards}
                continue
            known_half = list(map(self._in_evaluation, half_known))
            if found := [fault for small, _ in known_half for fault in small]:
                return found
            if not all(refused for _, refused in known_half):
                break
            if is_batch:
                self._check_batch(others, change)
            self._free |= change.keys()
            break
        if is_batch and not tries[0].keys() <= self._free:
            if not (pinned and guarded):
                faults, _ = self._compare_runs(self._run(self.tensors))
                if faults:  # not because of the size
                    return faults
            lines = list(dict.fromkeys(line or what for _, line, what in pinned))
            at = "".join(f"\n  {line}" for line in lines[:3])
            self.notes.append(
                f"{self.name} was converted for batches of {self.signature.batch} only, so a "
                "Pipe must cut each mini-batch into micro-batches of this size. The model "
                + (f"does something else with others, here:{at}" if at else "refuses others")
                + self._time_first()
            )
        return []

    def _run_with(self, change: _Change, enough: Callable[[Tracer], Any]) -> dict[bool, Tracer]:
        patches = Patches()

        def run() -> dict[bool, Tracer]:
            for read in self._reads():
                if read.name in change:
                    patches.put(read.owner, read.key, change[read.name])
            return self._run(self._resized(change), enough)

        return self._state.restoring(lambda: patches.around(run), ())

    def _check_batch(self, others: dict[bool, Tracer], change: _Change) -> None:
        """Check outputs for another size of the batch, in runs of their own if more is changed."""
        batch = {key: change[key] for key in self._other_sizes()[0][0] if key in change}
        for run, mode in {run: mode for mode, run in others.items()}.items() if batch else ():
            result = run.result
            if len(batch) < sum(not isinstance(key, str) for key in change):
                args, kwargs = self.signature.call(self._resized(batch), mode)
                result = self.model.train(mode)(*args, **kwargs)
            self._check_outputs(self.runs[mode], result, next(iter(batch.values())))

    def _compare_runs(self, others: dict[bool, Tracer]) -> tuple[list[Whole], list[fx.Node]]:
        """Where other runs differ from the sample's, and the guards that refuse these runs.

        There are no guards if one of the differences would not be refused.
        """
        faults: list[Whole] = []
        guards: list[fx.Node] = []
        noticed = True
        for mode, other in others.items():
            run = self.runs[mode]
            ours, theirs = (
                {node.meta["key"]: node for node in each.nodes if node.target in CHECKS}
                for each in (run, other)
            )
            own = [n for k, n in ours.items() if k in theirs and theirs[k].args[1] != n.args[1]]
            found = differences(run, other)
            noticed = noticed and (bool(own) or not found)
            faults, guards = faults + found + other.faults, guards + own
        return faults, guards if noticed else []

    def _differs(self, run: Tracer) -> bool:
        return bool(self._compare_runs({True: run})[0])

    def _is_refused(self, run: Tracer) -> bool:
        """Whether layers surely refuse a run in training: by a guard that cannot be needless."""
        faults, guards = self._compare_runs({True: run})
        return bool(guards and not _are_equalities(guards)) and self._leafable(faults) != faults

    def _in_evaluation(self, change: _Change) -> tuple[list[Whole], bool]:
        """Faults of small modules in evaluation, and whether layers refuse what else differs."""
        try:
            run = self._trace(self._resized(change), False)
        except Exception:  # so does the model
            return [], True
        faults, guards = self._compare_runs({False: run})
        small = self._leafable(faults)
        return small, bool(guards) or len(small) == len(faults)

    def _needless(self, guards: list[fx.Node], tensors: list[Tensor]) -> bool:
        """Whether layers without these guards match the model for a sample that the guards refuse.

        For example, a model may expand a tensor to the batch only if there are several samples.
        """
        if next(self.model.parameters()).is_meta or not _are_equalities(guards):
            return False
        for node in guards:
            node.meta["pure"] = True
        without = self.layers()
        for node in guards:
            node.meta["pure"] = False
        with suppress(Exception):  # the model may refuse this size in another mode
            restoring = restorer(self.model)
            found = _comparisons(self.model, without, self.signature, tensors, restoring)
            return all(comparison.same for _, comparison in found)
        return False

    def _resized(self, change: _Change) -> list[Tensor]:
        """The sample with other sizes: entries repeated, or fewer of them."""
        tensors = list(self.tensors)
        for (k, d), size in [each for each in change.items() if not isinstance(each[0], str)]:
            if batch_kind(tensors[k]):
                tensors[k] = repeated_batch(tensors[k], size)
                continue
            repeats = -(-size // tensors[k].shape[d])
            tensors[k] = torch.cat([tensors[k]] * repeats, d).narrow(d, 0, size)
        return tensors

    # Messages

    def _check_outputs(self, run: Tracer, varied: Any, m: int) -> None:
        """Raise for outputs of the batch that cannot be concatenated along dimension 0."""
        n, result, common = self.signature.batch, run.result, run.nodes[-1].meta["common"]
        ragged = any(map(batch_kind, self.tensors))  # in a graph, rows are nodes, not samples
        (ours, _), (theirs, _) = flatten(result, batches=True), flatten(varied, batches=True)
        names, pairs = leaf_names("output", result, batches=True), zip(ours, theirs, strict=False)
        for at, (k, (a, b)) in zip(names, enumerate(pairs), strict=False):
            if isinstance(a, int | float) and isinstance(b, int | float) and a != b:
                raise ValueError(
                    f"{at} of {self.name} is {a} for a batch of {n} and {b} for one of {m}, and "
                    "each micro-batch has a number of its own: leave it out, or compute it of the "
                    "other outputs"
                )
            if k in common or not (
                isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() == b.dim() > 0
            ):
                continue
            follows = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
            if follows != [0] or (a.shape[0] * m != b.shape[0] * n and not ragged):
                dims = " and ".join(map(str, follows))
                raise ValueError(
                    f"{at} of {self.name} is {described(a)} for a batch of {n} and {described(b)} "
                    f"for one of {m}: it has "
                    f"{f'the batch in dimension {dims}' if dims else 'no batch'}, and outputs of "
                    "micro-batches are put together along dimension 0. Let the model return it "
                    "with the batch in dimension 0 (transposed, or expanded), leave it out, or "
                    "compute it of the outputs (a matrix of all samples with all others, in the "
                    f"loss){self._time_first()}"
                )

    def _time_first(self) -> str:
        """A hint if the batch seems to be in dimension 1 of the inputs."""
        sizes = [shape_of(tensor)[:2] for tensor in self.tensors if len(shape_of(tensor)) > 1]
        if len(sizes) < 2 or len({b for _, b in sizes}) > 1 or len({a for a, _ in sizes}) == 1:
            return ""
        return (
            f". The inputs have the size {sizes[0][1]} in dimension 1: if that is the batch, write "
            "a model that takes it in dimension 0 (batch_first=True) and transposes inside"
        )

    def _shared_norms(self) -> Iterator[str]:
        """Warnings for modules with running statistics that are called several times."""
        calls = Counter(n.target for n in self.runs[True].nodes if n.op == "call_module")
        for path in [str(path) for path, times in calls.items() if times > 1]:
            for name, part in self.model.get_submodule(path).named_modules():
                if isinstance(part, _NormBase) and part.running_mean is not None:
                    at = f"{path}.{name}".rstrip(".")
                    yield (
                        f"{at} ({type(part).__name__}) is called {calls[path]} times in a forward. "
                        "Stages see the micro-batches in another order, so that a Pipe takes it in "
                        "training only where all of these calls are in one stage. If they are an "
                        "encoder's for several inputs, convert the encoder, and call pipe(u) and "
                        "pipe(v), or pipe(torch.cat([u, v]))"
                    )
                    break

    def _large_modules(self) -> Iterator[str]:
        """Warnings for modules that were not inlined and have most of the model."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        calls = [node for node in self.runs[True].nodes if node.op == "call_module"]
        seconds = sum(node.meta["seconds"] for node in calls)
        for path, line, reason in self.whole:
            module = self.model.get_submodule(path)
            share = sum(parameter.numel() for parameter in module.parameters()) / total
            time = sum(node.meta["seconds"] for node in calls if node.target == path)
            large = share > 0.5 or (seconds > 0.1 and time > seconds / 2)
            if large and not isinstance(module, _LAYERS):  # users do not rewrite PyTorch's modules
                part = f"{share:.0%} of the parameters, {time / (seconds or 1):.0%} of the time"
                yield (
                    f"{path} ({type(module).__name__}) is one layer and has {part}: "
                    f"{reason}" + (f":\n  {line}\n" if line else ". ") + "Where that can be in a "
                    "module of its own, the rest is cut (layers.whole lists all such modules)"
                )

    def _refuse_root(self) -> None:
        model = self.model
        hooks = [name for name in HOOKS[:4] if getattr(model, name)]
        if hooks:
            raise ValueError(
                f"{self.name} has hooks ({', '.join(hooks)}), which its layers would "
                "not run: remove them, or register them on the modules in it"
            )
        for mode in (True, False):
            model.train(mode)
            theirs = {path: module.training for path, module in model.named_modules()}
            for module in model.modules():
                module.training = mode
            for path in reversed(self.leaves):  # as the layers do, outer ones last
                model.get_submodule(path).train(mode)
            for path, module in model.named_modules():
                if module.training is not theirs[path]:
                    raise ValueError(
                        f"{self.name}.train({mode}) leaves {path!r} in the other mode, "
                        "which train() of its layers would not: write that into the train() of "
                        "the module itself"
                    )


def _as_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if not isinstance(sample, (tuple, list)):
        kind = type(sample).__name__
        raise TypeError(
            f"eval_sample is a {kind}: give the arguments of a call, a tuple (x,) or a dict by name"
        )
    return tuple(sample), {}


def _materialize(model: nn.Module) -> None:
    """Replace tensors on ``meta`` by tensors with values that take no memory.

    Small tensors are not zero, because some models decide by values (``if mask.all()``).
    """
    made: dict[int, Tensor] = {}
    for module, _, name, tensor in [place for place in places_of(model) if place[3].is_meta]:
        if tensor.nbytes > _SMALL:  # unwritten pages take no memory
            memory = mmap.mmap(-1, tensor.nbytes)
            value = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
            value = value.view(tensor.shape)
        else:
            value = torch.full(tensor.shape, 0.01).to(tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, tensor.requires_grad)
        setattr(module, name, made.setdefault(id(tensor), value))


# Comparing two traces


def differences(a: Tracer, b: Tracer) -> list[Whole]:
    """The first line that differs between two traces, for each call of a module."""
    found: list[Whole] = []
    doubtful: list[Any] = []  # calls that differ, whose outputs may therefore differ

    def value(node: fx.Node) -> Any:
        key = node.meta["key"]
        return f"%{next((call for call in doubtful if key[: len(call)] == call), key)}"

    steps = [{node.meta["key"]: node for node in run.live} for run in (a, b)]
    for key in sorted(dict.fromkeys(chain(*steps)), key=("output",).__eq__):
        pair = [run[key] for run in steps if key in run]
        call = own = pair[0].meta["call"]
        while call not in a.steps or call not in b.steps:
            call = call[:-1]  # the innermost call in both traces
        lines = {
            f"{n.op} {n.target!r} {fx.node.map_arg((n.args, n.kwargs), value)!r}" for n in pair
        }
        alike = len(pair) == 2 and len(lines) == 1
        if not alike and not any(call[: len(other)] == other for other in doubtful):
            reason = _reason(pair) if call == own else "another module is called"
            found.append(Whole(call[-1][1], pair[0].meta["line"], reason))
            doubtful.append(call)
    return found


def _reason(pair: list[fx.Node]) -> str:
    one, two = pair[0], pair[-1]
    for a, b in zip(one.all_input_nodes, two.all_input_nodes, strict=False):
        if a.meta["key"][0] == b.meta["key"][0] == "object" and a.target != b.target:
            return f"it passes a {type(a.meta['value']).__name__} that is made anew in every call"
    if one.op == "output":
        return "what the model returns is put together differently"
    names = [n.target if isinstance(n.target, str) else n.target.__name__ for n in pair]
    what = " or ".join(dict.fromkeys(names))
    return f"what it does ({what}) depends on sizes, or differs from call to call"


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks on a module, except syncpipe's own."""
    hooks = {kind: getattr(module, kind, {}).values() for kind in HOOKS}
    own = "_syncpipe_own"
    return [kind for kind in HOOKS if not all(hasattr(hook, own) for hook in hooks[kind])]


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled(module) or "_orig_mod" in module._modules


def _are_equalities(guards: list[fx.Node]) -> bool:
    asked: list[Any] = [node.args[0] for node in guards]
    return all(node.target in (operator.eq, operator.ne) for node in asked)


def _must_be_leaf(module: nn.Module) -> str:
    """The reason why a module cannot be inlined, or ''."""
    kind = type(module)
    reasons = {
        "it has no modules inside": not module._modules
        and not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)),
        "PyTorch's layer takes a faster way in evaluation, or is looked for by its class":
            isinstance(module, _LAYERS),
        "it is a ScriptModule": isinstance(module, torch.jit.ScriptModule),
        "it is a Pipe, or has skips of its own": is_skippable(module)
        or hasattr(kind, "_syncpipe_skips_are_internal"),
        "it has hooks": bool({*hooks_of(module)} - {"_load_state_dict_pre_hooks"}),
        "it saves a state of its own":
            any(getattr(kind, name) is not getattr(nn.Module, name) for name in _STATE_METHODS),
        "its forward was replaced":
            not (_is_compiled(module) or _is_method(vars(module).get("forward"), module)),
        _COMPILED: _is_compiled(module),
        "it is parametrized": hasattr(module, "parametrizations"),
        "it is an adapter of peft":
            any(base.__name__ == "BaseTunerLayer" for base in kind.__mro__),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_method(forward: Any, module: nn.Module) -> bool:
    """Whether ``forward``, set on the instance, is a method of ``module``, or None."""
    return forward is None or (isinstance(forward, MethodType) and forward.__self__ is module)


# Comparing layers with the model


def _check_layers(
    model: nn.Module, layers: Converted, signature: Signature, sample: list[Tensor], restoring: Any
) -> None:
    for training, found in _comparisons(model, layers, signature, sample, restoring):
        if not found.same:
            outputs = [name for name in found.names if not name.startswith(_GRADIENT)]
            what = outputs[0] if outputs else found.names[-1]
            path = what.removeprefix(_GRADIENT).rpartition(".")[0]
            at = [k for k, layer in enumerate(layers) if path in dict(layer.named_modules())]
            shown = "" if outputs or not at else f", of layer {at[0]}:\n{layers[at[0]]}"
            why = (
                "Does the model do the same in every call? If not, make it so, or move what does "
                "not into a module of its own (print the layers to see what they do)"
            )
            if written := _parameters_written(model, signature, sample):
                why = (
                    f"The forward writes into the parameter {written[0]}, so it does something "
                    "else in every call: make it a buffer, or write into it after the step"
                )
            raise RuntimeError(
                f"the layers do something else than {type(model).__name__}: {what} in "
                f"{'training' if training else 'evaluation'} differs ({found}){shown}\n{why}"
            )


def _parameters_written(model: nn.Module, signature: Signature, sample: list[Tensor]) -> list[str]:
    """Names of the parameters that a forward in training writes into, also through ``.data``."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    args, kwargs = signature.call(sample, True)
    restoring_module(model, lambda: model.train()(*args, **kwargs))
    written = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    for name in written:
        model.get_parameter(name).data.copy_(before[name])
    return written


def _comparisons(
    model: nn.Module, layers: nn.Module, signature: Signature, sample: list[Tensor], restoring: Any
) -> Iterator[tuple[bool, Comparison]]:
    """Compare outputs, buffers and gradients in training, then outputs and buffers in evaluation.

    Both draw the same random numbers. Yields the mode (True: training) and the comparison.
    """
    for mode in (True, False):
        call = partial(signature.call, sample, mode)
        expected, actual = (
            restoring(lambda: values_of(module.train(mode), call, mode))  # noqa: B023
            for module in (model, layers)
        )
        yield mode, compare(actual, expected)


def _apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Replaces ``CheckpointFunction.apply``, which refuses ``torch.autograd.grad``."""
    return function(*args)


def values_of(module: nn.Module, call: _Arguments, gradients: bool = True) -> dict[str, Any]:
    """Outputs, buffers and gradients of one run, by their names in messages."""
    (args, kwargs), patches = call(), Patches()

    def run() -> Any:
        patches.put(CheckpointFunction, "apply", _apply)
        with torch.set_grad_enabled(gradients):
            return module(*args, **kwargs)

    output = patches.around(run)
    found = by_name("output", output)
    outputs = list(found.values())
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in saved:
            found[f"the buffer {name}"] = buffer.detach().clone()
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    inputs = {f"input {k}": leaf for k, leaf in enumerate(flatten((args, kwargs))[0])}
    leaves = {
        name: leaf
        for name, leaf in [*module.named_parameters(), *inputs.items()]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    if gradients and roots and leaves:
        given = [  # gradients of outputs, different for each element
            ((torch.arange(t.numel(), device=t.device) % 17 - 8) / 8).reshape(t.shape).to(t.dtype)
            for t in roots
        ]
        grads = torch.autograd.grad(roots, list(leaves.values()), given, allow_unused=True)
        found |= {_GRADIENT + n: g for n, g in zip(leaves, grads, strict=True)}
    return found
