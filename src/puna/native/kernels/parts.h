// How the tokens and rows of a product are cut into parts that stay in the caches.
#pragma once
#include "node.h"
#include "shares.h"

namespace puna {
namespace {

constexpr int pieces_of_thread = 16;
// Activations that all stripes of a thread pass over before the next come: they stay in its second cache.
constexpr int64_t activation_bytes = 512 << 10;

inline int64_t stripes_of(int64_t n_rows) { return (n_rows + rows_of_stripe - 1) / rows_of_stripe; }

// Tokens in equal parts, so that none is small: chunks that stay in the cache, tiles that one stripe takes at once.
struct Chunks {
  int64_t n, size, tile;

  Chunks(Rounding rounding, int64_t n_in, int64_t n_tokens) {
    const int64_t token_bytes = n_in * Activations::value_bytes(rounding);
    const int64_t most = larger(activation_bytes / token_bytes / tokens_at_once, 1) * tokens_at_once;
    n = (n_tokens + most - 1) / most;
    size = (n_tokens + n - 1) / n;
    const int64_t n_tiles = (size + tokens_at_once - 1) / tokens_at_once;
    tile = (size + n_tiles - 1) / n_tiles;
  }

  // Chunks of one tile, so that more threads find work.
  Chunks cut(int64_t n_tokens) const {
    Chunks smaller = *this;
    smaller.size = tile;
    smaller.n = (n_tokens + tile - 1) / tile;
    return smaller;
  }
};

// Where y of tokens from *first* on begins, if those before it were there too.
inline float* origin(float* y, int64_t first, int64_t stride) {
  return reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(y) - static_cast<uintptr_t>(first * stride) * sizeof(float));
}

// Stripes [begin, end) of *work* with tokens [first, first + n), which are one chunk.
inline void multiply_chunk(const Format& format, const Activations& a, const Work& work, int64_t tile) {
  const int64_t end = work.first + work.n;
  const int64_t step = work.n > tile ? 2 : work.end - work.begin;  // several tiles pass over a stripe while it is in the cache
  for (int64_t s = work.begin; s < work.end; s += step)
    for (int64_t t = work.first; t < end; t += tile) {
      Work part = work;
      part.begin = s;
      part.end = smaller(s + step, work.end);
      part.first = t;
      part.n = smaller(tile, end - t);
      chosen->multiply(format, a, part);
    }
}

}  // namespace
}  // namespace puna
