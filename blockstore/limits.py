"""What a store may take: its cap, the space left free for others, the age of what nobody uses, a share a model."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .errors import InvalidInput

_MOST: Final = (1 << 63) - 1


class Limits(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A store's limits, kept in it for all its users. 0 means that there is none.

    max_bytes: cap over every byte of the directory. min_free_bytes: what saves leave free on the file system.
    max_age_s: gc removes entries that were not used for so many seconds. quotas: for a model_id, the most that its
    entries may take: headers, and blocks (one that two models share counts for both).
    """

    max_bytes: int = 0
    min_free_bytes: int = 0
    max_age_s: int = 0
    quotas: dict[str, int] = {}

    def changed(self, changes: Mapping[str, Any]) -> "Limits":
        """These limits with those in `changes` that are not None; a quota of 0 lifts that quota."""
        merged = {name: value for name, value in changes.items() if value is not None}
        quotas = merged.get("quotas", {})
        if not isinstance(quotas, Mapping):
            raise InvalidInput("quotas must map model ids to bytes", field="quotas", found=quotas)
        for name, value in [*((name, value) for name, value in merged.items() if name != "quotas"), *quotas.items()]:
            if type(value) is not int or not 0 <= value <= _MOST:
                raise InvalidInput("a limit must be a whole number, 0 for none", field=name, found=value)
        if not all(isinstance(model_id, str) for model_id in quotas):
            raise InvalidInput("quotas are named by model_id", field="quotas", found=list(quotas))
        merged["quotas"] = {name: size for name, size in {**self.quotas, **quotas}.items() if size}
        return msgspec.structs.replace(self, **merged)


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Limits)


def pack(limits: Limits) -> bytes:
    return _ENCODER.encode(limits)


def unpack(value: bytes | None) -> Limits:
    """Raises msgspec.DecodeError for what pack() never made."""
    return Limits() if value is None else _DECODER.decode(value)
