"""A model directory as mlx_lm.load reads it: a llama with random weights, and a tokenizer whose tokens are characters.

So a text is the same tokens whether a model wrote it or a tokenizer read it, and a prompt with what was answered is the
beginning of the next turn's prompt.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama

_MARKS: Final = ("<none>", "<end>", "<system>", "<user>", "<assistant>")
_CHARACTERS: Final = [*map(chr, range(32, 127)), "\n"]
_VOCABULARY: Final = [*_MARKS, *_CHARACTERS]
_TEMPLATE: Final = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": len(_VOCABULARY),
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def write_model(folder: Path, *, seed: int = 0, **config: int) -> Path:
    """Make the directory. Other seeds give other weights of the same shapes; `config` changes these."""
    described = {**_CONFIG, **config}
    folder.mkdir(parents=True)
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(described))
    # Far from zero, so that what a prompt says decides what the model answers; but it never says that it is done.
    weights: Any = dict(tree_flatten(tree_map(lambda one: one + 0.1 * mx.random.normal(one.shape), model.parameters())))
    weights["lm_head.weight"][: len(_MARKS)] = 0
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<end>",
                "pad_token": "<none>",
                "chat_template": _TEMPLATE,
            }
        )
    )
    return folder


def _tokenizer() -> dict[str, Any]:
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": mark, **marks} for number, mark in enumerate(_MARKS)],
        "model": {"type": "BPE", "vocab": {text: number for number, text in enumerate(_VOCABULARY)}, "merges": []},
        "decoder": {"type": "Fuse"},
    }
