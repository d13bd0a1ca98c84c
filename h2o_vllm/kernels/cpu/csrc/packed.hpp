// SPDX-License-Identifier: Apache-2.0
// A prompt's queries against keys that were packed for the multiplication (pairs.hpp, amx.hpp): run by run of keys, with
// maximum, sum and output of the runs so far, as FlashAttention (arXiv 2205.14135), also where they want the
// column sums. These need every exponential until the maximum of its row is known: exponentials are kept, in half
// precision, beside each run's maximum.
#pragma once
#include <algorithm>
#include <cmath>
#include "tile.hpp"

#ifdef H2O_PAIRED
namespace h2o {

// Keys and values of one sequence and KV head as multipliers want them, packed once for all of a task's queries.
struct Packed {
  const uint32_t *keys, *values;  // [blocks, D / 2, BS] and [blocks * BS / 2, D] pairs; zeros behind the last value

  // page(b): K^T [D, BS] of the b-th block, then V [BS, D].
  template <class Page>
  static Packed of(const Page& page, int tokens, int block, int size) {
    static thread_local Scratch memory;
    const int64_t blocks = (tokens + block - 1) / block, pairs = int64_t(size) * block / 2;
    uint32_t *k = (uint32_t*)memory.get(2 * blocks * pairs), *v = k + blocks * pairs;
    for (int64_t b = 0; b < blocks; ++b) {
      const bf16* from = page(b);
      const int here = std::min<int>(block, tokens - b * block);
      Pairs::pack<true>(from, size, block, size, k + b * pairs);
      Pairs::pack<false>(from + int64_t(size) * block, block, size, here, v + b * pairs);
    }
    return {k, v};
  }
};

// M query rows, tokens x the q heads of one kv head, against all keys up to their own.
template <class K>
class PackedRows {
 public:
  static constexpr int RUN = 512;             // keys between two looks at the maximum
  static constexpr int MOST = 96;             // rows, at most
  static constexpr int SPAN = RUN + 16;       // floats of a row of logits, so that rows do not share cache sets
  static constexpr int PROB_SPAN = RUN + 32;  // and words of a row of probabilities

  static bool fit(int block, int size, int group) {
    return block % K::DEPTH == 0 && RUN % block == 0 && size % K::DEPTH == 0 && group <= MOST;
  }
  // Of any number of rows, so many as the multiplier takes at once.
  static constexpr int64_t padded(int64_t rows) { return (rows + K::ROWS - 1) / K::ROWS * K::ROWS; }
  // How many rows: `kept` exponentials of each, if the columns are summed up, stay in L2.
  static int most(int64_t kept, bool scored) {
    return scored ? std::clamp<int64_t>(K::KEPT / kept / K::ROWS * K::ROWS, K::ROWS, MOST) : MOST;
  }

  const Layer& layer;
  const Packed& packed;
  int rows, first_limit;  // row m sees first_limit + m / group tokens
  bool scored;            // whether there are column sums
  float *out, *top, *sum; // [padded rows, D] in the order of column(), [rows], [rows]: in base 2, of all runs

  PackedRows(const Layer& layer, const Packed& packed, bool scored, int tokens)
      : layer(layer), packed(packed), rows(0), first_limit(0), scored(scored) {
    const int64_t most = padded(MOST), runs = (tokens + RUN - 1) / RUN;
    const int64_t kept = scored ? (runs * MOST * RUN + 1) / 2 : 0, tops = scored ? runs * MOST : 0;
    float* memory = space().get(most * (SPAN + PROB_SPAN / 2 + layer.size + 2) + tops + kept + 64);
    logits_ = memory;
    prob_ = (uint16_t*)(logits_ + most * SPAN);
    out = (float*)(prob_ + most * PROB_SPAN);
    top = out + most * layer.size;
    sum = top + most;
    tops_ = sum + most;
    kept_ = (f16*)(tops_ + tops);
  }

  // q: [padded rows, D]. Leaves `out`, not yet divided by `sum`.
  void attend(const uint16_t* q) {
    const int keys = first_limit + rows / layer.group - 1;
    std::fill_n(top, rows, -INFINITY);
    std::fill_n(sum, rows, 0.f);
    std::fill_n(out, int64_t(padded(rows)) * layer.size, 0.f);
    for (int run = 0; run * RUN < keys; ++run) {
      const int begin = run * RUN, length = std::min(RUN, keys - begin);
      const int whole = (length + layer.block - 1) / layer.block * layer.block, last = padded(rows);
      const int64_t pairs = int64_t(layer.size) * layer.block / 2;
      for (int t = 0; t < whole; t += layer.block)
        K::logits(q, packed.keys + (begin + t) / layer.block * pairs, first_padded(begin + t), last, layer.block,
                  layer.size, logits_ + t, SPAN);
      for (int m = first_padded(begin); m < rows; ++m) {
        const int n = std::clamp(first_limit + m / layer.group - begin, 0, length);
        f16* kept = kept_ + (int64_t(run) * MOST + m) * RUN;
        if (scored) exponentials<true>(m, n, whole, kept);
        else exponentials<false>(m, n, whole, kept);
        if (scored) tops_[run * MOST + m] = top[m];
      }
      K::outputs(prob_, PROB_SPAN, packed.values + int64_t(begin) / 2 * layer.size, whole, first_padded(begin), last,
                 layer.size, out);
    }
  }

