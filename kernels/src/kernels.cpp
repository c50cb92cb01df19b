// The kernels, compiled once per instruction set in namespace ISA.
//
// A sum in float32 depends on its order. Here each has one order, whichever instruction set adds:
// over lanes of 16, then in `sum`. No order depends on the batch: a row is computed alone, or in a
// tile whose sums are integers. So answers have the same bits on all CPUs and in all batches.
//
// Everything is in an unnamed namespace, without templates of the standard library: the linker
// might take AVX-512 code of a shared template for the whole library.
#include "kernels.h"

#include <cmath>

#include "lanes.h"

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace {
// QuantizeLinear: x / scale, clamped and rounded to even, plus zero.
inline void quantize(Floats x, float scale, int zero, uint8_t* y) {
  Floats low = broadcast(float(-zero)), high = broadcast(float(255 - zero));
  store_bytes(y, round_to_even(min(max(x / scale, low), high)) + zero);
}
void quantize(const float* x, int64_t count, float scale, int zero, uint8_t* q) {
  for (int64_t i = 0; i < count; i += 16) quantize(load(x + i), scale, zero, q + i);
}
inline void round_to_int8(Floats x, int8_t* y) {
  store_bytes(y, round_to_even(min(max(x, broadcast(-128.f)), broadcast(127.f))));
}
void round_to_int8(const float* x, int64_t count, int8_t* q) {
  for (int64_t i = 0; i < count; i += 16) round_to_int8(load(x + i), q + i);
}

// GEMM tile: R rows of uint8 times 64 outputs of int8. The integer sums are exact, so that their
// order is free: 32 bits hold 255 * 127 * 65,000 inputs. AVX2 adds two neighbouring products in
// 16 bits, which hold 255 * 128: packing checks |w[2i] + w[2i + 1]| <= 128.
template <int R>
inline void tile(const uint8_t* x, int inputs, const int8_t* weights, const int32_t* start,
                 Integers (&result)[R][4]) {
#ifdef __AVX512VNNI__
  __m512i s[R][4];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int j = 0; j < 4; ++j) s[r][j] = load_integers(start + 16 * j).v;
  }
  for (int i = 0; i < inputs; i += 4, weights += 256) {
    __m512i w[4];
    UNROLL for (int j = 0; j < 4; ++j) w[j] = _mm512_load_si512(weights + 64 * j);
    if (R == 1) {  // one row waits for memory, and the hardware's prefetcher stops at pages
      UNROLL for (int j = 0; j < 4; ++j) {
        _mm_prefetch((const char*)weights + 2048 + 64 * j, _MM_HINT_T0);
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      __m512i four = _mm512_set1_epi32(*(const int*)(x + size_t(r) * inputs + i));
      UNROLL for (int j = 0; j < 4; ++j) s[r][j] = _mm512_dpbusd_epi32(s[r][j], four, w[j]);
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int j = 0; j < 4; ++j) result[r][j] = {s[r][j]};
  }
#else
  const __m256i ones = _mm256_set1_epi16(1);
  for (int j = 0; j < 4; ++j) {  // 16 outputs at a time: 2 R sums fit in 16 registers
    Integers s[R];
    UNROLL for (int r = 0; r < R; ++r) s[r] = load_integers(start + 16 * j);
    for (int i = 0; i < inputs; i += 4) {
      const __m256i* w = (const __m256i*)(weights + size_t(i) * 64 + 64 * j);
      const __m256i a = _mm256_load_si256(w), b = _mm256_load_si256(w + 1);
      UNROLL for (int r = 0; r < R; ++r) {
        __m256i four = _mm256_set1_epi32(*(const int*)(x + size_t(r) * inputs + i));
        __m256i pa = _mm256_maddubs_epi16(four, a), pb = _mm256_maddubs_epi16(four, b);
        s[r].a = _mm256_add_epi32(s[r].a, _mm256_madd_epi16(pa, ones));
        s[r].b = _mm256_add_epi32(s[r].b, _mm256_madd_epi16(pb, ones));
      }
    }
    UNROLL for (int r = 0; r < R; ++r) result[r][j] = s[r];
  }
#endif
}

// Calls put(row, output, 16 floats) for `height` rows, at most R, and 64 outputs of a layer.
template <int R, class Put>
inline void dequantized_tile(const Weights& w, const uint8_t* x, int row, int height, int output,
                             Put& put) {
  if constexpr (R > 1) {
    if (height < R) return dequantized_tile<R - 1>(w, x, row, height, output, put);
  }
  Integers sums[R][4];
  tile<R>(x + size_t(row) * w.inputs, w.inputs, w.packed + size_t(output) * w.inputs,
          w.start + output, sums);
  for (int r = 0; r < R; ++r) {
    for (int j = 0, n = output; j < 4 && n < w.outputs; ++j, n += 16) {
      put(row + r, n, to_float(sums[r][j]) * load(w.scales + n) + load(w.bias + n));
    }
  }
}

