"""Parts of KDA's Hopper kernels that say which thread does what: sums inside tiles, factors of tiles, the chunk's triangular inverse.

In the layout of the tensor cores' results warp i of a warpgroup holds rows 16 i to 16 i + 15, which are tile i of the chunk. What concerns a tile is
therefore a warp's own affair: no selection among four tiles, no synchronisation, and small products by the warp itself (`mma.sync`). Pallas has
no words for that, so each function here is written in Mosaic's own terms, and a second time on values for the interpreter (`interpret`).

A register array is [64, 64] float32; thread t of a warp holds rows t / 4 and t / 4 + 8 of its tile and of every eight columns 2 (t % 4) and the next.
"""
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.mosaic.gpu.fragmented_array import addf, mulf, subf
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector
from jaxtyping import Array

from pallas_kernels.kda.chunk import CHUNK, TILE

BALANCE = 57.0
"""Bits that the left factors are scaled up by and the right ones down: both then stay in the middle of bfloat16's range."""
ENTERING, LEAVING, BETWEEN, WHOLE, FACTORS = 0, 4, 4, 20, 21
"""Rows of the table of factors, one of each kind for every tile i:
ENTERING + i: from the chunk's start to the tile's, 2^-BALANCE of it; LEAVING + i: from the tile's start to the chunk's end, 2^BALANCE of it;
BETWEEN + 4 d + i, d = 1 to 3: from the tile's start to that of tile i + d, 0 where there is none; WHOLE: of the chunk. FACTORS: rows in all."""

_WGMMA = plgpu.Layout.WGMMA
_MATRIX = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=_WGMMA)
_TILED = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
_EIGHTS = CHUNK // 8


# ---------------------------------------------------------------- registers of a thread


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _f32(value: float) -> ir.Value:
    return utils.c(value, ir.F32Type.get())


def _thread() -> ir.Value:
    """Index of this thread in its warpgroup."""
    index = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    return arith.andi(index, _i32(127))


def _lane() -> ir.Value:
    return arith.andi(_thread(), _i32(31))


def _warp() -> ir.Value:
    """Index of this warp in its warpgroup, uniform in the compiler's eyes. All lanes take part: never inside a branch of some of them."""
    return arith.andi(utils.warp_idx(sync=True), _i32(3))


def _values(x: FragmentedArray) -> list[list[list[ir.Value]]]:
    """values[eight][half][one]: column 8 eight + 2 (lane % 4) + one, row lane / 4 + 8 half of the tile."""
    registers = x.registers.reshape(_EIGHTS, 2)
    return [[[_element(registers[eight, half], one) for one in range(2)] for half in range(2)] for eight in range(_EIGHTS)]


def _element(pair: ir.Value, one: int) -> ir.Value:
    return vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([one]))


def _array(values: Sequence[Sequence[Sequence[ir.Value]]], like: FragmentedArray) -> FragmentedArray:
    registers = like.registers.copy()
    flat = registers.reshape(_EIGHTS, 2)
    for eight in range(_EIGHTS):
        for half in range(2):
            flat[eight, half] = _pair(*values[eight][half])
    return FragmentedArray(_registers=flat.reshape(like.registers.shape), _layout=like.layout, _is_signed=None)


def _pair(first: ir.Value, second: ir.Value) -> ir.Value:
    both = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
    return llvm.insertelement(llvm.insertelement(both, first, position=_i32(0)), second, position=_i32(1))


def _pointer(ref: ir.Value, offset: ir.Value) -> ir.Value:
    """Address of the float32 with index `offset` in shared memory without transforms."""
    return utils.getelementptr(utils.memref_ptr(ref), [offset], ir.F32Type.get())


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

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=_MATRIX)
    def again(_, x):
        one = lambda value: utils.inline_ptx("mov.b32 $0, $1;", value, result_types=ir.F32Type.get(), has_side_effects=True)
        return _array([[[one(value) for value in half] for half in eight] for eight in _values(x)], x)
    return again(x)


