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
    (kernel, H, dtype, capability, causal)
    for kernel in ("fwd", "dkdv", "dq")
    for capability in (80, 86, 90, 100)
    for H in (64, 128, 256)
    for dtype in ("bfloat16", "float32")
    for causal in (True, False)
    if FULL or (causal and (H, dtype, capability) in {
        (64, "bfloat16", 90), (128, "bfloat16", 80), (128, "bfloat16", 90), (256, "bfloat16", 90),
        (128, "bfloat16", 100), (256, "bfloat16", 86), (128, "float32", 90),
    })
]  # fmt: skip


def compile_attention(kernel, H, dtype, capability, causal, config):
    B, T, N = 2, 1024, 4
    x, rows = jax.ShapeDtypeStruct((B, T, N, H), dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    args, function, out = {
        "fwd": ((x, x, x), forward.attention_fwd_kernel, (x, rows)),
        "dkdv": ((x, x, x, x, rows, rows), backward.attention_dkdv_kernel, (x, x)),
        "dq": ((x, x, x, x, rows, rows), backward.attention_dq_kernel, x),
    }[kernel]
    return triton_compile(
        *args, sizes=(T, T, N, N), scale=0.1, kernel=function, out_type=out, H=H, D=H, CAUSAL=causal,
        PRECISION="tf32", compute_capability=capability, **config.kwargs(),
    )  # fmt: skip


@pytest.mark.parametrize("kernel, H, dtype, capability, causal", CASES)
def test_attention(kernel, H, dtype, capability, causal):
    device = _compile.device_for(capability)
    config = configs.default_config(kernel, H, H, dtype, device)
    compiled = compile_attention(kernel, H, dtype, capability, causal, config)
    assert compiled.shared_memory <= device.shared_memory
    assert compiled.spills <= configs.row(kernel, H, H, dtype, device)[-1]
    assert not compiled.wgmma_serialized
