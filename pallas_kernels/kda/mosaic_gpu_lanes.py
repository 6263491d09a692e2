"""Parts of KDA's Hopper kernels that say which thread does what: sums inside tiles and over rows, factors of tiles.

In the layout of the tensor cores' results warp i of a warpgroup holds rows 16 i to 16 i + 15, which are tile i of the chunk. What concerns a tile is
therefore a warp's own affair: no selection among four tiles, no synchronisation, and small products by the warp itself (`mma.sync`). Pallas has
no words for that, so these functions and those of `mosaic_gpu_warps.py` are written in Mosaic's own terms (`mosaic_gpu_registers.py`), and a
second time on values for the interpreter (`interpret`). Arrays are [64, 64] float32.
"""
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.mosaic.gpu.fragmented_array import addf, mulf
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array

from pallas_kernels.kda.chunk import CHUNK, TILE
from pallas_kernels.kda.mosaic_gpu_registers import (
    MATRIX,
    WGMMA,
    array_of,
    element,
    float32,
    int32,
    lane_index,
    load_row,
    mma,
    pointer,
    positions,
    right_operand,
    rounded_pair,
    same_in_rows,
    store_row,
    thread_index,
    values_of,
    warp_index,
)

BALANCE = 57.0
"""Bits that the left factors are scaled up by and the right ones down: both then stay in the middle of bfloat16's range."""
ENTERING, LEAVING, BETWEEN, WHOLE, FACTORS = 0, 4, 4, 20, 21
"""Rows of the table of factors, one of each kind for every tile i:
ENTERING + i: from the chunk's start to the tile's, 2^-BALANCE of it; LEAVING + i: from the tile's start to the chunk's end, 2^BALANCE of it;
BETWEEN + 4 d + i, d = 1 to 3: from the tile's start to that of tile i + d, 0 where there is none; WHOLE: of the chunk. FACTORS: rows in all."""


def in_this_turn(x: Array, *, interpret: bool) -> Array:
    """An int32 scalar that the compiler takes for a new one in each turn of a loop: what is computed from it is not moved out of the loop.

    Addresses of all tiles, computed ahead of the loop, would fill the registers that its arithmetic needs.
    """
    if interpret:
        return x

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())))
    def again(_, x):
        i32 = ir.IntegerType.get_signless(32)
        value = utils.inline_ptx("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", x.registers.item(), result_types=i32, has_side_effects=True, convergent=True)
        return FragmentedArray.splat(value, (), is_signed=True)
    return again(x)


def anew(x: Array, *, interpret: bool) -> Array:
    """x [64, 64] as if the compiler had not seen it before: what is computed from it is not what was computed from it earlier."""
    if interpret:
        return x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=MATRIX)
    def again(_, x):
        one = lambda value: utils.inline_ptx("mov.b32 $0, $1;", value, result_types=ir.F32Type.get(), has_side_effects=True)
        return array_of([[[one(value) for value in half] for half in eight] for eight in values_of(x)], x)
    return again(x)


def reciprocal(x: Array, *, interpret: bool) -> Array:
    """1 / x of a [64, 64], to a unit in the last place; 0 where x is denormal or beyond 2^126: one instruction, the language's own division takes eight."""
    if interpret:
        return 1.0 / x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=MATRIX)
    def invert(_, x):
        one = lambda value: utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", value, result_types=ir.F32Type.get())
        return array_of([[[one(value) for value in half] for half in eight] for eight in values_of(x)], x)
    return invert(x)


# ---------------------------------------------------------------- sums inside tiles and factors of tiles


def tile_sums(x: Array, *, interpret: bool) -> Array:
    """Running sums over the rows of each tile, float32 [64, 64] -> the same, with every term to 2^-17 of itself."""
    if interpret:
        return jnp.cumsum(x.reshape(-1, TILE, x.shape[1]), axis=1).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=MATRIX)
    def scan(_, x):
        return array_of(_times_ones(values_of(x), later=False), x)
    return scan(x)