def reciprocal(x: Array, *, interpret: bool) -> Array:
    """1 / x of a [64, 64], to a unit in the last place; 0 where x is denormal or beyond 2^126: one instruction, the language's own division takes eight."""
    if interpret:
        return 1.0 / x

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=_MATRIX)
    def invert(_, x):
        one = lambda value: utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", value, result_types=ir.F32Type.get())
        return _array([[[one(value) for value in half] for half in eight] for eight in _values(x)], x)
    return invert(x)


# ---------------------------------------------------------------- sums inside tiles and factors of tiles


def tile_sums(x: Array, *, interpret: bool) -> Array:
    """Running sums over the rows of each tile, float32 [64, 64] -> the same, with every term to 2^-17 of itself."""
    if interpret:
        return jnp.cumsum(x.reshape(-1, TILE, x.shape[1]), axis=1).reshape(x.shape)

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=_MATRIX)
    def scan(_, x):
        return _array(_times_ones(_values(x), later=False), x)
    return scan(x)


def _times_ones(x: list, *, later: bool) -> list:
    """A tile's sums over each row and those before it, or after it if `later`: a product with a triangle of ones.

    It has half as many instructions as a scan by shuffles, and none that waits for another of its own.
    """
    rows, columns = _positions()
    one = lambda row, column: arith.select(arith.cmpi(arith.CmpIPredicate.ule, *((row, column) if later else (column, row))), _f32(1.0), _f32(0.0))
    pack = lambda pair: utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", pair[1], pair[0], result_types=ir.IntegerType.get_signless(32))
    ones = [pack([one(row, column) for column in columns[eight]]) for eight in range(2) for row in rows]
    result = []
    for eight in x:
        (high,), (low,) = _right_operand([eight])
        sums = _mma(_mma([_f32(0.0)] * 4, ones, low), ones, high)
        result.append([[sums[0], sums[1]], [sums[2], sums[3]]])
    return result


def suffix_sums(x: Array, totals: Any, *, interpret: bool) -> Array:
    """Sums over each row and those after it, float32 [64, 64] -> the same. totals: scratch [4, 64], free for others' use after the next `commit_smem`."""
    if interpret:
        return jnp.cumsum(x[::-1], axis=0)[::-1]

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType()), return_type=_MATRIX)
    def scan(_, x, totals):
        lane, warp, values = _lane(), _warp(), _times_ones(_values(x), later=True)
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, _i32(4))):
            _store_row(totals, warp, [eight[0] for eight in values])
        utils.warpgroup_barrier()
        for tile in range(1, 4):
            counts = arith.select(arith.cmpi(arith.CmpIPredicate.ult, warp, _i32(tile)), _f32(1.0), _f32(0.0))
            for eight, pair in enumerate(_row(totals, _i32(tile))):
                for one in range(2):
                    later = mulf(counts, _element(pair, one))
                    for half in range(2):
                        values[eight][half][one] = addf(values[eight][half][one], later)
        return _array(values, x)
    return scan(x, totals)


def sum_rows(arrays: Sequence[Array], totals: Any, outs: Sequence[Any], *, interpret: bool) -> None:
    """Sums over the rows of float32 arrays [64, 64], at most two -> outs [64] each; there when this returns. totals: scratch [8, 64], as for `suffix_sums`."""
    if interpret:
        for x, out in zip(arrays, outs):
            out[...] = jnp.sum(x, axis=0)
        return

    @plgpu.inline_mgpu(arg_types=((_WGMMA,) * len(arrays), plgpu.RefType(), (plgpu.RefType(),) * len(arrays)))
    def total(_, arrays, totals, outs):
        lane, thread, warp = _lane(), _thread(), _warp()
        sums = [[[_over_rows(addf(eight[0][one], eight[1][one])) for one in range(2)] for eight in _values(x)] for x in arrays]
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, _i32(4))):
            for i, x in enumerate(sums):
                _store_row(totals, arith.addi(warp, _i32(4 * i)), x)
        utils.warpgroup_barrier()
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, thread, _i32(CHUNK))):
            for i, out in enumerate(outs):
                parts = [llvm.load(ir.F32Type.get(), _pointer(totals, arith.addi(thread, _i32(CHUNK * (4 * i + j))))) for j in range(4)]
                llvm.store(addf(addf(*parts[:2]), addf(*parts[2:])), _pointer(out, thread))
        utils.warpgroup_barrier()
    total(tuple(arrays), totals, tuple(outs))


