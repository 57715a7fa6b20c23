// Products with experts: each column of activations is multiplied with one of many matrices of the same shape.
//
// Columns that go to the same expert are brought together when activations are rounded, so that each expert's weights are
// read once for all of its tokens. One token needs none of that: every thread rounds it for itself.
#include <cstring>

#include "parts.h"

namespace puna {
namespace {

struct Experts {
  const Format* format;  // of the gate where there is one; *up* is rounded alike
  const Format* up;
  Gate gate;
  int64_t n_in, n_rows, n_experts;  // rows of the result
  int64_t matrix_bytes, up_bytes;   // from one expert's to the next one's
  int64_t up_begin;                 // of up, where both are one matrix
  Shares shares;
};

// One expert's weights; up's where there is a gate.
struct Weights {
  const uint8_t *plain, *up;

  Weights(const Experts& m, Tensor* const* operands, int64_t e) : plain(static_cast<const uint8_t*>(operands[0]->data) + e * m.matrix_bytes), up(nullptr) {
    if (m.gate != gate_none) up = static_cast<const uint8_t*>(operands[1]->data) + e * m.up_bytes + m.up_begin;
  }
};

thread_local Scratch gate_scratch;
constexpr int64_t gated_bytes = 64 << 10;

// Number i of a tensor I32 [n_used, n] whose columns may lie apart.
int32_t expert_of(const Tensor* experts, int64_t i) {
  const int64_t slot = i % experts->ne[0], token = i / experts->ne[0];
  return *reinterpret_cast<const int32_t*>(static_cast<const char*>(experts->data) + slot * static_cast<int64_t>(experts->nb[0]) +
                                           token * static_cast<int64_t>(experts->nb[1]));
}

// Columns in the order of their experts. Views of a block of memory that is followed by each expert's activations.
struct Order {
  int32_t* begin;    // [n_experts + 1]
  int32_t* columns;  // [n]: which one comes where
  char* activations;

  static int64_t bytes(int64_t n_experts, int64_t n) { return Activations::aligned((n_experts + 1 + n) * 4); }
  Order(int64_t n_experts, int64_t n, void* memory)
      : begin(static_cast<int32_t*>(memory)), columns(begin + n_experts + 1), activations(static_cast<char*>(memory) + bytes(n_experts, n)) {}

  // places: [n], the way back.
  void fill(const Tensor* experts, int64_t n_experts, int64_t n, int32_t* places) {
    memset(begin, 0, static_cast<size_t>(n_experts + 1) * 4);
    for (int64_t i = 0; i < n; i++) {
      const int32_t e = expert_of(experts, i);
      if (e < 0 || e >= n_experts) abort();  // as ggml does
      begin[e + 1]++;
    }
    for (int64_t e = 0; e < n_experts; e++) begin[e + 1] += begin[e];
    for (int64_t i = 0; i < n; i++) {
      const int32_t place = begin[expert_of(experts, i)]++;
      columns[place] = static_cast<int32_t>(i);
      places[i] = place;
    }
    for (int64_t e = n_experts; e > 0; e--) begin[e] = begin[e - 1];
    begin[0] = 0;
  }
};

int64_t aligning_bytes(int64_t n_experts, int64_t n) { return smaller(n_experts, n) * 3 * line; }  // what aligning each expert's may add

// One rounded column to place *t* among others.
void put_column(Rounding how, const Activations& from, const Activations& to, int64_t t) {
  const int64_t bytes = 32 * Activations::value_bytes(how);
  for (int64_t b = 0; b < to.n_in / 32; b++) memcpy(to.q + (b * to.n + t) * bytes, from.q + b * bytes, static_cast<size_t>(bytes));
  if (is_of_floats(how)) return;
  if (how == blocks_of_256) {
    constexpr int n = Activations::sums_of_block;
    for (int64_t b = 0; b < to.n_in / 256; b++) {
      to.scale[b * to.n + t] = from.scale[b];
      memcpy(to.sums + (b * to.n + t) * n, from.sums + b * n, n * sizeof(int16_t));
    }
    return;
  }
  for (int64_t b = 0; b < to.n_in / 32; b++) {
    to.scale[b * to.n + t] = from.scale[b];
    to.sum[b * to.n + t] = from.sum[b];
  }
}

// So many pieces of each expert's rows, by the work that its tokens are; with one thread all rows are one.
int64_t pieces_of(const Experts& m, int64_t n_tokens, int64_t n_columns, int64_t n_used, int n_threads) {
  constexpr int64_t weight = 4;  // reading an expert's weights takes about as long as computing with so many tokens
  const int64_t pairs = (stripes_of(m.n_rows) + 1) / 2, most = n_threads == 1 ? 1 : n_threads * pieces_of_thread;
  const int64_t all = n_columns + weight * n_used;
  return larger(1, smaller(pairs, (most * (n_tokens + weight) + all - 1) / all));
}

// Stripes [begin, end) of gate and up with all tokens, gated while both are in a near cache.
void multiply_gated(const Experts& m, const Activations& a, const Weights& weights, int64_t begin, int64_t end, const Chunks& chunks, float* y,
                    const int32_t* columns) {
  const int64_t most = larger(gated_bytes / (2 * 4 * rows_of_stripe * chunks.tile) / 2 * 2, 2), step = smaller(a.n > chunks.tile ? 2 : most, end - begin);
  const int64_t width = step * rows_of_stripe;
  float* both = static_cast<float*>(gate_scratch.of(2 * chunks.tile * width * static_cast<int64_t>(sizeof(float))));
  float* of_up = both + chunks.tile * width;
  for (int64_t s = begin; s < end; s += step)
    for (int64_t t = 0; t < a.n; t += chunks.tile) {
      const int64_t n = smaller(chunks.tile, a.n - t), row = s * rows_of_stripe, n_stripes = smaller(step, end - s), n_rows = smaller(n_stripes * rows_of_stripe, m.n_rows - row);
      const auto multiply = [&](const Format& format, const uint8_t* of, float* part) {
        chosen->multiply(format, a, Work{of + s * stripe_bytes(format, m.n_in), m.n_rows - row, 0, n_stripes, t, n, origin(part, t, width), width});
      };
      multiply(*m.format, weights.plain, both);
      multiply(*m.up, weights.up, of_up);
      for (int64_t k = 0; k < n; k++) {
        const int64_t column = columns ? columns[t + k] : t + k;
        chosen->gate(m.gate, both + k * width, of_up + k * width, width, y + column * m.n_rows + row, m.n_rows, n_rows, 1);
      }
    }
}

// Piece *piece* of *n* of one matrix' rows, with all of its tokens.
void multiply_rows(const Experts& m, const Activations& a, const Weights& weights, int64_t piece, int64_t n, float* y, const int32_t* columns) {
  const Chunks chunks(m.format->rounding, m.n_in, a.n);
  const int64_t n_stripes = stripes_of(m.n_rows), pairs = (n_stripes + 1) / 2;
  const int64_t begin = pairs * piece / n * 2, stop = smaller(pairs * (piece + 1) / n * 2, n_stripes);
  if (m.gate != gate_none) return multiply_gated(m, a, weights, begin, stop, chunks, y, columns);
  for (int64_t first = 0; first < a.n; first += chunks.size) {
    const Work work{weights.plain, m.n_rows, begin, stop, first, smaller(chunks.size, a.n - first), y, m.n_rows, columns};
    multiply_chunk(*m.format, a, work, chunks.tile);
  }
}

}  // namespace
}  // namespace puna

