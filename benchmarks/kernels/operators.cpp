// Custom operators of onnxruntime over the kernels: domain transferry.kernels.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "ort.h"

using ort::KernelContext, ort::KernelInfo, ort::Value;

static const Kernels* kernels;

struct Free {
  void operator()(void* p) const { free(p); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

static Memory allocate(size_t bytes) {
  Memory memory(static_cast<uint8_t*>(aligned_alloc(64, aligned(bytes))));
  if (!memory) throw std::bad_alloc();
  return memory;
}

uint8_t* scratch(size_t bytes) {
  thread_local Memory memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    memory = allocate(bytes);
    size = bytes;
  }
  return memory.get();
}

static void require(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(message);
}
// A size that fills the vectors of the kernels.
static int checked(int64_t size, const char* name, int64_t largest = INT32_MAX) {
  if (size > 0 && size <= largest && size % 16 == 0) return int(size);
  throw std::runtime_error("transferry.kernels needs " + std::string(name) +
                           " in multiples of 16, found " + std::to_string(size));
}

template <class T>
static T* data(const Value* value) {
  void* found;
  ort::GetTensorMutableData(const_cast<Value*>(value), &found);
  return static_cast<T*>(found);
}
static std::vector<int64_t> shape(const Value* value) {
  ort::ShapeInfo* info;
  ort::GetTensorTypeAndShape(value, &info);
  size_t rank;
  ort::GetDimensionsCount(info, &rank);
  std::vector<int64_t> sizes(rank);
  ort::GetDimensions(info, sizes.data(), rank);
  ort::release(info);
  return sizes;
}

// Attributes and constant inputs of a node.
struct Node {
  const KernelInfo* info;

  const Value* constant(size_t input) const {
    int is_constant = 0;
    const Value* value = nullptr;
    ort::KernelInfoGetConstantInput_tensor(info, input, &is_constant, &value);
    require(is_constant, "transferry.kernels needs constant weights, found a computed input");
    return value;
  }
  template <class T>
  const T* constant_data(size_t input) const {
    return data<const T>(constant(input));
  }
  int integer(const char* attribute) const {
    int64_t value;
    ort::KernelInfoGetAttribute_int64(info, attribute, &value);
    return int(value);
  }
  int head_width() const {
    return checked(integer("width"), "head widths up to 256", MAX_HEAD_WIDTH);
  }
  Norm norm(size_t gamma) const {
    float epsilon;
    ort::KernelInfoGetAttribute_float(info, "epsilon", &epsilon);
    return {constant_data<float>(gamma), constant_data<float>(gamma + 1), epsilon};
  }
};

// Inputs and outputs of a run.
struct Context {
  KernelContext* context;

  const Value* input(size_t i) const {
    const Value* value;
    ort::KernelContext_GetInput(context, i, &value);
    return value;
  }
  std::vector<int64_t> shape(size_t i) const { return ::shape(input(i)); }
  template <class T>
  const T* in(size_t i) const {
    return data<const T>(input(i));
  }
  template <class T>
  T* out(size_t i, const std::vector<int64_t>& sizes) const {
    Value* value;
    ort::KernelContext_GetOutput(context, i, sizes.data(), sizes.size(), &value);
    return data<T>(value);
  }
  // Output i, a cache that starts as input i. The engine binds both to one buffer.
  int8_t* updated(size_t i, const std::vector<int64_t>& sizes) const {
    int8_t* y = out<int8_t>(i, sizes);
    const int8_t* x = in<int8_t>(i);
    if (x != y) memcpy(y, x, sizes[0] * sizes[1] * sizes[2] * sizes[3]);
    return y;
  }
};

// Weights from five inputs: scale and zero of x, weights [outputs, inputs], scales of the
// products, bias.
struct Packed : Weights {
  Memory memory;
  std::vector<int32_t> starts;

