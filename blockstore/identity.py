"""Whose entry it is: what must be equal for a stored cache to be reusable, and how to compute that from a model.

Two models of one geometry differ in their weights alone, so the weights are digested: once, then remembered by
device, inode, size and times of each file.
"""

import fnmatch
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3

from .digest import Hasher
from .errors import InvalidInput
from .fs import FileSystem

_log: Final = logging.getLogger(__name__)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# What must be in the hub's cache for a model to be complete: some of what mlx-lm downloads.
_WEIGHTS: Final = "model*.safetensors"
_FETCHED: Final = ["*.json", _WEIGHTS, "*.py", "tokenizer.model", "*.tiktoken", "*.txt"]
_VOCABULARIES: Final = ("tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt")
# mlx-lm's own default, in every release that quantizes caches.
_DEFAULT_GROUP_SIZE: Final = 64
# Large enough that a call costs nothing, small enough to stay in a core's cache between reading and hashing.
_READ_BYTES: Final = 1 << 20
# The largest config.json seen is below 1 MiB; a quantization table a layer makes them long.
_JSON_LIMIT_BYTES: Final = 64 << 20
_MEMORY_LIMIT_BYTES: Final = 4 << 20
_MEMORY_LIMIT_FILES: Final = 8192
# File systems record times in steps of up to two seconds: a younger file could change once more and look the same.
_SETTLED_NS: Final = 2_000_000_000
_TRIES: Final = 3


@dataclass(frozen=True)
class Identity:
    """What must be equal for an entry to be reusable. None stands for a field that is absent, "" for an empty one.

    ns keeps users of one model apart. Raises InvalidInput for what cannot be written as UTF-8.
    """

    model_id: str | None
    config_fingerprint: str | None
    tokenizer_hash: str | None
    ns: str | None = ""

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            _check_text(name, getattr(self, name))


def _check_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{name} must be text or None", field=name, found=value)
    try:
        (value or "").encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(
            f"{name} holds a lone surrogate, which UTF-8 cannot write", field=name, found=value
        ) from None


def identity_of(
    model_path: str | os.PathLike[str],
    *,
    adapter_path: str | os.PathLike[str] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int | None = None,
    ns: str | None = "",
    include_versions: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    model_id: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    revision: str | None = None,
) -> Identity:
    """The identity of a model as `mlx_lm.load(model_path, adapter_path=…, model_config=…, revision=…)` loads it.

    model_path: a directory, or a hub id that is in the hub's cache already; the network is never asked. One model by
        relative or absolute path, through links and by hub id gives one identity.
    kv_bits, kv_group_size, quantized_kv_start: as given to mlx-lm's generation; without kv_bits the others say nothing.
    include_versions: also tell apart MLX versions and machines (versions.versions_of), whose last bits may differ.
    cache_dir: where digests of weights are remembered; the user's cache directory unless given.
    model_id: the hub id or the directory's name unless given.

    Reads all weights the first time. Raises InvalidInput for what is no such model or cannot be read.
    """
    folder = _resolve(model_path, revision)
    memory = _Digests(_user_cache() if cache_dir is None else Path(cache_dir).expanduser())
    config = {**_json_object(folder / "config.json"), **(model_config or {})}
    described = {
        "format": 1,
        "config": config,
        "quantization": _optional_json(folder / "hf_quant_config.json"),
        "code": _code_digest(folder, config),
        "weights": _weights(folder, memory),
        "adapter": None if adapter_path is None else _adapter(Path(adapter_path).expanduser(), memory),
        "kv": _kv_scheme(kv_bits, kv_group_size, quantized_kv_start),
        "versions": _versions() if include_versions else None,
    }
    return Identity(
        model_id=_name_of(folder) if model_id is None else model_id,
        config_fingerprint=hashlib.sha256(_canonical(described)).hexdigest(),
        tokenizer_hash=tokenizer_hash_of(folder),
        ns=ns,
    )


