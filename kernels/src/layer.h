// A linear layer of a node: its packed weights, its quantised inputs, and its products in parts.
#pragma once
#include <cstring>
#include <memory>

#include "node.h"

// A linear layer from six inputs: scale and zero of x, weights [outputs, inputs], scale and scales
// of the products, bias.
#define LINEAR "fusffF"
struct Packed : Weights {
  // The largest sum, 255 * 128 * inputs, stays within 32 bits.
  static constexpr int64_t MOST_INPUTS = 65536;

  std::unique_ptr<int8_t, decltype(&free)> memory{nullptr, free};
  std::vector<int32_t> starts;
  std::vector<float> all_scales, all_bias;

  Packed(const Node& node, size_t first) {
    const Shape sizes = node.shape(first + 2);
    sizes.expect(node.name(first + 2), {ANY, ANY});
    outputs = sizes[0];
    inputs = checked(sizes[1], "the inputs of " + node.name(first + 2), MOST_INPUTS);
    input_scale = node.scalar<float>(first);
    if (!(input_scale > 0 && std::isfinite(input_scale))) {
      refuse("expected a positive scale " + node.name(first) + ", found " +
             std::to_string(input_scale));
    }
    // Within these bounds no quotient's rounding error is a denormal number. The reciprocal of the
    // largest significand is the exception of Markstein's theorem.
    int exponent;
    const bool is_largest = std::frexp(input_scale, &exponent) == 1 - ldexpf(1, -24);
    input_inverse = is_largest || abs(exponent) > 60 ? 0 : 1 / input_scale;
    input_zero = node.scalar<uint8_t>(first + 1);
    const size_t padded = (size_t(outputs) + 63) / 64 * 64;
    pack(node.constant<int8_t>(first + 2, {outputs, inputs}), padded);
    const float factor = node.scalar<float>(first + 3);
    const float* each = node.constant<float>(first + 4, {outputs});
    all_scales.resize(padded);
    for (int n = 0; n < outputs; ++n) all_scales[n] = factor * each[n];
    all_bias.assign(padded, -0.f);  // x + -0 has all of x's bits
    if (!node.name(first + 5).empty()) {
      const float* given = node.constant<float>(first + 5, {outputs});
      std::copy(given, given + outputs, all_bias.begin());
    }
    scales = all_scales.data();
    bias = all_bias.data();
  }

 private:
  void pack(const int8_t* w, size_t padded) {
    const size_t size = padded * inputs;
    memory.reset(static_cast<int8_t*>(aligned_alloc(64, size)));
    if (size && !memory) throw std::bad_alloc();
    memset(memory.get(), 0, size);
    starts.resize(padded);
    for (int n = 0; n < outputs; ++n, w += inputs) {
      for (int i = 0; i < inputs; ++i) {
        require(i % 2 || abs(w[i] + w[i + 1]) <= 128,
                "expected neighbouring weights whose sum is -128 to 128, so that AVX2 does not "
                "saturate, found others; export the bundle again");
        starts[n] -= input_zero * w[i];
        memory.get()[size_t(n / 64 * 64) * inputs + i / 4 * 256 + n % 64 * 4 + i % 4] = w[i];
      }
    }
    packed = memory.get();
    start = starts.data();
  }
};

// The quantised inputs of a layer: in an output where the graph has one for them.
class Quantized {
 public:
  Quantized(const Context& c, const Weights& w, int rows, size_t output)
      : shown_(c.out<uint8_t>(output, {rows, w.inputs})),
        room_(shown_ ? 0 : size_t(rows) * w.inputs) {}
  Quantized(const Context& c, const Weights& w, int rows, size_t output, const float* x)
      : Quantized(c, w, rows, output) {
    kernels().quantize(w, x, int64_t(rows) * w.inputs, data());
  }
  uint8_t* data() const { return shown_ ? shown_ : room_.as<uint8_t>(); }

 private:
  uint8_t* shown_;
  Scratch room_;
};

// Calls function(outputs) for all outputs of a layer, in parts: for threads, where waking them
// costs less than the product, and for the cache, where many rows meet the same weights.
template <class Function>
void for_outputs(const Context& c, const Weights& w, int64_t rows, Function function) {
  constexpr int64_t MUCH = 1 << 20;  // multiplications, 10 microseconds
  const bool is_much = rows * w.inputs * w.outputs >= MUCH;
  const int part = is_much ? 128 : w.outputs + 1;
  c.parallel((w.outputs + part - 1) / part, [&](size_t i) {
    const int first = int(i) * part;
    function(Outputs{first, w.outputs - first < part ? w.outputs : first + part});
  });
}
inline void multiply(const Context& c, const Weights& w, const Quantized& x, int rows, float* y) {
  for_outputs(c, w, rows,
              [&](Outputs part) { kernels().linear(w, x.data(), rows, part, y, w.outputs); });
}
