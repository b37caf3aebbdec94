// One step of AdamW on 8-bit moments in tiles: the same arithmetic as kernels/eager.py, tile by tile.
// No torch headers: the interface is C, the caller passes data pointers. Compile with -ffp-contract=off: every operation
// is rounded once, and multiply-adds are fused exactly where torch's own kernels fuse them, so that codes and scales do
// not depend on flags. One build serves every x86-64 (the caller passes the level that torch runs at) and other CPUs.
//
// A tile of a wide matrix is 32 short runs far apart, which no hardware prefetcher follows: the loop over the rows of a
// tile asks for the rows of one further to the right.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr uint32_t kOffsetBits = (127u - 31u) << 23;  // 2^-31
constexpr float kOffset = 4.656612873077393e-10f;
constexpr float kLargestV = static_cast<float>(1.86 * 1152921504606846976.0);  // 1.86 * 2^60
constexpr float kTwoOverLargest = static_cast<float>(2.0 / 1.86);
constexpr float kSmallestNormal = 1.1754943508222875e-38f;
constexpr uint32_t kMultiplier = 0x2C1B3C6Du, kDitherMask = 0xFFFFFu;
constexpr int64_t kAhead = 64;           // elements (2 tiles) between what is computed and what is asked for
constexpr int64_t kPerThread = 1 << 16;  // elements that are worth a thread

INLINE float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// Biased exponent of the smallest power of two s with amax / s < 1.86 * 2^-shift, clamped to 2^-60 .. 2^60.
INLINE int32_t scale_exponent(float amax, int32_t shift) {
  int32_t e = static_cast<int32_t>(as_bits(amax * kTwoOverLargest) >> 23) + shift;
  return e < 67 ? 67 : e > 187 ? 187 : e;
}

INLINE float inverse(float scale) { return scale >= kSmallestNormal ? 1.0f / scale : 0.0f; }

struct Scalars { float one_minus_beta1, beta2, one_minus_beta2, shrink, size, eps, l2; };

// The dynamic map (quantize.py): values of m and squares of those of the root of v, thresholds of m, and for the upper
// 15 bits of a float (from -2^14 for m, from 0 for v) the code of the smallest float that has them.
struct Maps { const float *m_values, *m_middles, *v_squares; const uint8_t *m_cells, *v_cells; };

// One tile: n columns of `rows` rows, `stride` apart in p, mc and vc.
struct Tile {
  float* p;
  const float* g;
  int64_t grad_stride;
  uint8_t *mc, *vc;
  int64_t stride, rows, n;
  float *m, *v;  // scratch: the new moments, rows of `width`
  int64_t width;
  const int32_t *rk, *ck;
};

// What is the same for all tiles; the arrays of the C function below.
struct Job {
  float* p;
  const float* g;
  uint8_t *mc, *vc;
  float *ms, *vs;
  int64_t scale_stride;
  const int32_t *rk, *ck;
  int64_t rows, cols, height, width;
  Scalars s;
  Maps maps;
  bool dynamic, skip;
};

// ---- plain C++, which compilers turn into 256-bit vectors; Fused: multiply-adds are rounded once ---------------------

template <bool Fused>
struct Plain {
  static INLINE float madd(float a, float b, float c) { return Fused ? __builtin_fmaf(a, b, c) : a * b + c; }

  // The moments after this step to the scratch, and the bits of their largest magnitudes: floats >= 0 are ordered as
  // integers, and nan and inf come out on top. N: the number of columns if it is known, else 0.
  template <int64_t N, bool Dynamic>
  static INLINE void moments(const Tile& t, float m_scale, float v_scale, const Scalars& s, const Maps& maps,
                             int32_t& m_max, int32_t& v_max) {
    int32_t m_most = 0, v_most = 0;
    for (int64_t r = 0; r < t.rows; ++r) {
      if (N) prefetch(t, r);
      moments_row<N, Dynamic>(t.g + r * t.grad_stride, t.mc + r * t.stride, t.vc + r * t.stride, t.m + r * t.width,
                              t.v + r * t.width, t.n, m_scale, v_scale, s, maps, m_most, v_most);
    }
    m_max = m_most;
    v_max = v_most;
  }

