// The products: one algorithm for every format, number of tokens and instruction set.
//
// Of one or two stripes, 32 weights of each row are unpacked into registers and stay there while the tokens pass. With few
// tokens the sums are in registers too (T tokens, known when compiled), more are taken in equal parts; where registers are few,
// the sums of many tokens are in the first cache (T = 0), and weights are unpacked once for all of them.
//
// Lanes is the instruction set: registers I of four bytes, or one whole number, of L::width rows, and F of floats. Those that
// multiply bytes and add up four products in one instruction have dot4, which is told how many bits weights have. The others have add_pairs, which adds two products
// in 16 bits and saturates; as many of those are added in 16 bits as fit, and the factor of a block of weights is what they
// are multiplied with when they are added in pairs to 32 bits.
//
// Everything here is compiled once per instruction set: it has no name that the linker could share between them.
#pragma once
#include <type_traits>

#include "instructions.h"

#define PUNA_INLINE inline __attribute__((always_inline))
#define PUNA_INLINE_LAMBDA __attribute__((always_inline))
#ifdef PUNA_PLAIN_LOOPS
#define PUNA_UNROLL
#else
#define PUNA_UNROLL _Pragma("GCC unroll 16")
#endif

namespace puna {
namespace {

// ---- weights in registers. at: the byte of a line where a register's rows begin.

template <class L> PUNA_INLINE void nibbles_of(const uint8_t (*q)[line], int at, typename L::I* w) {
  PUNA_UNROLL for (int l = 0; l < 4; l++) {
    const auto v = L::load(q[l] + at);
    w[l] = L::low_nibbles(v);
    w[l + 4] = L::high_nibbles(v);
  }
}

template <class L, int g> PUNA_INLINE typename L::I fifth_bit(typename L::I h) {
  if constexpr (g < 4) return L::both(L::template left<4 - g>(h), L::bytes(0x10));
  else return L::both(L::template right<g - 4>(h), L::bytes(0x10));
}

template <class L, int g = 0> PUNA_INLINE void add_fifth_bits(typename L::I h, typename L::I* w) {
  if constexpr (g < 8) {
    w[g] = L::either(w[g], fifth_bit<L, g>(h));
    add_fifth_bits<L, g + 1>(h, w);
  }
}

alignas(16) constexpr uint8_t nonlinear_table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t fourbits_table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <class L> PUNA_INLINE void pairs_of_bits(const uint8_t (*q)[line], int at, typename L::I* w) {
  const auto mask = L::bytes(3);
  PUNA_UNROLL for (int i = 0; i < 2; i++) {
    const auto v = L::load(q[i] + at);
    w[i] = L::both(v, mask);
    w[i + 2] = L::both(L::template right<2>(v), mask);
    w[i + 4] = L::both(L::template right<4>(v), mask);
    w[i + 6] = L::both(L::template right<6>(v), mask);
  }
}

template <class L, int g = 0> PUNA_INLINE void add_third_bits(typename L::I h, typename L::I* w) {
  if constexpr (g < 8) {
    const auto moved = [&] {
      if constexpr (g < 2) return L::template left<2 - g>(h);
      else if constexpr (g == 2) return h;
      else return L::template right<g - 2>(h);
    }();
    w[g] = L::either(w[g], L::both(moved, L::bytes(4)));
    add_third_bits<L, g + 1>(h, w);
  }
}

template <class L> PUNA_INLINE void look_up(const uint8_t* table, typename L::I* w) {
  const auto values = L::table(table);
  PUNA_UNROLL for (int g = 0; g < 8; g++) w[g] = L::look_up(values, w[g]);
}

// ---- formats. bits: of a weight without sign. offset: what is subtracted from it; where there is none, there are minima.

struct Q4_0 {
  using Packed = PackedQ4_0;
  static constexpr Type type = type_q4_0;
  static constexpr int bits = 4, parts = 2, offset = 8;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int part, int at, typename L::I* w) {
    nibbles_of<L>(p.q[part], at, w);
  }
  template <class L> static PUNA_INLINE typename L::F scale(const Packed& p, int part, int row) { return L::load_half(p.d[part] + row); }
};

struct IQ4_NL : Q4_0 {
  static constexpr Type type = type_iq4_nl;
  static constexpr int bits = 8, offset = 128;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int part, int at, typename L::I* w) {
    nibbles_of<L>(p.q[part], at, w);
    look_up<L>(nonlinear_table, w);
  }
};

struct Q4_1 {
  using Packed = PackedQ4_1;
  static constexpr Type type = type_q4_1;
  static constexpr int bits = 4, parts = 1, offset = 0;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int, int at, typename L::I* w) {
    nibbles_of<L>(p.q, at, w);
  }
  template <class L> static PUNA_INLINE typename L::F scale(const Packed& p, int, int row) { return L::load_half(p.d + row); }
  static PUNA_INLINE const half* minimum(const Packed& p) { return p.m; }
};