  Packed(Node node, size_t first) {
    const int8_t* w = node.constant_data<int8_t>(first + 2);
    const auto sizes = shape(node.constant(first + 2));
    outputs = checked(sizes[0], "outputs of a layer");
    inputs = checked(sizes[1], "inputs of a layer");
    input_scale = *node.constant_data<float>(first);
    input_zero = *node.constant_data<uint8_t>(first + 1);
    scales = node.constant_data<float>(first + 3);
    bias = node.constant_data<float>(first + 4);
    const size_t padded = aligned(outputs);
    memory = allocate(padded * inputs);
    memset(memory.get(), 0, padded * inputs);
    starts.resize(padded);
    for (int n = 0; n < outputs; ++n, w += inputs) {
      for (int i = 0; i < inputs; ++i) {
        require(i % 2 || abs(w[i] + w[i + 1]) <= 128,
                "transferry.kernels needs neighbouring weights whose sum is -128 to 128, so "
                "that AVX2 does not saturate; export the bundle again");
        starts[n] -= input_zero * w[i];
        memory.get()[size_t(n / 64 * 64) * inputs + i / 4 * 256 + n % 64 * 4 + i % 4] = w[i];
      }
    }
    packed = reinterpret_cast<const int8_t*>(memory.get());
    start = starts.data();
  }
};

// Operators: `inputs` and `outputs` have a letter per tensor (f float32, u uint8, s int8, i int64,
// b bool).
struct Linear {  // x, weights
  static constexpr const char *name = "Linear", *inputs = "ffusff", *outputs = "f";
  Packed weights;

  explicit Linear(Node node) : weights(node, 1) {}
  void run(Context c) const {
    const int rows = int(c.shape(0)[0]);
    kernels->linear(weights, c.in<float>(0), rows, c.out<float>(0, {rows, weights.outputs}));
  }
};

struct LinearNorm {  // x, weights, residual, gamma, beta
  static constexpr const char *name = "LinearNorm", *inputs = "ffusfffff", *outputs = "f";
  Packed weights;
  Norm norm;

  explicit LinearNorm(Node node) : weights(node, 1), norm(node.norm(7)) {}
  void run(Context c) const {
    const int rows = int(c.shape(0)[0]);
    float* y = c.out<float>(0, {rows, weights.outputs});
    kernels->linear(weights, c.in<float>(0), rows, y);
    kernels->add_norm(y, c.in<float>(6), rows, weights.outputs, norm);
  }
};

struct FeedForward {  // x, which is the residual, inner weights, outer weights, gamma, beta
  static constexpr const char *name = "FeedForward", *inputs = "ffusfffusffff", *outputs = "f";
  Packed inner, outer;
  Norm norm;

  explicit FeedForward(Node node) : inner(node, 1), outer(node, 6), norm(node.norm(11)) {}
  void run(Context c) const {
    const int rows = int(c.shape(0)[0]);
    float* y = c.out<float>(0, {rows, outer.outputs});
    kernels->feed_forward(inner, outer, c.in<float>(0), rows, y);
    kernels->add_norm(y, c.in<float>(0), rows, outer.outputs, norm);
  }
};

struct LinearToHeads {  // x, weights, source ids for their shape
  static constexpr const char *name = "LinearToHeads", *inputs = "ffusffi", *outputs = "s";
  Packed weights;
  int width;

  explicit LinearToHeads(Node node) : weights(node, 1), width(node.head_width()) {}
  void run(Context c) const {
    const auto ids = c.shape(6);
    const int64_t batch = ids[0], length = ids[1], heads = weights.outputs / width;
    int8_t* y = c.out<int8_t>(0, {batch, heads, length, width});
    kernels->linear_to_heads(weights, c.in<float>(0), int(batch * length), int(length), width, y);
  }
};

// Writes keys and values of new tokens into the cache [slots, heads, capacity, width] and attends.
// A single token attends to all columns before its position; otherwise `bias` masks columns.
struct SelfAttention {  // queries, keys and values, past keys, past values, positions, cells, ...
  static constexpr const char *name = "SelfAttention", *inputs = "fssiifb", *outputs = "fss";
  int width;

