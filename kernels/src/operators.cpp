// The operators over the kernels. `inputs` and `outputs` have a letter per tensor: f float32,
// u uint8, s int8, i int64, b bool; a capital is optional.
#include "operators.h"

#include <algorithm>
#include <cstring>

#include "layer.h"

namespace {
void expect_heads(int64_t size, int width, const char* name) {
  if (size % width == 0) return;
  refuse(std::string("expected ") + name + " in heads of " + std::to_string(width) + ", found " +
         std::to_string(size));
}
void expect_below(int64_t value, int64_t end, const char* name) {
  if (0 <= value && value < end) return;
  refuse(std::string("expected ") + name + " below " + std::to_string(end) + ", found " +
         std::to_string(value));
}

struct Linear {  // x, weights
  static constexpr const char *name = "Linear", *inputs = "f" LINEAR, *outputs = "fU";
  Packed weights;

  explicit Linear(const Node& node) : weights(node, 1) {}
  void run(const Context& c) const {
    const int rows = c.rows(0, "x", weights.inputs);
    const Quantized x(c, weights, rows, 1, c.in<float>(0));
    multiply(c, weights, x, rows, c.out<float>(0, {rows, weights.outputs}));
  }
};

// Tokens whose exponentials are added in float32; the sums of parts are added in float64. The order
// is one for all rows, and the same beside all logits and beside the largest ones.
constexpr int PART = 256;

struct ExpSums {  // logits
  static constexpr const char *name = "ExpSums", *inputs = "f", *outputs = "ff";
  static constexpr int SEGMENT = 64;  // each has a maximum, and each token after the last segment

  explicit ExpSums(const Node&) {}
  void run(const Context& c) const {
    const Shape shape = c.shape(0);
    shape.expect("the logits", {ANY, ANY});
    const int rows = shape[0], tokens = shape[1], segments = tokens / SEGMENT;
    const int single = segments * SEGMENT;
    const float* x = c.in<float>(0);
    float* y = c.out<float>(0, {rows});
    float* maxima = c.out<float>(1, {rows, segments + tokens - single});
    for (int row = 0; row < rows; ++row, x += tokens) {
      double sum = 0;
      for (int n = 0; n < tokens; n += PART) {
        sum += kernels().exp_sum(x + n, std::min(PART, tokens - n));
      }
      y[row] = float(sum);
      for (int n = 0; n < single; n += SEGMENT) *maxima++ = kernels().largest(x + n, SEGMENT);
      maxima = std::copy(x + single, x + tokens, maxima);
    }
  }
};

struct LinearRank {  // x, weights, count
  static constexpr const char *name = "LinearRank", *inputs = "f" LINEAR "i", *outputs = "fif";
  Packed weights;
  int span;  // tokens that one thread ranks; few spans need little memory

  explicit LinearRank(const Node& node) : weights(node, 1) {
    const int eighth = (weights.outputs / 8 + PART) / PART * PART;
    span = std::max(16 * PART, eighth);
  }
  void run(const Context& c) const {
    const int tokens = weights.outputs, spans = (tokens + span - 1) / span;
    const int64_t rows = c.rows(0, "x", weights.inputs), parts = (tokens + PART - 1) / PART;
    c.shape(7).expect_one("the count");
    const int64_t count = *c.in<int64_t>(7);
    if (count < 1 || count > tokens) {
      refuse("expected a count from 1 to " + std::to_string(tokens) + ", found " +
             std::to_string(count));
    }
    const Scratch integers(rows * weights.inputs);
    uint8_t* x = integers.as<uint8_t>();
    kernels().quantize(weights, c.in<float>(0), rows * weights.inputs, x);
    const Scratch products(spans * rows * PART * sizeof(float)), sums(parts * rows * sizeof(float));
    std::vector<float> logits(spans * rows * count, -INFINITY);
    std::vector<int64_t> found(logits.size());
    auto ranking = [&](int64_t place, int64_t row) {
      const size_t at = (place * rows + row) * count;
      return Ranking{logits.data() + at, found.data() + at, int(count)};
    };
    c.parallel(spans, [&](size_t place) {
      float* product = products.as<float>() + place * rows * PART;
      for (int n = place * span; n < tokens && n < int(place + 1) * span; n += PART) {
        const int width = std::min(PART, tokens - n);
        kernels().linear(weights, x, rows, {n, n + width}, product - n, PART);
        for (int64_t row = 0; row < rows; ++row) {
          const float* logit = product + row * PART;
          sums.as<float>()[row * parts + n / PART] = kernels().exp_sum(logit, width);
          kernels().rank(logit, width, n, ranking(place, row));
        }
      }
    });
    float* top = c.out<float>(0, {rows, count});
    int64_t* ids = c.out<int64_t>(1, {rows, count});
    float* y = c.out<float>(2, {rows});
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0;
      for (int part = 0; part < parts; ++part) sum += sums.as<float>()[row * parts + part];
      y[row] = float(sum);
      const Ranking best = ranking(0, row);
      for (int place = 1; place < spans; ++place) {
        const Ranking next = ranking(place, row);
        for (int i = 0; i < count; ++i) kernels().rank(next.logits + i, 1, next.tokens[i], best);
      }
      std::copy(best.logits, best.logits + count, top + row * count);
      std::copy(best.tokens, best.tokens + count, ids + row * count);
    }
  }
};

