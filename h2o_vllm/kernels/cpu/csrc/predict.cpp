// SPDX-License-Identifier: Apache-2.0
// The attention that tokens are expected to get, all layers in one call: a sum of what their keys and values are,
// weighed per KV head. Called through ctypes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.hpp"

namespace {

using namespace h2o;

// The shape of a call. Keys are turned in `rotary` of their numbers, in pairs; `width` weights of each of `of` heads: of
// all heads' numbers, or of its own, and one more that is added.
struct Shape {
  int heads, of, size, block, width, rotary;
  bool interleaved;

  int lengths() const { return size - rotary / 2; }
  int of_head() const { return lengths() + size; }
  bool across() const { return width - 1 == heads * of_head(); }
};

// One block's tokens in one layer. cache: its pages, [heads, 2 * size * block], K as [size, block], V as [block, size];
// weights: [of, width]; sums: scratch, [of, block]; values: scratch, [W, size].
template <class Word>
void of_block(const Shape& s, const Word* cache, const float* weights, float* sums, float* values) {
  const int half = s.rotary / 2;
  for (int h = 0; h < s.of; ++h) std::fill_n(sums + h * s.block, s.block, weights[(h + 1) * s.width - 1]);
  for (int source = 0; source < s.heads; ++source) {
    const Word* k = cache + int64_t(source) * 2 * s.size * s.block;
    const Word* v = k + int64_t(s.size) * s.block;
    const int first = s.across() ? 0 : source, last = s.across() ? s.of : source + 1;
    const float* mine = weights + (s.across() ? source * s.of_head() : 0);
    for (int i = 0; i < s.lengths(); ++i) {
      const bool pair = i < half;
      const Word* one = k + int64_t(pair ? (s.interleaved ? 2 * i : i) : s.rotary + i - half) * s.block;
      const Word* other = one + int64_t(s.interleaved ? 1 : half) * s.block;
      for (int t = 0; t < s.block; t += W) {
        vf x = load(one + t);
        if (pair) {
          const vf y = load(other + t);
          x = root(x * x + y * y);
        }
        for (int h = first; h < last; ++h) {
          float* sum = sums + h * s.block + t;
          store(sum, load(sum) + x * mine[h * s.width + i]);
        }
      }
    }
    for (int t = 0; t < s.block; t += W, v += W * s.size) {
      for (int i = 0; i < W * s.size; i += W) store(values + i, load(v + i));
      for (int h = first; h < last; ++h) {
        const float* weight = mine + h * s.width + s.lengths();
        vf parts[W] = {};
        for (int d = 0; d < s.size; d += W)
          for (int i = 0; i < W; ++i) parts[i] += load(values + i * s.size + d) * load(weight + d);
        float* sum = sums + h * s.block + t;
        store(sum, load(sum) + hsums(parts));
      }
    }
  }
}

}  // namespace

// caches: L pointers to [N, KH, 2 * D * BS] of a type; blocks: [count] ids; weights: [L, of, width]; out:
// [L, of, count * BS], sums as they are if `sums_alone`.
extern "C" void h2o_predict(void* const* caches, const int32_t* blocks, const float* weights, float* out, int count,
                             int layers, int heads, int of, int size, int block, int width, int rotary, int interleaved,
                             int sums_alone, int dtype) {
  const Shape shape{heads, of, size, block, width, rotary, interleaved != 0};
#pragma omp parallel if (layers * count > 1)
  {
    std::vector<float> sums(of * block), values(W * size);
#pragma omp for schedule(static)
    for (int i = 0; i < layers * count; ++i) {
      const int layer = i / count, place = i % count;
      const int64_t at = int64_t(blocks[place]) * heads * 2 * size * block;
      const float* mine = weights + int64_t(layer) * of * width;
      const void* cache = caches[layer];
      if (dtype == 0) of_block(shape, (const float*)cache + at, mine, sums.data(), values.data());
      else if (dtype == 1) of_block(shape, (const bf16*)cache + at, mine, sums.data(), values.data());
      else of_block(shape, (const f16*)cache + at, mine, sums.data(), values.data());
      for (int h = 0; h < of; ++h) {
        float* to = out + (int64_t(layer * of + h) * count + place) * block;
        const float* sum = sums.data() + h * block;
        if (sums_alone) std::copy_n(sum, block, to);
        else for (int t = 0; t < block; ++t) to[t] = std::exp(std::clamp(sum[t], -50.f, 0.f));
      }
    }
  }
}
