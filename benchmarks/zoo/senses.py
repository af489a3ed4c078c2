"""Models of transformers that see and hear, with text or without, and those of series."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.entry import Model, ids, mask, takes
from benchmarks.zoo.language import TINY, transformer

__all__ = ["SENSES"]

_IMAGE = takes(pixel_values=(3, 64, 64))
_SMALL = {"image_size": 64, "patch_size": 16}
_STAGED = {"num_hidden_layers": ..., "num_attention_heads": ...}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], **_STAGED}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 2], "window_size": 4,
         "num_heads": [1, 2, 4], **_STAGED}  # fmt: skip
_SPEECH = {
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
    "layerdrop": 0.0, "vocab_size": 30, "apply_spec_augment": False,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1],
           "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
_DETECTOR = {**_BART, "num_queries": 6, "num_labels": 5, "use_timm_backbone": False,
             "use_pretrained_backbone": False}  # fmt: skip
_TEXT_AND_IMAGE = takes(input_ids=ids(12), pixel_values=(3, 64, 64))


def _vision(name: str, kind: str = "ForImageClassification", **options: Any) -> Model:
    return transformer(f"{name}{kind}", f"{name}Config", _IMAGE, **options)


def _speech(name: str, kind: str = "ForCTC", **options: Any) -> Model:
    return transformer(f"{name}{kind}", f"{name}Config", takes((800,)), **{**_SPEECH, **options})


def _with_backbone(name: str, kind: str, backbone: str = "ResNet", **options: Any) -> Model:
    def build(package: Any) -> Any:
        made = getattr(package, f"{backbone}Config")(**_RESNET)
        more = {"backbone_config": made, **options}
        return transformer(kind, f"{name}Config", _IMAGE, **more).build(package)

    return Model("transformers", build, _IMAGE)


def _image_tokens(count: int, token: int = 99) -> Any:
    """Ids in which so many stand for a part of the image."""
    return lambda batch: torch.cat(
        [torch.full((batch, count), token), torch.randint(3, 90, (batch, 8))], 1
    )


def _llava(name: str, text: str = "llama", **options: Any) -> Model:
    def build(package: Any) -> Any:
        vision = {**TINY, **_SMALL, "model_type": "clip_vision_model"}
        config = getattr(package, f"{name}Config")(
            text_config={**TINY, "model_type": text, "num_key_value_heads": 2, "head_dim": 8},
            vision_config={**vision, **options.pop("vision", {})}, **options,
        )  # fmt: skip
        return getattr(package, f"{name}ForConditionalGeneration")(config)

    sample = takes(
        input_ids=_image_tokens(16), pixel_values=(3, 64, 64), attention_mask=mask(24, 0),
        use_cache=False,
    )  # fmt: skip
    return Model("transformers", build, sample)


def _pair(name: str, **options: Any) -> Model:
    """A model of texts and images, without the matrix of all with all in its output."""
    return transformer(
        f"{name}Model", f"{name}Config", _TEXT_AND_IMAGE,
        text_config=TINY, vision_config={**TINY, **_SMALL}, projection_dim=16, **options,
    )  # fmt: skip


SENSES: dict[str, Model] = {
    "ViT": _vision("ViT", **_SMALL),
    "DeiT": _vision("DeiT", **_SMALL),
    "DINOv2": _vision("Dinov2", "Model", **_SMALL),
    "DINOv2 with registers": _vision("Dinov2WithRegisters", "Model", **_SMALL),
    "DINOv3": _vision("DINOv3ViT", "Model", **_SMALL),
    "BEiT": _vision("Beit", **_SMALL, use_relative_position_bias=True),
    "I-JEPA": _vision("IJepa", **_SMALL),
    "ViT-MSN": _vision("ViTMSN", **_SMALL),
    "Hiera": _vision("Hiera", image_size=[64, 64], embed_dim=8, depths=[1, 1, 1, 1],
                     num_heads=[1, 2, 4, 8]),
    "Swin": _vision("Swin", **_SWIN),
    "Swin v2": _vision("Swinv2", **_SWIN),
    "Swin2SR": _vision("Swin2SR", "ForImageSuperResolution", image_size=16, patch_size=1,
                       embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4,
                       **_STAGED),
    "ConvNeXt": _vision("ConvNext", **_STAGES),
    "ConvNeXt v2": _vision("ConvNextV2", **_STAGES),
    "ResNet": _vision("ResNet", embedding_size=8, **_STAGES),
    "RegNet": _vision("RegNet", embedding_size=8, **_STAGES, groups_width=8, layer_type="y"),
    "BiT": _vision("Bit", embedding_size=8, **_STAGES, num_groups=4, layer_type="preactivation"),
    "MobileNetV2": _vision("MobileNetV2", image_size=64),
    "MobileViT": _vision("MobileViT", image_size=64, hidden_sizes=[16, 24, 32],
                         neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_attention_heads=2),
    "PoolFormer": _vision("PoolFormer", **_STAGES),
    "PVT v2": _vision("PvtV2", image_size=64, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
                      num_attention_heads=[1, 2, 3, 4], sr_ratios=[8, 4, 2, 1]),
    "CvT": _vision("Cvt", embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3],
                    **_STAGED),
    "FocalNet": _vision("FocalNet", image_size=64, embed_dim=8, depths=[1, 1, 1, 1],
                        hidden_sizes=[8, 16, 32, 64]),
    "SwiftFormer": _vision("SwiftFormer", image_size=64, embed_dims=[8, 16, 24, 32],
                           depths=[1, 1, 2, 1]),
    "SegFormer": _vision("Segformer", "ForSemanticSegmentation", hidden_sizes=[8, 16, 24, 32],
                         depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
                         decoder_hidden_size=16),
    "UPerNet": _with_backbone("UperNet", "UperNetForSemanticSegmentation", "ConvNext",
                              pool_scales=[1, 2], auxiliary_in_channels=32),
    "DPT": _vision("DPT", "ForDepthEstimation", **_SMALL, backbone_out_indices=[0, 1, 2],
                   neck_hidden_sizes=[8, 8, 16], fusion_hidden_size=8, is_hybrid=False,
                   num_hidden_layers=4),
    "GLPN": _vision("GLPN", "ForDepthEstimation", hidden_sizes=[8, 16, 24, 32],
                    depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16),
    "YOLOS": _vision("Yolos", "ForObjectDetection", image_size=[64, 64], patch_size=16,
                     num_detection_tokens=6),
    "DETR": _with_backbone("Detr", "DetrForObjectDetection", **_DETECTOR),
    "Conditional DETR": _with_backbone("ConditionalDetr", "ConditionalDetrForObjectDetection",
                                       **_DETECTOR),
    "Deformable DETR": _with_backbone("DeformableDetr", "DeformableDetrForObjectDetection",
                                      **_DETECTOR, num_feature_levels=3),
    "ViTMAE": _vision("ViTMAE", "ForPreTraining", **_SMALL, decoder_hidden_size=16,
                      decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
                      decoder_intermediate_size=32),
    "VideoMAE": transformer("VideoMAEForVideoClassification", "VideoMAEConfig",
                            takes(pixel_values=(4, 3, 32, 32)), image_size=32, patch_size=16,
                            num_frames=4),
    "TimeSformer": transformer("TimesformerForVideoClassification", "TimesformerConfig",
                               takes(pixel_values=(4, 3, 32, 32)), image_size=32, patch_size=16,
                               num_frames=4),
    "ViViT": transformer("VivitForVideoClassification", "VivitConfig",
                         takes(pixel_values=(4, 3, 32, 32)), image_size=32, num_frames=4,
                         tubelet_size=[2, 16, 16]),
    "Wav2Vec2": _speech("Wav2Vec2"),
    "HuBERT": _speech("Hubert"),
    "WavLM": _speech("WavLM", num_buckets=16),
    "UniSpeech": _speech("UniSpeech"),
    "SEW": _speech("SEW", squeeze_factor=2),
    "SEW-D": _speech("SEWD", squeeze_factor=2, feature_layer_norm_eps=1e-5),
    "data2vec audio": _speech("Data2VecAudio"),
    "Wav2Vec2-Conformer": _speech("Wav2Vec2Conformer"),
    "Wav2Vec2-BERT": transformer("Wav2Vec2BertForCTC", "Wav2Vec2BertConfig",
                                 takes(input_features=(20, 16)), **{
                                     **_SPEECH, "feature_projection_input_dim": 16}),
    "AST": transformer("ASTForAudioClassification", "ASTConfig", takes((40, 16)), patch_size=8,
                       frequency_stride=8, time_stride=8, max_length=40, num_mel_bins=16),
    "Speech2Text": transformer("Speech2TextForConditionalGeneration", "Speech2TextConfig",
                               takes(input_features=(40, 16), decoder_input_ids=ids(7),
                                     use_cache=False),
                               **_BART, input_feat_per_channel=16, conv_channels=16,
                               max_source_positions=64, max_target_positions=64),
    "Whisper": transformer("WhisperForConditionalGeneration", "WhisperConfig",
                           takes(input_features=(20, 40), decoder_input_ids=ids(7),
                                 use_cache=False),
                           **_BART, num_mel_bins=20, max_source_positions=20,
                           max_target_positions=32),
    "Moonshine": transformer("MoonshineForConditionalGeneration", "MoonshineConfig",
                             takes((2000,), decoder_input_ids=ids(7), use_cache=False),
                             encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
                             encoder_num_attention_heads=4, decoder_num_attention_heads=4),
    "EnCodec": transformer("EncodecModel", "EncodecConfig", takes((1, 320)), num_filters=4,
                           codebook_size=16, hidden_size=16, upsampling_ratios=[4, 2],
                           num_lstm_layers=1, use_causal_conv=False, normalize=False),
    "CLIP": _pair("CLIP"),
    "SigLIP": _pair("Siglip"),
    "CLIP vision": transformer("CLIPVisionModelWithProjection", "CLIPVisionConfig", _IMAGE,
                               **_SMALL, projection_dim=16),
    "SigLIP vision": transformer("SiglipVisionModel", "SiglipVisionConfig", _IMAGE, **_SMALL),
    "LLaVA": _llava("Llava", image_token_index=99, image_token_id=99),
    "ViP-LLaVA": _llava("VipLlava", image_token_index=99, image_token_id=99,
                        vision_feature_layers=[-2, -1]),
    "PaliGemma": _llava("PaliGemma", "gemma", image_token_index=99, image_token_id=99,
                        projection_dim=32, vision={"model_type": "siglip_vision_model",
                                                   "projection_dim": 32}),
    "BLIP-2": transformer("Blip2QFormerModel", "Blip2QFormerConfig",
                          takes((5, 32), encoder_hidden_states=(6, 32)), encoder_hidden_size=32),
    "ViLT": transformer("ViltForQuestionAnswering", "ViltConfig", _TEXT_AND_IMAGE, **_SMALL,
                        num_labels=5),
    "GIT": transformer("GitForCausalLM", "GitConfig",
                       takes(input_ids=ids(12), pixel_values=(3, 64, 64), use_cache=False),
                       vision_config={**TINY, **_SMALL}),
    "TrOCR decoder": transformer("TrOCRForCausalLM", "TrOCRConfig",
                                 takes(ids(12), use_cache=False), **_BART,
                                 use_learned_position_embeddings=True),
    "LayoutLMv3": transformer("LayoutLMv3ForTokenClassification", "LayoutLMv3Config",
                              takes(ids(12), bbox=ids(12, 4), pixel_values=(3, 64, 64)),
                              input_size=64, patch_size=16, coordinate_size=4, shape_size=8,
                              max_2d_position_embeddings=128, rel_pos_bins=8, rel_2d_pos_bins=8),
    "VisualBERT": transformer("VisualBertModel", "VisualBertConfig",
                              takes(input_ids=ids(12), visual_embeds=(5, 16)),
                              visual_embedding_dim=16),
    "LXMERT": transformer("LxmertModel", "LxmertConfig",
                          takes(input_ids=ids(12), visual_feats=(5, 16), visual_pos=(5, 4)),
                          visual_feat_dim=16, l_layers=1, x_layers=1, r_layers=1),
    "Perceiver": transformer("PerceiverForMaskedLM", "PerceiverConfig", takes(ids(12)),
                             num_latents=6, d_latents=16, d_model=16, num_blocks=1,
                             num_self_attends_per_block=2, num_self_attention_heads=2,
                             num_cross_attention_heads=2, qk_channels=16, v_channels=16),
    "Decision Transformer": transformer(
        "DecisionTransformerModel", "DecisionTransformerConfig",
        takes(states=(4, 6), actions=(4, 3), rewards=(4, 1), returns_to_go=(4, 1),
              timesteps=ids(4, below=30), attention_mask=mask(4, 0)),
        state_dim=6, act_dim=3, max_ep_len=32, use_cache=False, n_layer=2, n_head=4,
        n_positions=64),
    "PatchTST": transformer("PatchTSTForPrediction", "PatchTSTConfig",
                            takes(past_values=(32, 2)), num_input_channels=2, context_length=32,
                            patch_length=8, patch_stride=8, d_model=16, ffn_dim=32,
                            prediction_length=4),
    "PatchTSMixer": transformer("PatchTSMixerForPrediction", "PatchTSMixerConfig",
                                takes(past_values=(32, 2)), num_input_channels=2,
                                context_length=32, patch_length=8, patch_stride=8, d_model=16,
                                prediction_length=4),
}  # fmt: skip
