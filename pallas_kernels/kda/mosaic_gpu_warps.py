"""Products that the warps of a warpgroup make each for itself in KDA's Hopper kernels: scores, gradients through them, the chunk's inverse.

Why, and in which terms: see `mosaic_gpu_lanes.py`.
"""
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import addf, mulf, subf
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxtyping import Array

from pallas_kernels.kda.chunk import CHUNK, TILE
from pallas_kernels.kda.mosaic_gpu_lanes import BETWEEN
from pallas_kernels.kda.mosaic_gpu_registers import (
    EIGHTS,
    MATRIX,
    TILED,
    WGMMA,
    array_of,
    element,
    first_of,
    float32,
    fragments,
    int32,
    left_operand,
    load_row,
    mma,
    multiply,
    positions,
    right_operand,
    rounded_pair,
    shared_operand,
    values_of,
    warp_index,
)

# ---------------------------------------------------------------- scores


def scores(rows: Array, writes: Any, table: Any, *, interpret: bool) -> Array:
    """Products over 64 channels of q's or k's rows, times the left factor, with k's columns, times the right one; zero in tiles above the diagonal.

    writes: bfloat16 tile in shared memory. Rows of tile i meet columns of tile j with what lies between the tiles multiplied into the rows, in
    registers, in float32: the columns are there once, not once for each distance.
    """
    if interpret:
        return _scores_of_values(rows, writes[...].astype(jnp.float32), table[...])

    @plgpu.inline_mgpu(arg_types=(WGMMA, TILED, plgpu.RefType()), return_type=MATRIX)
    def multiply_tiles(_, rows, writes, table):
        warp, values, zero, result = warp_index(), values_of(rows), float32(0.0), []
        for tile in range(CHUNK // TILE):
            branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.uge, warp, int32(tile)), [zero.type] * 8, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_(_tile_scores(values, writes, table, warp, tile))
            with ir.InsertionPoint(branch.else_block):
                scf.yield_([zero] * 8)
            each = iter(branch.results)
            result += [[[next(each) for _ in range(2)] for _ in range(2)] for _ in range(2)]
        return array_of(result, rows)
    return multiply_tiles(rows, writes, table)