using namespace puna;

// Matrices of n_rows rows, of which only the first type counts; or gate and up of so many, each of its own type, or both in one
// matrix of twice as many, where the second type is negative. A gate of 0: none.
PUNA_EXPORT void* puna_experts_new(int type, int up, int64_t n_in, int64_t n_rows, int64_t n_experts, int gate) {
  Experts* experts = new Experts;
  experts->format = format_of(type);
  experts->up = format_of(up < 0 ? type : up);
  experts->gate = static_cast<Gate>(gate);
  experts->n_in = n_in;
  experts->n_rows = n_rows;
  experts->n_experts = n_experts;
  const int64_t bytes = stripes_of(n_rows) * stripe_bytes(*experts->format, n_in);
  const bool are_one = gate != gate_none && up < 0;
  experts->matrix_bytes = are_one ? 2 * bytes : bytes;
  experts->up_bytes = are_one ? 2 * bytes : stripes_of(n_rows) * stripe_bytes(*experts->up, n_in);
  experts->up_begin = are_one ? bytes : 0;
  return experts;
}

PUNA_EXPORT void puna_experts_free(void* experts) { delete static_cast<Experts*>(experts); }

// Bytes of n columns, rounded and in the order of their experts.
PUNA_EXPORT int64_t puna_ordered_bytes(const void* experts, int64_t n) {
  const Experts& m = *static_cast<const Experts*>(experts);
  return Order::bytes(m.n_experts, n) + Activations::bytes(m.format->rounding, m.n_in, n) + aligning_bytes(m.n_experts, n);
}