struct LinearNorm {  // x, weights, residual, gamma, beta
  static constexpr const char *name = "LinearNorm", *inputs = "f" LINEAR "fff", *outputs = "fU";
  Packed weights;
  Norm norm;

  explicit LinearNorm(const Node& node) : weights(node, 1), norm(node.norm(8, weights.outputs)) {}
  void run(const Context& c) const {
    const int rows = c.rows(0, "x", weights.inputs), width = weights.outputs;
    const float* residual = c.in<float>(7, "the residual", {rows, width});
    const Quantized x(c, weights, rows, 1, c.in<float>(0));
    float* y = c.out<float>(0, {rows, width});
    multiply(c, weights, x, rows, y);
    kernels().add_norm(y, residual, rows, width, norm);
  }
};

struct FeedForward {  // x, which is the residual, inner weights, outer weights, gamma, beta
  static constexpr const char *name = "FeedForward", *inputs = "f" LINEAR LINEAR "ff",
                              *outputs = "fUFU";
  Packed inner, outer;
  Norm norm;

  explicit FeedForward(const Node& node)
      : inner(node, 1), outer(node, 7), norm(node.norm(13, outer.outputs)) {
    if (inner.outputs == outer.inputs && inner.inputs == outer.outputs) return;
    refuse("expected an outer layer that undoes the inner one's " + std::to_string(inner.inputs) +
           " inputs and " + std::to_string(inner.outputs) + " outputs, found " +
           std::to_string(outer.inputs) + " and " + std::to_string(outer.outputs));
  }
  void run(const Context& c) const {
    const int rows = c.rows(0, "x", inner.inputs), width = outer.outputs;
    const float* residual = c.in<float>(0);
    const Quantized x(c, inner, rows, 1, residual), hidden(c, outer, rows, 3);
    float* product = c.out<float>(2, {rows, outer.inputs});
    for_outputs(c, inner, rows, [&](Outputs part) {
      kernels().linear_quantized(inner, x.data(), rows, part, outer, hidden.data(), product);
    });
    float* y = c.out<float>(0, {rows, width});
    multiply(c, outer, hidden, rows, y);
    kernels().add_norm(y, residual, rows, width, norm);
  }
};

struct LinearToHeads {  // x, weights, source ids for their shape
  static constexpr const char *name = "LinearToHeads", *inputs = "f" LINEAR "i", *outputs = "sU";
  Packed weights;
  int width;

  explicit LinearToHeads(const Node& node) : weights(node, 1), width(node.head_width()) {
    expect_heads(weights.outputs, width, "outputs");
  }
  void run(const Context& c) const {
    const Shape source = c.shape(7);
    source.expect("the source", {ANY, ANY});
    const int64_t length = source[1], d = weights.outputs, heads = d / width;
    const int64_t rows = source[0] * length;
    const Quantized x(c, weights, rows, 1, c.in<float>(0, "x", {rows, weights.inputs}));
    const Scratch room(rows * d * sizeof(float));
    const float* product = room.as<float>();
    multiply(c, weights, x, rows, room.as<float>());
    int8_t* y = c.out<int8_t>(0, {source[0], heads, length, width});
    for (int64_t row = 0; row < rows; ++row) {
      int8_t* first = y + (row / length * heads * length + row % length) * width;
      for (int64_t head = 0; head < heads; ++head, product += width) {
        kernels().round_to_int8(product, width, first + head * length * width);
      }
    }
  }
};

// Sizes of the keys of attention, [slots, heads, columns, width], and their data.
struct Cache {
  int64_t slots, heads, columns, width;

  // Of inputs 1 and 2.
  Cache(const Context& c, int width) : width(width) {
    const Shape shape = c.shape(1);
    shape.expect("the keys", {ANY, ANY, ANY, width});
    slots = shape[0], heads = shape[1], columns = shape[2];
    c.shape(2).expect("the values", {slots, heads, columns, width});
  }
  int64_t d() const { return heads * width; }
  int64_t at(int64_t slot, int64_t head) const { return (slot * heads + head) * columns * width; }
  // An output that starts as the input of the same number. The engine binds both to one buffer.
  int8_t* updated(const Context& c, size_t i) const {
    int8_t* y = c.out<int8_t>(i, {slots, heads, columns, width});
    const int8_t* x = c.in<int8_t>(i);
    if (x != y) memcpy(y, x, slots * heads * columns * width);
    return y;
  }
};

