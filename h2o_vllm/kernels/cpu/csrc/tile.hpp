// SPDX-License-Identifier: Apache-2.0
// One tile: M query rows (tokens x the q heads of one kv head) against a run of blocks of one sequence.
//
// The logits of the whole run are kept (in L2, for sensible sizes), so one pass over K and one over V give
// the exact softmax, the output, and every token's share of attention.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <type_traits>
#include "amx.hpp"
#include "dot.hpp"

namespace h2o {

constexpr float LOG2E = 1.44269504088896341f;
constexpr int MANY = 2 * MAX_ROWS;  // query rows from which on a widened page pays
constexpr int AHEAD = W == 16 ? 1 : 2;  // blocks, where chunks are fetched by whole pages

// 64-byte aligned memory that is kept from call to call.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  float* get(size_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = (floats + floats / 4 + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (!data_) std::abort();
    }
    return data_;
  }
 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

struct Layer {           // what one call works on; strides in elements
  const char* cache;     // [N, KH, (K^T [D, BS]) (V [BS, D])]
  float* scores;         // [N, KH, BS]
  int heads, group, size, block;
  float scale, softcap;  // softcap: 0 for none
};

// Where the pages of one kv head of a row lie. Of a row whose heads share the slots of its first `heavy` blocks, those
// that the head has of them come first; then, as for any row, its own page of each other block.
struct Pages {
  const int32_t* table;            // block ids of the row
  int heads, head;
  const int32_t* lanes = nullptr;  // page ids, block * KH + lane
  int count = 0, heavy = 0;        // of lanes; of blocks that they lie in
  int first = 0;                   // where a run begins

  int64_t operator[](int b) const {
    b += first;
    return b < count ? lanes[b] : int64_t(table[b - count + heavy]) * heads + head;
  }
  Pages from(int b) const {
    Pages run = *this;
    run.first += b;
    return run;
  }
};

template <class K>
struct Tile {
  using T = typename K::Cache;
  using Query = typename K::Query;
  using Prob = typename K::Prob;

  const Layer& layer;
  Pages pages;             // from the run's first block on
  int rows;                // M, a multiple of the group; row m sees limit(m) tokens of the run
  int first_limit;         // of rows 0 .. G - 1; each further token sees one more
  int64_t span;            // floats per logits row: the run rounded up to blocks
  int most = INT32_MAX;    // tokens of the run, where it is one of several: rows may see more, or none of it
  Pages then = {};         // of what is likely to be attended to next, and how many these are
  int then_blocks = 0;

  int limit(int m) const { return std::clamp(first_limit + m / layer.group, 0, most); }
  int length() const { return limit(rows - 1); }
  const T* page(const Pages& pages, int b) const {
    return (const T*)layer.cache + pages[b] * 2 * layer.size * layer.block;
  }
  const T* page(int b) const { return page(pages, b); }
  const T* value_page(int b) const { return page(b) + int64_t(layer.size) * layer.block; }
  // What is read `ahead` blocks behind V of block b: V, then K of what is likely to come next; or null.
  const T* behind_value(int b, int ahead) const {
    const int blocks = (length() + layer.block - 1) / layer.block, next = b + ahead - blocks;
    if (next < 0) return value_page(b + ahead);
    return next < then_blocks ? page(then, next) : nullptr;
  }
  float* score_page(int b) const { return layer.scores + pages[b] * layer.block; }

  // Calls f(std::integral_constant rows, first row) for register tiles that cover rows [first, rows).
  template <class F>
  H2O_INLINE void row_groups(int first, const F& f) const {
    for (int m = first; m < rows;) {
      const int left = rows - m;
#define H2O_TAKE(n) if (n <= MAX_ROWS && left >= n) { f(std::integral_constant<int, (n <= MAX_ROWS ? n : 1)>(), m); m += n; continue; }
      H2O_TAKE(12) H2O_TAKE(8) H2O_TAKE(6) H2O_TAKE(4) H2O_TAKE(3) H2O_TAKE(2) H2O_TAKE(1)
#undef H2O_TAKE
    }
  }
  // The first row that sees token t of the run, rounded down to whole tokens.
  int first_seeing(int t) const { return std::max(0, t + 1 - first_limit) * layer.group; }

  // Many rows widen a page once, not once for each register tile. Paired needs its words as they are.
  static constexpr bool widens = std::is_same_v<K, Plain<T>> && !std::is_same_v<T, float>;
  const float* widened(const T* from, int count) const {
    static thread_local Scratch memory;
    float* to = memory.get(count);
    for (int i = 0; i < count; i += W) store(to + i, load(from + i));
    return to;
  }

  void logits(const Query* q, float* out) const {
    const int block = layer.block, size = layer.size, blocks = (length() + block - 1) / block;
    // J is K, or Plain<float> over a widened page.
    auto one = [&](auto kind, int b, const auto* k, const auto* next) {
      using J = decltype(kind);
      int c = 0;
      auto chunk = [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        for (; c + NV * W <= block; c += NV * W) {
          const int t = b * block + c;
          if (t >= length()) return;
          row_groups(first_seeing(t), [&](auto count, int m) {
            constexpr int M = decltype(count)::value;
            const auto* then = Ahead<M, NV, typename J::Cache>::next(k, next, c, block, size);
            J::template qk<M, NV>(q + int64_t(m) * size, k + c, m == 0 ? then : k + c, block, size, out + m * span + t, span);
          });
        }
      };
      chunk(std::integral_constant<int, 2>());
      chunk(std::integral_constant<int, 1>());
    };
    for (int b = 0; b < blocks; ++b) {
      const T* k = page(b);
      if constexpr (widens)
        if (rows > MANY) {
          const float* wide = widened(k, size * block);
          one(Plain<float>(), b, wide, wide);
          continue;
        }
      // Behind the last K comes the first V.
      const int next = b + AHEAD;
      one(K(), b, k, next < blocks ? page(next) : value_page(std::min(next - blocks, blocks - 1)));
    }
  }

