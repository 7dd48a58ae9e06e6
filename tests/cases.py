"""The table of ops that the cross-cutting tests go through: one entry per op and mode."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fusedops


class Case(NamedTuple):
    """One op in one mode.

    Fields:
      name: unique; the first word is the op as `fusedops.explain` shows it.
      fn: the public function; takes the operands, the options and `implementation=`.
      axes: one axis string per operand, letters into `sizes`.
      sizes: the size of every axis, small.
      options: keyword arguments that make up the mode.
      toggles: more keyword arguments; each entry must change the first result.
      odd: sizes that no block divides, replacing entries of `sizes`.
      empty: sizes of which one is 0.
      differentiable: operands with gradients.
      draw: for an operand that is not normally distributed, `(rng, shape) -> numpy array`, by number.
    """

    name: str
    fn: Callable[..., Any]
    axes: tuple[str, ...]
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = {}
    toggles: tuple[Mapping[str, Any], ...] = ()
    odd: tuple[Mapping[str, int], ...] = ()
    empty: tuple[Mapping[str, int], ...] = ()
    differentiable: tuple[int, ...] = (0,)
    draw: Mapping[int, Callable[..., np.ndarray]] = {}

    def __call__(self, *operands: Any, implementation: str | None = None) -> tuple[jax.Array, ...]:
        """The results, as a tuple."""
        results = self.fn(*operands, **self.options, implementation=implementation)
        return results if isinstance(results, tuple) else (results,)

    def operands(self, dtype: Any = "float32", seed: int = 0, **sizes: int) -> tuple[np.ndarray, ...]:
        """Operands drawn at random; floating ones are rounded to `dtype`."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        known = {**self.sizes, **sizes}
        shapes = [tuple(known[axis] for axis in axes.split()) for axes in self.axes]
        return tuple(
            self.draw[i](rng, shape) if i in self.draw else rng.normal(size=shape).astype(np.float32).astype(dtype)
            for i, shape in enumerate(shapes)
        )


QKV = ("B T N H", "B S K H", "B S K D")

CASES = (
    Case(
        "attention", fusedops.attention, QKV, dict(B=2, T=24, S=40, N=2, K=2, H=16, D=16),
        toggles=(dict(is_causal=True), dict(scale=0.5)),
        odd=(
            dict(B=1, T=1, S=1, H=1, D=1), dict(T=1, S=7, H=8, D=24), dict(T=17, S=33, H=20, D=12),
            dict(B=1, T=65, S=129, N=6, K=2),
        ),
        empty=(dict(S=0), dict(T=0), dict(B=0)), differentiable=(0, 1, 2),
    ),
    Case(
        "attention causal", fusedops.attention, QKV, dict(B=2, T=40, S=24, N=4, K=2, H=16, D=16),
        options=dict(is_causal=True, return_residual=True), toggles=(dict(is_causal=False),),
        odd=(dict(T=5, S=2), dict(T=2, S=5, N=3, K=1, H=3, D=5), dict(B=1, T=70, S=67, H=40, D=8)),
        empty=(dict(S=0), dict(T=0), dict(N=0, K=1)), differentiable=(0, 1, 2),
    ),
)  # fmt: skip


def cotangents(results: tuple[jax.Array, ...], seed: int = 1) -> tuple[Any, ...]:
    """Random cotangents of the shapes and dtypes of `results`."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=r.shape).astype(np.float32).astype(r.dtype)) for r in results)
