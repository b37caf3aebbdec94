// The two element-wise passes of Muon, each in one go over memory: momentum and direction, decay and step.
// The same roundings as the torch operations in rules/muon.py (lerp_, lerp, to(bfloat16); mul_, add_). No torch headers;
// compile with -ffp-contract=off.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

inline uint16_t to_bf16(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// torch's lerp from `a` to `b`: from the nearer end.
struct Lerp {
  bool near;
  float weight;
  explicit Lerp(double w) : near(std::fabs(static_cast<float>(w)) < 0.5f), weight(near ? static_cast<float>(w) : static_cast<float>(w) - 1.0f) {}
  inline float operator()(float a, float b) const { return std::fma(weight, b - a, near ? a : b); }
};

}  // namespace

// buf += (1 - momentum) (g - buf);  out = bf16(nesterov ? g + momentum (buf - g) : buf)
extern "C" void ragged_muon_direction(float* __restrict buf, const float* __restrict g, uint16_t* __restrict out,
                                      int64_t n, double momentum, int32_t nesterov) {
  const Lerp mean(1.0 - momentum), look(momentum);
  if (nesterov) {
    for (int64_t i = 0; i < n; ++i) {
      const float m = mean(buf[i], g[i]);
      buf[i] = m;
      out[i] = to_bf16(look(g[i], m));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float m = mean(buf[i], g[i]);
      buf[i] = m;
      out[i] = to_bf16(m);
    }
  }
}

// p = p * shrink + alpha * u
extern "C" void ragged_muon_apply(float* __restrict p, const uint16_t* __restrict u, int64_t n, float shrink, float alpha) {
  for (int64_t i = 0; i < n; ++i) p[i] = std::fma(alpha, as_float(static_cast<uint32_t>(u[i]) << 16), p[i] * shrink);
}
