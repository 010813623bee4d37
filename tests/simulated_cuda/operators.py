"""Properties of ATen operators on CUDA: kernels per call and hidden synchronisations.

The numbers come from PyTorch's CUDA sources or are assumed for a typical call.
Operators that are not listed launch one kernel and do not synchronise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# These operators launch no kernel. Views launch none either.
FREE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_"),
    *("detach", "detach_", "alias", "set_", "lift", "lift_fresh", "item", "_local_scalar_dense"),
    *("is_same_size", "_has_compatible_shallow_copy_type", "record_stream", "is_pinned"),
    *("_unsafe_view", "_reshape_alias", "as_strided_", "squeeze_", "unsqueeze_", "t_"),
    *("transpose_", "unbind", "split", "split_with_sizes", "unsafe_split", "unsafe_chunk"),
    *("sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "requires_grad_", "_version"),
    *("_pin_memory", "_backward", "_nested_tensor_from_mask_left_aligned"),
}

# Number of kernels of one call. In-place variants have the same number.
KERNELS = {
    "_foreach_norm": 3,
    "_linalg_eigh": 12,
    "_linalg_solve_ex": 6,
    "_linalg_svd": 20,
    "_unique2": 8,
    "argsort": 4,
    "as_strided_scatter": 2,
    "binary_cross_entropy_with_logits": 4,
    "bincount": 4,
    "constant_pad_nd": 2,
    "cosine_similarity": 6,
    "cumsum": 2,
    "diagonal_backward": 2,
    "embedding_dense_backward": 3,
    "equal": 2,
    "eye": 2,
    "gather_backward": 2,
    "index_add": 2,
    "index_copy": 2,
    "index_fill": 2,
    "index_put": 2,
    "kthvalue": 2,
    "linalg_cholesky_ex": 4,
    "linalg_eig": 20,
    "linalg_inv_ex": 6,
    "linalg_lu_factor_ex": 4,
    "linalg_qr": 6,
    "logsumexp": 5,
    "masked_fill": 2,
    "masked_select": 6,
    "max_pool2d_with_indices_backward": 2,
    "median": 3,
    "mse_loss": 2,
    "native_batch_norm_backward": 2,
    "native_group_norm": 2,
    "native_group_norm_backward": 3,
    "nll_loss2d_forward": 2,
    "nonzero": 4,
    "randperm": 4,
    "repeat_interleave": 3,
    "scatter": 2,
    "scatter_add": 2,
    "select_backward": 2,
    "select_scatter": 2,
    "slice_backward": 2,
    "slice_scatter": 2,
    "sort": 4,
    "topk": 2,
    "unique_dim": 8,
    "upsample_bilinear2d_backward": 2,
}

# Number of synchronisations inside one call.
SYNCHRONISATIONS = {
    "_linalg_check_errors": 1,
    "_linalg_eigh": 1,
    "_linalg_svd": 1,
    "_unique2": 2,
    "bincount": 2,
    "equal": 1,
    "histc": 1,
    "is_nonzero": 1,
    "linalg_eig": 3,
    "linalg_eigvals": 3,
    "linalg_lstsq": 1,
    "masked_select": 1,
    "nonzero": 1,
    "unique_consecutive": 1,
    "unique_dim": 2,
}

# These operators may have tensors of several devices.
COPIES = {"copy_", "_foreach_copy_", "_copy_from", "_copy_from_and_resize", "set_"}
INDEXING = {
    *("index", "index_put", "index_put_"),
    *("_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
}
# These operators accept a 0-dim CPU tensor, although they are not tagged as pointwise.
TAKES_CPU_SCALAR = {
    *("fill", "fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "full"),
    *("where", "clamp", "clamp_min", "clamp_max", "lerp", "lerp_", "copysign", "pow"),
    *("floor_divide", "fmod", "remainder", "_foreach_add", "_foreach_add_"),
    *("_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_"),
}

# These matrix products need CUBLAS_WORKSPACE_CONFIG to be deterministic.
CUBLAS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "addbmm"}
NOT_FOR_INTEGERS = {*CUBLAS, "convolution"}

# torch.use_deterministic_algorithms(True) refuses these operators on CUDA.
NONDETERMINISTIC = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "histc": "_histc_cuda",
    "kthvalue": "kthvalue CUDA",
    "max_unpool2d": "max_unpooling2d_forward_out",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "put_": "put_",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
}

# MultiTensorApply.cuh has these limits: the tensors of one launch, by the number of
# lists, and the chunks of one launch.
_MAX_TENSORS = (110, 64, 48, 36, 30)
_MAX_CHUNKS = 320
_CHUNK = 65536
_INTEGER_FOREACH = {
    f"_foreach_{name}"
    for name in ("add", "add_", "mul", "mul_", "sub", "sub_", "copy_", "zero_", "maximum_")
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class Operator:
    """The properties of an operator that its schema contains.

    Args:
        func: Overload that a `TorchDispatchMode` receives.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        aliases = [each.alias_info for each in schema.returns if each.alias_info is not None]

        self.name: str = schema.name.partition("::")[2]
        self.full = str(func)
        self.is_pointwise = torch.Tag.pointwise in func.tags
        self.is_foreach = self.name.startswith("_foreach")
        self.takes_generator = any(each.name == "generator" for each in schema.arguments)
        self.written = [
            number
            for number, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        is_view = bool(aliases) and not any(each.is_write for each in aliases)
        self.is_free = is_view or self.name in FREE or schema.name.startswith("prim::")

    def outputs_among(self, args: Sequence[Any]) -> list[Tensor]:
        """Return the arguments that the operator writes to."""
        given = [args[number] for number in self.written if number < len(args)]
        return list(tensors_in(given))


@functools.cache
def operator(func: Any) -> Operator:
    """Return the properties of an overload."""
    return Operator(func)


def launches(op: Operator, args: Sequence[Any], out: Any) -> int:
    """Count the kernels of one call."""
    if op.is_foreach:
        return _foreach_launches(op, args)
    if op.is_free:
        return 0
    first = next(tensors_in(out), None)
    if first is not None and first.numel() == 0:
        return 0

    if op.name == "convolution_backward":
        # There is one kernel for each requested gradient: input, weight, bias.
        return sum(map(bool, args[-1]))
    count = KERNELS.get(op.name, KERNELS.get(op.name.rstrip("_"), 1))
    if op.name in INDEXING:
        count += 4 * masks_in(op, args) + (6 if len(args) > 3 and args[3] else 0)
    return count


def synchronisations(op: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Count the synchronisations inside one call, except those of copies."""
    if op.name in INDEXING:
        return masks_in(op, args)
    if op.name == "repeat_interleave":
        return int(kwargs.get("output_size") is None)
    return SYNCHRONISATIONS.get(op.name, 0)


def masks_in(op: Operator, args: Sequence[Any]) -> int:
    """Count the boolean masks of an indexing call that CUDA turns into positions.

    Writing one number through one mask becomes `masked_fill`, which needs no positions.
    """
    indices = [index for index in (args[1] or ()) if index is not None]
    masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
    writes = op.name not in ("index", "_unsafe_index")
    accumulates = len(args) > 3 and bool(args[3])
    fills = writes and len(indices) == 1 and args[2].numel() == 1 and not accumulates
    return 0 if fills else len(masks)


def nondeterministic(op: Operator, args: Sequence[Any]) -> str | None:
    """Return the name that CUDA reports for a nondeterministic call, or None."""
    if op.name in ("cumsum", "cumsum_") and args[0].dtype.is_floating_point:
        return "cumsum_cuda_kernel"
    if op.name == "bincount" and len(args) > 1 and args[1] is not None:
        return "_bincount_cuda"
    if op.name == "median" and op.full.endswith("dim"):
        return "median CUDA with indices output"
    return NONDETERMINISTIC.get(op.name)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor fills its memory without gaps and overlaps."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    return dense


def _foreach_launches(op: Operator, args: Sequence[Any]) -> int:
    """Count launches as multi_tensor_apply splits its lists.

    If the conditions of the fast path fail, there is one launch per tensor.
    """
    lists = [each for each in args if isinstance(each, (list, tuple))]
    lists = [each for each in lists if each and isinstance(each[0], Tensor)]
    if not lists:
        return 1
    is_norm = op.name == "_foreach_norm"
    if not _is_fast(op, lists):
        return len(lists[0]) * (2 if is_norm else 1)

    depth = len(lists) + (0 if op.written or is_norm else 1)
    most = _MAX_TENSORS[min(depth, len(_MAX_TENSORS)) - 1]
    sizes = [tensor.numel() for tensor in lists[0] if tensor.numel()]
    count = chunks = tensors = 0
    for number, size in enumerate(sizes, start=1):
        tensors += 1
        for left in reversed(range(-(-size // _CHUNK))):
            chunks += 1
            ends = left == 0
            if (
                (ends and tensors == most)
                or chunks == _MAX_CHUNKS
                or (ends and number == len(sizes))
            ):
                count += 1
                chunks, tensors = 0, 0 if ends else 1
    return count + (2 if is_norm else 0)


def _is_fast(op: Operator, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether ForeachUtils.h takes the fast path."""
    first = lists[0]
    dtype = first[0].dtype
    if dtype == torch.bool or any(tensor.dtype != dtype for each in lists for tensor in each):
        return False
    if not dtype.is_floating_point and op.name not in _INTEGER_FOREACH:
        return False
    if not all(is_dense(tensor) for each in lists for tensor in each):
        return False
    return all(
        _same_layout(tensor, other)
        for each in lists[1:]
        for tensor, other in zip(first, each, strict=True)
    )


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether sizes agree, and the strides of dimensions whose size is not 1."""
    return a.size() == b.size() and all(
        size == 1 or left == right
        for size, left, right in zip(a.size(), a.stride(), b.stride(), strict=True)
    )