struct Q5_0 {
  using Packed = PackedQ5_0;
  static constexpr Type type = type_q5_0;
  static constexpr int bits = 5, parts = 2, offset = 16;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int part, int at, typename L::I* w) {
    nibbles_of<L>(p.q[part], at, w);
    add_fifth_bits<L>(L::load(p.h[part] + at), w);
  }
  template <class L> static PUNA_INLINE typename L::F scale(const Packed& p, int part, int row) { return L::load_half(p.d[part] + row); }
};

struct Q5_1 {
  using Packed = PackedQ5_1;
  static constexpr Type type = type_q5_1;
  static constexpr int bits = 5, parts = 1, offset = 0;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int, int at, typename L::I* w) {
    nibbles_of<L>(p.q, at, w);
    add_fifth_bits<L>(L::load(p.h + at), w);
  }
  template <class L> static PUNA_INLINE typename L::F scale(const Packed& p, int, int row) { return L::load_half(p.d + row); }
  static PUNA_INLINE const half* minimum(const Packed& p) { return p.m; }
};

struct Q8_0 {
  using Packed = PackedQ8_0;
  static constexpr Type type = type_q8_0;
  static constexpr int bits = 8, parts = 2, offset = 128;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int part, int at, typename L::I* w) {
    PUNA_UNROLL for (int g = 0; g < 8; g++) w[g] = L::load(p.q[part][g] + at);
  }
  template <class L> static PUNA_INLINE typename L::F scale(const Packed& p, int part, int row) { return L::load_half(p.d[part] + row); }
};

struct MXFP4 {
  using Packed = PackedMXFP4;
  static constexpr Type type = type_mxfp4;
  static constexpr int bits = 5, parts = 4, offset = 12;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int part, int at, typename L::I* w) {
    nibbles_of<L>(p.q[part], at, w);
    look_up<L>(fourbits_table, w);
  }
  // 2^(e - 128), which may be smaller than what a float's exponent can say: the product of two that it can.
  template <class L> static PUNA_INLINE typename L::F scale(const Packed& p, int part, int row) {
    const auto e = L::load_u8(p.e[part] + row), first = L::template right32<1>(e), second = L::less(e, first), bias = L::whole(63);
    return L::times(L::as_float(L::template left32<23>(L::add(first, bias))), L::as_float(L::template left32<23>(L::add(second, bias))));
  }
};

// Of blocks of 256: factors of each 32 or 16 weights; what is subtracted are sums of activations times whole numbers (of
// which there are as many as sums), times one number of the row.
struct Q2_K {
  using Packed = PackedQ2_K;
  static constexpr Type type = type_q2_k;
  static constexpr int bits = 4, factors = 16, sums = 16, first_sum = 0;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int j, int at, typename L::I* w) {
    pairs_of_bits<L>(p.q[j], at, w);
  }
  template <class L> static PUNA_INLINE typename L::I factor(const Packed& p, int i, int row) {
    return L::both(L::load_u8(p.s[i] + row), L::whole(15));
  }
  template <class L> static PUNA_INLINE typename L::I taken(const Packed& p, int i, int row) {
    return L::template right32<4>(L::load_u8(p.s[i] + row));
  }
  template <class L> static PUNA_INLINE typename L::F taken_scale(const Packed& p, int row) { return L::load_half(p.m + row); }
};

