"""NumPy for the functions of CUDA's libdevice."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .types import UnsupportedError


def _each(function: Callable[[float], float]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of Python's math, element by element; poles are inf and what is undefined is NaN."""

    def one(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return np.vectorize(one, otypes=[np.float64])


erf = _each(math.erf)
_erfc = _each(math.erfc)


def _popcount(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x.view(f"u{x.itemsize}")).astype(np.int32)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    bits = 8 * x.itemsize
    return np.vectorize(lambda v: bits - int(v).bit_length(), otypes=[np.int32])(x.view(f"u{x.itemsize}"))


def _half_away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(10.0, x), "expm1": np.expm1,
    "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "logb": lambda x: np.floor(np.log2(np.abs(x))),
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "sinpi": lambda x: np.sin(np.pi * x), "cospi": lambda x: np.cos(np.pi * x),
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "rcbrt": lambda x: 1 / np.cbrt(x),
    "rcp": lambda x: 1 / x, "pow": np.power, "powi": np.power, "fmod": np.fmod,
    "remainder": lambda x, y: x - np.rint(x / y) * y,
    "hypot": np.hypot, "rhypot": lambda x, y: 1 / np.hypot(x, y), "fabs": np.abs, "abs": np.abs, "llabs": np.abs,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint, "llrint": np.rint,
    "round": _half_away, "llround": _half_away, "copysign": np.copysign, "nextafter": np.nextafter,
    "ldexp": np.ldexp, "scalbn": np.ldexp, "fmin": np.fmin, "fmax": np.fmax, "min": np.minimum, "max": np.maximum,
    "fdim": lambda x, y: np.where(x > y, x - y, 0), "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "isnan": np.isnan, "isinf": np.isinf, "finite": np.isfinite, "isfinite": np.isfinite, "signbit": np.signbit,
    "erf": erf, "erfc": _erfc, "normcdf": lambda x: 0.5 * _erfc(-x / math.sqrt(2)),
    "erfcx": lambda x: np.exp(np.float64(1) * x * x) * _erfc(x),
    "lgamma": _each(math.lgamma), "tgamma": _each(math.gamma), "fma": lambda x, y, z: x * y + z,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "divide": np.divide,
    "popc": _popcount, "popcll": _popcount, "clz": _leading_zeros, "clzll": _leading_zeros,
}  # fmt: skip


def function(symbol: str) -> Callable[..., Any]:
    """The NumPy function behind a libdevice symbol such as __nv_fast_expf.

    Raises:
      UnsupportedError: there is none; the message names it.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_").removesuffix("_rn")
    names = [name, re.sub("[fd]$", "", name), re.sub("^[fd]", "", name)]
    for candidate in [*names, re.sub("[fd]$", "", names[2])]:
        if candidate in _FUNCTIONS:
            return _FUNCTIONS[candidate]
    raise UnsupportedError(f"the libdevice function {symbol} has no interpreter")
