"""Models of torchvision, timm and transformers, converted and compared.

``syncpipe.sequential`` makes layers of each, and a pipe of two stages runs them in micro-batches.
Outputs and gradients are compared with those of the plain model that is fed the micro-batches.
Random weights, small configurations.
"""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Group, Options, Part
from syncpipe import Pipe, sequential
from syncpipe.compare import compare
from syncpipe.data import tensors_in
from syncpipe.layers.conversion.sequential import Converted

__all__ = ["DOCUMENTED", "MODELS", "Model"]

PACKAGES = ("torchvision", "timm", "transformers", "diffusers")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A model of a package, with a sample.

    Attributes:
        package: where it is from.
        build: makes it, of the package.
        sample: makes arguments for so many samples.
    """

    package: str
    build: Callable[[Any], nn.Module]
    sample: Callable[[int], Arguments]

    def make(self, batch: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, and arguments for so many samples."""
        found = __import__(self.package)
        if self.package == "torchvision":
            found = __import__("torchvision.models").models
        return self.build(found), *self.sample(batch)


def _image(size: int = 64) -> Callable[[int], Arguments]:
    return lambda batch: ((torch.randn(batch, 3, size, size),), {})


def _ids(*, mask: bool = False, length: int = 12, **more: Any) -> Callable[[int], Arguments]:
    def sample(batch: int) -> Arguments:
        ids = torch.randint(2, 90, (batch, length))
        kwargs = dict(more)
        if mask:
            kwargs["attention_mask"] = torch.ones_like(ids)
            kwargs["attention_mask"][:, length - 3 :] = 0
        return (ids,), kwargs

    return sample


def _both(batch: int) -> Arguments:
    ids = torch.randint(2, 90, (batch, 12))
    return (), {"input_ids": ids, "decoder_input_ids": ids[:, :7], "use_cache": False}


def _pixels(size: int = 64) -> Callable[[int], Arguments]:
    return lambda batch: ((), {"pixel_values": torch.randn(batch, 3, size, size)})


def _wave(batch: int) -> Arguments:
    return (torch.randn(batch, 800),), {}


