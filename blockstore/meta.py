"""What travels with a cache list: whose it is, companion state, and where a generation stood."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from .errors import IdentityMismatch, InvalidInput
from .identity import Identity
from .records import GenerationCheckpoint, Header


@dataclass(frozen=True)
class Attachment:
    """Companion state of a generation method (a draft model's, say); an entry that has any never shortens.

    metadata is any JSON value, tensors are mlx arrays of any shape; a loaded one's tensors are new arrays.
    """

    schema: str
    metadata: Any = field(default_factory=dict)
    tensors: tuple[Any, ...] = ()

    def clone(self) -> "Attachment":
        """One over the same memory: assigning to either's arrays or metadata leaves the other as it was."""
        return Attachment(self.schema, copy.deepcopy(self.metadata), tuple(array[...] for array in self.tensors))


@dataclass(frozen=True)
class Meta:
    """What a file says beside tokens and caches. None stands for a field that is absent.

    created_at_ms: milliseconds since 1970; None when saving: now.
    """

    model_id: str | None = None
    config_fingerprint: str | None = None
    tokenizer_hash: str | None = None
    ns: str | None = None
    attachments: tuple[Attachment, ...] = ()
    generation_checkpoint: GenerationCheckpoint | None = None
    created_at_ms: int | None = None

    def clone(self) -> "Meta":
        """The same, with attachments cloned; a generation checkpoint cannot change and is shared."""
        return replace(self, attachments=tuple(attachment.clone() for attachment in self.attachments))

    @property
    def identity(self) -> Identity:
        return Identity(self.model_id, self.config_fingerprint, self.tokenizer_hash, self.ns)


class SaveOptions(TypedDict, total=False):
    """What Store.save and Store.prepare take by name.

    layout: "segments", or "rows" (each tensor cut by itself, into blocks of block_bytes). pinned: keep the entry from
    eviction. attachments, generation_checkpoint: companion state, and where a generation stood. parent: a Match, Saved,
    Loaded or the id of the entry that these caches continue, whose blocks are then taken over unread, but for a sample;
    caches that were loaded or saved here remember theirs, others (merged ones, extracted rows) need it named. Rows that
    are changed in place under equal tokens may escape the sample: put such state into new cache objects.
    """

    layout: str
    block_bytes: int | None
    pinned: bool
    attachments: Sequence[Attachment]
    generation_checkpoint: GenerationCheckpoint | None
    parent: Any


def meta_of(header: Header, attachments: tuple[Attachment, ...]) -> Meta:
    """The Meta that saves the same file again."""
    return Meta(
        model_id=header.model_id,
        config_fingerprint=header.config_fingerprint,
        tokenizer_hash=header.tokenizer_hash,
        ns=header.ns,
        attachments=attachments,
        generation_checkpoint=header.generation_checkpoint,
        created_at_ms=header.created_at,
    )


def expect_identity(header: Header, expected: Identity | Meta | None, path: str) -> None:
    """Raise IdentityMismatch, naming the field, where a field of `expected` that is not None differs."""
    if expected is None:
        return
    if not isinstance(expected, (Identity, Meta)):
        raise InvalidInput("expect must be an Identity or a Meta", field="expect", found=type(expected).__name__)
    for name in ("model_id", "config_fingerprint", "tokenizer_hash", "ns"):
        wanted, found = getattr(expected, name), getattr(header, name)
        if wanted is not None and wanted != found:
            raise IdentityMismatch(
                "the file is of another identity", path=path, field=name, expected=wanted, found=found
            )