def _times_ones(x: list, *, later: bool) -> list:
    """A tile's sums over each row and those before it, or after it if `later`: a product with a triangle of ones.

    It has half as many instructions as a scan by shuffles, and none that waits for another of its own.
    """
    rows, columns = positions()
    one = lambda row, column: arith.select(arith.cmpi(arith.CmpIPredicate.ule, *((row, column) if later else (column, row))), float32(1.0), float32(0.0))
    ones = [rounded_pair(*(one(row, column) for column in columns[eight])) for eight in range(2) for row in rows]
    result = []
    for eight in x:
        (high,), (low,) = right_operand([eight])
        sums = mma(mma([float32(0.0)] * 4, ones, low), ones, high)
        result.append([[sums[0], sums[1]], [sums[2], sums[3]]])
    return result


def suffix_sums(x: Array, totals: Any, *, interpret: bool) -> Array:
    """Sums over each row and those after it, float32 [64, 64] -> the same. totals: scratch [4, 64], free for others' use after the next `commit_smem`."""
    if interpret:
        return jnp.cumsum(x[::-1], axis=0)[::-1]

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=MATRIX)
    def scan(_, x, totals):
        lane, warp, values = lane_index(), warp_index(), _times_ones(values_of(x), later=True)
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, int32(4))):
            store_row(totals, warp, [eight[0] for eight in values])
        utils.warpgroup_barrier()
        for tile in range(1, 4):
            counts = arith.select(arith.cmpi(arith.CmpIPredicate.ult, warp, int32(tile)), float32(1.0), float32(0.0))
            for eight, pair in enumerate(load_row(totals, int32(tile))):
                for one in range(2):
                    later = mulf(counts, element(pair, one))
                    for half in range(2):
                        values[eight][half][one] = addf(values[eight][half][one], later)
        return array_of(values, x)
    return scan(x, totals)


def sum_rows(arrays: Sequence[Array], totals: Any, outs: Sequence[Any], *, interpret: bool) -> None:
    """Sums over the rows of float32 arrays [64, 64], at most two -> outs [64] each; there when this returns. totals: scratch [8, 64], as for `suffix_sums`."""
    if interpret:
        for x, out in zip(arrays, outs):
            out[...] = jnp.sum(x, axis=0)
        return

    @plgpu.inline_mgpu(arg_types=((WGMMA,) * len(arrays), plgpu.RefType(), (plgpu.RefType(),) * len(arrays)))
    def total(_, arrays, totals, outs):
        lane, thread, warp = lane_index(), thread_index(), warp_index()
        sums = [[[_over_rows(addf(eight[0][one], eight[1][one])) for one in range(2)] for eight in values_of(x)] for x in arrays]
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, int32(4))):
            for i, x in enumerate(sums):
                store_row(totals, arith.addi(warp, int32(4 * i)), x)
        utils.warpgroup_barrier()
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread, int32(CHUNK))):
            for i, out in enumerate(outs):
                parts = [llvm.load(ir.F32Type.get(), pointer(totals, arith.addi(thread, int32(CHUNK * (4 * i + j))))) for j in range(4)]
                llvm.store(addf(addf(*parts[:2]), addf(*parts[2:])), pointer(out, thread))
        utils.warpgroup_barrier()
    total(tuple(arrays), totals, tuple(outs))


def _over_rows(x: ir.Value) -> ir.Value:
    """Sum over the eight threads of a warp that hold the same columns."""
    for distance in (4, 8, 16):
        x = addf(x, utils.shfl_bfly(x, distance))
    return x


