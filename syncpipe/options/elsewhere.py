"""Names that other libraries have for what a pipe has under another name, or leaves to the caller.

Whoever comes from there gets an answer instead of "unexpected keyword argument".
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["arguments_answered", "attribute_answered"]

_STAGES = (
    "the number of stages is that of balance=[...], or of devices=[...] with balance='parameters'"
)
_LAYERS = "make another Pipe of the layers: layers = [*pipe]; pipe[k] = layer replaces one"
_CHUNKS = "the number of micro-batches is chunks="
_CHECKPOINT = (
    "checkpoint='always', 'except_last' or 'never' says which micro-batches are re-materialized, "
    "checkpoint=lambda layer: ... or a list which layers"
)
_SEED = "what a layer draws depends on its index anyway; seed= is for the weights of specs"

_ARGUMENTS = {
    "num_stages": _STAGES,
    "topology": _STAGES,
    "partition_method": "balance='parameters', 'uniform', 'type:regex' or 'time'",
    "loss_fn": "the loss function is given to pipe.train_batch(input, target, loss_fn=...)",
    "activation_checkpoint_interval": _CHECKPOINT,
    "activation_checkpoint_func": _CHECKPOINT,
    "checkpointable_layers": _CHECKPOINT,
    "seed_layers": _SEED,
    "base_seed": _SEED,
    "dynamic_shape": "it is not needed: shapes may change from call to call",
    "micro_batches": _CHUNKS,
    "n_microbatches": _CHUNKS,
    "num_microbatches": _CHUNKS,
    "gradient_accumulation_steps": _CHUNKS,
    "layers": "the layers are the first argument, Pipe(layers, ...)",
}
_ATTRIBUTES = {
    "save_checkpoint": "torch.save(pipe.state_dict(), path), whose keys no balance changes",
    "load_checkpoint": "pipe.load_state_dict(torch.load(path))",
    "gradient_accumulation_steps": "pipe.chunks is the number of micro-batches",
    "train_micro_batch_size_per_gpu": "the batch size divided by pipe.chunks",
    "train_batch_size": "it is that of the input of pipe.train_batch",
    "micro_batches": "pipe.chunks is the number of micro-batches",
    "backward": "pipe.train_batch goes back by itself; after pipe(input) it is loss.backward()",
    "step": "the optimizer is yours: optimizer.step()",
    "num_stages": "len(pipe.balance)",
    "set_dataiterator": "pipe.train_batch(data_iter=...)",
    **dict.fromkeys(("append", "extend", "insert", "pop"), _LAYERS),
    "is_gradient_accumulation_boundary": "each pipe.train_batch takes a whole mini-batch",
}


def arguments_answered(names: Iterable[str]) -> TypeError:
    """The error for arguments of ``Pipe`` that there are not."""
    name, *_ = names
    answer = _ARGUMENTS.get(name)
    text = f"Pipe() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}: {answer}" if answer else text)


def attribute_answered(name: str, error: AttributeError) -> AttributeError:
    """The error for an attribute of a pipe that there is not."""
    answer = _ATTRIBUTES.get(name)
    return AttributeError(f"{error}: {answer}", name=name) if answer else error