def tokenizer_hash_of(folder: str | os.PathLike[str]) -> str | None:
    """The sha256 of tokenizer.json, in hex; None for a model without a tokenizer.

    Without tokenizer.json: of the vocabulary files, as the sha256 of what `sha256sum` prints for them, sorted.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        return _sha256(folder / "tokenizer.json")
    names = [name for name in _names(folder) if any(fnmatch.fnmatchcase(name, known) for known in _VOCABULARIES)]
    listing = "".join(f"{_sha256(folder / name)}  {name}\n" for name in names)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest() if names else None


def _versions() -> dict[str, str]:
    from .versions import versions_of  # what it imports is a good part of the time of a command that needs none of it

    return versions_of()


# ---- where the model is


def _resolve(model_path: str | os.PathLike[str], revision: str | None) -> Path:
    text = os.fspath(model_path)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path.resolve()
    if text and path.exists():
        raise InvalidInput("not a directory", path=text, hint="Name the directory that holds config.json.")
    if _HUB_ID.fullmatch(text):
        return _snapshot(text, revision)
    raise InvalidInput("no such directory", path=text)


def _snapshot(hub_id: str, revision: str | None) -> Path:
    """The directory in the hub's cache, without asking the network."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        hint = "To use hub ids install huggingface_hub: pip install 'mlx-blockstore[mlx-lm]'."
        raise InvalidInput("no such directory", path=hub_id, hint=hint) from None
    try:
        found = snapshot_download(hub_id, revision=revision, local_files_only=True, allow_patterns=_FETCHED)
    except (OSError, ValueError) as error:
        hint = "Load the model once with mlx_lm.load, which downloads it, or name its directory."
        raise InvalidInput("neither a directory nor a model in the hub's cache", path=hub_id, hint=hint) from error
    return Path(found).resolve()


def _name_of(folder: Path) -> str:
    """The hub id for a directory of the hub's cache (models--org--name/snapshots/<commit>), else the last name."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


# ---- what the model is


def _weights(folder: Path, memory: "_Digests") -> list[list[str]]:
    names = [name for name in _names(folder) if fnmatch.fnmatchcase(name, _WEIGHTS)]
    if not names:
        hint = "mlx-lm loads safetensors alone; convert others with mlx_lm.convert."
        raise InvalidInput(f"no weights ({_WEIGHTS})", path=str(folder), hint=hint)
    return [[name, memory.digest_of(folder / name)] for name in names]


def _adapter(folder: Path, memory: "_Digests") -> dict[str, object]:
    if not folder.is_dir():
        raise InvalidInput("no such adapter directory", path=str(folder))
    config = _json_object(folder / "adapter_config.json")
    return {"config": config, "weights": memory.digest_of(folder / "adapters.safetensors")}


def _code_digest(folder: Path, config: Mapping[str, object]) -> str | None:
    """The digest of the model's own Python file, where its config names one."""
    name = config.get("model_file")
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidInput("model_file must be text", path=str(folder / "config.json"), found=name)
    return _sha256(folder / name)


def _kv_scheme(bits: int | None, group_size: int | None, start: int | None) -> dict[str, int | None] | None:
    if bits is None:
        return None
    scheme = {"bits": bits, "group_size": _DEFAULT_GROUP_SIZE if group_size is None else group_size, "start": start}
    for name, value in scheme.items():
        least = 0 if name == "start" else 1
        if value is not None and (type(value) is not int or value < least):
            raise InvalidInput(
                f"KV quantization: {name} must be an integer of at least {least}", field=name, found=value
            )
    return scheme


