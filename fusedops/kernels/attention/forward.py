"""Attention forward.

    o = softmax(scale * q k^T) v,  lse = log(sum(exp(scale * q k^T)))

One program holds a tile of queries of one head and walks over tiles of keys, keeping the running maximum
and sum of each row. Source: FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .._autotune import Config
from .._call import triton_call
from .configs import chosen_config, dot_precision, kind
from .tiles import block_of, clean, dot, exponential, has_bad, load_rows, logsumexp, store_rows, unit


@triton.jit
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sizes, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q: b t n h, k: b s k h, v: b s k d -> o: b t n d, lse: b n t; sizes are (T, S, N, K),
    and scale is not negative."""
    T, S, N, K = sizes
    blocks_t = tl.cdiv(T, BLOCK_T)
    pid_t = tl.program_id(0) % blocks_t
    bn = (tl.program_id(0) // blocks_t).to(tl.int64)
    b, n = bn // N, bn % N
    if CAUSAL:
        pid_t = blocks_t - 1 - pid_t  # the longest rows first
    start_t = pid_t * BLOCK_T
    offs_t = start_t + tl.arange(0, BLOCK_T)
    q_ptr += (b * T * N + n) * H
    k_ptr += (b * S * K + n // (N // K)) * H
    v_ptr += (b * S * K + n // (N // K)) * D
    o_ptr += (b * T * N + n) * D
    stop, full = S, S // BLOCK_S * BLOCK_S
    if CAUSAL:  # the tile sees keys [0, stop), and all of its rows see [0, full)
        stop = tl.minimum(tl.minimum(S, T), start_t + BLOCK_T)
        full = tl.minimum(S, start_t) // BLOCK_S * BLOCK_S

    q = load_rows(q_ptr, start_t, T, N * H, BLOCK_T, H, True)  # [BLOCK_T, H]
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale = unit(scale, EXACT)
    STEP: tl.constexpr = max(16, BLOCK_S // 2)  # where masked: fewer registers, less wasted
    m = tl.full([BLOCK_T], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, block_of(D)], tl.float32)
    first_bad = tl.full([], 2147483647, tl.int32)  # the first key whose NaN or infinity a mask may have to hide
    for start in tl.range(0, full, BLOCK_S):
        k = load_rows(k_ptr, start, stop, K * H, BLOCK_S, H, False)  # [BLOCK_S, H]
        x = dot(q, k, PRECISION)  # [BLOCK_T, BLOCK_S]
        m_new = tl.maximum(m, tl.max(x, 1) * scale)
        p = exponential(x * scale - m_new[:, None], EXACT)
        alpha = exponential(m - m_new, EXACT)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_rows(v_ptr, start, stop, K * D, BLOCK_S, D, False)  # [BLOCK_S, D]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    for start in tl.range(full, stop, STEP, num_stages=1):
        k = load_rows(k_ptr, start, stop, K * H, STEP, H, True)
        x = dot(q, k, PRECISION) * scale
        offs_s = start + tl.arange(0, STEP)
        visible = (offs_s < stop)[None, :] & (offs_t >= 0)[:, None]
        if CAUSAL:
            visible = visible & (offs_s[None, :] <= offs_t[:, None])
        x = tl.where(visible, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = exponential(x - m_safe[:, None], EXACT)
        alpha = exponential(m - m_safe, EXACT)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_rows(v_ptr, start, stop, K * D, STEP, D, True)
        if CAUSAL:
            first_bad = tl.minimum(first_bad, tl.min(tl.where(has_bad(v), offs_s, 2147483647), 0))
            v = clean(v)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new

    acc = acc * tl.where(l == 0, 0.0, 1 / l)[:, None]
    if CAUSAL:
        acc = tl.where((offs_t >= first_bad)[:, None], float("nan"), acc)
    store_rows(o_ptr, acc, start_t, T, N * D, BLOCK_T, D)
    tl.store(lse_ptr + bn * T + offs_t, logsumexp(m, l, EXACT), mask=offs_t < T)


def attention_fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, *, options: Any, config: Config | None = None
) -> tuple[jax.Array, jax.Array]:
    """q: b t n h, k: b s k h, v: b s k d -> o: b t n d in the dtype of q, lse: b n t in float32.

    Args:
      options: has `scale`, `is_causal` and `precision`.
      config: default: `chosen_config`.
    """
    (b, T, N, H), (S, K, D) = q.shape, v.shape[1:]
    precision = dot_precision(options.precision)
    config = config or chosen_config("fwd", H, D, kind(q.dtype, precision))
    if options.scale < 0:  # the kernel takes the maximum before it scales
        q = -q
    return triton_call(
        q, k, v,
        sizes=(T, S, N, K), scale=abs(options.scale),
        kernel=attention_fwd_kernel,
        out_type=(
            jax.ShapeDtypeStruct((b, T, N, D), q.dtype),
            jax.ShapeDtypeStruct((b, N, T), jnp.float32),
        ),
        grid=b * N * triton.cdiv(T, config["BLOCK_T"]),
        H=H, D=D, CAUSAL=options.is_causal, PRECISION=precision,
        **config.kwargs(),
    )  # fmt: skip
