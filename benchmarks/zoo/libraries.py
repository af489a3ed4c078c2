"""Models of smaller libraries: medical images, segmentation, graphs, speech, text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import syncpipe
from benchmarks.zoo.entry import Model, Sample, ids, lengths, mask, takes

__all__ = ["LIBRARIES", "graphs"]

_VOLUME = takes((1, 32, 32, 32))
_FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_SOLID = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}


def _monai(name: str, sample: Sample, **options: Any) -> Model:
    return Model("monai.networks.nets", lambda m: getattr(m, name)(**options), sample)


MONAI: dict[str, Model] = {
    "UNet": _monai("UNet", _VOLUME, **_SOLID, channels=(4, 8, 16), strides=(2, 2), num_res_units=2),
    "BasicUNet": _monai("BasicUNet", _VOLUME, **_SOLID, features=(4, 4, 8, 8, 16, 4)),
    "BasicUNet++": _monai("BasicUNetPlusPlus", takes((1, 32, 32)), **_FLAT,
                          features=(4, 4, 8, 8, 16, 4)),
    "DynUNet": _monai("DynUNet", _VOLUME, **_SOLID, kernel_size=[3] * 4, strides=[1, 2, 2, 2],
                      upsample_kernel_size=[2, 2, 2], filters=[4, 8, 8, 16]),
    "DynUNet (deep supervision)": _monai(
        "DynUNet", _VOLUME, **_SOLID, kernel_size=[3] * 4, strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2], filters=[4, 8, 8, 16], deep_supervision=True),
    "SegResNet": _monai("SegResNet", _VOLUME, **_SOLID, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
    "SegResNetDS": _monai("SegResNetDS", _VOLUME, **_SOLID, init_filters=4, blocks_down=(1, 1, 1),
                          dsdepth=2),
    "VNet": _monai("VNet", takes((1, 32, 32)), **_FLAT, dropout_dim=2),
    "UNETR": _monai("UNETR", _VOLUME, in_channels=1, out_channels=2, img_size=(32, 32, 32),
                    feature_size=4, hidden_size=24, mlp_dim=48, num_heads=3),
    "SwinUNETR": _monai("SwinUNETR", takes((1, 64, 64)), **_FLAT, feature_size=12,
                        depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4), window_size=4),
    "AttentionUnet": _monai("AttentionUnet", takes((1, 32, 32)), **_FLAT, channels=(4, 8, 16),
                            strides=(2, 2)),
    "HighResNet": _monai("HighResNet", takes((1, 32, 32)), **_FLAT),
    "VarAutoEncoder": _monai("VarAutoEncoder", takes((1, 32, 32)), spatial_dims=2,
                             in_shape=(1, 32, 32), out_channels=1, latent_size=2, channels=(4, 8),
                             strides=(2, 2)),
    "DenseNet": _monai("DenseNet", takes((1, 64, 64)), **_FLAT, init_features=8, growth_rate=4,
                       block_config=(2, 2, 2)),
    "SEResNet-50": _monai("SEResNet50", takes((1, 32, 32)), spatial_dims=2, in_channels=1,
                          layers=(1, 1, 1, 1)),
    "ViT": _monai("ViT", takes((1, 32, 32)), in_channels=1, img_size=(32, 32), patch_size=(8, 8),
                  hidden_size=24, mlp_dim=48, num_layers=3, num_heads=3, classification=True,
                  spatial_dims=2),
    "Classifier": _monai("Classifier", takes((1, 32, 32)), in_shape=(1, 32, 32), classes=5,
                         channels=(4, 8), strides=(2, 2)),
    "PatchDiscriminator": _monai("PatchDiscriminator", takes((1, 32, 32)), spatial_dims=2,
                                 channels=8, in_channels=1, num_layers_d=2),
    "MedNeXt": _monai("MedNeXt", takes((1, 32, 32)), **_FLAT, init_filters=4, kernel_size=3,
                      blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1)),
    "DiffusionModelUNet": _monai(
        "DiffusionModelUNet", takes((1, 16, 16), timesteps=ids()), spatial_dims=2, in_channels=1,
        out_channels=1, num_res_blocks=1, channels=(8, 16), attention_levels=(False, True),
        norm_num_groups=4),
    "VQ-VAE": _monai("VQVAE", takes((1, 32, 32)), spatial_dims=2, in_channels=1, out_channels=1,
                     channels=(8, 8), num_res_channels=(8, 8), num_res_layers=1,
                     downsample_parameters=((2, 4, 1, 1),) * 2,
                     upsample_parameters=((2, 4, 1, 1, 0),) * 2, embedding_dim=8),
    "VoxelMorph": _monai("VoxelMorphUNet", takes((2, 32, 32)), spatial_dims=2, in_channels=2,
                         unet_out_channels=4, channels=(4, 4, 8, 8), final_conv_channels=(4,)),
}  # fmt: skip


def _segments(name: str, encoder: str = "resnet18", size: int = 64, **options: Any) -> Model:
    def build(package: Any) -> nn.Module:
        return getattr(package, name)(encoder, encoder_weights=None, classes=2, **options)

    return Model("segmentation_models_pytorch", build, takes((3, size, size)))


SEGMENTATION: dict[str, Model] = {
    "Unet": _segments("Unet", decoder_channels=(32, 16, 16, 8, 8)),
    "Unet++": _segments("UnetPlusPlus", decoder_channels=(32, 16, 16, 8, 8)),
    "Unet (MobileNet, scSE)": _segments(
        "Unet", "mobilenet_v2", decoder_channels=(64, 32, 32, 16, 16), decoder_attention_type="scse"
    ),
    "Unet (EfficientNet, classes)": _segments(
        "Unet", "efficientnet-b0", decoder_channels=(32, 16, 16, 8, 8),
        aux_params={"classes": 3},
    ),
    "FPN": _segments("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32),
    "PSPNet": _segments("PSPNet", psp_out_channels=32),
    "DeepLabV3+": _segments("DeepLabV3Plus", decoder_channels=32),
    "Linknet": _segments("Linknet"),
    "MAnet": _segments("MAnet", decoder_channels=(32, 16, 16, 8, 8), decoder_pab_channels=8),
    "PAN": _segments("PAN", size=128, decoder_channels=16),
    "UPerNet": _segments("UPerNet", decoder_channels=16),
    "Segformer (MiT)": _segments("Segformer", "mit_b0", decoder_segmentation_channels=32),
}  # fmt: skip


def _clip(kind: str = "CLIP", **options: Any) -> Callable[[Any], nn.Module]:
    vision = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 64}
    text = {"context_length": 12, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2}
    return lambda m: getattr(m, kind)(embed_dim=16, vision_cfg=vision, text_cfg=text, **options)


OPEN_CLIP: dict[str, Model] = {
    "CLIP": Model("open_clip.model", _clip(), takes((3, 64, 64), ids(12))),
    "CLIP with a bias": Model(
        "open_clip.model", _clip(init_logit_bias=-10.0), takes((3, 64, 64), ids(12))
    ),
    "CustomTextCLIP": Model(
        "open_clip.model", _clip("CustomTextCLIP"), takes((3, 64, 64), ids(12))
    ),
    "CoCa": Model(
        "open_clip.coca_model",
        lambda m: m.CoCa(
            32, {"context_length": 12, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2,
                 "mlp_ratio": 2},
            {"context_length": 12, "vocab_size": 100, "width": 32, "heads": 4, "layers": 2,
             "embed_cls": True, "output_tokens": True},
            {"layers": 2, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 64,
             "output_tokens": True, "attentional_pool": True, "attn_pooler_queries": 4,
             "attn_pooler_heads": 2},
        ),
        takes((3, 64, 64), ids(12)),
    ),
}  # fmt: skip


def _x(kind: str = "Decoder", **options: Any) -> Model:
    more = {"num_tokens": 100, "max_seq_len": 32, **options.pop("wrapper", {})}

    def build(package: Any) -> nn.Module:
        layers = getattr(package, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        return package.TransformerWrapper(attn_layers=layers, **more)

    return Model("x_transformers", build, takes(ids(12)))


X_TRANSFORMERS: dict[str, Model] = {
    "decoder": _x(),
    "encoder": _x("Encoder"),
    "rotary, RMSNorm, SwiGLU": _x(
        rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True
    ),
    "ALiBi": _x(alibi_pos_bias=True, alibi_num_heads=2),
    "T5 bias, memory": _x(rel_pos_bias=True, attn_num_mem_kv=2),
    "sandwich norm, talking heads": _x(sandwich_norm=True, attn_pre_talking_heads=True),
    "macaron, query-key norm": _x(macaron=True, attn_qk_norm=True),
    "flash attention": _x(attn_flash=True),
    "grouped heads, gates": _x(attn_kv_heads=2, attn_gate_values=True),
    "memory tokens": _x(wrapper={"num_memory_tokens": 2}),
    "ViT": Model(
        "x_transformers",
        lambda m: m.ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=5,
            attn_layers=m.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8),
        ),
        takes((3, 32, 32)),
    ),
    "series": Model(
        "x_transformers",
        lambda m: m.ContinuousTransformerWrapper(
            dim_in=4, dim_out=2, max_seq_len=32,
            attn_layers=m.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8),
        ),
        takes((12, 4), mask=mask(12, 3, torch.bool)),
    ),
}  # fmt: skip

_VIT = {"num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "image_size": 64,
        "patch_size": 16}  # fmt: skip


def _vit(module: str, name: str, size: int = 64, *leave: str, **options: Any) -> Model:
    options = {name: value for name, value in {**_VIT, **options}.items() if name not in leave}
    return Model(
        f"vit_pytorch.{module}", lambda m: getattr(m, name)(**options), takes((3, size, size))
    )


_UNPATCHED = ("patch_size", "image_size")
VIT_PYTORCH: dict[str, Model] = {
    "ViT": _vit("vit", "ViT"),
    "SimpleViT": _vit("simple_vit", "SimpleViT"),
    "CaiT": _vit("cait", "CaiT", cls_depth=1),
    "DeepViT": _vit("deepvit", "DeepViT"),
    "PiT": _vit("pit", "PiT", depth=(1, 1)),
    "LeViT": _vit("levit", "LeViT", 64, "mlp_dim", "patch_size", mlp_mult=2, stages=2),
    "T2T-ViT": _vit("t2t", "T2TViT", 64, "patch_size"),
    "CCT": _vit("cct", "CCT", 64, "image_size", "dim", "depth", "heads", "mlp_dim", "patch_size",
                img_size=64, embedding_dim=32, num_layers=2, num_heads=2, mlp_ratio=2,
                stochastic_depth_rate=0.0, attention_dropout=0.0),
    "CrossViT": Model(
        "vit_pytorch.cross_vit",
        lambda m: m.CrossViT(image_size=48, num_classes=5, sm_dim=16, lg_dim=24, depth=1,
                             sm_patch_size=12, lg_patch_size=16, sm_enc_mlp_dim=32,
                             lg_enc_mlp_dim=32, lg_enc_depth=1, cross_attn_depth=1),
        takes((3, 48, 48))),
    "NesT": _vit("nest", "NesT", 64, "depth", "mlp_dim", patch_size=4, num_hierarchies=2,
                 block_repeats=(1, 1)),
    "MaxViT": _vit("max_vit", "MaxViT", 64, *_UNPATCHED, "heads", "mlp_dim", dim=16, depth=(1, 1),
                   window_size=4, dim_head=8),
    "MobileViT": Model(
        "vit_pytorch.mobile_vit",
        lambda m: m.MobileViT((64, 64), [24, 32, 40], [8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 48],
                              num_classes=5),
        takes((3, 64, 64))),
    "RegionViT": Model(
        "vit_pytorch.regionvit",
        lambda m: m.RegionViT(dim=(16, 32, 64, 64), depth=(1, 1, 1, 1), window_size=2,
                              num_classes=5),
        takes((3, 64, 64))),
    "XCiT": _vit("xcit", "XCiT", cls_depth=1),
    "parallel ViT": _vit("parallel_vit", "ViT"),
    "ScalableViT": _vit("scalable_vit", "ScalableViT", 64, *_UNPATCHED, "mlp_dim", dim=16,
                        depth=(1, 1), heads=(1, 2), reduction_factor=(2, 1), window_size=(4, None)),
    "ViT with registers": _vit("simple_vit_with_register_tokens", "SimpleViT"),
    "U-ViT": _vit("simple_uvit", "SimpleUViT"),
    "ViViT": Model(
        "vit_pytorch.vivit",
        lambda m: m.ViViT(image_size=32, image_patch_size=16, frames=4, frame_patch_size=2,
                          num_classes=5, dim=32, spatial_depth=1, temporal_depth=1, heads=2,
                          mlp_dim=64),
        takes((3, 4, 32, 32))),
}  # fmt: skip


def graphs(count: int) -> Any:
    """A joined batch of graphs of several sizes."""
    from torch_geometric.data import Batch, Data

    def cut(batch: Any, sizes: list[int]) -> list[Any]:
        graphs = iter(batch.to_data_list())
        return [Batch.from_data_list([*islice(graphs, size)]) for size in sizes]

    def join(batches: list[Any]) -> Any:
        return Batch.from_data_list([graph for each in batches for graph in each.to_data_list()])

    syncpipe.register_batch(Batch, lambda batch: batch.num_graphs, cut, join)
    found = []
    for k in range(count):
        nodes = 4 + k % 3
        edges = torch.tensor([[a, (a + 1) % nodes] for a in range(nodes)]).T
        found.append(
            Data(x=torch.randn(nodes, 6), edge_index=torch.cat([edges, edges.flip(0)], 1),
                 z=torch.randint(1, 9, (nodes,)), pos=torch.randn(nodes, 3))
        )  # fmt: skip
    return Batch.from_data_list(found)


class _OfGraphs(nn.Module):
    """A network of nodes, a mean over each graph, a head."""

    def __init__(self, body: nn.Module, pool: Callable[..., Tensor], width: int = 16) -> None:
        super().__init__()
        self.body, self.pool, self.head = body, pool, nn.Linear(width, 2)

    def forward(self, data: Any) -> Tensor:
        x = self.body(data.x, data.edge_index)
        return self.head(self.pool(x, data.batch, size=data.num_graphs))


class _Pooled(_OfGraphs):
    """The same as most people write it: the number of graphs is read out of ``batch``."""

    def forward(self, data: Any) -> Tensor:
        return self.head(self.pool(self.body(data.x, data.edge_index), data.batch))


class _Atoms(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, data: Any) -> Any:
        return self.body(data.z, data.pos, data.batch)


def _graph(
    kind: str, pool: str = "global_mean_pool", wrap: Any = _OfGraphs, **options: Any
) -> Model:
    def build(package: Any) -> nn.Module:
        body = getattr(package, kind)(6, 16, num_layers=3, out_channels=16, **options)
        return wrap(body, getattr(package, pool))  # type: ignore[no-any-return]

    return Model("torch_geometric.nn", build, takes(graphs))


GRAPHS: dict[str, Model] = {
    "GCN": _graph("GCN"),
    "GraphSAGE": _graph("GraphSAGE", "global_max_pool", norm="batch_norm"),
    "GIN": _graph("GIN", "global_add_pool"),
    "GAT": _graph("GAT", heads=2),
    "GATv2": _graph("GAT", heads=2, v2=True, jk="cat"),
    "PNA": _graph(
        "PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.ones(5).long()
    ),
    "EdgeCNN": _graph("EdgeCNN"),
    "GCN (graphs not counted)": _graph("GCN", wrap=_Pooled),
    "SchNet": Model(
        "torch_geometric.nn",
        lambda m: _Atoms(m.SchNet(hidden_channels=8, num_filters=8, num_interactions=2,
                                  num_gaussians=4, interaction_graph=_all_pairs)),
        takes(graphs),
    ),
}  # fmt: skip


def _all_pairs(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The edges between all atoms of a molecule, and their lengths."""
    edges = ((batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)).nonzero().T
    return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)


