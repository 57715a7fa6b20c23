// Attention over keys and values as a cache holds them: what is asked of an instruction set.
#pragma once
#include <cstdint>

#include "formats.h"

namespace puna {

// Rows of a cache: of cell c and head h at data + c cell + h head, *width* values of a type.
struct Held {
  const uint8_t* data;
  int type;
  int64_t width, cell, head;
  int64_t bytes;  // of one head's values in a cell
};

// Some query heads' rows of one sequence and some of the cells that they may see. The query heads that share a key head lie
// together: row r is query head r % group of that key head, of token r / group.
struct AttentionPiece {
  Held key, value;
  int64_t begin, end;  // cells
  const uint8_t* query;
  int64_t query_token, query_head;  // bytes from one to the next
  int64_t group, first_head, n_heads;  // key heads
  int64_t first, n;                    // rows of each key head
  const half* mask;                    // of token 0
  int64_t mask_token;                  // from one token to the next
  float scale, softcap;
  const float* slopes;  // of each query head; null: the mask is added as it is
  float* found;         // [n_heads][n][found_width(value.width)]
  void* scratch;        // attention_scratch(piece) bytes
};

// What a piece finds for a row: the values' sum, weighted by exp(score - largest); the largest; and the sum of the weights.
static constexpr int64_t found_width(int64_t value_width) { return value_width + 2; }

// Of one row of one query head, what so many pieces found, *stride* floats apart, as shares of one.
struct Merge {
  const float* found;
  int64_t n, stride, width;
  const float* sink;  // null: none
  float* to;
};

constexpr int type_f32 = 0;  // ggml's number
constexpr int cells_at_once = 64, most_rows = 64;  // of a key head, in one piece

static inline bool can_be_attended(int type) { return type == type_f32 || type == type_f16 || type == type_q8_0 || type == type_q4_0; }

static inline int64_t lines_of(int64_t floats) { return (floats + 15) / 16 * 16; }

static inline int64_t attention_scratch(int64_t n_heads, int64_t n, int64_t key_width, int64_t value_width, int64_t n_cells) {
  const int64_t widths = lines_of(key_width) + lines_of(value_width), of_heads = n_heads * lines_of(n);
  const int64_t rows = of_heads > most_rows ? of_heads : most_rows;
  return 4 * (rows * (widths + 2 * 16) + cells_at_once * (widths + 3 * most_rows) + lines_of(n_cells + cells_at_once));
}

struct AttentionInstructions {
  int few_rows;  // as many rows, or fewer, are computed one by one for several key heads; more, side by side
  void (*attend)(const AttentionPiece&);
  void (*merge)(const Merge&);
};

extern const AttentionInstructions portable_attention;
#if defined(__x86_64__)
extern const AttentionInstructions avx2_attention, avx512_attention;
#endif

}  // namespace puna
