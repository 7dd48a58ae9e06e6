"""triton_call: Triton and Gluon kernels on JAX arrays, as one JAX primitive."""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compile, _launch
from ._compile import private
from ._operands import Absent, Array, Call, Descriptor, Output, Scalar, Variant, leaves, triton_type

MAX_GRID = (2**31 - 1, 65535, 65535)
_OPTION_DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorDescriptor:
    """A host-side TMA descriptor (sm_90 and later): the kernel's parameter has `load` and `store`.

    Fields:
      base: the array in memory; a `jax.ShapeDtypeStruct` where the descriptor is an output of
        `triton_call` (an entry of `out_type`).
      shape, strides: how the kernel sees it, in elements; the last stride is 1, the others are
        multiples of 16 bytes.
      block_shape: elements moved at a time, at most 256 along each axis.
      layout: shared-memory layout, for Gluon kernels.
      padding: what loads beyond `shape` give, "zero" or "nan".
      round_f32_to_tf32: float32 arrays are rounded to TF32 as they are loaded.
    """

    base: Any
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    strides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    block_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    layout: Any = dataclasses.field(default=None, metadata={"static": True})
    padding: str = dataclasses.field(default="zero", metadata={"static": True})
    round_f32_to_tf32: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.padding not in ("zero", "nan"):
            raise ValueError(f'padding: expected "zero" or "nan", got {self.padding!r}')
        if not len(self.shape) == len(self.strides) == len(self.block_shape):
            raise ValueError(
                "shape, strides and block_shape: expected equal lengths, got "
                f"{len(self.shape)}, {len(self.strides)} and {len(self.block_shape)}"
            )
        for name in ("shape", "strides", "block_shape"):
            object.__setattr__(self, name, tuple(int(n) for n in getattr(self, name)))

    @classmethod
    def from_array(
        cls, array: Any, block_shape: Sequence[int], layout: Any = None, padding: str = "zero",
        round_f32_to_tf32: bool = False,
    ) -> "TensorDescriptor":  # fmt: skip
        """A descriptor of a whole array (or of a `jax.ShapeDtypeStruct`, for an output)."""
        strides = strides_from_shape(array.shape)
        return cls(array, tuple(array.shape), strides, tuple(block_shape), layout, padding, round_f32_to_tf32)


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def triton_call(
    *args: Any,
    kernel: Any,
    out_type: Any = None,
    grid: Any,
    name: str = "",
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_ctas: int | None = None,
    compute_capability: int | None = None,
    backend_options: Mapping[str, Any] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    zeroed_outputs: Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]] = (),
    debug: bool = False,
    serialized_metadata: bytes = b"",
    cost_estimate: Mapping[str, int] | None = None,
    has_side_effect: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls a Triton or Gluon kernel on JAX arrays; works eagerly and inside `jax.jit`.

    The kernel's parameters are bound as in a Python call: operands by position or by name,
    metaparameters (`tl.constexpr`) by name. Pointers for the outputs go to the parameters that
    remain, in order. On a GPU the kernel is compiled and launched; inside `fusedops.interpret()` it
    runs on the CPU. `jax.vmap` works, with one launch per element of the mapped axis; gradients need
    a `jax.custom_vjp` around the call.

    Args:
      *args: arrays, `jax.Ref`s (updated in place), `TensorDescriptor`s, Python or NumPy scalars
        (fixed at trace time), None for an absent pointer, or tuples of these.
      kernel: a function decorated with `triton.jit` or `gluon.jit`, also under `triton.autotune` or
        `triton.heuristics`.
      out_type: a pytree of objects with `shape` and `dtype`; entries may be `TensorDescriptor`s
        whose base is such an object. `out_shape=` is another name for it.
      grid: programs to launch: an int, up to three ints, or a function from the dict of
        metaparameters to these. An empty grid launches nothing and returns zeros.
      name: shown in profiles and errors; default: the kernel's.
      num_warps, num_stages, num_ctas: Triton's options; default 4, 3 and 1. `num_ctas` is the
        number of blocks in a cluster.
      compute_capability: 90 for 9.0; default: that of the GPU.
      backend_options: more options of Triton's compiler, such as `maxnreg`.
      input_output_aliases: operand index (counting the leaves of the kernel's operands in parameter
        order) to output index; the two share memory, and the parameter is the operand's.
      zeroed_outputs: indices of outputs that are filled with zero before the launch.
      debug: print the PTX, and keep `tl.device_assert`.
      serialized_metadata: bytes stored with the call for profilers.
      cost_estimate: `{"flops": ..., "bytes_accessed": ...}` for profilers.
      has_side_effect: keep the call even where its outputs are not used.
      **kwargs: operands and metaparameters by the kernel's parameter names.

    Returns:
      Arrays in the structure of `out_type`.

    Raises:
      TypeError: an unknown keyword, a missing parameter, an operand of the wrong kind.
      ValueError: the number of outputs, the grid or an alias does not fit.
      KernelCompileError: when compiled; the message shows the kernel's source line.
      RuntimeError: when lowered for a platform without kernels, outside `fusedops.interpret()`.
    """
    if "out_shape" in kwargs:
        if out_type is not None:
            raise TypeError("triton_call: pass out_type= or out_shape=, not both")
        out_type = kwargs.pop("out_shape")
    options = _options(backend_options, num_warps, num_stages, num_ctas, debug)
    arrays, call, out_tree = _bind(
        args, kwargs, kernel, out_type, grid, options, dict(input_output_aliases or {}), zeroed_outputs
    )
    call = dataclasses.replace(
        call,
        name=name or call.kernel.fn.__name__,
        compute_capability=compute_capability,
        serialized_metadata=serialized_metadata,
        cost_estimate=tuple(sorted((cost_estimate or {}).items())),
        has_side_effect=has_side_effect,
        debug=debug,
        interpret=_launch.interpreting(),
    )
    if all(0 in variant.grid for variant in call.variants):
        aliased = {out: arrays[array] for array, out in call.aliases}
        results = [aliased.get(i, jnp.zeros(o.shape, o.dtype)) for i, o in enumerate(call.outputs)]
    else:
        results = _launch.triton_call_p.bind(*arrays, call=call)
    return jax.tree.unflatten(out_tree, results)


def triton_compile(*args: Any, compute_capability: int = 90, **kwargs: Any) -> _compile.Compiled:
    """Compiles what `triton_call` with these arguments would launch; needs no GPU.

    Args:
      *args, **kwargs: as for `triton_call`; arrays may be `jax.ShapeDtypeStruct`s, and `grid` may be
        left out. Of a `triton.autotune` kernel the first config is compiled.
      compute_capability: 80, 90, 100, ...

    Returns:
      The kernel's `ptx`, `cubin`, `registers`, `spills` (bytes), `shared_memory` (bytes per block),
      `num_warps`, `warnings`, `wgmma_serialized` and `log` (of `ptxas -v`).
    """
    known = inspect.signature(triton_call).parameters
    plain = {k: kwargs.pop(k) for k in list(kwargs) if k in known}
    out_type = kwargs.pop("out_shape", plain.get("out_type"))
    options = _options(
        plain.get("backend_options"), plain.get("num_warps"), plain.get("num_stages"),
        plain.get("num_ctas"), plain.get("debug", False),
    )  # fmt: skip
    _, call, _ = _bind(
        args, kwargs, plain["kernel"], out_type, plain.get("grid", (1,)), options,
        dict(plain.get("input_output_aliases") or {}), plain.get("zeroed_outputs", ()),
    )  # fmt: skip
    return _compile.compile_kernel(_launch.source_of(call, call.variants[0], compute_capability))


def _options(given: Mapping[str, Any] | None, num_warps, num_stages, num_ctas, debug) -> dict[str, Any]:
    named = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas, "debug": debug or None}
    named = {k: v for k, v in named.items() if v is not None}
    if twice := named.keys() & (given or {}).keys():
        raise ValueError(f"triton_call: {sorted(twice)} given both directly and in backend_options")
    return {**_OPTION_DEFAULTS, **(given or {}), **named}


def _unwrap(kernel: Any) -> tuple[Any, list[Any], Callable | None, list[tuple[str, Callable]]]:
    """The function under decorators, the configs and pruning of `autotune`, the `heuristics`."""
    configs, prune, heuristics = [], None, []
    while not isinstance(kernel, private("triton.runtime.JITFunction")):
        if isinstance(kernel, private("triton.runtime.Autotuner")):
            configs, prune = list(kernel.configs), kernel.early_config_prune
        elif isinstance(kernel, private("triton.runtime.Heuristics")):
            heuristics += kernel.values.items()  # the outer ones first
        else:
            raise TypeError(
                f"kernel: expected a function decorated with triton.jit or gluon.jit, got {kernel!r}"
                + ("; import it without TRITON_INTERPRET set" if hasattr(kernel, "rewriter") else "")
            )
        kernel = kernel.fn
    return kernel, configs, prune, heuristics


def _bind(args, kwargs, kernel, out_type, grid, options, aliases, zeroed) -> tuple[list, Call, Any]:
    """Arrays of the primitive, its static description, and the structure of the results."""
    kernel, configs, prune, heuristics = _unwrap(kernel)
    title = f"triton_call of {kernel.fn.__name__}"
    if out_type is None:
        raise TypeError(f"{title}: out_type= is missing: the shape and dtype of each output")
    constants, operands = _match(title, kernel, args, kwargs, configs, heuristics)
    outs, out_tree = jax.tree.flatten(out_type, is_leaf=lambda x: isinstance(x, TensorDescriptor))
    outputs = tuple(_out_type(title, o) for o in outs)
    if wrong := [o for o in aliases.values() if not 0 <= o < len(outs)]:
        raise ValueError(f"{title}: input_output_aliases: there is no output {wrong[0]}, only {len(outs)}")
    missing = [p for p in kernel.params if not p.is_constexpr and p.name not in operands]
    if len(missing) != len(outs) - len(aliases):
        missing = [p for p in missing if not p.has_default]
        operands |= {p.name: p.default for p in kernel.params if p.has_default and not p.is_constexpr} | operands
        operands = {k: v for k, v in operands.items() if k not in {p.name for p in missing}}
    free = [i for i in range(len(outs)) if i not in aliases.values()]
    if len(missing) != len(free):
        raise ValueError(
            f"{title}: {len(free)} outputs need a parameter, and {len(missing)} parameters have no operand "
            f"({', '.join(p.name for p in missing) or 'none'}); out_type has {len(outs)} outputs"
        )
    for parameter, index in zip(missing, free, strict=True):
        operands[parameter.name] = _output(title, outs[index], index)

    arrays: list[Any] = []
    tree = tuple(
        (p.name, Absent() if p.is_constexpr else _leaf(title, p.name, operands[p.name], arrays)) for p in kernel.params
    )
    refs = [id(x) for x in arrays if isinstance(jax.typeof(x), private("jax._src.state.AbstractRef"))]
    if len(set(refs)) < len(refs):
        raise ValueError(f"{title}: one Ref is passed to two parameters; pass it once, and its value ref[...] again")
    inputs = [leaf for _, node in tree for leaf in leaves(node) if not isinstance(leaf, Output | Absent)]
    pairs = tuple(_alias(title, inputs, arrays, outputs, i, o) for i, o in sorted(aliases.items()))
    named = {n: _show(node, arrays) for n, node in tree}
    variants = tuple(_variants(title, kernel, constants, named, configs, prune, heuristics, options, grid, zeroed))
    for index in {i for v in variants for i in v.zeroed}:
        if not 0 <= index < len(outputs):
            raise ValueError(f"{title}: zeroed_outputs: there is no output {index}, only {len(outputs)}")
    return arrays, Call(kernel=kernel, tree=tree, outputs=outputs, aliases=pairs, variants=variants), out_tree


def _match(title, kernel, args, kwargs, configs, heuristics) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and operands by parameter name; refuses what the kernel does not have."""
    names = [p.name for p in kernel.params]
    for word in kwargs:
        if word not in names:
            close = difflib.get_close_matches(word, [*names, *inspect.signature(triton_call).parameters], n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(names)}"
            raise TypeError(f"{title}: the kernel has no parameter {word!r}{hint}")
    try:
        bound = kernel.signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{title}: {error}; its parameters are {', '.join(names)}") from None
    constants, operands = {}, {}
    supplied = {k for c in configs for k in c.kwargs} | {k for k, _ in heuristics}
    for p in kernel.params:
        if not p.is_constexpr:
            if p.name in bound:
                operands[p.name] = bound[p.name]
        elif p.name in bound or p.has_default:
            constants[p.name] = _constant(title, p.name, bound.get(p.name, p.default))
        elif p.name not in supplied:
            raise TypeError(f"{title}: the metaparameter {p.name} is missing")
    return constants, operands


