"""The models of the papers, as flat ``nn.Sequential`` models that may be cut nearly everywhere.

``MODELS`` lists them with what was published about them::

    from benchmarks.models import find

    entry = find("U-Net (5, 64)")
    model, x = entry.build(), entry.sample(32, "cpu")  # 32 samples
    model, x = entry.on_meta(), entry.sample(32, "meta")  # the same without values or memory

``python -m benchmarks.models`` prints all of them beside their published sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .amoebanet import amoebanetd
from .gpt2 import gpt2_small
from .resnet import resnet101, resnext101_32x8d
from .transformer import transformer
from .unet import unet
from .vgg import vgg16

__all__ = [
    "MODELS",
    "PaperModel",
    "amoebanetd",
    "find",
    "gpt2_small",
    "resnet101",
    "resnext101_32x8d",
    "transformer",
    "unet",
    "vgg16",
]

Sample = Callable[[int, "torch.device | str"], Tensor]
UNITS = {"M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class PaperModel:
    """A model, and what was published about it.

    Attributes:
        name: what tables call it, family first.
        build: makes the model, on the default device.
        sample: an input of so many samples on a device, "meta" included.
        output: the shape of the model's output, without the dimension of the samples.
        published: number of parameters, with the digits and the unit that were published.
        source: who says so.
        size: of the images or sequences that the papers used, and of their mini-batches as far as
            they are known.
        extra: parameters that this model has on purpose and the published one has not.
        difference: why the published digits are others; empty where they are the same.
    """

    name: str
    build: Callable[[], nn.Sequential]
    sample: Sample
    output: tuple[int, ...]
    published: str
    source: str
    size: str
    extra: int = 0
    difference: str = ""

    @property
    def published_count(self) -> float:
        """The published number of parameters as a number."""
        digits, unit = self.published.split()
        return float(digits) * UNITS[unit]

    def on_meta(self) -> nn.Sequential:
        """The model without values: it takes no memory."""
        with torch.device("meta"):
            return self.build()

    def count(self, model: nn.Sequential | None = None) -> int:
        """The number of parameters of the model, which is built on ``meta`` if it is not given."""
        model = self.on_meta() if model is None else model
        return sum(parameter.numel() for parameter in model.parameters())

    def as_published(self, count: int) -> str:
        """A number of parameters, without the extra ones, written like the published one."""
        digits, unit = self.published.split()
        places = len(digits.partition(".")[2])
        return f"{(count - self.extra) / UNITS[unit]:.{places}f} {unit}"


def find(name: str) -> PaperModel:
    """The model of this name.

    Raises:
        KeyError: there is none; the message lists the names.
    """
    for model in MODELS:
        if model.name == name:
            return model
    raise KeyError(f"no model {name!r}; there are {', '.join(model.name for model in MODELS)}")


def images(side: int) -> Sample:
    """Square pictures of three channels."""
    return lambda samples, device="cpu": torch.rand(samples, 3, side, side, device=device)


def tokens(vocabulary: int, length: int) -> Sample:
    """Sequences of words."""
    return lambda samples, device="cpu": torch.randint(vocabulary, (samples, length), device=device)


# -- the list -------------------------------------------------------------------------------------

GPIPE = "Huang et al. 2019 (GPipe), Table 1"
TORCHGPIPE = "Kim et al. 2020 (torchgpipe)"
TORCHVISION = "documentation of torchvision"
CUT = "GPipe seems to have cut digits off"

_UNET = {
    (5, 64): "232.7 M",
    (6, 72): "362.2 M",
    (11, 128): "2.21 B",
    (24, 128): "4.99 B",
    (24, 160): "7.80 B",
    (48, 160): "15.82 B",
}
_AMOEBANET = {
    (18, 208): ("82 M", GPIPE, ""),
    (18, 256): ("122.5 M", "quoted for the model of GPipe's Table 2", ""),
    (18, 416): ("318 M", GPIPE, "torchgpipe counts 319.0 M, as here"),
    (18, 544): ("542 M", GPIPE, CUT),
    (36, 544): ("1.05 B", GPIPE, CUT),
    (72, 512): ("1.8 B", GPIPE, ""),
}
_TRANSFORMER = {
    3: ("282.2 M", ""),
    13: ("785.8 M", "unexplained; the other sizes agree"),
    103: ("5.3 B", ""),
    415: ("21.0 B", ""),
    1663: ("83.9 B", ""),
}

MODELS: tuple[PaperModel, ...] = (
    PaperModel(
        "ResNet-101", resnet101, images(224), (1000,), "44.55 M", TORCHVISION, "224x224 pixels"
    ),
    PaperModel(
        "ResNeXt-101 32x8d",
        resnext101_32x8d,
        images(224),
        (1000,),
        "88.8 M",
        TORCHVISION,
        "224x224 pixels",
    ),
    *(
        PaperModel(
            f"U-Net {convs, channels}",
            partial(unet, num_convs=convs, base_channels=channels),
            images(192),
            (1, 192, 192),
            published,
            TORCHGPIPE,
            "192x192 pixels",
        )
        for (convs, channels), published in _UNET.items()
    ),
    *(
        PaperModel(
            f"AmoebaNet-D {layers, filters}",
            partial(amoebanetd, num_layers=layers, num_filters=filters),
            images(224),
            (1000,),
            published,
            source,
            "224x224 pixels, mini-batches of 128 in GPipe's Table 1",
            difference=difference,
        )
        for (layers, filters), (published, source, difference) in _AMOEBANET.items()
    ),
    *(
        PaperModel(
            f"Transformer-{layers}",
            partial(transformer, layers),
            tokens(32_000, 1024),
            (1024, 32_000),
            published,
            GPIPE,
            "1024 tokens, mini-batches of 32",
            difference=difference,
        )
        for layers, (published, difference) in _TRANSFORMER.items()
    ),
    PaperModel("VGG-16", vgg16, images(224), (1000,), "138.36 M", TORCHVISION, "224x224 pixels"),
    PaperModel(
        "GPT-2 small",
        gpt2_small,
        tokens(50_257, 1024),
        (1024, 50_257),
        "124.44 M",
        "weights published by Radford et al. 2019",
        "1024 tokens",
        extra=50_257 * 768,  # the head has a table of its own
    ),
    PaperModel(
        "GPT-2 small, tied",
        partial(gpt2_small, tied=True),
        tokens(50_257, 1024),
        (1024, 50_257),
        "124.44 M",
        "weights published by Radford et al. 2019",
        "1024 tokens",
    ),
)
