"""What the import command is told of a prompt cache file, which says neither whose it is nor what it encodes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .errors import InvalidInput
from .fs import FileSystem
from .identity import Identity, identity_of
from .safetensors import SUFFIX
from .store import Store

if TYPE_CHECKING:
    from .moving import Imported

_TOKENS_LIMIT_BYTES: Final = 64 << 20
_NPY: Final = b"\x93NUMPY"


def is_prompt_cache(path: str) -> bool:
    """mlx-lm gives and takes no other names."""
    return path.endswith(SUFFIX)


class Described(msgspec.Struct, frozen=True):
    """The options: the tokens' file, the model as identity_of() takes it, and identity fields as they are."""

    tokens: str | None
    model: str | None
    adapter_path: str | None
    kv_bits: int | None
    kv_group_size: int | None
    quantized_kv_start: int | None
    fields: dict[str, str | None]

    def taker(self, files: Sequence[str]) -> "Callable[[Store, str], Imported]":
        """What imports the one prompt cache file among `files`. Raises InvalidInput where the options do not fit."""
        found = [path for path in files if is_prompt_cache(path)]
        if not found:
            self._check_unused()
            return Store.import_file
        if len(found) > 1:
            hint = "Import one after the other, each with its own tokens."
            raise InvalidInput("one prompt cache file at a time can be described", found=found[:3], hint=hint)
        if self.tokens is None:
            hint = "Give --tokens FILE: the ids of prompt and answer that it encodes, as a JSON list or .npy."
            raise InvalidInput("the file does not say which tokens it encodes", path=found[0], hint=hint)
        if self.model is None and self.fields["model_id"] is None:
            hint = "Give --model DIR, the model as mlx_lm.load takes it, or --model-id TEXT and further fields."
            raise InvalidInput("the file does not say whose it is", path=found[0], hint=hint)
        from .prompt_cache_files import import_prompt_cache  # brings mlx

        return partial(import_prompt_cache, tokens=_tokens_in(self.tokens), identity=self._identity())

    def _check_unused(self) -> None:
        if any(value is not None for value in (*msgspec.structs.astuple(self)[:-1], *self.fields.values())):
            hint = "Other cache files say themselves whose they are; leave the options out."
            raise InvalidInput(f"no {SUFFIX} file is named, which alone needs to be described", hint=hint)

    def _identity(self) -> Identity:
        given = {name: value for name, value in self.fields.items() if value is not None}
        if self.model is None:
            return Identity(
                given["model_id"], given.get("config_fingerprint"), given.get("tokenizer_hash"), given.get("ns", "")
            )
        whose = identity_of(
            self.model, adapter_path=self.adapter_path, kv_bits=self.kv_bits,
            kv_group_size=self.kv_group_size, quantized_kv_start=self.quantized_kv_start,
        )  # fmt: skip
        return replace(whose, **given)


def _tokens_in(path: str) -> Any:
    """Token ids from a file. Raises InvalidInput, OSError."""
    path = os.path.realpath(path)
    data = FileSystem().read_file(path, _TOKENS_LIMIT_BYTES)
    try:
        if data.startswith(_NPY):
            import numpy as np  # most imports need no array

            # Mapped: a header may say that there is more than the file holds.
            return np.load(path, mmap_mode="r")
        return msgspec.json.decode(data, type=list[int])
    except (ValueError, EOFError, RecursionError) as error:
        raise InvalidInput(
            "not a list of tokens", path=path, expected="a JSON list of ids, or an .npy file", found=str(error)
        ) from None
