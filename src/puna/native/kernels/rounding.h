// Activations rounded as ggml rounds them, in 32 values at a time. Values::largest and Values::round are the
// instruction set: the largest magnitude of 32 values, and those times a factor to the nearest whole number.
#pragma once
#include <cstring>

#include "half.h"
#include "instructions.h"

namespace puna {
namespace {

inline void place_floats(Rounding rounding, const float* x, const Activations& a, int64_t t, int64_t begin, int64_t end) {
  for (int64_t b = begin / 32; 32 * b < end; b++) {
    const int64_t n = end - 32 * b < 32 ? end - 32 * b : 32;
    float* to = a.x + (b * a.n + t) * 32;
    if (rounding == no_rounding) memcpy(to, x + 32 * b, static_cast<size_t>(n) * sizeof(float));
    else for (int k = 0; k < n; k++) to[k] = float_of_bits(rounded_to_bfloat(bits_of_float(x[32 * b + k])));
    for (int64_t k = n; k < 32; k++) to[k] = 0;
  }
}

template <class Values> void round_activations(Rounding rounding, const float* x, const Activations& a, int64_t t, int64_t begin, int64_t end) {
  if (is_of_floats(rounding)) return place_floats(rounding, x, a, t, begin, end);
  if (rounding != blocks_of_256) {
    for (int64_t b = begin / 32; b < end / 32; b++) {
      const int64_t at = b * a.n + t;
      const float largest = Values::largest(x + 32 * b), d = largest / 127.0f;
      int sums[2];
      Values::round(x + 32 * b, largest > 0 ? 127.0f / largest : 0.0f, a.q + at * 32, sums);
      a.scale[at] = rounded_to_half(d);
      const float sum = static_cast<float>(sums[0] + sums[1]);
      a.sum[at] = rounding == blocks_of_32_summed ? rounded_to_half(d * sum) : a.scale[at] * sum;
    }
    return;
  }
  for (int64_t b = begin / 256; b < end / 256; b++) {
    const float* from = x + 256 * b;
    float largest = 0;
    for (int j = 0; j < 8; j++) {
      const float of_32 = Values::largest(from + 32 * j);
      if (!(of_32 <= largest)) largest = of_32;
      if (largest != largest) break;
    }
    const float factor = largest > 0 ? 127.0f / largest : 0.0f;
    a.scale[b * a.n + t] = factor > 0 ? 1.0f / factor : largest;  // 0, or what is no finite number
    int16_t* all = a.sums + (b * a.n + t) * Activations::sums_of_block;
    for (int j = 0; j < 8; j++) {
      int sums[2];
      Values::round(from + 32 * j, factor, a.q + ((b * 8 + j) * a.n + t) * 32, sums);
      all[2 * j] = static_cast<int16_t>(sums[0]);
      all[2 * j + 1] = static_cast<int16_t>(sums[1]);
      all[16 + j] = static_cast<int16_t>(sums[0] + sums[1]);
    }
  }
}

}  // namespace
}  // namespace puna
