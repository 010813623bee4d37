"""fedexp compares federated aggregation methods.

Python code needs only `run`, `load`, `runs`, `Run` and `save_models`. These names are
defined in `fedexp.api`, which is imported when one of them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedexp.api import Run, load, run, runs, save_models

__version__ = "0.2.0"
__all__ = ["Run", "__version__", "load", "run", "runs", "save_models"]


def __getattr__(name: str) -> Any:
    # `fedexp.api` is imported when a name is first used, so `import fedexp` is fast.
    if name in __all__:
        from fedexp import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedexp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