def dots(x: Any, y: Any, *, interpret: bool) -> tuple[Array, Array, Array]:
    """x . x, x . y and y . y in float32 of two vectors of 64 or 128 in shared memory. Each warp computes them all: none waits for another."""
    if interpret:
        x, y = (a[...].astype(jnp.float32) for a in (x, y))
        return jnp.sum(x * x), jnp.sum(x * y), jnp.sum(y * y)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=(plgpu.ShapeDtypeStruct((), jnp.float32, layout=scalar),) * 3)
    def multiply(_, x, y):
        lane, size = lane_index(), ir.MemRefType(x.type).shape[0]
        sums = [float32(0.0)] * 3
        for i in range(size // 32):
            a, b = (_float_at(ref, arith.addi(lane, int32(32 * i))) for ref in (x, y))
            sums = [addf(total, mulf(*pair)) for total, pair in zip(sums, ((a, a), (a, b), (b, b)))]
        for distance in (1, 2, 4, 8, 16):
            sums = [addf(total, utils.shfl_bfly(total, distance)) for total in sums]
        return tuple(FragmentedArray.splat(total, ()) for total in sums)
    return multiply(x, y)


def _float_at(ref: ir.Value, index: ir.Value) -> ir.Value:
    """An entry of a float32 or bfloat16 vector, in float32."""
    dtype, wide = ir.MemRefType(ref.type).element_type, ir.F32Type.get()
    value = llvm.load(dtype, utils.getelementptr(utils.memref_ptr(ref), [index], dtype))
    return value if dtype == wide else arith.extf(wide, value)


def tile_factors(sums: Array, totals: Any, table: Any, *, interpret: bool) -> None:
    """The table [FACTORS, 64] of what lies between tiles, from the log decays' running sums in bits. totals: scratch [4, 64].

    One column for each two threads; whole when this returns.
    """
    if interpret:
        table[...] = jnp.stack(_factor_rows(list(sums[TILE - 1::TILE]), jnp.exp2, jnp.zeros(CHUNK)))
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(), plgpu.RefType()))
    def fill(_, sums, totals, table):
        lane, thread, warp, values = lane_index(), thread_index(), warp_index(), values_of(sums)
        with utils.when(arith.cmpi(arith.CmpIPredicate.uge, lane, int32(28))):
            store_row(totals, warp, [eight[1] for eight in values])
        utils.warpgroup_barrier()
        column = arith.andi(thread, int32(CHUNK - 1))
        tiles = [llvm.load(ir.F32Type.get(), pointer(totals, arith.addi(column, int32(CHUNK * i)))) for i in range(4)]
        first = arith.cmpi(arith.CmpIPredicate.ult, thread, int32(CHUNK))
        for mine, which in ((first, range(BETWEEN + 4)), (arith.xori(first, utils.c(1, first.type)), range(BETWEEN + 4, FACTORS))):
            with utils.when(mine):
                rows = _factor_rows([_Bits(t) for t in tiles], lambda x: x.exp2(), _Bits(float32(0.0)), which)
                for i, row in zip(which, rows):
                    llvm.store(row.value, pointer(table, arith.addi(column, int32(CHUNK * i))))
        utils.warpgroup_barrier()
    fill(sums, totals, table)


class _Bits:
    """A float32 in a register, with the arithmetic of `_factor_rows`."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __add__(self, other):
        return _Bits(addf(self.value, other.value if isinstance(other, _Bits) else float32(other)))

    def exp2(self):
        return _Bits(utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", self.value, result_types=ir.F32Type.get()))


def _factor_rows(t: Sequence[Any], exp2: Callable, zero: Any, which: Sequence[int] = range(FACTORS)) -> list[Any]:
    """Rows `which` of the table, from the tiles' log decays t."""
    def total(first, last):
        result = zero
        for tile in t[first:last]:
            result = result + tile
        return result

    def row(i):
        if i == WHOLE:
            return exp2(total(0, 4))
        kind, tile = divmod(i, 4)
        if kind == 0:
            return exp2(total(0, tile) + -BALANCE)
        if kind == 1:
            return exp2(total(tile, 4) + BALANCE)
        return exp2(total(tile, tile + kind - 1)) if tile + kind - 1 < 4 else zero
    return [row(i) for i in which]


def of_tiles(table: Any, first: int, *, interpret: bool) -> Array:
    """Row `first` + i of the table in every row of tile i, [64, 64]."""
    if interpret:
        return jnp.repeat(table[first:first + 4], TILE, axis=0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=MATRIX)
    def spread(_, table):
        return same_in_rows(load_row(table, arith.addi(warp_index(), int32(first))))
    return spread(table)
