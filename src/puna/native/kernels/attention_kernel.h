// Attention: one algorithm for every kind of cache and every instruction set.
//
// Cells pass in tiles, without those that no row sees, and a tile's scores are turned into weights at once, with the largest
// score so far subtracted (Milakov & Gimelshein 2018; Dao et al. 2022). Scores are kept in base 2.
//
// A row's result has the same bits whatever rows are computed with it and however many threads compute. So everything about a
// row's sums hangs on the place of the cells that it sees: tiles are stretches of cells, parts are stretches of tiles whose sums
// are put together in their order, whoever computed them, and both ways below add up in the same order.
//
// There are two ways. Few rows of a key head are the queries that share it in a step of decoding: keys and values are read
// where they are, and registers lie along them; all key heads pass over a tile of cells, so that memory is read in order. Many
// rows lie along the registers themselves: keys and values are unpacked once for all of them, each number of a key times that
// of 64 rows, and nothing is ever summed across a register.
//
// L is the instruction set, registers F of L::width floats. Compiled once per instruction set: nothing here has a name that the
// linker could share between them.
//
// What a row does not see cannot matter to it, whatever is held there: keys and values may overflow half precision, and what is
// infinite or no number would survive a weight of 0.
#pragma once
#include "attention.h"
#include "half.h"
#include "turning.h"

#define PUNA_INLINE inline __attribute__((always_inline))
#define PUNA_INLINE_LAMBDA __attribute__((always_inline))
#define PUNA_UNROLL _Pragma("GCC unroll 16")

namespace puna {
namespace {

constexpr float log2_of_e = 1.44269504f, least = -__builtin_inff(), lowest = -3e38f;
constexpr half hidden_bits = 0xfc00;

template <class L> PUNA_INLINE typename L::F exp2(typename L::F x) {
  const auto t = L::larger(L::set(-150.0f), x), n = L::whole(t), f = L::less(t, n);
  auto p = L::set(1.54035304e-4f);  // ln(2)^k / k!
  p = L::multiply_add(p, f, L::set(1.33335581e-3f));
  p = L::multiply_add(p, f, L::set(9.61812911e-3f));
  p = L::multiply_add(p, f, L::set(5.55041087e-2f));
  p = L::multiply_add(p, f, L::set(2.40226507e-1f));
  p = L::multiply_add(p, f, L::set(6.93147181e-1f));
  p = L::multiply_add(p, f, L::set(1.0f));
  return L::times_power(p, n, t);
}

template <class L> PUNA_INLINE float exp2_of(float x) {
  return L::first(exp2<L>(L::set(x)));
}

// 2 / (1 + e^-2x) - 1
template <class L> PUNA_INLINE typename L::F tanh(typename L::F x) {
  const auto e = exp2<L>(L::times(L::larger(L::set(-30.0f), x), L::set(-2 * log2_of_e)));
  return L::less(L::over(L::set(2.0f), L::add(L::set(1.0f), e)), L::set(1.0f));
}

// ---- kinds of rows: blocks of *parts* registers, which may have a common factor; *vouching*: a block is finite where that is

struct HalfRow {
  template <class L> static constexpr int64_t parts = 1;
  template <class L> static PUNA_INLINE typename L::F factor(const uint8_t*, int64_t) { return L::zero(); }
  template <class L> static PUNA_INLINE typename L::F load(const uint8_t* row, int64_t block, int64_t, typename L::F) {
    return L::load_half(row + 2 * L::width * block);
  }
  template <class L> static PUNA_INLINE typename L::F vouching(const uint8_t* row, int64_t block) { return L::load_half(row + 2 * L::width * block); }
};

struct Q8Row {
  template <class L> static constexpr int64_t parts = 32 / L::width;
  template <class L> static PUNA_INLINE typename L::F factor(const uint8_t* row, int64_t block) { return L::set_half(row + 34 * block); }
  template <class L> static PUNA_INLINE typename L::F load(const uint8_t* row, int64_t block, int64_t part, typename L::F factor) {
    return L::times(L::load_i8(row + 34 * block + 2 + part * L::width), factor);
  }
  template <class L> static PUNA_INLINE typename L::F vouching(const uint8_t* row, int64_t block) { return factor<L>(row, block); }
};

struct FloatRow {
  template <class L> static constexpr int64_t parts = 1;
  template <class L> static PUNA_INLINE typename L::F factor(const uint8_t*, int64_t) { return L::zero(); }
  template <class L> static PUNA_INLINE typename L::F load(const uint8_t* row, int64_t block, int64_t, typename L::F) {
    return L::load(reinterpret_cast<const float*>(row) + L::width * block);
  }
  template <class L> static PUNA_INLINE typename L::F vouching(const uint8_t* row, int64_t block) { return load<L>(row, block, 0, L::zero()); }
};

template <class L, class Row> PUNA_INLINE void unpack_as(const uint8_t* row, int64_t n, float* to) {
  constexpr int64_t parts = Row::template parts<L>;
  for (int64_t b = 0; b < n / parts; b++) {
    const auto factor = Row::template factor<L>(row, b);
    PUNA_UNROLL for (int64_t j = 0; j < parts; j++) L::store(to + (b * parts + j) * L::width, Row::template load<L>(row, b, j, factor));
  }
}

// A row's values as floats, with zeros up to the next whole line of them.
template <class L> inline void unpack(const uint8_t* row, int type, int64_t width, float* to) {
  const int64_t n = width / L::width, rest = n * L::width;
  if (type == type_f16) {
    unpack_as<L, HalfRow>(row, n, to);
    for (int64_t i = rest; i < width; i++) {
      half bits;
      memcpy(&bits, row + 2 * i, 2);
      to[i] = from_half(bits);
    }
  } else if (type == type_q8_0) {
    unpack_as<L, Q8Row>(row, n, to);
  } else if (type == type_f32) {
    memcpy(to, row, static_cast<size_t>(4 * width));
  } else {  // Q4_0
    for (int64_t b = 0; b < width / 32; b++) {
      const uint8_t* block = row + 18 * b;
      half bits;
      memcpy(&bits, block, 2);
      const float d = from_half(bits);
      for (int i = 0; i < 16; i++) {
        to[32 * b + i] = d * static_cast<float>((block[2 + i] & 15) - 8);
        to[32 * b + 16 + i] = d * static_cast<float>((block[2 + i] >> 4) - 8);
      }
    }
  }
  for (int64_t i = width; i < lines_of(width); i++) to[i] = 0;
}

inline bool is_read_in_place(const Held& held, int lanes) { return (held.type == type_f16 || held.type == type_q8_0) && held.width % lanes == 0; }

// ---- which cells

struct Memory {
  char* at;
  template <class T> T* take(int64_t n) {
    T* taken = reinterpret_cast<T*>(at);
    at += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }
};

// Cells that pass together: of a stretch of cells_at_once those that some token sees. Which stretch, and where in it a cell
// lies, is the same for every row that sees the cell, whatever others do.
struct Tile {
  int64_t begin, n;
  bool is_whole;  // the first n of the stretch, without gaps
  bool mixed;     // some token does not see one of them, or sees it at a distance
  bool varies;    // not all tokens see them alike: only then may some token not see one of them
  int32_t cell[cells_at_once];

