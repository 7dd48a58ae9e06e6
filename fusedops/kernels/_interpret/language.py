"""Triton's language on NumPy, in place for the time of one launch."""

import builtins
import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .._compile import private
from .builder import builder_class
from .memory import Memory
from .reductions import associative_scan, map_elementwise, reduce
from .source import PREFIX, rewritten
from .types import BlockConditionError, InterpreterError, numpy_type, tensor


class Session:
    """One launch: its builder, its semantics, and the functions rewritten for it."""

    def __init__(self, memory: Memory) -> None:
        self.builder = builder_class()(memory)
        self.semantic = private("triton.runtime.interpreter").TritonSemantic(self.builder)
        self.semantic._has_native_tma = lambda: True
        self._functions: dict[Any, types.FunctionType] = {}

    def function(self, jit: Any) -> types.FunctionType:
        """The Python function to run for a `triton.jit` function."""
        made = self._functions.get(jit.fn)
        if made is None:
            made = self._functions[jit.fn] = rewritten(jit, _names(jit.fn))
        return made


_session: Session | None = None
_originals: dict[str, Any] = {}
_replacements: dict[int, Any] = {}  # by the id of what Triton has, for names imported one by one


def session() -> Session:
    assert _session is not None
    return _session


@contextlib.contextmanager
def patched(memory: Memory) -> Iterator[Session]:
    """Inside, Triton's language computes on NumPy arrays. One launch at a time."""
    global _session
    interpreter = private("triton.runtime.interpreter")
    saved = []
    try:
        _session = Session(memory)
        for owner, name, value in [*_patches(), (interpreter, "_get_np_dtype", numpy_type)]:
            saved.append((owner, name, vars(owner).get(name, _patches)))
            setattr(owner, name, value)
        with np.errstate(all="ignore"):
            yield _session
    finally:
        for owner, name, value in reversed(saved):
            if value is _patches:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        _session = None


@functools.cache
def _patches() -> list[tuple[Any, str, Any]]:
    """What changes in Triton: (owner, attribute, value)."""
    import triton.language as tl
    from triton.language.extra import cuda

    special = {
        "reduce": reduce, "associative_scan": associative_scan, "map_elementwise": map_elementwise,
        "range": _range, "static_range": _static_range, "static_assert": _static_assert, "static_print": _static_print,
        "multiple_of": _multiple_of, "max_contiguous": _hint, "max_constancy": _hint, "dot_scaled": _dot_scaled,
    }  # fmt: skip
    found: list[tuple[Any, str, Any]] = []
    submodules = [m for m in vars(cuda).values() if inspect.ismodule(m) and m.__name__.startswith(cuda.__name__)]
    for module in (tl, tl.core, tl.math, tl.standard, tl.random, cuda, *submodules):
        for name, value in vars(module).items():
            if name in special and getattr(tl, name, None) is value:
                _originals[name] = value
                found.append((module, name, special[name]))
            elif tl.core.is_builtin(value):
                found.append((module, name, _bound(value)))
    classes = [c for c in vars(tl.core).values() if inspect.isclass(c) and c.__module__ == tl.core.__name__]
    for owner in classes:
        for name, value in vars(owner).items():
            if name in special and owner is tl.tensor:
                found.append((owner, name, special[name]))
            elif tl.core.is_builtin(value):
                found.append((owner, name, _bound(value)))
            elif isinstance(value, private("triton.runtime.JITFunction")):
                found.append((owner, name, _method(value)))
    for owner, name, value in found:
        if inspect.ismodule(owner):
            _replacements[id(vars(owner)[name])] = value
    operators = [name for name in _CONSTEXPR_OPERATORS if name in vars(tl.constexpr)]
    found += [(tl.constexpr, name, _unwrapping(vars(tl.constexpr)[name])) for name in operators]
    found += [
        (private("triton.runtime.JITFunction"), "__call__", _call_helper),
        (tl.dtype, "to_ir", lambda kind, builder: kind),
        (tl.tensor, "__index__", _index),
        (tl.tensor, "__bool__", lambda x: bool(x.handle.data.item()) if x.handle.data.size == 1 else True),
        (tl.tensor, "__repr__", lambda x: repr(x.handle.data)),
        (tl.tensor, "__str__", lambda x: str(x.handle.data)),
        (tl.tensor, "T", property(lambda x: tl.trans(x))),
    ]
    if hasattr(tl, "condition"):
        found.append((tl.condition, "__bool__", lambda x: bool(x.condition)))
    return found


