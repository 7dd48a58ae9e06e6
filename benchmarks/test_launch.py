"""What a launch costs: a chain of 200 small launches inside one jitted program; and what the first call costs.

A launch's time is that of the chain by the host's clock, divided by 200: what the device needs for a kernel
and the gap to the next one, or what the host needs to enqueue it, whichever is longer.
"""

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

import fusedops
from benchmarks import timing

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.benchmark(timer=timing.clock)

CHAIN = 200
VARIANTS = ("triton_call", "xla", "attention", "attention cudnn")


@triton.jit
def increment_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N)
    tl.store(out_ptr + offs, x + 1, mask=offs < N)


def increment(x: jax.Array) -> jax.Array:
    return fusedops.triton_call(x, N=256, kernel=increment_kernel, out_type=x, grid=1, BLOCK=256, num_warps=1)


def functions() -> dict:
    """The function of each variant and its operand, which is also its result's shape."""
    x = jax.random.normal(jax.random.key(0), (256,), jnp.float32)
    q = jax.random.normal(jax.random.key(1), (1, 16, 1, 64), jnp.bfloat16)
    found = (
        (increment, x),
        (lambda x: jax.lax.optimization_barrier(x + 1.0), x),
        (lambda q: fusedops.attention(q, q, q, implementation="triton"), q),
        (lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn"), q),
    )
    return dict(zip(VARIANTS, found, strict=True))


def chain(f, launches: int = CHAIN):
    def run(x):
        for _ in range(launches):
            x = f(x)
        return x

    return jax.jit(run)


def per_launch(f, x: jax.Array, launches: int = CHAIN, calls: int = 40, rounds: int = 5) -> dict:
    """Seconds per launch in each round, and the least that the host needed to enqueue one."""
    run = chain(f, launches)
    y = run(x)
    alone = x
    for _ in range(launches):
        alone = jax.jit(f)(alone)
    assert bool(jnp.array_equal(y, alone, equal_nan=True)), "launches in a chain give another result than one by one"
    found, enqueue = [], float("inf")
    for _ in range(rounds):
        start, y = time.perf_counter(), x
        for _ in range(calls):
            y = run(y)
        enqueue = min(enqueue, time.perf_counter() - start)
        jax.block_until_ready(y)
        found.append((time.perf_counter() - start) / calls / launches)
    return {"seconds": found, "enqueue_us": enqueue / calls / launches * 1e6}


def measure() -> dict[str, dict]:
    """Every variant's times in this process; afterwards, because CUPTI slows launches, the kernels' own."""
    found = {}
    for name, (f, x) in functions().items():
        try:
            found[name] = per_launch(f, x)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
    for name, (f, x) in functions().items():
        if "seconds" in found[name]:
            run = functools.partial(jax.jit(f), x)
            jax.block_until_ready(run())
            times = [sum(t for _, t in timing.kernel_times(run)) for _ in range(5)]
            found[name]["kernel_us"] = timing.median(times) * 1e6
    return found


def python(script: str, **environment: str) -> str:
    """The last line that a script prints in a process of its own, with a small share of the device's memory."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@functools.cache
def in_a_process(command_buffers: bool) -> dict[str, dict]:
    off = "" if command_buffers else " --xla_gpu_enable_command_buffer="
    script = "import json; from benchmarks import test_launch; print(json.dumps(test_launch.measure()))"
    return json.loads(python(script, XLA_FLAGS=os.environ.get("XLA_FLAGS", "") + off))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("command_buffers", [True, False], ids=["command-buffers", "no-command-buffers"])
def test_launch_cost(record, command_buffers: bool, variant: str) -> None:
    if not timing.ON_GPU:
        pytest.skip("needs a CUDA GPU")
    found = dict(in_a_process(command_buffers)[variant])
    assert "error" not in found, found["error"]
    seconds = found.pop("seconds")
    record(seconds, op="launch", variant=variant, command_buffers=command_buffers, clock="host",
           best_us=min(seconds) * 1e6, **found)  # fmt: skip


FIRST_CALL = """
import json, time, jax, jax.numpy as jnp, fusedops
from benchmarks.test_launch import increment_kernel
q = jax.block_until_ready(jax.random.normal(jax.random.key(0), (2, 1024, 8, 128), jnp.bfloat16))
attention = {attention}
f = jax.jit(jax.grad(lambda q: attention(q, q, q).astype(jnp.float32).sum()))
start = time.perf_counter()
if {on_gpu}:
    lowered = f.lower(q)
else:
    fusedops.triton_compile(q, N=2048, kernel=increment_kernel, out_type=q, BLOCK=1024, compute_capability=90)
    lowered = f.lower(q)
lower = time.perf_counter()
compiled = lowered.compile()
compile = time.perf_counter()
jax.block_until_ready(compiled(q))
print(json.dumps([lower - start, compile - lower, time.perf_counter() - compile]))
"""
ATTENTIONS = {"fused": "fusedops.attention", "xla": "jax.nn.dot_product_attention"}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Fresh caches of ours and of JAX, for each variant."""
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    folders = {variant: tmp_path_factory.mktemp(variant) for variant in ATTENTIONS}
    return {
        variant: {"FUSEDOPS_CACHE_DIR": str(f / "kernels"), "JAX_COMPILATION_CACHE_DIR": str(f / "jax"), **always}
        for variant, f in folders.items()
    }  # fmt: skip


@pytest.mark.parametrize("process", ["first", "second"])
@pytest.mark.parametrize("variant", ATTENTIONS)
def test_first_call(record, caches: dict, variant: str, process: str) -> None:
    """Tracing, compiling and running a gradient of attention, with cold caches and in a second process.

    Without a GPU there is no kernel in that program: a small one is compiled beside it.
    """
    script = FIRST_CALL.format(attention=ATTENTIONS[variant], on_gpu=timing.ON_GPU)
    lower, compile, run = json.loads(python(script, **caches[variant]))
    record([lower + compile + run], op="first call", variant=variant, process=process, clock="host",
           lower_seconds=lower, compile_seconds=compile, run_seconds=run)  # fmt: skip
