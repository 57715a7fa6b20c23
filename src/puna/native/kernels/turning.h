// Every so many values of a row times an orthonormal Walsh-Hadamard matrix, which is symmetric and its own inverse. In vectors of
// the compiler's own: each step adds and subtracts the same two values, so that all instruction sets give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace puna {
namespace {

typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Places __attribute__((vector_size(64)));

// Values whose places differ in one bit, to their sum and their difference.
template <int bit> inline __attribute__((always_inline)) void turn_pairs(Sixteen& v) {
  Places other;
  Sixteen sign;
  for (int i = 0; i < 16; i++) other[i] = i ^ bit, sign[i] = i & bit ? -1.0f : 1.0f;
  v = __builtin_shuffle(v, other) + v * sign;
}

// *width*: a power of two from 16 on that divides n.
inline void turn_values(float* x, int64_t n, int64_t width) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  for (int64_t i = 0; i < n; i += 16) {
    Sixteen v;
    memcpy(&v, x + i, sizeof(v));
    turn_pairs<1>(v);
    turn_pairs<2>(v);
    turn_pairs<4>(v);
    turn_pairs<8>(v);
    v = v * scale;
    memcpy(x + i, &v, sizeof(v));
  }
  for (int64_t apart = 16; apart < width; apart *= 2)
    for (int64_t begin = 0; begin < n; begin += 2 * apart)
      for (int64_t i = begin; i < begin + apart; i += 16) {
        Sixteen a, b;
        memcpy(&a, x + i, sizeof(a));
        memcpy(&b, x + i + apart, sizeof(b));
        const Sixteen sum = a + b, difference = a - b;
        memcpy(x + i, &sum, sizeof(sum));
        memcpy(x + i + apart, &difference, sizeof(difference));
      }
}

}  // namespace
}  // namespace puna
