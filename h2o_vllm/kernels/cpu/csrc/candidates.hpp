// SPDX-License-Identifier: Apache-2.0
// How evictions of both kinds compare candidates.
#pragma once
#include <cstdint>
#include <cstring>

namespace h2o {

// Larger means kept first: the score, then the lower candidate number. NaN ranks with -infinity, and the
// two zeros are equal, as the reference has it.
inline uint64_t rank(float score, uint32_t candidate) {
  uint32_t u = 0x007fffff;  // -infinity, after the mapping below
  if (score == score) {
    score += 0.0f;
    std::memcpy(&u, &score, 4);
    u = u >> 31 ? ~u : u | 0x80000000u;
  }
  return uint64_t(u) << 32 | ~candidate;
}

}  // namespace h2o
