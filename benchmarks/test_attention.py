"""Attention: fused against plain JAX against cuDNN, forward and backward.

Shapes hold the work per call constant: 16384 tokens, 2048 = heads x head dim, as in GPT-3 13B or Llama 7B
with their sequence lengths varied. Forward counts 4 B N S S H operations (half when causal), backward 2.5
times that; the time of the backward is that of forward and backward together, less the forward.
"""

import concurrent.futures
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import fusedops
from benchmarks import timing
from fusedops.testing import assert_within_budget

pytestmark = pytest.mark.benchmark(timer=timing.clock)

TOKENS, WIDTH = (16384, 2048) if timing.ON_GPU else (512, 128)
PASSES = ("forward", "backward")
# What a candidate may err, times plain JAX: ours by the budget rule; of others, that it is the same function.
FACTORS = {"fused": 2.0, "cudnn": 4.0, "xla": 2.0}


class Case(NamedTuple):
    """H = head dim, S = length."""

    H: int
    S: int
    causal: bool

    def __str__(self) -> str:
        return f"D{self.H}-S{self.S}-{'causal' if self.causal else 'full'}"

    @property
    def shape(self) -> dict[str, int]:
        return dict(B=TOKENS // self.S, S=self.S, N=WIDTH // self.H, H=self.H)

    @property
    def flops(self) -> float:
        return 4 * TOKENS * self.S * WIDTH * (0.5 if self.causal else 1)


if timing.ON_GPU:
    CASES = [Case(128, S, causal) for S in (1024, 4096, 16384) for causal in (True, False)]
    CASES += [Case(64, 1024, True), Case(64, 4096, True), Case(64, 4096, False)]
    CASES += [Case(256, 4096, True), Case(256, 16384, True)]
else:
    CASES = [Case(64, S, causal) for S in (128, 512) for causal in (True, False)]
QUICK = [Case(128, 4096, True), Case(128, 4096, False), Case(64, 4096, True)] if timing.ON_GPU else CASES[:1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = QUICK if metafunc.config.getoption("--quick") else CASES
    rows = [(c, v, p) for c in cases for v in variants(c.causal) for p in PASSES]
    metafunc.parametrize("case, variant, direction", rows, ids=["-".join(map(str, row)) for row in rows])


def variants(causal: bool) -> dict[str, Any]:
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=causal)
    found = {
        "fused": functools.partial(fusedops.attention, is_causal=causal),
        "xla": functools.partial(plain, implementation="xla"),
    }
    return found | ({"cudnn": functools.partial(plain, implementation="cudnn")} if timing.ON_GPU else {})


def forward_and_backward(f, q, k, v, do):
    o, vjp = jax.vjp(f, q, k, v)
    return o, *vjp(do)


def inputs(case: Case) -> list[jax.Array]:
    B, S, N, H = case.shape.values()
    return [jax.random.normal(key, (B, S, N, H), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]


def build(case: Case, q, k, v, do) -> dict[tuple[str, str], Any]:
    """Compiled programs by variant and "forward" or "both"; an exception where it failed.

    Those made of kernels of their own are compiled together; plain JAX alone, as XLA times its choices.
    """

    def one(variant: str, what: str) -> Any:
        f = variants(case.causal)[variant]
        try:
            if what == "forward":
                return jax.jit(f).lower(q, k, v).compile()
            return jax.jit(functools.partial(forward_and_backward, f)).lower(q, k, v, do).compile()
        except Exception as error:
            return error

    keys = [(variant, what) for variant in variants(case.causal) for what in ("forward", "both")]
    together = [key for key in keys if key[0] != "xla"]
    with concurrent.futures.ThreadPoolExecutor(len(together)) as pool:
        found = dict(zip(together, pool.map(lambda key: one(*key), together), strict=True))
    return {key: found[key] if key in found else one(*key) for key in keys}


def keeping_output(causal: bool, q, k, v, do):
    """Plain JAX that keeps for its gradient what fused attention keeps: the output in the dtype of q.

    delta = rowsum(o * do),  ds = p * (do v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
    """
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scale, S = q.shape[-1] ** -0.5, q.shape[1]
    x = dot("btnh,bsnh->bnts", q, k) * scale
    p = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool)[None, None], x, -jnp.inf) if causal else x)
    o = dot("bnts,bsnh->btnh", p.astype(q.dtype), v).astype(q.dtype)
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    ds = (p * (dot("btnh,bsnh->bnts", do, v) - delta.swapaxes(1, 2)[..., None])).astype(q.dtype)
    dq, dk = dot("bnts,bsnh->btnh", ds, k) * scale, dot("bnts,btnh->bsnh", ds, q) * scale
    return o, *(x.astype(q.dtype) for x in (dq, dk, dot("bnts,btnh->bsnh", p.astype(q.dtype), do)))


