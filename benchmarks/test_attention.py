"""Attention: fused against plain JAX against cuDNN, forward and backward.

Shapes hold the work per call constant: 16384 tokens, 2048 = heads x head dim, as in GPT-3 13B or Llama 7B
with their sequence lengths varied. Forward counts 4 B N T S H operations (half when causal), backward 2.5
times that; the time of the backward is that of forward and backward together, less the forward.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

import fusedops
from benchmarks import timing
from fusedops.testing import assert_within_budget

TOKENS, WIDTH = (16384, 2048) if timing.ON_GPU else (512, 128)
LENGTHS = (1024, 4096, 16384) if timing.ON_GPU else (128, 512)
HEAD_DIMS = (64, 128, 256) if timing.ON_GPU else (64,)
CASES = [(H, S, causal) for H in HEAD_DIMS for S in LENGTHS for causal in (True, False)]
QUICK = [(128, 4096, True), (128, 4096, False), (64, 4096, True)] if timing.ON_GPU else CASES[:1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = QUICK if metafunc.config.getoption("--quick") else CASES
    metafunc.parametrize("H, S, causal", cases, ids=[f"D{h}-S{s}-{'causal' if c else 'full'}" for h, s, c in cases])


def variants(causal: bool) -> dict:
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
    found = {"fused": functools.partial(fusedops.attention, is_causal=causal), "xla": plain}
    return found | ({"cudnn": functools.partial(plain, implementation="cudnn")} if timing.ON_GPU else {})


def forward_and_backward(f, q, k, v, do):
    o, vjp = jax.vjp(f, q, k, v)
    return o, *vjp(do)


def check(f, causal: bool, q, k, v, do) -> None:
    """The gate: two heads of one batch row of the full-size result, against float32."""
    got = [x[:1, :, :2] for x in jax.jit(functools.partial(forward_and_backward, f))(q, k, v, do)]
    some = [x[:1, :, :2] for x in (q, k, v, do)]
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
    run = jax.jit(functools.partial(forward_and_backward, plain))
    reference = run(*some)
    with jax.default_matmul_precision("highest"):
        truth = run(*(x.astype(jnp.float32) for x in some))
    for name, a, r, t in zip(("o", "dq", "dk", "dv"), got, reference, truth, strict=True):
        assert_within_budget(a, r, t, name=name)


def measure(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Times what runs; a candidate that has no memory or no kernel for the shape is left out."""
    able = {}
    for name, call in calls.items():
        try:
            jax.block_until_ready(call())
            able[name] = call
        except Exception as error:
            if name == "fused":
                raise
            print(f"{name}: {type(error).__name__}: {str(error)[:120]}")
    return timing.compare(able, rounds)


def test_attention(record, H: int, S: int, causal: bool) -> None:
    B, N = TOKENS // S, WIDTH // H
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (B, S, N, H), jnp.bfloat16) for key in keys)
    found = variants(causal)
    check(found["fused"], causal, q, k, v, do)
    forward = {n: functools.partial(jax.jit(f), q, k, v) for n, f in found.items()}
    both = {
        n: functools.partial(jax.jit(functools.partial(forward_and_backward, f)), q, k, v, do)
        for n, f in found.items()
    }  # fmt: skip
    rounds = 7 if S < 16384 else 4
    times = {"forward": measure(forward, rounds), "both": measure(both, rounds)}
    flops = 4 * B * N * S * S * H * (0.5 if causal else 1)
    ceiling = timing.ceilings()["matmul"]
    info: dict = dict(op="attention", B=B, S=S, N=N, H=H, causal=causal, dtype="bfloat16", ceiling_tflops=ceiling / 1e12)
    for name, f in found.items():
        if name not in times["forward"] or name not in times["both"]:
            continue
        seconds = timing.median(times["forward"][name])
        back = timing.median(times["both"][name]) - seconds
        info[name] = dict(
            forward_ms=seconds * 1e3,
            backward_ms=back * 1e3,
            forward_tflops=flops / seconds / 1e12,
            backward_tflops=2.5 * flops / back / 1e12,
            forward_percent_of_matmul=100 * flops / seconds / ceiling,
            backward_percent_of_matmul=250 * flops / back / ceiling,
            spread=max(timing.spread(times["forward"][name]), timing.spread(times["both"][name])),
            temporary_mib=(timing.temporary_bytes(functools.partial(forward_and_backward, f), q, k, v, do) or 0) / 2**20,
        )
    for other in ("xla", "cudnn"):
        if other in info:
            for direction in ("forward", "backward"):
                ratio = info["fused"][f"{direction}_tflops"] / info[other][f"{direction}_tflops"]
                info[f"{direction}_ratio_to_{other}"] = ratio
    assert math.isfinite(info["fused"]["forward_tflops"])
    record(forward["fused"], **info)
    shown = {n: [round(info[n][f"{d}_tflops"]) for d in ("forward", "backward")] for n in found if n in info}
    print(f"\nattention D{H} S{S} {'causal' if causal else 'full'} TFLOP/s forward, backward: {shown}")