  int64_t place(int64_t i) const { return cell[i] - begin; }
  int64_t end() const { return n ? place(n - 1) + 1 : 0; }
};

// The next tile from the stretch at *c* on that tokens [first, end) see something of, or one of no cells.
template <class L> inline void find_tile(const AttentionPiece& p, int64_t first, int64_t end, int64_t& c, Tile& tile) {
  tile.n = 0;
  for (; c < p.end && !tile.n; c += cells_at_once) {
    const int64_t count = p.end - c < cells_at_once ? p.end - c : cells_at_once;
    bool all = !p.mask || count == cells_at_once, none = p.mask && all;
    for (int64_t t = first; p.mask && t < end && (all || none); t++) {
      const half* mask = p.mask + t * p.mask_token + c;
      all = all && L::are_all(mask, 0);
      none = none && L::are_all(mask, hidden_bits);
    }
    if (none) continue;
    tile.begin = c;
    tile.mixed = tile.varies = false;
    if (all) {
      for (int64_t i = 0; i < count; i++) tile.cell[i] = static_cast<int32_t>(c + i);
      tile.n = count;
    } else {
      for (int64_t i = 0; i < count; i++) {
        const half *mask = p.mask + first * p.mask_token + c + i, of_first = *mask;
        half seen = 0, mixed = 0, other = 0;
        for (int64_t t = first; t < end; t++, mask += p.mask_token) {
          seen |= *mask ^ hidden_bits;
          mixed |= *mask;
          other |= *mask ^ of_first;
        }
        if (!seen) continue;
        tile.mixed |= mixed != 0;
        tile.varies |= other != 0;
        tile.cell[tile.n++] = static_cast<int32_t>(c + i);
      }
    }
    tile.is_whole = tile.end() == tile.n;
    tile.mixed |= !tile.is_whole;
  }
}

// Whether a tile is the last of its part.
inline bool ends_part(const Tile& tile, const Tile& next) { return !next.n || next.begin / cells_of_part != tile.begin / cells_of_part; }

inline const uint8_t* row_of(const Held& held, int64_t cell, int64_t head) { return held.data + cell * held.cell + head * held.head; }

// Rows of one head, one of each cell; and the rows that come after them, which are on their way from memory meanwhile.
struct Rows {
  const uint8_t* at[cells_at_once + 4];
  const uint8_t* next[cells_at_once + 4];
  int64_t bytes;

  PUNA_INLINE void fetch(int64_t i) const {
    for (int64_t b = 0; b < bytes; b += line) __builtin_prefetch(next[i] + b);
  }