def check(results: dict[str, Any], case: Case, *arrays) -> tuple[dict[str, AssertionError], dict[str, str]]:
    """The gate: everything finite, and the first and the last head of all within the error budget.

    Fused attention keeps its output in half precision for the gradient. In rows that see few keys dq and dk can
    then be further from the truth than those of `jax.nn`, which keeps all probabilities. So where these two are
    over the budget of `jax.nn`, they must be within that of `keeping_output`, and the row says so.

    Args:
      results: o, dq, dk, dv by variant.
    Returns:
      What is wrong, and which results are over the budget of `jax.nn`; both by variant.
    """
    ends = lambda x: jnp.concatenate([x[:1, :, :1], x[-1:, :, -1:]])
    plain = functools.partial(forward_and_backward, variants(case.causal)["xla"])
    some = [ends(x) for x in arrays]
    reference = jax.jit(plain)(*some)
    keeping = functools.cache(lambda: jax.jit(functools.partial(keeping_output, case.causal))(*some))
    with jax.default_matmul_precision("highest"):
        truth = jax.jit(plain)(*(x.astype(jnp.float32) for x in some))
    wrong, over = {}, {}
    for variant, got in results.items():
        try:
            for i, (name, a) in enumerate(zip(("o", "dq", "dk", "dv"), got, strict=True)):
                budget = functools.partial(assert_within_budget, name=f"{variant} {name}", factor=FACTORS[variant])
                assert bool(jnp.isfinite(a).all()), f"{variant} {name}: NaN or infinity in the result"
                try:
                    budget(ends(a), reference[i], truth[i])
                except AssertionError as error:
                    if name not in ("dq", "dk"):
                        raise
                    budget(ends(a), keeping()[i], truth[i])
                    over[variant] = over.get(variant, "") + str(error)
        except AssertionError as error:
            wrong[variant] = error
    return wrong, over


def say(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return "out of memory" if "RESOURCE_EXHAUSTED" in text else " ".join(text.split())[:200]


@functools.lru_cache(maxsize=1)
def measured(case: Case, mode: str) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Exception]]:
    """Rows by variant and pass, all variants measured in turn; what kept a variant out, by variant."""
    q, k, v, do = inputs(case)
    programs = build(case, q, k, v, do)
    refused = {variant: p for (variant, _), p in programs.items() if isinstance(p, Exception)}
    results = {}
    for variant in variants(case.causal):
        if variant not in refused:
            try:
                jax.block_until_ready(programs[variant, "forward"](q, k, v))
                results[variant] = jax.block_until_ready(programs[variant, "both"](q, k, v, do))
            except Exception as error:
                refused[variant] = error
    wrong, over = check(results, case, q, k, v, do)
    refused |= wrong
    able = [variant for variant in results if variant not in refused]
    results.clear()
    arguments = {"forward": (q, k, v), "both": (q, k, v, do)}
    calls = {
        (variant, what): functools.partial(programs[variant, what], *given)
        for what, given in arguments.items()
        for variant in able
    }  # fmt: skip
    rounds = (7 if case.S < 16384 else 5) if mode == "burst" else 2
    times = timing.compare(calls, rounds, mode)
    rows = {(v, p): row(case, v, p, times, calls, programs, mode) for v in able for p in PASSES}
    for v, text in over.items():
        if v in able:
            rows[v, "backward"]["over_budget_of_jax_nn"] = text
    return rows, refused


def seconds_of(times: dict, variant: str, direction: str) -> list[float]:
    forward, both = (times[variant, what].seconds for what in ("forward", "both"))
    return forward if direction == "forward" else [b - f for b, f in zip(both, forward, strict=True)]


def row(case: Case, variant: str, direction: str, times: dict, calls: dict, programs: dict, mode: str) -> dict:
    """What is stored about one variant and pass; memory and kernels of "backward" are those of both passes."""
    what = "forward" if direction == "forward" else "both"
    seconds = seconds_of(times, variant, direction)
    flops = case.flops * (1 if direction == "forward" else 2.5)
    ceiling = timing.ceilings(mode)["matmul"]
    speed = flops / timing.median(seconds)
    temporary = timing.temporary_bytes(programs[variant, what])
    samples = times[variant, what]
    found = dict(
        op="attention", variant=variant, direction=direction, **case.shape, causal=case.causal, dtype="bfloat16",
        mode=mode, clock=samples.clock, seconds=seconds, tflops=speed / 1e12, ceiling_tflops=ceiling / 1e12,
        percent_of_ceiling=100 * speed / ceiling, temporary_mib=None if temporary is None else temporary / 2**20,
    )  # fmt: skip
    for other in ("xla", "cudnn"):
        if other != variant and (other, what) in times:
            found[f"ratio_to_{other}"] = timing.ratio(seconds, seconds_of(times, other, direction))
    if samples.kernels:
        found["kernels_ms"] = [(name[:60], t * 1e3) for name, t in samples.kernels]
        found["queued_ms"] = timing.queued_seconds(calls[variant, what], 2) * 1e3
        if direction == "backward" and (own := backward_kernels(times, variant)):
            found["backward_kernels_ms"] = own * 1e3
    return found


def backward_kernels(times: dict, variant: str) -> float:
    """Seconds of the kernels of the whole that are not in the forward; 0 if the forward's are not found in it."""
    names = [name for name, _ in times[variant, "forward"].kernels]
    rest = 0.0
    for name, seconds in times[variant, "both"].kernels:
        if name in names:
            names.remove(name)
        else:
            rest += seconds
    return 0.0 if names else rest


def test_attention(record, request, case: Case, variant: str, direction: str) -> None:
    mode = request.config.getoption("--mode")
    rows, refused = measured(case, mode)
    if variant == "fused" and "fused" in refused:
        raise refused["fused"]
    if variant in refused:
        pytest.skip(f"{variant}: {say(refused[variant])}")
    info = dict(rows[variant, direction])
    if variant == "fused" and refused:
        info["left_out"] = {name: say(error) for name, error in refused.items()}
    record(info.pop("seconds"), **info)
