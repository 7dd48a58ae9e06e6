"""Every default config of every kernel compiles for every architecture, within its shared memory and the
spills that its table states. No GPU needed. FUSEDOPS_LINT=full takes every head dim, dtype and mask."""

import os

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")
from fusedops import triton_compile
from fusedops.kernels import _compile
from fusedops.kernels.attention import backward, configs, forward

FULL = os.environ.get("FUSEDOPS_LINT") == "full"
CASES = [
    (kernel, H, kind, capability, causal)
    for kernel in ("fwd", "dkdv", "dq", "statistics")
    for capability in (80, 86, 90, 100)
    for H in (64, 128, 256)
    for kind in ("half", "tf32", "ieee")
    for causal in (True, False)
    if (kernel, kind) != ("statistics", "half")
    and (FULL or (causal and (H, kind, capability) in {
        (64, "half", 90), (128, "half", 80), (128, "half", 90), (256, "half", 90), (128, "half", 100),
        (256, "half", 86), (128, "tf32", 90), (128, "ieee", 90),
    }))
]  # fmt: skip


def compile_attention(kernel, H, kind, capability, causal, config):
    B, T, N = 2, 1024, 4
    dtype = jnp.bfloat16 if kind == "half" else jnp.float32
    x, rows = jax.ShapeDtypeStruct((B, T, N, H), dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    stats = rows if kind == "half" else jax.ShapeDtypeStruct((B, N, 2, T), jnp.float32)
    args, function, out = {
        "fwd": ((x, x, x), forward.attention_fwd_kernel, (x, rows)),
        "dkdv": ((x, x, x, x, rows, stats), backward.attention_dkdv_kernel, (x, x)),
        "dq": ((x, x, x, x, rows, stats), backward.attention_dq_kernel, x),
        "statistics": ((x, x, x, x, rows, rows), backward.attention_statistics_kernel, stats),
    }[kernel]
    return triton_compile(
        *args, sizes=(T, T, N, N), scale=0.1, kernel=function, out_type=out, H=H, D=H, CAUSAL=causal,
        PRECISION="tf32" if kind == "half" else kind, compute_capability=capability, **config.kwargs(),
    )  # fmt: skip


@pytest.mark.parametrize("kernel, H, kind, capability, causal", CASES)
def test_attention(kernel, H, kind, capability, causal):
    device = _compile.device_for(capability)
    with_config_of = "dq" if kernel == "statistics" else kernel
    config = configs.default_config(with_config_of, H, H, kind, device)
    compiled = compile_attention(kernel, H, kind, capability, causal, config)
    assert compiled.shared_memory <= device.shared_memory
    assert compiled.spills <= configs.row(with_config_of, H, H, kind, device)[-1]
    assert not compiled.wgmma_serialized
