"""Attention backward, deterministic, in three kernels: statistics of rows, dk and dv, dq.

    delta = rowsum(o * do) - dlse
    p = exp(scale * q k^T - lse),  ds = p * (do v^T - delta)
    dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do

Source: FlashAttention-2, https://arxiv.org/abs/2307.08691, algorithm 2, with dq in a kernel of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .._autotune import Config
from .._call import triton_call
from .configs import DELTA, chosen_config, dot_precision, kind
from .tiles import block_of, clean, dot, exponential, has_bad, load_rows, store_rows, unit


@triton.jit
def attention_delta_kernel(
    o_ptr, do_ptr, dlse_ptr, delta_ptr, sizes, D: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """o, do: b t n d, dlse: b n t -> delta: b n t; sizes are (T, N). One program: rows of one head."""
    T, N = sizes
    blocks_t = tl.cdiv(T, BLOCK_T)
    start_t = tl.program_id(0) % blocks_t * BLOCK_T
    bn = (tl.program_id(0) // blocks_t).to(tl.int64)
    base = (bn // N * T * N + bn % N) * D
    offs_t = start_t + tl.arange(0, BLOCK_T)
    o = load_rows(o_ptr + base, start_t, T, N * D, BLOCK_T, D, True).to(tl.float32)
    do = load_rows(do_ptr + base, start_t, T, N * D, BLOCK_T, D, True).to(tl.float32)
    dlse = tl.load(dlse_ptr + bn * T + offs_t, mask=offs_t < T, other=0.0)
    tl.store(delta_ptr + bn * T + offs_t, tl.sum(o * do, 1) - dlse, mask=offs_t < T)


@triton.jit
def load_statistics(lse_ptr, delta_ptr, bn, offs_t, T, EXACT: tl.constexpr):
    """Of rows: logsumexp in the unit of the logits, its correction, and delta. A logsumexp of +inf makes p
    zero, where a row sees no key or is none."""
    mask = offs_t < T
    lse = tl.load(lse_ptr + bn * T + offs_t, mask=mask, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), unit(lse, EXACT))
    if EXACT:
        delta = tl.load(delta_ptr + bn * 2 * T + offs_t, mask=mask, other=0.0)
        correction = tl.load(delta_ptr + (bn * 2 + 1) * T + offs_t, mask=mask, other=0.0)
    else:
        delta = tl.load(delta_ptr + bn * T + offs_t, mask=mask, other=0.0)
        correction = tl.zeros_like(delta)
    return lse, correction, delta


@triton.jit
def probability(x, lse, correction, EXACT: tl.constexpr):
    if EXACT:
        return exponential((x - lse) - correction, True)
    else:
        return tl.exp2(x - lse)


@triton.jit
def attention_statistics_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, sizes, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For float32, where rounding o and lse would show: stats: b n 2 t holds delta as the sum of p * dp, and
    the logarithm of the sum of p, which corrects lse. One program: a tile of queries of one head."""
    T, S, N, K = sizes
    blocks_t = tl.cdiv(T, BLOCK_T)
    start_t = tl.program_id(0) % blocks_t * BLOCK_T
    bn = (tl.program_id(0) // blocks_t).to(tl.int64)
    b, n = bn // N, bn % N
    offs_t = start_t + tl.arange(0, BLOCK_T)
    k_ptr += (b * S * K + n // (N // K)) * H
    v_ptr += (b * S * K + n // (N // K)) * D
    stop = S
    if CAUSAL:
        stop = tl.minimum(tl.minimum(S, T), start_t + BLOCK_T)

    q = load_rows(q_ptr + (b * T * N + n) * H, start_t, T, N * H, BLOCK_T, H, True)
    do = load_rows(do_ptr + (b * T * N + n) * D, start_t, T, N * D, BLOCK_T, D, True)
    lse = tl.load(lse_ptr + bn * T + offs_t, mask=offs_t < T, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    total = tl.zeros([BLOCK_T], tl.float32)
    delta = tl.zeros([BLOCK_T], tl.float32)
    for start in tl.range(0, stop, BLOCK_S):
        k = load_rows(k_ptr, start, stop, K * H, BLOCK_S, H, True)
        v = load_rows(v_ptr, start, stop, K * D, BLOCK_S, D, True)
        x = dot(q, k, PRECISION)
        dp = dot(do, v, PRECISION)
        offs_s = start + tl.arange(0, BLOCK_S)
        visible = (offs_s < stop)[None, :] & (offs_t >= 0)[:, None]
        if CAUSAL:
            visible = visible & (offs_s[None, :] <= offs_t[:, None])
        p = tl.where(visible, exponential(x * scale - lse[:, None], True), 0.0)
        total += tl.sum(p, 1)
        delta += tl.sum(tl.where(visible, p * dp, 0.0), 1)

    total = tl.where(total == 0, 1.0, total)
    dlse = tl.load(dlse_ptr + bn * T + offs_t, mask=offs_t < T, other=0.0)
    stats_ptr += bn * 2 * T
    tl.store(stats_ptr + offs_t, delta / total - dlse, mask=offs_t < T)
    tl.store(stats_ptr + T + offs_t, tl.log(total), mask=offs_t < T)


@triton.jit
def attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, sizes, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk: b s k h, dv: b s k d. One program holds a tile of keys and walks over the queries of every head
    of its group, so that sums over the group stay in float32."""
    T, S, N, K = sizes
    blocks_s = tl.cdiv(S, BLOCK_S)
    start_s = tl.program_id(0) % blocks_s * BLOCK_S
    bk = (tl.program_id(0) // blocks_s).to(tl.int64)
    b, kh = bk // K, bk % K
    G = N // K
    k_ptr += (b * S * K + kh) * H
    v_ptr += (b * S * K + kh) * D
    offs_s = start_s + tl.arange(0, BLOCK_S)
    stop, first, full = S, 0, 0
    if CAUSAL:  # queries from `first` on see some key of the tile, and from `full` on all of them
        stop = tl.minimum(S, T)
        first = start_s // BLOCK_T * BLOCK_T
        full = tl.cdiv(start_s + BLOCK_S - 1, BLOCK_T) * BLOCK_T
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale2 = unit(scale, EXACT)
    STEP: tl.constexpr = max(16, BLOCK_T // 2)  # where masked: fewer registers, less wasted

    k = load_rows(k_ptr, start_s, stop, K * H, BLOCK_S, H, True)  # [BLOCK_S, H]
    v = load_rows(v_ptr, start_s, stop, K * D, BLOCK_S, D, True)  # [BLOCK_S, D]
    dk = tl.zeros([BLOCK_S, block_of(H)], tl.float32)
    dv = tl.zeros([BLOCK_S, block_of(D)], tl.float32)
    last_bad = tl.full([], -1, tl.int32)  # the last query whose NaN or infinity a mask may have to hide
    for g in range(G):
        bn = b * N + kh * G + g
        q_row = q_ptr + (b * T * N + kh * G + g) * H
        do_row = do_ptr + (b * T * N + kh * G + g) * D
        if CAUSAL:
            for start in tl.range(first, tl.minimum(full, T), STEP, num_stages=1):
                offs_t = start + tl.arange(0, STEP)
                q = load_rows(q_row, start, T, N * H, STEP, H, True)  # [STEP, H]
                lse, correction, delta = load_statistics(lse_ptr, delta_ptr, bn, offs_t, T, EXACT)
                x = dot(k, q, PRECISION)  # [BLOCK_S, STEP]
                visible = offs_s[:, None] <= offs_t[None, :]
                p = tl.where(visible, probability(x * scale2, lse[None, :], correction[None, :], EXACT), 0.0)
                do = load_rows(do_row, start, T, N * D, STEP, D, True)  # [STEP, D]
                last_bad = tl.maximum(last_bad, tl.max(tl.where(has_bad(do), offs_t, -1), 0))
                dv = tl.dot(p.to(do.dtype), clean(do), dv, input_precision=PRECISION)
                dp = dot(v, do, PRECISION)
                ds = tl.where(visible, p * (dp - delta[None, :]), 0.0).to(q.dtype)
                dk = tl.dot(ds, clean(q), dk, input_precision=PRECISION)
        for start in tl.range(full, T, BLOCK_T):
            offs_t = start + tl.arange(0, BLOCK_T)
            q = load_rows(q_row, start, T, N * H, BLOCK_T, H, True)
            lse, correction, delta = load_statistics(lse_ptr, delta_ptr, bn, offs_t, T, EXACT)
            x = dot(k, q, PRECISION)
            p = probability(x * scale2, lse[None, :], correction[None, :], EXACT)
            do = load_rows(do_row, start, T, N * D, BLOCK_T, D, True)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dp = dot(v, do, PRECISION)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)

    if CAUSAL:
        dv = tl.where((offs_s <= last_bad)[:, None], float("nan"), dv)
    store_rows(dk_ptr + (b * S * K + kh) * H, dk * scale, start_s, S, K * H, BLOCK_S, H)
    store_rows(dv_ptr + (b * S * K + kh) * D, dv, start_s, S, K * D, BLOCK_S, D)


@triton.jit
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, sizes, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq: b t n h. One program holds a tile of queries of one head and walks over tiles of keys."""
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
    do_ptr += (b * T * N + n) * D
    dq_ptr += (b * T * N + n) * H
    stop, full = S, S // BLOCK_S * BLOCK_S
    if CAUSAL:  # the tile sees keys [0, stop), and all of its rows see [0, full)
        stop = tl.minimum(tl.minimum(S, T), start_t + BLOCK_T)
        full = tl.minimum(S, start_t) // BLOCK_S * BLOCK_S
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    scale2 = unit(scale, EXACT)
    STEP: tl.constexpr = max(16, BLOCK_S // 2)

    q = load_rows(q_ptr, start_t, T, N * H, BLOCK_T, H, True)  # [BLOCK_T, H]
    do = load_rows(do_ptr, start_t, T, N * D, BLOCK_T, D, True)  # [BLOCK_T, D]
    lse, correction, delta = load_statistics(lse_ptr, delta_ptr, bn, offs_t, T, EXACT)
    dq = tl.zeros([BLOCK_T, block_of(H)], tl.float32)
    for start in tl.range(0, full, BLOCK_S):
        k = load_rows(k_ptr, start, stop, K * H, BLOCK_S, H, False)  # [BLOCK_S, H]
        v = load_rows(v_ptr, start, stop, K * D, BLOCK_S, D, False)  # [BLOCK_S, D]
        x = dot(q, k, PRECISION)  # [BLOCK_T, BLOCK_S]
        dp = dot(do, v, PRECISION)
        p = probability(x * scale2, lse[:, None], correction[:, None], EXACT)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    for start in tl.range(full, stop, STEP, num_stages=1):
        k = load_rows(k_ptr, start, stop, K * H, STEP, H, True)
        v = load_rows(v_ptr, start, stop, K * D, STEP, D, True)
        x = dot(q, k, PRECISION)
        dp = dot(do, v, PRECISION)
        offs_s = start + tl.arange(0, STEP)
        visible = (offs_s < stop)[None, :] & (offs_t >= 0)[:, None]
        if CAUSAL:
            visible = visible & (offs_s[None, :] <= offs_t[:, None])
        p = probability(x * scale2, lse[:, None], correction[:, None], EXACT)
        ds = tl.where(visible, p * (dp - delta[:, None]), 0.0).to(k.dtype)
        dq = tl.dot(ds, clean(k), dq, input_precision=PRECISION)

    store_rows(dq_ptr, dq * scale, start_t, T, N * H, BLOCK_T, H)


def attention_bwd(
    q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array, lse: jax.Array, do: jax.Array, dlse: jax.Array,
    *, options: Any, dkdv_config: Config | None = None, dq_config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """dq, dk and dv in the shapes and dtypes of q, k and v.

    Args:
      q, k, v, o, lse: as for `attention_fwd`; o: b t n d, lse: b n t.
      do, dlse: cotangents of o and lse.
      options: has `scale`, `is_causal` and `precision`.
    """
    (b, T, N, H), (S, K, D) = q.shape, v.shape[1:]
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    precision = dot_precision(options.precision)
    common: dict[str, Any] = dict(
        sizes=(T, S, N, K), scale=options.scale, H=H, D=D, CAUSAL=options.is_causal,
        PRECISION=precision,
    )  # fmt: skip
    dq_config = dq_config or chosen_config("dq", H, D, kind(q.dtype, precision))
    rows_grid = b * N * triton.cdiv(T, dq_config["BLOCK_T"])
    if q.dtype == jnp.float32:
        delta = triton_call(
            q, k, v, do, lse, dlse,
            kernel=attention_statistics_kernel, out_type=jax.ShapeDtypeStruct((b, N, 2, T), jnp.float32),
            grid=rows_grid, **common, **dq_config.kwargs(),
        )  # fmt: skip
    else:
        delta = triton_call(
            o, do, dlse,
            sizes=(T, N), kernel=attention_delta_kernel, out_type=like(lse),
            grid=b * N * triton.cdiv(T, DELTA["BLOCK_T"]), D=D, **DELTA.kwargs(),
        )  # fmt: skip
    config = dkdv_config or chosen_config("dkdv", H, D, kind(q.dtype, precision))
    dk, dv = triton_call(
        q, k, v, do, lse, delta,
        kernel=attention_dkdv_kernel, out_type=(like(k), like(v)),
        grid=b * K * triton.cdiv(S, config["BLOCK_S"]), **common, **config.kwargs(),
    )  # fmt: skip
    dq = triton_call(
        q, k, v, do, lse, delta,
        kernel=attention_dq_kernel, out_type=like(q),
        grid=rows_grid, **common, **dq_config.kwargs(),
    )  # fmt: skip
    return dq, dk, dv