def _constant(title: str, name: str, value: Any) -> Any:
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{title}: {name} is a metaparameter (constexpr), got an array")
    value = value.item() if isinstance(value, np.generic) else value
    value = tuple(value) if isinstance(value, list) else value
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{title}: the metaparameter {name} must be hashable, got {value!r}") from None
    return value


def _leaf(title: str, name: str, value: Any, arrays: list[Any]) -> Any:
    """The static description of one operand; arrays are appended to `arrays`."""
    if value is None:
        return Absent()
    if isinstance(value, Output | Absent | Descriptor):
        return value
    if isinstance(value, tuple | list):
        nodes = [_leaf(title, f"{name}[{i}]", v, arrays) for i, v in enumerate(value)]
        return type(value)(*nodes) if hasattr(value, "_fields") else tuple(nodes)
    if isinstance(value, TensorDescriptor):
        inner = _leaf(title, name, value.base, arrays)
        return _descriptor(title, name, value, inner, arrays[inner.index])
    if isinstance(value, private("jax._src.state.TransformedRef")):
        raise TypeError(f"{title}: {name}: got a view of a Ref; pass the whole Ref, or ref[...] to read it")
    if isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating):
        value = float(value)  # bfloat16 and the other types of ml_dtypes, too
    if isinstance(value, bool | int | float | np.bool_ | np.integer):
        scalar = Scalar(value.item() if isinstance(value, np.generic) else value)
        if scalar.type is None:
            raise ValueError(f"{title}: {name}: the integer {value} does not fit in 64 bits")
        return scalar
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(
            f"{title}: {name}: expected an array, a scalar, None or a tuple of these, got {type(value).__name__}"
        )
    value = jnp.asarray(value) if isinstance(value, np.ndarray) else value
    triton_type(value.dtype, f"{title}: {name}")
    arrays.append(value)
    return Array(len(arrays) - 1, np.dtype(value.dtype))


