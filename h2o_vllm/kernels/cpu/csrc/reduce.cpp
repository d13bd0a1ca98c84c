// SPDX-License-Identifier: Apache-2.0
// Sums over the keys and values that an eviction ranks first, where they lie. Called through ctypes.
#include <cstdint>

#include "vec.hpp"

namespace {

using namespace h2o;

template <bool SQUARES>
H2O_INLINE vf term(vf x, vf given) {
  return SQUARES ? (x - given) * (x - given) : x * given;
}

// out[c] += the sum over rows of terms of x, [rows, columns], and given[row], in chains that wait for no other.
template <bool SQUARES, class Word>
void down(const Word* x, int rows, int columns, const float* given, float* out) {
  for (int c = 0; c < columns; c += W) {
    vf parts[4] = {};
    for (int r = 0; r < rows; r += 4)
      for (int i = 0; i < 4; ++i) parts[i] += term<SQUARES>(load(x + (r + i) * columns + c), splat(given[r + i]));
    store(out + c, load(out + c) + ((parts[0] + parts[1]) + (parts[2] + parts[3])));
  }
}

// out[r] += the sum over columns of terms of x, [rows, columns], and given[column].
template <bool SQUARES, class Word>
void along(const Word* x, int rows, int columns, const float* given, float* out) {
  for (int r = 0; r < rows; r += W) {
    vf parts[W] = {};
    for (int c = 0; c < columns; c += W)
      for (int i = 0; i < W; ++i) parts[i] += term<SQUARES>(load(x + (r + i) * columns + c), load(given + c));
    store(out + r, load(out + r) + hsums(parts));
  }
}

// caches: L pointers to [N, KH, 2 * D * BS] of a type: K as [D, BS], V as [BS, D]; blocks: [count] ids.
struct Pages {
  void* const* caches;
  const int64_t* blocks;
  int count, layers, heads, size, block;

  template <class Word>
  const Word* at(int layer, int b, int head) const {
    return (const Word*)caches[layer] + (blocks[b] * heads + head) * 2 * size * block;
  }
};

template <class Word>
void reduce(const Pages& p, const float* given, float* out, int points, bool values, bool squares, bool over_tokens) {
  const int half = p.size * p.block, rows = values ? p.block : p.size, columns = half / rows;
  const int width = over_tokens ? p.block : p.size, results = half / width;
  const auto run = values == over_tokens ? (squares ? down<true, Word> : down<false, Word>)
                                         : (squares ? along<true, Word> : along<false, Word>);
  // Where blocks do not add to each other, they are shared out as well.
  const int tasks = over_tokens ? 1 : p.count, share = p.count / tasks;
#pragma omp parallel for schedule(static) if (p.layers * p.heads > 1 && p.count * p.block > 64)
  for (int i = 0; i < p.layers * p.heads * tasks; ++i) {
    const int layer = i / tasks / p.heads, head = i / tasks % p.heads, first = i % tasks * share;
    auto row = [&](int of, int b) { return (int64_t(layer) * of + (of > 1 ? b : 0)) * p.heads + head; };
    for (int b = first; b < first + share; ++b) {
      auto page = [&](int b) { return p.at<Word>(layer, b, head) + values * half; };
      for (int j = 0; j < half && b + 1 < p.count; j += 64 / sizeof(Word)) __builtin_prefetch(page(b + 1) + j);
      run(page(b), rows, columns, given + row(points, b) * width, out + row(over_tokens ? 1 : p.count, b) * results);
    }
  }
}

// The first `pairs` features of keys are lengths of pairs of their numbers, the others are the numbers behind the pairs.
template <class Word>
void weigh(const Pages& p, const float* weights, float* out, int of, int sources, int width, int pairs,
           bool interleaved) {
  const bool all = sources == p.heads;  // else each result takes from its own head
  const int64_t stride = int64_t(sources) * width;
#pragma omp parallel for schedule(static) if (p.layers * p.count > 1)
  for (int task = 0; task < p.layers * p.count; ++task)
    for (int head = 0; head < p.heads; ++head) {
      const Word* k = p.at<Word>(task / p.count, task % p.count, head);
      const int to = all ? 0 : head, results = all ? of : 1;
      const float* mine = weights + (int64_t(task / p.count) * of + to) * stride + (all ? head : 0) * width;
      float* sums = out + (int64_t(task) * of + to) * p.block;
      for (int i = 0; i < p.size - pairs; ++i) {
        const Word* one = k + (i >= pairs ? i + pairs : interleaved ? 2 * i : i) * p.block;
        const Word* other = one + (interleaved ? 1 : pairs) * p.block;
        for (int t = 0; t < p.block; t += W) {
          vf x = load(one + t);
          if (i < pairs) x = root(x * x + load(other + t) * load(other + t));
          for (int j = 0; j < results; ++j) {
            float* sum = sums + j * p.block + t;
            store(sum, load(sum) + x * mine[j * stride + i]);
          }
        }
      }
      for (int j = 0; j < results; ++j)
        along<false>(k + p.size * p.block, p.block, p.size, mine + j * stride + p.size - pairs, sums + j * p.block);
    }
}

}  // namespace

// Adds to out, where x are the keys (or values), and a term is x * given, or (x - given)^2 if squares:
//   over_tokens: [L, 1, KH, D], sums of terms over tokens; given: [L, count, KH, BS];
//   else: [L, count, KH, BS], sums of terms over numbers; given: [L, points, KH, D], points being count or 1.
extern "C" void h2o_reduce(void* const* caches, const int64_t* blocks, const float* given, float* out, int count,
                           int layers, int heads, int size, int block, int dtype, int points, int values, int squares,
                           int over_tokens) {
  const auto run = dtype == 0 ? reduce<float> : dtype == 1 ? reduce<bf16> : reduce<f16>;
  run({caches, blocks, count, layers, heads, size, block}, given, out, points, values, squares, over_tokens);
}

// Adds to out, [L, count, of, BS], the features of tokens (h2o_vllm/calibration/features.py) times weights,
// [L, of, sources, width], `sources` being KH, or 1 of each result's own head.
extern "C" void h2o_weigh(void* const* caches, const int64_t* blocks, const float* weights, float* out, int count,
                          int layers, int heads, int size, int block, int dtype, int of, int sources, int width,
                          int rotary, int interleaved) {
  const auto run = dtype == 0 ? weigh<float> : dtype == 1 ? weigh<bf16> : weigh<f16>;
  run({caches, blocks, count, layers, heads, size, block}, weights, out, of, sources, width, rotary / 2, interleaved);
}