  Rows some(int64_t begin, int64_t n) const {
    Rows rows;
    rows.bytes = bytes;
    for (int64_t i = 0; i < n; i++) rows.at[i] = at[begin + i], rows.next[i] = next[begin + i];
    return rows;
  }
};

inline Rows rows_of(const Held& held, const Tile& tile, const Tile& next, int64_t head) {
  Rows rows;
  rows.bytes = held.bytes;
  for (int64_t i = 0; i < tile.n; i++) rows.at[i] = row_of(held, tile.cell[i], head);
  for (int64_t i = tile.n; i < (tile.n + 3) / 4 * 4; i++) rows.at[i] = rows.at[tile.n - 1];
  for (int64_t i = 0; i < (tile.n + 3) / 4 * 4; i++) rows.next[i] = i < next.n ? row_of(held, next.cell[i], head) : rows.at[i];
  return rows;
}

template <class L> inline void unpack_all(Rows& rows, int64_t n, const Held& held, float* to) {
  const int64_t width = lines_of(held.width);
  for (int64_t i = 0; i < n; i++) {
    rows.fetch(i);
    unpack<L>(rows.at[i], held.type, held.width, to + i * width);
  }
  for (int64_t i = 0; i < (n + 3) / 4 * 4; i++) rows.at[i] = reinterpret_cast<const uint8_t*>(to + (i < n ? i : n - 1) * width);
}

// Which rows have something that is infinite or no number, and whether any has: what is finite less itself is 0.
template <class L, class Row> inline bool find_unsound(const Rows& rows, int64_t n, int64_t width, bool* unsound) {
  bool any = false;
  for (int64_t i = 0; i < n; i += 4) {
    typename L::F rest[4];
    PUNA_UNROLL for (int k = 0; k < 4; k++) rest[k] = L::zero();
    for (int64_t b = 0; b < width / L::width / Row::template parts<L>; b++)
      PUNA_UNROLL for (int k = 0; k < 4; k++) {
        const auto v = Row::template vouching<L>(rows.at[i + k], b);
        rest[k] = L::add(rest[k], L::less(v, v));
      }
    float four[4];
    L::store_sums(four, rest[0], rest[1], rest[2], rest[3]);
    for (int64_t k = i; k < n && k < i + 4; k++) {
      unsound[k] = four[k - i] != 0;
      any |= unsound[k];
    }
  }
  return any;
}

// Of n cells, in their order: stretches of sound ones to *together*, and each of the others to *apart*.
template <class Together, class Apart> inline void each_stretch(int64_t n, const bool* unsound, const Together& together, const Apart& apart) {
  for (int64_t begin = 0; begin < n; begin++) {
    int64_t end = begin;
    while (end < n && !unsound[end]) end++;
    if (end > begin) together(begin, end - begin);
    if (end < n) apart(end);
    begin = end;
  }
}

// ---- scores to weights

struct Scores {
  float factor, cap, mask;  // in base 2: of the product, and around its tanh if there is a cap; of the mask

  explicit Scores(const AttentionPiece& p)
      : factor(p.softcap > 0 ? p.scale / p.softcap : p.scale * log2_of_e), cap(p.softcap * log2_of_e), mask(log2_of_e) {}
};

// With what the mask adds to them: nothing is left of what is hidden, not even what is no number.
template <class L> PUNA_INLINE typename L::F masked(typename L::F scores, typename L::F added) {
  return L::if_less(L::set(least), added, L::add(scores, added), L::set(least));
}

// ---- parts put together

// Sums and their totals from *top* and *other* up to the larger of the two.
template <class L> PUNA_INLINE void bring_together(typename L::F& top, typename L::F other, typename L::F& factor, typename L::F& of_other) {
  const auto largest = L::larger(other, top), base = L::larger(largest, L::set(lowest));
  factor = exp2<L>(L::less(top, base));
  of_other = exp2<L>(L::less(other, base));
  top = largest;
}

// One row's found sums with another's, of cells that come after them.
template <class L> inline void add_found(float* to, const float* other, int64_t width) {
  float *last = to + lines_of(width);
  const float* of_last = other + lines_of(width);
  auto top = L::set(last[0]), factor = top, of_other = top;
  bring_together<L>(top, L::set(of_last[0]), factor, of_other);
  for (int64_t k = 0; k < lines_of(width); k += L::width)
    L::store(to + k, L::multiply_add(L::load(other + k), of_other, L::times(L::load(to + k), factor)));
  const auto total = L::multiply_add(L::set(of_last[1]), of_other, L::times(L::set(last[1]), factor));
  last[0] = L::first(top), last[1] = L::first(total);
}

inline bool is_empty(const float* found, int64_t width) { return found[lines_of(width)] == least && found[lines_of(width) + 1] == 0; }

// Where what is found of the part at *cell* goes: to a place of its own, or to what was found before it.
inline float* place_of_part(const AttentionPiece& p, int64_t cell) {
  return p.found + (cell / cells_of_part - p.begin / cells_of_part) * p.stride;
}

// Of all parts: nothing was found yet.
inline void empty_all(const AttentionPiece& p) {
  const int64_t parts = p.stride ? (p.end + cells_of_part - 1) / cells_of_part - p.begin / cells_of_part : 1, width = found_width(p.value.width);
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < p.n_heads * p.n; i++) {
      float* last = p.found + part * p.stride + i * width + lines_of(p.value.width);
      last[0] = least, last[1] = 0;
    }
}

// A query as keys are multiplied with it, with zeros up to a whole line.
inline void read_query(const AttentionPiece& p, const Scores& how, const float* from, float* to) {
  for (int64_t k = 0; k < p.key.width; k++) to[k] = from[k] * how.factor;
  for (int64_t k = p.key.width; k < lines_of(p.key.width); k++) to[k] = 0;
  if (p.key_turn) turn_values(to, p.key.width, p.key_turn);
}

inline float slope_of(const AttentionPiece& p, int64_t query_head) { return p.slopes ? p.slopes[query_head] : 1.0f; }

// ---- few rows

template <class L, class Row, int M> inline void dots(const float* q, int64_t q_row, const Rows& keys, int64_t n, int64_t width, float* s) {
  typedef typename L::F F;
  for (int64_t c = 0; c < n; c += 4) {
    PUNA_UNROLL for (int k = 0; k < 4; k++) keys.fetch(c + k);
    F sums[M][4];
    PUNA_UNROLL for (int m = 0; m < M; m++)
      PUNA_UNROLL for (int k = 0; k < 4; k++) sums[m][k] = L::zero();
    constexpr int64_t parts = Row::template parts<L>;
    for (int64_t b = 0; b < width / L::width / parts; b++) {
      F factor[4];
      PUNA_UNROLL for (int k = 0; k < 4; k++) factor[k] = Row::template factor<L>(keys.at[c + k], b);
      PUNA_UNROLL for (int64_t j = 0; j < parts; j++) {
        F key[4];
        PUNA_UNROLL for (int k = 0; k < 4; k++) key[k] = Row::template load<L>(keys.at[c + k], b, j, factor[k]);
        PUNA_UNROLL for (int m = 0; m < M; m++) {
          const F query = L::load(q + m * q_row + (b * parts + j) * L::width);
          PUNA_UNROLL for (int k = 0; k < 4; k++) sums[m][k] = L::multiply_add(query, key[k], sums[m][k]);
        }
      }
    }
    PUNA_UNROLL for (int m = 0; m < M; m++) L::store_sums(s + m * cells_at_once + c, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
  }
}

template <class L, class Row, int M = L::dot_rows> PUNA_INLINE void some_dots(int64_t rows, const float* q, int64_t q_row, const Rows& keys, int64_t n, int64_t width, float* s) {
  if (rows == M) dots<L, Row, M>(q, q_row, keys, n, width, s);
  else if constexpr (M > 1) some_dots<L, Row, M - 1>(rows, q, q_row, keys, n, width, s);
}

template <class L, class Row> inline void all_dots(int64_t rows, const float* q, int64_t q_row, const Rows& keys, int64_t n, int64_t width, float* s) {
  const int64_t parts = (rows + L::dot_rows - 1) / L::dot_rows;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t r = rows * i / parts;
    some_dots<L, Row>(rows * (i + 1) / parts - r, q + r * q_row, q_row, keys, n, width, s + r * cells_at_once);
  }
}

template <class L, class Row, int M, int N> inline void mix(const float* weights, const Rows& values, int64_t n, int64_t i, float* sums, int64_t sums_row) {
  constexpr int64_t parts = Row::template parts<L>;
  static_assert(N % parts == 0, "whole blocks");
  typename L::F kept[M][N];
  PUNA_UNROLL for (int m = 0; m < M; m++)
    PUNA_UNROLL for (int k = 0; k < N; k++) kept[m][k] = L::load(sums + m * sums_row + (i + k) * L::width);
  for (int64_t c = 0; c < n; c++) {
    typename L::F value[N];
    if (i == 0) values.fetch(c);
    PUNA_UNROLL for (int64_t b = 0; b < N / parts; b++) {
      const auto factor = Row::template factor<L>(values.at[c], i / parts + b);
      PUNA_UNROLL for (int64_t j = 0; j < parts; j++) value[b * parts + j] = Row::template load<L>(values.at[c], i / parts + b, j, factor);
    }
    PUNA_UNROLL for (int m = 0; m < M; m++) {
      const auto weight = L::set(weights[m * cells_at_once + c]);
      PUNA_UNROLL for (int k = 0; k < N; k++) kept[m][k] = L::multiply_add(weight, value[k], kept[m][k]);
    }
  }
  PUNA_UNROLL for (int m = 0; m < M; m++)
    PUNA_UNROLL for (int k = 0; k < N; k++) L::store(sums + m * sums_row + (i + k) * L::width, kept[m][k]);
}

template <class L, class Row, int M = L::dot_rows> PUNA_INLINE void some_mixed(int64_t rows, const float* weights, const Rows& values, int64_t n, int64_t width, float* sums, int64_t sums_row) {
  if (rows == M) {
    constexpr int together = Row::template parts<L> > 4 ? Row::template parts<L> : 4;
    int64_t i = 0;
    for (; i + together <= width / L::width; i += together) mix<L, Row, M, together>(weights, values, n, i, sums, sums_row);
    for (; i < width / L::width; i += Row::template parts<L>) mix<L, Row, M, Row::template parts<L>>(weights, values, n, i, sums, sums_row);
  } else if constexpr (M > 1) {
    some_mixed<L, Row, M - 1>(rows, weights, values, n, width, sums, sums_row);
  }
}

template <class L, class Row> inline void all_mixed(int64_t rows, const float* weights, const Rows& values, int64_t n, int64_t width, float* sums, int64_t sums_row) {
  const int64_t parts = (rows + L::dot_rows - 1) / L::dot_rows;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t r = rows * i / parts;
    some_mixed<L, Row>(rows * (i + 1) / parts - r, weights + r * cells_at_once, values, n, width, sums + r * sums_row, sums_row);
  }
}

