"""Which tiles the attention kernels use: a pure function of head dims, dtype and device.

Each row of the tables is BLOCK_T, BLOCK_S, warps, stages and the most bytes of register spills that ptxas
reports for it over the architectures of its table, with and without a causal mask, under Triton 3.6 and 3.9;
the lint test holds every config to them. Rows fit the shared memory of every chip of their table. Rows of "dq"
serve the statistics kernel, too. "ieee" runs on no tensor core, and at head dim 256 it is slow whatever the tile.
"""

from typing import Any

import jax.numpy as jnp

from .. import _autotune, _compile, _launch
from .._autotune import Config

INTERPRETER = Config(dict(BLOCK_T=32, BLOCK_S=16))
DELTA = Config(dict(BLOCK_T=32), num_warps=4)

# kernel -> kind of the dot products -> head dim (the larger one, as a power of two) -> row
LARGE = {  # 227 KB of shared memory: sm_90, sm_100
    "fwd": {
        "half": {64: (64, 64, 4, 3, 0), 128: (64, 64, 4, 3, 8), 256: (128, 64, 8, 2, 108)},
        "tf32": {64: (64, 32, 4, 2, 0), 128: (64, 32, 4, 2, 0), 256: (32, 32, 4, 2, 0)},
        "ieee": {64: (32, 32, 8, 1, 0), 128: (32, 32, 8, 1, 0), 256: (32, 32, 8, 1, 4696)},
    },
    "dkdv": {
        "half": {64: (64, 64, 4, 2, 144), 128: (64, 128, 8, 2, 744), 256: (32, 64, 8, 2, 2436)},
        "tf32": {64: (32, 32, 4, 1, 32), 128: (32, 32, 4, 1, 40), 256: (32, 16, 8, 1, 44)},
        "ieee": {64: (32, 32, 8, 1, 0), 128: (32, 32, 8, 1, 1740), 256: (32, 32, 8, 1, 39224)},
    },
    "dq": {
        "half": {64: (64, 64, 4, 3, 0), 128: (128, 64, 8, 3, 48), 256: (128, 32, 8, 2, 80)},
        "tf32": {64: (32, 32, 4, 1, 0), 128: (32, 32, 4, 1, 612), 256: (32, 16, 8, 1, 0)},
        "ieee": {64: (32, 32, 8, 1, 0), 128: (32, 32, 8, 1, 8), 256: (32, 32, 8, 1, 6600)},
    },
}
SMALL = {  # 99 KB: consumer cards of sm_86, sm_89 and sm_120; sm_80 has 163 KB, and more of them per block
    "fwd": {
        "half": {64: (64, 64, 4, 3, 8), 128: (64, 64, 4, 3, 0), 256: (64, 32, 8, 2, 0)},
        "tf32": {64: (64, 32, 4, 2, 0), 128: (64, 32, 4, 2, 0), 256: (32, 16, 4, 2, 8)},
        "ieee": {64: (32, 32, 8, 1, 0), 128: (32, 32, 8, 1, 0), 256: (32, 16, 8, 1, 21044)},
    },
    "dkdv": {
        "half": {64: (32, 64, 4, 2, 44), 128: (32, 64, 8, 2, 0), 256: (32, 32, 8, 1, 0)},
        "tf32": {64: (32, 32, 4, 1, 0), 128: (32, 32, 4, 1, 16), 256: (16, 16, 8, 1, 0)},
        "ieee": {64: (32, 32, 8, 1, 32), 128: (32, 32, 8, 1, 1648), 256: (32, 16, 8, 1, 20016)},
    },
    "dq": {
        "half": {64: (64, 64, 4, 2, 0), 128: (64, 64, 4, 2, 0), 256: (32, 64, 8, 1, 0)},
        "tf32": {64: (32, 32, 4, 1, 0), 128: (32, 32, 4, 1, 648), 256: (32, 16, 8, 1, 0)},
        "ieee": {64: (32, 32, 8, 1, 0), 128: (32, 32, 8, 1, 24), 256: (32, 16, 8, 1, 28616)},
    },
}


def kind(dtype: Any, precision: str) -> str:
    """Half for 16-bit dtypes; float32 multiplies as `precision` says: tf32, or ieee on no tensor core."""
    return "half" if jnp.dtype(dtype).itemsize == 2 else precision


def row(kernel: str, H: int, D: int, kind: str, device: _compile.Device) -> tuple[int, int, int, int, int]:
    """The default's row for "fwd", "dkdv" or "dq"."""
    table = LARGE if device.shared_memory >= 200 * 1024 else SMALL
    wide = max(H, D)
    return table[kernel][kind][64 if wide <= 64 else 128 if wide <= 128 else 256]


def default_config(kernel: str, H: int, D: int, kind: str, device: _compile.Device) -> Config:
    """The config where nothing was tuned."""
    block_t, block_s, warps, stages, _ = row(kernel, H, D, kind, device)
    return Config(dict(BLOCK_T=block_t, BLOCK_S=block_s), warps, stages)


def chosen_config(kernel: str, H: int, D: int, kind: str) -> Config:
    """The tuned config for these head dims on the present device, else the default one."""
    if _launch.interpreting():
        return INTERPRETER
    key = dict(H=H, D=D, kind=kind)
    return _autotune.lookup(f"attention_{kernel}", key, default_config(kernel, H, D, kind, _compile.device()))


def describe(options: Any, q: Any, v: Any, *kernels: str) -> str:
    """Kernels and their configs, for `explain`."""
    sizes = q.shape[-1], v.shape[-1], kind(q.dtype, dot_precision(options.precision))
    return "; ".join(f"attention_{k}_kernel ({chosen_config(k, *sizes)})" for k in kernels)


def dot_precision(precision: str | None) -> str:
    """How tl.dot multiplies float32 under this matmul precision of JAX: in TF32 by default, as XLA on a
    GPU; the dot algorithms of three and more passes, too, count as exact."""
    exact = precision in ("float32", "highest") or (precision or "").startswith("F32_")
    return "ieee" if exact or (precision or "").endswith(("_X3", "_X6", "_X9")) else "tf32"