def _descriptor(title: str, name: str, value: TensorDescriptor, inner: Any, base: Any) -> Descriptor:
    size = np.dtype(base.dtype).itemsize
    problem = None
    if value.strides[-1:] != (1,):
        problem = f"the last stride must be 1, got strides {value.strides}"
    elif any(s * size % 16 for s in value.strides[:-1]):
        problem = f"strides must be multiples of 16 bytes, got {value.strides} of {size} bytes"
    elif sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True)) >= max(math.prod(base.shape), 1):
        problem = f"shape {value.shape} with strides {value.strides} reaches beyond the array {base.shape}"
    elif value.block_shape[-1:] and value.block_shape[-1] * size < 16:
        problem = f"the last axis of a block must have 16 bytes, got block_shape {value.block_shape}"
    elif value.round_f32_to_tf32 and base.dtype != jnp.float32:
        problem = f"round_f32_to_tf32 needs a float32 array, got {base.dtype}"
    if problem:
        raise ValueError(f"{title}: {name}: {problem}")
    fields = (value.shape, value.strides, value.block_shape, value.layout, value.padding, value.round_f32_to_tf32)
    return Descriptor(inner, np.dtype(base.dtype), *fields)


def _out_type(title: str, out: Any) -> jax.ShapeDtypeStruct:
    out = out.base if isinstance(out, TensorDescriptor) else out
    if not (hasattr(out, "shape") and hasattr(out, "dtype")):
        raise TypeError(f"{title}: out_type: expected objects with shape and dtype, got {out!r}")
    dtype = jax.dtypes.canonicalize_dtype(out.dtype)
    triton_type(dtype, f"{title}: out_type")
    return jax.ShapeDtypeStruct(tuple(out.shape), dtype)


