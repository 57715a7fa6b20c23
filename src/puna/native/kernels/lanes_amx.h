// Tiles of AMX for many tokens: sums of whole numbers are those of AVX-512 VNNI, and so is all that is done with them.
//
// Eight lines of a stripe, unpacked, are the second tile as they are, and so are the activations of 16 tokens the first.
#pragma once
#include "lanes_avx512.h"
#include "tiles.h"

namespace puna {
namespace {

struct TileLanes : Lanes {
  static constexpr int most_tokens_in_registers = 0;
};

constexpr int rows_of_tile = 16;

inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

template <int bits> struct Products<TileLanes, bits, true> : Products<Lanes, bits, true> {
  using Base = Products<Lanes, bits, true>;
  using typename Base::Factor;
  using typename Base::I;
  using typename Base::Sum;
  struct Weights {
    I w[8];
    alignas(line) int32_t sums[2][tokens_at_once][rows_of_stripe];
  };
  enum : int { sums, sums_of_rest, tokens, rest, weights };  // tiles

  // For n tokens: 16 at a time, and the rest.
  static void shape(int64_t n, int parts) {
    TileShapes shapes;
    shapes.set(sums, n / rows_of_tile ? rows_of_tile : 0, line);
    shapes.set(sums_of_rest, n % rows_of_tile, line);
    shapes.set(tokens, n / rows_of_tile ? rows_of_tile : 0, 32 / parts);
    shapes.set(rest, n % rows_of_tile, 32 / parts);
    shapes.set(weights, 8 / parts, line);
    shape_tiles(shapes);
  }
  static PUNA_INLINE void prepare(Weights&) {}

  template <int parts> static PUNA_INLINE void multiply_all(Weights& of, const int8_t* x, int n) {
    alignas(line) uint8_t lines[8][line];
    PUNA_UNROLL for (int g = 0; g < 8; g++) _mm512_store_si512(lines[g], of.w[g]);
    PUNA_UNROLL for (int part = 0; part < parts; part++) {
      load_tile<weights>(lines[part * 8 / parts], line);
      const int8_t* from = x + part * 32 / parts;
      int t = 0;
      for (; t + rows_of_tile <= n; t += rows_of_tile) {
        load_tile<tokens>(from + 32 * t, 32);
        zero_tile<sums>();
        multiply_bytes<sums, tokens, weights>();
        store_tile<sums>(of.sums[part][t], line);
      }
      if (t == n) continue;
      load_tile<rest>(from + 32 * t, 32);
      zero_tile<sums_of_rest>();
      multiply_bytes<sums_of_rest, rest, weights>();
      store_tile<sums_of_rest>(of.sums[part][t], line);
    }
  }
  template <int N, int M, int first, int groups, int apart>
  static PUNA_INLINE void add(const Weights* w, const int8_t*, int t, const Factor* factors, Sum* to) {
    static_assert(N == 1 && M == 1, "");
    to[0] = Lanes::multiply_add(Lanes::to_float(Lanes::load(w[0].sums[first / 4][t])), factors[0], to[0]);
  }
  template <int N, int M> static PUNA_INLINE void plain(const Weights* w, const int8_t*, int t, typename Lanes::F (*to)[N]) {
    static_assert(N == 1 && M == 1, "");
    to[0][0] = Lanes::to_float(Lanes::load(w[0].sums[0][t]));
  }
};

inline void multiply_in_tiles(const Format& format, const Activations& a, const Work& work) {
  const bool in_halves = format.type == type_q2_k || format.type == type_q3_k || format.type == type_q6_k;  // factors of 16 weights
  Products<TileLanes, 8>::shape(work.n, in_halves ? 2 : 1);
  multiply_quantised<TileLanes>(format, a, work);
  release_tiles();
}

// Two stripes by 32 tokens at a time; a token's sums are the same with any number of tokens beside it.
inline void multiply_bfloats_in_tiles(const Format& format, const Activations& a, const Work& work) {
  enum : int { sums, sums_of_second, tokens, sums_of_more, second_of_more, more, weights, weights_of_second };  // tiles
  const int64_t bytes = stripe_bytes(format, a.n_in), n_groups = (work.n + 2 * rows_of_tile - 1) / (2 * rows_of_tile);
  int64_t shaped = 0;
  for (int64_t s = work.begin; s < work.end; s += 2) {
    const bool has_second = s + 1 < work.end;
    const int64_t row = s * rows_of_stripe;
    for (int64_t group = 0; group < n_groups; group++) {
      const int64_t begin = work.n * group / n_groups, n = work.n * (group + 1) / n_groups - begin, first = work.first + begin;
      const int64_t n_first = least_of(n, rows_of_tile), n_more = n - n_first;
      if (shaped != n) {
        TileShapes shapes;
        for (int tile = sums; tile <= weights_of_second; tile++)
          shapes.set(tile, tile <= tokens ? n_first : tile <= more ? n_more : rows_of_tile, line);
        shape_tiles(shapes);
        shaped = n;
      }
      zero_tile<sums>();
      if (has_second) zero_tile<sums_of_second>();
      if (n_more) zero_tile<sums_of_more>();
      if (n_more && has_second) zero_tile<second_of_more>();
      const PackedBF16* blocks = reinterpret_cast<const PackedBF16*>(work.weights + s * bytes);
      const PackedBF16* second = reinterpret_cast<const PackedBF16*>(work.weights + (s + 1) * bytes);
      constexpr int64_t apart = 32 * sizeof(float);  // activations of two tokens
      for (int64_t b = 0; b < a.n_in / 32; b++) {
        const float* x = a.x + (b * a.n + first) * 32;
        fetch_ahead<sizeof(PackedBF16)>(blocks + b);
        load_tile<weights>(blocks + b, line);
        load_tile<tokens>(x, apart);
        multiply_pairs_of_bfloats<sums, tokens, weights>();
        if (n_more) {
          load_tile<more>(x + 32 * n_first, apart);
          multiply_pairs_of_bfloats<sums_of_more, more, weights>();
        }
        if (!has_second) continue;
        fetch_ahead<sizeof(PackedBF16)>(second + b);
        load_tile<weights_of_second>(second + b, line);
        multiply_pairs_of_bfloats<sums_of_second, tokens, weights_of_second>();
        if (n_more) multiply_pairs_of_bfloats<second_of_more, more, weights_of_second>();
      }
      alignas(line) float found[4][rows_of_tile][rows_of_stripe];
      store_tile<sums>(found[0], line);
      if (has_second) store_tile<sums_of_second>(found[1], line);
      if (n_more) store_tile<sums_of_more>(found[2], line);
      if (n_more && has_second) store_tile<second_of_more>(found[3], line);
      for (int i = 0; i < 2; i++) {
        const int64_t n_rows = least_of(work.n_rows - row - i * rows_of_stripe, rows_of_stripe);
        if (i && !has_second) break;
        Tile tile{nullptr, 0, 0, 0, work.y + row + i * rows_of_stripe, work.y_stride, nullptr, static_cast<int>(n_rows)};
        if (work.columns) tile.columns = work.columns + first;
        else tile.y += first * work.y_stride;
        for (int64_t t = 0; t < n; t++) {
          const auto values = _mm512_load_ps(found[t < n_first ? i : 2 + i][t < n_first ? t : t - n_first]);
          write<Lanes, 1>(tile, static_cast<int>(t), &values);
        }
      }
    }
  }
  release_tiles();
}

}  // namespace
}  // namespace puna