def _over_rows(x: ir.Value) -> ir.Value:
    """Sum over the eight threads of a warp that hold the same columns."""
    for distance in (4, 8, 16):
        x = addf(x, utils.shfl_bfly(x, distance))
    return x


def _store_row(ref: ir.Value, row: ir.Value, pairs: Sequence[Sequence[ir.Value]]) -> None:
    """This thread's pairs of columns to a row of a float32 [rows, 64] in shared memory."""
    at = arith.addi(arith.muli(row, _i32(CHUNK)), arith.muli(arith.andi(_lane(), _i32(3)), _i32(2)))
    for eight, pair in enumerate(pairs):
        llvm.store(_pair(*pair), _pointer(ref, arith.addi(at, _i32(8 * eight))))


def tile_factors(sums: Array, totals: Any, table: Any, *, interpret: bool) -> None:
    """The table [FACTORS, 64] of what lies between tiles, from the log decays' running sums in bits. totals: scratch [4, 64].

    One column for each two threads; whole when this returns.
    """
    if interpret:
        table[...] = jnp.stack(_factor_rows(list(sums[TILE - 1::TILE]), jnp.exp2, jnp.zeros(CHUNK)))
        return

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), plgpu.RefType()))
    def fill(_, sums, totals, table):
        lane, thread, warp, values = _lane(), _thread(), _warp(), _values(sums)
        with utils.when(arith.cmpi(arith.CmpIPredicate.uge, lane, _i32(28))):
            _store_row(totals, warp, [eight[1] for eight in values])
        utils.warpgroup_barrier()
        column = arith.andi(thread, _i32(CHUNK - 1))
        tiles = [llvm.load(ir.F32Type.get(), _pointer(totals, arith.addi(column, _i32(CHUNK * i)))) for i in range(4)]
        first = arith.cmpi(arith.CmpIPredicate.ult, thread, _i32(CHUNK))
        for mine, which in ((first, range(BETWEEN + 4)), (arith.xori(first, utils.c(1, first.type)), range(BETWEEN + 4, FACTORS))):
            with utils.when(mine):
                rows = _factor_rows([_Bits(t) for t in tiles], lambda x: x.exp2(), _Bits(_f32(0.0)), which)
                for i, row in zip(which, rows):
                    llvm.store(row.value, _pointer(table, arith.addi(column, _i32(CHUNK * i))))
        utils.warpgroup_barrier()
    fill(sums, totals, table)


class _Bits:
    """A float32 in a register, with the arithmetic of `_factor_rows`."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __add__(self, other):
        return _Bits(addf(self.value, other.value if isinstance(other, _Bits) else _f32(other)))

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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_MATRIX)
    def spread(_, table):
        return _rows_of(_row(table, arith.addi(_warp(), _i32(first))))
    return spread(table)


def _row(table: ir.Value, row: ir.Value) -> list[ir.Value]:
    """This thread's pairs of columns of a row of a float32 [rows, 64] in shared memory."""
    at = arith.addi(arith.muli(row, _i32(CHUNK)), arith.muli(arith.andi(_lane(), _i32(3)), _i32(2)))
    vec = ir.VectorType.get((2,), ir.F32Type.get())
    return [llvm.load(vec, _pointer(table, arith.addi(at, _i32(8 * eight)))) for eight in range(_EIGHTS)]