// The same, each row without the values that it does not see, where there are some that are not finite.
template <class L, class Row, class Sees> inline void all_seen_mixed(const Tile& tile, int64_t rows, const float* weights, const Rows& values, int64_t width, float* sums, int64_t sums_row, const Sees& sees) {
  bool unsound[cells_at_once];
  if (!tile.varies || !find_unsound<L, Row>(values, tile.n, width, unsound)) return all_mixed<L, Row>(rows, weights, values, tile.n, width, sums, sums_row);
  each_stretch(
      tile.n, unsound, [&](int64_t c, int64_t n) { all_mixed<L, Row>(rows, weights + c, values.some(c, n), n, width, sums, sums_row); },
      [&](int64_t c) {
        for (int64_t r = 0; r < rows; r++)
          if (sees(r, c)) all_mixed<L, Row>(1, weights + r * cells_at_once + c, values.some(c, 1), 1, width, sums + r * sums_row, sums_row);
      });
}

// Scores of one row and tile to weights: what earlier sums must be multiplied with, and the sums of every L::width-th weight.
template <class L> inline float weigh(float* s, int64_t n, const Scores& how, const float* added, float added_factor, float& top, typename L::F& sums) {
  typedef typename L::F F;
  F largest = L::set(top);
  for (int64_t i = 0; i < n; i += L::width) {
    F v = L::load(s + i);
    if (how.cap > 0) v = L::times(L::set(how.cap), tanh<L>(v));
    if (added) v = masked<L>(v, L::times(L::load(added + i), L::set(added_factor)));
    if (i + L::width > n) {  // beyond the last cell
      alignas(64) float all[L::width];
      L::store(all, v);
      for (int64_t k = n - i; k < L::width; k++) all[k] = least;
      v = L::load(all);
    }
    L::store(s + i, v);
    largest = L::larger(v, largest);
  }
  const float above = L::largest(largest), base = above < lowest ? lowest : above;
  F sum = L::zero();
  for (int64_t i = 0; i < n; i += L::width) {
    const F weight = exp2<L>(L::less(L::load(s + i), L::set(base)));
    L::store(s + i, weight);
    sum = L::add(sum, weight);
  }
  const float kept = top == above ? 1.0f : exp2_of<L>(top - base);
  sums = sum;
  top = above;
  return kept;
}