// GEMM: tiles of up to 6 rows, as even as they come.
template <class Put>
void gemm(const Weights& w, const uint8_t* x, int rows, Outputs outputs, Put put) {
  for (int row = 0, rest = (rows + 5) / 6; rest > 0; --rest) {
    const int height = (rows - row + rest - 1) / rest;
    for (int n = outputs.first; n < outputs.end; n += 64) {
      dequantized_tile<6>(w, x, row, height, n, put);
    }
    row += height;
  }
}

// Stores the lanes that lie within `outputs`, of a group that begins at output n.
inline void store_within(float* row, int n, int outputs, Floats v) {
  if (n + 16 <= outputs) return store(row + n, v);
  float lanes[16];
  store(lanes, v);
  for (int i = 0; n + i < outputs; ++i) row[n + i] = lanes[i];
}

void linear(const Weights& w, const uint8_t* q, int rows, Outputs outputs, float* y) {
  const int width = w.outputs;
  gemm(w, q, rows, outputs,
       [=](int row, int n, Floats v) { store_within(y + int64_t(row) * width, n, width, v); });
}

// The clamp at zero of the next layer's inputs is ReLU, if its zero is 0.
void linear_quantized(const Weights& w, const uint8_t* q, int rows, Outputs outputs,
                      const Weights& next, uint8_t* y, float* shown) {
  const float scale = next.input_scale;
  const int zero = next.input_zero;
  const int64_t width = w.outputs;
  gemm(w, q, rows, outputs, [=](int row, int n, Floats v) {
    quantize(v, scale, zero, y + row * width + n);
    if (shown) store(shown + row * width + n, v);
  });
}

// LayerNormalization in onnxruntime's order, whose bits it has: the mean in 4 sums of float64, the
// variance in 8 of float32.
void add_norm(float* x, const float* residual, int rows, int width, const Norm& norm) {
  for (int r = 0; r < rows; ++r, x += width, residual += width) {
    __m256d total = _mm256_setzero_pd();
    for (int i = 0; i < width; i += 4) {
      __m128 four = _mm_add_ps(_mm_loadu_ps(residual + i), _mm_loadu_ps(x + i));
      _mm_storeu_ps(x + i, four);
      total = _mm256_add_pd(total, _mm256_cvtps_pd(four));
    }
    double t[4];
    _mm256_storeu_pd(t, total);
    const __m256 mean = _mm256_set1_ps(float(((t[0] + t[2]) + (t[1] + t[3])) / width));
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < width; i += 8) {
      __m256 centred = _mm256_sub_ps(_mm256_loadu_ps(x + i), mean);
      squares = _mm256_fmadd_ps(centred, centred, squares);
    }
    float q[8];
    _mm256_storeu_ps(q, squares);
    float sum = ((q[0] + q[4]) + (q[2] + q[6])) + ((q[1] + q[5]) + (q[3] + q[7]));
    const __m256 inverse = _mm256_set1_ps(1.f / sqrtf(sum / float(width) + norm.epsilon));
    for (int i = 0; i < width; i += 8) {
      __m256 y = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), mean), inverse);
      __m256 gamma = _mm256_loadu_ps(norm.gamma + i), beta = _mm256_loadu_ps(norm.beta + i);
      _mm256_storeu_ps(x + i, _mm256_fmadd_ps(y, gamma, beta));
    }
  }
}

// Replaces scores, padded to 16, by their exponentials; returns 1 / their sum.
inline float softmax(float* scores, int columns) {
  for (int c = columns; c % 16; ++c) scores[c] = -INFINITY;
  Floats top = broadcast(-INFINITY);
  for (int c = 0; c < columns; c += 16) top = max(top, load(scores + c));
  const float peak = largest(top);
  Floats total = broadcast(0);
  for (int c = 0; c < columns; c += 16) {
    Floats x = load(scores + c), e = unless_masked(exponential(x - peak), x);
    store(scores + c, e);
    total = total + e;
  }
  return 1.f / sum(total);
}

// Attention with heads of width 16 B. Columns past the end repeat an earlier one: softmax masks
// them.
template <int B, class Element>
void attend(const Attention& a, const Element* keys, const Element* values, float* scores) {
  for (int row = 0; row < a.rows; ++row) {
    Floats query[B];
    UNROLL for (int b = 0; b < B; ++b) {
      query[b] = load(a.query + size_t(row) * a.query_step + 16 * b);
    }
    for (int c = 0; c < a.columns; c += 16) {
      Floats dots[16];
      for (int i = 0; i < 16; ++i) {
        const Element* key = keys + size_t(c + i < a.columns ? c + i : c) * 16 * B;
        Floats dot = query[B - 1] * load(key + 16 * (B - 1));
        UNROLL for (int b = B - 2; b >= 0; --b) dot = fma(query[b], load(key + 16 * b), dot);
        dots[i] = dot;
      }
      store(scores + c, sums(dots));
    }
    if (a.bias) {
      const float* bias = a.bias + size_t(row) * a.bias_step;
      for (int c = 0; c < a.columns; ++c) scores[c] += bias[c];
    }
    const float scale = softmax(scores, a.columns);
    Floats out[B];
    UNROLL for (int b = 0; b < B; ++b) out[b] = broadcast(0);
    for (int c = 0; c < a.columns; ++c) {
      const Element* value = values + size_t(c) * 16 * B;
      UNROLL for (int b = 0; b < B; ++b) {
        out[b] = fma(broadcast(scores[c]), load(value + 16 * b), out[b]);
      }
    }
    UNROLL for (int b = 0; b < B; ++b) {
      store(a.out + size_t(row) * a.out_step + 16 * b, out[b] * scale);
    }
  }
}

