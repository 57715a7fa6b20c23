#pragma once
#include <cmath>

#include "rounding.h"

namespace puna {
namespace {

struct Values {
  // As whole numbers, in the order of which what is no number comes last: it must not be lost.
  static inline float largest(const float* x) {
    uint32_t m = 0;
    for (int i = 0; i < 32; i++) {
      const uint32_t magnitude = bits_of_float(x[i]) & 0x7fffffffu;
      if (magnitude > m) m = magnitude;
    }
    return float_of_bits(m);
  }
  static inline void round(const float* x, float factor, int8_t* q, int* sums) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; i++) {
      const float v = std::nearbyint(x[i] * factor);
      q[i] = static_cast<int8_t>(v > 127.0f ? 127.0f : v >= -128.0f ? v : -128.0f);  // also what is no number
      sums[i / 16] += q[i];
    }
  }
};

}  // namespace
}  // namespace puna