// Scores of the cells of a tile to their places in its stretch, and the weights back.
inline void spread(const Tile& tile, float* s) {
  float all[cells_at_once];
  for (int64_t i = 0; i < tile.end(); i++) all[i] = least;
  for (int64_t i = 0; i < tile.n; i++) all[tile.place(i)] = s[i];
  memcpy(s, all, static_cast<size_t>(4 * tile.end()));
}

inline void gather(const Tile& tile, float* s) {
  for (int64_t i = 0; i < tile.n; i++) s[i] = s[tile.place(i)];
}

template <class L> inline void attend_few(const AttentionPiece& p) {
  const int64_t key_width = lines_of(p.key.width), value_width = lines_of(p.value.width), group = p.group, rows = p.n_heads * p.n;
  const int64_t first_token = p.first / group, end_token = (p.first + p.n - 1) / group + 1;
  const Scores how(p);
  Memory memory{static_cast<char*>(p.scratch)};
  float* q = memory.take<float>(rows * key_width);
  float* sums = memory.take<float>(rows * found_width(p.value.width));
  float* keys = memory.take<float>(cells_at_once * key_width);
  float* values = memory.take<float>(cells_at_once * value_width);
  float* s = memory.take<float>(p.n * cells_at_once);
  float* added = memory.take<float>((end_token - first_token) * cells_at_once);
  for (int64_t h = 0; h < p.n_heads; h++)
    for (int64_t i = 0; i < p.n; i++) {
      const int64_t token = (p.first + i) / group, head = (p.first_head + h) * group + (p.first + i) % group;
      const float* from = reinterpret_cast<const float*>(p.query + token * p.query_token + head * p.query_head);
      float* to = q + (h * p.n + i) * key_width;
      read_query(p, how, from, to);
    }
  const int64_t width = found_width(p.value.width);
  const auto clear = [&] {
    for (int64_t i = 0; i < rows; i++) {
      memset(sums + i * width, 0, static_cast<size_t>(4 * width));
      sums[i * width + value_width] = least;
    }
  };
  clear();
  empty_all(p);
  const bool keys_in_place = is_read_in_place(p.key, L::width), values_in_place = is_read_in_place(p.value, L::width);
  int64_t c = p.begin;
  bool is_first = true;
  Tile tile, next;
  for (find_tile<L>(p, first_token, end_token, c, tile); tile.n; tile = next) {
    find_tile<L>(p, first_token, end_token, c, next);
    const int64_t n = tile.n;
    if (tile.mixed)
      for (int64_t t = first_token; t < end_token; t++)
        for (int64_t i = 0; i < tile.end(); i++) added[(t - first_token) * cells_at_once + i] = from_half(p.mask[t * p.mask_token + tile.begin + i]);
    for (int64_t h = 0; h < p.n_heads; h++) {
      Rows key = rows_of(p.key, tile, next, p.first_head + h), value = rows_of(p.value, tile, next, p.first_head + h);
      float* of_head = sums + h * p.n * width;
      const float* query = q + h * p.n * key_width;
      if (keys_in_place && p.key.type == type_f16) {
        all_dots<L, HalfRow>(p.n, query, key_width, key, n, p.key.width, s);
      } else if (keys_in_place) {
        all_dots<L, Q8Row>(p.n, query, key_width, key, n, p.key.width, s);
      } else {
        unpack_all<L>(key, n, p.key, keys);
        all_dots<L, FloatRow>(p.n, query, key_width, key, n, key_width, s);
      }
      typename L::F totals[L::few_rows + 3];
      float factors[L::few_rows + 3];
      for (int64_t i = 0; i < p.n; i++) {
        const int64_t head = (p.first_head + h) * group + (p.first + i) % group;
        const float* of_token = tile.mixed ? added + ((p.first + i) / group - first_token) * cells_at_once : nullptr;
        float *of_row = of_head + i * width, *scores = s + i * cells_at_once;
        if (!tile.is_whole) spread(tile, scores);
        const float kept = weigh<L>(scores, tile.end(), how, of_token, how.mask * slope_of(p, head), of_row[value_width], totals[i]);
        factors[i] = kept;
        if (!tile.is_whole) gather(tile, scores);
        if (kept != 1.0f)
          for (int64_t k = 0; k < value_width; k += L::width) L::store(of_row + k, L::times(L::load(of_row + k), L::set(kept)));
      }
      for (int64_t i = p.n; i < (p.n + 3) / 4 * 4; i++) totals[i] = L::zero();
      for (int64_t i = 0; i < p.n; i += 4) {
        float four[4];
        L::store_sums(four, totals[i], totals[i + 1], totals[i + 2], totals[i + 3]);
        for (int64_t k = i; k < p.n && k < i + 4; k++) {
          float& total = of_head[k * width + value_width + 1];
          total = L::first(L::multiply_add(L::set(total), L::set(factors[k]), L::set(four[k - i])));
        }
      }
      const auto sees = [&](int64_t i, int64_t cell) { return added[((p.first + i) / group - first_token) * cells_at_once + tile.place(cell)] != least; };
      if (values_in_place && p.value.type == type_f16) {
        all_seen_mixed<L, HalfRow>(tile, p.n, s, value, p.value.width, of_head, width, sees);
      } else if (values_in_place) {
        all_seen_mixed<L, Q8Row>(tile, p.n, s, value, p.value.width, of_head, width, sees);
      } else {
        unpack_all<L>(value, n, p.value, values);
        all_seen_mixed<L, FloatRow>(tile, p.n, s, value, value_width, of_head, width, sees);
      }
    }
    if (!ends_part(tile, next)) continue;
    float* found = place_of_part(p, tile.begin);
    if (p.stride || is_first) memcpy(found, sums, static_cast<size_t>(4 * rows * width));
    else for (int64_t i = 0; i < rows; i++) add_found<L>(found + i * width, sums + i * width, p.value.width);
    is_first = false;
    if (next.n) clear();
  }
}

