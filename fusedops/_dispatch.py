"""Which implementation of an op runs, and why: one primitive that is lowered per platform."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir, xla

IMPLEMENTATIONS = (None, "xla", "triton")


class Op(NamedTuple):
    """One op, or one direction of it.

    Fields:
      name: as `explain` shows it.
      axes, out_axes: one axis string per operand and per result; where it begins with "b", `vmap`
        folds a mapped axis into that axis.
      reference: `(static, *arrays) -> tuple of arrays`, plain JAX.
      launch: the same by kernels; imports them when called.
      refuse: `(static, *avals) -> str | None`, why the kernels cannot do this.
      describe: `(static, *avals) -> str`, kernels and configs.
    """

    name: str
    axes: tuple[str, ...]
    out_axes: tuple[str, ...]
    reference: Callable[..., tuple[jax.Array, ...]]
    launch: Callable[..., tuple[jax.Array, ...]]
    refuse: Callable[..., str | None]
    describe: Callable[..., str]


fused_op_p = jax.extend.core.Primitive("fused_op")
fused_op_p.multiple_results = True


def run(op: Op, static: Any, *arrays: jax.Array, implementation: str | None = None) -> tuple[jax.Array, ...]:
    """Runs `op`: by kernels on a CUDA GPU or inside `fusedops.interpret()`, else by its reference.

    Args:
      static: hashable options, handed to every function of the op.
      implementation: None for the best that there is; "xla" for the reference; "triton" for the
        kernels, and an error where they cannot run.

    Raises:
      NotImplementedError: "triton" was asked for, and the op refuses.
    """
    if implementation == "xla":
        note(op.name, 'implementation="xla" was asked for', *arrays, kernel="the reference, plain JAX")
        return op.reference(static, *arrays)
    reason = refusal(op, static, *arrays)
    if implementation == "triton" and reason:
        raise NotImplementedError(f'{op.name}: implementation="triton" cannot do this: {reason}')
    if reason:
        note(op.name, reason, *arrays, kernel="the reference, plain JAX")
        return op.reference(static, *arrays)
    params = dict(op=op, static=static, required=implementation == "triton", interpret=_interpreting())
    return tuple(fused_op_p.bind(*arrays, **params))


def refusal(op: Op, static: Any, *arrays: Any) -> str | None:
    """Why kernels cannot run this op on any platform; None where they can."""
    if not has_triton():
        return 'Triton is not installed: pip install "triton>=3.6"'
    return op.refuse(static, *arrays)


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    from .kernels import _launch

    return _launch.interpreting()


@fused_op_p.def_impl
def _impl(*arrays: Any, **params: Any) -> Any:
    return xla.apply_primitive(fused_op_p, *arrays, **params)


@fused_op_p.def_abstract_eval
def _abstract_eval(*avals: Any, op: Op, static: Any, required: bool, interpret: bool) -> list[Any]:
    shapes = jax.eval_shape(functools.partial(op.reference, static), *avals)
    return [_aval(s) for s in shapes]


def _aval(s: jax.ShapeDtypeStruct) -> Any:
    """The aval of a result, with its sharding, and inside shard_map with the axes along which it varies."""
    known = dict(sharding=s.sharding, manual_axis_type=getattr(s, "manual_axis_type", None))
    return jax.core.ShapedArray(s.shape, s.dtype, **{k: v for k, v in known.items() if v is not None})


def varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Inside shard_map: every array varies along the axes along which one of them does, as a custom VJP needs it;
    the gradient of one that was the same everywhere is then summed over them."""
    axes = [getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset()) for x in arrays]
    missing = [tuple(sorted(frozenset().union(*axes) - own)) for own in axes]
    return [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]


def _lower_reference(ctx: Any, *operands: Any, op: Op, static: Any, required: bool, interpret: bool) -> Any:
    if interpret:
        return _lower_kernels(ctx, *operands, op=op, static=static, required=required, interpret=interpret)
    if required:
        raise RuntimeError(
            f'{op.name}: implementation="triton" needs a CUDA GPU, and this program is for '
            f"{'/'.join(ctx.module_context.platforms)}; leave implementation at None, or run inside "
            "`with fusedops.interpret():` (slow, for tests)"
        )
    return mlir.lower_fun(functools.partial(op.reference, static), multiple_results=True)(ctx, *operands)


def _lower_kernels(ctx: Any, *operands: Any, op: Op, static: Any, required: bool, interpret: bool) -> Any:
    from .kernels import _launch

    with _launch.interpreting_is(interpret):  # as at the time of the trace
        return mlir.lower_fun(functools.partial(op.launch, static), multiple_results=True)(ctx, *operands)


mlir.register_lowering(fused_op_p, _lower_reference)
mlir.register_lowering(fused_op_p, _lower_kernels, platform="cuda")


