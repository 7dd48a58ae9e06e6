"""What the attention hooks of linen and nnx share: how options reach them, and when Flax's own attention runs."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _dispatch
from .._checks import check_choice

SOWING = "sow_weights: the fused op never forms the attention weights"
BIAS = "bias: the fused op takes none yet"
MASK = "mask: the fused op takes no mask array yet; for a causal mask leave it out and pass is_causal=True"
EINSUM = "a function for the matrix products was passed, and the fused op has its own"
PRECISION = "precision: the fused op knows None and the names and members of jax.lax.Precision"


def dropout_reason(rate: float, deterministic: bool | None, rng: Any) -> str | None:
    """Why dropout keeps the fused op from running, None if it does not.

    Raises:
      ValueError: `rate` is not in [0, 1), or dropout is active and there is no key.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate: expected a number in [0, 1), got {rate!r}")
    if deterministic or rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"dropout_rng: dropout_rate={rate!r} needs a key, got None; pass one or deterministic=True")
    return "dropout: the fused op has none yet"


def precision_reason(precision: Any) -> str | None:
    """Why a Flax `precision` keeps the fused op from running, None if it does not."""
    return None if precision is None or isinstance(precision, jax.lax.Precision | str) else PRECISION


def matmul_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """The setting of `jax.default_matmul_precision` that a Flax `precision` stands for."""
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(
        precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    )


def leave_kernels(reasons: Iterable[str | None], implementation: str | None, flax: str, *arrays: jax.Array) -> bool:
    """Whether Flax's own attention has to run; then `fusedops.explain` says so.

    Args:
      reasons: what stands against the fused op; None counts for nothing.
      flax: the name of Flax's own function.
      arrays: query, key and value.

    Raises:
      NotImplementedError: implementation="triton" was asked for, and there is a reason.
    """
    check_choice("attention", "implementation", implementation, _dispatch.IMPLEMENTATIONS)
    why = "; ".join(r for r in reasons if r)
    if not why:
        return False
    if implementation == "triton":
        raise NotImplementedError(f'attention: implementation="triton" cannot do this: {why}')
    _dispatch.note("attention", why, *arrays, kernel=f"{flax}, plain JAX")
    return True


def fold_causal(mask: jax.Array | None, query: jax.Array, key: jax.Array) -> jax.Array:
    """`mask` and the causal mask in one array: query t sees the keys s <= t.

    Args:
      mask: *B #N #T #S, nonzero where a key is visible.
      query, key: *B T N H and *B S K H.
    """
    T, S = query.shape[-3], key.shape[-3]
    rank = query.ndim if mask is None else mask.ndim
    causal = jnp.tril(jnp.ones((T, S), bool)).reshape((1,) * (rank - 2) + (T, S))
    return causal if mask is None else jnp.logical_and(mask, causal)


@dataclasses.dataclass(frozen=True)
class Hook:
    """An `attention_fn` together with options; equal to another one whose parts are equal.

    Fields:
      fn: the function.
      options: pairs of a keyword and its value.
      decode: the module has a cache. A step then brings one query, whose mask covers the keys so far,
        and is_causal is left out: aligned top-left it would hide every key but the first.
    """

    fn: Callable[..., jax.Array]
    options: tuple[tuple[str, Any], ...]
    decode: bool = False

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.fn)

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, **keywords: Any) -> jax.Array:
        step = self.decode and query.shape[-3] == 1
        options = {k: v for k, v in self.options if not (step and k == "is_causal")}
        return self.fn(query, key, value, **keywords, **options)


def with_options(fn: Callable[..., jax.Array], decode: bool = False, **options: Any) -> Callable[..., jax.Array]:
    """`fn` with those options that differ from False and None; options that it has already are replaced.

    Raises:
      TypeError: `fn` does not take an option.
    """
    fn = fn.fn if isinstance(fn, Hook) else fn
    given = tuple((k, v) for k, v in options.items() if v is not None and v is not False)
    parameters = inspect.signature(fn).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name, value in given:
            if name not in parameters:
                raise TypeError(f"{name}={value!r}: attention_fn must take {name}, and {fn!r} does not")
    return Hook(fn, given, decode) if given else fn


def signed_like(fn: Callable[..., Any], **added: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function that passes its arguments on the signature of `fn`, with these keywords' defaults."""

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        parameters = dict(inspect.signature(fn).parameters)
        for name, default in added.items():
            old = parameters.get(name)
            new = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            parameters[name] = old.replace(default=default) if old else new
        wrapper.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        return wrapper

    return decorate
