"""An import of torchvision that works even if its extension does not load."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# The libraries are kept, because garbage collection would remove their declarations
_declared: list[torch.library.Library] = []


def torchvision_module(name: str) -> ModuleType:
    """Import a module of torchvision, for example ``torchvision.datasets``.

    On import, torchvision registers kernels for the operators of its extension. If the
    extension did not load (for example torchvision for CUDA with torch for the CPU),
    the operators do not exist and the import fails. fedexp does not need the
    operators. This function therefore declares two of the operators without an
    implementation, and the import succeeds.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise

    for loaded in [
        other for other in sys.modules if other == "torchvision" or other.startswith("torchvision.")
    ]:
        del sys.modules[loaded]

    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    _declared.append(library)
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
    return importlib.import_module(name)
