// Attention as nodes that ggml's threads compute inside its graphs: who computes which rows and cells.
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "instructions.h"
#include "node.h"

namespace puna {
namespace {

// Rows of a batch that attend alike. Bytes of keys and values: from the first range's first cell to this one's, and from a
// sequence's to the next one's.
struct Range {
  int64_t row, n_rows, n_sequences, n_cells, key_begin, key_sequence, value_begin, value_sequence;
};

// What was found of parts lies behind the node's result where several pieces of work share a sequence's cells, and takes so many
// places at most.
constexpr int64_t most_slots = 512;
constexpr int most_shared = 256;  // units of work that several pieces share

struct Attention {
  int64_t n_heads, n_key_heads, key_width, value_width, n_ranges, key_turn, value_turn;
  bool has_sinks;
  float scale, softcap;
  Range* ranges;
  float* slopes;
  Pieces pieces;
  std::atomic<int> done[most_shared];

  int64_t group() const { return n_heads / n_key_heads; }
  int64_t n_rows() const {
    int64_t n = 0;
    for (int64_t i = 0; i < n_ranges; i++) n += ranges[i].n_rows * ranges[i].n_sequences;
    return n;
  }
  int64_t slot_floats() const { return larger(8 * n_key_heads, most_rows) * found_width(value_width); }
  int64_t n_slots() const;
};

constexpr int64_t most_ranges = 6;
constexpr int64_t operands = 3;  // query, key and value come first, then the masks of all ranges or nulls, then sinks
constexpr int64_t pieces_of_thread = 4;
constexpr int64_t few_rows_at_most = 8;  // of all instructions' few_rows
constexpr int64_t units_enough = 64;  // as many as these are not cut further: each thread finds some

// How a range is cut into units of work: by sequences, parts of the key heads, and chunks of rows; and those, where there are
// few, into pieces of some parts of the cells each.
struct Cut {
  int64_t head_parts, chunks, pieces, parts, begin, end, first_piece, first_slot, first_unit;
  bool is_few;
  int64_t n_units(const Range& r) const { return r.n_sequences * head_parts * chunks; }
};

int64_t parts_of(int64_t n_cells) { return (n_cells + cells_of_part - 1) / cells_of_part; }

// Chunks of rows, of whole tokens where their heads are not too many for that.
int64_t chunks_of(const Attention& a, const Range& r) {
  const int64_t tokens = larger(1, most_rows / a.group());
  return a.group() <= most_rows ? (r.n_rows + tokens - 1) / tokens : (r.n_rows * a.group() + most_rows - 1) / most_rows;
}

// As many as cut_all may ask for, whatever the number of threads and the instructions: none where there are units enough.
int64_t Attention::n_slots() const {
  int64_t n = 0, certain = 0;
  for (int64_t i = 0; i < n_ranges; i++) {
    const int64_t n_units = ranges[i].n_sequences * n_key_heads * chunks_of(*this, ranges[i]);
    n += smaller(n_units, units_enough) * parts_of(ranges[i].n_cells);
    certain += ranges[i].n_rows * group() > few_rows_at_most ? n_units : ranges[i].n_sequences;
  }
  return certain >= units_enough ? 0 : smaller(n, most_slots);
}

const half* mask_of(const Tensor* node, int64_t i, int64_t sequence) {
  const Tensor* mask = node->src[operands + i];
  if (!mask) return nullptr;
  return reinterpret_cast<const half*>(static_cast<const char*>(mask->data) + static_cast<size_t>(sequence) * mask->nb[3]);
}

// Whether cells [begin, end) are hidden from all rows of a range.
bool are_hidden(const Tensor* node, const Range& r, int64_t i, int64_t begin, int64_t end) {
  if (!node->src[operands + i]) return false;
  const int64_t row = static_cast<int64_t>(node->src[operands + i]->nb[1] / 2);
  for (int64_t s = 0; s < r.n_sequences; s++)
    for (int64_t t = 0; t < r.n_rows; t++) {
      const half* mask = mask_of(node, i, s) + t * row;
      for (int64_t c = begin; c < end; c++)
        if (mask[c] != 0xfc00) return false;
    }
  return true;
}

// The same by every thread. A view of the cache is longer than what is in it: few rows' cells are those that are seen. How
// cells are shared out changes no result: what is found of each part is put together in the same order.
int64_t cut_all(const Attention& a, const Tensor* node, int n_threads, Cut* cuts) {
  int64_t pieces = 0, slots = 0, shared = 0, all_units = 0;
  for (int64_t i = 0; i < a.n_ranges; i++) {
    const Range& r = a.ranges[i];
    Cut& cut = cuts[i];
    cut.begin = 0, cut.end = r.n_cells;
    cut.is_few = r.n_rows * a.group() <= chosen->attention->few_rows;
    if (cut.is_few) {
      while (cut.end > cells_at_once && are_hidden(node, r, i, (cut.end - 1) / cells_at_once * cells_at_once, cut.end)) cut.end = (cut.end - 1) / cells_at_once * cells_at_once;
      while (cut.end - cut.begin > cells_of_part && are_hidden(node, r, i, cut.begin, cut.begin + cells_of_part)) cut.begin += cells_of_part;
    }
    cut.parts = parts_of(cut.end - cut.begin);
    cut.chunks = cut.is_few ? 1 : chunks_of(a, r);
    cut.head_parts = cut.is_few ? 1 : a.n_key_heads;
    all_units += cut.n_units(r);
  }
  const int64_t wanted = n_threads * pieces_of_thread;
  for (int64_t i = 0; i < a.n_ranges; i++) {
    const Range& r = a.ranges[i];
    Cut& cut = cuts[i];
    cut.pieces = 1;
    if (n_threads > 1 && all_units < smaller(wanted, units_enough)) {
      cut.pieces = smaller(cut.parts, (wanted + all_units - 1) / all_units);
      if (cut.is_few && cut.pieces * all_units < 2 * n_threads) {
        cut.head_parts = smaller(a.n_key_heads, (2 * n_threads + all_units * cut.pieces - 1) / (all_units * cut.pieces));
      }
      const int64_t n_units = cut.n_units(r), n_slots = n_units * cut.parts;
      if (slots + n_slots > a.n_slots() || shared + n_units > most_shared) cut.pieces = 1;
    }
    const int64_t n_units = cut.n_units(r);
    cut.first_piece = pieces, cut.first_slot = slots, cut.first_unit = shared;
    pieces += n_units * cut.pieces;
    if (cut.pieces > 1) slots += n_units * cut.parts, shared += n_units;
  }
  return pieces;
}

struct Scratches {
  Scratch piece, found;
};
thread_local Scratches memory;

Held held_by(const Tensor* tensor, int64_t offset, int64_t width) {
  const int64_t bytes = tensor->type == type_f32 ? 4 * width : tensor->type == type_f16 ? 2 * width : tensor->type == type_q8_0 ? width / 32 * 34 : width / 32 * 18;
  return {static_cast<const uint8_t*>(tensor->data) + offset, tensor->type, width, static_cast<int64_t>(tensor->nb[1]), static_cast<int64_t>(tensor->nb[2]), bytes};
}

void attend_piece(Attention& a, const Tensor* node, const Cut& cut, int64_t range, int64_t index) {
  const Range& r = a.ranges[range];
  const Tensor *query = node->src[0], *key = node->src[1], *value = node->src[2];
  const Tensor* sinks = a.has_sinks ? node->src[operands + a.n_ranges] : nullptr;
  const int64_t unit = index / cut.pieces, piece = index % cut.pieces, group = a.group(), rows = r.n_rows * group;
  // The last rows see the most, and so come first; of several chunks of rows all heads' do.
  const int64_t head_part = unit % cut.head_parts, sequence = unit / cut.head_parts % r.n_sequences;
  const int64_t chunk = cut.chunks - 1 - unit / cut.head_parts / r.n_sequences;
  const auto row_at = [&](int64_t i) { return group <= most_rows ? r.n_rows * i / cut.chunks * group : rows * i / cut.chunks; };
  const auto part_at = [&](int64_t i) { return cut.parts * i / cut.pieces; };
  const int64_t token = r.row + sequence * r.n_rows;
  AttentionPiece p;
  p.key = held_by(key, r.key_begin + sequence * r.key_sequence, a.key_width);
  p.value = held_by(value, r.value_begin + sequence * r.value_sequence, a.value_width);
  p.begin = cut.begin + part_at(piece) * cells_of_part, p.end = smaller(cut.begin + part_at(piece + 1) * cells_of_part, cut.end);
  p.query = static_cast<const uint8_t*>(query->data) + token * static_cast<int64_t>(query->nb[2]);
  p.query_token = static_cast<int64_t>(query->nb[2]), p.query_head = static_cast<int64_t>(query->nb[1]);
  p.group = group;
  p.first_head = a.n_key_heads * head_part / cut.head_parts;
  p.n_heads = a.n_key_heads * (head_part + 1) / cut.head_parts - p.first_head;
  p.first = row_at(chunk), p.n = row_at(chunk + 1) - p.first;
  p.mask = mask_of(node, range, sequence);
  p.mask_token = p.mask ? static_cast<int64_t>(node->src[operands + range]->nb[1] / 2) : 0;
  p.scale = a.scale, p.softcap = a.softcap, p.slopes = a.slopes, p.key_turn = a.key_turn;
  p.scratch = memory.piece.of(attention_scratch(p.n_heads, p.n, a.key_width, a.value_width));
  float* result = static_cast<float*>(node->data);
  float* found = nullptr;
  if (cut.pieces == 1) {
    p.stride = 0;
    p.found = found = static_cast<float*>(memory.found.of(4 * p.n_heads * p.n * found_width(a.value_width)));
  } else {
    p.stride = a.slot_floats();
    found = result + lines_of(a.n_rows() * a.n_heads * a.value_width) + (cut.first_slot + unit * cut.parts) * p.stride;
    p.found = found + part_at(piece) * p.stride;
  }
  chosen->attention->attend(p);
  if (cut.pieces > 1) {  // who is last puts the parts together
    std::atomic<int>& done = a.done[cut.first_unit + unit];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < cut.pieces) return;
    done.store(0, std::memory_order_relaxed);
  }
  for (int64_t h = 0; h < p.n_heads; h++)
    for (int64_t i = 0; i < p.n; i++) {
      const int64_t head = (p.first_head + h) * group + (p.first + i) % group;
      Merge m;
      m.found = found + (h * p.n + i) * found_width(a.value_width);
      m.n = p.stride ? cut.parts : 1, m.stride = p.stride, m.width = a.value_width;
      m.sink = sinks ? static_cast<const float*>(sinks->data) + head : nullptr;
      m.value_turn = a.value_turn;
      m.to = result + ((token + (p.first + i) / group) * a.n_heads + head) * a.value_width;
      chosen->attention->merge(m);
    }
}

}  // namespace
}  // namespace puna

