// Nodes of several products of one input, and what may be done on the way: a norm before them, a gate or sums after them.
#include "activations.h"
#include "parts.h"

namespace puna {
namespace {

constexpr int most_matrices = 4;

struct Linear {
  int n;
  const Format* formats[most_matrices];
  int64_t n_rows[most_matrices];
  int source[most_matrices];  // which of the roundings it multiplies
  int n_roundings;
  Rounding roundings[most_matrices];
  int64_t n_in;
  Gate gate;
  bool has_norm;
  float eps;
  bool is_rounded;  // the result, for the product that comes next
  Rounding output;
  Shares shares;

  // How many stripes at least are computed together: what is rounded is so in blocks.
  int64_t unit() const { return is_rounded && output == blocks_of_256 ? 256 / rows_of_stripe : 2; }

  // Of which activations take the most memory.
  Rounding widest() const {
    Rounding found = roundings[0];
    for (int i = 1; i < n_roundings; i++)
      if (Activations::value_bytes(roundings[i]) > Activations::value_bytes(found)) found = roundings[i];
    return found;
  }
};

// A norm is what its parameters say: eps, and how the normalised values are rounded.
struct Normaliser {
  Rounding rounding;
  float eps;
};

// What is added to the result: matrices of as many columns, or one column for all.
struct Addends {
  const Tensor* tensors[2];
  int n;

  void add(float* y, int64_t y_stride, int64_t row, int64_t n_rows, int64_t first, int64_t n_tokens) const {
    for (int i = 0; i < n; i++) {
      const int64_t stride = tensors[i]->ne[1] == 1 ? 0 : static_cast<int64_t>(tensors[i]->nb[1] / sizeof(float));
      const float* from = static_cast<const float*>(tensors[i]->data) + first * stride + row;
      chosen->add(from, stride, y + first * y_stride + row, y_stride, n_rows, n_tokens);
    }
  }
};

thread_local Scratch gate_scratch;
constexpr int64_t gated_bytes = 64 << 10;

// Stripes [begin, end) of gate and up, with the tokens of one chunk, to y or rounded.
void multiply_gated(const Linear& l, const Activations* a, const uint8_t* const* weights, const Addends& addends, void* to,
                    int64_t begin, int64_t end, int64_t first, int64_t n, int64_t tile) {
  const int64_t all = l.n_rows[0], last = first + n;
  // Many stripes at once where tokens are few, as long as both parts stay in a near cache; where they are many, several tiles
  // pass over two stripes while those are.
  const int64_t unit = l.unit(), most = n > tile ? unit : larger(gated_bytes / (2 * 4 * rows_of_stripe * tile) / unit * unit, unit);
  const int64_t step = smaller(most, end - begin);
  const int64_t width = step * rows_of_stripe;
  float* both = static_cast<float*>(gate_scratch.of(2 * tile * width * static_cast<int64_t>(sizeof(float))));
  for (int64_t s = begin; s < end; s += step)
    for (int64_t t = first; t < last; t += tile) {
      const int64_t stop = smaller(s + step, end), row = s * rows_of_stripe, n_tokens = smaller(tile, last - t);
      for (int i = 0; i < 2; i++) {
        const int64_t bytes = stripe_bytes(*l.formats[i], l.n_in);
        float* part = both + i * tile * width;
        chosen->multiply(*l.formats[i], a[l.source[i]],
                         Work{weights[i] + s * bytes, all - row, 0, stop - s, t, n_tokens, origin(part, t, width), width});
      }
      const int64_t n_rows = smaller(stop * rows_of_stripe, all) - row;
      if (l.is_rounded) {
        const Activations rounded(l.output, all, a[0].n, to);
        chosen->gate(l.gate, both, both + tile * width, width, both, width, n_rows, n_tokens);
        for (int64_t k = 0; k < n_tokens; k++)
          chosen->round(l.output, origin(both + k * width, 1, row), rounded, t + k, row, row + n_rows);
        continue;
      }
      float* y = static_cast<float*>(to);
      chosen->gate(l.gate, both, both + tile * width, width, y + t * all + row, all, n_rows, n_tokens);
      addends.add(y, all, row, n_rows, t, n_tokens);
    }
}

void multiply_all(Linear& l, const Activations* a, const uint8_t* const* weights, const Addends& addends, void* result,
                  int thread, int n_threads) {
  const int n_matrices = l.gate == gate_none ? l.n : 1;
  int64_t stripes[most_matrices + 1] = {0}, rows[most_matrices + 1] = {0};  // where each matrix begins
  for (int i = 0; i < n_matrices; i++) {
    stripes[i + 1] = stripes[i] + stripes_of(l.n_rows[i]);
    rows[i + 1] = rows[i] + l.n_rows[i];
  }
  const int64_t unit = l.unit(), n_stripes = stripes[n_matrices], units = (n_stripes + unit - 1) / unit, y_stride = rows[n_matrices];
  Chunks chunks(l.widest(), l.n_in, a[0].n);
  if (units * chunks.n < 4 * n_threads) chunks = chunks.cut(a[0].n);
  const int64_t per_chunk = n_threads == 1 ? 1 : smaller(units, n_threads * pieces_of_thread);
  l.shares.each(static_cast<int>(per_chunk * chunks.n), thread, n_threads, [&](int piece) {
    const int64_t part = piece % per_chunk, first = piece / per_chunk * chunks.size, n = smaller(chunks.size, a[0].n - first);
    const int64_t begin = units * part / per_chunk * unit, end = smaller(units * (part + 1) / per_chunk * unit, n_stripes);
    if (l.gate != gate_none) return multiply_gated(l, a, weights, addends, result, begin, end, first, n, chunks.tile);
    float* y = static_cast<float*>(result);
    for (int i = 0; i < n_matrices; i++) {
      const int64_t from = larger(begin, stripes[i]) - stripes[i], to = smaller(end, stripes[i + 1]) - stripes[i];
      if (from >= to) continue;
      const int64_t row = from * rows_of_stripe, n_rows = smaller(to * rows_of_stripe, l.n_rows[i]) - row;
      multiply_chunk(*l.formats[i], a[l.source[i]], Work{weights[i], l.n_rows[i], from, to, first, n, y + rows[i], y_stride},
                     chunks.tile);
      addends.add(y, y_stride, rows[i] + row, n_rows, first, n);
    }
  });
}

// The operands of a node from its source *at* on: the weights, then what is added. One matrix may hold gate and up.
struct Operands {
  const uint8_t* weights[most_matrices];
  Addends addends;

