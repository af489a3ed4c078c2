"""``Pipe.auto`` on models of torchvision, timm and transformers; the others are in tests/auto."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from syncpipe import Pipe
from tests.auto.models import BATCH, FEW, Call, assert_trains, ids, image, made


def vision(name: str, size: int = 64, **options: Any) -> Callable[[Any], Call]:
    return lambda models: (
        getattr(models, name)(weights=None, num_classes=10, **options), (image(size),), {}
    )  # fmt: skip


def timm(name: str, size: int = 64, **options: Any) -> Callable[[Any], Call]:
    return lambda models: (models.create_model(name, num_classes=10, **options), (image(size),), {})


def language(name: str, kind: str, **options: Any) -> Callable[[Any], Call]:
    def build(models: Any) -> Call:
        config = getattr(models, f"{name}Config")(**options)
        model = getattr(models, f"{name}{kind}")(config)
        return model, (), {"input_ids": ids(), "attention_mask": torch.ones(FEW, 7).long()}

    return build


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "use_cache": False}
MODELS: dict[str, dict[str, Callable[[Any], Call]]] = {
    "torchvision.models": {
        "resnet18": vision("resnet18"),
        "vgg11": vision("vgg11", 32),
        "mobilenet_v2": vision("mobilenet_v2"),
        "densenet121": vision("densenet121"),
    },
    "timm": {
        "vit_tiny": timm("vit_tiny_patch16_224", img_size=64),
        "convnext_atto": timm("convnext_atto"),
        "mixer_s32": timm("mixer_s32_224", img_size=64),
    },
    "transformers": {
        "GPT-2": language(
            "GPT2", "LMHeadModel", vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=16,
            use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1,
            eos_token_id=2,
        ),
        "Llama": language("Llama", "ForCausalLM", **HEADS, tie_word_embeddings=True),
        "Qwen2": language("Qwen2", "ForCausalLM", **HEADS),
        "BERT": language(
            "Bert", "ForSequenceClassification", **SIZES, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, num_labels=5,
        ),
        "Mistral": language("Mistral", "ForCausalLM", **HEADS),
    },
}  # fmt: skip
NAMES = [(package, name) for package, models in MODELS.items() for name in models]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), NAMES, ids=[name for _, name in NAMES])
def test_it_fits_and_trains(package, name, capsys):
    """On two workers, neither of which holds the parameters with Adam."""
    pytest.importorskip(package.partition(".")[0])
    model, args, kwargs = made(lambda: MODELS[package][name](import_module(package)))
    plain = copy.deepcopy(model)
    size = 4 * sum(parameter.nbytes for parameter in model.parameters())
    call: dict[str, Any] = {
        "batch_size": BATCH, "devices": ["cpu:0", "cpu:1"], "timeout": 0.0,
        "memory": [0.6 * size + 100e6, 0.9 * size + 100e6], **kwargs,
    }  # fmt: skip
    if name == "vgg11":  # one layer has four fifths of the parameters
        with pytest.raises(
            ValueError, match=r"stage 0 .* needs [\d.]+ GB, [\d.]+ MB more than the"
        ):
            Pipe.auto(model, *args, **call)
        return
    assert_trains(Pipe.auto(model, *args, **call), plain, args, kwargs)
    assert capsys.readouterr().out.startswith("fits: ")