using namespace puna;

// Whether a cache may hold keys or values of this type.
PUNA_EXPORT bool puna_can_attend(int type) { return can_be_attended(type); }

// Attention of *n_ranges* ranges of rows; of each the eight numbers of a Range. The turns: how many of a head's values lie turned
// together, 0 where none do; powers of two from 16 on.
PUNA_EXPORT void* puna_attention_new(int64_t n_heads, int64_t n_key_heads, int64_t key_width, int64_t value_width, int64_t n_ranges,
                                     const int64_t* ranges, bool has_sinks, float scale, float softcap, float max_bias, int64_t key_turn,
                                     int64_t value_turn) {
  Attention* a = new Attention;
  a->n_heads = n_heads, a->n_key_heads = n_key_heads, a->key_width = key_width, a->value_width = value_width, a->n_ranges = n_ranges;
  a->has_sinks = has_sinks, a->scale = scale, a->softcap = softcap, a->key_turn = key_turn, a->value_turn = value_turn;
  a->ranges = new Range[static_cast<size_t>(n_ranges)];
  static_assert(sizeof(Range) == 8 * sizeof(int64_t), "as the caller has them");
  memcpy(static_cast<void*>(a->ranges), ranges, sizeof(Range) * static_cast<size_t>(n_ranges));
  for (auto& done : a->done) done.store(0, std::memory_order_relaxed);
  a->slopes = nullptr;
  if (max_bias > 0) {  // powers of one number for as many heads as the largest power of two, then those half-way between them
    a->slopes = new float[static_cast<size_t>(n_heads)];
    int64_t n = 1;
    while (2 * n <= n_heads) n *= 2;
    for (int64_t h = 0; h < n_heads; h++) {
      const double power = h < n ? static_cast<double>(h + 1) : static_cast<double>(h - n) + 0.5;
      a->slopes[h] = static_cast<float>(std::exp2(-static_cast<double>(max_bias) / static_cast<double>(n) * power));
    }
  }
  return a;
}

