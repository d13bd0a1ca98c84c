// SPDX-License-Identifier: Apache-2.0
// The rows of few queries by matrices (amx.hpp): decode steps, and the queries that verify drafts, where memory
// should be all there is to wait for. AVX512-BF16 multiplies too slowly for that on the CPUs that have AMX.
//
// A block's words are paired in L1 while the block before it is multiplied. Of up to 8 rows probabilities are two
// bfloat16 each, the leading parts in rows 0 to 7 and the remainders in rows 8 to 15 of one matrix, so exactness
// costs nothing. Of more rows they are rounded, as those of a prompt are.
#pragma once
#include "tile.hpp"

#ifdef H2O_AMX
namespace h2o {

class FewRows {
 public:
  static constexpr int HALF = amx::SIDE / 2;  // query rows whose probabilities fit one matrix
  static constexpr int MOST = 2 * amx::SIDE;  // query rows

  static bool fit(int block, int size, int rows) {
    return block % amx::DEPTH == 0 && size % amx::DEPTH == 0 && rows <= MOST;
  }

  // Words between rows of probabilities, which then do not share cache sets.
  static int64_t padded(int64_t span) { return span + amx::DEPTH; }
  // Rows that are read of queries and of probabilities, where `rows` count.
  static int padded_rows(int rows) { return rows <= SIDE ? SIDE : 2 * SIDE; }

  const Tile<Amx>& tile;

  // out[m][t] = q[m] . k[t] for all blocks of the tile;  q: [padded_rows, D], of which the first tile.rows count.
  // scored: whether probabilities() will want the scores.
  void logits(const uint16_t* q, float* out, bool scored) const {
    if (tile.rows <= SIDE) logits<1>(q, out, scored);
    else logits<2>(q, out, scored);
  }

  // Of exponentials e: to prob, [padded_rows, padded(span)] words, what they are times by[m] (null: 1); their column
  // sums are added to the scores, if these are wanted.
  void probabilities(const float* e, const float* by, uint16_t* prob, bool scored) const {
    const int64_t span = tile.span, words = padded(span);
    const int whole = (tile.length() + W - 1) / W * W, block = tile.layer.block;
    for (int i = 0; i < span; i += W) {
      vf column = {};
      for (int m = 0; m < tile.rows; ++m) {
        const vf x = i < whole ? load(e + m * span + i) * (by ? by[m] : 1.f) : (vf){};
        const vf rest = Amx::put_leading(prob + m * words + i, x);
        if (tile.rows <= HALF) Amx::put_leading(prob + (HALF + m) * words + i, rest);
        column += x;
      }
      if (!scored || i >= whole) continue;
      // Zero is added to what lies behind the last token of a vector.
      float* to = tile.score_page(i / block) + i % block;
      store(to, load(to) + column);
    }
  }

  // out [M, D] += prob . V, columns in the order of column().
  void values(const uint16_t* prob, float* out) const {
    const int size = tile.layer.size;
    int d = 0;
    if (tile.rows <= SIDE)
      for (; d + 4 * SIDE <= size; d += 4 * SIDE) columns<4, 1>(prob, d, out);
    for (; d < size; d += 2 * SIDE) tile.rows <= SIDE ? columns<2, 1>(prob, d, out) : columns<2, 2>(prob, d, out);
  }

 private:
  static constexpr int SIDE = amx::SIDE;
  static constexpr int CHUNK = amx::DEPTH;  // tokens of a matrix
  static constexpr int FETCH = 4;           // blocks that are fetched before they are needed

  // For M x 16 rows.
  template <int M>
  void logits(const uint16_t* q, float* out, bool scored) const {
    const int block = tile.layer.block, size = tile.layer.size, chunks = block / CHUNK;
    const int count = (tile.length() + CHUNK - 1) / CHUNK;
    auto pack = [&](int c) {
      const bf16* from = tile.page(c / chunks) + c % chunks * CHUNK;
      const bf16* next = ahead(c / chunks, 0) + c % chunks * CHUNK;
      uint32_t* to = space(c, size);
      if (scored)
        for (int i = 0; i < CHUNK; i += W) __builtin_prefetch(tile.score_page(c / chunks) + c % chunks * CHUNK + i, 1);
      for (int d = 0; d < size; d += 2) {
        pair(from + int64_t(d) * block, from + int64_t(d + 1) * block, to + d * SIDE);
        fetch(next + int64_t(d) * block);
        fetch(next + int64_t(d + 1) * block);
      }
    };
    float sums[M * SIDE][2 * SIDE];
    pack(0);
    for (int c = 0; c < count; ++c) {
      if (c + 1 < count) pack(c + 1);
      const uint32_t* k = space(c, size);
      amx::zero<0>(), amx::zero<1>();
      if (M == 2) amx::zero<2>(), amx::zero<3>();
      for (int d = 0; d < size; d += amx::DEPTH) {
        amx::load<4>(q + d, 2 * size);
        amx::load<6>(k + d * SIDE, 8 * SIDE);
        amx::load<7>(k + d * SIDE + SIDE, 8 * SIDE);
        amx::multiply<0, 4, 6>();
        amx::multiply<1, 4, 7>();
        if (M == 1) continue;
        amx::load<5>(q + int64_t(SIDE) * size + d, 2 * size);
        amx::multiply<2, 5, 6>();
        amx::multiply<3, 5, 7>();
      }
      amx::save<0>(sums[0], sizeof sums[0]);
      amx::save<1>(sums[0] + SIDE, sizeof sums[0]);
      if (M == 2) {
        float* more = sums[(M - 1) * SIDE];
        amx::save<2>(more, sizeof sums[0]), amx::save<3>(more + SIDE, sizeof sums[0]);
      }
      for (int m = 0; m < tile.rows; ++m)
        Amx::store_in_order(out + m * tile.span + c * CHUNK, _mm512_loadu_si512(sums[m]), _mm512_loadu_si512(sums[m] + SIDE));
    }
  }

