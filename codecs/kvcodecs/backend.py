"""The one way to `mlx.core`: `from .backend import mx`.

Importing this module imports nothing. Asking it for `mx` does, and where MLX is installed without a backend (on Linux
the plain `mlx` package has none) raises MissingBackend, which says what to install.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["MissingBackend", "mx"]

_MEND = (
    'install one with `pip install "mlx-blockstore[cpu]"`, or `pip install "mlx-blockstore[cuda13]"` for an NVIDIA GPU'
)


class MissingBackend(ImportError):
    """MLX is not installed, or has no backend for this machine. The text names the command that mends it."""


def __getattr__(name: str) -> object:
    if name != "mx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        core = importlib.import_module("mlx.core")
    except ImportError as error:
        if not _is_missing_backend(error):
            raise
        raise MissingBackend(f"MLX has no backend here ({error}); {_MEND}", name=error.name, path=error.path) from error
    globals()["mx"] = core
    return core


def _is_missing_backend(error: ImportError) -> bool:
    return "libmlx" in str(error) or error.name in ("mlx", "mlx.core")
