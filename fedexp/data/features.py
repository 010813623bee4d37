"""Features that a frozen network (the extractor) computes once per data set.

Only the remaining layers are trained, with these features as inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock

from fedexp.core.data import FederatedData, Samples
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of
from fedexp.core.trees import Tree, digest
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.identity import code_hash
from fedexp.storage.tensors import load_sealed, save_sealed

# Images per forward pass. The number is fixed, because another number may change the
# last bits of the features
_BATCH = 128


def featured(
    data: FederatedData, extractor: ModelSpec, folder: Path | None, note: Callable[[str], None]
) -> FederatedData:
    """Replace the inputs of every split of `data` by their features.

    The features are on the device of the inputs and are not normalised again.

    Args:
        data: Data whose inputs are replaced.
        extractor: A network whose outputs are features. None of its parameters are
            trained.
        folder: Folder in which features are stored for other runs. The file name is a
            hash of everything that determines the features. If None, features are not
            stored.
        note: Function that receives messages for the user.
    """
    like = data.train
    weights = Weights.init(extractor, seed_of("features"), like.x.device, like.dtype)

    splits = {"train": data.train, "test": data.test, "val": data.val, "proxy": data.proxy}
    given = {name: samples for name, samples in splits.items() if samples is not None}

    if folder is None:
        tree = _extract(given, weights, note)
    else:
        key = _key(given, weights)
        path = folder / key[:2] / f"{key}.safetensors"
        with contextlib.ExitStack() as stack:
            # If the folder cannot be written, each run computes its features
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                # Only one run of a sweep computes the features
                lock = stack.enter_context(FileLock(folder / f"{key}.lock"))
                stack.callback(Path(lock.lock_file).unlink, missing_ok=True)
            stored = load_sealed(
                path,
                like.x.device,
                lambda: note("stored features were damaged: they are computed again"),
            )
            tree = stored[0] if stored else _extract(given, weights, note)
            if stored is None:
                try:
                    save_sealed(path, tree)
                except OSError as error:
                    note(f"features cannot be stored in {folder} ({error.strerror or error})")

    parts = {
        name: Samples(tree[name], samples.y, dtype=samples.dtype) for name, samples in given.items()
    }
    return replace(
        data,
        train=parts["train"],
        test=parts["test"],
        val=parts.get("val"),
        proxy=parts.get("proxy"),
    )


def _extract(splits: dict[str, Samples], weights: Weights, note: Callable[[str], None]) -> Tree:
    began = time.perf_counter()
    net = Net.for_evaluation(weights)
    tree: Tree = {}

    with torch.no_grad():
        for name, samples in splits.items():
            parts = [
                net(weights.params, weights.buffers, samples.inputs(slice(start, start + _BATCH)))
                for start in range(0, len(samples), _BATCH)
            ]
            tree[name] = torch.cat(parts)

    note(
        f"features of {sum(map(len, splits.values())):,} samples computed once, "
        f"in {time.perf_counter() - began:.1f} s"
    )
    return tree


def _key(splits: dict[str, Samples], weights: Weights) -> str:
    """Return a hash of everything that affects any bit of the features."""
    kwargs = {
        key: value for key, value in weights.spec.kwargs if key not in ("pretrained", "sha256")
    }
    device = next(iter(weights.params.values())).device

    parts = [
        [weights.spec.arch, kwargs, digest(weights.params), digest(weights.buffers)],
        [[name, digest({"x": s.x}), s.mean, s.std, str(s.dtype)] for name, s in splits.items()],
        [
            device.type,
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
            torch.are_deterministic_algorithms_enabled(),
        ],
        code_hash(
            {
                "model": {"_target_": weights.spec.arch},
                "features": {"_target_": f"{__name__}.featured"},
            }
        ),
    ]

    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()