  // Two places by turns, so that no load waits for what has just been written.
  static uint32_t* space(int c, int size) {
    static thread_local Scratch memory;
    const int64_t words = int64_t(size) * SIDE;  // of one place: CHUNK x size bfloat16
    return (uint32_t*)memory.get(2 * words) + c % 2 * words;
  }

  // Into L2, from where these CPUs fetch a run of lines by themselves.
  static H2O_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

  static H2O_INLINE void pair(const bf16* row0, const bf16* row1, uint32_t* to) {
    __m512i pairs[2];
    Amx::interleave<2>(row0, row1, pairs);
    _mm512_storeu_si512(to, pairs[0]);
    _mm512_storeu_si512(to + SIDE, pairs[1]);
  }

  // What to fetch while block b is multiplied; behind the last K comes the first V.
  const bf16* ahead(int b, int64_t offset) const {
    const int block = tile.layer.block, blocks = (tile.length() + block - 1) / block, next = b + FETCH;
    if (next < blocks) return tile.page(next) + offset;
    return tile.value_page(std::min(next - blocks, blocks - 1));
  }

  // Columns [d, d + 16 N) of M x 16 rows of the output;  N M <= 4.
  template <int N, int M>
  void columns(const uint16_t* prob, int d, float* out) const {
    const int block = tile.layer.block, size = tile.layer.size, length = tile.length(), chunks = block / CHUNK;
    const int count = (length + CHUNK - 1) / CHUNK;
    auto pack = [&](int c) {
      const int64_t at = int64_t(c % chunks) * CHUNK * size + d;
      const bf16 *from = tile.value_page(c / chunks) + at, *next = tile.behind_value(c / chunks, FETCH);
      if (next) next += at;
      uint32_t* to = space(c, size);
      const int here = std::min(CHUNK, length - c * CHUNK);
      for (int t = 0; t < CHUNK; t += 2, to += N * SIDE)
        for (int i = 0; i < N; i += 2) {
          if (next) fetch(next + int64_t(t) * size + i * SIDE), fetch(next + int64_t(t + 1) * size + i * SIDE);
          const bf16 *row0 = from + int64_t(t) * size + i * SIDE, *row1 = row0 + size;
          if (t + 1 < here) {
            pair(row0, row1, to + i * SIDE);
            continue;
          }
          // Behind the last token there may be NaN.
          __m512i pairs[2] = {};
          if (t < here) Amx::interleave<2>(row0, nullptr, pairs);
          _mm512_storeu_si512(to + i * SIDE, pairs[0]);
          _mm512_storeu_si512(to + (i + 1) * SIDE, pairs[1]);
        }
    };
    const int64_t words = padded(tile.span);
    amx::zero<0>(), amx::zero<1>();
    if (N * M == 4) amx::zero<2>(), amx::zero<3>();
    pack(0);
    for (int c = 0; c < count; ++c) {
      if (c + 1 < count) pack(c + 1);
      const uint32_t* v = space(c, size);
      const uint16_t* p = prob + int64_t(c) * CHUNK;
      auto load_columns = [&](int i) {
        amx::load<6>(v + i * SIDE, 4 * N * SIDE);
        amx::load<7>(v + (i + 1) * SIDE, 4 * N * SIDE);
      };
      load_columns(0);
      amx::load<4>(p, 2 * words);
      amx::multiply<0, 4, 6>();
      amx::multiply<1, 4, 7>();
      if (N * M == 2) continue;
      if (N == 4) load_columns(2);
      if (M == 2) amx::load<4>(p + SIDE * words, 2 * words);
      amx::multiply<2, 4, 6>();
      amx::multiply<3, 4, 7>();
    }
    float sums[N * M][SIDE][SIDE];
    amx::save<0>(sums[0], sizeof sums[0][0]);
    amx::save<1>(sums[1], sizeof sums[0][0]);
    if (N * M == 4) amx::save<2>(sums[N * M - 2], sizeof sums[0][0]), amx::save<3>(sums[N * M - 1], sizeof sums[0][0]);
    for (int m = 0; m < tile.rows; ++m)
      for (int i = 0; i < N; ++i) {
        const auto& found = sums[m / SIDE * 2 + i];  // of two matrices of rows each has two columns
        float* to = out + int64_t(m) * size + d + i * SIDE;
        vf sum = load(to) + load(found[m % SIDE]);
        if (tile.rows <= HALF) sum += load(found[HALF + m]);
        store(to, sum);
      }
  }
};

}  // namespace h2o
#endif
