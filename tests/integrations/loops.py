"""A small classifier, its data, and a small language model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from syncpipe import Pipe

CHUNKS = 4


def pipe_and_model(balance: list[int] | None = None) -> tuple[Pipe, nn.Sequential]:
    """A pipe on CPU workers, and the same model without one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    balance = balance or [2, 3]
    devices = [f"cpu:{j}" for j in range(len(balance))]
    return Pipe(copy.deepcopy(model), balance, devices=devices, chunks=CHUNKS), model


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches with their targets, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def data() -> DataLoader[Any]:
    """The same mini-batches."""
    return DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), batch_size=8)


def assert_trained_alike(pipe: nn.Module, model: nn.Module, *, exact: bool = False) -> None:
    """Parameters are the same."""
    how = {"rtol": 0.0, "atol": 0.0} if exact else {}
    torch.testing.assert_close(list(pipe.parameters()), list(model.parameters()), **how)


def llama(**options: Any) -> Any:
    """A small language model of transformers."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options}))
