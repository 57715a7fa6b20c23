// Every so many values of a row times an orthonormal Walsh-Hadamard matrix, which is symmetric and its own inverse. In vectors of
// the compiler's own: each step adds and subtracts the same two values, so that all instruction sets give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#define PUNA_SHUFFLES_ARE_GCC_S  // older ones have no others
#endif

namespace puna {
namespace {

typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Places __attribute__((vector_size(64)));

// Those at the places that differ in one bit.
template <int bit> inline __attribute__((always_inline)) Sixteen swapped(const Sixteen& v) {
#ifdef PUNA_SHUFFLES_ARE_GCC_S
  Places other;
  for (int i = 0; i < 16; i++) other[i] = i ^ bit;
  return __builtin_shuffle(v, other);
#else
  return __builtin_shufflevector(v, v, 0 ^ bit, 1 ^ bit, 2 ^ bit, 3 ^ bit, 4 ^ bit, 5 ^ bit, 6 ^ bit, 7 ^ bit, 8 ^ bit, 9 ^ bit, 10 ^ bit,
                                 11 ^ bit, 12 ^ bit, 13 ^ bit, 14 ^ bit, 15 ^ bit);
#endif
}

// Values whose places differ in one bit, to their sum and their difference.
template <int bit> inline __attribute__((always_inline)) void turn_pairs(Sixteen& v) {
  Sixteen sign;
  for (int i = 0; i < 16; i++) sign[i] = i & bit ? -1.0f : 1.0f;
  v = swapped<bit>(v) + v * sign;
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