// Several rows, the beams of a slot, share one conversion of the cache to float.
template <int B>
void attend(const Attention& a) {
  const size_t wide = (size_t(a.columns) + 15) / 16 * 16, size = size_t(a.columns) * 16 * B;
  const Scratch room((wide + (a.rows > 1 ? 2 * size : 0)) * sizeof(float));
  float* scores = room.as<float>();
  if (a.rows == 1) return attend<B>(a, a.keys, a.values, scores);
  float *keys = scores + wide, *values = keys + size;
  for (size_t i = 0; i < size; i += 16) {
    store(keys + i, load(a.keys + i));
    store(values + i, load(a.values + i));
  }
  attend<B>(a, keys, values, scores);
}

template <int B = 1>
void attention(const Attention& a) {
  if constexpr (B < MAX_HEAD_WIDTH / 16) {
    if (a.width != 16 * B) return attention<B + 1>(a);
  }
  attend<B>(a);
}

// Keys are transposed first: a vector has 16 columns' scores, without sums across lanes. Rows go in
// blocks, whose sums do not wait for each other; the last row fills up the last block.
void encoder_attention(const EncoderAttention& a) {
  constexpr int BLOCK = 4;
  const size_t wide = (size_t(a.length) + 15) / 16 * 16;
  const Scratch room(wide * (a.width + BLOCK) * sizeof(float));
  float *scores = room.as<float>(), *keys = scores + BLOCK * wide;
  for (size_t c = 0; c < wide; ++c) {
    for (int d = 0; d < a.width; ++d) {
      keys[d * wide + c] = c < size_t(a.length) ? a.key[c * a.step + d] : 0.f;
    }
  }
  for (int first = 0; first < a.length; first += BLOCK) {
    size_t at[BLOCK];
    float scale[BLOCK];
    Floats sums[BLOCK];
    for (int i = 0; i < BLOCK; ++i) {
      at[i] = size_t(first + i < a.length ? first + i : a.length - 1) * a.step;
    }
    for (size_t c = 0; c < wide; c += 16) {
      UNROLL for (int i = 0; i < BLOCK; ++i) sums[i] = broadcast(0);
      for (int d = 0; d < a.width; ++d) {
        const Floats key = load(keys + d * wide + c);
        UNROLL for (int i = 0; i < BLOCK; ++i) {
          sums[i] = fma(broadcast(a.query[at[i] + d]), key, sums[i]);
        }
      }
      UNROLL for (int i = 0; i < BLOCK; ++i) store(scores + i * wide + c, sums[i]);
    }
    for (int i = 0; i < BLOCK; ++i) {
      for (int c = 0; c < a.length; ++c) {
        if (!a.mask[c]) scores[i * wide + c] = -INFINITY;
      }
      scale[i] = softmax(scores + i * wide, a.length);
    }
    for (int d = 0; d < a.width; d += 16) {
      UNROLL for (int i = 0; i < BLOCK; ++i) sums[i] = broadcast(0);
      for (int c = 0; c < a.length; ++c) {
        const Floats value = load(a.value + size_t(c) * a.step + d);
        UNROLL for (int i = 0; i < BLOCK; ++i) {
          sums[i] = fma(broadcast(scores[i * wide + c]), value, sums[i]);
        }
      }
      UNROLL for (int i = 0; i < BLOCK; ++i) store(a.out + at[i] + d, sums[i] * scale[i]);
    }
  }
}

void embed(const Embedding& e, const int64_t* tokens, const int64_t* positions, int64_t rows,
           float* out) {
  for (int64_t row = 0; row < rows; ++row, out += e.width) {
    const int8_t* vector = e.table + tokens[row] * e.width;
    const float* place = e.positions + positions[row] * e.width;
    const float scale = e.scales[tokens[row]];
    for (int i = 0; i < e.width; i += 16) {
      store(out + i, load(vector + i) * scale * e.factor + load(place + i));
    }
  }
}
}  // namespace

extern const Kernels ISA::kernels{quantize,  round_to_int8, linear,            linear_quantized,
                                  add_norm,  attention<1>,  encoder_attention, embed};