  // In place: logit = tanh(scale * logit / softcap), of the n first ones and of what shares a vector with them.
  void cap(float* row, int n) const {
    const float factor = layer.scale / layer.softcap;
    for (int i = 0; i < n; i += W) store(row + i, tanh(load(row + i) * factor));
  }

  // In place: e = exp(scale * logit - max), capped if there is a soft cap; zeros from each row's limit to the end. Leaves the base-2
  // maximum and the sum of each row. With `out` [M, D] they go on from those of earlier runs, and what
  // these have left in `out` is brought to the new maximum.
  void exponentials(float* e, float* top, float* sum, float* out = nullptr) const {
    const bool capped = layer.softcap != 0;
    const float factor = (capped ? layer.softcap : layer.scale) * LOG2E;
    const int end = round_up(length());
    for (int m = 0; m < rows; ++m) {
      float* row = e + m * span;
      const int n = limit(m), whole = n / W * W;
      if (capped) cap(row, n);
      vf high = splat(-INFINITY), total = {};
      for (int i = 0; i < whole; i += W) high = vmax(load(row + i) * factor, high);
      float best = out ? std::max(top[m], hmax(high)) : hmax(high);
      for (int i = whole; i < n; ++i) best = std::max(best, row[i] * factor);
      for (int i = 0; i < whole; i += W) {
        vf x = exp2_neg(load(row + i) * factor - best);
        store(row + i, x);
        total += x;
      }
      if (whole < n) {  // beyond the limit there may be NaN from slots never written
        float tail[W] = {};
        for (int i = whole; i < n; ++i) tail[i - whole] = row[i] * factor - best;
        store(tail, exp2_neg(load(tail)));
        for (int i = n - whole; i < W; ++i) tail[i] = 0;
        store(row + whole, load(tail));
        total += load(tail);
      }
      for (int i = round_up(n); i < end; i += W) store(row + i, (vf){});
      float before = 0;
      if (out) {
        const float factor = std::exp2(top[m] - best);
        before = sum[m] * factor;
        if (factor != 1)
          for (int d = 0; d < layer.size; ++d) out[int64_t(m) * layer.size + d] *= factor;
      }
      top[m] = best;
      sum[m] = before + hsum(total);
    }
  }

  // prob = e * factor[m] in the type V is multiplied with (may overlay e), and its column sums added to
  // sums, unless that is null.
  void normalise(const float* e, const float* factor, Prob* prob, int64_t prob_span, float* sums) const {
    const int end = round_up(length());
    auto some = [&](auto count, int m) {
      constexpr int N = decltype(count)::value;
      for (int i = 0; i < end; i += W) {
        vf column = {}, p[N];
        for (int n = 0; n < N; ++n) {
          p[n] = load(e + (m + n) * span + i) * factor[m + n];
          column += p[n];
        }
        if (sums) store(sums + i, load(sums + i) + column);
        if (prob)
          for (int n = 0; n < N; ++n) K::put(prob + (m + n) * prob_span, i, p[n]);
      }
    };
    int m = 0;
    for (; m + 4 <= rows; m += 4) some(std::integral_constant<int, 4>(), m);
    for (; m + 3 <= rows; m += 3) some(std::integral_constant<int, 3>(), m);
    for (; m < rows; ++m) some(std::integral_constant<int, 1>(), m);
  }

  // out [M, D] += prob . V, columns in the order of column().
  void values(const Prob* prob, int64_t prob_span, float* out) const {
    const int block = layer.block, size = layer.size, blocks = (length() + block - 1) / block;
    auto one = [&](auto kind, int b, const auto* v, const auto* next, int here) {
      using J = decltype(kind);
      row_groups(first_seeing(b * block), [&](auto count, int m) {
        constexpr int M = decltype(count)::value;
        constexpr int WIDE = M * 4 <= MAX_ROWS * 2 ? 4 : 2;
        int d = 0;
        auto columns = [&](auto vectors) {
          constexpr int NV = decltype(vectors)::value;
          for (; d + NV * W <= size; d += NV * W) {
            const auto* then = Ahead<M, NV, typename J::Cache>::next(v, next, d, size, here);
            J::template pv<M, NV>(prob + m * prob_span + b * block * K::words, prob_span, v + d, m == 0 ? then : v + d,
                                  here, size, out + int64_t(m) * size + d);
          }
        };
        columns(std::integral_constant<int, WIDE>());
        columns(std::integral_constant<int, 2>());
        columns(std::integral_constant<int, 1>());
      });
    };
    for (int b = 0; b < blocks; ++b) {
      const T* v = value_page(b);
      const int here = std::min(block, length() - b * block);
      if constexpr (widens)
        if (rows > MANY) {
          const float* wide = widened(v, here * size);
          one(Plain<float>(), b, wide, wide, here);
          continue;
        }
      const T* next = behind_value(b, AHEAD);
      one(K(), b, v, next ? next : v, here);
    }
  }

  void add_scores(const float* sums) const {
    const int block = layer.block;
    for (int t = 0; t < length(); t += block) {
      float* to = score_page(t / block);
      const int here = std::min(block, length() - t);
      int i = 0;
      for (; i + W <= here; i += W) store(to + i, load(to + i) + load(sums + t + i));
      for (; i < here; ++i) to[i] += sums[t + i];
    }
  }

  static int round_up(int n) { return (n + W - 1) / W * W; }
};

}  // namespace h2o