def _output(title: str, out: Any, index: int) -> Any:
    if isinstance(out, TensorDescriptor):
        return _descriptor(title, f"output {index}", out, Output(index, np.dtype(out.base.dtype)), out.base)
    return Output(index, jax.dtypes.canonicalize_dtype(out.dtype))


def _alias(title, inputs, arrays, outputs, operand: int, out: int) -> tuple[int, int]:
    if not 0 <= operand < len(inputs):
        raise ValueError(f"{title}: input_output_aliases: there is no operand {operand}, only {len(inputs)}")
    leaf = inputs[operand]
    leaf = leaf.memory if isinstance(leaf, Descriptor) else leaf
    if type(leaf) is not Array:
        raise ValueError(f"{title}: input_output_aliases: operand {operand} is not an array")
    array = arrays[leaf.index]
    if (tuple(array.shape), array.dtype) != (outputs[out].shape, outputs[out].dtype):
        raise ValueError(
            f"{title}: input_output_aliases: operand {operand} is {array.dtype}{list(array.shape)}, and "
            f"output {out} is {outputs[out].dtype}{list(outputs[out].shape)}; they must be equal"
        )
    return leaf.index, out


def _show(node: Any, arrays: list[Any]) -> Any:
    """An operand as autotuning and heuristics functions see it."""
    if isinstance(node, tuple):
        return tuple(_show(n, arrays) for n in node)
    if type(node) is Array:
        return jax.ShapeDtypeStruct(arrays[node.index].shape, arrays[node.index].dtype)
    return node.value if isinstance(node, Scalar) else None


