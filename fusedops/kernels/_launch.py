"""The primitive behind `triton_call`: abstract evaluation, rules, lowering, launch."""

import contextlib
import dataclasses
import json
import math
import threading
import time
import types
import zlib
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir, xla
from jax.interpreters import partial_eval as pe

from . import _autotune, _compile
from ._compile import Compiled, Source, private
from ._operands import Absent, Array, Call, Descriptor, Output, Scalar, Variant, leaves, leaves_with_path

# "fusedops_interpret" is part of the key of every jit cache, and FUSEDOPS_INTERPRET=1 sets it.
_interpret_state = private("jax._src.config.bool_state")(
    name="fusedops_interpret",
    default=False,
    help="Run Triton kernels through Triton's interpreter, on the CPU.",
    include_in_jit_key=True,
    include_in_trace_context=True,
)


def interpreting_is(value: bool) -> contextlib.AbstractContextManager[None]:
    """As `interpret()`, or out of it."""
    return _interpret_state(value)


def interpreting() -> bool:
    """Whether kernels traced now are to run through the interpreter."""
    return _interpret_state.value


def interpret() -> contextlib.AbstractContextManager[None]:
    """Inside, kernels run through Triton's interpreter on the CPU: slow, without a GPU, for tests.

    Functions that `jax.jit` has compiled outside are compiled again inside. The environment variable
    `FUSEDOPS_INTERPRET=1` does the same for a whole process. Programs of a launch run one after the
    other, so that races do not show, and outputs start as NaN.
    """
    _compile.check_triton()
    return _interpret_state(True)


triton_call_p = jax.extend.core.Primitive("triton_call")
triton_call_p.multiple_results = True


def _is_ref(aval: Any) -> bool:
    return isinstance(aval, private("jax._src.state.AbstractRef"))


@triton_call_p.def_impl
def _impl(*args: Any, **params: Any) -> Any:
    if any(_is_ref(jax.typeof(x)) for x in args):
        return jax.jit(lambda *xs: triton_call_p.bind(*xs, **params))(*args)
    return xla.apply_primitive(triton_call_p, *args, **params)


def _abstract_eval(*avals: Any, call: Call) -> tuple[list[Any], set[Any]]:
    read, write = private("jax._src.state.ReadEffect"), private("jax._src.state.WriteEffect")
    effects = {effect(i) for i, aval in enumerate(avals) if _is_ref(aval) for effect in (read, write)}
    return [_result(o, avals) for o in call.outputs], effects


def varying(aval: Any) -> frozenset[str]:
    """The mesh axes along which a value may differ between the devices of a shard_map."""
    return getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())


def _result(out: jax.ShapeDtypeStruct, avals: Any) -> Any:
    """The aval of an output; inside shard_map it varies along every axis that an operand varies along."""
    along = frozenset().union(*(varying(aval) for aval in avals))
    manual: dict[str, Any] = {}
    if along:
        one = next(aval for aval in avals if varying(aval))
        spec = jax.sharding.PartitionSpec(*(None,) * len(out.shape))
        manual = dict(
            sharding=jax.sharding.NamedSharding(one.sharding.mesh, spec),
            manual_axis_type=type(one.manual_axis_type)(varying=along),
        )
    return jax.core.ShapedArray(out.shape, out.dtype, **manual)


triton_call_p.def_effectful_abstract_eval(_abstract_eval)


def _discharge(*args: Any, call: Call, in_avals: Any) -> tuple[list[Any], list[Any]]:
    """A Ref becomes an operand that shares its memory with one more output."""
    refs = [i for i, aval in enumerate(in_avals) if _is_ref(aval)]
    known = len(call.outputs)
    call = dataclasses.replace(
        call,
        outputs=call.outputs + tuple(jax.ShapeDtypeStruct(in_avals[i].shape, in_avals[i].dtype) for i in refs),
        aliases=call.aliases + tuple((i, known + n) for n, i in enumerate(refs)),
    )
    results = triton_call_p.bind(*args, call=call)
    updated = dict(zip(refs, results[known:], strict=True))
    return [updated.get(i) for i in range(len(args))], results[:known]


