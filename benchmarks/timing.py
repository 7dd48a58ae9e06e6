"""Device time, ceilings and memory for the benchmarks.

On a GPU a time is the sum of a call's kernels as CUPTI reports them: the same extension that
`jax.experimental.mosaic.gpu.profiler` uses, without its extra warm-up call just before the measured one.
Copies and fills by the driver (memcpy, memset) are no kernels and are not in it; `queued_seconds`, which
times calls back to back by the host's clock, holds everything and is stored beside it.

Two modes, never mixed in one ratio, because a card at full load is limited by its power:

  burst      about 1 ms of idle GPU and an overwritten L2 cache before each call: the speed of one call
  sustained  each candidate runs for a second at a time, and the second half of it counts, by the host's clock

Candidates take turns (A B A B ...), so that a ratio compares the same minute of the same card. Where CUPTI
does not answer, burst falls back to `queued_seconds`; on a CPU both modes are the host's clock and no
measure of a GPU.
"""

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ON_GPU = jax.default_backend() == "gpu"
MODES = ("burst", "sustained")
IDLE = 1e-3  # seconds before a call in burst mode
HOLD = 1.0 if ON_GPU else 0.05  # seconds of each turn in sustained mode
FLUSH = 2**28  # bytes: several times any L2 cache

Call = Callable[[], Any]


class Samples(NamedTuple):
    """Times of one candidate.

    Fields:
      seconds: one for each round.
      clock: "CUPTI" or "host".
      kernels: name and seconds of each kernel of the last round; empty without CUPTI.
    """

    seconds: list[float]
    clock: str
    kernels: list[tuple[str, float]]

    @property
    def median(self) -> float:
        return median(self.seconds)


