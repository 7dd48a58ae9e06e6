"""What a call is made of: its operands by kind, its variants, and all of it together; hashable."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_TRITON_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8", "float8_e5m2fnuz": "fp8e5b16",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "i1",
}  # fmt: skip


def triton_type(dtype: Any, title: str) -> str:
    """Triton's name of a dtype; `title` begins the error where it has none."""
    name = str(dtype)
    if name not in _TRITON_TYPES:
        advice = {
            "complex64": "pass real and imaginary parts", "complex128": "pass real and imaginary parts",
            "key<fry>": "pass jax.random.key_data(key)", "float0": "this is the tangent of an integer",
        }  # fmt: skip
        hint = advice.get(name, "convert it first")
        raise TypeError(f"{title}: Triton has no dtype {name}; {hint}")
    return _TRITON_TYPES[name]


@dataclasses.dataclass(frozen=True)
class Array:
    """A pointer to operand `index` of the primitive."""

    index: int
    dtype: np.dtype

    @property
    def type(self) -> str:
        return "*" + triton_type(self.dtype, "operand")


@dataclasses.dataclass(frozen=True)
class Output(Array):
    """A pointer to output `index`."""


@dataclasses.dataclass(frozen=True)
class Absent:
    """None, or a metaparameter, whose value stands in `Variant.constants`."""


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number fixed at trace time."""

    value: bool | int | float

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Scalar) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)  # 1, 1.0 and True differ; nan equals nan

    @property
    def type(self) -> str | None:
        """The Triton type that holds the value, as Triton itself chooses it; None for an integer too large."""
        if isinstance(self.value, bool):
            return "i1"
        if isinstance(self.value, int):
            for name, low, high in (("i32", -(2**31), 2**31), ("i64", -(2**63), 2**63), ("u64", 0, 2**64)):
                if low <= self.value < high:
                    return name
            return None
        size = abs(self.value)
        plain = size == 0 or not math.isfinite(size) or 2.0**-126 <= size <= float(np.finfo(np.float32).max)
        return "fp32" if plain else "fp64"


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor of an operand or output; fields as in `TensorDescriptor`."""

    memory: Array | Output
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any
    padding: str
    round_f32_to_tf32: bool

    @property
    def type(self) -> str:
        layout = "" if self.layout is None else f",{self.layout!r}"
        return f"tensordesc<{triton_type(self.dtype, 'descriptor')}{list(self.block_shape)}{layout}>"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One config of a call. `constants` holds (parameter number, value) of the metaparameters."""

    grid: tuple[int, int, int]
    constants: tuple[tuple[int, Any], ...]
    options: tuple[tuple[str, Any], ...]
    zeroed: tuple[int, ...]
    label: str


@dataclasses.dataclass(frozen=True)
class Call:
    """All that is static in a call. `tree` maps every parameter to a leaf or a tuple of leaves;
    `aliases` pairs an operand of the primitive with an output."""

    kernel: Any
    tree: tuple[tuple[str, Any], ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    aliases: tuple[tuple[int, int], ...]
    variants: tuple[Variant, ...]
    name: str = ""
    compute_capability: int | None = None
    serialized_metadata: bytes = b""
    cost_estimate: tuple[tuple[str, int], ...] = ()
    has_side_effect: bool = False
    debug: bool = False
    interpret: bool = False


def leaves(node: Any, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """The leaves under a node of a call's tree, in order."""
    return (leaf for _, leaf in leaves_with_path(node, path))


def leaves_with_path(node: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(node, tuple):
        for i, child in enumerate(node):
            yield from leaves_with_path(child, (*path, i))
    else:
        yield path, node
