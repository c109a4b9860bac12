"""Which software computed what is stored.

Imported as a whole by what saves, and by nobody in the middle of a call: a fork may find an import under way.
"""

import platform
from contextlib import suppress
from importlib import metadata
from typing import Final

_VERSIONED: Final = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm")


def versions_of() -> dict[str, str]:
    """What decides the last bits beside the model: versions of mlx, its backends and mlx-lm, machine and system."""
    found = {"machine": platform.machine(), "system": platform.system()}
    for name in _VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
