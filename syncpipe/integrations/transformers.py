"""A pipe in the ``Trainer`` of transformers, in TRL's trainers, and in subclasses of these.

    trainer.train() -> create_optimizer -> sample: the arguments of the model in compute_loss
                                        -> Pipe.auto(model with its loss, sample)
    compute_loss    -> model(**inputs)  -> model.forward, which is a PipedForward: runs the pipe

It relies on this (seen in transformers 5.24, TRL 1.16, accelerate 1.15): ``Trainer`` calls
``create_accelerator_and_postprocess``, ``_move_model_to_device``, ``create_optimizer``,
``training_step``, ``prediction_step``, ``compute_loss``, and a ``forward`` set on the model;
``Accelerator`` has ``device_placement`` and ``num_processes``, and wraps the model's ``forward``.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from syncpipe.data.batches import scatter
from syncpipe.data.trees import described, map_tensors, tensors_in
from syncpipe.data.uncut import NoChunk
from syncpipe.layers.conversion.sequential import sequential
from syncpipe.layers.conversion.signature import model_signature
from syncpipe.pipe import Pipe
from syncpipe.state import restoring_module

__all__ = ["LossModel", "pipelined"]

_Trainer = TypeVar("_Trainer", bound=type)
_Tree = TypeVar("_Tree")
#: The model and its outputs, while a worker computes a loss.
_OUTPUTS: ContextVar[Any] = ContextVar("syncpipe_outputs", default=None)
_IGNORED = -100  # the label that losses ignore


class LossModel(nn.Module):
    """A model with its own loss as an output per sample, for ``Pipe.auto`` and ``sequential``.

    The loss of a micro-batch becomes one number per sample, so outputs of micro-batches can be
    concatenated. The sum over all samples is the loss of the mini-batch times its ``weight``.
    Other scalars are repeated for each sample.

    ::

        layers = syncpipe.sequential(LossModel(model), input_ids=ids, labels=labels)
        trainer = pipelined(Trainer)(model, ..., pipe=Pipe(layers, balance, chunks=8))

    Args:
        model: a model of transformers, whose outputs are a dict.
        shifts: whether the model predicts the next token, so the first label of a row is ignored.
        sums: whether the loss is a sum divided by ``num_items_in_batch``, instead of a mean.
    """

    def __init__(self, model: nn.Module, *, shifts: bool = False, sums: bool = False) -> None:
        super().__init__()
        self.model, self.shifts, self.sums = model, shifts, sums
        base: Any = getattr(model, "get_base_model", lambda: model)()  # without adapters
        caches = "use_cache" in inspect.signature(base.forward).parameters
        #: Training needs no cache, which all layers would write into.
        self._flags = {"use_cache": False} if caches else {}

    def forward(self, **inputs: Any) -> dict[str, Any]:
        outputs = self.model(**{**self._flags, **inputs})
        batch = _batch(inputs)
        made = {}
        for name, value in outputs.items():
            if isinstance(value, Tensor) and value.dim() == 0:
                if name == "loss":
                    value = value * self.weight(inputs) / batch
                value = value.expand(batch)
            made[name] = value
        return made

    def weight(self, inputs: Mapping[str, Any]) -> Any:
        """The weight of the loss of these inputs in the mean over a mini-batch."""
        return 1 if self.sums else _weight(inputs, self.shifts)


def _weight(inputs: Mapping[str, Any], shifts: bool) -> Any:
    """The number of labels in a mean loss; of samples without integer labels."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return _batch(inputs)
    return ((labels[..., 1:] if shifts else labels) != _IGNORED).sum()


def _batch(inputs: Mapping[str, Any]) -> int:
    return next(len(v) for v in inputs.values() if isinstance(v, Tensor) and v.dim())