  // Pointers as arguments: there compilers believe __restrict.
  template <int64_t N, bool Dynamic>
  static INLINE void moments_row(const float* __restrict g, const uint8_t* __restrict m_code,
                                 const uint8_t* __restrict v_code, float* __restrict m_row, float* __restrict v_row,
                                 int64_t any_n, float m_scale, float v_scale, const Scalars& s, const Maps& maps,
                                 int32_t& m_max, int32_t& v_max) {
    const int64_t n = N ? N : any_n;
    const bool near = s.one_minus_beta1 < 0.5f;
    const float weight = near ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f, gain = s.one_minus_beta2;
    const float decay = s.beta2;
    const float *m_values = maps.m_values, *v_squares = maps.v_squares;
    int32_t m_most = m_max, v_most = v_max;
    for (int64_t c = 0; c < n; ++c) {
      const float x = g[c];
      float old, v_old;
      if (Dynamic) {
        old = m_values[m_code[c]] * m_scale;
        v_old = (v_squares[v_code[c]] * v_scale) * decay;
      } else {
        const int32_t code = static_cast<int8_t>(m_code[c]), sign = code >> 31;
        const float decoded = as_float((static_cast<uint32_t>(code ^ sign) << 20) + kOffsetBits) - kOffset;
        old = as_float(as_bits(decoded) | (static_cast<uint32_t>(sign) & 0x80000000u)) * m_scale;
        v_old = (as_float((static_cast<uint32_t>(v_code[c]) << 20) + kOffsetBits) - kOffset) * v_scale;
      }
      const float m = madd(weight, x - old, near ? old : x);  // torch's lerp: from the nearer end
      const float v = madd(gain * x, x, v_old);
      m_row[c] = m;
      v_row[c] = v;
      const int32_t m_bits = static_cast<int32_t>(as_bits(m) & 0x7FFFFFFFu);
      const int32_t v_bits = static_cast<int32_t>(as_bits(v) & 0x7FFFFFFFu);
      m_most = m_bits > m_most ? m_bits : m_most;
      v_most = v_bits > v_most ? v_bits : v_most;
    }
    m_max = m_most;
    v_max = v_most;
  }

  // The step of the parameters and the codes of the moments.
  template <int64_t N, bool Dynamic>
  static INLINE void finish(const Tile& t, float m_inv, float v_inv, const Scalars& s, const Maps& maps) {
    for (int64_t r = 0; r < t.rows; ++r)
      finish_row<N, Dynamic>(t.p + r * t.stride, t.mc + r * t.stride, t.vc + r * t.stride, t.m + r * t.width,
                             t.v + r * t.width, t.ck, static_cast<uint32_t>(t.rk[r]), t.n, m_inv, v_inv, s, maps);
  }

  template <int64_t N, bool Dynamic>
  static INLINE void finish_row(float* __restrict param, uint8_t* __restrict m_code, uint8_t* __restrict v_code,
                                const float* __restrict m_row, const float* __restrict v_row,
                                const int32_t* __restrict col_keys, uint32_t row_key, int64_t any_n, float m_inv,
                                float v_inv, const Scalars& s, const Maps& maps) {
    const int64_t n = N ? N : any_n;
    const float shrink = s.shrink, size = -s.size, eps = s.eps;
    const float *v_squares = maps.v_squares, *m_middles = maps.m_middles;
    const uint8_t *v_cells = maps.v_cells, *m_cells = maps.m_cells;
    for (int64_t c = 0; c < n; ++c) {
      const float m = m_row[c], v = v_row[c];
      param[c] = param[c] * shrink + (size * m) / (std::sqrt(v) + eps);
      const uint32_t dither = ((row_key ^ static_cast<uint32_t>(col_keys[c])) * kMultiplier) & kDitherMask;
      if (Dynamic) {
        const float y = v * v_inv, x = m * m_inv;
        int32_t low = v_cells[as_bits(y) >> 17];
        low += y >= v_squares[low + 1];
        low = low < 254 ? low : 254;
        const float below = v_squares[low], above = v_squares[low + 1];
        low += y - below > (above - below) * (static_cast<float>(static_cast<int32_t>(dither)) * 0x1p-20f);
        v_code[c] = static_cast<uint8_t>(low);
        const int32_t code = m_cells[(static_cast<int32_t>(as_bits(x)) >> 17) + (1 << 14)];
        m_code[c] = static_cast<uint8_t>(code + (x > m_middles[code]));
      } else {
        v_code[c] = static_cast<uint8_t>((as_bits(v * v_inv + kOffset) + dither) >> 20);
        const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(as_bits(m)) >> 31);
        m_code[c] = static_cast<uint8_t>(((as_bits(std::fabs(m) * m_inv + kOffset) + (1u << 19)) >> 20) ^ sign);
      }
    }
  }

  // Into the second-level cache: the rows of two tiles are most of the first.
  static INLINE void prefetch(const Tile& t, int64_t r) {
    const float* g = t.g + r * t.grad_stride + kAhead;
    const float* p = t.p + r * t.stride + kAhead;
    __builtin_prefetch(g, 0, 2);
    __builtin_prefetch(g + 16, 0, 2);
    __builtin_prefetch(p, 1, 2);
    __builtin_prefetch(p + 16, 1, 2);
    __builtin_prefetch(t.mc + r * t.stride + kAhead, 1, 2);
    __builtin_prefetch(t.vc + r * t.stride + kAhead, 1, 2);
  }
};

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

