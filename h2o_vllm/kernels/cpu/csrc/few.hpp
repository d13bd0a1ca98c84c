// SPDX-License-Identifier: Apache-2.0
// One query's rows by matrices (amx.hpp): decode steps, where memory should be all there is to wait for.
// AVX512-BF16 multiplies too slowly for that on the CPUs that have AMX.
//
// A block's words are paired in L1 while the block before it is multiplied. Probabilities are two bfloat16 each,
// the leading parts in rows 0 to 7 and the remainders in rows 8 to 15 of one matrix, so exactness costs nothing.
#pragma once
#include "tile.hpp"

#ifdef H2O_AMX
namespace h2o {

class FewRows {
 public:
  static constexpr int MOST = amx::SIDE / 2;  // query rows
  static constexpr int ROWS = amx::SIDE;      // rows that are read of what is multiplied

  static bool fit(int block, int size, int group) {
    return block % amx::DEPTH == 0 && size % amx::DEPTH == 0 && group <= MOST;
  }

  // Words between rows of probabilities, which then do not share cache sets.
  static int64_t padded(int64_t span) { return span + amx::DEPTH; }

  const Tile<Amx>& tile;

  // out[m][t] = q[m] . k[t] for all blocks of the tile;  q: [ROWS, D], of which the first tile.rows count.
  // scored: whether probabilities() will want the scores.
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
    float sums[ROWS][2 * SIDE];
    pack(0);
    for (int c = 0; c < count; ++c) {
      if (c + 1 < count) pack(c + 1);
      const uint32_t* k = space(c, size);
      amx::zero<0>(), amx::zero<1>();
      for (int d = 0; d < size; d += amx::DEPTH) {
        amx::load<4>(q + d, 2 * size);
        amx::load<6>(k + d * SIDE, 8 * SIDE);
        amx::load<7>(k + d * SIDE + SIDE, 8 * SIDE);
        amx::multiply<0, 4, 6>();
        amx::multiply<1, 4, 7>();
      }
      amx::save<0>(sums[0], sizeof sums[0]);
      amx::save<1>(sums[0] + SIDE, sizeof sums[0]);
      for (int m = 0; m < tile.rows; ++m)
        Amx::store_in_order(out + m * tile.span + c * CHUNK, _mm512_loadu_si512(sums[m]), _mm512_loadu_si512(sums[m] + SIDE));
    }
  }

  // Of exponentials e: to prob, [ROWS, padded(span)] words, what they are times by[m]; their column sums are
  // added to the scores, if these are wanted.
  void probabilities(const float* e, const float* by, uint16_t* prob, bool scored) const {
    const int64_t span = tile.span, words = padded(span);
    const int whole = (tile.length() + W - 1) / W * W, block = tile.layer.block;
    for (int i = 0; i < span; i += W) {
      vf column = {};
      for (int m = 0; m < tile.rows; ++m) {
        const vf x = i < whole ? load(e + m * span + i) * by[m] : (vf){};
        Amx::put_halves(prob + m * words + i, prob + (MOST + m) * words + i, x);
        column += x;
      }
      if (!scored || i >= whole) continue;
      // Zero is added to what lies behind the last token of a vector.
      float* to = tile.score_page(i / block) + i % block;
      store(to, load(to) + column);
    }
  }

  // out [M, D] = prob . V, columns in the order of column().
  void values(const uint16_t* prob, float* out) const {
    const int size = tile.layer.size;
    int d = 0;
    for (; d + 4 * SIDE <= size; d += 4 * SIDE) columns<4>(prob, d, out);
    if (d < size) columns<2>(prob, d, out);
  }

 private:
  static constexpr int SIDE = amx::SIDE;
  static constexpr int CHUNK = amx::DEPTH;  // tokens of a matrix
  static constexpr int FETCH = 4;           // blocks that are fetched before they are needed

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

  // Columns [d, d + 16 N) of the output.
  template <int N>
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
    amx::zero<0>(), amx::zero<1>();
    if (N == 4) amx::zero<2>(), amx::zero<3>();
    pack(0);
    for (int c = 0; c < count; ++c) {
      if (c + 1 < count) pack(c + 1);
      const uint32_t* v = space(c, size);
      amx::load<4>(prob + int64_t(c) * CHUNK, 2 * padded(tile.span));
      amx::load<5>(v, 4 * N * SIDE);
      amx::load<6>(v + SIDE, 4 * N * SIDE);
      amx::multiply<0, 4, 5>();
      amx::multiply<1, 4, 6>();
      if (N == 2) continue;
      amx::load<7>(v + 2 * SIDE, 4 * N * SIDE);
      amx::load<5>(v + 3 * SIDE, 4 * N * SIDE);
      amx::multiply<2, 4, 7>();
      amx::multiply<3, 4, 5>();
    }
    float sums[N][ROWS][SIDE];
    amx::save<0>(sums[0], sizeof sums[0][0]);
    amx::save<1>(sums[1], sizeof sums[0][0]);
    if (N == 4) amx::save<2>(sums[N - 2], sizeof sums[0][0]), amx::save<3>(sums[N - 1], sizeof sums[0][0]);
    for (int m = 0; m < tile.rows; ++m)
      for (int i = 0; i < N; ++i)
        store(out + int64_t(m) * size + d + i * SIDE, load(sums[i][m]) + load(sums[i][MOST + m]));
  }
};

}  // namespace h2o
#endif