def _variants(title, kernel, constants, named, configs, prune, heuristics, options, grid, zeroed) -> Iterator[Variant]:
    if any(config.pre_hook is not None for config in configs):
        raise NotImplementedError(f"{title}: pre_hook of an autotuning config; use zeroed_outputs instead")
    operands = {p.name: named[p.name] for p in kernel.params if not p.is_constexpr}
    fitting = [c for c in configs if all(constants.get(k, v) == v for k, v in c.kwargs.items())]
    if configs and not fitting:
        raise ValueError(f"{title}: no autotuning config agrees with the metaparameters {constants}")
    if fitting and prune is not None:
        fitting = prune(fitting, {**operands, **constants}, **constants)
    for config in fitting or [None]:
        values, chosen = dict(constants), dict(options)
        if config is not None:
            values |= {k: _constant(title, k, v) for k, v in config.kwargs.items()}
            chosen |= {k: getattr(config, k) for k in _OPTION_DEFAULTS}
            chosen |= {"maxnreg": config.maxnreg} if config.maxnreg is not None else {}
        for key, function in heuristics:
            values[key] = _constant(title, key, function({**operands, **values}))
        cells = zeroed(values) if callable(zeroed) else zeroed
        yield Variant(
            grid=_grid(title, grid, values),
            constants=tuple((p.num, values[p.name]) for p in kernel.params if p.is_constexpr),
            options=tuple(sorted(chosen.items())),
            zeroed=tuple(sorted(cells)),
            label=str(config or ""),
        )


def _grid(title: str, grid: Any, values: Mapping[str, Any]) -> tuple[int, int, int]:
    grid = grid(dict(values)) if callable(grid) else grid
    sizes = (grid,) if isinstance(grid, int | np.integer) else tuple(grid)
    if len(sizes) > 3:
        raise ValueError(f"{title}: grid has {len(sizes)} axes, at most 3 are possible: {sizes}")
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
        raise ValueError(f"{title}: grid: expected non-negative ints, got {sizes}")
    full = tuple(int(n) for n in sizes) + (1,) * (3 - len(sizes))
    for axis, (size, limit) in enumerate(zip(full, MAX_GRID, strict=True)):
        if size > limit:
            raise ValueError(
                f"{title}: grid {full}: axis {axis} has {size} programs, CUDA allows {limit}"
                + ("; put the long axis first" if axis else "")
            )
    return full[0], full[1], full[2]