// The same operations, 16 lanes at a time, masked at the edge; the dynamic map, which is bound by its tables, as above.
struct Avx512 : Plain<true> {
  template <int64_t N, bool Dynamic>
  AVX512 static inline void moments(const Tile& t, float m_scale, float v_scale, const Scalars& s, const Maps& maps,
                                    int32_t& m_max, int32_t& v_max) {
    if (Dynamic) return Plain<true>::moments<N, true>(t, m_scale, v_scale, s, maps, m_max, v_max);
    const int64_t n = N ? N : t.n;
    const bool near = s.one_minus_beta1 < 0.5f;
    const __m512 weight = _mm512_set1_ps(near ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f);
    const __m512 gain = _mm512_set1_ps(s.one_minus_beta2), offset = _mm512_set1_ps(kOffset);
    const __m512 by_m = _mm512_set1_ps(m_scale), by_v = _mm512_set1_ps(v_scale);
    const __m512i offset_bits = _mm512_set1_epi32(kOffsetBits), sign_bit = _mm512_set1_epi32(INT32_MIN);
    const __m512i magnitude = _mm512_set1_epi32(INT32_MAX);
    __m512i m_most = _mm512_setzero_si512(), v_most = _mm512_setzero_si512();
    for (int64_t r = 0; r < t.rows; ++r) {
      if (N) prefetch(t, r);
      for (int64_t c = 0; c < n; c += 16) {
        const __mmask16 on = lanes<N>(n - c);
        const __m512 x = _mm512_maskz_loadu_ps(on, t.g + r * t.grad_stride + c);
        const __m512i code = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(on, t.mc + r * t.stride + c));
        const __m512i label = _mm512_slli_epi32(_mm512_xor_si512(code, _mm512_srai_epi32(code, 31)), 20);
        const __m512 decoded = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_add_epi32(label, offset_bits)), offset);
        // decoded | (code & sign bit)
        const __m512i with_sign = _mm512_ternarylogic_epi32(_mm512_castps_si512(decoded), code, sign_bit, 0xF8);
        const __m512 old = _mm512_mul_ps(_mm512_castsi512_ps(with_sign), by_m);
        const __m512 m = _mm512_fmadd_ps(weight, _mm512_sub_ps(x, old), near ? old : x);
        const __m512i v_code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(on, t.vc + r * t.stride + c));
        const __m512i v_bits = _mm512_add_epi32(_mm512_slli_epi32(v_code, 20), offset_bits);
        const __m512 v_old = _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(v_bits), offset), by_v);
        const __m512 v = _mm512_fmadd_ps(_mm512_mul_ps(gain, x), x, v_old);
        _mm512_mask_storeu_ps(t.m + r * t.width + c, on, m);
        _mm512_mask_storeu_ps(t.v + r * t.width + c, on, v);
        const __m512i m_size = _mm512_and_si512(_mm512_castps_si512(m), magnitude);
        const __m512i v_size = _mm512_and_si512(_mm512_castps_si512(v), magnitude);
        m_most = _mm512_mask_max_epi32(m_most, on, m_most, m_size);
        v_most = _mm512_mask_max_epi32(v_most, on, v_most, v_size);
      }
    }
    m_max = _mm512_reduce_max_epi32(m_most);
    v_max = _mm512_reduce_max_epi32(v_most);
  }

  template <int64_t N, bool Dynamic>
  AVX512 static inline void finish(const Tile& t, float m_inv, float v_inv, const Scalars& s, const Maps& maps) {
    if (Dynamic) return Plain<true>::finish<N, true>(t, m_inv, v_inv, s, maps);
    const int64_t n = N ? N : t.n;
    const __m512 shrink = _mm512_set1_ps(s.shrink), size = _mm512_set1_ps(-s.size), eps = _mm512_set1_ps(s.eps);
    const __m512 by_m = _mm512_set1_ps(m_inv), by_v = _mm512_set1_ps(v_inv), offset = _mm512_set1_ps(kOffset);
    const __m512i multiplier = _mm512_set1_epi32(kMultiplier), mask = _mm512_set1_epi32(kDitherMask);
    const __m512i half = _mm512_set1_epi32(1 << 19);
    for (int64_t r = 0; r < t.rows; ++r) {
      const __m512i row_key = _mm512_set1_epi32(t.rk[r]);
      for (int64_t c = 0; c < n; c += 16) {
        const __mmask16 on = lanes<N>(n - c);
        const __m512 m = _mm512_maskz_loadu_ps(on, t.m + r * t.width + c);
        const __m512 v = _mm512_maskz_loadu_ps(on, t.v + r * t.width + c);
        float* p = t.p + r * t.stride + c;
        const __m512 step = _mm512_div_ps(_mm512_mul_ps(size, m), _mm512_add_ps(_mm512_sqrt_ps(v), eps));
        _mm512_mask_storeu_ps(p, on, _mm512_add_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(on, p), shrink), step));
        const __m512i key = _mm512_xor_si512(row_key, _mm512_maskz_loadu_epi32(on, t.ck + c));
        const __m512i dither = _mm512_and_si512(_mm512_mullo_epi32(key, multiplier), mask);
        const __m512i v_bits = _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(v, by_v), offset));
        const __m512i v_code = _mm512_srli_epi32(_mm512_add_epi32(v_bits, dither), 20);
        const __m512i m_bits = _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(_mm512_abs_ps(m), by_m), offset));
        const __m512i sign = _mm512_srai_epi32(_mm512_castps_si512(m), 31);
        const __m512i m_code = _mm512_xor_si512(_mm512_srli_epi32(_mm512_add_epi32(m_bits, half), 20), sign);
        _mm_mask_storeu_epi8(t.vc + r * t.stride + c, on, _mm512_cvtepi32_epi8(v_code));
        _mm_mask_storeu_epi8(t.mc + r * t.stride + c, on, _mm512_cvtepi32_epi8(m_code));
      }
    }
  }

  template <int64_t N>
  AVX512 static inline __mmask16 lanes(int64_t left) {
    return N || left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
  }
};
#endif

