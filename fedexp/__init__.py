"""Federated aggregation methods, compared: `run`, `load`, `Run` and `save_models` are all that Python code needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedexp.api import Run, load, run, save_models

__version__ = "0.2.0"
__all__ = ["Run", "__version__", "load", "run", "save_models"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when it is first used: `import fedexp` costs nothing
        from fedexp import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedexp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
