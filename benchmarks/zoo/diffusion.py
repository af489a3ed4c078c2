"""Models of diffusers: transformers and U-Nets that take latents and a time, and autoencoders."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import Model, Sample, mask, takes, times

__all__ = ["DIFFUSION"]

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_UNET = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
         "block_out_channels": (8, 16), "norm_num_groups": 4}  # fmt: skip


def _model(kind: str, sample: Sample, **options: Any) -> Model:
    return Model("diffusers", lambda m: getattr(m, kind)(**options), sample)


def _latents(*shape: int, **more: Any) -> Sample:
    """Images or videos, and times."""
    return takes(shape or (4, 8, 8), timestep=times, return_dict=False, **more)


def _packed(**more: Any) -> Sample:
    """Images as rows of tokens, with the places of these."""
    return takes(
        hidden_states=(16, 4), encoder_hidden_states=(5, 16), timestep=lambda b: torch.rand(b),
        return_dict=False, **more,
    )  # fmt: skip


def _places(axes: int) -> dict[str, Any]:
    return {"img_ids": torch.rand(16, axes), "txt_ids": torch.rand(5, axes)}


_FLUX = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, **_HEADS,
         "joint_attention_dim": 16}  # fmt: skip
_COGVIEW = {name: lambda b: torch.full((b, 2), 8.0) for name in
            ("original_size", "target_size", "crop_coords")}  # fmt: skip

DIFFUSION: dict[str, Model] = {
    "DiT": _model(
        "DiTTransformer2DModel", _latents(class_labels=torch.arange), num_attention_heads=2,
        attention_head_dim=8, in_channels=4, num_layers=3, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    ),
    "SD3": _model(
        "SD3Transformer2DModel", _latents(encoder_hidden_states=(5, 16), pooled_projections=(16,)),
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16,
        pooled_projection_dim=16, out_channels=4,
    ),
    "FLUX": _model(
        "FluxTransformer2DModel", _packed(**_places(3), pooled_projections=(16,)), **_FLUX,
        pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
    ),
    "FLUX 2": _model(
        "Flux2Transformer2DModel", _packed(**_places(4), guidance=lambda b: torch.ones(b)), **_FLUX,
        timestep_guidance_channels=16, axes_dims_rope=[4, 4, 4, 4],
    ),
    "Chroma": _model(
        "ChromaTransformer2DModel", _packed(**_places(3)), **_FLUX, axes_dims_rope=[4, 4, 8],
        approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1,
    ),
    "Qwen-Image": _model(
        "QwenImageTransformer2DModel", _packed(img_shapes=[(1, 4, 4)]), patch_size=2,
        in_channels=4, out_channels=4, num_layers=2, **_HEADS, joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    ),
    "PixArt": _model(
        "PixArtTransformer2DModel",
        _latents(encoder_hidden_states=(5, 16),
                 added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        num_attention_heads=2, attention_head_dim=8, num_layers=2, cross_attention_dim=16,
        sample_size=8, caption_channels=16, use_additional_conditions=False,
    ),
    "Sana": _model(
        "SanaTransformer2DModel", _latents(encoder_hidden_states=(5, 16)), in_channels=4,
        out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
        caption_channels=16, sample_size=8,
    ),
    "AuraFlow": _model(
        "AuraFlowTransformer2DModel", _latents(encoder_hidden_states=(5, 16)), sample_size=8,
        num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=16,
    ),
    "CogView 4": _model(
        "CogView4Transformer2DModel", _latents(encoder_hidden_states=(5, 16), **_COGVIEW),
        in_channels=4, out_channels=4, num_layers=2, **_HEADS, text_embed_dim=16, time_embed_dim=16,
        condition_dim=8, pos_embed_max_size=8, sample_size=8, rope_axes_dim=(8, 8),
    ),
    "Lumina 2": _model(
        "Lumina2Transformer2DModel",
        _latents(encoder_hidden_states=(5, 16), encoder_attention_mask=mask(5, 0, torch.bool)),
        sample_size=8, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 2, 2),
        axes_lens=(16, 16, 16), cap_feat_dim=16,
    ),
    "Wan": _model(
        "WanTransformer3DModel", _latents(4, 2, 4, 4, encoder_hidden_states=(5, 16)),
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=16,
    ),
    "LTX-Video": _model(
        "LTXVideoTransformer3DModel",
        takes((8, 4), encoder_hidden_states=(5, 16), timestep=times, num_frames=2, height=2,
              width=2, encoder_attention_mask=mask(5, 0), return_dict=False),
        in_channels=4, out_channels=4, **_HEADS, cross_attention_dim=32, num_layers=2,
        caption_channels=16,
    ),
    "CogVideoX": _model(
        "CogVideoXTransformer3DModel", _latents(2, 4, 4, 4, encoder_hidden_states=(5, 16)),
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=16, num_layers=2, sample_width=4, sample_height=4,
        sample_frames=5, max_text_seq_length=5,
    ),
    "HunyuanVideo": _model(
        "HunyuanVideoTransformer3DModel",
        _latents(4, 2, 4, 4, encoder_hidden_states=(5, 16), pooled_projections=(8,),
                 encoder_attention_mask=mask(5, 0), guidance=lambda b: torch.ones(b)),
        in_channels=4, out_channels=4, **_HEADS, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 8),
    ),
    "Mochi": _model(
        "MochiTransformer3DModel",
        _latents(4, 2, 4, 4, encoder_hidden_states=(5, 16), encoder_attention_mask=mask(5, 0)),
        num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=4, max_sequence_length=16,
    ),
    "prior of DALL-E 2": _model(
        "PriorTransformer",
        takes((16,), timestep=times, proj_embedding=(16,), encoder_hidden_states=(7, 16),
              return_dict=False),
        num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=16,
        num_embeddings=7, additional_embeddings=4,
    ),
    "UNet (Stable Diffusion)": _model(
        "UNet2DConditionModel", _latents(encoder_hidden_states=(5, 8)), **_UNET,
        cross_attention_dim=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet (DDPM)": _model(
        "UNet2DModel", _latents(), **_UNET, attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "UNet of videos": _model(
        "UNet3DConditionModel", _latents(4, 2, 8, 8, encoder_hidden_states=(5, 8)), **_UNET,
        cross_attention_dim=8, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    ),
    "ControlNet": _model(
        "ControlNetModel", _latents(encoder_hidden_states=(5, 8), controlnet_cond=(3, 64, 64)),
        in_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(4, 8, 8, 8),
    ),
    "AutoencoderKL": _model(
        "AutoencoderKL", takes((3, 16, 16), return_dict=False), block_out_channels=(8, 16),
        norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "tiny autoencoder": _model(
        "AutoencoderTiny", takes((3, 32, 32), return_dict=False),
        encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        num_encoder_blocks=(1, 1, 1, 1), num_decoder_blocks=(1, 1, 1, 1),
    ),
    "VQ model": _model(
        "VQModel", takes((3, 16, 16), return_dict=False), block_out_channels=(8,),
        norm_num_groups=4, num_vq_embeddings=16,
    ),
}  # fmt: skip