// ---- tiles -----------------------------------------------------------------------------------------------------------

template <class Math, bool Dynamic>
INLINE void bands_of(const Job& job, int64_t first_band, int64_t last_band, std::vector<int64_t>& bad) {
  const Scalars& s = job.s;
  std::vector<float> scratch(3 * job.height * job.width);
  float* g_tile = scratch.data() + 2 * job.height * job.width;
  const int32_t largest_v = static_cast<int32_t>(as_bits(kLargestV));
  const int64_t across = (job.cols + job.width - 1) / job.width;
  Tile t;
  t.m = scratch.data();
  t.v = t.m + job.height * job.width;
  t.stride = job.cols;
  t.width = job.width;
  for (int64_t band = first_band; band < last_band; ++band) {
    const int64_t top = band * job.height;
    t.rows = top + job.height < job.rows ? job.height : job.rows - top;
    t.rk = job.rk + top;
    for (int64_t tile = 0; tile < across; ++tile) {
      const int64_t left = tile * job.width, at = top * job.cols + left;
      t.n = left + job.width < job.cols ? job.width : job.cols - left;
      t.p = job.p + at;
      t.g = job.g + at;
      t.grad_stride = job.cols;
      t.mc = job.mc + at;
      t.vc = job.vc + at;
      t.ck = job.ck + left;
      float* m_scale = job.ms + band * job.scale_stride + tile;
      float* v_scale = job.vs + band * job.scale_stride + tile;
      if (s.l2 != 0.0f) {
        for (int64_t r = 0; r < t.rows; ++r)
          for (int64_t c = 0; c < t.n; ++c)
            g_tile[r * t.width + c] = Math::madd(s.l2, t.p[r * t.stride + c], t.g[r * t.grad_stride + c]);
        t.g = g_tile;
        t.grad_stride = t.width;
      }
      // A power of two commutes with rounding, the square of another scale does not.
      const float v_decay = Dynamic ? *v_scale * *v_scale : *v_scale * s.beta2;
      int32_t m_max, v_max;
      for (bool again = false;; again = true) {
        if (t.n == 32)
          Math::template moments<32, Dynamic>(t, *m_scale, v_decay, s, job.maps, m_max, v_max);
        else
          Math::template moments<0, Dynamic>(t, *m_scale, v_decay, s, job.maps, m_max, v_max);
        if (again || v_max <= largest_v) break;
        // Once more without the bad elements, so that they do not take the tile along.
        for (int64_t r = 0; r < t.rows; ++r)
          for (int64_t c = 0; c < t.n; ++c) {
            const bool wrong = !(t.v[r * t.width + c] <= kLargestV);
            g_tile[r * t.width + c] = wrong ? 0.0f : t.g[r * t.grad_stride + c];
            if (wrong && !job.skip) t.p[r * t.stride + c] = NAN;
          }
        t.g = g_tile;
        t.grad_stride = t.width;
        bad.push_back(band * across + tile);
      }
      float m_inv, v_inv;
      if (Dynamic) {
        *m_scale = as_float(m_max);
        *v_scale = static_cast<float>(std::sqrt(static_cast<double>(as_float(v_max))));
        m_inv = inverse(*m_scale);
        v_inv = inverse(*v_scale * *v_scale);
      } else {
        const int32_t m_exp = scale_exponent(as_float(m_max), 16), v_exp = scale_exponent(as_float(v_max), 0);
        *m_scale = as_float(static_cast<uint32_t>(m_exp) << 23);
        *v_scale = as_float(static_cast<uint32_t>(v_exp) << 23);
        m_inv = as_float(static_cast<uint32_t>(254 - m_exp) << 23);
        v_inv = as_float(static_cast<uint32_t>(254 - v_exp) << 23);
      }
      if (t.n == 32)
        Math::template finish<32, Dynamic>(t, m_inv, v_inv, s, job.maps);
      else
        Math::template finish<0, Dynamic>(t, m_inv, v_inv, s, job.maps);
    }
  }
}

