// SPDX-License-Identifier: Apache-2.0
// What policies want to know of the KV that an eviction is about to rank, all layers in one call. Called
// through ctypes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.hpp"

namespace {

using namespace h2o;

constexpr float TINY = 1e-20f;  // below the square of any key's length, as in reference.py

// One head's candidates: block b's page lies at cache + page[b]; K as [size, block], V as [block, size].
template <class Word>
struct Head {
  const Word* cache;
  const int64_t* page;
  int count, size, block;

  const Word* keys(int b) const { return cache + page[b]; }
  const Word* values(int b) const { return cache + page[b] + int64_t(size) * block; }
};

// How far each value lies from their mean.
template <class Word>
void value_distances(const Head<Word>& head, float* out) {
  const int size = head.size;
  std::vector<float> mean(size, 0.f);
  for (int b = 0; b < head.count; ++b) {
    const Word* v = head.values(b);
    for (int t = 0; t < head.block; ++t, v += size)
      for (int d = 0; d < size; d += W) store(&mean[d], load(&mean[d]) + load(v + d));
  }
  const float share = 1.f / (float(head.count) * head.block);
  for (float& m : mean) m *= share;
  for (int b = 0; b < head.count; ++b) {
    const Word* v = head.values(b);
    for (int t = 0; t < head.block; t += W, v += W * size, out += W) {
      vf parts[W] = {};
      for (int d = 0; d < size; d += W)
        for (int i = 0; i < W; ++i) {
          const vf away = load(v + i * size + d) - load(&mean[d]);
          parts[i] += away * away;
        }
      store(out, root(hsums(parts)));
    }
  }
}

// The sum over d of `f(x, d)`, x the d-th numbers of W tokens of [size, block], in chains that wait for no other.
template <class Word, class F>
H2O_INLINE vf over_numbers(const Word* k, int size, int block, F f) {
  vf parts[4] = {};
  for (int d = 0; d < size; d += 4)
    for (int i = 0; i < 4; ++i) parts[i] += f(load(k + (d + i) * block), d + i);
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// The cosine of each key and the mean of the normalised keys.
template <class Word>
void key_similarity(const Head<Word>& head, float* out) {
  const int size = head.size, block = head.block;
  std::vector<float> anchor(size), sums(size * W, 0.f);
  // First the keys' inverse lengths, in the place of the result.
  for (int b = 0; b < head.count; ++b) {
    const Word* k = head.keys(b);
    for (int t = 0; t < block; t += W) {
      const vf square = over_numbers(k + t, size, block, [](vf x, int) { return x * x; });
      store(out + b * block + t, splat(1.f) / root(vmax(square, splat(TINY))));
    }
    for (int d = 0; d < size; ++d) {
      vf sum = load(&sums[d * W]);
      for (int t = 0; t < block; t += W) sum += load(k + d * block + t) * load(out + b * block + t);
      store(&sums[d * W], sum);
    }
  }
  for (int d = 0; d < size; ++d) anchor[d] = hsum(load(&sums[d * W]));
  float length = 0.f;
  for (float a : anchor) length += a * a;
  length = std::sqrt(length);
  for (float& a : anchor) a /= length > 1e-12f ? length : 1e-12f;
  for (int b = 0; b < head.count; ++b) {
    const Word* k = head.keys(b);
    for (int t = 0; t < block; t += W) {
      const vf dot = over_numbers(k + t, size, block, [&](vf x, int d) { return x * anchor[d]; });
      float* similarity = out + b * block + t;
      store(similarity, dot * load(similarity));
    }
  }
}

template <class Word>
void of_head(const void* cache, const int64_t* page, int count, int size, int block, bool keys, float* out) {
  const Head<Word> head{(const Word*)cache, page, count, size, block};
  if (keys) key_similarity(head, out);
  else value_distances(head, out);
}

}  // namespace

// caches: L pointers to [N, KH, 2 * D * BS] of a type; pages: [L, KH, count], block * KH + lane, behind padding below 0,
// whose result is 0; out: [L, KH, count * BS].
// keys: similarity of keys, else distances of values.
extern "C" void h2o_rank(void* const* caches, const int32_t* pages, float* out, int count, int layers, int heads,
                         int size, int block, int dtype, int keys) {
#pragma omp parallel if (layers * heads > 1 && count * block > 64)
  {
    std::vector<int64_t> page(count);
#pragma omp for schedule(static)
    for (int i = 0; i < layers * heads; ++i) {
      const int layer = i / heads;
      float* mine = out + int64_t(i) * count * block;
      int n = 0;
      for (int b = 0; b < count; ++b) {
        const int64_t id = pages[int64_t(i) * count + b];
        if (id >= 0) page[n++] = id * 2 * size * block;
        else mine = std::fill_n(mine, block, 0.f);
      }
      if (dtype == 0) of_head<float>(caches[layer], page.data(), n, size, block, keys, mine);
      else if (dtype == 1) of_head<bf16>(caches[layer], page.data(), n, size, block, keys, mine);
      else of_head<f16>(caches[layer], page.data(), n, size, block, keys, mine);
    }
  }
}
