// The two element-wise passes of Muon, each in one go over memory: momentum and direction, decay and step.
// The same roundings as the torch operations in rules/muon.py (lerp_, lerp, to(bfloat16); mul_, add_). No torch headers;
// compile with -ffp-contract=off. On x86-64 they need AVX2 and FMA, which the caller checks.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define KERNEL __attribute__((target("avx2,fma")))
#else
#define KERNEL
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

INLINE float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

INLINE uint16_t to_bf16(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// torch's lerp from `a` to `b`: from the nearer end.
struct Lerp {
  bool near;
  float weight;
  explicit Lerp(double w) : near(std::fabs(static_cast<float>(w)) < 0.5f), weight(near ? static_cast<float>(w) : static_cast<float>(w) - 1.0f) {}
  INLINE float operator()(float a, float b) const { return __builtin_fmaf(weight, b - a, near ? a : b); }
};

// Elements ahead of which memory is asked for: four streams are more than the hardware's own prefetch keeps up with.
constexpr int64_t AHEAD = 512, STRIP = 64;

template <bool nesterov>
INLINE void direction(float* __restrict buf, const float* __restrict g, uint16_t* __restrict out, int64_t n, double momentum) {
  const Lerp mean(1.0 - momentum), look(momentum);
  const auto one = [&](int64_t i) __attribute__((always_inline)) {
    const float m = mean(buf[i], g[i]);
    buf[i] = m;
    out[i] = to_bf16(nesterov ? look(g[i], m) : m);
  };
  int64_t start = 0;
  for (; start + STRIP <= n; start += STRIP) {
    for (int64_t i = start; i < start + STRIP; i += 16) {
      __builtin_prefetch(buf + i + AHEAD, 1);
      __builtin_prefetch(g + i + AHEAD, 0);
    }
    for (int64_t i = start; i < start + STRIP; i += 32) __builtin_prefetch(out + i + AHEAD, 1);
    for (int64_t i = start; i < start + STRIP; ++i) one(i);
  }
  for (int64_t i = start; i < n; ++i) one(i);
}

}  // namespace

// buf += (1 - momentum) (g - buf);  out = bf16(nesterov ? g + momentum (buf - g) : buf)
extern "C" KERNEL void ragged_muon_direction(float* __restrict buf, const float* __restrict g, uint16_t* __restrict out,
                                      int64_t n, double momentum, int32_t nesterov) {
  if (nesterov) direction<true>(buf, g, out, n, momentum);
  else direction<false>(buf, g, out, n, momentum);
}

// p = p * shrink + alpha * u
extern "C" KERNEL void ragged_muon_apply(float* __restrict p, const uint16_t* __restrict u, int64_t n, float shrink, float alpha) {
  const auto one = [&](int64_t i) __attribute__((always_inline)) {
    p[i] = __builtin_fmaf(alpha, as_float(static_cast<uint32_t>(u[i]) << 16), p[i] * shrink);
  };
  int64_t start = 0;
  for (; start + STRIP <= n; start += STRIP) {
    for (int64_t i = start; i < start + STRIP; i += 16) __builtin_prefetch(p + i + AHEAD, 1);
    for (int64_t i = start; i < start + STRIP; ++i) one(i);
  }
  for (int64_t i = start; i < n; ++i) one(i);
}
