// Kernels of a Transformer's layers with weights and cache in int8, one table per instruction set.
// All tables give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

// A linear layer. Its input is quantised to uint8 with one static scale, its weights to int8 with
// a scale for each output. The arrays are padded with zeros to multiples of 64 outputs.
struct Weights {
  int outputs, inputs;  // any number, and a multiple of 16
  float input_scale;    // an input is about (q - input_zero) * input_scale
  float input_inverse;  // 1 / input_scale, or 0 where inputs must be divided by the scale
  int input_zero;
  const int8_t* packed;  // blocks of 64 outputs: [inputs / 4, 64, 4]
  const int32_t* start;  // -input_zero * sum of an output's weights
  const float* scales;   // of the integer product, by output
  const float* bias;
};

// Outputs of a layer that one call computes: `first` is a multiple of 64.
struct Outputs {
  int first, end;
};

struct Norm {
  const float *gamma, *beta;
  float epsilon;
};

// Attention of one slot and head over its int8 cache, scale 1.
struct Attention {
  const float* query;
  int rows;
  int64_t query_step;  // distance of rows
  const int8_t *keys, *values;
  int columns, width;
  const float* bias;  // [rows, columns], or null
  int bias_step;      // 0: all rows have the same
  float* out;
  int64_t out_step;
};

// Attention of one sentence and head in an encoder, in float32.
struct EncoderAttention {
  const float *query, *key, *value;
  const uint8_t* mask;
  int length, width;
  int64_t step;  // distance of rows
  float* out;
};

struct Embedding {
  const int8_t* table;
  const float* scales;  // by token
  float factor;
  const float* positions;
  int width;
};

// The largest logits of a row so far and their tokens; of equal ones the lower token comes first.
struct Ranking {
  float* logits;
  int64_t* tokens;
  int count;  // at least 1
};

// Matrices have no gaps between rows. Sizes of rows, but those of a layer's outputs, are multiples
// of 16.
struct Kernels {
  // QuantizeLinear to uint8, of inputs of a layer.
  void (*quantize)(const Weights&, const float* x, int64_t count, uint8_t* q);
  // QuantizeLinear to int8 with scale 1.
  void (*round_to_int8)(const float* x, int64_t count, int8_t* q);
  // The rows of y, which begin with output 0, lie `step` apart.
  void (*linear)(const Weights&, const uint8_t* q, int rows, Outputs, float* y, int64_t step);
  // Quantises the product for a layer that follows; `shown`, unless null, has it unrounded.
  void (*linear_quantized)(const Weights&, const uint8_t* q, int rows, Outputs, const Weights& next,
                           uint8_t* y, float* shown);
  // x = LayerNormalization(x + residual)
  void (*add_norm)(float* x, const float* residual, int rows, int width, const Norm&);
  void (*attention)(const Attention&);
  void (*encoder_attention)(const EncoderAttention&);
  void (*embed)(const Embedding&, const int64_t* tokens, const int64_t* positions, int64_t rows,
                float* out);
  // Of any number of logits: the sum of their exponentials, infinite above 3e38; the largest, of
  // numbers; those that belong into a ranking, the first of which is of token `first`.
  float (*exp_sum)(const float* logits, int count);
  float (*largest)(const float* logits, int count);
  void (*rank)(const float* logits, int count, int64_t first, const Ranking&);
};
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}

constexpr int MAX_HEAD_WIDTH = 256;

// Memory of one call, aligned to 64 bytes. A thread keeps a block of at most 4 MiB between calls.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  size_t size_;
};