_CONSTEXPR_OPERATORS = [
    f"__{side}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
    for side in ("", "r")
] + [f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")]


def _bound(builtin: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = session().semantic
        return builtin(*args, **kwargs)

    return call


def _method(jit: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call_helper(jit, *args, **kwargs)


def _unwrapping(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of constexpr whose result is a tensor where the other operand is one."""
    import triton.language as tl

    def call(*args: Any) -> Any:
        result = operation(*args)
        if isinstance(result, tl.constexpr) and isinstance(result.value, tl.tensor):
            return result.value
        return result

    return call


def _plain(value: Any) -> Any:
    import triton.language as tl

    return value.value if isinstance(value, tl.constexpr) else value


def _call_helper(jit: Any, *args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
    function = session().function(jit)
    return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _index(x: Any) -> int:
    if x.handle.data.size != 1:
        raise TypeError(f"a block of shape {x.handle.data.shape} is no index")
    return int(x.handle.data.item())


def _names(fn: Any) -> dict[str, Any]:
    """The globals of a rewritten function: its own and those it closes over, for the interpreter."""
    import triton.language as tl
    from triton.language.extra.cuda import libdevice

    names = dict(fn.__globals__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            names[name] = cell.cell_contents
    for name, value in names.items():
        if isinstance(value, tl.constexpr):
            names[name] = value.value
        elif getattr(value, "__name__", "") == "triton.language.extra.libdevice":
            names[name] = libdevice
        elif getattr(value, "__module__", "") == "triton.language.extra.libdevice":
            names[name] = getattr(libdevice, value.__name__)
        elif id(value) in _replacements:
            names[name] = _replacements[id(value)]
    names |= {
        PREFIX + "tensor": _to_tensor, PREFIX + "truth": _truth, PREFIX + "logical": _logical,
        PREFIX + "not": _not, PREFIX + "value": lambda x: getattr(x, "value", x),
    }  # fmt: skip
    names.setdefault("range", _range)
    names.setdefault("min", functools.partial(_extreme, builtins.min, "minimum"))
    names.setdefault("max", functools.partial(_extreme, builtins.max, "maximum"))
    return names


def _to_tensor(value: Any) -> Any:
    """What the compiler makes of a value that is assigned to a name."""
    import triton.language as tl

    if isinstance(value, tuple):
        parts = [_to_tensor(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, tl.tuple):
        return tl.tuple([_to_tensor(part) for part in value.values], value.type if value.type.fields else None)
    return session().semantic.to_tensor(value, False)


def _is_tensor(value: Any) -> bool:
    import triton.language as tl

    return isinstance(value, tl.tensor)


def _truth(value: Any) -> bool:
    if _is_tensor(value) and value.type.is_block():
        shape = list(value.handle.data.shape)
        raise BlockConditionError(f"the condition is a block of shape {shape}, not a scalar; use tl.where")
    return bool(value)


def _logical(is_and: bool, *operands: Callable[[], Any]) -> Any:
    """`and` and `or`: of constants as in Python, of tensors element by element."""
    tensors: list[Any] = []
    value: Any = None
    for operand in operands:
        value = operand()
        if _is_tensor(value):
            tensors.append(value)
        elif bool(value) is not is_and:
            return value
    combine = (lambda a, b: a.logical_and(b)) if is_and else (lambda a, b: a.logical_or(b))
    return functools.reduce(combine, tensors) if tensors else value


def _not(value: Any) -> Any:
    return value.__not__() if _is_tensor(value) else not value


def _extreme(plain: Callable[..., Any], name: str, *values: Any) -> Any:
    import triton.language as tl

    return functools.reduce(getattr(tl, name), values) if any(map(_is_tensor, values)) else plain(*map(_plain, values))


def _range(*bounds: Any, **options: Any) -> Iterator[Any]:
    """The counter is a tensor of the bounds' integer type."""
    semantic = session().semantic
    start, stop, step = _bounds(*bounds, **options)
    kind = functools.reduce(semantic.integer_promote_impl, (semantic.to_tensor(b).dtype for b in (start, stop, step)))
    for i in builtins.range(*map(operator.index, (start, stop, step))):
        yield tensor(np.array(i, numpy_type(kind)), kind)


def _static_range(*bounds: Any, **options: Any) -> builtins.range:
    return builtins.range(*map(operator.index, _bounds(*bounds, **options)))


def _bounds(arg1: Any, arg2: Any = None, step: Any = None, **hints: Any) -> tuple[Any, Any, Any]:
    start, stop = (0, arg1) if _plain(arg2) is None else (arg1, arg2)
    return _plain(start), _plain(stop), 1 if _plain(step) is None else _plain(step)


def _static_assert(condition: Any, message: str = "", _semantic: Any = None) -> None:
    if not _plain(condition):
        raise InterpreterError(_plain(message) or "static assertion failed")


def _static_print(*values: Any, sep: str = " ", end: str = "\n", file: Any = None, **_: Any) -> None:
    print(*map(_plain, values), sep=_plain(sep), end=_plain(end), file=file)


def _hint(x: Any, values: Any, _semantic: Any = None) -> Any:
    return x


def _multiple_of(x: Any, values: Any, _semantic: Any = None) -> Any:
    """Checks the promise where it is one about a number."""
    if _is_tensor(x) and not x.type.is_block():
        number = int(x.handle.data.item())
        factor = int(_plain(values[0] if isinstance(values, list | tuple) else values))
        if number % factor:
            raise InterpreterError(f"tl.multiple_of: {number} is no multiple of {factor}")
    return x


def _dot_scaled(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
    import triton.language as tl

    constant = lambda value: tl.constexpr(value) if isinstance(value, str) else value
    args, kwargs = tuple(map(constant, args)), {name: constant(value) for name, value in kwargs.items()}
    return _originals["dot_scaled"](*args, **kwargs, _semantic=session().semantic)