def _json_object(path: Path) -> dict[str, Any]:
    with _readable(path):
        data = FileSystem().read_file(os.path.realpath(path), _JSON_LIMIT_BYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("not JSON", path=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise InvalidInput("not a JSON object", path=str(path), found=type(value).__name__)
    return value


def _optional_json(path: Path) -> dict[str, Any] | None:
    return _json_object(path) if path.exists() else None


def _canonical(value: object) -> bytes:
    """JSON text that depends on the content alone: not on spacing or the order of keys."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput("model_config must hold what JSON can say", found=str(error)) from error


# ---- files


def _names(folder: Path) -> list[str]:
    with _readable(folder):
        return sorted(os.listdir(folder))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the kernel says of a file into InvalidInput that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "Name the directory that mlx_lm.load takes." if path.name == "config.json" else ""
        raise InvalidInput(f"cannot read the model: {reason}", path=str(path), hint=hint) from error


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with _readable(path):
        fd = FileSystem().open_read(os.path.realpath(path))
        try:
            _feed(hasher, fd)
        finally:
            os.close(fd)
    return hasher.hexdigest()


def _feed(hasher: Hasher, fd: int) -> None:
    """Hash a whole file through a small buffer: a mapped file that shrinks would kill the process."""
    fs, offset, buffer = FileSystem(), 0, memoryview(bytearray(_READ_BYTES))
    while count := fs.read_into(fd, buffer, offset):
        hasher.update(buffer[:count])
        offset += count


def _user_cache() -> Path:
    # Not .cache/blockstore: people put a store there, and a store is made in an empty directory alone.
    # An XDG path that is not absolute is to be ignored, says its specification.
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "mlx-blockstore"


# ---- digests, remembered


class _Remembered(msgspec.Struct, forbid_unknown_fields=True):
    """The memory file: blake3 digests in hex by "device.inode.size.mtime_ns.ctime_ns", the oldest first."""

    format: int
    digests: dict[str, Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]]


class _Digests:
    """Content digests of large files. What is remembered only saves time: losing it costs one more reading."""

    def __init__(self, folder: Path) -> None:
        self._fs = FileSystem()
        self._path = folder / "fingerprints.json"
        self._known = self._read()

    def digest_of(self, path: Path) -> str:
        """The blake3 of a file, in hex. Raises InvalidInput if it cannot be read or keeps changing meanwhile."""
        with _readable(path):
            for _ in range(_TRIES):
                fd = self._fs.open_read(os.path.realpath(path))
                try:
                    digest = self._digest(fd)
                finally:
                    os.close(fd)
                if digest is not None:
                    return digest
        raise InvalidInput("the file changes while it is read", path=str(path), hint="Wait until it is complete.")

    def _digest(self, fd: int) -> str | None:
        """The digest of an open file, or None if it changed while it was read."""
        began_ns, before = time.time_ns(), os.fstat(fd)
        if known := self._known.get(_key(before)):
            return known
        hasher = blake3(max_threads=blake3.AUTO)
        _feed(hasher, fd)
        if _key(os.fstat(fd)) != _key(before):
            return None
        if before.st_ctime_ns < began_ns - _SETTLED_NS:
            self._remember(_key(before), hasher.hexdigest())
        return hasher.hexdigest()

    def _read(self) -> dict[str, str]:
        """What is remembered; nothing where the file is missing, damaged or of another format."""
        try:
            data = self._fs.read_file(str(self._path), _MEMORY_LIMIT_BYTES)
            remembered = msgspec.json.decode(data, type=_Remembered)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return remembered.digests if remembered.format == 1 else {}

    def _remember(self, key: str, digest: str) -> None:
        """Add to what the file holds by now; of two writers at once, one's digest may be lost and computed again."""
        self._known = {**self._read(), **self._known, key: digest}
        newest = dict(list(self._known.items())[-_MEMORY_LIMIT_FILES:])
        temporary = f"{self._path}.{os.getpid()}.{secrets.token_hex(8)}"
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fs.write_new(temporary, [msgspec.json.encode(_Remembered(1, newest))])
            try:
                self._fs.rename(temporary, str(self._path))
            except OSError:
                self._fs.unlink(temporary)
                raise
        except OSError as error:  # a read-only home must not keep a model from being served
            _log.warning("digests of weights cannot be remembered and will be computed again: %s", error)


def _key(status: os.stat_result) -> str:
    return f"{status.st_dev}.{status.st_ino}.{status.st_size}.{status.st_mtime_ns}.{status.st_ctime_ns}"
