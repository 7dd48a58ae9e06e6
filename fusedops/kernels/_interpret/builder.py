"""Triton's interpreter, with checked memory and arithmetic that is right in every dtype.

bfloat16 and float8 are ml_dtypes arrays (Triton's own interpreter holds their bits), so that every
operation rounds once, to nearest even.
"""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np

from .._compile import private
from . import libdevice
from .memory import Memory
from .types import UnsupportedError, handle, is_low, numpy_type, triton_type, wide

# the formats whose conversion on NVIDIA GPUs saturates: PTX ISA, cvt, .satfinite
_SATURATING = {np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
_PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
_REDUCTIONS = {
    "ADD": np.add, "MIN": np.minimum, "MAX": np.maximum,
    "AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor,
}  # fmt: skip


class _MissingError(UnsupportedError, AttributeError):
    pass


def convert(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`data` in `dtype`, rounded to nearest even as the GPU does."""
    if data.dtype == dtype:
        return data
    if dtype in _SATURATING:
        limit = float(ml_dtypes.finfo(dtype).max)
        return np.clip(wide(data), -limit, limit).astype(dtype)
    return wide(data).astype(dtype) if is_low(data.dtype) else data.astype(dtype)


def _toward_zero(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    nearest = convert(data, dtype)
    over = np.abs(nearest.astype(np.float64)) > np.abs(data.astype(np.float64))
    return np.where(over, (nearest.view(f"u{dtype.itemsize}") - 1).view(dtype), nearest)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z in float64, rounded to odd, so that rounding it again rounds once."""
    product, z = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    toward = np.where(error > 0, np.inf, -np.inf)
    even = (total.view(np.uint64) & 1) == 0
    return np.where(np.isfinite(total) & (error != 0) & even, np.nextafter(total, toward), total)


def _bits(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(f"u{data.itemsize}")


def _flags(mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    if mask is None:
        return None
    data = mask if isinstance(mask, np.ndarray) else mask.data
    return np.broadcast_to(data.astype(bool, copy=False), shape)


@functools.cache
def builder_class() -> type:
    """The class, made where Triton is imported; its constructor takes the `Memory` of a launch."""
    interpreter = private("triton.runtime.interpreter")
    target = private("triton.backends.compiler.GPUTarget")("cuda", 90, 32)
    return type("Builder", (_Language, _Arithmetic, _Access, interpreter.InterpreterBuilder), {
        "native": interpreter._interpreter,
        "min_dot_size": staticmethod(private("triton.backends.nvidia.compiler.min_dot_size")(target)),
    })  # fmt: skip


class _Access:
    """Loads, stores and atomics."""

    native: Any
    memory: Memory

    def create_load(self, ptr: Any, *policy: Any) -> Any:
        return self.create_masked_load(ptr, None, None)

    def create_store(self, ptr: Any, value: Any, *policy: Any) -> None:
        self.create_masked_store(ptr, value, None)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, **options: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype, shape = numpy_type(kind), ptrs.data.shape
        on = _flags(mask, shape)
        places = self.memory.addresses("load", ptrs.data, on, dtype.itemsize)
        fill = np.zeros(shape, dtype) if other is None else np.broadcast_to(convert(other.data, dtype), shape)
        on = np.ones(shape, bool) if on is None else np.ascontiguousarray(on)
        read = self.native.load(np.ascontiguousarray(places), on, _bits(fill), np.dtype(f"u{dtype.itemsize}"))
        return handle(read.view(dtype), kind)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *policy: Any, **options: Any) -> None:
        dtype, shape = numpy_type(ptrs.get_element_ty()), ptrs.data.shape
        on = _flags(mask, shape)
        places = self.memory.addresses("store", ptrs.data, on, dtype.itemsize)
        data = _bits(np.broadcast_to(convert(value.data, dtype), shape))
        self.native.store(places, data, np.ones(shape, bool) if on is None else np.ascontiguousarray(on))

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        on = _flags(mask, ptr.data.shape)
        dtype = val.data.dtype
        if dtype == np.float16 or is_low(dtype):
            return self._serial(op, ptr, val, on)
        places = self.memory.addresses("atomic", ptr.data, on, dtype.itemsize)
        places = handle(np.ascontiguousarray(places), ptr.dtype)
        on = np.ones(ptr.data.shape, bool) if on is None else np.ascontiguousarray(on)
        if "XCHG" in str(op):  # which Triton's interpreter has for integers
            val = handle(_bits(val.data), triton_type(_bits(val.data).dtype))
        old = super().create_atomic_rmw(op, places, val, handle(on, triton_type(bool)), sem, scope)  # type: ignore
        return handle(old.data.view(dtype), triton_type(dtype))

    def _serial(self, op: Any, ptr: Any, val: Any, on: np.ndarray | None) -> Any:
        """Atomics on floats of 8 and 16 bits, one element after the other."""
        name = str(op).rsplit(".", 1)[-1].lstrip("F")
        if name != "XCHG" and name not in _REDUCTIONS:
            raise UnsupportedError(f"the interpreter has no atomic {name} on {val.data.dtype}")
        old = np.zeros(ptr.data.shape, val.data.dtype)
        values = np.broadcast_to(val.data, ptr.data.shape)
        for i in np.ndindex(*ptr.data.shape):
            if on is None or on[i]:
                one = handle(ptr.data[i].reshape(1), ptr.dtype)
                before = self.create_load(one).data
                old[i] = before[0]
                after = values[i].reshape(1) if name == "XCHG" else _REDUCTIONS[name](before, values[i].reshape(1))
                self.create_store(one, handle(after, val.dtype))
        return handle(old, val.dtype)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        places = self.memory.addresses("atomic", ptr.data, None, cmp.data.itemsize)
        data = [handle(_bits(x.data), triton_type(_bits(x.data).dtype)) for x in (cmp, val)]
        old = super().create_atomic_cas(handle(places, ptr.dtype), *data, sem, scope)  # type: ignore
        return handle(old.data.view(cmp.data.dtype), cmp.dtype)

    def create_descriptor_reduce(self, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        name = str(kind).rsplit(".", 1)[-1]
        if name not in _REDUCTIONS:
            raise UnsupportedError(f"the interpreter has no descriptor reduction {name}")
        ptrs, mask = desc.materialize_pointers(indices)
        old = self.create_masked_load(ptrs, mask, None)
        self.create_masked_store(ptrs, handle(_REDUCTIONS[name](old.data, value.data), value.dtype), mask)


class _Arithmetic:
    """Conversions and operations on values."""

    def cast_impl(self, src: Any, kind: Any) -> Any:
        return handle(convert(src.data, numpy_type(kind)), kind)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def create_int_cast(self, src: Any, kind: Any, is_signed: bool) -> Any:
        return self.cast_impl(src, kind)

    def create_fp_to_fp(self, src: Any, kind: Any, rounding: Any) -> Any:
        if rounding is not None and "RTZ" in str(rounding):
            return handle(_toward_zero(src.data, numpy_type(kind)), kind)
        return self.cast_impl(src, kind)

    def create_bitcast(self, src: Any, kind: Any) -> Any:
        return handle(np.ascontiguousarray(src.data).view(numpy_type(kind)), kind)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    def get_bf16(self, value: float) -> Any:
        return handle(np.array([value], ml_dtypes.bfloat16), triton_type(ml_dtypes.bfloat16))

    def unary_op(self, arg: Any, op: Any) -> Any:
        return handle(op(wide(arg.data)).astype(arg.data.dtype), arg.dtype)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        """int1 is an integer of one bit, where NumPy's booleans saturate."""
        if lhs.data.dtype == bool and rhs.data.dtype == bool:
            return handle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(bool), lhs.dtype)
        return handle(op(lhs.data, rhs.data), triton_type(bool) if op in _COMPARISONS else lhs.dtype)

    # the GPU's minimum ignores NaN unless told otherwise
    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        least, most = (np.minimum, np.maximum) if str(propagate_nan).endswith("ALL") else (np.fmin, np.fmax)
        return self.binary_op(self.binary_op(x, low, most), high, least)

    def create_fabs(self, arg: Any) -> Any:
        return self.unary_op(arg, np.abs)

    def create_erf(self, arg: Any) -> Any:
        return self.unary_op(arg, libdevice.erf)

    def create_rsqrt(self, arg: Any) -> Any:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        dtype = z.data.dtype
        if dtype == np.float64:
            longer = x.data.astype(np.longdouble) * y.data + z.data
            return handle(longer.astype(dtype), z.dtype)
        return handle(_fma(*np.broadcast_arrays(x.data, y.data, z.data)).astype(dtype), z.dtype)

    def create_ashr(self, lhs: Any, rhs: Any) -> Any:
        signed = f"i{lhs.data.itemsize}"
        shifted = np.right_shift(lhs.data.astype(signed), rhs.data.astype(signed))
        return handle(shifted.astype(lhs.data.dtype), lhs.dtype)

    def create_umulhi(self, lhs: Any, rhs: Any) -> Any:
        bits = 8 * lhs.data.itemsize
        x, y = (h.data.view(f"u{h.data.itemsize}").astype(np.uint64) for h in (lhs, rhs))
        if bits < 64:
            high = x * y >> np.uint64(bits)
        else:
            half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
            a, b, c, d = x >> half, x & low, y >> half, y & low
            middle = (b * d >> half) + (a * d & low) + (b * c & low)
            high = a * c + (a * d >> half) + (b * c >> half) + (middle >> half)
        return handle(high.astype(f"u{lhs.data.itemsize}").view(lhs.data.dtype), lhs.dtype)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        """Sums in float64 and rounds once, whatever the input precision."""
        out = d.data.dtype
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        if out.kind in "iu":
            product = product.astype(np.int64).astype(out)
        return handle((product + d.data).astype(out), d.dtype)

    def create_dot_scaled(
        self, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any,
        fast_math: bool, a_packed: bool, b_packed: bool, d: Any,
    ) -> Any:  # fmt: skip
        x = _scaled(a.data, a_scale, a_format, -1 if a_packed else -2, -1)
        y = _scaled(b.data, b_scale, b_format, -2 if b_packed else -1, -2)
        return handle((np.matmul(x, y) + wide(d.data)).astype(d.data.dtype), d.dtype)

    def create_extern_elementwise(self, lib: str, path: str, symbol: str, args: Any, kind: Any, is_pure: bool) -> Any:
        result = np.asarray(libdevice.function(symbol)(*(wide(a.data) for a in args)))
        return handle(result.astype(numpy_type(kind)), kind)


_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def _scaled(data: np.ndarray, scale: Any, kind: Any, packed_axis: int, k_axis: int) -> np.ndarray:
    """An operand of dot_scaled in float32; scales are powers of two of [rows, K / group]."""
    if str(kind).endswith("E2M1"):
        data = np.moveaxis(data, packed_axis, -1)
        data = np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)
        data = np.moveaxis(data.astype(np.uint8).view(np.uint8), -1, packed_axis)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        data = np.where(data & 8, -1, 1).astype(np.float32) * table[data & 7]
    values = wide(data)
    if scale is None:
        return values
    factors = scale.data
    if factors.dtype.kind in "iu":
        factors = factors.view(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    factors = factors.astype(np.float32)
    factors = np.repeat(factors, values.shape[k_axis] // factors.shape[-1], -1)
    return values * (factors if k_axis == -1 else np.swapaxes(factors, -1, -2))


class _Language:
    """The rest."""

    grid_idx: tuple[int, int, int]

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.options = dataclasses.replace(self.options, allowed_dot_input_precisions=_PRECISIONS)  # type: ignore
        self.codegen_fns["min_dot_size"] = self.min_dot_size  # type: ignore

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _MissingError(f"Triton's interpreter has no {name.removeprefix('create_')}")

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        x = data.data.astype(np.int64)
        valid = (x >= 0) & (x < bins)
        if mask is not None:
            valid &= mask.data
        return handle(np.bincount(x[valid], minlength=bins).astype(np.int32), triton_type(np.int32))

    def create_print(self, prefix: str, hex: bool, values: Any, is_signed: Any) -> None:
        for value in values:
            data = np.vectorize("0x{:x}".format)(_bits(value.data)) if hex else value.data
            print(f"{self.grid_idx}{prefix}{data}")

    def create_inline_asm(self, asm: str, *rest: Any) -> Any:
        raise UnsupportedError(f"inline assembly has no interpreter: {asm!r}")
