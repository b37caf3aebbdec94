// One step of AdamW on 8-bit moments in tiles: the same arithmetic as _chunk in rules/adamw8bit.py, tile by tile in registers.
// No torch headers: the interface is C, the caller passes data pointers. Compile with -ffp-contract=off: every operation
// is rounded once, and the two fused multiply-adds are written out, so that codes and scales do not depend on flags.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr uint32_t kOffsetBits = (127u - 31u) << 23;  // 2^-31
constexpr float kOffset = 4.656612873077393e-10f;
constexpr float kLargestV = static_cast<float>(1.86 * 1152921504606846976.0);  // 1.86 * 2^60
constexpr float kInverseLargest = static_cast<float>(1.0 / 1.86);

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// Biased exponent of the smallest power of two s with amax / s <= 1.86 * 2^-shift, clamped to 2^-60 .. 2^60.
inline int32_t scale_exponent(float amax, int32_t shift) {
  int32_t e = static_cast<int32_t>((as_bits(amax * kInverseLargest) + 0x7FFFFFu) >> 23) + shift;
  return e < 67 ? 67 : e > 187 ? 187 : e;
}

struct Scalars { float one_minus_beta1, beta2, one_minus_beta2, shrink, size, eps, l2; };

// The moments of `rows` x n elements after this step, to `m_tile` and `v_tile` (rows of `width`), and the bits of their
// largest magnitudes: floats >= 0 are ordered as integers, and nan and inf come out on top. N: n if it is known, else 0.
template <int64_t N>
inline void moments(const float* __restrict grad, int64_t grad_stride, const uint8_t* __restrict mc,
                    const uint8_t* __restrict vc, int64_t stride, float* __restrict m_tile, float* __restrict v_tile,
                    int64_t width, int64_t rows, int64_t any_n, float m_scale, float v_scale, const Scalars& s,
                    int32_t& m_max, int32_t& v_max) {
  const int64_t n = N ? N : any_n;
  const bool near = s.one_minus_beta1 < 0.5f;
  const float weight = near ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f, gain = s.one_minus_beta2;
  int32_t m_most = 0, v_most = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const float* __restrict g = grad + r * grad_stride;
    const uint8_t* __restrict m_code = mc + r * stride;
    const uint8_t* __restrict v_code = vc + r * stride;
    float* __restrict m_row = m_tile + r * width;
    float* __restrict v_row = v_tile + r * width;
    for (int64_t c = 0; c < n; ++c) {
      const float x = g[c];
      const int32_t code = static_cast<int8_t>(m_code[c]), sign = code >> 31;
      const float decoded = as_float((static_cast<uint32_t>(code ^ sign) << 20) + kOffsetBits) - kOffset;
      const float old = as_float(as_bits(decoded) | (static_cast<uint32_t>(sign) & 0x80000000u)) * m_scale;
      const float m = std::fma(weight, x - old, near ? old : x);  // torch's lerp: from the nearer end
      const float v_old = (as_float((static_cast<uint32_t>(v_code[c]) << 20) + kOffsetBits) - kOffset) * v_scale;
      const float v = std::fma(gain * x, x, v_old);
      m_row[c] = m;
      v_row[c] = v;
      const int32_t m_bits = static_cast<int32_t>(as_bits(m) & 0x7FFFFFFFu);
      const int32_t v_bits = static_cast<int32_t>(as_bits(v) & 0x7FFFFFFFu);
      m_most = m_bits > m_most ? m_bits : m_most;
      v_most = v_bits > v_most ? v_bits : v_most;
    }
  }
  m_max = m_most;
  v_max = v_most;
}

