# SPDX-License-Identifier: Apache-2.0
"""A small matrix product out of the KV cache, written in LLVM's vector types for numba.

Runs in the worker. Imports numba and numpy only. LLVM does not find this register tile by itself: rows of
accumulators that stay in registers while one row of ``b`` after the other is widened and multiplied in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from h2o_vllm.kernels.cpu._numba_vec import jit

__all__ = ["multiply_rows"]

COLUMNS = 16
"""Columns of one vector; LLVM maps 16 floats to the registers the CPU has."""

_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
_VECTORS = 2 if _WIDE else 1  # of a register tile
_EIGHT = 8 if _WIDE else 1 << 30  # eight rows of two vectors need 32 vector registers

_FLOATS = ir.VectorType(ir.FloatType(), COLUMNS)
_INTS = ir.VectorType(ir.IntType(32), COLUMNS)
_SHORTS = ir.VectorType(ir.IntType(16), COLUMNS)
_HALVES = ir.VectorType(ir.HalfType(), COLUMNS)
_FUSE = ("contract",)


class _Matrix(NamedTuple):
    """A flat array read as rows: the element type, its data, the first element, the distance of rows."""

    word: Any
    data: Any
    at: Any
    row: Any

    def address(self, builder: Any, row: Any, column: Any) -> Any:
        first = builder.add(self.at, builder.mul(row, self.row))
        return builder.gep(self.data, [builder.add(first, column)])

    def load(self, builder: Any, row: Any, column: Any) -> Any:
        """16 elements as float32; uint16 holds bfloat16, int16 float16."""
        where = self.address(builder, row, column)
        if self.word == types.float32:
            return builder.load(builder.bitcast(where, _FLOATS.as_pointer()), align=4)
        words = builder.load(builder.bitcast(where, _SHORTS.as_pointer()), align=2)
        if self.word == types.uint16:
            shift = ir.Constant(_INTS, [16] * COLUMNS)
            return builder.bitcast(builder.shl(builder.zext(words, _INTS), shift), _FLOATS)
        return builder.fpext(builder.bitcast(words, _HALVES), _FLOATS)

    def splat(self, builder: Any, row: Any, column: Any) -> Any:
        """One float32 element, 16 times."""
        none = ir.Constant(_FLOATS, ir.Undefined)
        element = builder.load(self.address(builder, row, column))
        single = builder.insert_element(none, element, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(single, none, ir.Constant(_INTS, [0] * COLUMNS))


def _long(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


def _make_tile(rows: int, vectors: int) -> Any:
    """``c[m, :] += a[m, :steps] @ b[:steps, :]`` for ``rows`` rows and ``16 * vectors`` columns."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def matrix(i: int) -> _Matrix:
            kind = signature.args[i]
            data = context.make_array(kind)(context, builder, arguments[i]).data
            return _Matrix(kind.dtype, data, arguments[i + 1], arguments[i + 2])

        a, b, c, steps = matrix(0), matrix(3), matrix(6), arguments[9]
        tile = [(m, v) for m in range(rows) for v in range(vectors)]
        # Stack slots that LLVM turns into registers: every index below is a constant.
        sums = {cell: cgutils.alloca_once(builder, _FLOATS) for cell in tile}
        for m, v in tile:
            builder.store(c.load(builder, _long(m), _long(v * COLUMNS)), sums[m, v])
        with cgutils.for_range(builder, steps) as loop:
            columns = [b.load(builder, loop.index, _long(v * COLUMNS)) for v in range(vectors)]
            factors = [a.splat(builder, _long(m), loop.index) for m in range(rows)]
            for m, v in tile:
                product = builder.fmul(factors[m], columns[v], flags=_FUSE)
                total = builder.fadd(builder.load(sums[m, v]), product, flags=_FUSE)
                builder.store(total, sums[m, v])
        for m, v in tile:
            where = c.address(builder, _long(m), _long(v * COLUMNS))
            where = builder.bitcast(where, _FLOATS.as_pointer())
            builder.store(builder.load(sums[m, v]), where, align=4)
        return context.get_dummy_value()

    @intrinsic
    def multiply(context, a, a_at, a_row, b, b_at, b_row, c, c_at, c_row, steps):  # type: ignore[no-untyped-def]
        where = (types.int64, types.int64)
        return types.void(a, *where, b, *where, c, *where, types.int64), code

    return multiply


_tile_8w, _tile_8 = _make_tile(8, _VECTORS), _make_tile(8, 1)
_tile_4w, _tile_4 = _make_tile(4, _VECTORS), _make_tile(4, 1)
_tile_2w, _tile_2 = _make_tile(2, _VECTORS), _make_tile(2, 1)
_tile_1w, _tile_1 = _make_tile(1, _VECTORS), _make_tile(1, 1)


@jit
def multiply_rows(a, a_at, a_row, b, b_at, b_row, c, c_at, c_row, steps, rows, columns):  # type: ignore[no-untyped-def]
    """``c[m, :columns] += a[m, :steps] @ b[:steps, :columns]`` for m < rows.

    Each matrix is a flat array, the index of its first element and the distance of its rows. ``a`` and
    ``c`` are float32; ``columns`` is a multiple of 16.
    """
    for x in range(0, columns, COLUMNS * _VECTORS):
        whole = x + COLUMNS * _VECTORS <= columns
        m = 0
        while m < rows:
            left, af, bf, cf = rows - m, a_at + m * a_row, b_at + x, c_at + m * c_row + x
            if whole:
                if left >= _EIGHT:
                    _tile_8w(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
                elif left >= 4:
                    _tile_4w(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
                elif left >= 2:
                    _tile_2w(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
                else:
                    _tile_1w(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
            elif left >= _EIGHT:
                _tile_8(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
            elif left >= 4:
                _tile_4(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
            elif left >= 2:
                _tile_2(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
            else:
                _tile_1(a, af, a_row, b, bf, b_row, c, cf, c_row, steps)
            m += 8 if left >= _EIGHT else 4 if left >= 4 else 2 if left >= 2 else 1