// ---- many rows: [..][most_rows], of which *vectors* registers are used

template <class L, int M, int N> inline void tile_of(const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  typename L::F sums[M][N];
  PUNA_UNROLL for (int m = 0; m < M; m++)
    PUNA_UNROLL for (int k = 0; k < N; k++) sums[m][k] = L::load(c + m * most_rows + k * L::width);
  for (int64_t i = 0; i < n; i++) {
    typename L::F right[N];
    PUNA_UNROLL for (int k = 0; k < N; k++) right[k] = L::load(b + i * most_rows + k * L::width);
    PUNA_UNROLL for (int m = 0; m < M; m++) {
      const auto left = L::set(a[m * a_row + i * a_next]);
      PUNA_UNROLL for (int k = 0; k < N; k++) sums[m][k] = L::multiply_add(left, right[k], sums[m][k]);
    }
  }
  PUNA_UNROLL for (int m = 0; m < M; m++)
    PUNA_UNROLL for (int k = 0; k < N; k++) L::store(c + m * most_rows + k * L::width, sums[m][k]);
}

template <class L, int N, int M = L::tile_rows> PUNA_INLINE void tile_of_rows(int64_t rows, const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  if (rows == M) tile_of<L, M, N>(a, a_row, a_next, b, n, c);
  else if constexpr (M > 1) tile_of_rows<L, N, M - 1>(rows, a, a_row, a_next, b, n, c);
}

template <class L, int N = L::tile_vectors> PUNA_INLINE void multiply_vectors(int64_t vectors, int64_t rows, const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  if (vectors == N) {
    const int64_t parts = (rows + L::tile_rows - 1) / L::tile_rows;
    for (int64_t i = 0; i < parts; i++) {
      const int64_t r = rows * i / parts;
      tile_of_rows<L, N>(rows * (i + 1) / parts - r, a + r * a_row, a_row, a_next, b, n, c + r * most_rows);
    }
  } else if constexpr (N > 1) {
    multiply_vectors<L, N - 1>(vectors, rows, a, a_row, a_next, b, n, c);
  }
}

// c[rows][] += sum over n of a[rows][n] b[n][]
template <class L> inline void multiply(int64_t vectors, int64_t rows, const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  for (int64_t v = 0; v < vectors; v += L::tile_vectors) {
    const int64_t now = vectors - v < L::tile_vectors ? vectors - v : L::tile_vectors;
    multiply_vectors<L>(now, rows, a, a_row, a_next, b + v * L::width, n, c + v * L::width);
  }
}

// Scores s[cells][] of keys [cells][key_row] with q[width][], of M cells and N registers of rows: each sum in the order in which
// few rows have it, those of every L::width-th number first.
template <class L, int M, int N> struct SomeSums {
  typename L::F v[M][N];
};

template <class L, int M, int N> inline void score(const float* keys, int64_t key_row, const float* q, int64_t width, float* s) {
  using Sums = SomeSums<L, M, N>;
  const auto of_lane = [&](int64_t lane) PUNA_INLINE_LAMBDA {
    Sums sums;
    PUNA_UNROLL for (int m = 0; m < M; m++)
      PUNA_UNROLL for (int k = 0; k < N; k++) sums.v[m][k] = L::zero();
    for (int64_t i = lane; i < width; i += L::width) {
      typename L::F right[N];
      PUNA_UNROLL for (int k = 0; k < N; k++) right[k] = L::load(q + i * most_rows + k * L::width);
      PUNA_UNROLL for (int m = 0; m < M; m++) {
        const auto left = L::set(keys[m * key_row + i]);
        PUNA_UNROLL for (int k = 0; k < N; k++) sums.v[m][k] = L::multiply_add(left, right[k], sums.v[m][k]);
      }
    }
    return sums;
  };
  const auto add = [](Sums a, const Sums& b) PUNA_INLINE_LAMBDA {
    PUNA_UNROLL for (int m = 0; m < M; m++)
      PUNA_UNROLL for (int k = 0; k < N; k++) a.v[m][k] = L::add(a.v[m][k], b.v[m][k]);
    return a;
  };
  const Sums all = L::in_order(of_lane, add);
  PUNA_UNROLL for (int m = 0; m < M; m++)
    PUNA_UNROLL for (int k = 0; k < N; k++) L::store(s + m * most_rows + k * L::width, all.v[m][k]);
}

template <class L, int N = L::score_vectors> PUNA_INLINE void score_vectors(int64_t vectors, int64_t n, const float* keys, int64_t key_row, const float* q, int64_t width, float* s) {
  if (vectors == N) {
    int64_t i = 0;
    for (; i + L::score_rows <= n; i += L::score_rows) score<L, L::score_rows, N>(keys + i * key_row, key_row, q, width, s + i * most_rows);
    for (; i < n; i++) score<L, 1, N>(keys + i * key_row, key_row, q, width, s + i * most_rows);
  } else if constexpr (N > 1) {
    score_vectors<L, N - 1>(vectors, n, keys, key_row, q, width, s);
  }
}

