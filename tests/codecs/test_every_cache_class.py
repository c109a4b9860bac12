"""Every cache class of the installed mlx-lm is either handled or refused with a reason."""

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.nn as nn
import mlx_lm.models
import pytest

from kvcodecs import default_provider
from kvcodecs.mlx_lm import REFUSED

pytestmark = pytest.mark.mlx_lm


def model_modules() -> Iterator[ModuleType]:
    """Every module of mlx_lm.models, but those that need a package which is not installed (one exits then)."""
    for info in pkgutil.walk_packages(mlx_lm.models.__path__, "mlx_lm.models."):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield importlib.import_module(info.name)
        except (ImportError, SystemExit) as error:
            print(f"skipped {info.name}: {error}")


def is_layer_cache(found: type[Any]) -> bool:
    """What a model could hand out for a layer: trimmable or not it says so, or it is called a cache and has a state.

    mlx-lm's base class is private; its token buffer and its cache of whole prompts answer neither question.
    """
    if found.__name__.startswith("_") or issubclass(found, nn.Module):
        return False
    return hasattr(found, "is_trimmable") or ("Cache" in found.__name__ and hasattr(found, "state"))


def layer_caches() -> dict[str, type[Any]]:
    classes = (item for module in model_modules() for item in vars(module).values() if inspect.isclass(item))
    defined = (item for item in classes if item.__module__.startswith("mlx_lm.models"))
    return {f"{item.__module__}.{item.__qualname__}": item for item in defined if is_layer_cache(item)}


def test_every_cache_class_is_handled_or_refused() -> None:
    found = layer_caches()
    handled = {name for name, item in found.items() if default_provider().handles(object.__new__(item))}
    assert handled.isdisjoint(REFUSED)
    assert set(found) - handled - set(REFUSED) == set()
    assert len(handled) >= 7
    assert set(REFUSED) <= set(found), "a class that is refused exists no more"
