"""Importing torchvision where its compiled operators do not fit the installed torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# A library that is collected takes its declarations with it
_declared: list[torch.library.Library] = []


def torchvision_datasets() -> ModuleType:
    """``torchvision.datasets``.

    torchvision registers kernels for its operators on import, also where its extension did not load (a build for
    CUDA beside torch for the CPU): then the operators do not exist and the import fails. Data sets need none of
    them, so two empty declarations make the import pass.
    """
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [
        name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")
    ]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    _declared.append(library)
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision.datasets")