  // Adds to sums [whole blocks] what the rows give to each key: exponentials times by[m].
  void add_columns(const float* by, float* sums) const {
    constexpr int PART = 256, N = PART / W;
    const int keys = first_limit + rows / layer.group - 1;
    for (int begin = 0; begin < keys; begin += PART) {
      const int run = begin / RUN;
      const float* tops = tops_ + run * MOST;
      const f16* from = kept_ + int64_t(run) * MOST * RUN + begin % RUN;
      vf column[N] = {};
      for (int m = first_seeing(begin); m < rows; ++m) {
        const vf factor = splat(std::exp2(tops[m] - top[m]) * by[m]);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) column[i] += load(from + m * RUN + i * W) * factor;
      }
      // Zeros where a part ends behind the keys.
      const int here = std::min(PART, keys - begin);
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i)
        if (i * W < here) {
          float* to = sums + begin + i * W;
          store(to, load(to) + column[i]);
        }
    }
  }

  // out[m] times `by`, in the order of the columns: to [D] words.
  void write(int m, float by, bf16* to) const {
    const float* from = out + int64_t(m) * layer.size;
    for (int d = 0; d < layer.size; d += 2 * W) {
      float pair[2 * W];
      Pairs::store_in_order(pair, (__m512i)(load(from + d) * by), (__m512i)(load(from + d + W) * by));
      Pairs::put((uint16_t*)to, d, load(pair));
      Pairs::put((uint16_t*)to, d + W, load(pair + W));
    }
  }

 private:
  static Scratch& space() {
    static thread_local Scratch memory;
    return memory;
  }
  int first_seeing(int t) const { return std::max(0, t + 1 - first_limit) * layer.group; }
  int first_padded(int t) const { return first_seeing(t) / K::ROWS * K::ROWS; }

  // Row m of a run, of which it sees n keys: maximum and sum so far, the output so far brought to that maximum,
  // probabilities to be multiplied with V, and what add_columns() wants; zeros behind the n.
  template <bool SCORED>
  void exponentials(int m, int n, int whole, f16* kept) {
    float* row = logits_ + m * SPAN;
    uint16_t* prob = prob_ + m * PROB_SPAN;
    const bool capped = layer.softcap != 0;
    const float factor = (capped ? layer.softcap : layer.scale) * LOG2E;
    const int full = n / W * W;
    // Behind the n may be NaN, from slots never written.
    const __mmask16 rest = (1u << (n - full)) - 1;
    if (rest) store(row + full, (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), rest, row + full));
    const int end = full + (rest ? W : 0);
    if (capped)
      for (int i = 0; i < end; i += W) store(row + i, tanh(load(row + i) * (layer.scale / layer.softcap)));
    vf high[2] = {splat(-INFINITY), splat(-INFINITY)};
    int i = 0;
    for (; i + 2 * W <= end; i += 2 * W) high[0] = vmax(load(row + i), high[0]), high[1] = vmax(load(row + i + W), high[1]);
    if (i < end) high[0] = vmax(load(row + i), high[0]);
    const float before = top[m], best = n ? std::max(before, hmax(vmax(high[0], high[1])) * factor) : before;
    vf total = {};
    for (i = 0; i < full; i += W) {
      const vf x = exp2_short(load(row + i) * factor - best);
      total += x;
      Pairs::put(prob, i, x);
      if (SCORED) keep(kept + i, x);
    }
    if (rest) {
      const vf x = (vf)_mm512_maskz_mov_ps(rest, (__m512)exp2_short(load(row + i) * factor - best));
      total += x;
      Pairs::put(prob, i, x);
      if (SCORED) keep(kept + i, x);
      i += W;
    }
    std::fill(prob + i, prob + std::max(i, whole), uint16_t(0));
    if (SCORED) std::memset(kept + i, 0, (RUN - i) * sizeof(f16));
    if (!n) return;
    const float by = std::exp2(before - best);
    top[m] = best;
    sum[m] = sum[m] * by + hsum(total);
    if (by != 1)
      for (int d = 0; d < layer.size; d += W) {
        float* to = out + int64_t(m) * layer.size + d;
        store(to, load(to) * by);
      }
  }

  static H2O_INLINE void keep(f16* to, vf x) {
    const __m256i words = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &words, sizeof words);
  }
  // 2^x for x <= 0, relative error below 3e-6, a hundredth of what either of the two types above rounds off.
  static H2O_INLINE vf exp2_short(vf x) {
    const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    vf y = splat(0.013534167916046056f);
    y = y * r + 0.05201146061046783f;
    y = y * r + 0.24144275689141184f;
    y = y * r + 0.6930038344699927f;
    y = y * r + 1.000002593370694f;
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)x);  // times 2^floor(x)
  }

  float* logits_;
  uint16_t* prob_;
  float* tops_;  // [runs, MOST]
  f16* kept_;    // [runs, MOST, RUN]
};

}  // namespace h2o
#endif