def _audio(name: str, sample: Sample, **options: Any) -> Model:
    return Model("torchaudio.models", lambda m: getattr(m, name)(**options), sample)


AUDIO: dict[str, Model] = {
    "wav2vec 2.0": _audio(
        "wav2vec2_model", takes((800,)), extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False,
        encoder_embed_dim=16, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=2, encoder_num_layers=2, encoder_num_heads=2,
        encoder_attention_dropout=0.0, encoder_ff_interm_features=32,
        encoder_ff_interm_dropout=0.0, encoder_dropout=0.0, encoder_layer_norm_first=False,
        encoder_layer_drop=0.0, aux_num_out=5,
    ),
    "Conformer": _audio("Conformer", takes((20, 16), lengths(20)), input_dim=16, num_heads=2,
                        ffn_dim=32, num_layers=2, depthwise_conv_kernel_size=7),
    "Conv-TasNet": _audio("ConvTasNet", takes((1, 400)), enc_num_feats=16, msk_num_feats=8,
                          msk_num_hidden_feats=16, msk_num_layers=2, msk_num_stacks=2),
    "HDemucs": _audio("HDemucs", takes((2, 16384)), sources=["a", "b"], channels=4, depth=4,
                      nfft=1024, norm_starts=4),
    "DeepSpeech": _audio("DeepSpeech", takes((1, 20, 16)), n_feature=16, n_hidden=16, n_class=5),
    "Wav2Letter": _audio("Wav2Letter", takes((16, 200)), num_classes=5, input_type="mfcc",
                         num_features=16),
    "WaveRNN": _audio("WaveRNN", takes((1, 64), (1, 16, 10)), upsample_scales=[2, 2, 2],
                      n_classes=4, hop_length=8, n_res_block=1, n_rnn=8, n_fc=8, kernel_size=3,
                      n_freq=16, n_hidden=8, n_output=8),
    "Tacotron 2": _audio(
        "Tacotron2", takes(ids(6, below=20), lengths(6), (8, 5), lengths(5)), n_mels=8, n_symbol=20,
        symbol_embedding_dim=16, encoder_embedding_dim=16, encoder_n_convolution=1,
        encoder_kernel_size=3, decoder_rnn_dim=16, prenet_dim=8, attention_rnn_dim=16,
        attention_hidden_dim=8, attention_location_n_filter=4, attention_location_kernel_size=3,
        postnet_n_convolution=2, postnet_kernel_size=3, postnet_embedding_dim=8,
    ),
    "Emformer": _audio("Emformer", takes((24, 16), lengths(24)), input_dim=16, num_heads=2,
                       ffn_dim=32, num_layers=2, segment_length=4, right_context_length=2),
}  # fmt: skip

LIBRARIES: dict[str, Model] = {
    f"{prefix} {name}": made
    for prefix, table in {
        "MONAI": MONAI, "smp": SEGMENTATION, "open_clip": OPEN_CLIP,
        "x-transformers": X_TRANSFORMERS, "vit-pytorch": VIT_PYTORCH, "PyG": GRAPHS,
        "torchaudio": AUDIO,
    }.items()
    for name, made in table.items()
}  # fmt: skip