// The step of the parameters and the codes of the moments.
template <int64_t N>
inline void finish(float* __restrict p, uint8_t* __restrict mc, uint8_t* __restrict vc, int64_t stride,
                   const float* __restrict m_tile, const float* __restrict v_tile, int64_t width,
                   const int32_t* __restrict rk, const int32_t* __restrict ck, int64_t rows, int64_t any_n, float m_inv,
                   float v_inv, const Scalars& s) {
  const int64_t n = N ? N : any_n;
  const float shrink = s.shrink, size = -s.size, eps = s.eps;
  for (int64_t r = 0; r < rows; ++r) {
    float* __restrict param = p + r * stride;
    uint8_t* __restrict m_code = mc + r * stride;
    uint8_t* __restrict v_code = vc + r * stride;
    const float* __restrict m_row = m_tile + r * width;
    const float* __restrict v_row = v_tile + r * width;
    const uint32_t row_key = static_cast<uint32_t>(rk[r]);
    for (int64_t c = 0; c < n; ++c) {
      const float m = m_row[c], v = v_row[c];
      param[c] = param[c] * shrink + (size * m) / (std::sqrt(v) + eps);
      const uint32_t dither = ((row_key ^ static_cast<uint32_t>(ck[c])) * 0x2C1B3C6Du) & 0xFFFFFu;
      v_code[c] = static_cast<uint8_t>((as_bits(v * v_inv + kOffset) + dither) >> 20);
      const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(as_bits(m)) >> 31);
      m_code[c] = static_cast<uint8_t>(((as_bits(std::fabs(m) * m_inv + kOffset) + (1u << 19)) >> 20) ^ sign);
    }
  }
}

}  // namespace

// p, g, mc, vc: rows x cols, contiguous. ms, vs: a row of scales per band of `height` rows, `stride` apart.
// rk, ck: hashes of the global rows and columns. skip: a bad gradient element counts as 0 and its parameter stays finite.
// Returns how many tiles had a gradient that is not finite; the first `room` of their numbers go to `bad`.
extern "C" int64_t ragged_adamw8bit(float* p, const float* g, uint8_t* mc, uint8_t* vc, float* ms, float* vs,
                                    int64_t stride, const int32_t* rk, const int32_t* ck, int64_t rows, int64_t cols,
                                    int64_t height, int64_t width, const float* scalars, int32_t skip, int64_t* bad,
                                    int64_t room) {
  Scalars s;
  std::memcpy(&s, scalars, sizeof(s));
  std::vector<float> m_tile(height * width), v_tile(height * width), g_tile(height * width);
  const int32_t largest_v = static_cast<int32_t>(as_bits(kLargestV));
  const int64_t bands = (rows + height - 1) / height, across = (cols + width - 1) / width;
  int64_t found = 0;
  for (int64_t band = 0; band < bands; ++band) {
    const int64_t first = band * height, tall = first + height < rows ? height : rows - first;
    for (int64_t tile = 0; tile < across; ++tile) {
      const int64_t left = tile * width, n = left + width < cols ? width : cols - left;
      const int64_t at = first * cols + left;
      float* m_scale = ms + band * stride + tile;
      float* v_scale = vs + band * stride + tile;
      const float* grad = g + at;
      int64_t grad_stride = cols;
      if (s.l2 != 0.0f) {
        for (int64_t r = 0; r < tall; ++r)
          for (int64_t c = 0; c < n; ++c)
            g_tile[r * width + c] = std::fma(s.l2, p[at + r * cols + c], g[at + r * cols + c]);
        grad = g_tile.data();
        grad_stride = width;
      }
      int32_t m_max, v_max;
      const auto run = [&] {
        (n == 32 ? moments<32> : moments<0>)(grad, grad_stride, mc + at, vc + at, cols, m_tile.data(), v_tile.data(), width,
                                             tall, n, *m_scale, *v_scale * s.beta2, s, m_max, v_max);
      };
      run();
      if (v_max > largest_v) {
        // Once more without the bad elements, so that they do not take the tile along.
        for (int64_t r = 0; r < tall; ++r)
          for (int64_t c = 0; c < n; ++c) {
            const bool wrong = !(v_tile[r * width + c] <= kLargestV);
            g_tile[r * width + c] = wrong ? 0.0f : grad[r * grad_stride + c];
            if (wrong && !skip) p[at + r * cols + c] = NAN;
          }
        grad = g_tile.data();
        grad_stride = width;
        run();
        if (found < room) bad[found] = band * across + tile;
        ++found;
      }
      const int32_t m_exp = scale_exponent(as_float(m_max), 16), v_exp = scale_exponent(as_float(v_max), 0);
      *m_scale = as_float(static_cast<uint32_t>(m_exp) << 23);
      *v_scale = as_float(static_cast<uint32_t>(v_exp) << 23);
      (n == 32 ? finish<32> : finish<0>)(p + at, mc + at, vc + at, cols, m_tile.data(), v_tile.data(), width, rk + first,
                                         ck + left, tall, n, as_float(static_cast<uint32_t>(254 - m_exp) << 23),
                                         as_float(static_cast<uint32_t>(254 - v_exp) << 23), s);
    }
  }
  return found;
}
