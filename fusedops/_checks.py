"""Checks of a caller's arguments, with one style of error: who, what was expected, what came, the fix.

Axis strings name the axes of an array, as in "*B T N H":
  X     an axis of one size wherever X stands
  #X    1, or the size of X
  *B    any number of leading axes, the same wherever *B stands
  *#B   leading axes that broadcast to those of *B; fewer are fine
  3     an axis of size 3
"""

import functools
import numbers
from collections.abc import Collection
from typing import Any, NamedTuple

import jax.numpy as jnp


class Axes(NamedTuple):
    """A parsed axis string; `lead` is the name after the star, None without one."""

    text: str
    lead: str | None
    lead_broadcasts: bool
    rest: tuple[str, ...]


@functools.cache
def parse(text: str) -> Axes:
    """Parses an axis string.

    Raises:
      ValueError: it is not one.
    """
    tokens = text.split()
    starred = bool(tokens) and tokens[0].startswith("*")
    lead, rest = (tokens[0][1:], tokens[1:]) if starred else (None, tokens)
    broadcasts = lead is not None and lead.startswith("#")
    names = [t.removeprefix("#") for t in rest] + ([] if lead is None else [lead.removeprefix("#")])
    if not all(n.isidentifier() or n.isdecimal() for n in names):
        raise ValueError(f"not an axis string: {text!r}; write for example '*B T N H', '#T S' or '3 T'")
    return Axes(text, None if lead is None else lead.removeprefix("#"), broadcasts, tuple(rest))


def check(title: str, **operands: tuple[Any, str]) -> dict[str, Any]:
    """Checks the shapes of operands against each other.

    Args:
      title: the function's name, which begins every message.
      **operands: for each argument `(array, axis string)`; anything with a shape and a dtype is an array,
        and None is left out.

    Returns:
      The size of every axis by letter; a tuple of sizes for leading axes. An axis that only `#X` names
      has size 1 unless an operand says otherwise.

    Raises:
      TypeError: an argument is not an array.
      ValueError: shapes do not fit; the message names both sides.
    """
    given = {name: (array, parse(text)) for name, (array, text) in operands.items() if array is not None}
    known: dict[str, tuple[Any, str]] = {}  # axis -> its size and the operand that fixed it
    for name, (array, axes) in given.items():
        _check_rank(title, name, array, axes)
    for broadcast in (False, True):
        for name, (array, axes) in given.items():
            shape, rank = tuple(array.shape), len(axes.rest)
            if axes.lead is not None and axes.lead_broadcasts == broadcast:
                lead = shape[: len(shape) - rank]
                _match(title, name, given, axes.lead, lead, known, broadcast)
            for position, token in enumerate(axes.rest):
                size = shape[len(shape) - rank + position]
                if token.isdecimal() and size != int(token) and not broadcast:
                    raise ValueError(f"{_described(title, name, given)}: axis {position - rank} must be {token}")
                if not token.isdecimal() and token.startswith("#") == broadcast:
                    _match(title, name, given, token.removeprefix("#"), size, known, broadcast)
    return {axis: size for axis, (size, _) in known.items()}


def _check_rank(title: str, name: str, array: Any, axes: Axes) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"{title}: {name} must be an array with axes '{axes.text}', got {type(array).__name__}; "
            "convert it with jnp.asarray"
        )
    fits = len(array.shape) >= len(axes.rest) if axes.lead is not None else len(array.shape) == len(axes.rest)
    if not fits:
        least = "at least " if axes.lead is not None else ""
        raise ValueError(
            f"{title}: {name} has shape {tuple(array.shape)}, expected axes '{axes.text}': "
            f"{least}{len(axes.rest)} of them, got {len(array.shape)}; add or drop axes"
        )


def _match(title: str, name: str, given: Any, axis: str, size: Any, known: Any, broadcast: bool) -> None:
    """Notes the size of an axis, or checks it against the one noted before."""
    if axis not in known:
        known[axis] = (size, name)
        return
    expected, source = known[axis]
    if size == expected or (broadcast and _broadcasts(size, expected)):
        return
    if broadcast and _broadcasts(expected, size) and _only_broadcast(axis, given):
        known[axis] = (size, name)
        return
    other = f"{source} has shape {tuple(given[source][0].shape)}, axes '{given[source][1].text}'"
    choice = f"1 or {expected}" if broadcast and isinstance(expected, int) else f"{expected}"
    raise ValueError(
        f"{_described(title, name, given)}: {axis} is {size}, but {axis} is {expected} in {source}; "
        f"{other}; pass {name} with {axis} = {choice}, or change {source}"
    )


def _broadcasts(size: Any, target: Any) -> bool:
    """Whether an axis of this size (or leading axes of these sizes) broadcasts to the target."""
    if isinstance(size, tuple):
        pairs = zip(reversed(size), reversed(target), strict=False)
        return len(size) <= len(target) and all(_broadcasts(s, t) for s, t in pairs)
    return bool(size in (1, target))


def _only_broadcast(axis: str, given: Any) -> bool:
    return all(axis not in axes.rest and (axes.lead != axis or axes.lead_broadcasts) for _, axes in given.values())


def _described(title: str, name: str, given: Any) -> str:
    array, axes = given[name]
    return f"{title}: {name} has shape {tuple(array.shape)}, expected axes '{axes.text}'"


def check_choice(title: str, name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if not any(value is c or (type(value) is type(c) and value == c) for c in choices):
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{title}: {name} must be one of {listed}; got {value!r}")


def check_dtype(title: str, kind: Any, **operands: Any) -> None:
    """Raises TypeError unless every array's dtype is of a kind, such as jnp.floating or jnp.integer; None
    is left out."""
    for name, array in operands.items():
        if array is not None and not jnp.issubdtype(array.dtype, kind):
            raise TypeError(
                f"{title}: {name} must have a dtype of kind {kind.__name__}, got {array.dtype}; "
                f"convert it with {name}.astype"
            )


def check_number(title: str, name: str, value: Any, *, low: float | None = None, high: float | None = None) -> None:
    """Raises TypeError unless `value` is a real number of Python or numpy, not an array and not a bool, and
    ValueError unless low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{title}: {name} must be a number, got {type(value).__name__}; pass a Python number")
    _check_range(title, name, value, low, high)


def check_int(title: str, name: str, value: Any, *, low: int | None = None, high: int | None = None) -> None:
    """As `check_number`, for whole numbers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{title}: {name} must be an integer, got {type(value).__name__}; pass a Python int")
    _check_range(title, name, value, low, high)


def _check_range(title: str, name: str, value: Any, low: float | None, high: float | None) -> None:
    inside = (low is None or value >= low) and (high is None or value <= high)
    if not inside:
        wanted = f"from {low} to {high}" if None not in (low, high) else f">= {low}" if high is None else f"<= {high}"
        raise ValueError(f"{title}: {name} must be {wanted}, got {value}")
