"""Arithmetic on trees. A tree is a ``dict[str, Tensor]``, such as a model's parameters.

The trees that a function combines must have the same keys. The result has the order of
the first tree. All functions are pure. An arithmetic function makes one fused call for
all tensors.
"""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fedexp.core.device import has_float64, is_there, on_cpu, to_device

Tree = dict[str, Tensor]
# Several trees by name, for example a broadcast of the server or a client's state.
Trees = Mapping[str, Tree]


def _like(tree: Tree, values: list[Tensor] | tuple[Tensor, ...]) -> Tree:
    return dict(zip(tree, values, strict=True))


def tensors(tree: Tree, like: Tree | None = None) -> list[Tensor]:
    """Return the tensors of a tree as a list.

    Args:
        tree: The tree.
        like: Tree whose order the list has. None stands for the order of `tree`.

    Raises:
        ValueError: The trees have different keys.
    """
    if like is None:
        return list(tree.values())
    if tree.keys() != like.keys():
        odd = sorted(tree.keys() ^ like.keys())
        raise ValueError(f"only one of two trees has {', '.join(map(repr, odd[:3]))}")
    return [tree[name] for name in like]


def zeros_like(tree: Tree) -> Tree:
    """Return a tree of zeros."""
    zeros = {name: torch.empty_like(value) for name, value in tree.items()}
    for names in by_dtype(tree):
        torch._foreach_zero_([zeros[name] for name in names])
    return zeros


def clone(tree: Tree) -> Tree:
    """Return a detached copy of a tree."""
    copies = {name: torch.empty_like(value) for name, value in tree.items()}
    for names in by_dtype(tree):
        torch._foreach_copy_(
            [copies[name] for name in names], [tree[name].detach() for name in names]
        )
    return copies


def on_device(tree: Tree, device: torch.device) -> Tree:
    """Return the tree on `device`.

    If all tensors are on the device already, the tree itself is returned. Otherwise all
    tensors of one dtype are copied as one tensor, with one synchronisation.
    """
    if all(is_there(value, device) for value in tree.values()):
        return tree
    there = dict(tree)  # in the order of the tree
    for names in by_dtype(tree):
        flat = torch.cat([tree[name].detach().reshape(-1) for name in names])
        flat = to_device(flat, device) if on_cpu(flat.device) else flat.to(device)
        parts = torch.split(flat, [tree[name].numel() for name in names])
        there |= {
            name: part.view(tree[name].shape) for name, part in zip(names, parts, strict=True)
        }
    # The results of some kernels depend on the alignment of their inputs in memory, in
    # the last bits. The parts are views and may be unaligned, so they are copied.
    return clone(there)


def by_dtype(tree: Tree) -> list[list[str]]:
    """Return the names of the tensors, grouped by dtype.

    A fused call is fast only for tensors of one dtype. With several dtypes it launches
    one kernel per tensor.
    """
    groups: dict[torch.dtype, list[str]] = {}
    for name, value in tree.items():
        groups.setdefault(value.dtype, []).append(name)
    return list(groups.values())


def add(a: Tree, b: Tree, alpha: float = 1.0) -> Tree:
    """Return ``a + alpha * b``."""
    return _like(a, torch._foreach_add(tensors(a), tensors(b, a), alpha=alpha))


def sub(a: Tree, b: Tree, alpha: float = 1.0) -> Tree:
    """Return ``a - alpha * b``."""
    return _like(a, torch._foreach_sub(tensors(a), tensors(b, a), alpha=alpha))


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """Return ``factor * tree``."""
    return _like(tree, torch._foreach_mul(tensors(tree), factor))


def mul(a: Tree, b: Tree) -> Tree:
    """Return the elementwise product."""
    return _like(a, torch._foreach_mul(tensors(a), tensors(b, a)))


def div(a: Tree, b: Tree) -> Tree:
    """Return the elementwise quotient ``a / b``."""
    return _like(a, torch._foreach_div(tensors(a), tensors(b, a)))


def sqrt(tree: Tree) -> Tree:
    """Return the elementwise square root."""
    return _like(tree, torch._foreach_sqrt(tensors(tree)))


def sign(tree: Tree) -> Tree:
    """Return the elementwise sign."""
    return _like(tree, torch._foreach_sign(tensors(tree)))


def norm(tree: Tree) -> Tensor:
    """Return the Euclidean norm of the whole tree as one vector.

    The result is a scalar tensor in the tree's dtype. The device is not synchronised.
    """
    return joint_norm(tensors(tree)) if tree else torch.zeros(())


def joint_norm(values: list[Tensor]) -> Tensor:
    """Return the Euclidean norm over all entries of several tensors, a scalar tensor.

    The device is not synchronised.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
    return norm


def squared_norm(tree: Tree) -> float:
    """Return the squared Euclidean norm of the whole tree, accumulated in float64."""
    values = (value if has_float64(value.device) else value.cpu() for value in tree.values())
    parts = [torch.linalg.vector_norm(value, dtype=torch.float64) ** 2 for value in values]
    return float(torch.stack(parts).sum()) if parts else 0.0


def total(values: Iterable[Tensor]) -> Tensor:
    """Return a scalar that is NaN or infinite if any value is NaN or infinite.

    The scalar may overflow even if all values are finite. Only floating-point tensors
    are considered. The device is not synchronised.
    """
    floating = [value for value in values if value.is_floating_point()]
    if not floating:
        return torch.zeros(())
    if on_cpu(floating[0].device):
        return torch.stack([value.sum() for value in floating]).sum()
    return torch.stack(torch._foreach_norm(floating)).sum()  # fewer launches


def nonfinite(tree: Tree) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None.

    If all values are finite, this needs one synchronisation of the device.
    """
    if not tree or math.isfinite(total(tree.values())):
        return None
    # The total of finite values may overflow, so each tensor is checked.
    floating = ((name, value) for name, value in tree.items() if value.is_floating_point())
    return next((name for name, value in floating if not value.isfinite().all()), None)


def num_bytes(tree: Tree) -> int:
    """Return the size of all tensors in bytes."""
    return sum(value.nbytes for value in tree.values())


def joined(parts: Trees) -> Tree:
    """Join several trees into one, whose names are ``<name of the tree>/<name>``."""
    return {f"{part}/{name}": value for part, tree in parts.items() for name, value in tree.items()}


def part_of(tree: Tree, part: str) -> Tree:
    """Return the tree with the name `part` from a tree that `joined` returned."""
    prefix = f"{part}/"
    return {
        name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)
    }


def digest(tree: Tree) -> str:
    """Return a hash of the names, types, shapes and bytes of all tensors."""
    # With hardware support, SHA-256 is about as fast as writing the bytes to a disk.
    state = hashlib.sha256()
    for part in _bytes_of(tree):
        state.update(part)
    return state.hexdigest()[:40]


def checksum(tree: Tree) -> int:
    """Return the CRC-32 of the names, types, shapes and bytes of all tensors.

    It detects damaged files at a fraction of the cost of `digest`. Unlike a digest, a
    checksum does not identify a tree, because different trees may have equal checksums.
    """
    return functools.reduce(lambda crc, part: zlib.crc32(part, crc), _bytes_of(tree), 0)


def _bytes_of(tree: Tree) -> Iterator[bytes | memoryview]:
    for name, value in tree.items():
        data = value.detach().contiguous().cpu()
        yield f"{name}|{data.dtype}|{tuple(data.shape)}|".encode()
        yield data.reshape(-1).view(torch.uint8).numpy().data
