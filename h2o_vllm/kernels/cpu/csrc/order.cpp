// SPDX-License-Identifier: Apache-2.0
// The order of scores, best first. Called through ctypes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "vec.hpp"

namespace {

using namespace h2o;

constexpr int BITS = 11, BUCKETS = 1 << BITS, PASSES = 3;
constexpr int FEW = 64;  // so many are sorted faster without buckets

struct Token {
  uint32_t key;  // ascends as scores descend
  int32_t at;
};

// NaN comes first and -0 is 0, as for torch.
H2O_INLINE uint32_t descending(float score) {
  if (std::isnan(score)) return 0;
  const uint32_t bits = as_bits(score + 0.f);
  return bits & 0x80000000u ? bits : 0x7fffffffu - bits;
}

// One row; equal scores keep their order. tokens, other: scratch, [count].
void sort(const float* scores, int count, Token* tokens, Token* other, int64_t* out) {
  for (int i = 0; i < count; ++i) tokens[i] = {descending(scores[i]), i};
  if (count <= FEW) {
    std::stable_sort(tokens, tokens + count, [](const Token& a, const Token& b) { return a.key < b.key; });
    for (int i = 0; i < count; ++i) out[i] = tokens[i].at;
    return;
  }
  int32_t begins[PASSES][BUCKETS] = {};
  auto bucket_of = [](const Token& token, int pass) { return (token.key >> (BITS * pass)) & (BUCKETS - 1); };
  for (int i = 0; i < count; ++i)
    for (int pass = 0; pass < PASSES; ++pass) ++begins[pass][bucket_of(tokens[i], pass)];
  for (int32_t* begin : begins) {
    int32_t sum = 0;
    for (int bucket = 0; bucket < BUCKETS; ++bucket) sum += std::exchange(begin[bucket], sum);
  }
  for (int pass = 0; pass < PASSES - 1; ++pass, std::swap(tokens, other))
    for (int i = 0; i < count; ++i) other[begins[pass][bucket_of(tokens[i], pass)]++] = tokens[i];
  for (int i = 0; i < count; ++i) out[begins[PASSES - 1][bucket_of(tokens[i], PASSES - 1)]++] = tokens[i].at;
}

}  // namespace

// scores, out: [rows, count].
extern "C" void h2o_order(const float* scores, int64_t* out, int64_t rows, int count) {
#pragma omp parallel if (rows * count > 64)
  {
    std::vector<Token> tokens(count), other(count);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row)
      sort(scores + row * count, count, tokens.data(), other.data(), out + row * count);
  }
}
