"""What a launch costs: microseconds each, in a chain of 200 small launches inside one jitted program."""

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

import fusedops
from benchmarks import timing

CHAIN = 200


@triton.jit
def increment_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(out_ptr + offs, x + 1, mask=offs < N)


def chain(f):
    def run(x):
        for _ in range(CHAIN):
            x = f(x)
        return x

    return jax.jit(run)


def microseconds(f, x, calls: int = 40) -> dict[str, float]:
    """Per launch: in all, and what the host needs to enqueue it; the best of five rounds."""
    run = chain(f)
    jax.block_until_ready(run(x))
    best = {"total": float("inf"), "enqueue": float("inf")}
    for _ in range(5):
        start, y = time.perf_counter(), x
        for _ in range(calls):
            y = run(y)
        queued = time.perf_counter() - start
        jax.block_until_ready(y)
        total = time.perf_counter() - start
        best = {"total": min(best["total"], total), "enqueue": min(best["enqueue"], queued)}
    return {name: seconds / calls / CHAIN * 1e6 for name, seconds in best.items()}


def measure() -> dict[str, dict[str, float]]:
    x = jax.random.normal(jax.random.key(0), (256,), jnp.float32)
    q = jax.random.normal(jax.random.key(1), (1, 16, 1, 64), jnp.bfloat16)

    def launch(x):
        return fusedops.triton_call(x, N=256, kernel=increment_kernel, out_type=x, grid=1, BLOCK=256, num_warps=1)

    found = {
        "triton_call": microseconds(launch, x),
        "XLA fusion": microseconds(lambda x: jax.lax.optimization_barrier(x + 1.0), x),
        "attention": microseconds(lambda q: fusedops.attention(q, q, q, implementation="triton"), q),
    }
    _, kernel = timing.compare({"none": functools.partial(jax.jit(launch), x)}, rounds=3).popitem()
    found["kernel alone"] = {"total": timing.median(kernel) * 1e6, "enqueue": 0.0}
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("command_buffers", [True, False], ids=["command-buffers", "no-command-buffers"])
def test_launch_cost(record, command_buffers: bool) -> None:
    if not timing.ON_GPU:
        pytest.skip("needs a CUDA GPU")
    flags = "" if command_buffers else "--xla_gpu_enable_command_buffer="
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
    script = "import json; from benchmarks import test_launch; print(json.dumps(test_launch.measure()))"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"\nmicroseconds per launch, command buffers {command_buffers}: {found}")
    x = jnp.ones(256)
    record(lambda: x, op="launch", command_buffers=command_buffers, microseconds=found)


def test_second_process_compiles_nothing(record, tmp_path) -> None:
    """Tracing, lowering and kernel compilation of attention, cold and with a warm cache."""
    script = """
import time, jax, jax.numpy as jnp, fusedops
from fusedops.kernels import _compile
q = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16)
x = jax.ShapeDtypeStruct((2048,), jnp.float32)
from benchmarks.test_launch import increment_kernel
start = time.perf_counter()
fusedops.triton_compile(x, N=2048, kernel=increment_kernel, out_type=x, BLOCK=1024)
print(time.perf_counter() - start)
"""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "FUSEDOPS_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    seconds = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout))
    record(lambda: 0, op="compile", cold_seconds=seconds[0], warm_seconds=seconds[1])
    assert seconds[1] < seconds[0]
