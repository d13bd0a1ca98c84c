// SPDX-License-Identifier: Apache-2.0
// A prompt's products by AVX512-BF16: 12 query rows x 32 columns at a time, of keys and values that were paired
// before (packed.hpp), so that nothing but vdpbf16ps and the broadcasts of what it multiplies is left to do.
#pragma once
#include "dot.hpp"

#if defined(H2O_PAIRED)
namespace h2o {

// Outputs, as Paired's, keep the order of column().
struct Pairs : Paired<false> {
  static constexpr bool packs = true;
  static constexpr int ROWS = MAX_ROWS;      // of a register tile
  static constexpr int FEWEST = 48;          // query rows that are worth the packing of their keys
  static constexpr int64_t KEPT = 3 << 17;   // exponentials of one tile, if they are kept: 768 KiB of an L2 of 1 MiB
  static constexpr int DEPTH = 32;           // what block and head size must be whole multiples of

  // from [rows, columns], rows 2i and 2i + 1 word by word: to [rows / 2, columns] pairs. Zeros in place of
  // rows from `here` on. IN_ORDER: columns as they are, else as column() has them.
  template <bool IN_ORDER>
  static void pack(const bf16* from, int rows, int columns, int here, uint32_t* to) {
    for (int i = 0; i < rows; i += 2, from += 2 * columns, to += columns)
      for (int c = 0; c < columns; c += 32) {
        __m512i pair[2] = {};
        if (i < here) interleave<2>(from + c, i + 1 < here ? from + columns + c : nullptr, pair);
        if (IN_ORDER) {
          store_in_order(to + c, pair[0], pair[1]);
        } else {
          _mm512_storeu_si512(to + c, pair[0]);
          _mm512_storeu_si512(to + c + 16, pair[1]);
        }
      }
  }

  // Query row m: to [rows / ROWS, size / 2, ROWS] pairs.
  static void place_query(const bf16* q, Query* to, int m, int size) {
    uint32_t* at = (uint32_t*)to + int64_t(m / ROWS) * ROWS * size / 2 + m % ROWS;
    for (int d = 0; d < size; d += 2) std::memcpy(at + d / 2 * ROWS, q + d, 4);
  }

  // out[m][0 .. block) = q[m] . k^T for m in [first, last), whole ROWS;  k: [size / 2, block] pairs.
  static H2O_INLINE void logits(const Query* q, const uint32_t* k, int first, int last, int block, int size, float* out,
                                int64_t span) {
    for (int m = first; m < last; m += ROWS)
      for (int c = 0; c < block; c += 2 * W) {
        const uint16_t* a = q + int64_t(m) * size;
        const uint32_t* b = k + c;
        vf acc[ROWS][2] = {};
        for (int d = 0; d < size; d += 2, a += 2 * ROWS, b += block) step(a, 2, b, acc);
        for (int i = 0; i < ROWS; ++i)
          for (int v = 0; v < 2; ++v) store(out + (m + i) * span + c + v * W, acc[i][v]);
      }
  }

  // out [.., size] += p . v for rows in [first, last), whole ROWS;  v: [tokens / 2, size] pairs.
  // Column by column, so that a run's values stay in L1.
  static H2O_INLINE void outputs(const Prob* p, int64_t span, const uint32_t* v, int tokens, int first, int last,
                                 int size, float* out) {
    for (int d = 0; d < size; d += 2 * W)
      for (int m = first; m < last; m += ROWS) {
        const Prob* a = p + m * span;
        const uint32_t* b = v + d;
        float* to = out + int64_t(m) * size + d;
        vf acc[ROWS][2];
        for (int i = 0; i < ROWS; ++i)
          for (int c = 0; c < 2; ++c) acc[i][c] = load(to + int64_t(i) * size + c * W);
        for (int t = 0; t < tokens; t += 2, a += 2, b += size) step(a, span, b, acc);
        for (int i = 0; i < ROWS; ++i)
          for (int c = 0; c < 2; ++c) store(to + int64_t(i) * size + c * W, acc[i][c]);
      }
  }

 private:
  // One pair of each row, `span` words apart, times 32 columns of pairs.
  static H2O_INLINE void step(const uint16_t* a, int64_t span, const uint32_t* b, vf (&acc)[ROWS][2]) {
    const __m512i low = _mm512_loadu_si512(b), high = _mm512_loadu_si512(b + W);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
      const __m512bh pair = splat_pair(a + i * span);
      acc[i][0] = fma(acc[i][0], pair, low);
      acc[i][1] = fma(acc[i][1], pair, high);
    }
  }
};

}  // namespace h2o
#endif