// Writes keys and values of new tokens into the cache and attends. A single token attends to all
// columns up to its position; otherwise `bias` masks columns.
struct SelfAttention {  // queries, keys and values, past keys, past values, positions, cells, ...
  static constexpr const char *name = "SelfAttention", *inputs = "fssiifb", *outputs = "fss";
  int width;

  explicit SelfAttention(const Node& node) : width(node.head_width()) {}
  void run(const Context& c) const {
    const Cache cache(c, width);
    const Shape given = c.shape(3);
    given.expect("the positions", {cache.slots, ANY});
    const int64_t rows = given[1], d = cache.d();
    const float* x = c.in<float>(0, "x", {cache.slots * rows, 3 * d});
    c.shape(6).expect_one("single");
    const bool single = *c.in<uint8_t>(6);
    require(!single || rows == 1, "expected one token in each slot where `single` is true");
    if (!single) {
      c.shape(4).expect("the cells", {cache.slots, rows, cache.heads, 3});
      c.shape(5).expect("the bias", {cache.slots, 1, rows, cache.columns});
    }
    const int64_t *positions = c.in<int64_t>(3), *cells = c.in<int64_t>(4);
    const float* bias = c.in<float>(5);
    int8_t *keys = cache.updated(c, 1), *values = cache.updated(c, 2);
    float* out = c.out<float>(0, {cache.slots * rows, d});
    for (int64_t slot = 0; slot < cache.slots; ++slot) {
      for (int64_t head = 0; head < cache.heads; ++head) {
        const int64_t at = cache.at(slot, head), first = slot * rows;
        for (int64_t row = first; row < first + rows; ++row) {
          const int64_t* cell = cells + (row * cache.heads + head) * 3;
          require(single || (cell[0] == slot && cell[1] == head),
                  "expected cells in the order of slots and heads");
          const int64_t column = single ? positions[row] : cell[2];
          expect_below(column, cache.columns, "columns");
          const float* key = x + row * 3 * d + d + head * width;
          kernels().round_to_int8(key, width, keys + at + column * width);
          kernels().round_to_int8(key + d, width, values + at + column * width);
        }
        kernels().attention({x + first * 3 * d + head * width, int(rows), 3 * d, keys + at,
                             values + at, int(single ? positions[slot] + 1 : cache.columns), width,
                             single ? nullptr : bias + first * cache.columns, int(cache.columns),
                             out + first * d + head * width, d});
      }
    }
  }
};

struct CrossAttention {  // queries, keys, values, bias of source columns
  static constexpr const char *name = "CrossAttention", *inputs = "fssf", *outputs = "fss";
  int width;

  explicit CrossAttention(const Node& node) : width(node.head_width()) {}
  void run(const Context& c) const {
    const Cache cache(c, width);
    const int64_t slots = cache.slots, length = cache.columns, d = cache.d();
    const int64_t all = c.rows(0, "x", d), rows = slots ? all / slots : 0;
    if (all != slots * rows) {
      refuse("expected as many rows for each of " + std::to_string(slots) + " slots, found " +
             std::to_string(all));
    }
    require(length || !slots, "expected keys of one source token or more");
    const float* x = c.in<float>(0);
    const float* all_bias = c.in<float>(3, "the source's bias", {slots, 1, 1, length});
    const int8_t *keys = cache.updated(c, 1), *values = cache.updated(c, 2);
    float* out = c.out<float>(0, {all, d});
    for (int64_t slot = 0; slot < slots; ++slot) {
      const float* bias = all_bias + slot * length;
      int64_t columns = length;  // without the padding at the end
      while (columns > 1 && bias[columns - 1] == -INFINITY) --columns;
      for (int64_t head = 0; head < cache.heads; ++head) {
        const int64_t at = cache.at(slot, head), first = slot * rows * d + head * width;
        kernels().attention({x + first, int(rows), d, keys + at, values + at, int(columns), width,
                             bias, 0, out + first, d});
      }
    }
  }
};

struct EncoderSelfAttention {  // queries, keys, values [rows, d], mask of the source
  static constexpr const char *name = "EncoderAttention", *inputs = "fffb", *outputs = "f";
  int width;

  explicit EncoderSelfAttention(const Node& node) : width(node.head_width()) {}
  void run(const Context& c) const {
    const Shape source = c.shape(3);
    source.expect("the source's mask", {ANY, ANY});
    const int64_t batch = source[0], length = source[1], rows = batch * length;
    const Shape given = c.shape(0);
    given.expect("the queries", {rows, ANY});
    const int64_t d = given[1];
    expect_heads(d, width, "queries");
    const float* query = c.in<float>(0);
    const float* key = c.in<float>(1, "the keys", {rows, d});
    const float* value = c.in<float>(2, "the values", {rows, d});
    const uint8_t* mask = c.in<uint8_t>(3);
    float* out = c.out<float>(0, {rows, d});
    for (int64_t row = 0; row < rows; row += length) {
      for (int64_t at = row * d; at < (row + 1) * d; at += width) {
        kernels().encoder_attention(
            {query + at, key + at, value + at, mask + row, int(length), width, d, out + at});
      }
    }
  }
};

