"""Small models of mlx-lm, built from a config with random weights: the same bits in every process.

FAMILIES   name -> what to build, how to talk to it, and whether its caches can be cut to a prefix
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

VOCABULARY: Final = 96
_SEED: Final = 20
_COMMON: Final[dict[str, Any]] = {"vocab_size": VOCABULARY, "hidden_size": 64, "rms_norm_eps": 1e-5}


@dataclass(frozen=True)
class Family:
    """One model and one way to use its caches.

    shortens: whether the caches of a whole conversation serve another question after the same system prompt.
    cache_classes: what the layers' caches are once the prompt is in, in order of appearance.
    dtype: bfloat16 as real models have it; float32 for mixtures of experts, for which MLX has no bfloat16 kernel on
        the CPU, and for state-space models.
    system_chunks, question_chunk: the prompt's chunks, in tokens.
    kv_bits: quantize after each chunk, as mlx_lm.generate does. max_kv_size: as make_prompt_cache takes it.
    since: the first mlx-lm whose own caches can do this; why_since says what fails before.
    """

    module: str
    config: dict[str, Any]
    cache_classes: tuple[str, ...]
    shortens: bool = True
    dtype: mx.Dtype = mx.float32
    system_chunks: tuple[int, ...] = (40, 40)
    question_chunk: int = 21
    kv_bits: int | None = None
    max_kv_size: int | None = None
    since: tuple[int, int] = (0, 0)
    why_since: str = ""

    @property
    def is_known(self) -> bool:
        """False where the installed mlx-lm has no such model."""
        return importlib.util.find_spec(f"mlx_lm.models.{self.module}") is not None

    def build(self) -> Any:
        """The model, evaluated. No weight is zero, so none hides what is in a cache."""
        module = importlib.import_module(f"mlx_lm.models.{self.module}")
        mx.random.seed(_SEED)
        model = module.Model(module.ModelArgs.from_dict({"model_type": self.module, **self.config}))
        model.update(tree_map(_stirred, model.parameters()))
        model.set_dtype(self.dtype)
        mx.eval(model.parameters())
        return model

    def make_caches(self, model: Any) -> list[Any]:
        return list(make_prompt_cache(model, self.max_kv_size))


def _stirred(parameter: mx.array) -> mx.array:
    return parameter + 0.05 * mx.random.normal(parameter.shape).astype(parameter.dtype)


# ---- configurations

_DENSE: Final[dict[str, Any]] = {
    **_COMMON,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_GEMMA: Final[dict[str, Any]] = {
    **_DENSE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 32,
    "sliding_window_pattern": 2,
}
_QWEN3_NEXT: Final[dict[str, Any]] = {
    **_DENSE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 1024,
    "full_attention_interval": 2,
}
_LATENT: Final[dict[str, Any]] = {
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 1024,
}
_DEEPSEEK: Final[dict[str, Any]] = {
    **_COMMON,
    **_LATENT,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_V32: Final[dict[str, Any]] = {**_DEEPSEEK, "index_head_dim": 32, "index_n_heads": 2, "index_topk": 48}
_DEEPSEEK_V41: Final[dict[str, Any]] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "compress_ratios": [0, 4, 4, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
}
_LONGCAT: Final[dict[str, Any]] = {
    **_COMMON,
    **_LATENT,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_FALCON: Final[dict[str, Any]] = {
    **_DENSE,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "rope_theta": 10_000.0,
}
_MAMBA: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "intermediate_size": 64,
    "state_size": 16,
    "num_hidden_layers": 3,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": (0.0, 1e9),
    "time_step_rank": 4,
}
_LLAMA4: Final[dict[str, Any]] = {
    **_DENSE,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "attention_bias": False,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "use_qk_norm": True,
}

# The chunks of llama4 with a chunk of 64 make its caches drop their front while the prompt runs.
FAMILIES: Final[dict[str, Family]] = {
    "llama": Family("llama", _DENSE, ("KVCache",), dtype=mx.bfloat16, system_chunks=(160, 160)),
    "llama, quantized KV": Family("llama", _DENSE, ("QuantizedKVCache",), dtype=mx.bfloat16, kv_bits=8),
    "llama, some layers sliding": Family(
        "llama",
        {**_DENSE, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 32},
        ("RotatingKVCache", "KVCache"), shortens=False, dtype=mx.bfloat16,
    ),
    "gemma3_text, windows full": Family(
        "gemma3_text", {**_GEMMA, "sliding_window": 32}, ("RotatingKVCache", "KVCache"), shortens=False,
        dtype=mx.bfloat16,
    ),
    "gemma3_text, windows not yet full": Family(
        "gemma3_text", {**_GEMMA, "sliding_window": 512}, ("RotatingKVCache", "KVCache"), dtype=mx.bfloat16,
    ),
    "qwen3_next": Family("qwen3_next", _QWEN3_NEXT, ("ArraysCache", "KVCache"), shortens=False),
    "deepseek_v3": Family("deepseek_v3", _DEEPSEEK, ("KVCache",)),
    "deepseek_v3, max_kv_size": Family(
        "deepseek_v3", _DEEPSEEK, ("RotatingKVCache",), shortens=False, max_kv_size=48
    ),
    "deepseek_v32": Family("deepseek_v32", _DEEPSEEK_V32, ("CacheList",)),
    "deepseek_v41": Family("deepseek_v41", _DEEPSEEK_V41, ("LayerCache",), shortens=False),
    "longcat_flash": Family("longcat_flash", _LONGCAT, ("CacheList",)),
    "falcon_h1": Family("falcon_h1", _FALCON, ("CacheList",), shortens=False),
    "llama4, chunks dropped": Family(
        "llama4", {"text_config": {**_LLAMA4, "attention_chunk_size": 32}}, ("ChunkedKVCache", "KVCache"),
        shortens=False, since=(0, 32), why_since="its chunked cache takes spare rows for tokens to drop",
    ),
    "llama4, one chunk": Family(
        "llama4", {"text_config": {**_LLAMA4, "attention_chunk_size": 512}}, ("ChunkedKVCache", "KVCache"),
    ),
    "mamba2": Family("mamba2", _MAMBA, ("ArraysCache",), shortens=False),
}  # fmt: skip