  Operands(const Linear& l, const Tensor* node, int at) {
    for (int i = 0; i < l.n; i++) {
      const bool is_other_half = i && l.gate != gate_none && node->src[at] == node->src[at - 1];
      weights[i] = static_cast<const uint8_t*>(node->src[at++]->data);
      if (is_other_half) weights[i] += stripes_of(l.n_rows[0]) * stripe_bytes(*l.formats[0], l.n_in);
    }
    addends.n = 0;
    for (; at < 10 && node->src[at]; at++) addends.tensors[addends.n++] = node->src[at];
  }
};

}  // namespace
}  // namespace puna

using namespace puna;

// Up to four matrices that multiply the same, given by their types and numbers of rows; a negative eps: no norm before them, a
// negative output: the result is not rounded.
PUNA_EXPORT void* puna_linear_new(const int32_t* types, const int64_t* n_rows, int n, int64_t n_in, int gate, float eps, int output) {
  Linear* l = new Linear;
  l->n = n;
  l->n_in = n_in;
  l->gate = static_cast<Gate>(gate);
  l->has_norm = eps >= 0;
  l->eps = eps;
  l->is_rounded = output >= 0;
  l->output = static_cast<Rounding>(output >= 0 ? output : 0);
  l->n_roundings = 0;
  for (int i = 0; i < n; i++) {
    l->formats[i] = format_of(types[i]);
    l->n_rows[i] = n_rows[i];
    int& source = l->source[i];
    for (source = 0; source < l->n_roundings && l->roundings[source] != l->formats[i]->rounding;) source++;
    if (source == l->n_roundings) l->roundings[l->n_roundings++] = l->formats[i]->rounding;
  }
  return l;
}

PUNA_EXPORT void puna_linear_free(void* linear) { delete static_cast<Linear*>(linear); }

PUNA_EXPORT void* puna_normaliser_new(int rounding, float eps) { return new Normaliser{static_cast<Rounding>(rounding), eps}; }

