// What one instruction set offers to the rest of the library.
#pragma once
#include <cstdint>

#include "activations.h"
#include "attention.h"
#include "formats.h"

namespace puna {

// Stripes [begin, end) of a packed matrix times tokens [first, first + n), to y[t * y_stride + row], or y[columns[t] * y_stride +
// row]; the last stripe may have fewer than 16 rows.
struct Work {
  const uint8_t* weights;
  int64_t n_rows, begin, end, first, n;
  float* y;
  int64_t y_stride;
  const int32_t* columns = nullptr;
};

// What a gate's values become before they are multiplied with the others.
enum Gate : int { gate_none = 0, gate_silu = 1, gate_gelu = 2 };

struct Instructions {
  const char* name;
  bool (*available)();
  // Token t's values [begin, end), multiples of 256 or 32, at x.
  void (*round)(Rounding, const float* x, const Activations&, int64_t t, int64_t begin, int64_t end);
  void (*multiply)(const Format&, const Activations&, const Work&);
  // Of n values of each of so many tokens, which lie strides apart: x added to y, and gate(g) * up.
  void (*add)(const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t n, int64_t n_tokens);
  void (*gate)(Gate, const float* g, const float* up, int64_t stride, float* y, int64_t y_stride, int64_t n, int64_t n_tokens);
  // N values over their root mean square, times weight.
  void (*normalise)(const float* x, const float* weight, float eps, float* y, int64_t n);
  // Multiply-adds of bytes from registers alone, so many times over; how many that were.
  int64_t (*exercise)(int64_t times);
  const AttentionInstructions* attention;
};

constexpr int tokens_at_once = 64;  // the most that multiply takes

extern const Instructions portable_instructions;
#if defined(__x86_64__)
extern const Instructions avx2_instructions, avx_vnni_instructions, avx512_instructions, avx512_vnni_instructions,
    avx512_bf16_instructions, amx_instructions;
#elif defined(__aarch64__)
extern const Instructions neon_instructions, neon_dot_instructions, neon_i8mm_instructions;
#endif

}  // namespace puna
