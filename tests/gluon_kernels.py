"""A warp-specialised Gluon attention (sm_90): the hardest kind of kernel that the core has to launch.

One producer warp feeds K and V through rings of shared memory, two warpgroups of 64 query rows each
consume them with asynchronous wgmma; a schedule table says which tiles a program computes. BSHD
arrays are seen as [B*S, H*D] through host TMA descriptors. S must be a multiple of 128, D is 128.
"""

import heapq

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 names them async_load and async_store
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

ROWS, BLOCK, D, SLOTS = 128, 128, 128, 2


@gluon.jit
def advance(slot, phase, COUNT: gl.constexpr):
    slot = slot + 1
    wrapped = slot == COUNT
    return gl.where(wrapped, 0, slot), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def key_blocks(tile, S, CAUSAL: gl.constexpr):
    if CAUSAL:
        return tile + 1
    else:
        return S // 128


@gluon.jit
def fill(desc, row, column, full, empty, memory, slot, phase):
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma_load(desc, [row, column], full.index(slot), memory.index(slot))


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    table_ptr, WIDTH, S, H, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 0
    turn = 0
    entry = gl.load(table_ptr + gl.program_id(0) * WIDTH)
    while entry >= 0:
        tile = entry & 0xFFFF
        head = entry >> 16
        base = head // H * S
        column = head % H * 128
        for c in gl.static_range(2):
            fill(q_desc, base + tile * 128 + c * 64, column, q_full, q_empty, q_s, c, turn & 1)
        for j in range(key_blocks(tile, S, CAUSAL)):
            fill(k_desc, base + j * 128, column, k_full, k_empty, k_s, slot, phase)
            fill(v_desc, base + j * 128, column, v_full, v_empty, v_s, slot, phase)
            slot, phase = advance(slot, phase, SLOTS)
        turn += 1
        entry = gl.load(table_ptr + gl.program_id(0) * WIDTH + turn)


@gluon.jit
def consume(
    o_desc, q_s, k_s, v_s, lse_ptr, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    table_ptr, WIDTH, S, H, scale_log2, PART: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    slot = 0
    phase = 0
    turn = 0
    entry = gl.load(table_ptr + gl.program_id(0) * WIDTH)
    while entry >= 0:
        tile = entry & 0xFFFF
        head = entry >> 16
        first = tile * 128 + PART * 64
        offs_t = first + gl.arange(0, 64, rows)
        acc = gl.zeros([64, 128], gl.float32, layout)
        top = gl.full([64], -float("inf"), gl.float32, rows)
        total = gl.zeros([64], gl.float32, rows)
        mbarrier.wait(q_full.index(PART), turn & 1)
        for j in range(key_blocks(tile, S, CAUSAL)):
            mbarrier.wait(k_full.index(slot), phase)
            s = warpgroup_mma(
                q_s.index(PART), k_s.index(slot).permute((1, 0)), gl.zeros([64, 128], gl.float32, layout),
                use_acc=False, is_async=True,
            )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            if CAUSAL:
                offs_s = j * 128 + gl.arange(0, 128, columns)
                s = gl.where(offs_t[:, None] >= offs_s[None, :], s, -float("inf"))
            high = gl.maximum(top, gl.max(s, 1) * scale_log2)
            p = gl.exp2(s * scale_log2 - high[:, None])
            shrink = gl.exp2(top - high)
            total = total * shrink + gl.sum(p, 1)
            top = high
            acc = acc * shrink[:, None]
            mbarrier.wait(v_full.index(slot), phase)
            p = gl.convert_layout(p.to(gl.bfloat16), p_layout)
            acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v_s.index(slot), acc, is_async=True)])
            mbarrier.arrive(v_empty.index(slot), count=1)
            slot, phase = advance(slot, phase, SLOTS)
        gl.store(lse_ptr + head * S + offs_t, (top + gl.log2(total)) * 0.6931471805599453)
        acc = acc / total[:, None]
        q_s.index(PART).store(acc.to(gl.bfloat16))  # the output leaves through the memory of Q
        fence_async_shared()
        tma_store(o_desc, [head // H * S + first, head % H * 128], q_s.index(PART))
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(PART), count=1)
        turn += 1
        entry = gl.load(table_ptr + gl.program_id(0) * WIDTH + turn)


@gluon.jit
def attention_kernel(
    q_desc, k_desc, v_desc, table_ptr, o_desc, lse_ptr, WIDTH, S, H, scale_log2,
    SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], q_desc.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 128, 128], k_desc.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 128, 128], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(k_empty.index(i), 2)
        mbarrier.init(v_empty.index(i), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (o_desc, q_s, k_s, v_s, lse_ptr, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                       table_ptr, WIDTH, S, H, scale_log2, 0, SLOTS, CAUSAL)),
            (consume, (o_desc, q_s, k_s, v_s, lse_ptr, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                       table_ptr, WIDTH, S, H, scale_log2, 1, SLOTS, CAUSAL)),
            (produce, (q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                       table_ptr, WIDTH, S, H, SLOTS, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def schedule(S, heads, programs, causal):
    """Tiles for each program, longest first onto the least busy; rows of tile | head << 16, then -1."""
    tiles = S // ROWS
    busy = [(0.0, p) for p in range(programs)]
    rows = [[] for _ in range(programs)]
    for tile in reversed(range(tiles)):
        for head in range(heads):
            load, p = heapq.heappop(busy)
            rows[p].append(tile | head << 16)
            heapq.heappush(busy, (load + (tile + 1 if causal else tiles), p))
    width = max(map(len, rows)) + 1
    return [row + [-1] * (width - len(row)) for row in rows]
