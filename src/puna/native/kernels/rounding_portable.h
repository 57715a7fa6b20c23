#pragma once
#include <cmath>

#include "rounding.h"

namespace puna {
namespace {

struct Values {
  static inline float largest(const float* x) {
    float m = 0;
    for (int i = 0; i < 32; i++) m = std::fabs(x[i]) > m ? std::fabs(x[i]) : m;
    return m;
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
