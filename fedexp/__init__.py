"""fedexp compares federated aggregation methods.

Python code needs only `run`, `load`, `Run` and `save_models`. They are defined in
`fedexp.api` and are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedexp.api import Run, load, run, save_models

__version__ = "0.2.0"
__all__ = ["Run", "__version__", "load", "run", "save_models"]


def __getattr__(name: str) -> Any:
    # The import happens at the first use, so that `import fedexp` costs nothing.
    if name in __all__:
        from fedexp import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedexp' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
