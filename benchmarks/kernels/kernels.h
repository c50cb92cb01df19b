// Kernels of a Transformer's layers with weights and cache in int8, one table per instruction set.
// All tables give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>

// A linear layer. x is quantised to uint8 with one static scale, the weights to int8 by output.
struct Weights {
  int outputs, inputs;    // multiples of 16
  float input_scale;      // x is about (q - input_zero) * input_scale
  int input_zero;
  const int8_t* packed;   // blocks of 64 outputs: [inputs / 4, 64, 4], padded with zeros
  const int32_t* start;   // -input_zero * sum of an output's weights
  const float* scales;    // of the integer product, by output
  const float* bias;
};

struct Norm {
  const float *gamma, *beta;
  float epsilon;
};

// Attention of one slot and head over its int8 cache, scale 1.
struct Attention {
  const float* query;
  int rows, query_step;  // distance of rows
  const int8_t *keys, *values;
  int columns, width;
  const float* bias;  // [rows or 1, columns], or null
  int bias_step;
  float* out;
  int out_step;
};

// Attention of one sentence and head in an encoder, in float32.
struct EncoderAttention {
  const float *query, *key, *value;
  const uint8_t* mask;
  int length, step, width;
  float* out;
};

struct Embedding {
  const int8_t* table;
  const float* scales;  // by token
  float factor;
  const float* positions;
  int width;
};

struct Kernels {
  void (*linear)(const Weights&, const float* x, int rows, float* y);
  // Into [batch, heads, length, width], rounded to int8: keys or values of cross-attention.
  void (*linear_to_heads)(const Weights&, const float* x, int rows, int length, int width, int8_t*);
  void (*feed_forward)(const Weights&, const Weights&, const float* x, int rows, float* y);
  // x = LayerNormalization(x + residual)
  void (*add_norm)(float* x, const float* residual, int rows, int width, const Norm&);
  void (*attention)(const Attention&);
  void (*encoder_attention)(const EncoderAttention&);
  void (*embed)(const Embedding&, const int64_t* tokens, const int64_t* positions, int rows,
                float* out);
  void (*round_to_int8)(const float* x, int count, int8_t* y);
};
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

constexpr int MAX_HEAD_WIDTH = 256;

// Memory of this thread, aligned to 64 bytes, until the next call.
uint8_t* scratch(size_t bytes);
inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
