"""Models of torchvision, timm and transformers as ``syncpipe.sequential`` converts them.

    python -m benchmarks.models.converted

prints a table: the model, how many of its modules were left whole though they have others inside,
the number of layers, and whether outputs and gradients were verified. Random weights, small sizes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from syncpipe import sequential
from syncpipe.layers.conversion.layer import ConvertedLayer, Holder

__all__ = ["MODELS", "Model", "main"]

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A model of a package, with a sample."""

    package: str
    build: Callable[[Any], nn.Module]
    size: int = 0  #: of images; 0: tokens
    mask: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    def make(self, batch: int) -> Made:
        """The model, and arguments for so many samples."""
        package = __import__(self.package)
        if self.package == "torchvision":
            package = __import__("torchvision.models").models
        model = self.build(package)
        if self.size:
            return model, (torch.randn(batch, 3, self.size, self.size),), {}
        ids = torch.randint(2, 90, (batch, 12))
        kwargs: dict[str, Any] = dict(self.more)
        if self.mask:
            kwargs["attention_mask"] = torch.ones_like(ids)
            kwargs["attention_mask"][:, 9:] = 0
        return model, (ids,), kwargs


_BERT = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
_GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_NO_CACHE = (("use_cache", False),)

MODELS: dict[str, Model] = {
    "torchvision ResNet-50": Model("torchvision", lambda m: m.resnet50(), 64),
    "torchvision DenseNet-121": Model("torchvision", lambda m: m.densenet121(), 64),
    "torchvision ViT-B/16 (3 blocks)": Model(
        "torchvision",
        lambda m: m.VisionTransformer(
            image_size=64, patch_size=16, num_layers=3, num_heads=12, hidden_dim=768, mlp_dim=3072
        ),
        64,
    ),
    "torchvision MobileNetV3": Model("torchvision", lambda m: m.mobilenet_v3_large(), 64),
    "torchvision Inception-v3": Model(
        "torchvision", lambda m: m.inception_v3(aux_logits=False, init_weights=False), 96
    ),
    "torchvision Swin-T": Model("torchvision", lambda m: m.swin_t(), 64),
    "timm ResNet-50": Model("timm", lambda m: m.create_model("resnet50"), 64),
    "timm ViT-Ti/16": Model(
        "timm", lambda m: m.create_model("vit_tiny_patch16_224", img_size=64), 64
    ),
    "timm ConvNeXt-A": Model("timm", lambda m: m.create_model("convnext_atto"), 64),
    "HF GPT-2 (tied)": Model(
        "transformers", lambda m: m.GPT2LMHeadModel(m.GPT2Config(**_GPT2)), more=_NO_CACHE
    ),
    "HF BERT (mask)": Model(
        "transformers",
        lambda m: m.BertForSequenceClassification(m.BertConfig(**_BERT)),
        mask=True,
    ),
    "HF Llama (mask)": Model(
        "transformers",
        lambda m: m.LlamaForCausalLM(m.LlamaConfig(**_BERT, num_key_value_heads=2)),
        mask=True,
        more=_NO_CACHE,
    ),
    "HF T5 encoder (mask)": Model(
        "transformers",
        lambda m: m.T5EncoderModel(
            m.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)
        ),
        mask=True,
    ),
}


def left_whole(layers: nn.Sequential) -> list[str]:
    """The classes of modules that were called as a whole though they have modules inside."""
    found: dict[str, None] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, (ConvertedLayer, Holder)):
                walk(child)
            elif next(child.children(), None) is not None:
                found[type(child).__name__] = None

    walk(layers)
    return list(found)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models with this in their name")
    options = parser.parse_args(arguments)
    print("| model | layers | left whole | other batch | other lengths, sizes | verified | s |")
    print("|---|---|---|---|---|---|---|")
    for name, made in MODELS.items():
        if options.only.lower() not in name.lower():
            continue
        torch.manual_seed(0)
        model, args, kwargs = made.make(batch=2)
        start = time.perf_counter()
        layers = sequential(model, *args, **kwargs)
        seconds = time.perf_counter() - start
        first = layers[0]
        assert isinstance(first, ConvertedLayer)
        assert first._signature is not None
        batch, *sizes = first._signature.shapes[0]
        whole = ", ".join(left_whole(layers)) or "none"
        free = "yes" if sizes[-1] is None else "no"
        print(
            f"| {name} | {len(layers)} | {whole} | {'no' if batch else 'yes'} | {free} | yes | "
            f"{seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
