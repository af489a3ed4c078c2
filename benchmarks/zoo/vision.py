"""Models of torchvision and timm."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import Model, takes

__all__ = ["TIMM", "TORCHVISION"]


def _vision(name: str, size: int = 64, **options: Any) -> Model:
    return Model(
        "torchvision.models", lambda m: getattr(m, name)(**options), takes((3, size, size))
    )


def _segmentation(name: str) -> Model:
    options = {"weights": None, "weights_backbone": None, "num_classes": 5}
    sample = takes((3, 64, 64))
    return Model("torchvision.models.segmentation", lambda m: getattr(m, name)(**options), sample)


TORCHVISION: dict[str, Model] = {
    "ResNet-50": _vision("resnet50"),
    "DenseNet-121": _vision("densenet121"),
    "ViT-B/16 (3 blocks)": _vision(
        "VisionTransformer", image_size=64, patch_size=16, num_layers=3, num_heads=12,
        hidden_dim=768, mlp_dim=3072,
    ),
    "MobileNetV3": _vision("mobilenet_v3_large"),
    "Inception-v3": _vision("inception_v3", 96, aux_logits=False, init_weights=False),
    "Swin-T": _vision("swin_t"),
    "ResNet-18": _vision("resnet18"),
    "ResNeXt-50": _vision("resnext50_32x4d"),
    "VGG-11 (BN)": _vision("vgg11_bn", 32),
    "AlexNet": _vision("alexnet", num_classes=5),
    "SqueezeNet": _vision("squeezenet1_1"),
    "ShuffleNetV2": _vision("shufflenet_v2_x0_5"),
    "MNASNet": _vision("mnasnet0_5"),
    "MobileNetV2": _vision("mobilenet_v2"),
    "EfficientNet-B0": _vision("efficientnet_b0"),
    "RegNetY-400MF": _vision("regnet_y_400mf"),
    "ConvNeXt-T": _vision("convnext_tiny"),
    "GoogLeNet": _vision("googlenet", aux_logits=False, init_weights=False),
    "Swin-V2-T": _vision("swin_v2_t"),
    "MaxViT-T": _vision(
        "MaxVit", input_size=(64, 64), stem_channels=8, partition_size=2, block_channels=[8, 16],
        block_layers=[1, 1], head_dim=4, stochastic_depth_prob=0.0, num_classes=5,
    ),
    "FCN (segmentation)": _segmentation("fcn_resnet50"),
    "DeepLabV3 (segmentation)": _segmentation("deeplabv3_resnet50"),
    "LR-ASPP (segmentation)": _segmentation("lraspp_mobilenet_v3_large"),
    "R3D-18 (video)": Model(
        "torchvision.models.video", lambda m: m.r3d_18(num_classes=5), takes((3, 4, 32, 32))
    ),
    "RAFT (optical flow)": Model(
        "torchvision.models.optical_flow", lambda m: m.raft_small(),
        takes((3, 128, 128), (3, 128, 128), num_flow_updates=2),
    ),
    "Faster R-CNN (detection)": Model(
        "torchvision.models.detection",
        lambda m: m.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None),
        takes(
            lambda batch: [torch.rand(3, 64, 64) for _ in range(batch)],
            lambda batch: [
                {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.ones(1).long()}
            ] * batch,
        ),
    ),
}  # fmt: skip


def _timm(name: str, size: int = 64, **options: Any) -> Model:
    return Model("timm", lambda m: m.create_model(name, **options), takes((3, size, size)))


_SIZED = {"img_size": 64}
#: Two blocks of a plain transformer.
_TWO = {"img_size": 64, "depth": 2}
TIMM: dict[str, Model] = {
    "ResNet-50": _timm("resnet50"),
    "ViT-Ti/16": _timm("vit_tiny_patch16_224", **_SIZED),
    "ConvNeXt-A": _timm("convnext_atto"),
    "MixNet-S": _timm("mixnet_s"),
    "MobileViT-XXS": _timm("mobilevit_xxs"),
    "MLP-Mixer": _timm("mixer_s32_224", **_SIZED),
    "ResMLP": _timm("resmlp_12_224", img_size=64),
    "gMLP": _timm("gmlp_s16_224", img_size=64),
    "DeiT-Ti (distilled)": _timm("deit_tiny_distilled_patch16_224", **_TWO),
    "DeiT 3": _timm("deit3_small_patch16_224", **_TWO, embed_dim=64, num_heads=4),
    "EVA-02": _timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    "DINOv3 ViT": _timm("vit_tiny_patch16_dinov3_qkvb", **_TWO),
    "BEiT": _timm("beit_base_patch16_224", **_TWO, embed_dim=48, num_heads=4),
    "NaFlexViT": _timm("naflexvit_base_patch16_gap", embed_dim=48, num_heads=4, depth=2),
    "LeViT-128S": _timm("levit_128s", 224),
    "RegNetY-200MF": _timm("regnety_002"),
    "RegNetX-200MF": _timm("regnetx_002"),
    "GhostNet": _timm("ghostnet_100"),
    "EdgeNeXt-XXS": _timm("edgenext_xx_small"),
    "PoolFormer-S12": _timm("poolformer_s12"),
    "CAFormer": _timm("caformer_s18", 32),
    "CaiT-XXS": _timm("cait_xxs24_224", **_TWO),
    "EfficientNet-Lite0": _timm("efficientnet_lite0"),
    "EfficientNetV2": _timm("efficientnetv2_rw_t", num_classes=5),
    "NFNet-L0": _timm("nfnet_l0"),
    "XCiT-N": _timm("xcit_nano_12_p16_224", **_TWO),
    "CrossViT": _timm("crossvit_9_240", 240),
    "ConViT": _timm("convit_tiny", **_TWO),
    "CoaT": _timm("coat_lite_tiny", **_SIZED),
    "DaViT": _timm("davit_tiny", embed_dims=(16, 24, 32, 48), depths=(1, 1, 1, 1),
                   num_heads=(1, 2, 2, 3)),
    "EfficientFormer": _timm("efficientformer_l1", 224),
    "EfficientViT-B0": _timm("efficientvit_b0"),
    "FastViT": _timm("fastvit_t8"),
    "GC-ViT": _timm("gcvit_xxtiny", 224),
    "HGNetV2": _timm("hgnetv2_b0"),
    "HRNet": _timm("hrnet_w18_small"),
    "InceptionNeXt": _timm("inception_next_atto"),
    "MambaOut": _timm("mambaout_femto"),
    "MobileNetV4": _timm("mobilenetv4_conv_small"),
    "MobileOne": _timm("mobileone_s0"),
    "MViTv2": _timm("mvitv2_tiny", **_SIZED),
    "PiT": _timm("pit_ti_224", 224),
    "PVT v2": _timm("pvt_v2_b0"),
    "RepViT": _timm("repvit_m0_9"),
    "RepVGG": _timm("repvgg_a0"),
    "Res2Net": _timm("res2net50_14w_8s"),
    "ResNeSt": _timm("resnest14d"),
    "ReXNet": _timm("rexnet_100"),
    "SelecSLS": _timm("selecsls42"),
    "SKNet": _timm("skresnet18"),
    "StarNet": _timm("starnet_s050"),
    "Swin v2": _timm("swinv2_cr_tiny_224", img_size=64, embed_dim=24, depths=(1, 1, 1, 1),
                     window_size=2, num_heads=(1, 2, 3, 4)),
    "TinyViT": _timm("tiny_vit_5m_224", 224),
    "TNT": _timm("tnt_s_patch16_224", **_TWO),
    "Twins": _timm("twins_svt_small", **_SIZED),
    "VOLO": _timm("volo_d1_224", **_SIZED),
    "BoTNet": _timm("botnet26t_256", 256),
    "HaloNet": _timm("halonet26t", 256),
    "LCNet": _timm("lcnet_050"),
    "DLA": _timm("dla34"),
    "VoVNet": _timm("ese_vovnet19b_slim"),
    "CSPResNet": _timm("cspresnet50"),
    "Hiera": _timm("hiera_tiny_224", 224),
}  # fmt: skip