class _ModelCall(Exception):
    """Raised by the model's ``forward`` to report its arguments."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


class PipedForward:
    """The ``forward`` of a model whose layers are in a pipe.

    Calls like the pipe's sample run the pipe. Other calls without gradients (in ``generate``, or
    without labels) run the model itself, device after device.

    Attributes:
        own: the model's own ``forward``.
        pipe: None until :meth:`use`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.own = model, model.forward
        self._before = vars(model).get("forward")
        self._signature = inspect.signature(self.own)
        self.pipe: Pipe | None = None
        self._intercepts = False
        self._install()

    def _install(self) -> None:
        """Set ``forward`` on the model; in a copy of the model, it runs the copy's own."""

        function: Any = getattr(self.own, "__func__", type(self.model).forward)

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            return (
                self(*args, **kwargs) if model is self.model else function(model, *args, **kwargs)
            )

        forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        forward._syncpipe_runs_layers = True  # type: ignore[attr-defined]
        self.model.forward = MethodType(forward, self.model)

    def remove(self) -> None:
        del self.model.forward
        if self._before is not None:
            self.model.forward = self._before

    def learn(self, sample: dict[str, Any], few: dict[str, Any], loss_model: LossModel) -> None:
        """Learn the sample call, and from a few of its rows the outputs of the model."""
        with torch.no_grad():
            outputs = restoring_module(self.model, lambda: self.own(**few))
        if not isinstance(outputs, dict):
            raise TypeError(
                f"{type(self.model).__name__} returns a {type(outputs).__name__}: a pipelined "
                "Trainer takes models of transformers, which return a ModelOutput"
            )
        self._kind, self._loss_model = type(outputs), loss_model
        self._numbers = [
            name for name, v in outputs.items() if isinstance(v, Tensor) and v.dim() == 0
        ]
        if "loss" in self._numbers and few.get("num_items_in_batch") is not None:
            loss_model.sums = _is_half(
                self.model,
                lambda: (self.own(**{**few, "num_items_in_batch": n})["loss"] for n in (1, 2)),
            )
        self._sample = {name: _invariant(value) for name, value in sample.items()}
        self._adapters = _active_adapters(self.model)

    def use(self, pipe: Pipe) -> None:
        """Run calls like the sample in ``pipe`` from now on."""
        shared = set(self.model.modules())
        self._modules = [module for module in pipe.modules() if module not in shared]
        self.pipe = pipe

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Context in which the model has its own ``forward``."""
        self.remove()
        try:
            yield
        finally:
            self._install()

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Context in which a call of the model raises :class:`_ModelCall`."""
        self._intercepts = True
        try:
            yield
        finally:
            self._intercepts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (given := _OUTPUTS.get()) is not None and given[0] is self.model:
            return given[1]
        if self._intercepts:
            raise _ModelCall(_named(self._signature, args, kwargs))
        if self.pipe is None:
            return self.own(*args, **kwargs)
        inputs = _named(self._signature, args, kwargs)
        if not torch.is_grad_enabled() and self._difference(inputs):
            with self._moving_inputs():
                return self.own(*args, **kwargs)
        outputs = self.pipe(**self.ready(inputs))
        return _moved(self.outputs(outputs, inputs), tensors_in(inputs)[0].device)

    def _difference(self, inputs: dict[str, Any]) -> str:
        """The difference of a call from the sample, or ''."""
        for name in sorted(self._sample.keys() ^ inputs.keys()):
            return f"{name!r} was {'not ' if name in inputs else ''}given then"
        for name, then in self._sample.items():
            if (now := _invariant(inputs[name])) is not then and now != then:
                return f"{name!r} is {_shown(now)}, and was {_shown(then)}"
        return "other adapters are active" if _active_adapters(self.model) != self._adapters else ""

    def ready(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move the inputs of a call to the first device, and set the pipe to the model's mode."""
        assert self.pipe is not None
        if difference := self._difference(inputs):
            raise ValueError(
                f"this call of {type(self.model).__name__} is not like the one that its pipe was "
                f"made for: {difference}. Give every batch the same columns, or run what is not "
                "trained under torch.no_grad()"
            )
        for module in self._modules:
            module.training = self.model.training
        return _moved(inputs, self.pipe.devices[0])

    def outputs(self, piped: dict[str, Any], inputs: dict[str, Any]) -> Any:
        """The model's outputs for these inputs, from the outputs of the pipe."""
        found = dict(piped)
        for name in self._numbers:
            if name == "loss":
                weight = self._loss_model.weight(inputs)
                weight = weight.to(found[name].device) if isinstance(weight, Tensor) else weight
                found[name] = found[name].sum() / weight
            else:
                found[name] = found[name].mean()
        return self._kind(**found)

    @contextmanager
    def _moving_inputs(self) -> Iterator[None]:
        """Context in which calls of modules on other devices move their inputs there and back."""
        handles = []
        for module, device in _placements(self.model):
            visit = _MoveHooks(device)
            handles.append(module.register_forward_pre_hook(visit.before, with_kwargs=True))
            handles.append(module.register_forward_hook(visit.after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _MoveHooks:
    """Hooks that move the inputs of a module to its device, and its outputs back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._placements = device, list[torch.device]()

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        self._placements.append(tensors[0].device if tensors else self._device)
        return _moved((args, kwargs), self._device)

    def after(self, _: nn.Module, args: Any, outputs: Any) -> Any:
        return _moved(outputs, self._placements.pop())


def _moved(tree: _Tree, device: torch.device) -> _Tree:
    moved: _Tree = map_tensors(lambda tensors: [t.to(device) for t in tensors], tree)
    return moved


def _named(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    names = [name for name, _ in zip(signature.parameters, args, strict=False)]
    return {**dict(zip(names, args, strict=True)), **kwargs}


def _invariant(value: Any) -> Any:
    """The part of an argument that must equal the sample's: any tensor is ``Tensor``."""
    return Tensor if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    return "a tensor" if value is Tensor else repr(value)


def _active_adapters(model: Any) -> list[Any]:
    return [
        (module.disable_adapters, list(module.active_adapters))
        for module in model.modules()
        if isinstance(getattr(type(module), "disable_adapters", None), property)  # a tuner layer
    ]


def _placements(model: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """The largest modules on one device each; none if all of the model is on one device."""
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) < 2:
        return
    pending = [model]
    while pending:
        module = pending.pop()
        found = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
        if len(found) == 1:
            yield module, found.pop()
        else:
            pending += module.children()


def _few_rows(sample: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A few samples of a call; their number differs from all other sizes of its tensors."""
    batch, tensors = _batch(sample), tensors_in(sample)
    taken = {size for tensor in tensors for size in tensor.shape[1:]}
    rows = next(n for n in range(2, len(taken) + 3) if n not in taken)
    index = torch.arange(rows, device=tensors[0].device) % batch
    return {
        name: value[index].to(device) if _is_cut(value, batch) else _moved(value, device)
        for name, value in sample.items()
    }


def _is_cut(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch


def _is_half(model: nn.Module, losses: Callable[[], Iterator[Tensor]]) -> bool:
    """Whether, in evaluation, the second of two losses is half of the first."""

    def run() -> bool:
        model.eval()
        with torch.no_grad():
            one, half = losses()
        return bool(torch.isclose(one, 2 * half, rtol=1e-3))

    return restoring_module(model, run)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Context that restores the generators of the host: fetching a sample draws from them."""
    numpy = sys.modules.get("numpy")
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class _Pipelined:
    """The methods that :func:`pipelined` overrides in a Trainer."""

    _trainer: type  #: ``transformers.Trainer``

    def __init__(
        self,
        *args: Any,
        pipe: Pipe | Callable[[nn.Sequential], Pipe] | None = None,
        pipe_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if pipe is not None and pipe_kwargs:
            raise TypeError(f"pipe_kwargs={pipe_kwargs} is for Pipe.auto, but pipe= is given")
        if isinstance(pipe, Pipe) and not _is_of_loss_model(pipe):
            raise ValueError(
                "pipe= has layers that return no loss: make it of the layers that are given to "
                "pipe=lambda layers: Pipe(layers, balance, chunks=8), or of those of a LossModel"
            )
        self.pipe: Pipe | None = None
        self._pipe_option, self._pipe_kwargs = pipe, dict(pipe_kwargs or {})
        self._forward: PipedForward | None = None
        super().__init__(*args, **kwargs)

    # --- overrides -------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if (processes := self.accelerator.num_processes) > 1:
            raise RuntimeError(
                f"pipelined(Trainer) runs in one process, and here are {processes}: start the "
                "script with python in place of torchrun or accelerate launch. For the same pipe "
                "in several processes: a loop with syncpipe.distributed.data_parallel(pipe)"
            )
        args = self.args
        if args.n_gpu > 1:
            args._n_gpu = 1  # keeps the Trainer from using DataParallel
        self.accelerator.device_placement = False
        self._recomputes, args.gradient_checkpointing = args.gradient_checkpointing, False
        self._compiles: dict[str, Any] | None = None
        if args.torch_compile:  # the pipe compiles its layers
            plugin = self.accelerator.state.dynamo_plugin
            self._compiles = {
                "backend": args.torch_compile_backend,
                "mode": args.torch_compile_mode,
            }
            plugin.backend = type(plugin.backend).NO

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the pipe places the layers."""

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._prepare_pipe()
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def training_step(
        self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        self._prepare_pipe(inputs)
        if self._has_plain_loss:
            return self._train_batch(model, self._prepare_inputs(inputs), num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    def prediction_step(self: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._prepare_pipe(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    # --- the pipe --------------------------------------------------------------------------------

    @property
    def _has_plain_loss(self) -> bool:
        """Whether no subclass overrides the loss of ``transformers.Trainer``."""
        mine, plain = type(self).__mro__, self._trainer
        before = mine[: mine.index(plain)]
        names = {"compute_loss", "training_step"}
        return not any(names & vars(kind).keys() for kind in before if kind is not _Pipelined)

    def _prepare_pipe(self: Any, inputs: Any = None) -> None:
        if self._forward is not None and self._forward.model is self.model:
            return
        model = self.model
        if hasattr(model, "gradient_checkpointing_disable"):
            model.gradient_checkpointing_disable()  # the pipe recomputes
        forward = PipedForward(model)
        try:
            with _kept_generators():
                pipe = self._make_pipes(forward, inputs)
        except BaseException:
            forward.remove()
            raise
        if self._recomputes:
            pipe.checkpoint = "always"
        forward.use(pipe)
        self.pipe, self._forward = pipe, forward

    def _make_pipes(self: Any, forward: PipedForward, inputs: Any) -> Pipe:
        model, size = self.model, self.args.per_device_train_batch_size
        loss_model = LossModel(model, shifts=self._loss_shifts_labels)
        batches = [inputs] if self.train_dataset is None else self.get_train_dataloader()
        found, count = self.get_batch_samples(iter(batches), 1, self.args.device)
        sample = self._model_inputs(forward, self._prepare_inputs(found[0]), count)
        if size > 1 and self.train_dataset is not None and _batch(sample) == 1:
            raise ValueError(
                f"per_device_train_batch_size={size}, and a batch has one row ({_shapes(sample)}): "
                "samples that are packed without padding cannot be cut into micro-batches. Set "
                "padding_free=False, or a packing_strategy that fills rows of one length "
                "('wrapped')"
            )
        home = next(model.parameters()).device
        few = _few_rows(sample, home)
        forward.learn(sample, few, loss_model)
        self._is_sum = self._loss_is_sum(_few_rows(found[0], home), count)
        pipe = self._pipe_option
        if not isinstance(pipe, Pipe):
            with forward.removed():
                pipe = self._make_pipe(loss_model, few, size)
        assert isinstance(pipe, Pipe)
        reference = self._reference_pipe(pipe, few, sample)
        for each in [pipe] if reference is None else [pipe, reference]:
            if self._compiles is not None:
                each.compile(**{k: v for k, v in self._compiles.items() if v is not None})
        return pipe

    def _make_pipe(self: Any, loss_model: LossModel, few: dict[str, Any], size: int) -> Pipe:
        if self._pipe_option is not None:
            made = self._pipe_option(sequential(loss_model, **few))
            if not isinstance(made, Pipe):
                raise TypeError(f"pipe= returned a {type(made).__name__}, and not a Pipe")
            return made
        options = {"batch_size": size, "optimizer": self._optimizer()}
        return Pipe.auto(loss_model, **few, **{**options, **self._pipe_kwargs})

    def _model_inputs(self: Any, forward: PipedForward, inputs: Any, count: Any) -> dict[str, Any]:
        """The arguments with which ``compute_loss`` calls the model for these inputs."""
        was = self.model.training
        self.model.train()
        try:
            with forward.intercepting():
                self.compute_loss(self.model, dict(inputs), num_items_in_batch=count)
        except _ModelCall as called:
            return called.inputs
        finally:
            self.model.train(was)
        raise TypeError(f"{type(self).__name__}.compute_loss does not call the model")

    def _loss_is_sum(self: Any, few: dict[str, Any], count: Any) -> bool:
        """Whether the loss is a sum divided by ``num_items_in_batch``, instead of a mean."""
        if count is None or not self._has_plain_loss:
            return False

        def losses() -> Iterator[Tensor]:
            for n in (1.0, 2.0):
                yield self.compute_loss(
                    self.model, dict(few), num_items_in_batch=torch.full_like(count, n)
                )

        return _is_half(self.model, losses)

    def _optimizer(self: Any) -> Any:
        """The function that makes the optimizer, for planning its memory."""
        if (made := self.optimizer) is not None:
            made = getattr(made, "optimizer", made)  # inside of accelerate's wrapper
            own: Any = type(made)
            return partial(own, **made.defaults)
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        is_plain = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        return partial(kind, **options) if is_plain else torch.optim.AdamW

    def _reference_pipe(self: Any, pipe: Pipe, few: Any, sample: Any) -> Pipe | None:
        """A pipe of the reference model (of DPO) on the same devices, if there is one."""
        model = getattr(self, "ref_model", None)
        if not isinstance(model, nn.Module):
            return None
        forward, loss_model = PipedForward(model), LossModel(model, shifts=self._loss_shifts_labels)
        few, sample = [
            {name: v for name, v in each.items() if name != "output_router_logits"}
            for each in (few, sample)
        ]
        forward.learn(sample, few, loss_model)
        with forward.removed():
            layers = sequential(loss_model, **few)
        same = len(layers) == sum(pipe.balance)
        balance: Any = list(pipe.balance) if same else "parameters"
        made = Pipe(layers, balance, devices=pipe.devices, chunks=pipe.chunks)
        forward.use(made)
        return made

    def _train_batch(self: Any, model: nn.Module, inputs: Any, count: Any) -> Tensor:
        """One training step, with the loss computed in the pipe, per micro-batch."""
        model.train()
        if hasattr(self.optimizer, "train"):  # a schedule-free optimizer
            self.optimizer.train()
        forward, pipe = self._forward, self.pipe
        call = self._model_inputs(forward, inputs, count)
        batch = _batch(call)

        def loss_fn(output: Any, piece: Any) -> Any:
            inputs, call = piece
            token = _OUTPUTS.set((self.model, forward.outputs(output, call)))
            try:
                return self.compute_loss(model, dict(inputs), num_items_in_batch=count)
            finally:
                _OUTPUTS.reset(token)

        weights = None
        if not self._is_sum:
            pieces = scatter(_mark_uncut(dict(inputs), batch), pipe.chunks)
            weights = [float(_weight(piece, self._loss_shifts_labels)) for piece in pieces]
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            accepts = self.model_accepts_loss_kwargs and count is not None
            scaled = accepts or self.compute_loss_func is not None
        steps = 1 if scaled else self.current_gradient_accumulation_steps
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            loss = pipe.train_batch(
                forward.ready(call), _mark_uncut((dict(inputs), call), batch), loss_fn=loss_fn,
                loss_reduction="sum" if self._is_sum else None, weight=weights, verify=False,
                accumulate=steps, grad_scaler=self.accelerator.scaler,
            )  # fmt: skip
        found: Tensor = (loss / steps).to(self.args.device)
        return found


def _mark_uncut(tree: _Tree, batch: int) -> _Tree:
    """A tree with tensors that are not cut in ``NoChunk``."""
    mark: Any = lambda tensors: [t if _is_cut(t, batch) else NoChunk(t) for t in tensors]  # noqa: E731
    marked: _Tree = map_tensors(mark, tree)
    return marked


def _is_of_loss_model(pipe: Pipe) -> bool:
    signature = model_signature(pipe)
    return signature is not None and list(signature.parameters) == ["inputs"]


def _shapes(sample: Mapping[str, Any]) -> str:
    return ", ".join(f"{n}: {described(v)}" for n, v in sample.items() if isinstance(v, Tensor))


def pipelined(trainer: _Trainer) -> _Trainer:
    """Make a subclass of a Trainer that trains its model in a pipe, on all devices by default.

    ::

        trainer = pipelined(SFTTrainer)(model=model, args=args, train_dataset=dataset)
        trainer.train()

    The subclass takes the arguments of the Trainer, and two more by keyword:

    - ``pipe_kwargs``: a dict of options for ``Pipe.auto`` (``devices``, ``memory``, ``timeout``,
      ...). The sample is the first batch of the Trainer's loader. Batch size, optimizer and
      recomputation come from its arguments.
    - ``pipe``: a function that makes a pipe from layers, ``lambda layers: Pipe(layers, [9, 8],
      chunks=8)``; or a pipe of the layers of a :class:`LossModel`.

    ``trainer.pipe`` is the pipe, from the first batch on. With the Trainer's own ``compute_loss``,
    a step is ``pipe.train_batch``, which computes the loss in the pipeline. If a subclass overrides
    ``compute_loss``, it gets the outputs of the whole mini-batch from ``pipe(...)``.

    Args:
        trainer: ``transformers.Trainer`` or a subclass of it.

    Returns:
        The subclass, to use in place of ``trainer``.

    Raises:
        TypeError: ``trainer`` is no subclass of ``transformers.Trainer``.
        ImportError: transformers is missing.
    """
    try:
        from transformers import Trainer
    except ImportError as error:
        raise ImportError(
            "syncpipe.integrations.transformers needs transformers and accelerate: "
            'pip install "syncpipe[transformers]"'
        ) from error
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise TypeError(
            f"pipelined takes a class, a subclass of transformers.Trainer, not {trainer!r}"
        )
    made: Any = type(f"Pipelined{trainer.__name__}", (_Pipelined, trainer), {"_trainer": Trainer})
    made.__module__ = __name__
    subclass: _Trainer = made
    return subclass