template <class Math>
INLINE void bands(const Job& job, int64_t first, int64_t last, std::vector<int64_t>& bad) {
  if (job.dynamic)
    bands_of<Math, true>(job, first, last, bad);
  else
    bands_of<Math, false>(job, first, last, bad);
}

using Bands = void (*)(const Job&, int64_t, int64_t, std::vector<int64_t>&);

#if defined(__x86_64__)
// torch's kernels without AVX2 have no fused multiply-add either.
void bands_any(const Job& job, int64_t first, int64_t last, std::vector<int64_t>& bad) {
  bands<Plain<false>>(job, first, last, bad);
}

__attribute__((target("avx2,fma"))) void bands_avx2(const Job& job, int64_t first, int64_t last,
                                                    std::vector<int64_t>& bad) {
  bands<Plain<true>>(job, first, last, bad);
}

AVX512 void bands_avx512(const Job& job, int64_t first, int64_t last, std::vector<int64_t>& bad) {
  bands<Avx512>(job, first, last, bad);
}

Bands of_level(int32_t level) { return level >= 2 ? bands_avx512 : level == 1 ? bands_avx2 : bands_any; }
#else
void bands_any(const Job& job, int64_t first, int64_t last, std::vector<int64_t>& bad) {
  bands<Plain<true>>(job, first, last, bad);
}

Bands of_level(int32_t) { return bands_any; }
#endif

}  // namespace

// p, g, mc, vc: rows x cols, contiguous. ms, vs: a row of scales per band of `height` rows, `scale_stride` apart.
// rk, ck: hashes of the global rows and columns. maps: five pointers (struct Maps) for the dynamic format, else null.
// skip: a bad gradient element counts as 0 and its parameter stays finite. level: 2 AVX-512, 1 AVX2, 0 neither.
// Tiles do not depend on each other, so the result does not depend on `threads`.
// Returns how many tiles had a gradient that is not finite; the first `room` of their numbers go to `bad`, ascending.
extern "C" int64_t ragged_adamw8bit(float* p, const float* g, uint8_t* mc, uint8_t* vc, float* ms, float* vs,
                                    int64_t scale_stride, const int32_t* rk, const int32_t* ck, int64_t rows,
                                    int64_t cols, int64_t height, int64_t width, const float* scalars,
                                    const void* const* maps, int32_t skip, int32_t level, int64_t threads, int64_t* bad,
                                    int64_t room) {
  Job job{p, g, mc, vc, ms, vs, scale_stride, rk, ck, rows, cols, height, width, {}, {}, maps != nullptr, skip != 0};
  std::memcpy(&job.s, scalars, sizeof(job.s));
  if (maps) std::memcpy(&job.maps, maps, sizeof(job.maps));
  const int64_t count = (rows + height - 1) / height;
  int64_t parts = rows * cols / kPerThread;
  parts = parts < threads ? parts : threads;
  parts = parts < count ? parts : count;
  parts = parts < 1 ? 1 : parts;
  const Bands run = of_level(level);
  std::vector<std::vector<int64_t>> found(parts);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t part; (part = next++) < parts;) run(job, count * part / parts, count * (part + 1) / parts, found[part]);
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < parts; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads to be had: the ones there are do it all
  }
  work();
  for (auto& other : others) other.join();
  int64_t total = 0;
  for (const auto& one : found)
    for (const int64_t tile : one) {
      if (total < room) bad[total] = tile;
      ++total;
    }
  return total;
}