  explicit SelfAttention(Node node) : width(node.head_width()) {}
  void run(Context c) const {
    const auto past = c.shape(1);
    const int slots = int(past[0]), heads = int(past[1]), capacity = int(past[2]);
    const int rows = int(c.shape(3)[1]), d = heads * width;
    const float* x = c.in<float>(0);
    int8_t *keys = c.updated(1, past), *values = c.updated(2, past);
    float* out = c.out<float>(0, {slots * rows, d});
    const bool single = *c.in<bool>(6);
    const int64_t *positions = c.in<int64_t>(3), *cells = c.in<int64_t>(4);
    const float* bias = c.in<float>(5);
    for (int slot = 0; slot < slots; ++slot) {
      for (int head = 0; head < heads; ++head) {
        const size_t cache = (size_t(slot) * heads + head) * capacity * width;
        const size_t first = size_t(slot) * rows;
        for (size_t row = first; row < first + rows; ++row) {
          const int64_t column = single ? positions[row] : cells[(row * heads + head) * 3 + 2];
          require(0 <= column && column < capacity, "a column lies outside of the cache");
          const float* key = x + row * 3 * d + d + head * width;
          kernels->round_to_int8(key, width, keys + cache + column * width);
          kernels->round_to_int8(key + d, width, values + cache + column * width);
        }
        kernels->attention({x + first * 3 * d + head * width, rows, 3 * d, keys + cache,
                            values + cache, single ? int(positions[slot]) + 1 : capacity, width,
                            single ? nullptr : bias + first * capacity, capacity,
                            out + first * d + head * width, d});
      }
    }
  }
};

struct CrossAttention {  // queries, keys, values, bias of source columns
  static constexpr const char *name = "CrossAttention", *inputs = "fssf", *outputs = "fss";
  int width;

  explicit CrossAttention(Node node) : width(node.head_width()) {}
  void run(Context c) const {
    const auto cross = c.shape(1);
    const int slots = int(cross[0]), heads = int(cross[1]), length = int(cross[2]);
    const int d = heads * width, rows = int(c.shape(0)[0]) / slots;
    const float *x = c.in<float>(0), *all_bias = c.in<float>(3);
    const int8_t *keys = c.updated(1, cross), *values = c.updated(2, cross);
    float* out = c.out<float>(0, {slots * rows, d});
    for (int slot = 0; slot < slots; ++slot) {
      const float* bias = all_bias + size_t(slot) * length;
      int columns = length;  // without the padding at the end
      while (columns > 1 && bias[columns - 1] == -INFINITY) --columns;
      for (int head = 0; head < heads; ++head) {
        const size_t cache = (size_t(slot) * heads + head) * length * width;
        const size_t first = size_t(slot) * rows * d + head * width;
        kernels->attention({x + first, rows, d, keys + cache, values + cache, columns, width, bias,
                            0, out + first, d});
      }
    }
  }
};

struct EncoderSelfAttention {  // queries, keys, values [rows, d], mask of the source
  static constexpr const char *name = "EncoderAttention", *inputs = "fffb", *outputs = "f";
  int width;

  explicit EncoderSelfAttention(Node node) : width(node.head_width()) {}
  void run(Context c) const {
    const auto sizes = c.shape(3);
    const int64_t batch = sizes[0], length = sizes[1], d = c.shape(0)[1];
    const float *query = c.in<float>(0), *key = c.in<float>(1), *value = c.in<float>(2);
    const uint8_t* mask = c.in<uint8_t>(3);
    float* out = c.out<float>(0, {batch * length, d});
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t first = 0; first < d; first += width) {
        const size_t at = size_t(b) * length * d + first;
        kernels->encoder_attention({query + at, key + at, value + at, mask + b * length,
                                    int(length), int(d), width, out + at});
      }
    }
  }
};

struct Embed {  // ids, positions, table, scales, factor, positions' table
  static constexpr const char *name = "Embed", *inputs = "iisfff", *outputs = "f";
  Embedding embedding;
  int64_t tokens, places;
  bool counted;  // positions are 0, 1, 2, ... in each row, not the input's

