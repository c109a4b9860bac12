"""Our classes inside mlx-lm's models: the logits are those that mlx-lm's own classes give, bit for bit."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama, mamba2

import kvcodecs
from cache_cases import bits

pytestmark = pytest.mark.mlx_lm
PROMPT_CHUNKS, NEW_TOKENS = (11, 6), 5


def small_llama() -> Any:
    mx.random.seed(3)
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=64,
    )  # fmt: skip
    return llama.Model(arguments)


def small_mamba() -> Any:
    mx.random.seed(4)
    arguments = mamba2.ModelArgs(
        model_type="mamba2", num_heads=4, head_dim=8, vocab_size=64, hidden_size=16, intermediate_size=32,
        state_size=8, num_hidden_layers=2, layer_norm_epsilon=1e-5, conv_kernel=4, n_groups=1, use_bias=False,
        use_conv_bias=True, tie_word_embeddings=True, time_step_limit=(0.0, 1e9), time_step_rank=4,
    )  # fmt: skip
    return mamba2.Model(arguments)


def logits(model: Any, caches: list[Any]) -> list[object]:
    """Of two chunks of a prompt, and of tokens one by one."""
    found, start = [], 0
    for count in (*PROMPT_CHUNKS, *[1] * NEW_TOKENS):
        tokens = mx.array([[(7 * i) % 64 for i in range(start, start + count)]])
        found.append(bits(model(tokens, cache=caches)))
        start += count
    return found


@pytest.mark.parametrize(
    ("model", "ours", "theirs"),
    [
        (small_llama, kvcodecs.KVCache, mlx_lm_cache.KVCache),
        (small_llama, lambda: kvcodecs.RotatingKVCache(8, 2), lambda: mlx_lm_cache.RotatingKVCache(8, 2)),
        (small_llama, lambda: kvcodecs.QuantizedKVCache(32, 8), lambda: mlx_lm_cache.QuantizedKVCache(32, 8)),
        (small_mamba, kvcodecs.RecurrentCache, lambda: mlx_lm_cache.ArraysCache(size=2)),
    ],
    ids=["kv", "rotating", "qkv", "ssm"],
)
def test_logits(model: Callable[[], Any], ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    network = model()
    own, other = [ours(), ours()], [theirs(), theirs()]
    assert logits(network, own) == logits(network, other)
    assert [cache.offset for cache in own] == [sum(PROMPT_CHUNKS) + NEW_TOKENS] * 2


def test_a_quantized_ring_works_in_a_model() -> None:
    network = small_llama()
    rings = [kvcodecs.RotatingQuantizedKVCache(8, 2, group_size=32, bits=8) for _ in range(2)]
    full = [mlx_lm_cache.RotatingKVCache(8, 2) for _ in range(2)]
    tokens = mx.array([[5, 9, 2, 30, 7, 1, 44, 12, 8, 3]])
    assert mx.allclose(network(tokens, cache=rings), network(tokens, cache=full), atol=0.02)
    assert mx.allclose(network(tokens[:, :1], cache=rings), network(tokens[:, :1], cache=full), atol=0.02)
