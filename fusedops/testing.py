"""The one numerics check: a kernel may err as much as plain JAX does, and no more."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


class Error(NamedTuple):
    """How far an array is from the truth.

    Fields:
      relative: |actual - truth| / |truth| in the Euclidean norm over all elements.
      peak: the largest |actual - truth|, each against its row's scale. A row runs along the last axis;
        its scale is the largest |truth| in it, and at least the root mean square of the whole truth.
      worst: the index of the peak.
    """

    relative: float
    peak: float
    worst: tuple[int, ...]


def error(actual: Any, truth: Any) -> Error:
    """The error of `actual`, over the elements at which both are finite.

    Args:
      actual, truth: real or complex arrays of one shape; the difference is taken in float64.
    """
    a, t = _wide(actual), _wide(truth)
    if a.shape != t.shape:
        raise ValueError(f"error: actual has shape {a.shape}, truth has shape {t.shape}; they must be equal")
    if not a.size:
        return Error(0.0, 0.0, ())
    finite = np.isfinite(a) & np.isfinite(t)
    a, t = np.where(finite, a, 0), np.where(finite, t, 0)
    difference, size = np.abs(a - t), np.abs(t)
    norm = float(np.sqrt(np.sum(size**2)))
    rows = size.max(axis=-1, keepdims=True) if t.ndim else size
    ratio = _divide(difference, np.broadcast_to(np.maximum(rows, norm / math.sqrt(t.size)), t.shape))
    index = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), t.shape))
    relative = _divide(np.sqrt(np.sum(difference**2)), np.asarray(norm))
    return Error(float(relative), float(ratio[index]), index)


def assert_within_budget(actual: Any, reference: Any, truth: Any, *, name: str = "", factor: float = 2.0) -> None:
    """Asserts that `actual` errs at most `factor` times as much as `reference`, plus one rounding.

    From the same inputs compute three results: `actual` by the code under test, `reference` by plain JAX
    in the same dtype, and `truth` by plain JAX in a wider one (float32 at the highest matmul precision
    for half precision, float64 for float32). With r = half the machine epsilon of the dtype of `actual`:

      error(actual).relative <= factor * error(reference).relative + r
      error(actual).peak     <= factor * error(reference).peak     + r

    NaN and infinities must stand where `truth`, rounded to that dtype, has them. Integers and booleans
    must equal `truth`.

    Args:
      actual, reference, truth: arrays, or pytrees of arrays of one structure.
      name: begins the message; the path within the pytree follows it.

    Raises:
      AssertionError: with both errors, both budgets, the worst index and the values there.
      ValueError: shapes or structures differ, or `reference` is not in the dtype of `actual`.
    """
    trees = [jax.tree_util.tree_flatten_with_path(tree) for tree in (actual, reference, truth)]
    structures = [structure for _, structure in trees]
    if structures.count(structures[0]) != 3:
        listed = "; ".join(f"{k} is {s}" for k, s in zip(("actual", "reference", "truth"), structures, strict=True))
        raise ValueError(f"assert_within_budget: one structure is expected, but {listed}")
    for (path, a), (_, r), (_, t) in zip(*(found for found, _ in trees), strict=True):
        _check_leaf(a, r, t, f"{name}{jax.tree_util.keystr(path)}" or "result", factor)


def _check_leaf(actual: Any, reference: Any, truth: Any, name: str, factor: float) -> None:
    shapes, dtype = [np.shape(x) for x in (actual, reference, truth)], np.asarray(actual).dtype
    if shapes.count(shapes[0]) != 3:
        raise ValueError(f"{name}: shapes differ: actual {shapes[0]}, reference {shapes[1]}, truth {shapes[2]}")
    if np.asarray(reference).dtype != dtype:
        raise ValueError(
            f"{name}: actual is {dtype}, reference is {np.asarray(reference).dtype}; compute the reference in {dtype}"
        )
    if not jnp.issubdtype(dtype, jnp.inexact):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(truth), err_msg=name)
        return
    _check_pattern(actual, truth, dtype, name)
    rounding = float(ml_dtypes.finfo(dtype).eps) / 2
    got, plain = error(actual, truth), error(reference, truth)
    allowed = [factor * e + rounding for e in plain[:2]]
    if got.relative <= allowed[0] and got.peak <= allowed[1]:
        return
    values = [_wide(x)[got.worst] for x in (actual, reference, truth)]
    raise AssertionError(
        f"{name} ({dtype}{list(shapes[0])}) is over its error budget of {factor:g} x reference + {rounding:.2e}:\n"
        f"  relative norm {got.relative:.3e}, allowed {allowed[0]:.3e} (reference {plain.relative:.3e})\n"
        f"  peak in a row {got.peak:.3e}, allowed {allowed[1]:.3e} (reference {plain.peak:.3e})\n"
        f"  worst at {got.worst}: actual {values[0]:.9g}, reference {values[1]:.9g}, truth {values[2]:.9g}"
    )


def _check_pattern(actual: Any, truth: Any, dtype: np.dtype, name: str) -> None:
    """NaN, inf and -inf are where the truth has them."""
    with np.errstate(over="ignore"):
        rounded = _wide(np.asarray(truth).astype(dtype))
    a = _wide(actual)
    wrong = np.where(np.isfinite(rounded), ~np.isfinite(a), (a != rounded) & ~(np.isnan(a) & np.isnan(rounded)))
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name} ({dtype}{list(a.shape)}): NaN or infinities differ from the truth at {int(wrong.sum())} of "
            f"{wrong.size} elements, first at {index}: actual {a[index]}, truth {rounded[index]}"
        )


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """The quotient, with 0 / 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(numerator == 0, 0.0, numerator / denominator)
