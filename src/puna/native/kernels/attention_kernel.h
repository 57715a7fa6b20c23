// Attention: one algorithm for every kind of cache and every instruction set.
//
// Cells that no row sees are left out first; the others pass in tiles, and a tile's scores are turned into weights at once, with
// the largest score so far subtracted (Milakov & Gimelshein 2018; Dao et al. 2022). Scores are kept in base 2.
//
// There are two ways. Few rows of a key head are the queries that share it in a step of decoding: keys and values are read
// where they are, and registers lie along them; all key heads pass over a tile of cells, so that memory is read in order. Many
// rows lie along the registers themselves: keys and values are unpacked once for all of them, each number of a key times that
// of 64 rows, and nothing is ever summed across a register.
//
// L is the instruction set, registers F of L::width floats. Compiled once per instruction set: nothing here has a name that the
// linker could share between them.
#pragma once
#include "attention.h"
#include "half.h"

#define PUNA_INLINE inline __attribute__((always_inline))
#define PUNA_UNROLL _Pragma("GCC unroll 16")

namespace puna {
namespace {

constexpr float log2_of_e = 1.44269504f, least = -__builtin_inff();
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
  alignas(64) float all[L::width];
  L::store(all, exp2<L>(L::set(x)));
  return all[0];
}

// 2 / (1 + e^-2x) - 1
template <class L> PUNA_INLINE typename L::F tanh(typename L::F x) {
  const auto e = exp2<L>(L::times(L::larger(L::set(-30.0f), x), L::set(-2 * log2_of_e)));
  return L::less(L::over(L::set(2.0f), L::add(L::set(1.0f), e)), L::set(1.0f));
}

// ---- kinds of rows: blocks of *parts* registers, which may have a common factor

struct HalfRow {
  template <class L> static constexpr int64_t parts = 1;
  template <class L> static PUNA_INLINE typename L::F factor(const uint8_t*, int64_t) { return L::zero(); }
  template <class L> static PUNA_INLINE typename L::F load(const uint8_t* row, int64_t block, int64_t, typename L::F) {
    return L::load_half(row + 2 * L::width * block);
  }
};

struct Q8Row {
  template <class L> static constexpr int64_t parts = 32 / L::width;
  template <class L> static PUNA_INLINE typename L::F factor(const uint8_t* row, int64_t block) { return L::set_half(row + 34 * block); }
  template <class L> static PUNA_INLINE typename L::F load(const uint8_t* row, int64_t block, int64_t part, typename L::F factor) {
    return L::times(L::load_i8(row + 34 * block + 2 + part * L::width), factor);
  }
};

struct FloatRow {
  template <class L> static constexpr int64_t parts = 1;
  template <class L> static PUNA_INLINE typename L::F factor(const uint8_t*, int64_t) { return L::zero(); }
  template <class L> static PUNA_INLINE typename L::F load(const uint8_t* row, int64_t block, int64_t, typename L::F) {
    return L::load(reinterpret_cast<const float*>(row) + L::width * block);
  }
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

constexpr int32_t is_mixed = 1 << 30;  // some row does not see the cell, or sees it at a distance

struct Memory {
  char* at;
  template <class T> T* take(int64_t n) {
    T* taken = reinterpret_cast<T*>(at);
    at += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }
};

// The cells that tokens [first, end) see, in order; how many those are.
template <class L> inline int64_t seen_cells(const AttentionPiece& p, int64_t first, int64_t end, int32_t* cells) {
  int64_t n = 0;
  for (int64_t c = p.begin; c < p.end; c += cells_at_once) {
    const int64_t count = p.end - c < cells_at_once ? p.end - c : cells_at_once;
    bool all = count == cells_at_once, none = all;
    for (int64_t t = first; t < end && (all || none); t++) {
      const half* mask = p.mask + t * p.mask_token + c;
      all = all && L::are_all(mask, 0);
      none = none && L::are_all(mask, hidden_bits);
    }
    if (none) continue;
    if (all) {
      for (int64_t i = 0; i < count; i++) cells[n + i] = static_cast<int32_t>(c + i);
      n += count;
      continue;
    }
    bool seen[cells_at_once] = {}, mixed[cells_at_once] = {};
    for (int64_t t = first; t < end; t++) {
      const half* mask = p.mask + t * p.mask_token + c;
      for (int64_t i = 0; i < count; i++) {
        seen[i] |= mask[i] != hidden_bits;
        mixed[i] |= mask[i] != 0;
      }
    }
    for (int64_t i = 0; i < count; i++)
      if (seen[i]) cells[n++] = static_cast<int32_t>(c + i) | (mixed[i] ? is_mixed : 0);
  }
  return n;
}

// Some cells that pass together.
struct Tile {
  int64_t n;
  bool mixed;
  int32_t cell[cells_at_once];