// Floats of the node's memory: the result [n][n_heads][value_width], and what pieces leave behind it.
PUNA_EXPORT int64_t puna_attention_floats(void* attention) {
  const Attention& a = *static_cast<Attention*>(attention);
  return lines_of(a.n_rows() * a.n_heads * a.value_width) + a.n_slots() * a.slot_floats();
}

PUNA_EXPORT void puna_attention_free(void* attention) {
  Attention* a = static_cast<Attention*>(attention);
  delete[] a->ranges;
  delete[] a->slopes;
  delete a;
}

// Node: operands are the query F32 [key_width, n_heads, n], the first range's key and value, the mask of each range or null, sinks.
PUNA_EXPORT void puna_attention_node(void* node, int, int n_threads, void* attention) {
  Attention& a = *static_cast<Attention*>(attention);
  const Tensor* to = static_cast<Tensor*>(node);
  Cut cuts[most_ranges];
  const int64_t n = cut_all(a, to, n_threads, cuts);
  a.pieces.each(static_cast<int>(n), n_threads, [&](int i) {
    int64_t range = a.n_ranges - 1;
    while (cuts[range].first_piece > i) range--;
    attend_piece(a, to, cuts[range], range, i - cuts[range].first_piece);
  });
}

// Node: x F32 [n_in, n...], every so many values of a column turned; user data is their number.
PUNA_EXPORT void puna_turn_node(void* node, int thread, int n_threads, void* width) {
  const Tensor *to = static_cast<Tensor*>(node), *x = to->src[0];
  const int64_t n = n_columns(x), n_in = x->ne[0];
  for (int64_t i = n * thread / n_threads; i < n * (thread + 1) / n_threads; i++) {
    float* y = static_cast<float*>(to->data) + i * n_in;
    memcpy(y, column(x, i), static_cast<size_t>(n_in) * sizeof(float));
    chosen->attention->turn(y, n_in, reinterpret_cast<intptr_t>(width));
  }
}