def _jvp(primals: Any, tangents: Any, *, op: Op, **params: Any) -> Any:
    raise NotImplementedError(
        f"{op.name}: the kernels have first-order reverse-mode gradients only (jax.grad, jax.vjp); for "
        'jvp or higher orders pass implementation="xla"'
    )


ad.primitive_jvps[fused_op_p] = _jvp


def _batch(arrays: Any, dims: Any, *, op: Op, **params: Any) -> Any:
    """Folds the mapped axis into axis b; where an operand that has no b is mapped, loops instead."""
    mapped = [d is not None for d in dims]
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    has_b = [axes.split()[:1] == ["b"] for axes in op.axes]
    arrays = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(arrays, dims, mapped, strict=True)]
    bind = functools.partial(fused_op_p.bind, op=op, **params)
    if any(m and not b for m, b in zip(mapped, has_b, strict=True)):
        moved = [x for x, m in zip(arrays, mapped, strict=True) if m]

        def one(elements: Any) -> Any:
            rest = iter(elements)
            return bind(*(next(rest) if m else x for x, m in zip(arrays, mapped, strict=True)))

        return jax.lax.map(one, moved), [0] * len(op.out_axes)
    folded = []
    for x, m, b in zip(arrays, mapped, has_b, strict=True):
        if b:
            x = x if m else jnp.broadcast_to(x, (size, *x.shape))
            x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
        folded.append(x)
    results = bind(*folded)
    return [_unfold(r, size, axes) for r, axes in zip(results, op.out_axes, strict=True)], [0] * len(results)


def _unfold(result: jax.Array, size: int, axes: str) -> jax.Array:
    if axes.split()[:1] != ["b"]:
        raise NotImplementedError(f"vmap: a result with axes {axes!r} has no batch axis to unfold")
    return result.reshape(size, result.shape[0] // size, *result.shape[1:])


batching.primitive_batchers[fused_op_p] = _batch


@dataclasses.dataclass(frozen=True)
class Entry:
    """One op in a program: `implementation` is "triton" or "xla"; `shapes` those of its operands."""

    op: str
    shapes: tuple[str, ...]
    implementation: str
    kernel: str
    why: str
    times: int = 1

    def __str__(self) -> str:
        count = f" (x{self.times})" if self.times > 1 else ""
        return f"{self.op}{count}: {self.implementation}, {self.kernel}\n  on {', '.join(self.shapes)}\n  {self.why}"


class Explanation(tuple):
    """The entries of a program, in order; `print` shows them."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "no fusedops op in this program"

    __repr__ = __str__


_noted: list[Entry] | None = None


def explain(fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Says, for each fusedops op that `fn(*args, **kwargs)` runs, which implementation and why.

    Args:
      fn: a function of JAX arrays; it is traced, not run.
      platform: "cuda" or "cpu"; default: JAX's default platform.

    Returns:
      A tuple of entries with `op`, `shapes`, `implementation`, `kernel`, `why` and `times`; printing it
      gives a few lines per op.
    """
    global _noted
    platform = platform or {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    before, _noted = _noted, []
    try:
        jaxpr = jax.make_jaxpr(lambda *a, **k: fn(*a, **k))(*args, **kwargs)
        entries = [*(_entry(eqn, platform) for eqn in _equations(jaxpr.jaxpr)), *_noted]
    finally:
        _noted = before
    counts: dict[Entry, int] = {}
    for entry in entries:
        counts[entry] = counts.get(entry, 0) + 1
    return Explanation(dataclasses.replace(e, times=n) for e, n in counts.items())


def note(op: str, why: str, *arrays: Any, kernel: str = "plain JAX") -> None:
    """Tells a running `explain` that `op` left the kernels aside, and why."""
    if _noted is not None:
        _noted.append(Entry(op, tuple(_shape(x) for x in arrays), "xla", kernel, why))


def _shape(x: Any) -> str:
    return f"{jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is fused_op_p:
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _entry(eqn: Any, platform: str) -> Entry:
    op, static, interpret = (eqn.params[k] for k in ("op", "static", "interpret"))
    avals = [v.aval for v in eqn.invars]
    shapes = tuple(_shape(a) for a in avals)
    if interpret:
        return Entry(op.name, shapes, "triton", op.name, "inside fusedops.interpret(): Triton's interpreter on the CPU")
    if platform == "cuda":
        return Entry(op.name, shapes, "triton", _described(op, static, avals), "the kernels cover this case")
    return Entry(op.name, shapes, "xla", "the reference, plain JAX", f"there are no kernels for platform {platform}")


def _described(op: Op, static: Any, avals: list[Any]) -> str:
    """Kernel and config on the GPU of this machine, or on an sm_90 where it has none."""
    from .kernels import _compile

    try:
        chosen = _compile.device()
    except RuntimeError:
        chosen = _compile.device_for(90)
    with _compile.use_device(chosen):
        return op.describe(static, *avals)
