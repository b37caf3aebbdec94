// One step of Adam or AdamW on contiguous fp32 tensors, in one go over memory: what torch's fused kernel computes, with
// the same roundings in every element (torch rounds the elements that do not fill a vector differently), and with memory
// asked for ahead. No torch headers; compile with -ffp-contract=off. On x86-64 it needs AVX2 and FMA, which the caller
// checks.

#include <cmath>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define KERNEL __attribute__((target("avx2,fma")))
#else
#define KERNEL
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

struct Scalars { float one_minus_beta1, beta2, one_minus_beta2, shrink, size, root, eps, l2; };

// Elements ahead of which memory is asked for: hardware follows four streams badly, and none over the end of a page.
constexpr int64_t AHEAD = 512, STRIP = 64;
constexpr int64_t PER_THREAD = 1 << 16;  // elements that are worth a thread

template <bool coupled>
INLINE void strip(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n,
                  const Scalars& s) {
  const bool near = s.one_minus_beta1 < 0.5f;  // torch's lerp goes from the nearer end
  const float weight = near ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float x = coupled ? __builtin_fmaf(p[i], s.l2, g[i]) : g[i];
    const float mean = __builtin_fmaf(weight, x - m[i], near ? m[i] : x);
    const float square = __builtin_fmaf(s.one_minus_beta2 * x, x, v[i] * s.beta2);
    m[i] = mean;
    v[i] = square;
    p[i] = p[i] * s.shrink + (s.size * mean) / (std::sqrt(square) / s.root + s.eps);
  }
}

template <bool coupled>
INLINE void run(float* p, const float* g, float* m, float* v, int64_t n, const Scalars s) {
  int64_t i = 0;
  for (; i + STRIP <= n; i += STRIP) {
    for (int64_t line = i + AHEAD; line < i + AHEAD + STRIP; line += 16) {
      __builtin_prefetch(p + line, 1);
      __builtin_prefetch(g + line, 0);
      __builtin_prefetch(m + line, 1);
      __builtin_prefetch(v + line, 1);
    }
    strip<coupled>(p + i, g + i, m + i, v + i, STRIP, s);
  }
  strip<coupled>(p + i, g + i, m + i, v + i, n - i, s);
}

KERNEL void part(float* p, const float* g, float* m, float* v, int64_t n, const Scalars& s) {
  if (s.l2 != 0.0f) run<true>(p, g, m, v, n, s);
  else run<false>(p, g, m, v, n, s);
}

}  // namespace

// g += l2 p;  m += (1 - beta1)(g - m);  v = beta2 v + (1 - beta2) g g;  p = shrink p + size m / (sqrt(v) / root + eps)
// scalars: struct Scalars; size is negative. Elements do not depend on each other, so the result does not on `threads`.
extern "C" void ragged_adamw(float* p, const float* g, float* m, float* v, int64_t n, const float* scalars,
                             int64_t threads) {
  const Scalars s{scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5], scalars[6], scalars[7]};
  int64_t parts = n / PER_THREAD;
  parts = parts < 1 ? 1 : parts < threads ? parts : threads;
  const auto work = [&](int64_t number) {
    const int64_t from = n * number / parts / STRIP * STRIP;
    const int64_t to = number + 1 == parts ? n : n * (number + 1) / parts / STRIP * STRIP;
    part(p + from, g + from, m + from, v + from, to - from, s);
  };
  std::vector<std::thread> others;
  int64_t begun = 1;
  try {
    for (; begun < parts; ++begun) others.emplace_back(work, begun);
  } catch (const std::system_error&) {  // no more threads to be had: this one does the rest
  }
  work(0);
  for (; begun < parts; ++begun) work(begun);
  for (auto& other : others) other.join();
}