def compare(candidates: Mapping[Any, Call], rounds: int = 7, mode: str = "burst") -> dict[Any, Samples]:
    """Times calls without arguments, in turn; each returns the arrays to wait for."""
    if mode not in MODES:
        raise ValueError(f"compare: mode must be one of {MODES}, got {mode!r}")
    for call in candidates.values():
        jax.block_until_ready(call())
    measure = _burst if mode == "burst" else _sustained
    found = {name: Samples([], "host", []) for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            seconds, kernels = measure(call)
            clock = "CUPTI" if kernels else "host"
            if found[name].seconds and clock != found[name].clock:
                raise RuntimeError(f"CUPTI answered in some rounds of {name} only: {_cupti_trouble or 'no kernels'}")
            found[name] = Samples([*found[name].seconds, seconds], clock, kernels)
    return found


def _burst(call: Call) -> tuple[float, list[tuple[str, float]]]:
    if not ON_GPU:
        return _elapsed(call, 1), []
    time.sleep(IDLE)
    _flush_cache()
    kernels = kernel_times(call)
    return (sum(t for _, t in kernels), kernels) if kernels else (queued_seconds(call), [])


def _sustained(call: Call) -> tuple[float, list[tuple[str, float]]]:
    """Seconds per call over the second half of a turn, at most two batches of calls in flight."""
    batch = max(1, round(0.02 / queued_seconds(call, 2)))
    waiting, done, start = None, 0, time.perf_counter()
    half = None
    while half is None or time.perf_counter() - start < HOLD:
        for _ in range(batch):
            result = call()
        if waiting is not None:
            jax.block_until_ready(waiting)
            done += batch
        waiting = result
        if half is None and time.perf_counter() - start >= HOLD / 2 and done:
            half, done = time.perf_counter(), 0
    jax.block_until_ready(waiting)
    return (time.perf_counter() - half) / (done + batch), []


def _elapsed(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def queued_seconds(call: Call, repeats: int = 4) -> float:
    """Seconds per call by the host's clock, over calls queued back to back: the device runs them without
    a gap unless the host is slower. What waiting for the last one costs is subtracted."""
    few, many = _elapsed(call, repeats), _elapsed(call, 3 * repeats)
    return (many - few) / (2 * repeats) if many > few else many / (3 * repeats)


_cupti_trouble: str | None = None


def kernel_times(call: Call) -> list[tuple[str, float]]:
    """Name and seconds of each kernel that `call` runs; empty where CUPTI does not answer.

    CUPTI has one subscriber in a process: this fails beside Nsight, compute-sanitizer or another profiler.
    It stays attached afterwards, which makes launches a little slower for the host.
    """
    global _cupti_trouble
    if _cupti_trouble is not None:
        return []
    try:
        from jax.experimental.mosaic.gpu import profiler

        extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        extension._cupti_init()
    except (ImportError, AttributeError, RuntimeError) as error:
        _cupti_trouble = f"{type(error).__name__}: {error}"
        print(f"CUPTI does not answer ({_cupti_trouble}); times are the host's, over queued calls")
        return []
    try:
        jax.block_until_ready(call())
    finally:
        found = extension._cupti_get_timings(False)
    return [(str(name), milliseconds / 1e3) for name, milliseconds in found]


@functools.cache
def _flush() -> tuple[Callable[[jax.Array], jax.Array], list[jax.Array]]:
    return jax.jit(lambda x: x + 1, donate_argnums=0), [jnp.ones(FLUSH // 4, jnp.float32)]


def _flush_cache() -> None:
    run, buffer = _flush()
    buffer[0] = jax.block_until_ready(run(buffer[0]))


@functools.cache
def ceilings(mode: str = "burst") -> dict[str, float]:
    """What this device reaches now: `matmul` in FLOP/s (bf16, square), `copy` in bytes/s read plus written."""
    n, size = (8192, 2**29) if ON_GPU else (512, 2**20)
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in keys[:2])
    x = jax.random.normal(keys[2], (size,), jnp.bfloat16)
    matmul, copy = jax.jit(lambda a, b: a @ b), jax.jit(lambda x: -x)
    calls = {"matmul": functools.partial(matmul, a, b), "copy": functools.partial(copy, x)}
    found = compare(calls, 7 if mode == "burst" else 2, mode)
    return {"matmul": 2 * n**3 / found["matmul"].median, "copy": 2 * x.nbytes / found["copy"].median}


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def spread(values: Sequence[float]) -> float:
    """Half the distance between the slowest and the fastest round, relative to the median."""
    return (max(values) - min(values)) / 2 / median(values)


def ratio(seconds: Sequence[float], other: Sequence[float]) -> float:
    """How many times as fast as the other one: the median over rounds that were measured in turn."""
    return median([b / a for a, b in zip(seconds, other, strict=True)])


def rotating(run: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Call:
    """A call that takes the next set of arguments each time, so that small inputs do not stay in the cache."""
    state = [0]

    def call() -> Any:
        state[0] = (state[0] + 1) % len(sets)
        return run(*sets[state[0]])

    return call


def temporary_bytes(compiled: Any) -> int | None:
    """Peak temporary memory of a compiled program beside its arguments and results."""
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


_now = 0.0


def clock() -> float:
    """A clock that moves by what was measured: pytest-benchmark's statistics are then of device time."""
    return _now


def replay(benchmark: Any, seconds: Sequence[float]) -> None:
    """Hands measured times to pytest-benchmark, one round each; the test is marked `benchmark(timer=clock)`."""
    remaining = iter(seconds)

    def step() -> None:
        global _now
        _now += next(remaining, 0.0)

    benchmark.pedantic(step, rounds=len(seconds))


@functools.cache
def environment() -> dict[str, str]:
    """Versions, device and date, as every result carries them."""
    import fusedops

    device = jax.devices()[0].device_kind if ON_GPU else f"cpu ({platform.machine()})"
    facts = {"date": time.strftime("%Y-%m-%d"), "device": device, "python": platform.python_version()}
    facts["fusedops"] = fusedops.__version__
    for package in ("jax", "jaxlib", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    if commit := _output(git):
        facts["commit"] = commit
    if not ON_GPU:
        return facts | {"note": "measured on a CPU: these times are no measure of a GPU"}
    if driver := _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]):
        facts["driver"] = driver.splitlines()[0]
    return facts


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
