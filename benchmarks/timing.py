"""Device time, ceilings and memory for the benchmarks.

On a GPU a time is the sum of a call's kernels as CUPTI reports them, through
`jax.experimental.mosaic.gpu.profiler`; where CUPTI does not answer, and on a CPU, it is host time over
queued calls. Candidates are measured in turn, so that a ratio compares the same minute of the same card.
"""

import functools
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ON_GPU = jax.default_backend() == "gpu"


def compare(candidates: Mapping[str, functools.partial[Any]], rounds: int = 7, idle: float = 0.01) -> dict[str, list[float]]:
    """Seconds of each call, one per round; the candidates, partials of jitted functions, take turns, with
    `idle` seconds between."""
    timers = {name: functools.partial(_device_seconds, call) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        jax.block_until_ready(call())
    for _ in range(rounds if ON_GPU else 3):
        for name, timer in timers.items():
            time.sleep(idle)
            times[name].append(timer())
    return times


def _device_seconds(call: functools.partial[Any], repeats: int = 3) -> float:
    if ON_GPU:
        from jax.experimental.mosaic.gpu import profiler

        _, milliseconds = profiler.Cupti(finalize=False).measure(call.func, iterations=repeats)(*call.args)
        if milliseconds is not None:
            return float(np.median(milliseconds)) / 1e3
    return host_seconds(call, repeats)


def host_seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds per call by the host's clock, over calls that queue up."""
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


@functools.cache
def ceilings() -> dict[str, float]:
    """What this device reaches now: `matmul` in FLOP/s (bf16, square), `copy` in bytes/s read plus written."""
    n, size = (8192, 2**29) if ON_GPU else (512, 2**20)
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(2), (size,), jnp.bfloat16)
    matmul, copy = jax.jit(lambda a, b: a @ b), jax.jit(lambda x: -x)
    times = compare({"matmul": functools.partial(matmul, a, b), "copy": functools.partial(copy, x)})
    return {"matmul": 2 * n**3 / median(times["matmul"]), "copy": 4 * size / median(times["copy"])}


def median(values: list[float]) -> float:
    return float(np.median(values))


def spread(values: list[float]) -> float:
    """Half the distance between the slowest and the fastest round, relative to the median."""
    return (max(values) - min(values)) / 2 / median(values)


def temporary_bytes(f: Callable[..., Any], *args: Any) -> int | None:
    """Peak temporary memory of the compiled program beside its arguments and results."""
    analysis = jax.jit(f).lower(*args).compile().memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def environment() -> dict[str, str]:
    """Versions, device and date, as every result carries them."""
    import fusedops

    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": jax.devices()[0].device_kind if ON_GPU else f"cpu ({platform.machine()})",
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "fusedops": fusedops.__version__,
        "python": platform.python_version(),
    }
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        pass
    if ON_GPU:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            facts["driver"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
        except OSError:
            pass
    else:
        facts["note"] = "measured on a CPU: these times are no measure of a GPU"
    return facts
