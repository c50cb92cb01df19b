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
// QuantizeLinear: x / scale, clamped and rounded to even, plus zero. Dividing 16 values takes 16
// cycles, more than their product in AMX. From a quotient within one unit in the last place, a step
// with the rounded reciprocal gives the correctly rounded one (Markstein 1990); a step before it
// gets that near. x is clamped first: rounding (255 - zero) * scale does not change its integer.
struct Quantizer {
  Floats scale, inverse, low, high;
  int zero;
  bool divides;

  explicit Quantizer(const Weights& w)
      : scale(broadcast(w.input_scale)),
        inverse(broadcast(w.input_inverse)),
        zero(w.input_zero),
        divides(w.input_inverse == 0) {
    const float unit = divides ? 1.f : w.input_scale;
    low = broadcast(unit * float(-zero));
    high = broadcast(unit * float(255 - zero));
  }
  void operator()(Floats x, uint8_t* y) const {
    if (divides) x = x / scale;
    x = min(max(x, low), high);
    if (!divides) {
      Floats near = x * inverse;
      near = fma(less_product(near, scale, x), inverse, near);
      x = fma(less_product(near, scale, x), inverse, near);
    }
    store_bytes(y, round_to_even(x) + zero);
  }
};
void quantize(const Weights& w, const float* x, int64_t count, uint8_t* q) {
  const Quantizer quantizer(w);
  for (int64_t i = 0; i < count; i += 16) quantizer(load(x + i), q + i);
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
    // Few rows wait for memory, and the hardware's prefetcher stops at pages.
    UNROLL for (int j = 0; j < 4; ++j) {
      _mm_prefetch((const char*)weights + 2048 + 64 * j, _MM_HINT_T0);
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

#ifdef __AMX_INT8__
// The operand of ldtilecfg: tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
struct alignas(64) TileShapes {
  uint8_t palette = 1, zeros[15] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit TileShapes(int height) {
    for (int i = 0; i < 8; ++i) rows[i] = i < 6 ? height : 16;
  }
};

// The sums of R tiles of inputs, at x, and 32 outputs. The packed weights are tiles as they are: 16
// rows, each of 4 inputs of 16 outputs.
template <int R>
inline void amx_tiles(const Weights& w, const uint8_t* const (&x)[R], int output,
                      int32_t (&sums)[R][2][256]) {
  const int8_t* weights = w.packed + size_t(output / 64 * 64) * w.inputs + output % 64 * 4;
  const int32_t* start = w.start + output;
  _tile_loadd(0, start, 0);  // all rows start as one
  _tile_loadd(1, start + 16, 0);
  if constexpr (R == 2) {
    _tile_loadd(2, start, 0);
    _tile_loadd(3, start + 16, 0);
  }
  for (int i = 0; i < w.inputs; i += 64, weights += 64 * 64) {
    _tile_loadd(6, weights, 256);
    _tile_loadd(7, weights + 64, 256);
    _tile_loadd(4, x[0] + i, w.inputs);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if constexpr (R == 2) {
      _tile_loadd(5, x[1] + i, w.inputs);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  if constexpr (R == 2) {
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  }
}

template <int R, class Put>
inline void dequantized_tiles(const Weights& w, const uint8_t* x, const int (&rows)[R], int height,
                              Outputs outputs, Put& put) {
  alignas(64) int32_t sums[R][2][256];
  const uint8_t* from[R];
  for (int t = 0; t < R; ++t) from[t] = x + size_t(rows[t]) * w.inputs;
  for (int first = outputs.first; first < outputs.end; first += 32) {
    amx_tiles<R>(w, from, first, sums);
    for (int j = 0, n = first; j < 2 && n < w.outputs; ++j, n += 16) {
      const Floats scales = load(w.scales + n), bias = load(w.bias + n);
      for (int t = 0; t < R; ++t) {
        for (int r = 0; r < height; ++r) {
          put(rows[t] + r, n, to_float(load_integers(sums[t][j] + 16 * r)) * scales + bias);
        }
      }
    }
  }
}

// GEMM in AMX's tiles of up to 16 rows, all of one height: the last one has rows of the one before
// again. The sums are the same integers.
template <class Put>
void amx_gemm(const Weights& w, const uint8_t* x, int rows, Outputs outputs, Put put) {
  const int count = (rows + 15) / 16, height = (rows + count - 1) / count;
  const TileShapes shapes(height);
  asm volatile("" : : "r"(&shapes) : "memory");  // GCC 12 takes 8 bytes of it for read
  _tile_loadconfig(&shapes);
  for (int t = 0; t < count; t += 2) {
    const int last = rows - height, second = (t + 1) * height;
    if (t + 1 == count) {
      dequantized_tiles<1>(w, x, {last}, height, outputs, put);
    } else {
      const int rows_of_both[] = {t * height, second < last ? second : last};
      dequantized_tiles<2>(w, x, rows_of_both, height, outputs, put);
    }
  }
  _tile_release();
}
#endif

// GEMM: tiles of up to 6 rows, as even as they come.
template <class Put>
void gemm(const Weights& w, const uint8_t* x, int rows, Outputs outputs, Put put) {
#ifdef __AMX_INT8__
  // A tile takes 16 cycles, with few rows too.
  if (rows > 6 && w.inputs % 64 == 0) return amx_gemm(w, x, rows, outputs, put);
#endif
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

void linear(const Weights& w, const uint8_t* q, int rows, Outputs outputs, float* y, int64_t step) {
  const int width = w.outputs;
  gemm(w, q, rows, outputs,
       [=](int row, int n, Floats v) { store_within(y + row * step, n, width, v); });
}

// The clamp at zero of the next layer's inputs is ReLU, if its zero is 0.
void linear_quantized(const Weights& w, const uint8_t* q, int rows, Outputs outputs,
                      const Weights& next, uint8_t* y, float* shown) {
  const Quantizer quantizer(next);
  const int64_t width = w.outputs;
  gemm(w, q, rows, outputs, [=](int row, int n, Floats v) {
    quantizer(v, y + row * width + n);
    if (shown) store(shown + row * width + n, v);
  });
}

// LayerNormalization in onnxruntime's order, whose bits it has: the mean in 4 sums of float64, the
// variance in 8 of float32. The sums of R rows do not wait for each other.
template <int R>
void add_norm(float* x, const float* residual, int width, const Norm& norm) {
  __m256d total[R];
  __m256 mean[R], squares[R], inverse[R];
  UNROLL for (int r = 0; r < R; ++r) total[r] = _mm256_setzero_pd();
  for (int i = 0; i < width; i += 4) {
    UNROLL for (int r = 0, at = i; r < R; ++r, at += width) {
      __m128 four = _mm_add_ps(_mm_loadu_ps(residual + at), _mm_loadu_ps(x + at));
      _mm_storeu_ps(x + at, four);
      total[r] = _mm256_add_pd(total[r], _mm256_cvtps_pd(four));
    }
  }
  for (int r = 0; r < R; ++r) {
    double t[4];
    _mm256_storeu_pd(t, total[r]);
    mean[r] = _mm256_set1_ps(float(((t[0] + t[2]) + (t[1] + t[3])) / width));
    squares[r] = _mm256_setzero_ps();
  }
  for (int i = 0; i < width; i += 8) {
    UNROLL for (int r = 0, at = i; r < R; ++r, at += width) {
      __m256 centred = _mm256_sub_ps(_mm256_loadu_ps(x + at), mean[r]);
      squares[r] = _mm256_fmadd_ps(centred, centred, squares[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float q[8];
    _mm256_storeu_ps(q, squares[r]);
    float sum = ((q[0] + q[4]) + (q[2] + q[6])) + ((q[1] + q[5]) + (q[3] + q[7]));
    inverse[r] = _mm256_set1_ps(1.f / sqrtf(sum / float(width) + norm.epsilon));
  }
  for (int i = 0; i < width; i += 8) {
    const __m256 gamma = _mm256_loadu_ps(norm.gamma + i), beta = _mm256_loadu_ps(norm.beta + i);
    UNROLL for (int r = 0, at = i; r < R; ++r, at += width) {
      __m256 y = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + at), mean[r]), inverse[r]);
      _mm256_storeu_ps(x + at, _mm256_fmadd_ps(y, gamma, beta));
    }
  }
}
void add_norm(float* x, const float* residual, int rows, int width, const Norm& norm) {
  constexpr int R = 4;
  for (; rows >= R; rows -= R, x += R * width, residual += R * width) {
    add_norm<R>(x, residual, width, norm);
  }
  for (; rows > 0; --rows, x += width, residual += width) add_norm<1>(x, residual, width, norm);
}

// Replaces scores, padded to 16, by their exponentials; returns 1 / their sum.
inline float softmax(float* scores, int columns) {
  for (int c = columns; c % 16; ++c) scores[c] = -INFINITY;
  Floats top = broadcast(-INFINITY);
  for (int c = 0; c < columns; c += 16) top = max(top, load(scores + c));
  const float peak = largest(top);
  Floats total = broadcast(0);
  for (int c = 0; c < columns; c += 16) {
    Floats e = exponential(load(scores + c) - peak);
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

// 16 logits, with minus infinity for those past the end.
inline Floats load_up_to(const float* logits, int count) {
  if (count >= 16) return load(logits);
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < count ? logits[i] : -INFINITY;
  return load(lanes);
}

float exp_sum(const float* logits, int count) {
  const Floats infinite = broadcast(89.f);  // whose exponential is
  Floats total = broadcast(0);
  for (int i = 0; i < count; i += 16) {
    total = total + exponential(min(infinite, load_up_to(logits + i, count - i)));
  }
  return sum(total);
}

float largest(const float* logits, int count) {
  Floats top = broadcast(-INFINITY);
  for (int i = 0; i < count; i += 16) top = max(top, load_up_to(logits + i, count - i));
  return largest(top);
}

void rank(const float* logits, int count, int64_t first, const Ranking& best) {
  float least = best.logits[best.count - 1];
  for (int i = 0; i < count; i += 16) {
    unsigned lanes = greater(load_up_to(logits + i, count - i), broadcast(least));
    for (; lanes; lanes &= lanes - 1) {
      const int token = i + __builtin_ctz(lanes);
      if (logits[token] <= least) continue;  // it has risen since
      int place = best.count - 1;
      for (; place > 0 && logits[token] > best.logits[place - 1]; --place) {
        best.logits[place] = best.logits[place - 1];
        best.tokens[place] = best.tokens[place - 1];
      }
      best.logits[place] = logits[token];
      best.tokens[place] = first + token;
      least = best.logits[best.count - 1];
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

extern const Kernels ISA::kernels{
    quantize,          round_to_int8, linear,  linear_quantized, add_norm, attention<1>,
    encoder_attention, embed,         exp_sum, largest,          rank};
