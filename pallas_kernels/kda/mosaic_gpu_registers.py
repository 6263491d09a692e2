"""Words for what a thread holds and does, for the parts of KDA's Hopper kernels that are written for threads: see `mosaic_gpu_lanes.py`.

A register array is [64, 64] float32 in the layout of the tensor cores' results. Thread t of warp w of a warpgroup holds rows 16 w + t / 4 and
16 w + t / 4 + 8 and, of every eight columns, 2 (t % 4) and the next: values[eight][half][one].
"""
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.mosaic.gpu.fragmented_array import subf
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.kda.chunk import CHUNK, TILE

WGMMA = plgpu.Layout.WGMMA
MATRIX = plgpu.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32, layout=WGMMA)
"""Register array, as a function of threads returns it."""
TILED = plgpu.RefType((plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
"""bfloat16 [64, 64] in shared memory, as the tensor cores and the copy engine want it."""
EIGHTS = CHUNK // 8


def int32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def float32(value: float) -> ir.Value:
    return utils.c(value, ir.F32Type.get())


def lane_index() -> ir.Value:
    """Index of this thread in its warp. Read anew each time: what depends on it would else be computed ahead of a loop and fill registers."""
    return utils.inline_ptx("mov.u32 $0, %laneid;", result_types=ir.IntegerType.get_signless(32), has_side_effects=True)


def warp_index() -> ir.Value:
    """Index of this warp in its warpgroup, uniform in the compiler's eyes. All lanes take part: never inside a branch of some of them."""
    return arith.andi(utils.warp_idx(sync=True), int32(3))


def thread_index() -> ir.Value:
    """Index of this thread in its warpgroup. All lanes take part."""
    return arith.addi(arith.muli(warp_index(), int32(32)), lane_index())


def values_of(x: FragmentedArray) -> list[list[list[ir.Value]]]:
    """values[eight][half][one]: column 8 eight + 2 (lane % 4) + one, row lane / 4 + 8 half of the tile."""
    registers = x.registers.reshape(EIGHTS, 2)
    return [[[element(registers[eight, half], one) for one in range(2)] for half in range(2)] for eight in range(EIGHTS)]


def element(pair: ir.Value, one: int) -> ir.Value:
    return vector.extract(pair, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([one]))


def array_of(values: Sequence[Sequence[Sequence[ir.Value]]], like: FragmentedArray) -> FragmentedArray:
    registers = like.registers.copy()
    flat = registers.reshape(EIGHTS, 2)
    for eight in range(EIGHTS):
        for half in range(2):
            flat[eight, half] = pair_of(*values[eight][half])
    return FragmentedArray(_registers=flat.reshape(like.registers.shape), _layout=like.layout, _is_signed=None)


def pair_of(first: ir.Value, second: ir.Value) -> ir.Value:
    both = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
    return llvm.insertelement(llvm.insertelement(both, first, position=int32(0)), second, position=int32(1))


def pointer(ref: ir.Value, offset: ir.Value) -> ir.Value:
    """Address of the float32 with index `offset` in shared memory without transforms."""
    return utils.getelementptr(utils.memref_ptr(ref), [offset], ir.F32Type.get())


def load_row(table: ir.Value, row: ir.Value) -> list[ir.Value]:
    """This thread's pairs of columns of a row of a float32 [rows, 64] in shared memory."""
    at = arith.addi(arith.muli(row, int32(CHUNK)), arith.muli(arith.andi(lane_index(), int32(3)), int32(2)))
    vec = ir.VectorType.get((2,), ir.F32Type.get())
    return [llvm.load(vec, pointer(table, arith.addi(at, int32(8 * eight)))) for eight in range(EIGHTS)]


def store_row(ref: ir.Value, row: ir.Value, pairs: Sequence[Sequence[ir.Value]]) -> None:
    """This thread's pairs of columns to a row of a float32 [rows, 64] in shared memory."""
    at = arith.addi(arith.muli(row, int32(CHUNK)), arith.muli(arith.andi(lane_index(), int32(3)), int32(2)))
    for eight, pair in enumerate(pairs):
        llvm.store(pair_of(*pair), pointer(ref, arith.addi(at, int32(8 * eight))))


def same_in_rows(pairs: Sequence[ir.Value]) -> FragmentedArray:
    """A register array with the same pair of columns in both of a thread's rows."""
    layout = WGMMA.to_mgpu()
    registers = np.empty(layout.registers_shape((CHUNK, CHUNK)), dtype=object)
    flat = registers.reshape(EIGHTS, 2)
    for eight, pair in enumerate(pairs):
        flat[eight, 0] = flat[eight, 1] = pair
    return FragmentedArray(_registers=flat.reshape(registers.shape), _layout=layout, _is_signed=None)


# ---------------------------------------------------------------- products of one warp


def positions() -> tuple[list[ir.Value], list[list[ir.Value]]]:
    """Rows [half] and columns [eight][one] of this thread inside a tile."""
    lane = lane_index()
    row, column = arith.shrui(lane, int32(2)), arith.muli(arith.andi(lane, int32(3)), int32(2))
    return ([row, arith.addi(row, int32(8))], [[arith.addi(column, int32(8 * eight + one)) for one in range(2)] for eight in range(2)])


def two_parts(first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two float32 as a pair of bfloat16 and a pair of what those leave; the first is cut off, not rounded."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    bits = [arith.bitcast(i32, x) for x in (first, second)]
    high = utils.inline_ptx("prmt.b32 $0, $1, $2, 0x7632;", *bits, result_types=i32)
    rest = [subf(x, arith.bitcast(f32, arith.andi(b, int32(-65536)))) for x, b in zip((first, second), bits)]
    return high, rounded_pair(*rest)


def rounded_pair(first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 as a pair of bfloat16, rounded."""
    return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", second, first, result_types=ir.IntegerType.get_signless(32))


def packed_parts(x):
    """Values [eights][2][2] -> [part][eight][half]: pairs of columns as bfloat16, high and low parts."""
    pairs = [[two_parts(*half) for half in eight] for eight in x]
    return [[[half[part] for half in eight] for eight in pairs] for part in range(2)]


def left_operand(x):
    """Values of 16 rows -> for each 16 columns the two parts' four registers of a left operand."""
    packed = packed_parts(x)
    return [[[packed[part][k][0], packed[part][k][1], packed[part][k + 1][0], packed[part][k + 1][1]] for part in range(2)]
            for k in range(0, len(x), 2)]


def right_operand(x):
    """Values of 16 rows -> [part][eight columns] -> the two registers of a right operand."""
    turn = lambda register: utils.inline_ptx("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", register,
                                             result_types=ir.IntegerType.get_signless(32), convergent=True)
    return [[[turn(half) for half in eight] for eight in part] for part in packed_parts(x)]


def fragments(ref: ir.Value, tile: Any, column: Any, *, turned: bool) -> tuple[ir.Value, ...]:
    """Rows of `tile`, columns of tile `column` of a swizzled bfloat16 [64, 64] in four registers: blocks of 8 x 8 down the rows first, each transposed if
    `turned`. As they are: a left operand; turned: (0, 1), (2, 3) right operands for eight columns each, (0, 2, 1, 3) the transpose as a left operand."""
    i32 = ir.IntegerType.get_signless(32)
    lane = lane_index()
    tile, column = (int32(x) if isinstance(x, int) else x for x in (tile, column))
    row = arith.addi(arith.andi(lane, int32(15)), arith.muli(tile, int32(TILE)))
    piece = arith.xori(arith.addi(arith.shrui(lane, int32(4)), arith.muli(column, int32(2))), arith.andi(lane, int32(7)))
    address = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(ref)), arith.addi(arith.muli(row, int32(128)), arith.muli(piece, int32(16))))
    ptx = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if turned else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return utils.inline_ptx(ptx, address, result_types=(i32,) * 4, has_side_effects=True, convergent=True)


def shared_operand(ref: ir.Value, tile: Any, column: Any) -> list[tuple[ir.Value, ...]]:
    """For each eight of the 16 columns the two registers of a right operand."""
    r = fragments(ref, tile, column, turned=True)
    return [r[:2], r[2:]]


def multiply(left, right):
    """Sum over k of left[k] [16, 16] times right[k] [16, 8 n], as values [n][2][2]; without the product of the low parts."""
    result = []
    for eight in range(len(right[0][0])):
        sums = [float32(0.0)] * 4
        for of_left, of_right in zip(left, right):
            for i, j in ((0, 1), (1, 0), (0, 0)):
                sums = mma(sums, of_left[i], of_right[j][eight])
        result.append([[sums[0], sums[1]], [sums[2], sums[3]]])
    return result


def mma(sums: Sequence[ir.Value], left: Sequence[ir.Value], right: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """sums + left [16, 16] times right [16, 8], bfloat16 operands."""
    ptx = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return utils.inline_ptx(ptx, *left, *right, *sums, result_types=(ir.F32Type.get(),) * 4, convergent=True)


def first_of(conditions, options):
    """The option whose condition holds; the last where no other's does."""
    result = options[-1]
    for condition, option in zip(conditions[:-1], options[:-1]):
        result = arith.select(condition, option, result)
    return result
