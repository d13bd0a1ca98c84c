// SPDX-License-Identifier: Apache-2.0
// Register tiles: M query rows x one chunk of keys (logits), M rows of probabilities x one chunk of V.
//
// Two ways to multiply what lies in the cache; pairs.hpp and amx.hpp want it packed. Plain widens cache words to
// float and uses FMA. Paired (AVX512-BF16) feeds bfloat16 pairs to vdpbf16ps, twice the products per instruction:
// exact for q.k; for p.v the probabilities are rounded to bfloat16, as flash attention does, or kept as a sum of two.
#pragma once
#include <algorithm>
#include "vec.hpp"

namespace h2o {

// Accumulator sets per tile: few rows alone could not hide the latency of the multiply-add.
constexpr int sets(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

constexpr int LINES = 64;  // that are fetched ahead of those being read

// Fetches what will be read soon, while rows of a chunk are read.
// Few rows of queries wait for memory, and fetch LINES ahead: rows of the chunk itself, then of the next one. A line is
// read once, so it comes past L2, which would only hand it on. Chunks whose rows are halves of lines, and those that
// many rows of queries read again and again, are fetched a whole page ahead.
template <int M, int NV, class T>
struct Ahead {
  static constexpr int width = sizeof(T) * NV * W, per_row = (width + 63) / 64;
  static constexpr bool once = M < MAX_ROWS && width >= 64;
  static constexpr int level = once ? 0 : M < MAX_ROWS ? 2 : 3;
  int turn;           // from this row on it is the next chunk's
  int64_t near, far;  // bytes from a row to what is fetched while it is read

  Ahead(const T* chunk, const T* next, int rows, int64_t stride) {
    const int ahead = once ? std::min(LINES / per_row, rows) : rows;
    turn = rows - ahead;
    near = ahead * stride * int64_t(sizeof(T));
    far = (const char*)next - (const char*)(chunk + turn * stride);
  }
  H2O_INLINE void operator()(int row, const T* at) const {
    const char* from = (const char*)at + (!once || row >= turn ? far : near);
#pragma GCC unroll 4
    for (int i = 0; i < per_row; ++i) __builtin_prefetch(from + 64 * i, 0, level);
  }
  // The chunk behind the one `at` words into each row of a page, or the same one of a later page: a chunk that is short,
  // or beside others of another width, does not keep memory busy.
  static const T* next(const T* page, const T* later, int at, int extent, int rows) {
    if (!once || rows * per_row < LINES || extent % (NV * W)) return later + at;
    return at + NV * W < extent ? page + at + NV * W : later;
  }
};

template <class T>
struct Plain {
  using Cache = T;
  using Query = float;
  using Prob = float;
  struct Session {};  // lives as long as a thread multiplies
  static constexpr bool matrices = false, packs = false;
  static constexpr bool shuffled = false;
  static constexpr int words = 1;  // of Prob per probability

  static void pack_query(const T* q, Query* to, int size) {
    for (int d = 0; d < size; ++d) to[d] = widen(q[d]);
  }

  // out[m][0 .. NV * W) = q[m] . k^T;  k: [size, block], starting at the chunk's first key.
  template <int M, int NV>
  static void qk(const Query* q, const T* k, const T* next, int block, int size, float* out, int64_t span) {
    constexpr int N = sets(M);
    const Ahead<M, NV, T> fetch(k, next, size, block);
    vf acc[N][M][NV] = {};
    for (int d = 0; d < size; d += N) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        vf b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) b[v] = load(k + int64_t(d + n) * block + v * W);
        fetch(d + n, k + int64_t(d + n) * block);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          vf a = splat(q[m * size + d + n]);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[n][m][v] += a * b[v];
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        vf sum = acc[0][m][v];
        for (int n = 1; n < N; ++n) sum += acc[n][m][v];
        store(out + m * span + v * W, sum);
      }
  }