template <class L> inline void score_all(int64_t vectors, int64_t n, const float* keys, int64_t key_row, const float* q, int64_t width, float* s) {
  for (int64_t v = 0; v < vectors; v += L::score_vectors) {
    const int64_t now = vectors - v < L::score_vectors ? vectors - v : L::score_vectors;
    score_vectors<L>(now, n, keys, key_row, q + v * L::width, width, s + v * L::width);
  }
}

// The sum of a tile's weights s[cells][], of one register of rows, in the order in which few rows have it.
template <class L> inline typename L::F sum_of_weights(const Tile& tile, float* s) {
  typename L::F sums[L::width];
  PUNA_UNROLL for (int l = 0; l < L::width; l++) sums[l] = L::zero();
  if (tile.is_whole) {
    int64_t i = 0;
    for (; i + L::width <= tile.n; i += L::width)
      PUNA_UNROLL for (int l = 0; l < L::width; l++) sums[l] = L::add(sums[l], L::load(s + (i + l) * most_rows));
    for (; i < tile.n; i++) sums[i % L::width] = L::add(sums[i % L::width], L::load(s + i * most_rows));
  } else {
    for (int64_t i = 0; i < tile.n; i++) {
      auto& sum = sums[tile.place(i) % L::width];
      sum = L::add(sum, L::load(s + i * most_rows));
    }
  }
  return L::in_order([&](int64_t l) { return sums[l]; }, [](typename L::F a, typename L::F b) { return L::add(a, b); });
}

// sums[width][] += the values times weights s[cells][], each row without those that it does not see: *added* to it is *least*.
template <class L> inline void add_values(const Tile& tile, const Rows& rows, int64_t vectors, int64_t width, const float* values, int64_t of_cell, const float* s, const float* added, float* sums) {
  const auto together = [&](int64_t c, int64_t n) { multiply<L>(vectors, width, values + c * of_cell, 1, of_cell, s + c * most_rows, n, sums); };
  bool unsound[cells_at_once];
  if (!tile.varies || !find_unsound<L, FloatRow>(rows, tile.n, lines_of(width), unsound)) return together(0, tile.n);
  each_stretch(tile.n, unsound, together, [&](int64_t c) {
    for (int64_t v = 0; v < vectors * L::width; v += L::width) {
      const auto weight = L::load(s + c * most_rows + v), of_mask = L::load(added + c * most_rows + v);
      for (int64_t k = 0; k < width; k++) {
        const auto sum = L::load(sums + k * most_rows + v);
        L::store(sums + k * most_rows + v, L::if_less(L::set(least), of_mask, L::multiply_add(L::set(values[c * of_cell + k]), weight, sum), sum));
      }
    }
  });
}

