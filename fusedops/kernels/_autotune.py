"""Config, the look-up of tuned configs, and the choice among the configs of a `triton.autotune` kernel."""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _compile


@dataclasses.dataclass(frozen=True)
class Config:
    """How to launch one kernel: its metaparameters, warps and pipeline stages.

    `Config(dict(BLOCK_T=128, BLOCK_S=64), num_warps=4, num_stages=3)`; hashable.
    """

    meta: Mapping[str, int] | tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "meta", tuple(sorted(dict(self.meta).items())))

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `triton_call`."""
        return {**dict(self.meta), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __getitem__(self, name: str) -> int:
        return dict(self.meta)[name]

    def __str__(self) -> str:
        meta = ", ".join(f"{k}={v}" for k, v in dict(self.meta).items())
        return f"{meta}, {self.num_warps} warps, {self.num_stages} stages"


def lookup(op: str, key: Mapping[str, Any], default: Config) -> Config:
    """The tuned config of `op` for this device and `key` (names to numbers or strings, such as dtype
    and head dim), else `default`."""
    entry = _table(_compile.device().name).get(op, {}).get(_spell(key))
    return Config(entry["meta"], entry["num_warps"], entry["num_stages"]) if entry else default


def _spell(key: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(key.items()))


@functools.cache
def _table(device_name: str) -> dict[str, dict[str, Any]]:
    file = Path(__file__).parent / "tuned" / f"{device_name.replace(' ', '_')}.json"
    return json.loads(file.read_text())["configs"] if file.is_file() else {}


_chosen: dict[str, int] = {}


def choose(key: str, labels: Sequence[str], measure: Callable[[int], float]) -> int:
    """The index of the fastest of several configs. Measured once per key (program, shapes, device),
    then remembered in memory and in the cache folder.

    Raises:
      KernelCompileError: no config compiles and fits.
    """
    digest = hashlib.sha256(repr((key, tuple(labels))).encode()).hexdigest()
    if digest not in _chosen:
        folder = _compile.cache_dir()
        path = folder / "autotune" / f"{digest}.json" if folder else None
        try:
            best: Any = json.loads(path.read_text())["best"] if path else None
        except (OSError, ValueError, KeyError):
            best = None
        if best not in range(len(labels)):
            times = _measure_all(labels, measure)
            best = min(times, key=lambda i: times[i])
            if path:
                record = {"best": best, "seconds": {labels[i]: t for i, t in times.items()}}
                _compile.write_atomically(path, json.dumps(record, indent=1))
        _chosen[digest] = best
    return _chosen[digest]


def _measure_all(labels: Sequence[str], measure: Callable[[int], float]) -> dict[int, float]:
    times: dict[int, float] = {}
    failures = []
    for i, label in enumerate(labels):
        try:
            times[i] = measure(i)
        except _compile.KernelCompileError as error:
            failures.append(f"{label}: {error}")
    if not times:
        raise _compile.KernelCompileError("no autotuning config compiles:\n" + "\n".join(failures))
    if failures:
        warnings.warn("autotuning left out configs that do not compile:\n" + "\n".join(failures), stacklevel=2)
    return times