struct Embed {  // ids, positions, table, scales, factor, positions' table
  static constexpr const char *name = "Embed", *inputs = "iisfff", *outputs = "f";
  Embedding embedding;
  int64_t tokens, places;
  bool counted;  // positions are 0, 1, 2, ... in each row, not the input's

  explicit Embed(const Node& node) : counted(node.integer("counted")) {
    const Shape table = node.shape(2), of_places = node.shape(5);
    tokens = table[0], places = of_places[0];
    const int width = checked(table[1], "the width of " + node.name(2), INT32_MAX);
    embedding = {node.constant<int8_t>(2, {tokens, width}), node.constant<float>(3, {tokens, 1}),
                 node.scalar<float>(4), node.constant<float>(5, {places, width}), width};
  }
  void run(const Context& c) const {
    const Shape sizes = c.shape(0);
    sizes.expect("the ids", {ANY, ANY});
    const int64_t length = sizes[1], rows = sizes[0] * length;
    const int64_t *ids = c.in<int64_t>(0), *positions = c.in<int64_t>(1);
    std::vector<int64_t> count(counted ? rows : 0);
    for (size_t row = 0; row < count.size(); ++row) count[row] = row % length;
    if (counted) {
      positions = count.data();
    } else {
      c.shape(1).expect("the positions", {sizes[0], length});
    }
    for (int64_t row = 0; row < rows; ++row) {
      expect_below(ids[row], tokens, "tokens");
      expect_below(positions[row], places, "positions");
    }
    kernels().embed(embedding, ids, positions, rows, c.out<float>(0, {rows, embedding.width}));
  }
};

ort::Type type(char letter) {
  switch (letter) {
    case 'u':
    case 'U': return ort::UINT8;
    case 's': return ort::INT8;
    case 'i': return ort::INT64;
    case 'b': return ort::BOOL;
    default: return ort::FLOAT;
  }
}
int is_optional(char letter) { return letter < 'a'; }

// No exception may cross the C ABI, not even that of a message for which memory is short.
template <class Operator, class Function>
ort::Status* guarded(Function function) {
  try {
    try {
      function();
      return nullptr;
    } catch (const std::runtime_error& error) {
      const auto told = std::string("transferry.kernels ") + Operator::name + ": " + error.what();
      return ort::failure(told.c_str());
    }
  } catch (const std::exception& error) {
    return ort::failure(error.what());
  }
}

template <class Operator>
ort::CustomOp described() {
  using Self = const ort::CustomOp*;
  ort::CustomOp op{};
  op.version = ort::VERSION;
  op.name = [](Self) { return Operator::name; };
  op.provider = [](Self) -> const char* { return nullptr; };
  op.input_count = [](Self) { return strlen(Operator::inputs); };
  op.input_type = [](Self, size_t i) { return type(Operator::inputs[i]); };
  op.input_characteristic = [](Self, size_t i) { return is_optional(Operator::inputs[i]); };
  op.output_count = [](Self) { return strlen(Operator::outputs); };
  op.output_type = [](Self, size_t i) { return type(Operator::outputs[i]); };
  op.output_characteristic = [](Self, size_t i) { return is_optional(Operator::outputs[i]); };
  op.input_memory = [](Self, size_t) { return 0; };
  op.create_v2 = [](Self, ort::Api*, const ort::KernelInfo* info, void** kernel) {
    return guarded<Operator>([&] { *kernel = new Operator(Node(info)); });
  };
  op.compute_v2 = [](void* kernel, ort::KernelContext* context) {
    return guarded<Operator>([&] { static_cast<const Operator*>(kernel)->run(Context(context)); });
  };
  op.destroy = [](void* kernel) { delete static_cast<Operator*>(kernel); };
  op.start_version = [](Self) { return 1; };
  op.end_version = [](Self) { return 2; };
  return op;
}
}  // namespace

const std::vector<ort::CustomOp>& operators() {
  static const std::vector<ort::CustomOp> all = {described<Linear>(),
                                                 described<LinearNorm>(),
                                                 described<FeedForward>(),
                                                 described<LinearToHeads>(),
                                                 described<SelfAttention>(),
                                                 described<CrossAttention>(),
                                                 described<EncoderSelfAttention>(),
                                                 described<Embed>(),
                                                 described<ExpSums>(),
                                                 described<LinearRank>()};
  return all;
}