  Tile(const int32_t* cells, int64_t n) : n(n), mixed(false) {
    for (int64_t i = 0; i < n; i++) {
      mixed |= (cells[i] & is_mixed) != 0;
      cell[i] = cells[i] & ~is_mixed;
    }
  }
};

inline const uint8_t* row_of(const Held& held, int64_t cell, int64_t head) { return held.data + cell * held.cell + head * held.head; }

// Rows of one head, one of each cell; and the rows that come after them, which are on their way from memory meanwhile.
struct Rows {
  const uint8_t* at[cells_at_once + 4];
  const uint8_t* next[cells_at_once + 4];
  int64_t bytes;

  PUNA_INLINE void fetch(int64_t i) const {
    for (int64_t b = 0; b < bytes; b += line) __builtin_prefetch(next[i] + b);
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

// ---- scores to weights

struct Scores {
  float factor, cap, mask;  // in base 2: of the product, and around its tanh if there is a cap; of the mask

  explicit Scores(const AttentionPiece& p)
      : factor(p.softcap > 0 ? p.scale / p.softcap : p.scale * log2_of_e), cap(p.softcap * log2_of_e), mask(log2_of_e) {}
};

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
    int64_t i = 0;
    for (; i + 4 <= width / L::width; i += 4) mix<L, Row, M, 4>(weights, values, n, i, sums, sums_row);
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

// Scores of one row and tile to weights: what earlier sums must be multiplied with.
template <class L> inline float weigh(float* s, int64_t n, const Scores& how, const float* added, float added_factor, float& top, float& total) {
  typedef typename L::F F;
  F largest = L::set(top);
  for (int64_t i = 0; i < n; i += L::width) {
    F v = L::load(s + i);
    if (how.cap > 0) v = L::times(L::set(how.cap), tanh<L>(v));
    if (added) v = L::multiply_add(L::load(added + i), L::set(added_factor), v);
    if (i + L::width > n) {  // beyond the last cell
      alignas(64) float all[L::width];
      L::store(all, v);
      for (int64_t k = n - i; k < L::width; k++) all[k] = least;
      v = L::load(all);
    }
    L::store(s + i, v);
    largest = L::larger(v, largest);
  }
  const float above = L::largest(largest), base = above == least ? 0.0f : above;
  F sum = L::zero();
  for (int64_t i = 0; i < n; i += L::width) {
    const F weight = exp2<L>(L::less(L::load(s + i), L::set(base)));
    L::store(s + i, weight);
    sum = L::add(sum, weight);
  }
  const float kept = top == above ? 1.0f : exp2_of<L>(top - base);
  total = total * kept + L::sum(sum);
  top = above;
  return kept;
}

template <class L> inline void attend_few(const AttentionPiece& p) {
  const int64_t key_width = lines_of(p.key.width), value_width = lines_of(p.value.width), group = p.group;
  const int64_t first_token = p.first / group, end_token = (p.first + p.n - 1) / group + 1;
  const Scores how(p);
  Memory memory{static_cast<char*>(p.scratch)};
  float* q = memory.take<float>(p.n_heads * p.n * key_width);
  float* sums = memory.take<float>(p.n_heads * p.n * value_width);
  float* tops = memory.take<float>(p.n_heads * p.n);
  float* totals = memory.take<float>(p.n_heads * p.n);
  float* keys = memory.take<float>(cells_at_once * key_width);
  float* values = memory.take<float>(cells_at_once * value_width);
  float* s = memory.take<float>(p.n * cells_at_once);
  float* added = memory.take<float>((end_token - first_token) * cells_at_once);
  int32_t* cells = memory.take<int32_t>(p.end - p.begin + cells_at_once);
  for (int64_t h = 0; h < p.n_heads; h++)
    for (int64_t i = 0; i < p.n; i++) {
      const int64_t token = (p.first + i) / group, head = (p.first_head + h) * group + (p.first + i) % group;
      const float* from = reinterpret_cast<const float*>(p.query + token * p.query_token + head * p.query_head);
      float* to = q + (h * p.n + i) * key_width;
      for (int64_t k = 0; k < p.key.width; k++) to[k] = from[k] * how.factor;
      for (int64_t k = p.key.width; k < key_width; k++) to[k] = 0;
    }
  memset(sums, 0, static_cast<size_t>(4 * p.n_heads * p.n * value_width));
  for (int64_t i = 0; i < p.n_heads * p.n; i++) tops[i] = least, totals[i] = 0;
  const bool keys_in_place = is_read_in_place(p.key, L::width), values_in_place = is_read_in_place(p.value, L::width);
  const int64_t n_cells = seen_cells<L>(p, first_token, end_token, cells);
  for (int64_t begin = 0; begin < n_cells; begin += cells_at_once) {
    const Tile tile(cells + begin, n_cells - begin < cells_at_once ? n_cells - begin : cells_at_once);
    const int64_t n = tile.n, after = n_cells - begin - n;
    const Tile next(cells + begin + n, after < cells_at_once ? after : cells_at_once);
    if (tile.mixed)
      for (int64_t t = first_token; t < end_token; t++)
        for (int64_t i = 0; i < n; i++) added[(t - first_token) * cells_at_once + i] = from_half(p.mask[t * p.mask_token + tile.cell[i]]);
    for (int64_t h = 0; h < p.n_heads; h++) {
      Rows key = rows_of(p.key, tile, next, p.first_head + h), value = rows_of(p.value, tile, next, p.first_head + h);
      float* of_head = sums + h * p.n * value_width;
      const float* query = q + h * p.n * key_width;
      if (keys_in_place && p.key.type == type_f16) {
        all_dots<L, HalfRow>(p.n, query, key_width, key, n, p.key.width, s);
      } else if (keys_in_place) {
        all_dots<L, Q8Row>(p.n, query, key_width, key, n, p.key.width, s);
      } else {
        unpack_all<L>(key, n, p.key, keys);
        all_dots<L, FloatRow>(p.n, query, key_width, key, n, key_width, s);
      }
      for (int64_t i = 0; i < p.n; i++) {
        const int64_t head = (p.first_head + h) * group + (p.first + i) % group;
        const float* of_token = tile.mixed ? added + ((p.first + i) / group - first_token) * cells_at_once : nullptr;
        const float kept = weigh<L>(s + i * cells_at_once, n, how, of_token, how.mask * slope_of(p, head), tops[h * p.n + i], totals[h * p.n + i]);
        if (kept != 1.0f)
          for (int64_t k = 0; k < value_width; k += L::width)
            L::store(of_head + i * value_width + k, L::times(L::load(of_head + i * value_width + k), L::set(kept)));
      }
      if (values_in_place && p.value.type == type_f16) {
        all_mixed<L, HalfRow>(p.n, s, value, n, p.value.width, of_head, value_width);
      } else if (values_in_place) {
        all_mixed<L, Q8Row>(p.n, s, value, n, p.value.width, of_head, value_width);
      } else {
        unpack_all<L>(value, n, p.value, values);
        all_mixed<L, FloatRow>(p.n, s, value, n, value_width, of_head, value_width);
      }
    }
  }
  const int64_t width = found_width(p.value.width);
  for (int64_t i = 0; i < p.n_heads * p.n; i++) {
    memcpy(p.found + i * width, sums + i * value_width, static_cast<size_t>(4 * p.value.width));
    p.found[i * width + p.value.width] = tops[i];
    p.found[i * width + p.value.width + 1] = totals[i];
  }
}

// ---- many rows: [..][most_rows], of which *vectors* registers are used

template <class L, int M, int N, bool more> inline void tile_of(const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  typename L::F sums[M][N];
  PUNA_UNROLL for (int m = 0; m < M; m++)
    PUNA_UNROLL for (int k = 0; k < N; k++) sums[m][k] = more ? L::load(c + m * most_rows + k * L::width) : L::zero();
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

template <class L, int N, bool more, int M = L::tile_rows> PUNA_INLINE void tile_of_rows(int64_t rows, const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  if (rows == M) tile_of<L, M, N, more>(a, a_row, a_next, b, n, c);
  else if constexpr (M > 1) tile_of_rows<L, N, more, M - 1>(rows, a, a_row, a_next, b, n, c);
}

template <class L, bool more, int N = L::tile_vectors> PUNA_INLINE void multiply_vectors(int64_t vectors, int64_t rows, const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  if (vectors == N) {
    const int64_t parts = (rows + L::tile_rows - 1) / L::tile_rows;
    for (int64_t i = 0; i < parts; i++) {
      const int64_t r = rows * i / parts;
      tile_of_rows<L, N, more>(rows * (i + 1) / parts - r, a + r * a_row, a_row, a_next, b, n, c + r * most_rows);
    }
  } else if constexpr (N > 1) {
    multiply_vectors<L, more, N - 1>(vectors, rows, a, a_row, a_next, b, n, c);
  }
}

// c[rows][] = (or, with more, +=) sum over n of a[rows][n] b[n][]
template <class L, bool more> inline void multiply(int64_t vectors, int64_t rows, const float* a, int64_t a_row, int64_t a_next, const float* b, int64_t n, float* c) {
  for (int64_t v = 0; v < vectors; v += L::tile_vectors) {
    const int64_t now = vectors - v < L::tile_vectors ? vectors - v : L::tile_vectors;
    multiply_vectors<L, more>(now, rows, a, a_row, a_next, b + v * L::width, n, c + v * L::width);
  }
}

template <class L> inline void attend_many(const AttentionPiece& p) {
  typedef typename L::F F;
  const int64_t key_width = lines_of(p.key.width), value_width = lines_of(p.value.width), group = p.group;
  const int64_t first_token = p.first / group, end_token = (p.first + p.n - 1) / group + 1;
  const int64_t vectors = (p.n + L::width - 1) / L::width;
  const bool values_in_keys = p.key.data == p.value.data && p.key.cell == p.value.cell && p.key.head == p.value.head && p.key.type == p.value.type;
  const Scores how(p);
  Memory memory{static_cast<char*>(p.scratch)};
  float* q = memory.take<float>(p.key.width * most_rows);
  float* sums = memory.take<float>(p.value.width * most_rows);
  float* tops = memory.take<float>(most_rows);
  float* totals = memory.take<float>(most_rows);
  float* keys = memory.take<float>(cells_at_once * key_width);
  float* values = memory.take<float>(cells_at_once * value_width);
  float* s = memory.take<float>(cells_at_once * most_rows);
  float* added = memory.take<float>(cells_at_once * most_rows);
  int32_t* cells = memory.take<int32_t>(p.end - p.begin + cells_at_once);
  memset(added, 0, sizeof(float) * cells_at_once * most_rows);  // of rows that there are not, too
  const int64_t n_cells = seen_cells<L>(p, first_token, end_token, cells);
  for (int64_t h = 0; h < p.n_heads; h++) {
    float slopes[most_rows];
    for (int64_t i = 0; i < most_rows; i++) {
      if (i >= p.n) {
        for (int64_t k = 0; k < p.key.width; k++) q[k * most_rows + i] = 0;
        slopes[i] = 0;
        continue;
      }
      const int64_t token = (p.first + i) / group, head = (p.first_head + h) * group + (p.first + i) % group;
      const float* from = reinterpret_cast<const float*>(p.query + token * p.query_token + head * p.query_head);
      for (int64_t k = 0; k < p.key.width; k++) q[k * most_rows + i] = from[k] * how.factor;
      slopes[i] = how.mask * slope_of(p, head);
    }
    memset(sums, 0, static_cast<size_t>(4 * p.value.width * most_rows));
    for (int i = 0; i < most_rows; i++) tops[i] = least, totals[i] = 0;
    for (int64_t begin = 0; begin < n_cells; begin += cells_at_once) {
      const Tile tile(cells + begin, n_cells - begin < cells_at_once ? n_cells - begin : cells_at_once);
      const int64_t n = tile.n, after = n_cells - begin - n;
      const Tile next(cells + begin + n, after < cells_at_once ? after : cells_at_once);
      Rows key = rows_of(p.key, tile, next, p.first_head + h);
      unpack_all<L>(key, n, p.key, keys);
      multiply<L, false>(vectors, n, keys, key_width, 1, q, p.key.width, s);
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
          if (tile.mixed) score = L::add(score, L::load(added + i * most_rows + v));
          if (how.cap > 0 || tile.mixed) L::store(s + i * most_rows + v, score);
          top = L::larger(score, top);
        }
        L::store(tops + v, top);
        const F base = L::larger(top, L::set(-3e38f));  // where nothing is seen yet
        F total = L::zero();
        for (int64_t i = 0; i < n; i++) {
          const F weight = exp2<L>(L::less(L::load(s + i * most_rows + v), base));
          L::store(s + i * most_rows + v, weight);
          total = L::add(total, weight);
        }
        const F kept = exp2<L>(L::less(before, base));
        L::store(totals + v, L::multiply_add(L::load(totals + v), kept, total));
        if (begin && L::largest(L::less(base, L::larger(before, L::set(-3e38f)))) > 0)
          for (int64_t k = 0; k < p.value.width; k++) L::store(sums + k * most_rows + v, L::times(L::load(sums + k * most_rows + v), kept));
      }
      const float* of_cells = values_in_keys ? keys : values;
      const int64_t of_cell = values_in_keys ? key_width : value_width;
      Rows value = rows_of(p.value, tile, next, p.first_head + h);
      if (!values_in_keys)
        unpack_all<L>(value, n, p.value, values);
      multiply<L, true>(vectors, p.value.width, of_cells, 1, of_cell, s, n, sums);
    }
    const int64_t width = found_width(p.value.width);
    for (int64_t i = 0; i < p.n; i++) {
      float* to = p.found + (h * p.n + i) * width;
      for (int64_t k = 0; k < p.value.width; k++) to[k] = sums[k * most_rows + i];
      to[p.value.width] = tops[i];
      to[p.value.width + 1] = totals[i];
    }
  }
}

template <class L> constexpr int few_rows = L::width / 2;

template <class L> void attend(const AttentionPiece& p) {
  if (p.n <= few_rows<L>) attend_few<L>(p);
  else attend_many<L>(p);
}

template <class L> void merge(const Merge& m) {
  const float sink = m.sink ? *m.sink * log2_of_e : least;
  float top = sink;
  for (int64_t i = 0; i < m.n; i++) {
    const float other = m.found[i * m.stride + m.width];
    if (!(other <= top)) top = other;
  }
  const float base = top == least ? 0.0f : top;
  float total = m.sink ? exp2_of<L>(sink - base) : 0.0f;
  for (int64_t i = 0; i < m.n; i++) total += m.found[i * m.stride + m.width + 1] * exp2_of<L>(m.found[i * m.stride + m.width] - base);
  const float share = total == 0.0f ? 0.0f : 1.0f / total;
  for (int64_t i = 0; i < m.n; i++) {
    const float* found = m.found + i * m.stride;
    const float factor = exp2_of<L>(found[m.width] - base) * share;
    int64_t k = 0;
    for (; k + L::width <= m.width; k += L::width) {
      const auto part = L::times(L::load(found + k), L::set(factor));
      L::store(m.to + k, i ? L::add(L::load(m.to + k), part) : part);
    }
    for (; k < m.width; k++) m.to[k] = (i ? m.to[k] : 0.0f) + found[k] * factor;
  }
}

}  // namespace
}  // namespace puna
