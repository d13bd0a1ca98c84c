// SPDX-License-Identifier: Apache-2.0
// Compaction and score reset, all layers in one call. Called through ctypes.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "candidates.hpp"

namespace {

using namespace h2o;

template <class Word>
void move(Word* page, const Word* from, int to, int at, int size, int block) {
  for (int d = 0; d < size; ++d) page[d * block + to] = from[d * block + at];
  const int64_t values = int64_t(size) * block;
  std::memcpy(page + values + int64_t(to) * size, from + values + int64_t(at) * size, size * sizeof(Word));
}

template <class Word>
void compact_head(Word* cache, float* scores, const int32_t* order, int heavy, int total, int heads, int head,
                  int size, int block) {
  const int room = heavy * block, count = total * block;
  auto page = [&](int c) { return cache + (int64_t(order[c / block]) * heads + head) * 2 * size * block; };
  auto score = [&](int c) { return scores + (int64_t(order[c / block]) * heads + head) * block + c % block; };
  std::vector<uint64_t> ranks(count);
  for (int c = 0; c < count; ++c) ranks[c] = rank(*score(c), c);
  std::vector<uint64_t> sorted(ranks);
  std::nth_element(sorted.begin(), sorted.begin() + room - 1, sorted.end(), std::greater<uint64_t>());
  const uint64_t bar = sorted[room - 1];
  for (int c = room, target = 0; c < count; ++c) {
    if (ranks[c] < bar) continue;
    while (ranks[target] >= bar) ++target;
    move(page(target), page(c), target % block, c % block, size, block);
    *score(target++) = *score(c);
  }
}

}  // namespace

// caches: L pointers to [N, KH, 2 * D * BS] words of `width` bytes; scores: [L, N, KH, BS];
// order: [total] block ids, the first `heavy` of which are written.
extern "C" void h2o_compact(void* const* caches, float* scores, const int32_t* order, int heavy, int total,
                            int layers, int64_t blocks, int heads, int size, int block, int width) {
#pragma omp parallel for schedule(dynamic) if (layers * heads > 1 && total * block > 256)
  for (int i = 0; i < layers * heads; ++i) {
    const int layer = i / heads, head = i % heads;
    float* mine = scores + layer * blocks * heads * block;
    if (width == 2) compact_head((uint16_t*)caches[layer], mine, order, heavy, total, heads, head, size, block);
    else compact_head((uint32_t*)caches[layer], mine, order, heavy, total, heads, head, size, block);
  }
}

// slots: [n], block_id * BS + offset, negative ones skipped.
extern "C" void h2o_reset(float* scores, const int64_t* slots, int64_t n, int layers, int64_t blocks, int heads,
                          int block) {
  for (int layer = 0; layer < layers; ++layer)
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] < 0) continue;
      float* to = scores + (layer * blocks + slots[i] / block) * heads * block + slots[i] % block;
      for (int head = 0; head < heads; ++head) to[head * block] = 0.f;
    }
}
