// What stands between products: a norm before them, a gate after them. In vectors of the compiler's own, 16 values in the
// same order whatever the instruction set, so that all give the same bits.
#pragma once
#include <cmath>
#include <cstring>

#include "instructions.h"

namespace puna {
namespace {

#if defined(__AVX512F__)
constexpr int floats_of_vector = 16;
#elif defined(__AVX2__)
constexpr int floats_of_vector = 8;
#else
constexpr int floats_of_vector = 4;
#endif
constexpr int vectors_of_16 = 16 / floats_of_vector;

typedef float Floats __attribute__((vector_size(4 * floats_of_vector)));
typedef int32_t Wholes __attribute__((vector_size(4 * floats_of_vector)));

#define PUNA_SMALL inline __attribute__((always_inline))

PUNA_SMALL void read(Floats& v, const float* p) { memcpy(&v, p, sizeof(v)); }

// e to each of x, which is made to lie between -87 and 88; what is no number stays none.
PUNA_SMALL void exponential(Floats& x) {
  const Floats zero = {}, low = zero - 87.0f, high = zero + 88.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // x = n ln 2 + r. Adding 1.5 * 2^23 rounds to a whole number, which then lies in the lowest bits.
  constexpr float rounder = 12582912.0f, log2_e = 1.44269504f;
  const Floats shifted = x * log2_e + rounder, n = shifted - rounder;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  // The series as far as it matters for |r| <= ln 2 / 2.
  Floats sum = r * (1.0f / 720) + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  Wholes bits, power;
  const Floats origin = zero + rounder;
  Wholes origin_bits;
  memcpy(&bits, &shifted, sizeof(bits));
  memcpy(&origin_bits, &origin, sizeof(bits));
  power = (bits - origin_bits + 127) << 23;
  Floats scale;
  memcpy(&scale, &power, sizeof(scale));
  x = sum * scale;
}

PUNA_SMALL void gate_of(Gate gate, Floats& g) {
  Floats exponent = -g;
  if (gate == gate_gelu) exponent = g * (g * g * 0.044715f + 1.0f) * -1.59576912f;  // 2 sqrt(2 / pi): tanh from a sigmoid
  exponential(exponent);
  g = g / (exponent + 1.0f);
}

// Each vector of n values of so many tokens, and what is left of one at the end, by *combine* of two operands.
template <class Combine>
PUNA_SMALL void each_pair(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* y, int64_t y_stride, int64_t n,
                          int64_t n_tokens, Combine combine) {
  const int64_t whole = n / floats_of_vector * floats_of_vector;
  const size_t rest = static_cast<size_t>(n - whole) * sizeof(float);
  for (int64_t t = 0; t < n_tokens; t++, a += a_stride, b += b_stride, y += y_stride) {
    for (int64_t i = 0; i < whole; i += floats_of_vector) {
      Floats v, w;
      read(v, a + i);
      read(w, b + i);
      combine(v, w);
      memcpy(y + i, &v, sizeof(v));
    }
    if (rest) {
      Floats v = {}, w = {};
      memcpy(&v, a + whole, rest);
      memcpy(&w, b + whole, rest);
      combine(v, w);
      memcpy(y + whole, &v, rest);
    }
  }
}

template <Gate gate>
void gate_all(const float* g, const float* up, int64_t stride, float* y, int64_t y_stride, int64_t n, int64_t n_tokens) {
  each_pair(g, stride, up, stride, y, y_stride, n, n_tokens, [](Floats& v, const Floats& w) __attribute__((always_inline)) {
    gate_of(gate, v);
    v = v * w;
  });
}

void gate_values(Gate gate, const float* g, const float* up, int64_t stride, float* y, int64_t y_stride, int64_t n, int64_t n_tokens) {
  if (gate == gate_silu) gate_all<gate_silu>(g, up, stride, y, y_stride, n, n_tokens);
  else gate_all<gate_gelu>(g, up, stride, y, y_stride, n, n_tokens);
}

void add_values(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t n, int64_t n_tokens) {
  each_pair(y, y_stride, x, x_stride, y, y_stride, n, n_tokens, [](Floats& v, const Floats& w) __attribute__((always_inline)) { v = v + w; });
}

void normalise(const float* x, const float* weight, float eps, float* y, int64_t n) {
  Floats sums[vectors_of_16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int k = 0; k < vectors_of_16; k++) {
      Floats v;
      read(v, x + i + k * floats_of_vector);
      sums[k] += v * v;
    }
  float each[16];
  memcpy(each, sums, sizeof(each));
  for (; i < n; i++) each[i % 16] += x[i] * x[i];
  double sum = 0;
  for (float one : each) sum += one;
  const float factor = 1.0f / sqrtf(static_cast<float>(sum / static_cast<double>(n)) + eps);
  for (i = 0; i + floats_of_vector <= n; i += floats_of_vector) {
    Floats v, w;
    read(v, x + i);
    read(w, weight + i);
    v = v * factor * w;
    memcpy(y + i, &v, sizeof(v));
  }
  for (; i < n; i++) y[i] = x[i] * factor * weight[i];
}

}  // namespace
}  // namespace puna
