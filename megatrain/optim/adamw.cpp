// AdamW in place over one range of parameters. The order of operations is specified in kernel.py; this file and its
// PyTorch fallback must agree with it to the bit, so it is compiled without FMA contraction and without fast-math.
// The indices into `constants` (SKIP, FACTOR, ...) are -D flags made from constants.py.
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

struct Split {  // FP32 as a BF16 plane and a signed remainder; unsigned arithmetic is modulo 2^32 by definition
    uint16_t* hi;
    int16_t* lo;
    float load(int64_t i) const { return as_float((uint32_t(hi[i]) << 16) + uint32_t(int32_t(lo[i]))); }
    void store(int64_t i, float w) const {
        const uint32_t bits = as_bits(w), upper = (bits + 0x8000u) >> 16;
        hi[i] = uint16_t(upper);
        lo[i] = int16_t(bits - (upper << 16));
    }
};

struct Plain {
    float* w;
    float load(int64_t i) const { return w[i]; }
    void store(int64_t i, float x) const { w[i] = x; }
};

float gradient(const uint16_t* g, int64_t i) { return as_float(uint32_t(g[i]) << 16); }
float gradient(const float* g, int64_t i) { return g[i]; }

template <class Master, class Gradient>
void update(Master master, float* m, float* v, const Gradient* g, const float* c, int64_t n, int decayed, int threads) {
    if (c[SKIP] != 0.0f) return;
    // FP32 numbers, exact in FP64; so is everything that is read below.
    // Everything read is FP32 or BF16, so its conversion is exact; each store is the one rounding to FP32.
    const double factor = c[FACTOR], beta1 = c[BETA1], one_minus_beta1 = c[ONE_MINUS_BETA1], beta2 = c[BETA2],
                 one_minus_beta2 = c[ONE_MINUS_BETA2], inv_sqrt_bc2 = c[INV_SQRT_BC2], eps = c[EPS],
                 step_size = c[STEP_SIZE], decay = decayed ? c[DECAY] : 1.0f;
#pragma omp parallel num_threads(threads)
    {
        // Rounding mode and the flushing of denormals belong to a thread, and whoever called may have changed them.
        std::fenv_t caller;
        std::fegetenv(&caller);
        std::fesetenv(FE_DFL_ENV);
#pragma omp for simd schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            const double gi = gradient(g, i) * factor;
            const double mi = beta1 * m[i] + one_minus_beta1 * gi;
            const double vi = beta2 * v[i] + one_minus_beta2 * (gi * gi);
            const double d = std::sqrt(vi) * inv_sqrt_bc2 + eps;
            master.store(i, float(master.load(i) * decay - step_size * (mi / d)));
            m[i] = float(mi);
            v[i] = float(vi);
        }
        std::fesetenv(&caller);
    }
}

}  // namespace

#define ENTRY(NAME, MASTER, GRADIENT)                                                                              \
    extern "C" void NAME(void* a, void* b, float* m, float* v, const GRADIENT* g, const float* constants, int64_t n, \
                         int decayed, int threads) {                                                               \
        (void)b;                                                                                                   \
        update(MASTER, m, v, g, constants, n, decayed, threads);                                                   \
    }
#define SPLIT (Split{static_cast<uint16_t*>(a), static_cast<int16_t*>(b)})
#define PLAIN (Plain{static_cast<float*>(a)})
ENTRY(adamw_split_bf16, SPLIT, uint16_t)
ENTRY(adamw_split_fp32, SPLIT, float)
ENTRY(adamw_plain_bf16, PLAIN, uint16_t)
ENTRY(adamw_plain_fp32, PLAIN, float)
