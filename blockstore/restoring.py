"""From a header to new cache objects, wherever the bytes come from.

Three steps, so that a server can put each on the thread that it belongs to: allocate() makes the arrays at their final
capacity and caches() wraps them, both on the caller's thread; between them a source fills the arrays from any thread.
Whatever fails, the caller's state is untouched: nothing is handed out but new objects, when all of them are whole.
"""

from dataclasses import replace
from typing import Any

import msgspec

from kvcodecs import geometry
from kvcodecs.algebra import Codec, CodecError, CodecProvider, PrototypeMismatch, UnknownKind
from kvcodecs.entry import HeaderEntry, leaves

from . import placing
from .errors import IdentityMismatch, InvalidInput, UnsupportedFormat
from .meta import Attachment, Meta, meta_of
from .records import Header


class Loaded(msgspec.Struct, frozen=True):
    """Restored caches, one for each layer, and the `token_count` tokens they encode (a prefix of the entry's).

    attachments: companion state, only of an entry that is loaded whole. entry_id: None for a file outside of a store.
    """

    entry_id: str | None
    tokens: list[int]
    caches: list[Any]
    header: Header
    attachments: tuple[Attachment, ...] = ()

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def meta(self) -> Meta:
        """What saves the same file again; of a shorter load, without the checkpoint, which is the whole entry's."""
        meta = meta_of(self.header, self.attachments)
        whole = self.token_count == len(self.header.tokens)
        return meta if whole else replace(meta, generation_checkpoint=None)


class Restore:
    """The restore of one header, cut to `length` tokens (None: all). `where` names the entry or file in errors.

    Raises IdentityMismatch, UnsupportedFormat, InvalidInput before anything is allocated.
    """

    def __init__(self, header: Header, provider: CodecProvider, model: Any, length: int | None, **where: str) -> None:
        if length is not None and type(length) is not int:
            raise InvalidInput("length must be a number of tokens", field="length", found=length)
        self.header = header
        self._where = where
        self.token_count = len(header.tokens) if length is None else length
        self._entries = self._shortened()
        self._check_provider(provider)
        self._prototypes = self._checked_prototypes(model)
        pairs = zip(self._entries, self._prototypes, strict=True)
        self._codecs = [self._codec(provider, entry, prototype) for entry, prototype in pairs]
        self.targets = placing.targets([*self._entries, *placing.companions(header.attachments)])

    def allocate(self) -> None:
        """Make every array. On the caller's thread."""
        by_leaf, wanted, own = iter(self.targets), [], []
        for entry, prototype, codec in zip(self._entries, self._prototypes, self._codecs, strict=True):
            own.append([target for _ in leaves([entry]) for target in next(by_leaf)])
            wanted += [(target, codec.capacity(entry, index, prototype)) for index, target in enumerate(own[-1])]
        self._companions = list(by_leaf)
        placing.allocate([*wanted, *((target, None) for targets in self._companions for target in targets)])
        self._arrays = [[target.array for target in targets] for targets in own]

    def loaded(self, entry_id: str | None = None) -> Loaded:
        """The new cache objects over the arrays, which have been filled by now. On the caller's thread."""
        parts = zip(self._codecs, self._entries, self._arrays, self._prototypes, strict=True)
        caches = [codec.load(entry, arrays, prototype) for codec, entry, arrays, prototype in parts]
        attachments = tuple(
            Attachment(described.schema, described.metadata, tuple(target.array for target in targets))
            for described, targets in zip(self.header.attachments, self._companions, strict=True)
        )
        return Loaded(entry_id, list(self.header.tokens[: self.token_count]), caches, self.header, attachments)

    def _shortened(self) -> list[HeaderEntry]:
        """The header entries, described as of `token_count` tokens."""
        header, count, total = self.header, self.token_count, len(self.header.tokens)
        if count == total:
            return list(header.caches)
        least = max(1, *map(geometry.minimum_reusable, header.caches))
        possible = geometry.list_shortens(header.caches) and not header.attachments
        if not possible or not least <= count < total:
            raise InvalidInput(
                "the entry cannot be cut to that length",
                **self._where,
                expected=f"{least} to {total} tokens" if possible else f"{total} tokens, all of it",
                found=count,
            )
        return [geometry.shortened(entry, count) for entry in header.caches]

    def _check_provider(self, provider: CodecProvider) -> None:
        if not provider.reads_id(self.header.codec_provider):
            raise UnsupportedFormat(
                "the entry was written by another codec provider",
                **self._where,
                expected=provider.id,
                found=self.header.codec_provider,
            )

    def _checked_prototypes(self, model: Any) -> list[Any]:
        found = prototypes(model, len(self._entries))
        if len(found) != len(self._entries):
            message = "the model has another number of layers"
            raise self._mismatch("layers", len(found), len(self._entries), message)
        return found

    def _codec(self, provider: CodecProvider, entry: HeaderEntry, prototype: Any) -> Codec:
        try:
            codec = provider.for_entry(entry, prototype)
            codec.check_prototype(entry, prototype)
        except PrototypeMismatch as error:
            raise self._mismatch(error.field, error.expected, error.found, str(error)) from error
        except UnknownKind as error:
            raise UnsupportedFormat(str(error), field="kind", found=entry.kind, **self._where) from error
        except CodecError as error:
            raise InvalidInput(str(error), **self._where) from error
        return codec

    def _mismatch(self, field: str, expected: object, found: object, message: str) -> IdentityMismatch:
        return IdentityMismatch(message, field=field, expected=expected, found=found, **self._where)


def prototypes(model: Any, layers: int) -> list[Any]:
    """One prototype cache a layer from what load() takes as model; Nones where there is none."""
    if model is None:
        return [None] * layers
    if isinstance(model, (list, tuple)):
        return list(model)
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    if hasattr(model, "layers"):
        from mlx_lm.models.cache import make_prompt_cache  # an extra: only a model of its needs it

        return list(make_prompt_cache(model))
    raise InvalidInput(
        "cannot make prototype caches from this",
        field="model",
        expected="an object with make_cache(), an mlx-lm model, a list of caches, or None",
        found=type(model).__name__,
    )