_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_BERT = {"vocab_size": 100, **_SIZES}
_GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
_BART = {"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
         "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1,
         "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}  # fmt: skip
_SPEECH = {**_SIZES, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
           "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
           "num_feat_extract_layers": 2, "layerdrop": 0.0, "vocab_size": 30,
           "apply_spec_augment": False}  # fmt: skip
_VIT = {**_SIZES, "image_size": 64, "patch_size": 16}


def _vision(name: str, size: int = 64, **options: Any) -> Model:
    return Model("torchvision", lambda m: getattr(m, name)(**options), _image(size))


def _segmentation(name: str) -> Model:
    options = {"weights": None, "weights_backbone": None, "num_classes": 5}
    return Model("torchvision", lambda m: getattr(m.segmentation, name)(**options), _image())


def _timm(name: str, size: int = 64, **options: Any) -> Model:
    return Model("timm", lambda m: m.create_model(name, **options), _image(size))


def _hf(kind: str, config: str, sample: Callable[[int], Arguments], **options: Any) -> Model:
    return Model("transformers", lambda m: getattr(m, kind)(getattr(m, config)(**options)), sample)


def _diffusion(kind: str, sample: Callable[[int], Arguments], **options: Any) -> Model:
    return Model("diffusers", lambda m: getattr(m, kind)(**options), sample)


def _latents(*, text: int = 0, size: int = 8, **more: Callable[[int], Tensor]) -> Any:
    """Images, times, and what the model takes besides; ``text``: of so many numbers a token."""

    def sample(batch: int) -> Arguments:
        kwargs: dict[str, Any] = {name: make(batch) for name, make in more.items()}
        kwargs |= {"timestep": torch.arange(1, batch + 1), "return_dict": False}
        if text:
            kwargs["encoder_hidden_states"] = torch.randn(batch, 5, text)
        return (torch.randn(batch, 4, size, size),), kwargs

    return sample


def _packed_latents(batch: int) -> Arguments:
    sizes = {
        "hidden_states": (16, 4),
        "encoder_hidden_states": (5, 16),
        "pooled_projections": (16,),
    }
    kwargs: dict[str, Any] = {name: torch.randn(batch, *size) for name, size in sizes.items()}
    places = {"img_ids": torch.rand(16, 3), "txt_ids": torch.rand(5, 3)}
    return (), {**kwargs, **places, "timestep": torch.rand(batch), "return_dict": False}


def _decoder(name: str, **options: Any) -> Model:
    return _hf(f"{name}ForCausalLM", f"{name}Config", _ids(mask=True, use_cache=False), **options)


#: Those that docs/how-to.md names; the tests train them.
DOCUMENTED: dict[str, Model] = {
    "torchvision ResNet-50": _vision("resnet50"),
    "torchvision DenseNet-121": _vision("densenet121"),
    "torchvision ViT-B/16 (3 blocks)": _vision(
        "VisionTransformer", image_size=64, patch_size=16, num_layers=3, num_heads=12,
        hidden_dim=768, mlp_dim=3072,
    ),
    "torchvision MobileNetV3": _vision("mobilenet_v3_large"),
    "torchvision Inception-v3": _vision(
        "inception_v3", 96, aux_logits=False, init_weights=False
    ),
    "torchvision Swin-T": _vision("swin_t"),
    "timm ResNet-50": _timm("resnet50"),
    "timm ViT-Ti/16": _timm("vit_tiny_patch16_224", img_size=64),
    "timm ConvNeXt-A": _timm("convnext_atto"),
    "HF GPT-2 (tied)": _hf("GPT2LMHeadModel", "GPT2Config", _ids(use_cache=False), **_GPT2),
    "HF BERT (mask)": _hf(
        "BertForSequenceClassification", "BertConfig", _ids(mask=True), **_BERT
    ),
    "HF Llama (mask)": _decoder("Llama", **_BERT, num_key_value_heads=2),
    "HF T5 encoder (mask)": _hf("T5EncoderModel", "T5Config", _ids(mask=True), **_T5),
    "diffusers DiT": _diffusion(
        "DiTTransformer2DModel", _latents(class_labels=torch.arange), num_attention_heads=2,
        attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    ),
    "diffusers SD3": _diffusion(
        "SD3Transformer2DModel",
        _latents(text=16, pooled_projections=lambda batch: torch.randn(batch, 16)),
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=16, out_channels=4,
    ),
    "diffusers FLUX": _diffusion(
        "FluxTransformer2DModel", _packed_latents, patch_size=1, in_channels=4, num_layers=1,
        num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
    ),
}  # fmt: skip

MODELS: dict[str, Model] = {
    **DOCUMENTED,
    "diffusers UNet (Stable Diffusion)": _diffusion(
        "UNet2DConditionModel", _latents(text=8), sample_size=8, in_channels=4, out_channels=4,
        layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "torchvision ResNet-18": _vision("resnet18"),
    "torchvision ResNeXt-50": _vision("resnext50_32x4d"),
    "torchvision VGG-11 (BN)": _vision("vgg11_bn"),
    "torchvision AlexNet": _vision("alexnet"),
    "torchvision SqueezeNet": _vision("squeezenet1_1"),
    "torchvision ShuffleNetV2": _vision("shufflenet_v2_x0_5"),
    "torchvision MNASNet": _vision("mnasnet0_5"),
    "torchvision EfficientNet-B0": _vision("efficientnet_b0"),
    "torchvision RegNetY-400MF": _vision("regnet_y_400mf"),
    "torchvision ConvNeXt-T": _vision("convnext_tiny"),
    "torchvision GoogLeNet": _vision("googlenet", aux_logits=False, init_weights=False),
    "torchvision Swin-V2-T": _vision("swin_v2_t"),
    "torchvision FCN (segmentation)": _segmentation("fcn_resnet50"),
    "torchvision DeepLabV3 (segmentation)": _segmentation("deeplabv3_resnet50"),
    "torchvision LR-ASPP (segmentation)": _segmentation("lraspp_mobilenet_v3_large"),
    "torchvision R3D-18 (video)": Model(
        "torchvision",
        lambda m: m.video.r3d_18(num_classes=5),
        lambda batch: ((torch.randn(batch, 3, 4, 32, 32),), {}),
    ),
    "torchvision Faster R-CNN (detection)": Model(
        "torchvision",
        lambda m: m.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None
        ),
        lambda batch: (([torch.rand(3, 64, 64) for _ in range(batch)],), {}),
    ),
    "timm MixNet-S": _timm("mixnet_s"),
    "timm MobileViT-XXS": _timm("mobilevit_xxs"),
    "timm MLP-Mixer": _timm("mixer_s32_224", img_size=64),
    "timm DeiT-Ti (distilled)": _timm("deit_tiny_distilled_patch16_224", img_size=64),
    "timm LeViT-128S": _timm("levit_128s", 224),
    "timm RegNetY-200MF": _timm("regnety_002"),
    "timm GhostNet": _timm("ghostnet_100"),
    "timm EdgeNeXt-XXS": _timm("edgenext_xx_small"),
    "timm PoolFormer-S12": _timm("poolformer_s12"),
    "timm CaiT-XXS": _timm("cait_xxs24_224", img_size=64),
    "timm EfficientNet-Lite0": _timm("efficientnet_lite0"),
    "timm NFNet-L0": _timm("nfnet_l0"),
    "timm XCiT-N": _timm("xcit_nano_12_p16_224", img_size=64),
    "HF OPT": _decoder("OPT", vocab_size=100, hidden_size=32, num_hidden_layers=3, ffn_dim=64,
                       num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32),
    "HF GPT-NeoX": _decoder("GPTNeoX", **_BERT),
    "HF GPT-J": _decoder("GPTJ", vocab_size=100, n_embd=32, n_layer=3, n_head=4, n_positions=64,
                         rotary_dim=4),
    "HF Mistral": _decoder("Mistral", **_BERT, num_key_value_heads=2),
    "HF Qwen2": _decoder("Qwen2", **_BERT, num_key_value_heads=2),
    "HF Gemma": _decoder("Gemma", **_BERT, num_key_value_heads=2, head_dim=8),
    "HF Phi": _decoder("Phi", **_BERT),
    "HF Falcon": _decoder("Falcon", vocab_size=100, hidden_size=32, num_hidden_layers=3,
                          num_attention_heads=4),
    "HF BLOOM": _decoder("Bloom", vocab_size=100, hidden_size=32, n_layer=3, n_head=4),
    "HF Mixtral": _decoder("Mixtral", **_BERT, num_key_value_heads=2, num_local_experts=4),
    "HF Mamba": _hf("MambaForCausalLM", "MambaConfig", _ids(use_cache=False), vocab_size=100,
                    hidden_size=32, num_hidden_layers=3, state_size=4),
    "HF RoBERTa": _hf("RobertaForMaskedLM", "RobertaConfig", _ids(mask=True), **_BERT),
    "HF DistilBERT": _hf("DistilBertForSequenceClassification", "DistilBertConfig",
                         _ids(mask=True), vocab_size=100, dim=32, n_layers=3, n_heads=4,
                         hidden_dim=64),
    "HF ELECTRA": _hf("ElectraForTokenClassification", "ElectraConfig", _ids(mask=True),
                      embedding_size=32, **_BERT),
    "HF ALBERT": _hf("AlbertForMaskedLM", "AlbertConfig", _ids(mask=True), embedding_size=16,
                     **_BERT),
    "HF DeBERTa-v2": _hf("DebertaV2ForSequenceClassification", "DebertaV2Config",
                         _ids(mask=True), **_BERT),
    "HF T5": _hf("T5ForConditionalGeneration", "T5Config", _both, **_T5),
    "HF BART": _hf("BartForConditionalGeneration", "BartConfig", _both, **_BART),
    "HF Pegasus": _hf("PegasusForConditionalGeneration", "PegasusConfig", _both, **_BART),
    "HF Marian": _hf("MarianMTModel", "MarianConfig", _both,
                     **{**_BART, "decoder_vocab_size": 100}),
    "HF ViT": _hf("ViTForImageClassification", "ViTConfig", _pixels(), **_VIT),
    "HF DeiT": _hf("DeiTForImageClassification", "DeiTConfig", _pixels(), **_VIT),
    "HF DINOv2": _hf("Dinov2Model", "Dinov2Config", _pixels(), **_VIT),
    "HF ConvNeXt": _hf("ConvNextForImageClassification", "ConvNextConfig", _pixels(),
                       hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    "HF ResNet": _hf("ResNetForImageClassification", "ResNetConfig", _pixels(),
                     embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    "HF SegFormer": _hf("SegformerForSemanticSegmentation", "SegformerConfig", _pixels(),
                        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                        num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16),
    "HF Wav2Vec2": _hf("Wav2Vec2ForCTC", "Wav2Vec2Config", _wave, **_SPEECH),
    "HF HuBERT": _hf("HubertForCTC", "HubertConfig", _wave, **_SPEECH),
    "HF Whisper": _hf(
        "WhisperForConditionalGeneration", "WhisperConfig",
        lambda batch: ((), {"input_features": torch.randn(batch, 20, 40), "use_cache": False,
                            "decoder_input_ids": torch.randint(2, 90, (batch, 7))}),
        **{**_BART, "num_mel_bins": 20, "max_source_positions": 20, "max_target_positions": 32,
           "max_position_embeddings": None},
    ),
    "HF CLIP": _hf("CLIPModel", "CLIPConfig", lambda batch: ((), {
        "input_ids": torch.randint(2, 90, (batch, 12)),
        "pixel_values": torch.randn(batch, 3, 64, 64)}),
        text_config=_BERT, vision_config=_VIT),
}  # fmt: skip


def loss_of(output: Any) -> Tensor:
    """A number of all tensors in an output."""
    found = [t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack(found).sum()


def chunked(args: tuple[Any, ...], kwargs: dict[str, Any], i: int) -> Arguments:
    """The arguments of one of two micro-batches: cut is what has the size of the first tensor."""
    size = len(tensors_in((args, kwargs))[0])

    def cut(value: Any) -> Any:
        return value.chunk(2)[i] if isinstance(value, Tensor) and len(value) == size else value

    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


def compared(model: nn.Module, layers: Converted, args: Any, kwargs: Any) -> str:
    """Whether a pipe of the layers does what the model does, with micro-batches of 2 and 1."""
    plain = copy.deepcopy(model)
    half = max(1, len(layers) // 2)
    sizes = [half, len(layers) - half] if len(layers) > 1 else [1]
    pipe = Pipe(layers, sizes, devices=["cpu:0", "cpu:1"][: len(sizes)], chunks=2)
    plain.eval()  # dropout draws other numbers in a pipe
    pipe.eval()
    pieces = [chunked(args, kwargs, i) for i in range(2)]
    ours = dict(enumerate(tensors_in(pipe(*args, **kwargs))))
    parts = zip(*(tensors_in(plain(*a, **k)) for a, k in pieces), strict=True)
    theirs: dict[Any, Any] = dict(enumerate(map(torch.cat, parts)))
    named = dict(zip(inspect.signature(plain.forward).parameters, args, strict=False))
    pipe.train_batch({**named, **kwargs}, loss_fn=loss_of)
    for (a, k), weight in zip(pieces, (2 / 3, 1 / 3), strict=True):
        (loss_of(plain(*a, **k)) * weight).backward()
    found = compare(
        {**ours, **{name: p.grad for name, p in pipe.named_parameters()}},
        {**theirs, **{name: p.grad for name, p in plain.named_parameters()}},
    )
    words = {"equal": "to the bit", "rounding": "to rounding"}
    return words.get(found.status, f"no: {found.at} {found.words}")


def row(name: str, made: Model) -> dict[str, Any]:
    """What became of a model."""
    torch.manual_seed(0)
    model, args, kwargs = made.make(batch=2)
    told: dict[str, Any] = {"model": name}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            layers = sequential(model, *args, **kwargs)
        except Exception as error:
            said = str(error).partition("\n")[0]
            return told | {"left whole": f"{type(error).__name__}: {said}"[:150]}
    seconds = time.perf_counter() - start
    signature: Any = layers[0]._model_signature
    pinned = any("batches of" in str(warning.message) for warning in caught)
    try:
        _, args, kwargs = made.make(batch=3)
        equal = "-" if pinned else compared(model, layers, args, kwargs)
    except Exception as error:
        equal = f"{type(error).__name__}: {error}".partition("\n")[0][:100]
    types = dict.fromkeys(type(model.get_submodule(w.path)).__name__ for w in layers.whole)
    return told | {
        "layers": len(layers),
        "left whole": ", ".join(types) or "none",
        "other batch": "no" if pinned else "yes",
        "other sizes": "yes" if any(d for _, d in signature.free) else "no",
        "equal": equal,
        "s": round(seconds),
    }


def run(package: str, options: Options) -> Part:
    """Converts all of a package."""
    part = Part(
        f"Models of {package}",
        "Random weights, small configurations, sample of 2.",
        {
            "left whole": "modules with others inside that were not inlined.",
            "equal": "outputs and gradients, in a pipe of two stages with micro-batches of 2 and 1 "
            "in eval(), and those of the plain model that is fed the micro-batches.",
            "s": "seconds of the conversion, no measurement.",
        },
        over="One run.",
    )
    found = [(name, made) for name, made in MODELS.items() if made.package == package]
    for name, made in found[: 1 if options.quick else None]:
        try:
            part.rows.append(row(name, made))
        except ImportError as error:
            part.tell(f"Not installed: {error}.")
    return part


GROUP = Group(
    "converted",
    "Converted models",
    {name: partial(run, name) for name in PACKAGES},
    versions=PACKAGES,
)
