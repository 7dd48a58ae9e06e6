"""tl.reduce, tl.associative_scan and tl.map_elementwise: whole blocks combined at once.

Values are combined in a tree, as on the GPU, so that low-precision sums round as often as there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .types import BlockConditionError, is_low, numpy_type, tensor

Arrays = list[np.ndarray]


def reduce(value: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """tl.reduce of a tensor or a tuple of tensors."""
    parts, rank = _parts(value), len(_parts(value)[0].shape)
    axis, keep_dims = getattr(axis, "value", axis), getattr(keep_dims, "value", keep_dims)
    last = (lambda x: x.reshape(-1)) if axis is None else (lambda x: np.moveaxis(x, _axis(axis, rank), -1))
    data = [last(part.handle.data) for part in parts]
    kinds = [part.dtype for part in parts]
    fast = _fast(combine_fn, data[0]) if len(parts) == 1 else None
    if fast is not None:
        data = [fast.reduce(data[0], -1, dtype=data[0].dtype)]
    else:
        while data[0].shape[-1] > 1:
            data = _combine(combine_fn, kinds, [x[..., ::2] for x in data], [x[..., 1::2] for x in data])
        data = [x[..., 0] for x in data]
    if keep_dims:
        data = [x.reshape((1,) * rank) if axis is None else np.expand_dims(x, axis) for x in data]
    return _packed(value, data, kinds)


def associative_scan(value: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    """tl.associative_scan of a tensor or a tuple of tensors."""
    parts = _parts(value)
    axis, reverse = _axis(getattr(axis, "value", axis), len(parts[0].shape)), getattr(reverse, "value", reverse)
    turn = (lambda x: x[..., ::-1]) if reverse else (lambda x: x)
    data = [turn(np.moveaxis(part.handle.data, axis, -1)) for part in parts]
    kinds = [part.dtype for part in parts]
    fast = _fast(combine_fn, data[0]) if len(parts) == 1 else None
    if fast is not None:
        data = [fast.accumulate(data[0], -1, dtype=data[0].dtype)]
    else:
        step = 1
        while step < data[0].shape[-1]:
            before = [np.concatenate([x[..., :step], x[..., :-step]], -1) for x in data]
            joined = _combine(combine_fn, kinds, before, data)
            data = [np.concatenate([x[..., :step], y[..., step:]], -1) for x, y in zip(data, joined, strict=True)]
            step *= 2
    return _packed(value, [np.moveaxis(turn(x), -1, axis) for x in data], kinds)


def map_elementwise(scalar_fn: Any, *args: Any, pack: Any = 1, **_: Any) -> Any:
    """tl.map_elementwise: `scalar_fn` of every `pack` elements of tensors of one shape after broadcasting."""
    pack = getattr(pack, "value", pack)
    data = [x.reshape(-1, pack) for x in np.broadcast_arrays(*(arg.handle.data for arg in args))]
    rows = []
    for row in range(len(data[0])):
        scalars = [tensor(x[row, i], arg.dtype) for x, arg in zip(data, args, strict=True) for i in range(pack)]
        rows.append(_parts(scalar_fn(*scalars)))
    shape = np.broadcast_shapes(*(arg.handle.data.shape for arg in args))
    results = []
    for first in range(0, len(rows[0]), pack):
        values = [part.handle.data.reshape(1) for row in rows for part in row[first : first + pack]]
        results.append(tensor(np.concatenate(values).reshape(shape), rows[0][first].dtype))
    return results[0] if len(results) == 1 else tuple(results)


def _parts(value: Any) -> tuple[Any, ...]:
    return (value,) if hasattr(value, "handle") else tuple(value)


def _packed(value: Any, data: Arrays, kinds: list[Any]) -> Any:
    tensors = tuple(tensor(np.ascontiguousarray(x) if x.shape else x, k) for x, k in zip(data, kinds, strict=True))
    return tensors[0] if hasattr(value, "handle") else tensors


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a block with {rank} axes")
    return axis % rank


def _fast(combine_fn: Any, data: np.ndarray) -> np.ufunc | None:
    """NumPy's own way, where it gives what the tree gives."""
    import triton.language as tl

    if is_low(data.dtype) or data.dtype in (np.float16, bool):
        return None
    if combine_fn is tl.standard._sum_combine:
        return np.add
    if combine_fn is tl.standard._elementwise_max:
        return np.fmax
    return np.fmin if combine_fn is tl.standard._elementwise_min else None


def _combine(combine_fn: Any, kinds: list[Any], left: Arrays, right: Arrays) -> Arrays:
    """combine_fn of blocks; element by element where it has conditions on its values."""
    dtypes = [numpy_type(kind) for kind in kinds]

    def call(wrap: Callable[[np.ndarray], np.ndarray], x: Arrays, y: Arrays) -> Arrays:
        blocks = [tensor(wrap(data), kind) for side in (x, y) for data, kind in zip(side, kinds, strict=True)]
        result = combine_fn(*blocks)
        result = result if isinstance(result, tuple) or hasattr(result, "values") else (result,)
        values = [np.asarray(r.handle.data if hasattr(r, "handle") else getattr(r, "value", r)) for r in result]
        return [v.astype(dtype, copy=False) for v, dtype in zip(values, dtypes, strict=True)]

    try:
        return [np.broadcast_to(v, left[0].shape) for v in call(np.ascontiguousarray, left, right)]
    except BlockConditionError:
        out = [np.empty(left[0].shape, dtype) for dtype in dtypes]
        for i in np.ndindex(*left[0].shape):
            for whole, value in zip(out, call(np.asarray, [x[i] for x in left], [y[i] for y in right]), strict=True):
                whole[i] = value.reshape(())
        return out