  explicit Embed(Node node) : counted(node.integer("counted")) {
    const auto sizes = shape(node.constant(2));
    tokens = sizes[0];
    places = shape(node.constant(5))[0];
    embedding = {node.constant_data<int8_t>(2), node.constant_data<float>(3),
                 *node.constant_data<float>(4), node.constant_data<float>(5),
                 checked(sizes[1], "embedding widths")};
  }
  void run(Context c) const {
    const auto sizes = c.shape(0);
    const int64_t rows = sizes[0] * sizes[1];
    const int64_t *ids = c.in<int64_t>(0), *positions = c.in<int64_t>(1);
    std::vector<int64_t> count(counted ? rows : 0);
    for (size_t row = 0; row < count.size(); ++row) count[row] = row % sizes[1];
    if (counted) positions = count.data();
    for (int64_t row = 0; row < rows; ++row) {
      require(0 <= ids[row] && ids[row] < tokens, "a token lies outside of the vocabulary");
      require(0 <= positions[row] && positions[row] < places, "a position lies outside");
    }
    kernels->embed(embedding, ids, positions, int(rows), c.out<float>(0, {rows, embedding.width}));
  }
};

static ort::Type type(char letter) {
  switch (letter) {
    case 'u': return ort::UINT8;
    case 's': return ort::INT8;
    case 'i': return ort::INT64;
    case 'b': return ort::BOOL;
    default: return ort::FLOAT;
  }
}

template <class Function>
static ort::Status* guarded(Function function) {
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    return ort::failure(error.what());
  }
}

template <class Operator>
static ort::CustomOp described() {
  using Self = const ort::CustomOp*;
  ort::CustomOp op{};
  op.version = ort::VERSION;
  op.name = [](Self) { return Operator::name; };
  op.provider = [](Self) -> const char* { return nullptr; };
  op.input_count = [](Self) { return strlen(Operator::inputs); };
  op.input_type = [](Self, size_t i) { return type(Operator::inputs[i]); };
  op.output_count = [](Self) { return strlen(Operator::outputs); };
  op.output_type = [](Self, size_t i) { return type(Operator::outputs[i]); };
  op.input_characteristic = op.output_characteristic = op.input_memory = [](Self, size_t) {
    return 0;
  };
  op.create_v2 = [](Self, ort::Api*, const KernelInfo* info, void** kernel) {
    return guarded([&] { *kernel = new Operator(Node{info}); });
  };
  op.compute_v2 = [](void* kernel, KernelContext* context) {
    return guarded([&] { static_cast<const Operator*>(kernel)->run(Context{context}); });
  };
  op.destroy = [](void* kernel) { delete static_cast<Operator*>(kernel); };
  op.start_version = op.end_version = [](Self) { return 1; };
  return op;
}

template <class... Operators>
static ort::Domain* domain_of() {
  ort::Domain* domain;
  ort::CreateCustomOpDomain("transferry.kernels", &domain);
  static const ort::CustomOp all[] = {described<Operators>()...};
  for (const auto& op : all) ort::CustomOpDomain_Add(domain, &op);
  return domain;
}

// KERNELS_AVX2=1 takes AVX2 where AVX-512 VNNI would do.
static const Kernels* best_kernels() {
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
      !getenv("KERNELS_AVX2")) {
    return &avx512::kernels;
  }
  require(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
          "transferry.kernels needs a CPU with AVX2 and FMA; use the standard graphs");
  return &avx2::kernels;
}

// Called by SessionOptions.register_custom_ops_library.
extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  ort::api = base->get_api(ort::VERSION);
  return guarded([&] {
    kernels = best_kernels();
    static ort::Domain* domain =
        domain_of<Linear, LinearNorm, FeedForward, LinearToHeads, SelfAttention, CrossAttention,
                  EncoderSelfAttention, Embed>();
    ort::AddCustomOpDomain(options, domain);
  });
}