def _tile_scores(rows: list, writes: ir.Value, table: ir.Value, warp: ir.Value, tile: int) -> list[ir.Value]:
    """This warp's rows with the columns of `tile`: 8 values, flat."""
    own = arith.cmpi(arith.CmpIPredicate.eq, warp, int32(tile))
    # Of a tile with itself nothing lies between: the row that is read then holds something else, and is not used.
    between = load_row(table, arith.addi(arith.muli(arith.subi(warp, int32(tile)), int32(4)), int32(BETWEEN + tile)))
    sums = [[float32(0.0)] * 4 for _ in range(2)]
    for column in range(CHUNK // TILE):
        left = []
        for eight in (2 * column, 2 * column + 1):
            factors = [arith.select(own, float32(1.0), element(between[eight], one)) for one in range(2)]
            left += [rounded_pair(*(mulf(rows[eight][half][one], factors[one]) for one in range(2))) for half in range(2)]
        r = fragments(writes, tile, column, turned=False)
        sums = [mma(total, left, right) for total, right in zip(sums, ((r[0], r[2]), (r[1], r[3])))]
    return [value for eight in sums for value in eight]


def lower(x: Array, strictly: bool, *, interpret: bool) -> Array:
    """x [64, 64], zero in tiles above the diagonal, with zeros above the diagonal of its tiles too; on it, if `strictly`."""
    if interpret:
        return jnp.where(jnp.arange(CHUNK)[:, None] - strictly >= jnp.arange(CHUNK), x, 0.0)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=MATRIX)
    def cut(_, x):
        warp, (rows, columns), values, zero = warp_index(), positions(), values_of(x), float32(0.0)
        above = [[[arith.cmpi(arith.CmpIPredicate.ult, row, arith.addi(column, int32(strictly))) for column in columns[eight]] for row in rows]
                 for eight in range(2)]
        result = []
        for eight in range(EIGHTS):
            own = arith.cmpi(arith.CmpIPredicate.eq, warp, int32(eight // 2))
            result.append([[arith.select(arith.andi(own, above[eight % 2][half][one]), zero, values[eight][half][one]) for one in range(2)]
                           for half in range(2)])
        return array_of(result, x)
    return cut(x)


def _scores_of_values(rows, writes, table):
    def tile(i, j):
        left, right = rows[i * TILE:(i + 1) * TILE], writes[j * TILE:(j + 1) * TILE]
        if j > i:
            return jnp.zeros((TILE, TILE))
        left = left if i == j else left * table[BETWEEN + 4 * (i - j) + j]
        return left.astype(jnp.bfloat16).astype(jnp.float32) @ right.T
    return jnp.block([[tile(i, j) for j in range(4)] for i in range(4)])


# ---------------------------------------------------------------- gradients through the scores


def score_gradients(sums: tuple[Array, Array, Array], dp: Any, da: Any, reads: Any, erasers: Any, writes: Any, table: Any, *,
                    interpret: bool) -> tuple[Array, Array, Array]:
    """Adds to `sums` what comes through P and A: to the gradients of q's and of k's rows, and of k's columns, without the factors of row and column.

    dp, da: gradients of the scores, zero where there is none. reads, erasers, writes: q and beta k times the left factor, k times the right one. All are
    bfloat16 tiles in shared memory. For a row of tile i and the columns of tile j, what lies between the tiles is one factor for a channel: it
    multiplies the product of the two tiles, and no operand is needed once for each distance.
    """
    if interpret:
        return _score_gradients_of_values(sums, *(x[...].astype(jnp.float32) for x in (dp, da, reads, erasers, writes)), table[...])

    @plgpu.inline_mgpu(arg_types=(WGMMA,) * 3 + (TILED,) * 5 + (plgpu.RefType(),), return_type=(MATRIX,) * 3)
    def add(_, dq, row, dk, dp, da, reads, erasers, writes, table):
        warp, results = warp_index(), [values_of(x) for x in (dq, row, dk)]
        for distance in range(4):
            def of_rows(distance=distance):
                """This warp's rows with the columns of the tile `distance` before."""
                tile = arith.subi(warp, int32(distance))
                lefts = [fragments(x, warp, tile, turned=False) for x in (dp, da)]

                def products(column, start):
                    rights = shared_operand(writes, tile, column)
                    return [[mma(start(i, 2 * column + j), left, right) for j, right in enumerate(rights)] for i, left in enumerate(lefts)]
                return products, tile

            def of_columns(distance=distance):
                """This warp's columns with the rows of the tile `distance` after."""
                tile = arith.addi(warp, int32(distance))
                lefts = [[x[i] for i in (0, 2, 1, 3)] for x in (fragments(x, tile, warp, turned=True) for x in (dp, da))]

                def products(column, start):
                    rights = zip(*(shared_operand(ref, tile, column) for ref in (reads, erasers)))
                    return [[mma(mma(start(0, 2 * column + j), lefts[0], a), lefts[1], b) for j, (a, b) in enumerate(rights)]]
                return products, warp

            there = (arith.cmpi(arith.CmpIPredicate.uge, warp, int32(distance)), arith.cmpi(arith.CmpIPredicate.ult, warp, int32(4 - distance)))
            results[:2] = _add_where(there[0], of_rows, results[:2], table, distance)
            results[2:] = _add_where(there[1], of_columns, results[2:], table, distance)
        return tuple(array_of(x, dq) for x in results)
    return add(*sums, dp, da, reads, erasers, writes, table)


def _add_where(condition: ir.Value, terms: Callable, sums: list, table: ir.Value, distance: int) -> list:
    """`sums` plus, where the condition holds for this warp, the products of terms() times what lies between a tile and the one `distance` after it."""
    if distance == 0:
        return _unflatten(_added(terms, sums, table, distance), len(sums))
    flat = [one for x in sums for eight in x for half in eight for one in half]
    branch = scf.IfOp(condition, [one.type for one in flat], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(_added(terms, sums, table, distance))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(flat)
    return _unflatten(list(branch.results), len(sums))


def _added(terms: Callable, sums: list, table: ir.Value, distance: int) -> list[ir.Value]:
    """sums + products * factor as a flat list, 16 columns at a time."""
    products, tile = terms()
    factors = load_row(table, arith.addi(tile, int32(BETWEEN + 4 * distance))) if distance else None
    start = lambda i, eight: [float32(0.0)] * 4 if distance else [one for half in sums[i][eight] for one in half]
    results = [[] for _ in sums]
    for column in range(CHUNK // TILE):
        for i, pair in enumerate(products(column, start)):
            for eight, term in zip((2 * column, 2 * column + 1), pair):
                if distance:
                    term = [addf(sums[i][eight][j // 2][j % 2], mulf(term[j], element(factors[eight], j % 2))) for j in range(4)]
                results[i] += term
    return [one for x in results for one in x]


def _unflatten(flat: list[ir.Value], count: int) -> list:
    each = iter(flat)
    return [[[[next(each) for _ in range(2)] for _ in range(2)] for _ in range(EIGHTS)] for _ in range(count)]


def _score_gradients_of_values(sums, dp, da, reads, erasers, writes, table):
    dq, row, dk = sums
    apart = jnp.arange(CHUNK)[:, None] // TILE - jnp.arange(CHUNK) // TILE
    for distance in range(4):
        factor = jnp.repeat(table[BETWEEN + 4 * distance:BETWEEN + 4 * distance + 4], TILE, axis=0) if distance else 1.0
        p, a = (jnp.where(apart == distance, x, 0.0) for x in (dp, da))
        dq, row, dk = dq + p @ (factor * writes), row + a @ (factor * writes), dk + factor * (p.T @ reads + a.T @ erasers)
    return dq, row, dk


# ---------------------------------------------------------------- triangular inverse


def block_inverses(a: Array, *, interpret: bool) -> Array:
    """Strictly lower triangular a [64, 64] -> [N | D] [64, 48 + 16]: D the inverses of I + a's diagonal tiles, N = D times what is left of them.

    Neighbouring blocks of inverses merge, from pairs of tokens up to a tile,

        [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]] = [[P, 0], [L, Q]]^-1:

    no power of a, whose entries may be thousands where the inverse's are below one. Operands are split in two bfloat16 parts, without the product
    of the small ones.
    """
    if interpret:
        return _block_inverses_of_values(a)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=MATRIX)
    def invert(_, a):
        warp, values = warp_index(), values_of(a)
        is_warp = [arith.cmpi(arith.CmpIPredicate.eq, warp, int32(w)) for w in range(4)]
        pick = lambda options: first_of(is_warp, options)
        tile = [[[pick([values[2 * w + eight][half][one] for w in range(4)]) for one in range(2)] for half in range(2)] for eight in range(2)]
        row, column = positions()
        d = _tile_inverse(tile, row, column)
        left = [[[arith.select(arith.cmpi(arith.CmpIPredicate.ugt, warp, int32(eight // 2)), x, float32(0.0)) for x in half] for half in values[eight]]
                for eight in range(6)]
        n = multiply(left_operand(d), [right_operand(left)])
        return array_of([*n, *d], a)
    return invert(a)


def merge_blocks(nd: Array, high: Any, low: Any, *, interpret: bool) -> Array:
    """(I + a)^-1 [64, 64] from `block_inverses`, in registers and, as two bfloat16 parts, in the shared memory tiles high and low.

    (I - N + N^2 - N^3) D, N nilpotent of order 4 in blocks: each warp forms its own 16 rows, and reads those of others from shared memory.
    """
    if interpret:
        return _merge_values(nd, high[...].astype(jnp.float32) + low[...].astype(jnp.float32))

    @plgpu.inline_mgpu(arg_types=(WGMMA, TILED, TILED), return_type=MATRIX)
    def merge(_, nd, high, low):
        warp, values = warp_index(), values_of(nd)
        n, d = values[:6], values[6:]
        shared = lambda tile, column: [shared_operand(ref, tile, column) for ref in (high, low)]
        first = left_operand(n)
        # Tile j of N times the rows of tile j: column tile 0 of 1 and 2, column tile 1 of 2.
        of_10, of_20, of_21 = (shared(tile, column) for tile, column in ((1, 0), (2, 0), (2, 1)))
        squares = [*multiply([first[1], first[2]], [of_10, of_20]), *multiply([first[2]], [of_21])]
        cube = multiply([left_operand(squares)[1]], [of_10])
        series = [[[arith.negf(x) for x in half] for half in eight] for eight in n]
        for sign, terms in ((addf, squares), (subf, cube)):
            for i, eight in enumerate(terms):
                series[i] = [[sign(series[i][h][e], eight[h][e]) for e in range(2)] for h in range(2)]
        outside = [x for k, operand in enumerate(left_operand(series)) for x in multiply([operand], [shared(k, 3)])]
        zero, result = float32(0.0), []
        for eight in range(EIGHTS):
            left_of = arith.cmpi(arith.CmpIPredicate.ugt, warp, int32(eight // 2))
            here = arith.cmpi(arith.CmpIPredicate.eq, warp, int32(eight // 2))
            result.append([[arith.select(here, d[eight % 2][h][e], arith.select(left_of, outside[eight][h][e], zero) if eight < 6 else zero)
                            for e in range(2)] for h in range(2)])
        return array_of(result, nd)
    return merge(nd, high, low)


def _tile_inverse(a, row, column):
    """(I + a)^-1 of a strictly lower triangular tile, values [2][2][2]."""
    def corner(bits, h, eight, one):
        """Whether this position is in the lower left corner of two neighbouring blocks of 2^bits."""
        r, c = row[h], column[eight][one]
        neighbours = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(r, int32(bits)), arith.addi(arith.shrui(c, int32(bits)), int32(1)))
        together = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(r, int32(bits + 1)), arith.shrui(c, int32(bits + 1)))
        return arith.andi(neighbours, together)

    each = lambda f: [[[f(eight, h, one) for one in range(2)] for h in range(2)] for eight in range(2)]
    corners = lambda bits: each(lambda eight, h, one: arith.select(corner(bits, h, eight, one), a[eight][h][one], float32(0.0)))
    unit = lambda eight, h, one: arith.select(arith.cmpi(arith.CmpIPredicate.eq, row[h], column[eight][one]), float32(1.0), float32(0.0))
    pairs = corners(0)
    t = each(lambda eight, h, one: subf(unit(eight, h, one), pairs[eight][h][one]))
    for bits in (1, 2, 3):
        left = multiply(left_operand(t), [right_operand(corners(bits))])
        change = multiply(left_operand(left), [right_operand(t)])
        t = [[[subf(*pair) for pair in zip(*halves)] for halves in zip(*eights)] for eights in zip(t, change)]
    return t


def _block_inverses_of_values(a):
    """`block_inverses` on values."""
    blocks = a.reshape(4, TILE, 4, TILE).transpose(0, 2, 1, 3)
    row, column = jnp.arange(TILE)[:, None], jnp.arange(TILE)
    eye = (row == column).astype(a.dtype)

    def invert(tile):
        t = eye - jnp.where((row == column + 1) & (row % 2 == 1), tile, 0.0)
        for bits in (1, 2, 3):
            corner = (row >> bits == (column >> bits) + 1) & (row >> (bits + 1) == column >> (bits + 1))
            t = t - t @ jnp.where(corner, tile, 0.0) @ t
        return t

    d = jnp.stack([invert(blocks[i, i]) for i in range(4)])
    n = jnp.stack([jnp.concatenate([d[i] @ blocks[i, j] if j < i else jnp.zeros_like(eye) for j in range(3)], axis=1) for i in range(4)])
    return jnp.concatenate([n, d], axis=2).reshape(CHUNK, CHUNK)


def _merge_values(nd, shared):
    """`merge_blocks` on values; shared: nd as the other warps see it."""
    n, of_all = (jnp.pad(x[:, :3 * TILE], ((0, 0), (0, TILE))) for x in (nd, shared))
    d = jnp.zeros((CHUNK, CHUNK))
    for i in range(4):
        d = lax.dynamic_update_slice(d, shared[i * TILE:(i + 1) * TILE, 3 * TILE:], (i * TILE, i * TILE))
    squares = n @ of_all
    return (jnp.eye(CHUNK) - n + squares - squares @ of_all) @ d
