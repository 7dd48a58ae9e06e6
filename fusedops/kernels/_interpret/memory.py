"""The memory that a launch may touch, and the check of every access to it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .types import InterpreterError

# An operand's number sits above the 48 bits of its address and stays with every pointer made from it.
_TAG = np.uint64(48)


class Memory:
    """The arrays of a launch. Pointers carry the number of their array, so that an access beyond its
    end is found even where it would hit another array."""

    def __init__(self, args: dict[str, Any]) -> None:
        found: dict[int, tuple[str, np.ndarray]] = {}
        for name, array in _arrays(args):
            known = found.setdefault(array.ctypes.data, (name, array))
            if array.nbytes > known[1].nbytes or (array.flags.writeable and not known[1].flags.writeable):
                found[array.ctypes.data] = (name, array)
        self._place = {address: number for number, address in enumerate(found, 1)}
        self.names = ["", *(name for name, _ in found.values())]
        self.starts = np.array([0, *found], np.uint64)
        self.sizes = np.array([0, *(array.nbytes for _, array in found.values())], np.uint64)
        self.writable = np.array([False, *(array.flags.writeable for _, array in found.values())])

    def pointer(self, array: np.ndarray) -> np.ndarray:
        """The tagged address of an operand, shape [1]."""
        address = array.ctypes.data
        return np.array([address | self._place[address] << int(_TAG)], np.uint64)

    def addresses(self, verb: str, pointers: np.ndarray, mask: np.ndarray | None, size: int) -> np.ndarray:
        """The addresses of `size` bytes each behind these pointers; 0 where `mask` is false.

        Raises:
          InterpreterError: one lies outside its array, or an input would be written.
        """
        if not pointers.size:
            return pointers
        tag: Any = pointers.flat[0] >> _TAG
        if tag >= len(self.names) or (pointers >> _TAG != tag).any():
            tag = np.minimum(pointers >> _TAG, np.uint64(len(self.names) - 1))
        start, length = self.starts[tag], self.sizes[tag]
        offset = pointers - (start | tag << _TAG)
        inside = (offset < length) & (offset + np.uint64(size) <= length)
        bad = ~inside if mask is None else mask & ~inside
        if bad.any():
            first = np.argmax(bad.reshape(-1))
            number = int(np.broadcast_to(tag, pointers.shape).reshape(-1)[first])
            self._refuse(verb, number, int(offset.reshape(-1)[first].astype(np.int64)), size)
        if verb != "load":
            refused = np.broadcast_to(~self.writable[tag], pointers.shape)
            refused = refused if mask is None else mask & refused
            if refused.any():
                number = int(np.broadcast_to(tag, pointers.shape)[refused][0])
                raise InterpreterError(f"{verb} to {self.names[number]}, an input that is not aliased to an output")
        real = offset + start
        return real if mask is None else np.where(mask, real, np.uint64(0))

    def _refuse(self, verb: str, number: int, offset: int, size: int) -> None:
        if not number:
            raise InterpreterError(f"{verb} through a pointer that was not made from an array of this launch")
        count = int(self.sizes[number]) // size
        raise InterpreterError(
            f"{verb} out of bounds: element {offset // size} of {self.names[number]}, which has {count} elements; "
            "mask the access"
        )


def _arrays(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _arrays(item, key)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _arrays(item, f"{name}[{i}]")
    elif hasattr(value, "block_shape"):
        yield from _arrays(value.base, name)
