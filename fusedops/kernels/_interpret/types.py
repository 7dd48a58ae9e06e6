"""Triton's types and NumPy's, and the errors of the interpreter."""

from typing import Any

import ml_dtypes
import numpy as np

from .._compile import private


class InterpreterError(RuntimeError):
    """A kernel failed inside the interpreter; says where and in which program."""


class UnsupportedError(InterpreterError, NotImplementedError):
    """A kernel uses what the interpreter does not have."""


class BlockConditionError(TypeError):
    """A condition is a block, not a scalar."""


_LOW = {
    "bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz, "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
_LOW_TYPES = {np.dtype(t) for t in _LOW.values()}
_NUMPY = {"int1": np.dtype(bool), "fp16": np.dtype("f2"), "fp32": np.dtype("f4"), "fp64": np.dtype("f8")}
_NUMPY |= {name: np.dtype(t) for name, t in _LOW.items()}
_NUMPY |= {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
_TRITON = {dtype: name for name, dtype in _NUMPY.items()}


def numpy_type(kind: Any) -> np.dtype:
    """NumPy's dtype for a Triton type, block types included; pointers are addresses."""
    if kind.is_block():
        kind = kind.element_ty
    if kind.is_ptr():
        return np.dtype(np.uint64)
    try:
        return _NUMPY[kind.name]
    except KeyError:
        raise UnsupportedError(f"the interpreter has no type {kind.name}") from None


def triton_type(dtype: Any) -> Any:
    """Triton's type for a NumPy or ml_dtypes dtype."""
    import triton.language as tl

    try:
        return tl.dtype(_TRITON[np.dtype(dtype)])
    except KeyError:
        raise TypeError(f"Triton has no type for the dtype {dtype}") from None


def is_low(dtype: np.dtype) -> bool:
    """Whether NumPy itself lacks this floating-point type."""
    return dtype in _LOW_TYPES


def wide(data: np.ndarray) -> np.ndarray:
    """Floats of 8 and 16 bits in float32, which holds them exactly; others as they are."""
    return data.astype(np.float32) if data.dtype in _LOW_TYPES or data.dtype == np.float16 else data


def handle(data: np.ndarray, kind: Any) -> Any:
    """Triton's pair of an array and its element type."""
    return private("triton.runtime.interpreter").TensorHandle(data, kind.scalar)


def tensor(data: np.ndarray, kind: Any) -> Any:
    """A Triton tensor of element type `kind`: a block with the shape of `data`, a scalar for shape ()."""
    import triton.language as tl

    if data.shape == ():
        return tl.tensor(handle(data.reshape(1), kind), kind.scalar)
    return tl.tensor(handle(data, kind), tl.block_type(kind.scalar, list(data.shape)))
