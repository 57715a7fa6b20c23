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

// Some query heads' rows of one sequence and some of the cells that they may see, whole parts of them. The query heads that share
// a key head lie together: row r is query head r % group of that key head, of token r / group.
struct AttentionPiece {
  Held key, value;
  int64_t begin, end;  // cells
  const uint8_t* query;
  int64_t query_token, query_head;  // bytes from one to the next
  int64_t group, first_head, n_heads;  // key heads
  int64_t first, n;                    // rows of each key head
  const half* mask;                    // of token 0; null: every row sees every cell
  int64_t mask_token;                  // from one token to the next
  float scale, softcap;
  const float* slopes;  // of each query head; null: the mask is added as it is
  int64_t key_turn;     // the keys lie turned, so many values together, and so must queries be; 0: they do not
  float* found;         // [n_heads][n][found_width(value.width)] of each part, or of all parts together
  int64_t stride;       // floats from a part's to the next one's; 0: together
  void* scratch;        // attention_scratch(piece) bytes
};

static inline int64_t lines_of(int64_t floats) { return (floats + 15) / 16 * 16; }

// What is found for a row: the values' sum, weighted by exp(score - largest), with zeros up to a whole line; the largest; and the
// sum of the weights.
static inline int64_t found_width(int64_t value_width) { return lines_of(value_width) + 16; }

// Of one row of one query head, what was found in so many parts, *stride* floats apart, as shares of one. It is changed.
struct Merge {
  float* found;
  int64_t n, stride, width;
  const float* sink;   // null: none
  int64_t value_turn;  // what was found is to be turned back; 0: not
  float* to;
};

constexpr int cells_at_once = 64, most_rows = 64;  // of a key head, in one piece
constexpr int cells_of_part = 256;                 // what they find is put together in their order: the same for any threads

static inline bool can_be_attended(int type) { return type == type_f32 || type == type_f16 || type == type_q8_0 || type == type_q4_0; }

static inline int64_t attention_scratch(int64_t n_heads, int64_t n, int64_t key_width, int64_t value_width) {
  const int64_t widths = lines_of(key_width) + 2 * lines_of(value_width), of_heads = n_heads * lines_of(n);
  const int64_t rows = of_heads > most_rows ? of_heads : most_rows;
  return 4 * (rows * (widths + 4 * 16) + cells_at_once * (widths + 2 * most_rows));
}

struct AttentionInstructions {
  int few_rows;  // as many rows, or fewer, are computed one by one for several key heads; more, side by side
  void (*attend)(const AttentionPiece&);
  void (*merge)(const Merge&);
  void (*turn)(float* x, int64_t n, int64_t width);
};

extern const AttentionInstructions portable_attention;
#if defined(__x86_64__)
extern const AttentionInstructions avx2_attention, avx512_attention;
#elif defined(__aarch64__)
extern const AttentionInstructions neon_attention;
#endif

}  // namespace puna
