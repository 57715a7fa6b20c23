// Activations as the products read them, most of them rounded to 8 bits: of each 32 values of the input, those of all tokens
// together.
#pragma once
#include <cstdint>

#include "formats.h"

namespace puna {

// Views of one block of memory for n tokens of n_in values. Token t's values 32 b .. 32 b + 31 are at q[(b n + t) 32], or
// at x for weights that are floats, of which the last 32 may have zeros at their end.
struct Activations {
  int64_t n, n_in;
  int8_t* q;
  float* x;           // or pairs of bfloats, where an instruction set multiplies those
  float* scale;       // [n_in / 32 or 256][n]
  float* sum;         // blocks of 32: scale times sum of the 32, [n_in / 32][n]
  int16_t* sums;      // blocks of 256: sums of each 16, then of each 32: [n_in / 256][n][16 + 8]

  static constexpr int sums_of_block = 24;

  static int64_t whole(int64_t n_in) { return (n_in + 31) / 32 * 32; }
  static int64_t aligned(int64_t bytes) { return (bytes + line - 1) / line * line; }
  static int64_t value_bytes(Rounding rounding) { return is_of_floats(rounding) ? 4 : 1; }
  static int64_t bytes(Rounding rounding, int64_t n_in, int64_t n) {
    if (is_of_floats(rounding)) return aligned(4 * whole(n_in) * n);
    if (rounding == blocks_of_256)
      return aligned(n_in * n) + aligned(n_in / 256 * n * 4) + aligned(n_in / 256 * n * 2 * sums_of_block);
    return aligned(n_in * n) + 2 * aligned(n_in / 32 * n * 4);
  }
  Activations(Rounding rounding, int64_t n_in, int64_t n, void* memory) : n(n), n_in(whole(n_in)) {
    char* at = static_cast<char*>(memory);
    q = reinterpret_cast<int8_t*>(at);
    x = reinterpret_cast<float*>(at);
    at += aligned(n_in * n);
    scale = reinterpret_cast<float*>(at);
    at += aligned(n_in / (rounding == blocks_of_256 ? 256 : 32) * n * 4);
    sum = reinterpret_cast<float*>(at);
    sums = reinterpret_cast<int16_t*>(at);
  }
};

}  // namespace puna