// Node: x F32 [n_in, n_used or 1, n] and experts I32 [n_used, n] to the columns' order and rounded activations; user data
// is the Experts of any matrices that multiply them.
PUNA_EXPORT void puna_order_node(void* node, int thread, int n_threads, void* experts) {
  const Tensor *to = static_cast<Tensor*>(node), *x = to->src[0], *ids = to->src[1];
  const Experts& m = *static_cast<Experts*>(experts);
  const Rounding how = m.format->rounding;
  const int64_t n_used = ids->ne[0], n = n_used * ids->ne[1];
  const int64_t order_bytes = Order::bytes(m.n_experts, n), places_bytes = Activations::aligned(4 * n);
  const int64_t offsets_bytes = Activations::aligned(8 * m.n_experts);
  char* memory = static_cast<char*>(scratch.of(order_bytes + places_bytes + offsets_bytes + Activations::bytes(how, m.n_in, 1)));
  // Every thread finds the order for itself, sooner than waiting for another to do so.
  Order order(m.n_experts, n, memory);
  int32_t* places = reinterpret_cast<int32_t*>(memory + order_bytes);
  int64_t* offsets = reinterpret_cast<int64_t*>(memory + order_bytes + places_bytes);
  const Activations alone(how, m.n_in, 1, memory + order_bytes + places_bytes + offsets_bytes);
  order.fill(ids, m.n_experts, n, places);
  if (thread == 0) memcpy(to->data, memory, static_cast<size_t>(order_bytes));
  char* activations = Order(m.n_experts, n, to->data).activations;
  int64_t offset = 0;
  for (int64_t e = 0; e < m.n_experts; e++) {
    offsets[e] = offset;
    offset += Activations::bytes(how, m.n_in, order.begin[e + 1] - order.begin[e]);
  }
  const auto place = [&](int64_t i, int64_t& t) {
    const int32_t e = expert_of(ids, i);
    t = places[i] - order.begin[e];
    return Activations(how, m.n_in, order.begin[e + 1] - order.begin[e], activations + offsets[e]);
  };
  if (x->ne[1] == n_used) {
    for (int64_t i = n * thread / n_threads; i < n * (thread + 1) / n_threads; i++) {
      int64_t t;
      const Activations a = place(i, t);
      chosen->round(how, column(x, i), a, t, 0, m.n_in);
    }
    return;
  }
  const int64_t n_tokens = ids->ne[1];
  for (int64_t token = n_tokens * thread / n_threads; token < n_tokens * (thread + 1) / n_threads; token++) {
    chosen->round(how, column(x, token), alone, 0, 0, m.n_in);
    for (int64_t slot = 0; slot < n_used; slot++) {
      int64_t t;
      const Activations a = place(token * n_used + slot, t);
      put_column(how, alone, a, t);
    }
  }
}

// Node: F32 [n_rows, n_used, n] from ordered activations and packed weights, gate's and up's where it is gated; user data is the
// Experts.
PUNA_EXPORT void puna_experts_node(void* node, int thread, int n_threads, void* experts) {
  const Tensor* to = static_cast<Tensor*>(node);
  Experts& m = *static_cast<Experts*>(experts);
  const int64_t n = n_columns(to);
  const Order order(m.n_experts, n, to->src[0]->data);
  int64_t n_used = 0, n_pieces = 0;
  for (int64_t e = 0; e < m.n_experts; e++) n_used += order.begin[e + 1] > order.begin[e];
  for (int64_t e = 0; e < m.n_experts; e++) {
    const int64_t n_tokens = order.begin[e + 1] - order.begin[e];
    if (n_tokens) n_pieces += pieces_of(m, n_tokens, n, n_used, n_threads);
  }
  // Most pieces come to a thread in rising order, so that it finds their experts in passing.
  int64_t e = -1, end = 0, n_of_expert = 0, offset = 0, next_offset = 0;
  m.shares.each(static_cast<int>(n_pieces), thread, n_threads, [&](int i) {
    if (i < end - n_of_expert) e = -1, end = 0, next_offset = 0;
    while (i >= end) {
      e++;
      const int64_t n_tokens = order.begin[e + 1] - order.begin[e];
      n_of_expert = n_tokens ? pieces_of(m, n_tokens, n, n_used, n_threads) : 0;
      end += n_of_expert;
      offset = next_offset;
      next_offset += Activations::bytes(m.format->rounding, m.n_in, n_tokens);
    }
    const Activations a(m.format->rounding, m.n_in, order.begin[e + 1] - order.begin[e], order.activations + offset);
    const Weights weights(m, to->src + 1, e);
    multiply_rows(m, a, weights, i - (end - n_of_expert), n_of_expert, static_cast<float*>(to->data), order.columns + order.begin[e]);
  });
}

// Node: the same from one token's x F32 [n_in, n_used or 1] and experts I32 [n_used], which come first and every thread rounds for
// itself.
PUNA_EXPORT void puna_token_experts_node(void* node, int thread, int n_threads, void* experts) {
  const Tensor *to = static_cast<Tensor*>(node), *x = to->src[0], *ids = to->src[1];
  Experts& m = *static_cast<Experts*>(experts);
  const Rounding how = m.format->rounding;
  const int64_t n_used = ids->ne[0], n_inputs = x->ne[1], column_bytes = Activations::bytes(how, m.n_in, 1);
  char* memory = static_cast<char*>(scratch.of(n_inputs * column_bytes));
  for (int64_t i = 0; i < n_inputs; i++) chosen->round(how, column(x, i), Activations(how, m.n_in, 1, memory + i * column_bytes), 0, 0, m.n_in);
  const int64_t n_pieces = pieces_of(m, 1, n_used, n_used, n_threads);
  m.shares.each(static_cast<int>(n_used * n_pieces), thread, n_threads, [&](int i) {
    const int64_t slot = i / n_pieces;
    const int32_t e = expert_of(ids, slot);
    if (e < 0 || e >= m.n_experts) abort();  // as ggml does
    const Activations a(how, m.n_in, 1, memory + (n_inputs == 1 ? 0 : slot) * column_bytes);
    const Weights weights(m, to->src + 2, e);
    multiply_rows(m, a, weights, i % n_pieces, n_pieces, static_cast<float*>(to->data) + slot * m.n_rows, nullptr);
  });
}