PUNA_EXPORT void puna_normaliser_free(void* normaliser) { delete static_cast<Normaliser*>(normaliser); }

// Node: x F32 [n_in, n...], normalised and times a weight, rounded; user data is the Normaliser.
PUNA_EXPORT void puna_normalise_node(void* node, int thread, int n_threads, void* normaliser) {
  const Tensor *to = static_cast<Tensor*>(node), *x = to->src[0];
  const Normaliser& how = *static_cast<Normaliser*>(normaliser);
  const int64_t n = n_columns(x), n_in = x->ne[0];
  const Activations a(how.rounding, n_in, n, to->data);
  float* values = static_cast<float*>(scratch.of(n_in * static_cast<int64_t>(sizeof(float))));
  for (int64_t t = n * thread / n_threads; t < n * (thread + 1) / n_threads; t++) {
    chosen->normalise(column(x, t), static_cast<const float*>(to->src[1]->data), how.eps, values, n_in);
    chosen->round(how.rounding, values, a, t, 0, n_in);
  }
}

// Node: F32 [all rows, n...], or gated and rounded, from activations, once for each kind of rounding, packed weights and what
// is added; user data is the Linear.
PUNA_EXPORT void puna_linear_node(void* node, int thread, int n_threads, void* linear) {
  const Tensor* to = static_cast<Tensor*>(node);
  Linear& l = *static_cast<Linear*>(linear);
  Activations a[most_matrices] = {{blocks_of_32, 0, 0, nullptr}, {blocks_of_32, 0, 0, nullptr}, {blocks_of_32, 0, 0, nullptr},
                                  {blocks_of_32, 0, 0, nullptr}};
  for (int i = 0; i < l.n_roundings; i++) a[i] = Activations(l.roundings[i], l.n_in, n_columns(to), to->src[i]->data);
  const Operands operands(l, to, l.n_roundings);
  multiply_all(l, a, operands.weights, operands.addends, to->data, thread, n_threads);
}

// Node: the same from a few columns x F32 [n_in, n...], and a norm's weight where there is one: every thread normalises and
// rounds them for itself, which is sooner done than waiting for each other between two nodes.
PUNA_EXPORT void puna_column_linear_node(void* node, int thread, int n_threads, void* linear) {
  const Tensor *to = static_cast<Tensor*>(node), *x = to->src[0];
  Linear& l = *static_cast<Linear*>(linear);
  const int64_t n = n_columns(x), value_bytes = Activations::aligned(l.n_in * static_cast<int64_t>(sizeof(float)));
  int64_t bytes = value_bytes;
  for (int i = 0; i < l.n_roundings; i++) bytes += Activations::aligned(Activations::bytes(l.roundings[i], l.n_in, n));
  char* at = static_cast<char*>(scratch.of(bytes));
  float* values = reinterpret_cast<float*>(at);
  at += value_bytes;
  Activations a[most_matrices] = {{blocks_of_32, 0, 0, nullptr}, {blocks_of_32, 0, 0, nullptr}, {blocks_of_32, 0, 0, nullptr},
                                  {blocks_of_32, 0, 0, nullptr}};
  for (int i = 0; i < l.n_roundings; i++) {
    a[i] = Activations(l.roundings[i], l.n_in, n, at);
    at += Activations::aligned(Activations::bytes(l.roundings[i], l.n_in, n));
  }
  for (int64_t t = 0; t < n; t++) {
    const float* from = column(x, t);
    if (l.has_norm) {
      chosen->normalise(from, static_cast<const float*>(to->src[1]->data), l.eps, values, l.n_in);
      from = values;
    }
    for (int i = 0; i < l.n_roundings; i++) chosen->round(l.roundings[i], from, a[i], t, 0, l.n_in);
  }
  const Operands operands(l, to, l.has_norm ? 2 : 1);
  multiply_all(l, a, operands.weights, operands.addends, to->data, thread, n_threads);
}

// Outside of graphs, for tests.
PUNA_EXPORT void puna_normalise(const float* x, const float* weight, float eps, float* y, int64_t n) {
  chosen->normalise(x, weight, eps, y, n);
}

PUNA_EXPORT void puna_gate(int gate, const float* g, const float* up, float* y, int64_t n) {
  chosen->gate(static_cast<Gate>(gate), g, up, n, y, n, n, 1);
}