struct Q3_K {
  using Packed = PackedQ3_K;
  static constexpr Type type = type_q3_k;
  static constexpr int bits = 4, factors = 16, sums = 16, first_sum = 0;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int j, int at, typename L::I* w) {
    pairs_of_bits<L>(p.q[j], at, w);
    add_third_bits<L>(L::load(p.h[j] + at), w);
  }
  template <class L> static PUNA_INLINE typename L::I factor(const Packed& p, int i, int row) { return L::load_i8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::I taken(const Packed& p, int i, int row) { return L::load_i8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::F taken_scale(const Packed& p, int row) {
    return L::times(L::load_half(p.d + row), L::set(4.0f));
  }
};

struct Q4_K {
  using Packed = PackedQ4_K;
  static constexpr Type type = type_q4_k;
  static constexpr int bits = 4, factors = 8, sums = 8, first_sum = 16;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int j, int at, typename L::I* w) {
    nibbles_of<L>(p.q[j], at, w);
  }
  template <class L> static PUNA_INLINE typename L::I factor(const Packed& p, int i, int row) { return L::load_u8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::I taken(const Packed& p, int i, int row) { return L::load_u8(p.t[i] + row); }
  template <class L> static PUNA_INLINE typename L::F taken_scale(const Packed& p, int row) { return L::load_half(p.m + row); }
};

struct Q5_K {
  using Packed = PackedQ5_K;
  static constexpr Type type = type_q5_k;
  static constexpr int bits = 5, factors = 8, sums = 8, first_sum = 16;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int j, int at, typename L::I* w) {
    nibbles_of<L>(p.q[j], at, w);
    add_fifth_bits<L>(L::load(p.h[j] + at), w);
  }
  template <class L> static PUNA_INLINE typename L::I factor(const Packed& p, int i, int row) { return L::load_u8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::I taken(const Packed& p, int i, int row) { return L::load_u8(p.t[i] + row); }
  template <class L> static PUNA_INLINE typename L::F taken_scale(const Packed& p, int row) { return L::load_half(p.m + row); }
};

struct Q6_K {
  using Packed = PackedQ6_K;
  static constexpr Type type = type_q6_k;
  static constexpr int bits = 6, factors = 16, sums = 16, first_sum = 0;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int j, int at, typename L::I* w) {
    nibbles_of<L>(p.q[j], at, w);
    const auto mask = L::bytes(0x30);
    PUNA_UNROLL for (int i = 0; i < 2; i++) {
      const auto h = L::load(p.h[j][i] + at);
      w[i] = L::either(w[i], L::both(L::template left<4>(h), mask));
      w[i + 2] = L::either(w[i + 2], L::both(L::template left<2>(h), mask));
      w[i + 4] = L::either(w[i + 4], L::both(h, mask));
      w[i + 6] = L::either(w[i + 6], L::both(L::template right<2>(h), mask));
    }
  }
  template <class L> static PUNA_INLINE typename L::I factor(const Packed& p, int i, int row) { return L::load_i8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::I taken(const Packed& p, int i, int row) { return L::load_i8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::F taken_scale(const Packed& p, int row) {
    return L::times(L::load_half(p.d + row), L::set(32.0f));
  }
};

struct IQ4_XS {
  using Packed = PackedIQ4_XS;
  static constexpr Type type = type_iq4_xs;
  static constexpr int bits = 8, factors = 8, sums = 8, first_sum = 16;
  template <class L> static PUNA_INLINE void unpack(const Packed& p, int j, int at, typename L::I* w) {
    nibbles_of<L>(p.q[j], at, w);
    look_up<L>(nonlinear_table, w);
  }
  template <class L> static PUNA_INLINE typename L::I factor(const Packed& p, int i, int row) { return L::load_i8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::I taken(const Packed& p, int i, int row) { return L::load_i8(p.s[i] + row); }
  template <class L> static PUNA_INLINE typename L::F taken_scale(const Packed& p, int row) {
    return L::times(L::load_half(p.d + row), L::set(128.0f));
  }
};

// ---- sums of weights times activations, times a factor per block of weights

template <class L, int bits, bool dots = L::has_dot4> struct Products;

// With dot4: sums of whole numbers, made floats to be multiplied with the factor.
template <class L, int bits> struct Products<L, bits, true> {
  using I = typename L::I;
  using Sum = typename L::F;
  using Factor = typename L::F;
  static constexpr bool in_halves = false;
  struct Weights { I w[8]; };

  static PUNA_INLINE void prepare(Weights&) {}
  // Where an instruction set multiplies many tokens at once: with the weights' parts, which have factors of their own.
  template <int parts> static PUNA_INLINE void multiply_all(Weights&, const int8_t*, int) {}
  static PUNA_INLINE Sum zero() { return L::set(0.0f); }
  static PUNA_INLINE Factor factor(I whole) { return L::to_float(whole); }
  static PUNA_INLINE typename L::F value(Sum sum) { return sum; }

  // For N registers of weights and M tokens the sums of `groups` groups of four from `first` on.
  template <int N, int M, int first, int groups> static PUNA_INLINE void dot(const Weights* w, const int8_t* x, I (*sums)[N]) {
    PUNA_UNROLL for (int t = 0; t < M; t++)
      PUNA_UNROLL for (int i = 0; i < N; i++) sums[t][i] = L::zero();
    PUNA_UNROLL for (int g = first; g < first + groups; g++) {
      I v[M];
      PUNA_UNROLL for (int t = 0; t < M; t++) v[t] = L::four(x + 32 * t + 4 * g);
      PUNA_UNROLL for (int i = 0; i < N; i++)
        PUNA_UNROLL for (int t = 0; t < M; t++) sums[t][i] = L::template dot4<bits>(sums[t][i], w[i].w[g], v[t]);
    }
  }
  // To the sums of M tokens from t0 on, which are so many apart.
  template <int N, int M, int first, int groups, int apart>
  static PUNA_INLINE void add(const Weights* w, const int8_t* x, int t0, const Factor* factors, Sum* sums) {
    I whole[M][N];
    dot<N, M, first, groups>(w, x + 32 * t0, whole);
    PUNA_UNROLL for (int t = 0; t < M; t++)
      PUNA_UNROLL for (int i = 0; i < N; i++)
        sums[t * apart + i] = L::multiply_add(L::to_float(whole[t][i]), factors[i], sums[t * apart + i]);
  }
  template <int N, int M> static PUNA_INLINE void plain(const Weights* w, const int8_t* x, int t0, typename L::F (*sums)[N]) {
    I whole[M][N];
    dot<N, M, 0, 8>(w, x + 32 * t0, whole);
    PUNA_UNROLL for (int t = 0; t < M; t++)
      PUNA_UNROLL for (int i = 0; i < N; i++) sums[t][i] = L::to_float(whole[t][i]);
  }
};

// Without: products of pairs are at most 2 * 127 * (2^bits - 1), and 16 bits hold 8, 4 or 2 of those; weights of 8 bits are
// two of 4.
template <class L, int bits> struct Products<L, bits, false> {
  using I = typename L::I;
  using Sum = I;
  using Factor = I;  // in both halves of 32 bits
  static constexpr bool in_halves = bits > 6;
  static constexpr int together = bits == 5 ? 4 : bits == 6 ? 2 : 8;
  struct Weights { I w[in_halves ? 16 : 8]; };

  static PUNA_INLINE void prepare(Weights& weights) {
    if constexpr (in_halves) {
      PUNA_UNROLL for (int g = 0; g < 8; g++) {
        weights.w[g + 8] = L::high_nibbles(weights.w[g]);
        weights.w[g] = L::low_nibbles(weights.w[g]);
      }
    }
  }
  template <int parts> static PUNA_INLINE void multiply_all(Weights&, const int8_t*, int) {}
  static PUNA_INLINE Sum zero() { return L::zero(); }
  static PUNA_INLINE Factor factor(I whole) { return L::pairs(whole, whole); }
  static PUNA_INLINE typename L::F value(Sum sum) { return L::to_float(sum); }

  // To the sums of M tokens from t0 on, which are so many apart.
  template <int N, int M, int first, int groups, int apart>
  static PUNA_INLINE void add(const Weights* w, const int8_t* of_tokens, int t0, const Factor* factors, Sum* sums) {
    const int8_t* x = of_tokens + 32 * t0;
    constexpr int step = together < groups ? together : groups;
    PUNA_UNROLL for (int begin = first; begin < first + groups; begin += step) {
      I low[M][N], high[M][N];
      PUNA_UNROLL for (int g = begin; g < begin + step; g++) {
        I v[M];
        PUNA_UNROLL for (int t = 0; t < M; t++) v[t] = L::four(x + 32 * t + 4 * g);
        PUNA_UNROLL for (int i = 0; i < N; i++)
          PUNA_UNROLL for (int t = 0; t < M; t++) {
            const auto p = L::add_pairs(w[i].w[g], v[t]);
            low[t][i] = g == begin ? p : L::add16(low[t][i], p);
            if constexpr (M > 1) L::keep(low[t][i]);  // now: all products first and then all sums is more than there are registers for
            if constexpr (in_halves) {
              const auto q = L::add_pairs(w[i].w[g + 8], v[t]);
              high[t][i] = g == begin ? q : L::add16(high[t][i], q);
              if constexpr (M > 1) L::keep(high[t][i]);
            }
          }
      }
      PUNA_UNROLL for (int t = 0; t < M; t++)
        PUNA_UNROLL for (int i = 0; i < N; i++) {
          Sum& sum = sums[t * apart + i];
          sum = L::add(sum, L::multiply_pairs(low[t][i], factors[i]));
          if constexpr (in_halves) sum = L::add(sum, L::multiply_pairs(high[t][i], L::template left<4>(factors[i])));
        }
    }
  }
  template <int N, int M> static PUNA_INLINE void plain(const Weights* w, const int8_t* x, int t0, typename L::F (*sums)[N]) {
    I whole[M][N], ones[N];
    PUNA_UNROLL for (int i = 0; i < N; i++) {
      ones[i] = L::words(1);
      PUNA_UNROLL for (int t = 0; t < M; t++) whole[t][i] = L::zero();
    }
    add<N, M, 0, 8, N>(w, x, t0, ones, &whole[0][0]);
    PUNA_UNROLL for (int t = 0; t < M; t++)
      PUNA_UNROLL for (int i = 0; i < N; i++) sums[t][i] = L::to_float(whole[t][i]);
  }
};

// ---- tiles


constexpr int ahead = 5120;  // bytes; weights come from memory, and this far ahead it keeps up

template <int bytes> PUNA_INLINE void fetch_ahead(const void* block) {
  PUNA_UNROLL for (int i = 0; i < bytes; i += line) __builtin_prefetch(static_cast<const char*>(block) + ahead + i, 0, 3);
}

struct Tile {
  const uint8_t* stripe;  // the first, the second stripe_bytes further
  int64_t stripe_bytes;
  int64_t first;  // token
  int n;
  float* y;
  int64_t y_stride;
  const int32_t* columns;  // of each token from the first on; null where they follow one another
  int n_rows;  // of the last stripe
};

template <class L, int S> PUNA_INLINE void write(const Tile& tile, int t, const typename L::F* sums) {
  constexpr int units = S * rows_of_stripe / L::width;
  float* y = tile.y + (tile.columns ? tile.columns[t] : t) * tile.y_stride;
  if (tile.n_rows == rows_of_stripe) {
    PUNA_UNROLL for (int u = 0; u < units; u++) L::store(y + u * L::width, sums[u]);
    return;
  }
  float values[S * rows_of_stripe];
  PUNA_UNROLL for (int u = 0; u < units; u++) L::store(values + u * L::width, sums[u]);
  for (int r = 0; r < (S - 1) * rows_of_stripe + tile.n_rows; r++) y[r] = values[r];
}

// S stripes at once; registers that cover a whole stripe share what is loaded of the activations between stripes. Where weights
// take more registers than there are, so do those of one stripe, and two tokens share what is loaded of the weights.
template <class L, int S, class P = void, int T = 1> struct Shape {
  static constexpr int units = S * rows_of_stripe / L::width;
  static constexpr bool has_pairs() {
    if constexpr (T == 0 && L::width < rows_of_stripe) return P::in_halves;
    return false;
  }
  static constexpr bool in_pairs = has_pairs();
  static constexpr int together = L::width == rows_of_stripe ? S : in_pairs ? rows_of_stripe / L::width : 1;
  static PUNA_INLINE int stripe(int u) { return u * L::width / rows_of_stripe; }
  static PUNA_INLINE int row(int u) { return u * L::width % rows_of_stripe; }
};

// Tokens one by one, T of them if that is known when compiled; or two by two.
template <int T, bool in_pairs, class Do> PUNA_INLINE void each_token(int n, const Do& work) {
  if constexpr (in_pairs) {
    for (int t = 0; t + 1 < n; t += 2) work(t, std::integral_constant<int, 2>());
    if (n % 2) work(n - 1, std::integral_constant<int, 1>());
  } else {
    const int count = T ? T : n;
    PUNA_UNROLL for (int t = 0; t < count; t++) work(t, std::integral_constant<int, 1>());
  }
}

template <class L, class W, int T, int S> void tiles_of_32(const Activations& a, const Tile& tile) {
  using P = Products<L, W::bits>;
  using F = typename L::F;
  using Packed = typename W::Packed;
  constexpr int units = Shape<L, S>::units, together = Shape<L, S, P, T>::together, room = T ? T : tokens_at_once;
  const int n = T ? T : tile.n;
  F sums[room][units];
  PUNA_UNROLL for (int t = 0; t < n; t++)
    PUNA_UNROLL for (int u = 0; u < units; u++) sums[t][u] = L::set(0.0f);
  for (int64_t b = 0; b < a.n_in / 32; b++) {
    const int64_t at = b * a.n + tile.first;
    const int8_t* x = a.q + at * 32;
    const float *scale = a.scale + at, *sum = a.sum + at;
    const int part = W::parts == 1 ? 0 : static_cast<int>(b % W::parts);
    PUNA_UNROLL for (int u = 0; u < units; u += together) {
      typename P::Weights w[together];
      F d[together], m[together];
      PUNA_UNROLL for (int i = 0; i < together; i++) {
        const Packed& p = reinterpret_cast<const Packed*>(tile.stripe + Shape<L, S>::stripe(u + i) * tile.stripe_bytes)[b / W::parts];
        const int row = Shape<L, S>::row(u + i);
        if (row == 0) fetch_ahead<sizeof(Packed) / W::parts>(reinterpret_cast<const char*>(&p) + part * (sizeof(Packed) / W::parts));
        W::template unpack<L>(p, part, 4 * row, w[i].w);
        P::prepare(w[i]);
        d[i] = W::template scale<L>(p, part, row);
        if constexpr (W::offset != 0) m[i] = L::times(d[i], L::set(-static_cast<float>(W::offset)));
        else m[i] = L::load_half(W::minimum(p) + row);
      }
      P::template multiply_all<1>(w[0], x, n);
      each_token<T, Shape<L, S, P, T>::in_pairs>(n, [&](int t, auto tokens) PUNA_INLINE_LAMBDA {
        constexpr int M = decltype(tokens)::value;
        F products[M][together];
        P::template plain<together, M>(w, x, t, products);
        PUNA_UNROLL for (int k = 0; k < M; k++) {
          const F s = L::set(sum[t + k]), e = L::set(scale[t + k]);
          PUNA_UNROLL for (int i = 0; i < together; i++)
            sums[t + k][u + i] = L::multiply_add(products[k][i], L::times(d[i], e), L::multiply_add(m[i], s, sums[t + k][u + i]));
        }
      });
    }
  }
  for (int t = 0; t < n; t++) write<L, S>(tile, t, sums[t]);
}

template <class L, class W, int T, int S> void tiles_of_256(const Activations& a, const Tile& tile) {
  using P = Products<L, W::bits>;
  using F = typename L::F;
  using I = typename L::I;
  using Packed = typename W::Packed;
  constexpr int units = Shape<L, S>::units, together = Shape<L, S, P, T>::together, room = T ? T : tokens_at_once;
  constexpr int factors = W::factors / 8;  // of 32 weights
  const int n = T ? T : tile.n;
  F sums[room][units];
  PUNA_UNROLL for (int t = 0; t < n; t++)
    PUNA_UNROLL for (int u = 0; u < units; u++) sums[t][u] = L::set(0.0f);
  for (int64_t b = 0; b < a.n_in / 256; b++) {
    typename P::Sum block[room][units];
    PUNA_UNROLL for (int t = 0; t < n; t++)
      PUNA_UNROLL for (int u = 0; u < units; u++) block[t][u] = P::zero();
    for (int j = 0; j < 8; j++) {
      const int8_t* x = a.q + ((b * 8 + j) * a.n + tile.first) * 32;
      PUNA_UNROLL for (int u = 0; u < units; u += together) {
        typename P::Weights w[together];
        typename P::Factor f[factors][together];
        PUNA_UNROLL for (int i = 0; i < together; i++) {
          const Packed& p = reinterpret_cast<const Packed*>(tile.stripe + Shape<L, S>::stripe(u + i) * tile.stripe_bytes)[b];
          const int row = Shape<L, S>::row(u + i);
          if (row == 0) fetch_ahead<sizeof(Packed) / 8>(reinterpret_cast<const char*>(&p) + j * (sizeof(Packed) / 8));
          W::template unpack<L>(p, j, 4 * row, w[i].w);
          P::prepare(w[i]);
          PUNA_UNROLL for (int k = 0; k < factors; k++) f[k][i] = P::factor(W::template factor<L>(p, factors * j + k, row));
        }
        P::template multiply_all<factors>(w[0], x, n);
        each_token<T, Shape<L, S, P, T>::in_pairs>(n, [&](int t, auto tokens) PUNA_INLINE_LAMBDA {
          constexpr int M = decltype(tokens)::value;
          if constexpr (factors == 1) {
            P::template add<together, M, 0, 8, units>(w, x, t, f[0], block[t] + u);
          } else {
            P::template add<together, M, 0, 4, units>(w, x, t, f[0], block[t] + u);
            P::template add<together, M, 4, 4, units>(w, x, t, f[1], block[t] + u);
          }
        });
      }
    }
    PUNA_UNROLL for (int u = 0; u < units; u++) {
      const Packed& p = reinterpret_cast<const Packed*>(tile.stripe + Shape<L, S>::stripe(u) * tile.stripe_bytes)[b];
      const int row = Shape<L, S>::row(u);
      I taken[W::sums / 2];
      PUNA_UNROLL for (int k = 0; k < W::sums / 2; k++)
        taken[k] = L::pairs(W::template taken<L>(p, 2 * k, row), W::template taken<L>(p, 2 * k + 1, row));
      const F d = L::load_half(p.d + row), m = W::template taken_scale<L>(p, row);
      PUNA_UNROLL for (int t = 0; t < n; t++) {
        const int64_t at = b * a.n + tile.first + t;
        const int16_t* s = a.sums + at * Activations::sums_of_block + W::first_sum;
        I whole = L::multiply_pairs(taken[0], L::four(s));
        PUNA_UNROLL for (int k = 1; k < W::sums / 2; k++) whole = L::add(whole, L::multiply_pairs(taken[k], L::four(s + 2 * k)));
        const F less = L::times(L::to_float(whole), m);
        sums[t][u] = L::multiply_add(L::multiply_less(P::value(block[t][u]), d, less), L::set(a.scale[at]), sums[t][u]);
      }
    }
  }
  for (int t = 0; t < n; t++) write<L, S>(tile, t, sums[t]);
}

template <class L, class W, int T, int S> PUNA_INLINE void tile_of(const Activations& a, const Tile& tile) {
  if constexpr (format_of(W::type)->rounding == blocks_of_256) tiles_of_256<L, W, T, S>(a, tile);
  else tiles_of_32<L, W, T, S>(a, tile);
}

template <class L, class W, int T> PUNA_INLINE void tile_in_registers(const Activations& a, const Tile& tile) {
  if constexpr (T <= L::most_tokens_of_tile && T <= L::most_tokens_in_registers) tile_of<L, W, T, 1>(a, tile);
}

// One stripe with a few tokens, in equal parts: nothing is left over for a slower way.
template <class L, class W> void tiles_in_registers(const Activations& a, Tile tile) {
  const int n_parts = (tile.n + L::most_tokens_of_tile - 1) / L::most_tokens_of_tile, n = tile.n;
  const Tile whole = tile;
  for (int part = 0; part < n_parts; part++) {
    const int begin = n * part / n_parts, end = n * (part + 1) / n_parts;
    tile.first = whole.first + begin;
    if (whole.columns) tile.columns = whole.columns + begin;
    else tile.y = whole.y + begin * tile.y_stride;
    switch (end - begin) {
      case 1: tile_in_registers<L, W, 1>(a, tile); break;
      case 2: tile_in_registers<L, W, 2>(a, tile); break;
      case 3: tile_in_registers<L, W, 3>(a, tile); break;
      case 4: tile_in_registers<L, W, 4>(a, tile); break;
      case 5: tile_in_registers<L, W, 5>(a, tile); break;
      case 6: tile_in_registers<L, W, 6>(a, tile); break;
      case 7: tile_in_registers<L, W, 7>(a, tile); break;
      case 8: tile_in_registers<L, W, 8>(a, tile); break;
      case 9: tile_in_registers<L, W, 9>(a, tile); break;
      case 10: tile_in_registers<L, W, 10>(a, tile); break;
      case 11: tile_in_registers<L, W, 11>(a, tile); break;
      case 12: tile_in_registers<L, W, 12>(a, tile); break;
      case 13: tile_in_registers<L, W, 13>(a, tile); break;
      case 14: tile_in_registers<L, W, 14>(a, tile); break;
      case 15: tile_in_registers<L, W, 15>(a, tile); break;
      default: tile_in_registers<L, W, 16>(a, tile);
    }
  }
}

template <class L, class W> void multiply_as(const Activations& a, const Work& work, int64_t bytes) {
  // Of two stripes, weights in halves would take all registers.
  constexpr bool two_stripes = L::two_stripes && (L::has_dot4 || W::bits <= 6);
  for (int64_t s = work.begin; s < work.end;) {
    const int64_t row = s * rows_of_stripe, left = work.n_rows - row;
    const auto rows = [](int64_t n) { return static_cast<int>(n < rows_of_stripe ? n : rows_of_stripe); };
    Tile tile{work.weights + s * bytes, bytes, work.first, static_cast<int>(work.n), work.y + row, work.y_stride, nullptr, rows(left)};
    if (work.columns) tile.columns = work.columns + work.first;
    else tile.y += work.first * work.y_stride;
    if (work.n <= L::most_tokens_in_registers) {
      if constexpr (L::most_tokens_in_registers > 0) tiles_in_registers<L, W>(a, tile);
      s++;
    } else if constexpr (L::most_tokens_in_registers < tokens_at_once) {
      if (two_stripes && s + 1 < work.end) {
        tile.n_rows = rows(left - rows_of_stripe);
        tile_of<L, W, 0, two_stripes ? 2 : 1>(a, tile);
        s += 2;
      } else {
        tile_of<L, W, 0, 1>(a, tile);
        s++;
      }
    }
  }
}

// ---- weights that are floats

struct F32 {
  using Packed = PackedF32;
  template <class L> static PUNA_INLINE typename L::F value(const Packed& p, int k, int i, int row) { return L::as_float(L::load(p.q[2 * k + i] + row)); }
};

struct F16 {
  using Packed = PackedF16;
  // Weight 2 k + i of a register's rows.
  template <class L> static PUNA_INLINE typename L::F value(const Packed& p, int k, int i, int row) { return L::load_half(p.q[2 * k + i] + row); }
};

struct BF16 {
  using Packed = PackedBF16;
  template <class L> static PUNA_INLINE typename L::F value(const Packed& p, int k, int i, int row) {
    const auto both = L::load(p.q[k][row]);
    return L::as_float(i ? L::both(both, L::whole(-65536)) : L::template left32<16>(both));
  }
};

constexpr int floats_ahead = 6144;  // bytes of all stripes together

template <class L, class W, int T, int S> void tile_of_floats(const Activations& a, const Tile& tile) {
  using F = typename L::F;
  using Packed = typename W::Packed;
  constexpr int units = Shape<L, S>::units;
  constexpr int64_t step = sizeof(Packed) / 16;
  F sums[T][units];
  PUNA_UNROLL for (int t = 0; t < T; t++)
    PUNA_UNROLL for (int u = 0; u < units; u++) sums[t][u] = L::set(0.0f);
  for (int64_t b = 0; b < a.n_in / 32; b++) {
    const float* x = a.x + (b * a.n + tile.first) * 32;
    const Packed* blocks[S];
    PUNA_UNROLL for (int s = 0; s < S; s++) blocks[s] = reinterpret_cast<const Packed*>(tile.stripe + s * tile.stripe_bytes) + b;
    // Where a stripe ends, the next of its kind is S stripes on: those between are read already, by the others of this tile.
    const int64_t here = b * static_cast<int64_t>(sizeof(Packed)) + floats_ahead / S;
    const uint8_t* next = tile.stripe + here + (here < tile.stripe_bytes ? 0 : (S - 1) * tile.stripe_bytes);
    for (int k = 0; k < 16; k++, next += step) {
      // A line of each at a time: memory answers only so many at once.
      PUNA_UNROLL for (int s = 0; s < S; s++)
        PUNA_UNROLL for (int i = 0; i < step; i += line) __builtin_prefetch(next + s * tile.stripe_bytes + i, 0, 3);
      if constexpr (L::has_bfloats) {  // only weights of that kind are multiplied so
        typename L::I w[units];
        PUNA_UNROLL for (int u = 0; u < units; u++) w[u] = L::load(blocks[Shape<L, S>::stripe(u)]->q[k][Shape<L, S>::row(u)]);
        PUNA_UNROLL for (int t = 0; t < T; t++) {
          const auto v = L::four(x + 32 * t + k);
          PUNA_UNROLL for (int u = 0; u < units; u++) sums[t][u] = L::dot_bfloats(sums[t][u], w[u], v);
        }
      } else {
        PUNA_UNROLL for (int i = 0; i < 2; i++) {
          F w[units];
          PUNA_UNROLL for (int u = 0; u < units; u++)
            w[u] = W::template value<L>(*blocks[Shape<L, S>::stripe(u)], k, i, Shape<L, S>::row(u));
          PUNA_UNROLL for (int t = 0; t < T; t++) {
            const F v = L::set(x[32 * t + 2 * k + i]);
            PUNA_UNROLL for (int u = 0; u < units; u++) sums[t][u] = L::multiply_add(w[u], v, sums[t][u]);
          }
        }
      }
    }
  }
  for (int t = 0; t < T; t++) write<L, S>(tile, t, sums[t]);
}

template <class L, class W, int S, int T> PUNA_INLINE void tile_of_floats(int n, const Activations& a, const Tile& tile) {
  if constexpr (T > 0) {
    if (n == T) tile_of_floats<L, W, T, S>(a, tile);
    else tile_of_floats<L, W, S, T - 1>(n, a, tile);
  }
}

// The sums of a row wait for themselves: of few tokens, those of two stripes at once hide that.
template <class L, class W> void multiply_floats(const Activations& a, const Work& work, int64_t bytes) {
  const int64_t n_parts = (work.n + L::most_floats_of_tile - 1) / L::most_floats_of_tile;
  const bool are_few = work.n <= L::most_floats_of_two_stripes * n_parts;
  for (int64_t s = work.begin; s < work.end;) {
    const int64_t row = s * rows_of_stripe, n_stripes = are_few && s + 1 < work.end ? 2 : 1, left = work.n_rows - row - (n_stripes - 1) * rows_of_stripe;
    Tile tile{work.weights + s * bytes, bytes, work.first, 0, work.y + row, work.y_stride, nullptr,
              static_cast<int>(left < rows_of_stripe ? left : rows_of_stripe)};
    for (int64_t part = 0; part < n_parts; part++) {
      const int64_t begin = work.first + work.n * part / n_parts, end = work.first + work.n * (part + 1) / n_parts;
      tile.first = begin;
      if (work.columns) tile.columns = work.columns + begin;
      else tile.y = work.y + row + begin * work.y_stride;
      if (n_stripes == 2) tile_of_floats<L, W, 2, L::most_floats_of_two_stripes>(static_cast<int>(end - begin), a, tile);
      else tile_of_floats<L, W, 1, L::most_floats_of_tile>(static_cast<int>(end - begin), a, tile);
    }
    s += n_stripes;
  }
}

template <class L> void multiply_quantised(const Format& format, const Activations& a, const Work& work) {
  const int64_t bytes = stripe_bytes(format, a.n_in);
  switch (format.type) {
    case type_q4_0: return multiply_as<L, Q4_0>(a, work, bytes);
    case type_q4_1: return multiply_as<L, Q4_1>(a, work, bytes);
    case type_q5_0: return multiply_as<L, Q5_0>(a, work, bytes);
    case type_q5_1: return multiply_as<L, Q5_1>(a, work, bytes);
    case type_q8_0: return multiply_as<L, Q8_0>(a, work, bytes);
    case type_q2_k: return multiply_as<L, Q2_K>(a, work, bytes);
    case type_q3_k: return multiply_as<L, Q3_K>(a, work, bytes);
    case type_q4_k: return multiply_as<L, Q4_K>(a, work, bytes);
    case type_q5_k: return multiply_as<L, Q5_K>(a, work, bytes);
    case type_q6_k: return multiply_as<L, Q6_K>(a, work, bytes);
    case type_iq4_nl: return multiply_as<L, IQ4_NL>(a, work, bytes);
    case type_iq4_xs: return multiply_as<L, IQ4_XS>(a, work, bytes);
    case type_mxfp4: return multiply_as<L, MXFP4>(a, work, bytes);
    default: break;
  }
}

template <class L> void multiply(const Format& format, const Activations& a, const Work& work) {
  const int64_t bytes = stripe_bytes(format, a.n_in);
  switch (format.type) {
    case type_f32: return multiply_floats<L, F32>(a, work, bytes);
    case type_f16: return multiply_floats<L, F16>(a, work, bytes);
    case type_bf16: return multiply_floats<L, BF16>(a, work, bytes);
    default: multiply_quantised<L>(format, a, work);
  }
}

// The most that the products could reach: as many chains as hide the time one instruction takes.
template <class L> int64_t exercise(int64_t times) {
  constexpr int chains = 12;
  typename L::I sums[chains];
  PUNA_UNROLL for (int i = 0; i < chains; i++) sums[i] = L::zero();
  auto v = L::bytes(1), w = L::bytes(3);
  for (int64_t t = 0; t < times; t++) {
    if constexpr (L::has_dot4) {
      PUNA_UNROLL for (int i = 0; i < chains; i++) sums[i] = L::template dot4<4>(sums[i], v, w);
    } else {
      PUNA_UNROLL for (int i = 0; i < chains; i++) sums[i] = L::add_pairs(sums[i], w);
    }
    // Whoever compiles this must believe that the sums are wanted.
    PUNA_UNROLL for (int i = 0; i < chains; i++) L::keep(sums[i]);
  }
  return times * chains * L::width * 4;
}

}  // namespace
}  // namespace puna
