"""Language models of transformers: decoders, encoders, and both."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.entry import Model, Sample, ids, mask, takes

__all__ = ["DECODERS", "ENCODERS", "TINY", "TRANSLATORS", "transformer"]

#: What most configurations call their sizes.
TINY: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16}  # fmt: skip
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
           "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
           "first_k_dense_replace": 1, "n_shared_experts": 1, "topk_method": "greedy"}  # fmt: skip
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_MAMBA = {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
           "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
           "num_hidden_layers": 4}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 3,
       "num_heads": 4, "decoder_start_token_id": 0}  # fmt: skip
_TEXT = takes(ids(12), attention_mask=mask(12))
_UNCACHED = takes(ids(12), attention_mask=mask(12), use_cache=False)
_BOTH = takes(input_ids=ids(12), decoder_input_ids=ids(7), use_cache=False)


def transformer(kind: str, config: str, sample: Sample, **options: Any) -> Model:
    """A model of transformers, of a tiny configuration with these options (``...``: left out)."""
    chosen = {name: value for name, value in {**TINY, **options}.items() if value is not ...}

    def build(package: Any) -> Any:
        return getattr(package, kind)(getattr(package, config)(**chosen))

    return Model("transformers", build, sample)


def _decoder(name: str, sample: Sample = _UNCACHED, **options: Any) -> Model:
    config = options.pop("config", f"{name}Config")
    return transformer(options.pop("kind", f"{name}ForCausalLM"), config, sample, **options)


DECODERS: dict[str, Model] = {
    "GPT-2 (tied)": transformer(
        "GPT2LMHeadModel", "GPT2Config", takes(ids(12), use_cache=False), **_GPT2
    ),
    "Llama (mask)": _decoder("Llama", **_GROUPED),
    "OPT": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "GPT-Neo": _decoder(
        "GPTNeo", num_layers=2, num_hidden_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]],
    ),
    "GPT-NeoX": _decoder("GPTNeoX"),
    "GPT-J": _decoder("GPTJ", **_GPT2, rotary_dim=4),
    "GPT-BigCode": _decoder("GPTBigCode", **_GPT2),
    "CodeGen": _decoder("CodeGen", **_GPT2, rotary_dim=4),
    "CTRL": _decoder("CTRL", kind="CTRLLMHeadModel", **_GPT2, dff=64),
    "XGLM": _decoder("XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=64),
    "BioGPT": _decoder("BioGpt"),
    "Mistral": _decoder("Mistral", **_GROUPED),
    "Ministral": _decoder("Ministral", **_HEADS),
    "Mixtral": _decoder("Mixtral", **_GROUPED, num_local_experts=4),
    "Qwen2": _decoder("Qwen2", **_GROUPED),
    "Qwen2-MoE": _decoder("Qwen2Moe", **_GROUPED, **_EXPERTS, shared_expert_intermediate_size=16),
    "Qwen3": _decoder("Qwen3", **_HEADS),
    "Qwen3-MoE": _decoder("Qwen3Moe", **_HEADS, **_EXPERTS),
    "Qwen3-Next": _decoder("Qwen3Next", **_HEADS, **_EXPERTS, **_LINEAR,
                           shared_expert_intermediate_size=16),
    "Gemma": _decoder("Gemma", **_HEADS),
    "Gemma 2": _decoder("Gemma2", **_HEADS),
    "Gemma 3": _decoder("Gemma3", config="Gemma3TextConfig", **_HEADS),
    "Gemma 3n": _decoder("Gemma3n", config="Gemma3nTextConfig", **{
        **_HEADS, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "intermediate_size": [64] * 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0] * 3}),
    "Phi": _decoder("Phi"),
    "Phi-3 and 4": _decoder("Phi3", **_GROUPED),
    "Phi-3.5-MoE": _decoder("Phimoe", **_GROUPED, num_local_experts=4),
    "Falcon": _decoder("Falcon"),
    "Falcon H1": _decoder("FalconH1", **_HEADS, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
                          mamba_n_groups=1, mamba_d_state=4, mamba_chunk_size=8),
    "BLOOM": _decoder("Bloom", n_layer=3, n_head=4),
    "OLMo": _decoder("Olmo"),
    "OLMo 2": _decoder("Olmo2"),
    "OLMo 3": _decoder("Olmo3"),
    "OLMoE": _decoder("Olmoe", **_EXPERTS),
    "DeepSeek-V2": _decoder("DeepseekV2", **_EXPERTS, **_LATENT),
    "DeepSeek-V3": _decoder("DeepseekV3", **_EXPERTS, **_LATENT),
    "GPT-OSS": _decoder("GptOss", **_HEADS, **_EXPERTS),
    "Mamba": _decoder("Mamba", takes(ids(12), use_cache=False), **_MAMBA),
    "Mamba 2": _decoder("Mamba2", takes(ids(12), use_cache=False), **_MAMBA),
    "Falcon Mamba": _decoder("FalconMamba", takes(ids(12), use_cache=False), **_MAMBA),
    "RecurrentGemma": _decoder("RecurrentGemma", **_HEADS, lru_width=32),
    "RWKV": _decoder("Rwkv", takes(ids(12), use_cache=False), attention_hidden_size=32),
    "Bamba": _decoder("Bamba", **_HEADS, attn_layer_indices=[1], mamba_n_heads=8,
                      mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=8),
    "Jamba": _decoder("Jamba", **_GROUPED, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
                      expert_layer_period=2, mamba_d_state=4, use_mamba_kernels=False),
    "Granite": _decoder("Granite", **_GROUPED),
    "Granite-MoE": _decoder("GraniteMoe", **_GROUPED, num_local_experts=4),
    "Cohere": _decoder("Cohere", **_GROUPED),
    "Cohere 2": _decoder("Cohere2", **_GROUPED),
    "StableLM": _decoder("StableLm", **_GROUPED),
    "StarCoder 2": _decoder("Starcoder2", **_GROUPED),
    "GLM": _decoder("Glm", **_HEADS),
    "GLM-4": _decoder("Glm4", **_HEADS),
    "GLM-4-MoE": _decoder("Glm4Moe", **_HEADS, **_EXPERTS, n_routed_experts=4,
                          first_k_dense_replace=1),
    "SmolLM 3": _decoder("SmolLM3", **_GROUPED),
    "Nemotron": _decoder("Nemotron", **_HEADS),
    "Persimmon": _decoder("Persimmon"),
    "ERNIE 4.5": _decoder("Ernie4_5", **_HEADS),
    "HunYuan": _decoder("HunYuanDenseV1", **_HEADS),
    "Helium": _decoder("Helium", **_HEADS),
    "EXAONE 4": _decoder("Exaone4", **_GROUPED),
    "Arcee": _decoder("Arcee", **_GROUPED),
    "Apertus": _decoder("Apertus", **_GROUPED),
    "Seed-OSS": _decoder("SeedOss", **_HEADS),
    "LFM2": _decoder("Lfm2", **_GROUPED, block_multiple_of=8, full_attn_idxs=[1]),
    "DiffLlama": _decoder("DiffLlama", **_GROUPED),
    "BitNet": _decoder("BitNet", **_GROUPED),
    "MiniMax": _decoder("MiniMax", **_HEADS, num_local_experts=4, block_size=8,
                        layer_types=["full_attention", "linear_attention", "full_attention"]),
    "ModernBERT decoder": _decoder("ModernBertDecoder"),
}  # fmt: skip


def _encoder(name: str, kind: str, sample: Sample = _TEXT, **options: Any) -> Model:
    return transformer(f"{name}{kind}", f"{name}Config", sample, **options)


_SEQUENCE, _TOKEN, _MASKED = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"
ENCODERS: dict[str, Model] = {
    "BERT (mask)": _encoder("Bert", _SEQUENCE),
    "T5 encoder (mask)": transformer("T5EncoderModel", "T5Config", _TEXT, **_T5),
    "RoBERTa": _encoder("Roberta", _MASKED),
    "XLM-RoBERTa": _encoder("XLMRoberta", _TOKEN),
    "CamemBERT": _encoder("Camembert", _SEQUENCE),
    "DistilBERT": _encoder("DistilBert", _SEQUENCE, dim=32, n_layers=3, n_heads=4, hidden_dim=64),
    "ELECTRA": _encoder("Electra", _TOKEN, embedding_size=32),
    "ALBERT": _encoder("Albert", _MASKED, embedding_size=16),
    "DeBERTa": _encoder("Deberta", _SEQUENCE),
    "DeBERTa-v2": _encoder("DebertaV2", _SEQUENCE),
    "ModernBERT": _encoder("ModernBert", _MASKED),
    "MPNet": _encoder("MPNet", _SEQUENCE),
    "ConvBERT": _encoder("ConvBert", _SEQUENCE, embedding_size=32),
    "MobileBERT": _encoder("MobileBert", _SEQUENCE, embedding_size=16, intra_bottleneck_size=16,
                           true_hidden_size=16, num_feedforward_networks=2),
    "SqueezeBERT": _encoder("SqueezeBert", _SEQUENCE, embedding_size=32),
    "RoFormer": _encoder("RoFormer", _SEQUENCE, embedding_size=32),
    "FNet": _encoder("FNet", _SEQUENCE, takes(ids(12))),
    "Funnel": _encoder("Funnel", _SEQUENCE, block_sizes=[1, 1], num_hidden_layers=..., d_model=32,
                       n_head=4, d_head=8, d_inner=64),
    "Longformer": _encoder("Longformer", _SEQUENCE, takes(ids(16), attention_mask=mask(16, 0)),
                           attention_window=4),
    "BigBird": _encoder("BigBird", _SEQUENCE, attention_type="original_full"),
    "Nystroemformer": _encoder("Nystromformer", _SEQUENCE, takes(ids(64)), num_landmarks=64,
                               segment_means_seq_len=64),
    "ESM": _encoder("Esm", _MASKED, mask_token_id=4, position_embedding_type="rotary"),
    "I-BERT": _encoder("IBert", _SEQUENCE),
    "Flaubert": _encoder("Flaubert", _SEQUENCE, emb_dim=32, n_layers=2, n_heads=4),
    "XLM": _encoder("XLM", _SEQUENCE, emb_dim=32, n_layers=2, n_heads=4),
    "XLNet": _encoder("XLNet", _SEQUENCE, takes(ids(12), use_mems=False), d_model=32, n_layer=2,
                      n_head=4, d_inner=64, max_position_embeddings=...),
    "CANINE": _encoder("Canine", _SEQUENCE, takes(ids(16)), downsampling_rate=4,
                       local_transformer_stride=8, num_hash_functions=2, num_hash_buckets=16),
    "NomicBERT": _encoder("NomicBert", _MASKED),
    "EuroBERT": _encoder("EuroBert", _MASKED, **_GROUPED),
    "LayoutLM": _encoder("LayoutLM", _SEQUENCE, takes(ids(12), bbox=ids(12, 4, below=3))),
    "X-MOD": _encoder("Xmod", _SEQUENCE, default_language="en_XX"),
}  # fmt: skip


def _translator(name: str, sample: Sample = _BOTH, **options: Any) -> Model:
    return transformer(f"{name}ForConditionalGeneration", f"{name}Config", sample, **options)


TRANSLATORS: dict[str, Model] = {
    "T5": _translator("T5", **_T5),
    "MT5": _translator("MT5", **_T5),
    "UMT5": _translator("UMT5", **_T5),
    "LongT5": _translator("LongT5", **_T5, local_radius=4),
    "Switch": _translator("SwitchTransformers", **_T5, num_experts=4, num_sparse_encoder_layers=1,
                          num_sparse_decoder_layers=1, expert_capacity=64),
    "BART": _translator("Bart", **_BART),
    "mBART": _translator("MBart", **_BART),
    "M2M-100": _translator("M2M100", **_BART),
    "PLBart": _translator("PLBart", **_BART),
    "Blenderbot": _translator("Blenderbot", **_BART),
    "Blenderbot small": _translator("BlenderbotSmall", **_BART),
    "Pegasus": _translator("Pegasus", **_BART),
    "Pegasus-X": _translator("PegasusX", takes(input_ids=ids(16), decoder_input_ids=ids(7),
                             use_cache=False), **_BART, block_size=4, num_global_tokens=4),
    "LED": _translator("LED", takes(input_ids=ids(16), decoder_input_ids=ids(7), use_cache=False),
                       **_BART, attention_window=4, max_encoder_position_embeddings=64,
                       max_decoder_position_embeddings=64),
    "Marian": transformer("MarianMTModel", "MarianConfig", _BOTH, **_BART, decoder_vocab_size=100),
    "FSMT": _translator("FSMT", **_BART, src_vocab_size=100, tgt_vocab_size=100,
                        langs=["en", "de"]),
    "ProphetNet": _translator(
        "ProphetNet", hidden_size=32, num_hidden_layers=..., num_encoder_layers=2,
        num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=2,
    ),
}  # fmt: skip
