"""Runs a Triton kernel on NumPy arrays, on the CPU, through Triton's interpreter.

Triton chooses its interpreter when a kernel is defined; here the choice is made per launch, so the
kernel, the helpers it calls and Triton's own library are rewritten and patched for the time of one
launch. Programs run one after the other.

How it differs from a GPU: float32 products are exact whatever `input_precision` asks; multiply and
add are never fused; a float out of an integer's range converts as NumPy does it; races do not show.
"""

import linecache
import math
import os
from typing import Any

import numpy as np

from .._compile import frontend_lock, private
from .language import Session, patched
from .memory import Memory
from .source import PREFIX
from .types import InterpreterError as InterpreterError
from .types import UnsupportedError as UnsupportedError
from .types import numpy_type, tensor, triton_type


def run_kernel(kernel: Any, args: dict[str, Any], grid: tuple[int, int, int]) -> None:
    """Runs all programs of a launch, one after the other.

    Args:
      kernel: a `triton.jit` function.
      args: every parameter's name to a C-contiguous array (a pointer), a number, None, a tuple of
        these, a host TMA descriptor (an object with `base`, `shape`, `strides`, `block_shape` and
        `padding`), or the value of a metaparameter. Arrays are written in place.

    Raises:
      InterpreterError: the kernel failed, or touched memory outside of its arrays.
      NotImplementedError: a Gluon kernel, or (as an InterpreterError, too) something that the
        interpreter does not have.
    """
    name = kernel.fn.__name__
    if isinstance(kernel, private("triton.experimental.gluon._runtime.GluonJITFunction")):
        raise NotImplementedError(f"kernel {name} is a Gluon kernel, and these run on a GPU only")
    memory = Memory(args)
    with frontend_lock, patched(memory) as session:
        program: tuple[int, int, int] | None = None
        try:
            function = session.function(kernel)
            values = {
                p.name: args[p.name] if p.is_constexpr else _operand(session, memory, args[p.name], p.annotation_type)
                for p in kernel.params
                if p.name in args
            }
            session.builder.set_grid_dim(*grid)
            for program in np.ndindex(*grid):
                session.builder.set_grid_idx(*program)
                function(**values)
        except Exception as error:
            kind = UnsupportedError if isinstance(error, NotImplementedError) else InterpreterError
            raise kind(_message(kernel, program, error)) from error


def _message(kernel: Any, program: tuple[int, int, int] | None, error: BaseException) -> str:
    """The kernel, the line of it or of its helpers that failed, the program, and why."""
    import triton

    file, line, trace = kernel.fn.__code__.co_filename, None, error.__traceback__
    library = os.path.dirname(triton.__file__)
    while trace is not None:
        frame = trace.tb_frame
        if PREFIX + "tensor" in frame.f_globals and not frame.f_code.co_filename.startswith(library):
            file, line = frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    source = f": {linecache.getline(file, line).strip()}" if line else ""
    kind = "" if isinstance(error, InterpreterError) else f"{type(error).__name__}: "
    place = f"{file}:{line}" if line else file
    return f"kernel {kernel.fn.__name__}, {place}, program {program}{source}\n{kind}{error}"


def _operand(session: Session, memory: Memory, value: Any, annotation: str = "") -> Any:
    """What the kernel sees of one operand; `annotation` is the type a scalar's parameter declares."""
    import triton.language as tl

    if isinstance(value, tuple):
        parts = [_operand(session, memory, v, annotation) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, np.ndarray):
        kind = tl.pointer_type(triton_type(value.dtype))
        return tl.tensor(private("triton.runtime.interpreter").TensorHandle(memory.pointer(value), kind), kind)
    if hasattr(value, "block_shape"):
        return session.semantic.make_tensor_descriptor(
            base=_operand(session, memory, value.base),
            shape=[_operand(session, memory, int(n)) for n in value.shape],
            strides=[_operand(session, memory, int(n)) for n in value.strides[:-1]] + [tl.constexpr(1)],
            block_shape=[tl.constexpr(n) for n in value.block_shape],
            padding_option=value.padding,
        )
    if isinstance(value, bool | int | float | np.generic):
        if annotation and not annotation.startswith("*"):
            kind = tl.str_to_ty(annotation, None)
        else:
            kind = triton_type(value.dtype if isinstance(value, np.generic) else _scalar_type(value))
        return tensor(np.array(value).astype(numpy_type(kind)), kind)
    return value


def _scalar_type(value: bool | int | float) -> np.dtype:
    if isinstance(value, bool):
        return np.dtype(bool)
    if isinstance(value, int):
        return np.dtype("i4" if -(2**31) <= value < 2**31 else "i8" if -(2**63) <= value < 2**63 else "u8")
    size = abs(value)
    return np.dtype("f4" if size == 0 or not math.isfinite(size) or 2.0**-126 <= size <= 3.4028235e38 else "f8")