@private("jax._src.state.discharge.register_discharge_rule")(triton_call_p)
def _discharge_rule(*args: Any, call: Call) -> tuple[list[Any], list[Any]]:
    # (context, *args) since jax 0.11, (in_avals, out_avals, *args) before
    if hasattr(args[0], "in_avals"):
        return _discharge(*args[1:], call=call, in_avals=args[0].in_avals)
    return _discharge(*args[2:], call=call, in_avals=args[0])


def _dce(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    keep = any(used) or eqn.effects or eqn.params["call"].has_side_effect
    return [bool(keep)] * len(eqn.invars), eqn if keep else None


pe.dce_rules[triton_call_p] = _dce


def _jvp(primals: Any, tangents: Any, *, call: Call) -> Any:
    raise NotImplementedError(
        f"triton_call of {call.name}: a kernel has no automatic derivative; wrap the call in "
        "jax.custom_vjp, or differentiate a plain JAX version"
    )


ad.primitive_jvps[triton_call_p] = _jvp


def _batch(args: Any, dims: Any, *, call: Call) -> Any:
    """One launch for each element of the mapped axis."""
    if any(_is_ref(jax.typeof(x)) for x in args):
        raise NotImplementedError(f"triton_call of {call.name}: vmap over Refs; pass arrays and aliases")
    mapped = [i for i, d in enumerate(dims) if d is not None]
    moved = tuple(jnp.moveaxis(args[i], dims[i], 0) for i in mapped)

    def one(elements: Any) -> Any:
        operands = list(args)
        for i, x in zip(mapped, elements, strict=True):
            operands[i] = x
        return triton_call_p.bind(*operands, call=call)

    return jax.lax.map(one, moved), [0] * len(call.outputs)


batching.primitive_batchers[triton_call_p] = _batch


def source_of(call: Call, variant: Variant, capability: int) -> Source:
    """What the compiler is given."""
    constants: dict[tuple[int, ...], Any] = {(i,): v for i, v in variant.constants}
    divisible, ones = [], []
    for number, ((_, node), parameter) in enumerate(zip(call.tree, call.kernel.params, strict=True)):
        free = not parameter.do_not_specialize
        aligned = free and not parameter.do_not_specialize_on_alignment
        for path, leaf in leaves_with_path(node, (number,)):
            if isinstance(leaf, Absent):
                constants.setdefault(path, None)
            elif isinstance(leaf, Array) and aligned:
                divisible.append(path)
            elif isinstance(leaf, Scalar) and type(leaf.value) is int:
                if leaf.value == 1 and free and len(path) == 1 and not parameter.annotation_type:
                    ones.append(path)
                elif leaf.value % 16 == 0 and aligned:
                    divisible.append(path)
    return Source(
        kernel=call.kernel,
        signature=tuple(
            (name, _spell(node, parameter.annotation_type))
            for (name, node), parameter in zip(call.tree, call.kernel.params, strict=True)
        ),
        constants=tuple(sorted(constants.items(), key=lambda item: item[0])),
        divisible=tuple(divisible),
        ones=tuple(ones),
        options=variant.options,
        capability=capability,
    )


def _spell(node: Any, annotation: str) -> Any:
    """The Triton type of an operand; a scalar's annotation in the kernel's signature wins."""
    if isinstance(node, tuple):
        parts = [_spell(child, annotation) for child in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if isinstance(node, Scalar):
        return annotation or node.type
    return "constexpr" if isinstance(node, Absent) else node.type


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A compiled kernel with its parameters in the order of the launch: inputs, then outputs."""

    compiled: Compiled
    ptx: str
    parameters: tuple[Any, ...]
    outputs: tuple[int, ...]


def _prepare(call: Call, variant: Variant, capability: int) -> _Launch:
    source = source_of(call, variant, capability)
    compiled = _compile.compile_kernel(source)
    constant = {path for path, _ in source.constants} | (set(source.ones) if compiled.ones else set())
    types = [kind for _, kind in source.signature]
    gpu = _compile.gpu_library()
    described = iter(compiled.descriptors)
    aliased = dict(call.aliases)
    zeroed: dict[Any, int] = {
        o: math.prod(call.outputs[o].shape) * call.outputs[o].dtype.itemsize for o in variant.zeroed
    }
    inputs, outputs, order_in, order_out, position = [], [], [], [], 0
    for number, (_, node) in enumerate(call.tree):
        for path, leaf in leaves_with_path(node, (number,)):
            if path in constant:
                continue
            memory = leaf.memory if isinstance(leaf, Descriptor) else leaf
            if isinstance(leaf, Descriptor):
                made = _descriptor_parameters(gpu, leaf, next(described))
            elif isinstance(leaf, Scalar):
                made = [_scalar_parameter(gpu, call, leaf.value, _at(types, path))]
            else:
                output = leaf.index if isinstance(leaf, Output) else aliased.get(leaf.index)
                made = [gpu.create_array_parameter(zeroed.get(output, 0), 16 if path in source.divisible else 0)]
            places = range(position, position + len(made))
            position += len(made)
            (outputs if isinstance(memory, Output) else inputs).extend(made)
            (order_out if isinstance(memory, Output) else order_in).extend(places)
    written = [
        leaf.memory.index if isinstance(leaf, Descriptor) else leaf.index
        for _, node in call.tree
        for leaf in leaves(node)
        if isinstance(leaf.memory if isinstance(leaf, Descriptor) else leaf, Output)
    ]
    ptx = _compile.reorder_parameters(compiled.ptx, tuple(order_in + order_out))
    return _Launch(compiled, ptx, tuple(inputs + outputs), tuple(written + [o for _, o in call.aliases]))


def _at(types: Any, path: tuple[int, ...]) -> Any:
    for step in path:
        types = types[step]
    return types


def _scalar_parameter(gpu: Any, call: Call, value: Any, kind: str) -> Any:
    kind = "i1" if kind == "u1" else kind
    if kind not in ("i1", "i32", "u32", "i64", "u64", "fp32", "fp64"):
        raise NotImplementedError(
            f"triton_call of {call.name}: a scalar of type {kind}; JAX launches i1, i32, u32, i64, u64, fp32 and fp64"
        )
    convert = bool if kind == "i1" else float if kind.startswith("fp") else int
    return gpu.create_scalar_parameter(convert(value), kind)


def _descriptor_parameters(gpu: Any, leaf: Descriptor, meta: dict[str, Any]) -> list[Any]:
    kinds = private("triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST")
    made = gpu.create_tma_descriptor_parameter(
        elem_type=11 if leaf.round_f32_to_tf32 else kinds[meta["elem_type"]],
        swizzle=meta["swizzle"],
        shape=list(leaf.shape),
        strides=list(leaf.strides),
        block_shape=list(meta["block_size"]),
        oob_fill=1 if leaf.padding == "nan" else 0,
    )
    sizes = [gpu.create_scalar_parameter(n, "i32") for n in leaf.shape]
    return [made, *sizes, *(gpu.create_scalar_parameter(n, "i64") for n in leaf.strides)]


def _lower_cuda(ctx: Any, *operands: Any, call: Call) -> Any:
    if call.interpret:
        return _lower_interpreter(ctx, *operands, call=call)
    gpu = _compile.gpu_library()
    capability = call.compute_capability or _compile.device().capability
    variant = call.variants[0] if len(call.variants) == 1 else _fastest(call, ctx.avals_in, capability)
    launch = _prepare(call, variant, capability)
    c = launch.compiled
    if call.debug:
        print(c.ptx)
    kernel = gpu.TritonKernel(
        c.name, c.num_warps, c.num_ctas, c.shared_memory, launch.ptx, "", c.capability, c.scratch_size, c.scratch_align
    )
    proto = gpu.TritonKernelCall(kernel, *variant.grid, launch.parameters).to_proto(call.name, call.serialized_metadata)
    place = {output: i for i, output in enumerate(launch.outputs)}
    attributes: dict[str, Any] = {"opaque": zlib.compress(proto)}
    if call.cost_estimate:
        attributes["cost_estimate_json"] = json.dumps(dict(call.cost_estimate))
    rule = jax.ffi.ffi_lowering(
        _compile.CUSTOM_CALL_TARGET_NAME,
        has_side_effect=call.has_side_effect,
        operand_output_aliases={i: place[o] for i, o in call.aliases},
    )
    ordered = ctx.replace(avals_out=[ctx.avals_out[o] for o in launch.outputs])
    results = rule(ordered, *operands, **attributes)
    return [results[place[o]] for o in range(len(call.outputs))]


def _fastest(call: Call, avals: Any, capability: int) -> Variant:
    """Times the configs of an autotuned kernel, on data of the right shapes, outside of the program."""
    if not any(d.platform == "gpu" for d in jax.devices()):
        return call.variants[0]
    sources = [source_of(call, v, capability) for v in call.variants]
    key = repr((_compile.device().name, [s.key() for s in sources], [(a.shape, str(a.dtype)) for a in avals]))

    def measure(i: int) -> float:
        _compile.compile_kernel(sources[i])
        times: list[float] = []
        single = dataclasses.replace(call, variants=(call.variants[i],), has_side_effect=True)
        # a thread of its own, for the trace in progress must not see these calls
        worker = threading.Thread(target=lambda: times.append(_time(single, avals)))
        worker.start()
        worker.join()
        if not times:
            raise _compile.KernelCompileError(f"config {call.variants[i].label} does not run")
        return times[0]

    return call.variants[_autotune.choose(key, [v.label for v in call.variants], measure)]


def _time(call: Call, avals: Any, launches: int = 20) -> float:
    """Seconds of one launch, the best of three rounds."""
    keys = jax.random.split(jax.random.key(0), len(avals) or 1)
    floating = [jnp.issubdtype(a.dtype, jnp.floating) for a in avals]
    data = [
        jax.random.normal(k, a.shape, jnp.float32).astype(a.dtype) if f else jnp.zeros(a.shape, a.dtype)
        for k, a, f in zip(keys, avals, floating, strict=False)
    ]
    run = jax.jit(lambda *xs: [triton_call_p.bind(*xs, call=call) for _ in range(launches)][-1])
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(run(*data))
        best = min(best, time.perf_counter() - start)
    return best / launches


def _lower_interpreter(ctx: Any, *operands: Any, call: Call) -> Any:
    results, _, _ = mlir.emit_python_callback(
        ctx,
        lambda *arrays: _run_interpreter(call, arrays),
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=call.has_side_effect,
        returns_token=False,
    )
    return results


def _run_interpreter(call: Call, arrays: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    from ._interpret import run_kernel

    variant = call.variants[0]
    aliased = dict(call.aliases)
    inputs = [np.array(a) if i in aliased else np.ascontiguousarray(a) for i, a in enumerate(arrays)]
    shared = {out: inputs[i] for i, out in call.aliases}
    outputs = [shared[i] if i in shared else _poison(o) for i, o in enumerate(call.outputs)]
    for index in variant.zeroed:
        outputs[index][...] = 0

    def value(node: Any) -> Any:
        if isinstance(node, tuple):
            parts = [value(child) for child in node]
            return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
        if isinstance(node, Descriptor):
            fields = {k: getattr(node, k) for k in ("shape", "strides", "block_shape", "padding")}
            return types.SimpleNamespace(base=value(node.memory), **fields)
        if isinstance(node, Output):
            return outputs[node.index]
        return inputs[node.index] if isinstance(node, Array) else getattr(node, "value", None)

    named = {name: value(node) for name, node in call.tree}
    named |= {call.tree[i][0]: constant for i, constant in variant.constants}
    run_kernel(call.kernel, named, variant.grid)
    return tuple(outputs)


def _poison(out: jax.ShapeDtypeStruct) -> np.ndarray:
    """An output before the launch: NaN, or the value that is least likely to look right."""
    if out.dtype == np.bool_:
        return np.ones(out.shape, out.dtype)
    if jnp.issubdtype(out.dtype, jnp.integer):
        return np.full(out.shape, jnp.iinfo(out.dtype).max - 1, out.dtype)
    return np.full(out.shape, np.nan, out.dtype)


def _lower_elsewhere(ctx: Any, *operands: Any, call: Call) -> Any:
    if call.interpret:
        return _lower_interpreter(ctx, *operands, call=call)
    raise RuntimeError(
        f"triton_call of {call.name}: no Triton kernels on platform {'/'.join(ctx.module_context.platforms)}; run it "
        "on a CUDA GPU, or slowly on the CPU inside `with fusedops.interpret():` (or with FUSEDOPS_INTERPRET=1)"
    )


mlir.register_lowering(triton_call_p, _lower_elsewhere)
mlir.register_lowering(triton_call_p, _lower_cuda, platform="cuda")