template <class L> inline void attend_many(const AttentionPiece& p) {
  typedef typename L::F F;
  const int64_t key_width = lines_of(p.key.width), value_width = lines_of(p.value.width), group = p.group;
  const int64_t first_token = p.first / group, end_token = (p.first + p.n - 1) / group + 1;
  const int64_t vectors = (p.n + L::width - 1) / L::width;
  const bool values_in_keys = p.key.data == p.value.data && p.key.cell == p.value.cell && p.key.head == p.value.head && p.key.type == p.value.type;
  const Scores how(p);
  Memory memory{static_cast<char*>(p.scratch)};
  float* q = memory.take<float>(key_width * most_rows);
  float* sums = memory.take<float>(value_width * most_rows);
  float* tops = memory.take<float>(most_rows);
  float* totals = memory.take<float>(most_rows);
  float* earlier = memory.take<float>(value_width * most_rows);  // the same of the parts before
  float* earlier_tops = memory.take<float>(most_rows);
  float* earlier_totals = memory.take<float>(most_rows);
  float* keys = memory.take<float>(cells_at_once * key_width);
  float* values = memory.take<float>(cells_at_once * value_width);
  float* s = memory.take<float>(cells_at_once * most_rows);
  float* added = memory.take<float>(cells_at_once * most_rows);
  memset(added, 0, sizeof(float) * cells_at_once * most_rows);  // of rows that there are not, too
  empty_all(p);
  for (int64_t h = 0; h < p.n_heads; h++) {
    float slopes[most_rows];
    for (int64_t i = 0; i < most_rows; i++) {
      const bool is_row = i < p.n;
      const int64_t token = (p.first + i) / group, head = (p.first_head + h) * group + (p.first + i) % group;
      const float* from = reinterpret_cast<const float*>(p.query + token * p.query_token + head * p.query_head);
      if (is_row) read_query(p, how, from, keys);
      for (int64_t k = 0; k < key_width; k++) q[k * most_rows + i] = is_row ? keys[k] : 0.0f;
      slopes[i] = is_row ? how.mask * slope_of(p, head) : 0.0f;
    }
    const auto clear = [&] {
      memset(sums, 0, static_cast<size_t>(4 * value_width * most_rows));
      for (int i = 0; i < most_rows; i++) tops[i] = least, totals[i] = 0;
    };
    const auto leave = [&](float* found, const float* of_sums, const float* of_tops, const float* of_totals) {
      const int64_t width = found_width(p.value.width);
      for (int64_t i = 0; i < p.n; i++) {
        float* to = found + (h * p.n + i) * width;
        for (int64_t k = 0; k < value_width; k++) to[k] = of_sums[k * most_rows + i];
        to[value_width] = of_tops[i];
        to[value_width + 1] = of_totals[i];
      }
    };
    clear();
    int64_t c = p.begin;
    bool is_first = true, starts_part = true;
    Tile tile, next;
    for (find_tile<L>(p, first_token, end_token, c, tile); tile.n; tile = next) {
      find_tile<L>(p, first_token, end_token, c, next);
      const int64_t n = tile.n;
      Rows key = rows_of(p.key, tile, next, p.first_head + h);
      unpack_all<L>(key, n, p.key, keys);
      score_all<L>(vectors, n, keys, key_width, q, key_width, s);
      if (tile.mixed)
        for (int64_t i = 0; i < n; i++)
          for (int64_t t = first_token, r = 0; r < p.n; t++) {
            const float value = from_half(p.mask[t * p.mask_token + tile.cell[i]]);
            const int64_t end = (t + 1) * group - p.first < p.n ? (t + 1) * group - p.first : p.n;
            for (; r < end; r++) added[i * most_rows + r] = value == 0 ? 0 : value * slopes[r];
          }
      for (int64_t v = 0; v < vectors * L::width; v += L::width) {
        const F before = L::load(tops + v);
        F top = before;
        for (int64_t i = 0; i < n; i++) {
          F score = L::load(s + i * most_rows + v);
          if (how.cap > 0) score = L::times(L::set(how.cap), tanh<L>(score));
          if (tile.mixed) score = masked<L>(score, L::load(added + i * most_rows + v));
          if (how.cap > 0 || tile.mixed) L::store(s + i * most_rows + v, score);
          top = L::larger(score, top);
        }
        L::store(tops + v, top);
        const F base = L::larger(top, L::set(lowest));  // where nothing is seen yet
        for (int64_t i = 0; i < n; i++) L::store(s + i * most_rows + v, exp2<L>(L::less(L::load(s + i * most_rows + v), base)));
        const F kept = exp2<L>(L::less(before, base));
        L::store(totals + v, L::multiply_add(L::load(totals + v), kept, sum_of_weights<L>(tile, s + v)));
        const F above = L::less(base, L::larger(before, L::set(lowest)));  // no number where both are infinite: that is one row's alone
        if (!starts_part && L::largest(L::larger(above, L::zero())) > 0)
          for (int64_t k = 0; k < p.value.width; k++) L::store(sums + k * most_rows + v, L::times(L::load(sums + k * most_rows + v), kept));
      }
      starts_part = false;
      const float* of_cells = values_in_keys ? keys : values;
      const int64_t of_cell = values_in_keys ? key_width : value_width;
      Rows value = rows_of(p.value, tile, next, p.first_head + h);
      if (!values_in_keys) unpack_all<L>(value, n, p.value, values);
      add_values<L>(tile, values_in_keys ? key : value, vectors, p.value.width, of_cells, of_cell, s, added, sums);
      if (!ends_part(tile, next)) continue;
      if (p.stride) {
        leave(place_of_part(p, tile.begin), sums, tops, totals);
      } else if (is_first) {
        float* other = sums;
        sums = earlier, earlier = other;
        memcpy(earlier_tops, tops, sizeof(float) * most_rows);
        memcpy(earlier_totals, totals, sizeof(float) * most_rows);
      } else {
        for (int64_t v = 0; v < vectors * L::width; v += L::width) {
          F top = L::load(earlier_tops + v), factor = top, of_other = top;
          bring_together<L>(top, L::load(tops + v), factor, of_other);
          L::store(earlier_tops + v, top);
          L::store(earlier_totals + v, L::multiply_add(L::load(totals + v), of_other, L::times(L::load(earlier_totals + v), factor)));
          for (int64_t k = 0; k < p.value.width; k++) {
            float* to = earlier + k * most_rows + v;
            L::store(to, L::multiply_add(L::load(sums + k * most_rows + v), of_other, L::times(L::load(to), factor)));
          }
        }
      }
      is_first = false, starts_part = true;
      if (next.n) clear();
    }
    if (!p.stride && !is_first) leave(p.found, earlier, earlier_tops, earlier_totals);
  }
}

template <class L> void attend(const AttentionPiece& p) {
  if (p.n <= L::few_rows) attend_few<L>(p);
  else attend_many<L>(p);
}

template <class L> void merge(const Merge& m) {
  float* all = m.found;
  int64_t i = 0;
  while (i < m.n && is_empty(m.found + i * m.stride, m.width)) i++;
  if (i == m.n && !m.sink) return static_cast<void>(memset(m.to, 0, static_cast<size_t>(4 * m.width)));
  if (i < m.n) all = m.found + i++ * m.stride;
  else memset(all, 0, static_cast<size_t>(4 * m.width));
  for (; i < m.n; i++)
    if (!is_empty(m.found + i * m.stride, m.width)) add_found<L>(all, m.found + i * m.stride, m.width);
  const float top = all[lines_of(m.width)], sink = m.sink ? *m.sink * log2_of_e : least, above = !(sink > top) ? top : sink, base = above < lowest ? lowest : above;
  const float factor = exp2_of<L>(top - base);
  float total = all[lines_of(m.width) + 1] * factor;
  if (m.sink) total += exp2_of<L>(sink - base);
  const float share = total == 0 ? 0 : factor / total;
  int64_t k = 0;
  for (; k + L::width <= m.width; k += L::width) L::store(m.to + k, L::times(L::load(all + k), L::set(share)));
  for (; k < m.width; k++) m.to[k] = all[k] * share;
  if (m.value_turn) turn_values(m.to, m.width, m.value_turn);
}

}  // namespace
}  // namespace puna
