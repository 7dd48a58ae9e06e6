"""A warp-specialised Gluon kernel through triton_call: compiled anywhere, launched on Hopper."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedops
from fusedops import TensorDescriptor, triton_call, triton_compile

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def operands(q, k, v, table, causal):
    import triton.experimental.gluon.language as gl

    import gluon_kernels as g

    B, S, H, D = q.shape
    view = dict(shape=(B * S, H * D), strides=(H * D, 1))

    def desc(x, rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, D], gl.bfloat16)
        return TensorDescriptor(x, block_shape=(rows, D), layout=layout, **view)

    out = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, S), jnp.float32)
    args = desc(q, 64), desc(k, g.BLOCK), desc(v, g.BLOCK), table
    options = dict(
        kernel=g.attention_kernel, out_type=(desc(out[0], 64), out[1]), WIDTH=table.shape[1], S=S, H=H,
        scale_log2=math.log2(math.e) / math.sqrt(D), SLOTS=g.SLOTS, CAUSAL=causal, num_warps=4,
    )  # fmt: skip
    return args, options


@pytest.mark.parametrize("causal", [False, True])
def test_compiles_for_hopper(causal):
    x = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)
    args, options = operands(x, x, x, jax.ShapeDtypeStruct((132, 3), jnp.int32), causal)
    compiled = triton_compile(*args, **options, compute_capability=90)
    assert compiled.num_warps == 12  # 4 by option, 8 more by warp specialisation
    assert compiled.spills == 0 and not compiled.wgmma_serialized
    assert compiled.shared_memory <= 227 * 1024
    assert len(compiled.descriptors) == 4


def test_interpreter_refuses():
    if jax.default_backend() == "gpu":
        pytest.skip("the error would come back from the GPU's queue")
    x = jnp.zeros((1, 128, 1, 128), jnp.bfloat16)
    args, options = operands(x, x, x, jnp.full((1, 2), -1, jnp.int32), False)
    with fusedops.interpret(), pytest.raises(Exception, match="Gluon kernel"):
        jax.block_until_ready(triton_call(*args, **options, grid=1))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_launches(causal):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs sm_90")
    import gluon_kernels as g

    B, S, H, D = 2, 2048, 16, 128
    q, k, v = (jax.random.normal(key, (B, S, H, D), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
    table = jnp.array(g.schedule(S, B * H, 132, causal), jnp.int32)
    _args, _options = operands(q, k, v, table, causal)

    @jax.jit
    def attention(q, k, v):
        args, options = operands(q, k, v, table, causal)
        return triton_call(*args, **options, grid=132)

    o, lse = attention(q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    s = jnp.einsum("btnh,bsnh->bnts", wide[0], wide[1], precision="highest") / math.sqrt(D)
    s = jnp.where(jnp.tril(jnp.ones((S, S), bool))[None, None] | (not causal), s, -jnp.inf)
    want = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), wide[2], precision="highest")
    error = jnp.linalg.norm((o.astype(jnp.float32) - want).ravel()) / jnp.linalg.norm(want.ravel())
    assert error < 4e-3
    np.testing.assert_allclose(lse, jax.nn.logsumexp(s, axis=-1), atol=2e-5, rtol=0)
    for _ in range(200):
        again = attention(q, k, v)
    np.testing.assert_array_equal(np.asarray(o, np.float32), np.asarray(again[0], np.float32))
