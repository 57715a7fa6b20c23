// Half precision in plain arithmetic.
#pragma once
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace puna {

static inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float from_half(half value) {
  const uint32_t sign = (value & 0x8000u) << 16, exponent = value >> 10 & 31, fraction = value & 1023;
  if (exponent == 0) {  // a multiple of 2^-24
    const float small = static_cast<float>(fraction) * (1.0f / (1 << 24));
    return sign ? -small : small;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return float_of_bits(sign | wide << 23 | fraction << 13);
}

// The nearest value that half precision has, ties to even. What is too large for it stays as it is: a scale must not
// become infinite.
static inline float rounded_to_half(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) return value;  // 65520: would become infinite
  if (magnitude < 0x38800000u) {               // 2^-14: below, steps are 2^-24
    const float shift = (bits >> 31) ? -0.5f : 0.5f;  // steps of a float between 1/2 and 1 are 2^-24
    volatile float sum = value + shift;               // volatile: nothing may simplify the two sums to nothing
    return sum - shift;
  }
  return float_of_bits((bits + 0x0fffu + (bits >> 13 & 1)) & 0xffffe000u);
}

// The nearest of the floats whose lower half is zero, ties to even; what is no number stays none.
static inline uint32_t rounded_to_bfloat(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits | 0x400000u) & 0xffff0000u;
  return (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
}

}  // namespace puna