  // out[m][0 .. NV * W) += p[m] . v;  v: [tokens, size], starting at the chunk's first column.
  template <int M, int NV>
  static void pv(const Prob* p, int64_t span, const T* v, const T* next, int tokens, int size, float* out) {
    vf acc[M][NV];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) acc[m][c] = load(out + m * size + c * W);
    const Ahead<M, NV, T> fetch(v, next, tokens, size);
    for (int t = 0; t < tokens; ++t) {
      vf b[NV];
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) b[c] = load(v + int64_t(t) * size + c * W);
      fetch(t, v + int64_t(t) * size);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        vf a = splat(p[m * span + t]);
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) acc[m][c] += a * b[c];
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) store(out + m * size + c * W, acc[m][c]);
  }

  static H2O_INLINE void put(Prob* row, int i, vf x) { store(row + i, x); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define H2O_PAIRED 1

// EXACT: each probability is two bfloat16, 16 leading parts followed by the 16 remainders. That is good to
// 2^-17, and costs two products where there was one.
template <bool EXACT>
struct Paired {
  using Cache = bf16;
  using Query = uint16_t;
  using Prob = uint16_t;
  struct Session {};
  static constexpr bool matrices = false, packs = false;
  // Outputs of 32-column chunks stay in the order vpunpck leaves them; see column().
  static constexpr bool shuffled = true;
  static constexpr int words = EXACT ? 2 : 1;

  static void pack_query(const bf16* q, Query* to, int size) { std::memcpy(to, q, 2 * size); }

  static H2O_INLINE __m512bh splat_pair(const uint16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static H2O_INLINE vf fma(vf acc, __m512bh a, __m512i b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, a, (__m512bh)b);
  }
  // Two rows of NV * 16 words, interleaved: word pairs (row 0, row 1), NV vectors. With NV > 1 the
  // 32-word groups come out as (0-3 8-11 16-19 24-27)(4-7 12-15 20-23 28-31).
  template <int NV>
  static H2O_INLINE void interleave(const bf16* row0, const bf16* row1, __m512i* b) {
    if constexpr (NV == 1) {
      __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)row0));
      __m512i high = row1 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)row1)) : __m512i{};
      b[0] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v += 2) {
        __m512i x = _mm512_loadu_si512(row0 + v * 16);
        __m512i y = row1 ? _mm512_loadu_si512(row1 + v * 16) : __m512i{};
        b[v] = _mm512_unpacklo_epi16(x, y);
        b[v + 1] = _mm512_unpackhi_epi16(x, y);
      }
    }
  }

  // 32 columns as they were before interleave().
  static H2O_INLINE void store_in_order(void* to, __m512i low, __m512i high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(low, first, high));
    _mm512_storeu_si512((char*)to + 64, _mm512_permutex2var_epi32(low, second, high));
  }

  template <int M, int NV>
  static void qk(const Query* q, const bf16* k, const bf16* next, int block, int size, float* out, int64_t span) {
    constexpr int N = sets(M);
    const Ahead<M, NV, bf16> fetch(k, next, size, block);
    vf acc[N][M][NV] = {};
    for (int d = 0; d < size; d += 2 * N) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const int64_t at = int64_t(d + 2 * n) * block;
        __m512i b[NV];
        interleave<NV>(k + at, k + at + block, b);
        fetch(d + 2 * n, k + at);
        fetch(d + 2 * n + 1, k + at + block);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          __m512bh a = splat_pair(q + m * size + d + 2 * n);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[n][m][v] = fma(acc[n][m][v], a, b[v]);
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v)
        for (int n = 1; n < N; ++n) acc[0][m][v] += acc[n][m][v];
      if constexpr (NV == 1) {
        store(out + m * span, acc[0][m][0]);
      } else {
        store_in_order(out + m * span, (__m512i)acc[0][m][0], (__m512i)acc[0][m][1]);
      }
    }
  }

  template <int M, int NV>
  static void pv(const Prob* p, int64_t span, const bf16* v, const bf16* next, int tokens, int size, float* out) {
    vf acc[M][NV];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) acc[m][c] = load(out + m * size + c * W);
    auto step = [&](int t, const bf16* row1) __attribute__((always_inline)) {
      __m512i b[NV];
      interleave<NV>(v + int64_t(t) * size, row1, b);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const Prob* at = p + m * span + (EXACT ? (t & ~15) * 2 + (t & 15) : t);
        __m512bh a = splat_pair(at);
#pragma GCC unroll 4
        for (int c = 0; c < NV; ++c) acc[m][c] = fma(acc[m][c], a, b[c]);
        if constexpr (EXACT) {
          a = splat_pair(at + 16);
#pragma GCC unroll 4
          for (int c = 0; c < NV; ++c) acc[m][c] = fma(acc[m][c], a, b[c]);
        }
      }
    };
    const Ahead<M, NV, bf16> fetch(v, next, tokens, size);
    int t = 0;
    for (; t + 1 < tokens; t += 2) {
      fetch(t, v + int64_t(t) * size);
      fetch(t + 1, v + int64_t(t + 1) * size);
      step(t, v + int64_t(t + 1) * size);
    }
    // An odd last token: its probability is paired with a zero, but the V row behind it may be NaN.
    if (t < tokens) step(t, nullptr);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int c = 0; c < NV; ++c) store(out + m * size + c * W, acc[m][c]);
  }

  static H2O_INLINE void put(Prob* row, int i, vf x) {
    if constexpr (EXACT) put_halves(row + i * words, row + i * words + 16, x);
    else put_leading(row + i, x);
  }
  // x as bfloat16; returns what that leaves over.
  static H2O_INLINE vf put_leading(Prob* to, vf x) {
    const __m256i words = (__m256i)_mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &words, sizeof words);
    return x - (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
  }
  static H2O_INLINE void put_halves(Prob* leading, Prob* remainders, vf x) {
    put_leading(remainders, put_leading(leading, x));
  }
};
#endif

// Where column d of an output lies after Paired::pv, given that only whole 32-column chunks are shuffled.
H2O_INLINE int column(int d, int size, bool shuffled) {
  if (!shuffled || d >= size / 32 * 32) return d;
  return (d & ~31) | (d & 4) << 2 | (d & 24) >> 1 | (d & 3);
}

}  // namespace h2o