def _rows_of(pairs: Sequence[ir.Value]) -> FragmentedArray:
    """A register array with the same pair of columns in both of a thread's rows."""
    layout = _WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((CHUNK, CHUNK)), dtype=object)
    flat = registers.reshape(_EIGHTS, 2)
    for eight, pair in enumerate(pairs):
        flat[eight, 0] = flat[eight, 1] = pair
    return FragmentedArray(_registers=flat.reshape(registers.shape), _layout=layout, _is_signed=None)


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

    @plgpu.inline_mgpu(arg_types=(_WGMMA,) * 3 + (_TILED,) * 5 + (plgpu.RefType(),), return_type=(_MATRIX,) * 3)
    def add(_, dq, row, dk, dp, da, reads, erasers, writes, table):
        warp, results = _warp(), [_values(x) for x in (dq, row, dk)]
        for distance in range(4):
            def of_rows(distance=distance):
                """This warp's rows with the columns of the tile `distance` before."""
                tile = arith.subi(warp, _i32(distance))
                lefts = [_fragments(x, warp, tile, turned=False) for x in (dp, da)]

                def products(column, start):
                    rights = _shared_operand(writes, tile, column)
                    return [[_mma(start(i, 2 * column + j), left, right) for j, right in enumerate(rights)] for i, left in enumerate(lefts)]
                return products, tile

            def of_columns(distance=distance):
                """This warp's columns with the rows of the tile `distance` after."""
                tile = arith.addi(warp, _i32(distance))
                lefts = [[x[i] for i in (0, 2, 1, 3)] for x in (_fragments(x, tile, warp, turned=True) for x in (dp, da))]

                def products(column, start):
                    rights = zip(*(_shared_operand(ref, tile, column) for ref in (reads, erasers)))
                    return [[_mma(_mma(start(0, 2 * column + j), lefts[0], a), lefts[1], b) for j, (a, b) in enumerate(rights)]]
                return products, warp

            there = (arith.cmpi(arith.CmpIPredicate.uge, warp, _i32(distance)), arith.cmpi(arith.CmpIPredicate.ult, warp, _i32(4 - distance)))
            results[:2] = _add_where(there[0], of_rows, results[:2], table, distance)
            results[2:] = _add_where(there[1], of_columns, results[2:], table, distance)
        return tuple(_array(x, dq) for x in results)
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
    factors = _row(table, arith.addi(tile, _i32(BETWEEN + 4 * distance))) if distance else None
    start = lambda i, eight: [_f32(0.0)] * 4 if distance else [one for half in sums[i][eight] for one in half]
    results = [[] for _ in sums]
    for column in range(CHUNK // TILE):
        for i, pair in enumerate(products(column, start)):
            for eight, term in zip((2 * column, 2 * column + 1), pair):
                if distance:
                    term = [addf(sums[i][eight][j // 2][j % 2], mulf(term[j], _element(factors[eight], j % 2))) for j in range(4)]
                results[i] += term
    return [one for x in results for one in x]


def _unflatten(flat: list[ir.Value], count: int) -> list:
    each = iter(flat)
    return [[[[next(each) for _ in range(2)] for _ in range(2)] for _ in range(_EIGHTS)] for _ in range(count)]


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

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=_MATRIX)
    def invert(_, a):
        warp, values = _warp(), _values(a)
        is_warp = [arith.cmpi(arith.CmpIPredicate.eq, warp, _i32(w)) for w in range(4)]
        pick = lambda options: _first(is_warp, options)
        tile = [[[pick([values[2 * w + eight][half][one] for w in range(4)]) for one in range(2)] for half in range(2)] for eight in range(2)]
        row, column = _positions()
        d = _tile_inverse(tile, row, column)
        left = [[[arith.select(arith.cmpi(arith.CmpIPredicate.ugt, warp, _i32(eight // 2)), x, _f32(0.0)) for x in half] for half in values[eight]]
                for eight in range(6)]
        n = _multiply(_left_operand(d), [_right_operand(left)])
        return _array([*n, *d], a)
    return invert(a)


def merge_blocks(nd: Array, high: Any, low: Any, *, interpret: bool) -> Array:
    """(I + a)^-1 [64, 64] from `block_inverses`, in registers and, as two bfloat16 parts, in the shared memory tiles high and low.

    (I - N + N^2 - N^3) D, N nilpotent of order 4 in blocks: each warp forms its own 16 rows, and reads those of others from shared memory.
    """
    if interpret:
        return _merge_values(nd, high[...].astype(jnp.float32) + low[...].astype(jnp.float32))

    @plgpu.inline_mgpu(arg_types=(_WGMMA, _TILED, _TILED), return_type=_MATRIX)
    def merge(_, nd, high, low):
        warp, values = _warp(), _values(nd)
        n, d = values[:6], values[6:]
        shared = lambda tile, column: [_shared_operand(ref, tile, column) for ref in (high, low)]
        first = _left_operand(n)
        # Tile j of N times the rows of tile j: column tile 0 of 1 and 2, column tile 1 of 2.
        of_10, of_20, of_21 = (shared(tile, column) for tile, column in ((1, 0), (2, 0), (2, 1)))
        squares = [*_multiply([first[1], first[2]], [of_10, of_20]), *_multiply([first[2]], [of_21])]
        cube = _multiply([_left_operand(squares)[1]], [of_10])
        series = [[[arith.negf(x) for x in half] for half in eight] for eight in n]
        for sign, terms in ((addf, squares), (subf, cube)):
            for i, eight in enumerate(terms):
                series[i] = [[sign(series[i][h][e], eight[h][e]) for e in range(2)] for h in range(2)]
        outside = [x for k, operand in enumerate(_left_operand(series)) for x in _multiply([operand], [shared(k, 3)])]
        zero, result = _f32(0.0), []
        for eight in range(_EIGHTS):
            left_of = arith.cmpi(arith.CmpIPredicate.ugt, warp, _i32(eight // 2))
            here = arith.cmpi(arith.CmpIPredicate.eq, warp, _i32(eight // 2))
            result.append([[arith.select(here, d[eight % 2][h][e], arith.select(left_of, outside[eight][h][e], zero) if eight < 6 else zero)
                            for e in range(2)] for h in range(2)])
        return _array(result, nd)
    return merge(nd, high, low)


def _positions() -> tuple[list[ir.Value], list[list[ir.Value]]]:
    """Rows [half] and columns [eight][one] of this thread inside a tile."""
    lane = _lane()
    row, column = arith.shrui(lane, _i32(2)), arith.muli(arith.andi(lane, _i32(3)), _i32(2))
    return ([row, arith.addi(row, _i32(8))], [[arith.addi(column, _i32(8 * eight + one)) for one in range(2)] for eight in range(2)])


def _tile_inverse(a, row, column):
    """(I + a)^-1 of a strictly lower triangular tile, values [2][2][2]."""
    def corner(bits, h, eight, one):
        """Whether this position is in the lower left corner of two neighbouring blocks of 2^bits."""
        r, c = row[h], column[eight][one]
        neighbours = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(r, _i32(bits)), arith.addi(arith.shrui(c, _i32(bits)), _i32(1)))
        together = arith.cmpi(arith.CmpIPredicate.eq, arith.shrui(r, _i32(bits + 1)), arith.shrui(c, _i32(bits + 1)))
        return arith.andi(neighbours, together)

    each = lambda f: [[[f(eight, h, one) for one in range(2)] for h in range(2)] for eight in range(2)]
    corners = lambda bits: each(lambda eight, h, one: arith.select(corner(bits, h, eight, one), a[eight][h][one], _f32(0.0)))
    unit = lambda eight, h, one: arith.select(arith.cmpi(arith.CmpIPredicate.eq, row[h], column[eight][one]), _f32(1.0), _f32(0.0))
    pairs = corners(0)
    t = each(lambda eight, h, one: subf(unit(eight, h, one), pairs[eight][h][one]))
    for bits in (1, 2, 3):
        left = _multiply(_left_operand(t), [_right_operand(corners(bits))])
        change = _multiply(_left_operand(left), [_right_operand(t)])
        t = each(lambda eight, h, one: subf(t[eight][h][one], change[eight][h][one]))
    return t


def _parts(first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two float32 as a pair of bfloat16 and a pair of what those leave; the first is cut off, not rounded."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    bits = [arith.bitcast(i32, x) for x in (first, second)]
    high = utils.inline_ptx("prmt.b32 $0, $1, $2, 0x7632;", *bits, result_types=i32)
    rest = [subf(x, arith.bitcast(f32, arith.andi(b, _i32(-65536)))) for x, b in zip((first, second), bits)]
    return high, utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", rest[1], rest[0], result_types=i32)


def _packed(x):
    """Values [eights][2][2] -> [part][eight][half]: pairs of columns as bfloat16, high and low parts."""
    pairs = [[_parts(*half) for half in eight] for eight in x]
    return [[[half[part] for half in eight] for eight in pairs] for part in range(2)]


def _left_operand(x):
    """Values of 16 rows -> for each 16 columns the two parts' four registers of a left operand."""
    packed = _packed(x)
    return [[[packed[part][k][0], packed[part][k][1], packed[part][k + 1][0], packed[part][k + 1][1]] for part in range(2)]
            for k in range(0, len(x), 2)]


def _right_operand(x):
    """Values of 16 rows -> [part][eight columns] -> the two registers of a right operand."""
    turn = lambda register: utils.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", register,
                                             result_types=ir.IntegerType.get_signless(32), convergent=True)
    return [[[turn(half) for half in eight] for eight in part] for part in _packed(x)]


def _fragments(ref: ir.Value, tile: Any, column: Any, *, turned: bool) -> tuple[ir.Value, ...]:
    """Rows of `tile`, columns of tile `column` of a swizzled bfloat16 [64, 64] in four registers: blocks of 8 x 8 down the rows first, each transposed if
    `turned`. As they are: a left operand; turned: (0, 1), (2, 3) right operands for eight columns each, (0, 2, 1, 3) the transpose as a left operand."""
    i32 = ir.IntegerType.get_signless(32)
    lane = _lane()
    tile, column = (_i32(x) if isinstance(x, int) else x for x in (tile, column))
    row = arith.addi(arith.andi(lane, _i32(15)), arith.muli(tile, _i32(TILE)))
    piece = arith.xori(arith.addi(arith.shrui(lane, _i32(4)), arith.muli(column, _i32(2))), arith.andi(lane, _i32(7)))
    address = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(ref)), arith.addi(arith.muli(row, _i32(128)), arith.muli(piece, _i32(16))))
    ptx = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if turned else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return utils.inline_ptx(ptx, address, result_types=(i32,) * 4, has_side_effects=True, convergent=True)


def _shared_operand(ref: ir.Value, tile: Any, column: Any) -> list[tuple[ir.Value, ...]]:
    """For each eight of the 16 columns the two registers of a right operand."""
    r = _fragments(ref, tile, column, turned=True)
    return [r[:2], r[2:]]


def _multiply(left, right):
    """Sum over k of left[k] [16, 16] times right[k] [16, 8 n], as values [n][2][2]; without the product of the low parts."""
    result = []
    for eight in range(len(right[0][0])):
        sums = [_f32(0.0)] * 4
        for of_left, of_right in zip(left, right):
            for i, j in ((0, 1), (1, 0), (0, 0)):
                sums = _mma(sums, of_left[i], of_right[j][eight])
        result.append([[sums[0], sums[1]], [sums[2], sums[3]]])
    return result


def _mma(sums: Sequence[ir.Value], left: Sequence[ir.Value], right: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """sums + left [16, 16] times right [16, 8], bfloat16 operands."""
    ptx = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return utils.inline_ptx(ptx, *left, *right, *sums, result_types=(ir.F32Type.get(),) * 4, convergent=True)


def _first(conditions, options):
    """The option whose condition holds; the last where no other's does."""
    result = options[-1]
    for condition, option in zip(conditions[:-1], options[:-1]):
        result = arith.select(condition, option, result)
    return result


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
