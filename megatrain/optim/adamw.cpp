// AdamW in place over one range of parameters. The order of operations is specified in kernel.py; this file and its
// PyTorch fallback must agree with it to the bit, so it is compiled without FMA contraction and without fast-math: where
// the specification has an FMA, one is called. The arithmetic is written once, for T = float, which compilers turn into
// vectors, and for T = Wide, 16 numbers of AVX-512, where loading and storing the two planes by hand saves a tenth of the time.
// The indices into `constants` (SKIP, FACTOR, ...) are -D flags made from constants.py.
#include <algorithm>
#include <cfenv>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#include "team.h"

#define INLINE [[gnu::always_inline]] inline  // a loop with a call in it is no vector loop

namespace {

constexpr uint32_t HALF_RECIPROCAL = 0x7E7311C3;

float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

float add_product(float a, float b, float c) { return std::fma(a, b, c); }        // c + a * b, rounded once
float subtract_product(float a, float b, float c) { return std::fma(-a, b, c); }  // c - a * b
float subtract_from_product(float a, float b, float c) { return std::fma(a, b, -c); }
float root(float x) { return std::sqrt(x); }
float half_reciprocal(float x) { return as_float(HALF_RECIPROCAL - as_bits(x)); }

struct Constants {
    float beta1, beta2, eps, step, step_lo, inv_step, decay, grad1, grad1_lo, grad2, grad2_lo;

    // FP64 holds products of two FP32 numbers exactly; a pair of FP32 numbers holds 48 bits of them.
    Constants(const float* c, int decayed) : beta1(c[BETA1]), beta2(c[BETA2]), decay(decayed ? c[DECAY] : 1.0f) {
        const double factor = c[FACTOR], inv = c[INV_SQRT_BC2];
        cut(c[ONE_MINUS_BETA1] * factor, grad1, grad1_lo);
        cut(c[ONE_MINUS_BETA2] * (factor * factor), grad2, grad2_lo);
        cut(c[STEP_SIZE] / inv, step, step_lo);
        eps = float(c[EPS] / inv);
        inv_step = step >= FLT_MIN ? float(1.0 / step) : 0.0f;
    }
    bool scaled() const { return grad1_lo != 0.0f || grad2_lo != 0.0f; }

  private:
    static void cut(double x, float& hi, float& lo) { hi = float(x); lo = float(x - hi); }
};

// One function a number, since a struct of them would keep the loop below from becoming a vector loop; what two of them
// compute is computed once. The first moment is sum + rest, unrounded.
template <class T>
INLINE T first_sum(T g, T m, const Constants& c) { return T(c.beta1) * m + T(c.grad1) * g; }

template <bool SCALED, class T>
INLINE T first_rest(T g, T m, T sum, const Constants& c) {
    const T a = T(c.beta1) * m, b = T(c.grad1) * g, t = sum - a;
    T b_lo = subtract_from_product(T(c.grad1), g, b);
    if (SCALED) b_lo = add_product(T(c.grad1_lo), g, b_lo);
    return ((a - (sum - t)) + (b - t)) + (subtract_from_product(T(c.beta1), m, a) + b_lo);
}

template <bool SCALED, class T>
INLINE T second(T g, T v, const Constants& c) {
    const T square = g * g;
    const T gain = SCALED ? add_product(T(c.grad2), square, T(c.grad2_lo) * square) : T(c.grad2) * square;
    return add_product(T(c.beta2), v, gain);
}

template <class T>
INLINE T quotient(T r, const Constants& c) { return T(-c.step) / (r + T(c.eps)); }

// No FMA is negated here: GCC makes -(a * b + c) into -(a * b) - c, which changes the sign of a zero.
template <class T>
INLINE T weight(T w, T sum, T rest, T v, T r, T y, const Constants& c) {
    const T r_lo = subtract_product(r, r, v) * half_reciprocal(r);
    const T e = add_product(y, T(c.eps) + r_lo, add_product(y, r, T(c.step))) + T(c.step_lo);
    const T correction = add_product(sum, e * T(c.inv_step), rest);
    return add_product(w, T(c.decay), add_product(y, sum, y * correction));
}

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

#ifdef __AVX512BW__
struct Wide {
    __m512 x;
    Wide() = default;
    Wide(__m512 x) : x(x) {}
    Wide(__m512i bits) : x(_mm512_castsi512_ps(bits)) {}
    explicit Wide(float value) : x(_mm512_set1_ps(value)) {}
    explicit Wide(const float* p) : x(_mm512_loadu_ps(p)) {}
    __m512i bits() const { return _mm512_castps_si512(x); }
    void store(float* p) const { _mm512_storeu_ps(p, x); }
};
Wide operator+(Wide a, Wide b) { return _mm512_add_ps(a.x, b.x); }
Wide operator-(Wide a, Wide b) { return _mm512_sub_ps(a.x, b.x); }
Wide operator*(Wide a, Wide b) { return _mm512_mul_ps(a.x, b.x); }
Wide operator/(Wide a, Wide b) { return _mm512_div_ps(a.x, b.x); }
Wide add_product(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a.x, b.x, c.x); }
Wide subtract_product(Wide a, Wide b, Wide c) { return _mm512_fnmadd_ps(a.x, b.x, c.x); }
Wide subtract_from_product(Wide a, Wide b, Wide c) { return _mm512_fmsub_ps(a.x, b.x, c.x); }
Wide root(Wide a) { return _mm512_sqrt_ps(a.x); }
Wide half_reciprocal(Wide a) { return _mm512_sub_epi32(_mm512_set1_epi32(HALF_RECIPROCAL), a.bits()); }

// Index k of lane j: where the 16-bit lane j of a result comes from, in one register or (from 32 on) a second.
struct alignas(64) Lanes {
    uint16_t k[32];
    template <class Rule> explicit constexpr Lanes(Rule rule) : k() { for (int j = 0; j < 32; ++j) k[j] = uint16_t(rule(j)); }
    operator __m512i() const { return _mm512_load_si512(k); }
};
constexpr Lanes FIRST([](int j) { return j / 2 + j % 2 * 32; }), SECOND([](int j) { return 16 + j / 2 + j % 2 * 32; }),
    LOWER([](int j) { return 2 * j; }), UPPER([](int j) { return 2 * j + 1; });

// 32 numbers from or to 16-bit planes: in memory order, two registers.
void widen(const uint16_t* g, Wide& a, Wide& b) {
    const __m512i x = _mm512_loadu_si512(g);
    a = _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, FIRST, x);
    b = _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, SECOND, x);
}
void widen(const float* g, Wide& a, Wide& b) { a = Wide(g), b = Wide(g + 16); }
void load(const Split& p, int64_t i, Wide& a, Wide& b) {
    // hi * 2^16 + lo is the two halves side by side once lo is counted from -2^15: flip its sign, subtract 2^15.
    const __m512i hi = _mm512_loadu_si512(p.hi + i), half = _mm512_set1_epi32(0x8000),
                  lo = _mm512_xor_si512(_mm512_loadu_si512(p.lo + i), _mm512_set1_epi16(int16_t(0x8000)));
    a = _mm512_sub_epi32(_mm512_permutex2var_epi16(lo, FIRST, hi), half);
    b = _mm512_sub_epi32(_mm512_permutex2var_epi16(lo, SECOND, hi), half);
}
void store(const Split& p, int64_t i, Wide a, Wide b) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    _mm512_storeu_si512(p.lo + i, _mm512_permutex2var_epi16(a.bits(), LOWER, b.bits()));
    const __m512i a_up = _mm512_add_epi32(a.bits(), half), b_up = _mm512_add_epi32(b.bits(), half);
    _mm512_storeu_si512(p.hi + i, _mm512_permutex2var_epi16(a_up, UPPER, b_up));
}
void load(const Plain& p, int64_t i, Wide& a, Wide& b) { widen(p.w + i, a, b); }
void store(const Plain& p, int64_t i, Wide a, Wide b) { a.store(p.w + i), b.store(p.w + i + 16); }

constexpr int64_t BLOCK = 64;
constexpr int64_t AHEAD = 320;  // elements

// A thread reads five streams and writes four, which is more than the processor itself fetches ahead in time, and least of all
// while copies of a link make DRAM slow to answer: so it is asked for explicitly.
template <class Number>
INLINE void fetch_ahead(const Number* here) {
#pragma GCC unroll 8
    for (size_t at = 0; at < BLOCK * sizeof(Number); at += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(here + AHEAD) + at, 1);
}
INLINE void fetch_ahead(const Split& p, int64_t i) { fetch_ahead(p.hi + i), fetch_ahead(p.lo + i); }
INLINE void fetch_ahead(const Plain& p, int64_t i) { fetch_ahead(p.w + i); }

// Stage by stage over four registers: a square root and a division take long, and others are started meanwhile.
template <bool SCALED, class Master, class Gradient>
INLINE void block(Master master, float* m, float* v, const Gradient* g, const Constants& c, int64_t i) {
    constexpr int N = BLOCK / 16;
    fetch_ahead(m + i), fetch_ahead(v + i), fetch_ahead(master, i), fetch_ahead(g + i);
    Wide x[N], sum[N], rest[N], second_moment[N], r[N];
#pragma GCC unroll 8
    for (int k = 0; k < N; k += 2) widen(g + i + 16 * k, x[k], x[k + 1]);
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) {
        float *mk = m + i + 16 * k, *vk = v + i + 16 * k;
        sum[k] = first_sum(x[k], Wide(mk), c);
        rest[k] = first_rest<SCALED>(x[k], Wide(mk), sum[k], c);
        second_moment[k] = second<SCALED>(x[k], Wide(vk), c);
        r[k] = root(second_moment[k]);
        (sum[k] + rest[k]).store(mk);
        second_moment[k].store(vk);
    }
    Wide y[N], w[N];
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) y[k] = quotient(r[k], c);
#pragma GCC unroll 8
    for (int k = 0; k < N; k += 2) load(master, i + 16 * k, w[k], w[k + 1]);
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) w[k] = weight(w[k], sum[k], rest[k], second_moment[k], r[k], y[k], c);
#pragma GCC unroll 8
    for (int k = 0; k < N; k += 2) store(master, i + 16 * k, w[k], w[k + 1]);
}
#endif

template <bool SCALED, class Master, class Gradient>
INLINE void range(Master master, float* m, float* v, const Gradient* g, const Constants& constants, int64_t i, int64_t end) {
    const Constants c = constants;  // a copy that no store can alias stays in registers
#ifdef __AVX512BW__
    for (; i + BLOCK <= end; i += BLOCK) block<SCALED>(master, m, v, g, c, i);
#endif
#pragma omp simd
    for (int64_t k = i; k < end; ++k) {
        const float x = gradient(g, k), sum = first_sum(x, m[k], c), rest = first_rest<SCALED>(x, m[k], sum, c);
        const float vk = second<SCALED>(x, v[k], c), r = root(vk);
        master.store(k, weight(master.load(k), sum, rest, vk, r, quotient(r, c), c));
        m[k] = sum + rest;
        v[k] = vk;
    }
}

// Rounding mode and the flushing of denormals belong to a thread, and whoever called may have changed them.
struct DefaultFloats {
    std::fenv_t before;
    DefaultFloats() { std::fegetenv(&before), std::fesetenv(FE_DFL_ENV); }
    ~DefaultFloats() { std::fesetenv(&before); }
};

struct Run { int64_t first, end, decayed; };  // elements [first, end) of the planes, and whether they decay
constexpr int64_t GRAIN = 1 << 15;            // elements that one thread takes at a time

struct Update {
    void *hi, *lo;  // lo is null where the master is one plane
    float *m, *v;
    const void* grad;
    const float* constants;
    const Run* runs;
    int64_t count;

    operator Split() const { return {static_cast<uint16_t*>(hi), static_cast<int16_t*>(lo)}; }
    operator Plain() const { return {static_cast<float*>(hi)}; }
};

template <class Master, class Gradient>
void run(const Update& u, int threads) {
    if (u.constants[SKIP] != 0.0f) return;
    const DefaultFloats here;
    const Constants by_decay[2] = {Constants(u.constants, false), Constants(u.constants, true)};
    const bool scaled = by_decay[0].scaled();
    const Master master = u;
    const auto* grad = static_cast<const Gradient*>(u.grad);
    std::vector<Run> grains;
    for (const Run* run = u.runs; run < u.runs + u.count; ++run)
        for (int64_t at = run->first; at < run->end; at += GRAIN)
            grains.push_back({at, std::min(at + GRAIN, run->end), run->decayed});
    Team::get().run(threads, int64_t(grains.size()), [&](int64_t number) {
        const DefaultFloats there;
        const Run& grain = grains[number];
        const Constants& c = by_decay[grain.decayed];
        if (scaled) range<true>(master, u.m, u.v, grad, c, grain.first, grain.end);
        else range<false>(master, u.m, u.v, grad, c, grain.first, grain.end);
    });
}

// Counts up to `value`, unless somebody has counted further; false then.
bool count_up(uint32_t* count, uint32_t value) {
    uint32_t now = __atomic_load_n(count, __ATOMIC_RELAXED);
    do {
        if (int32_t(value - now) < 0) return false;
    } while (!__atomic_compare_exchange_n(count, &now, value, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    return true;
}

// One update after the other. When update k has ended `ended` becomes first + k; spans get each one's start and end, in ns since
// the call. Both may be null. Where `ended` is further on already, the run was abandoned: the rest is left out. How many were run.
template <class Master, class Gradient>
int64_t series(const Update* updates, int64_t count, int threads, uint32_t* ended, uint32_t first, int64_t* spans) {
    using namespace std::chrono;
    const auto called = steady_clock::now();
    const auto now = [&] { return int64_t(duration_cast<nanoseconds>(steady_clock::now() - called).count()); };
    for (int64_t k = 0; k < count; ++k) {
        if (spans) spans[2 * k] = now();
        run<Master, Gradient>(updates[k], threads);
        if (spans) spans[2 * k + 1] = now();
        if (ended && !count_up(ended, first + uint32_t(k))) return k + 1;
    }
    return count;
}

}  // namespace

#define ENTRY(NAME, MASTER, GRADIENT)                                                                                         \
    extern "C" int64_t NAME(const void* updates, int64_t count, int threads, uint32_t* ended, uint32_t first, int64_t* spans) { \
        return series<MASTER, GRADIENT>(static_cast<const Update*>(updates), count, threads, ended, first, spans);             \
    }
ENTRY(adamw_split_bf16, Split, uint16_t)
ENTRY(adamw_split_fp32, Split, float)
ENTRY(adamw_plain_bf16, Plain, uint16_t)
ENTRY(adamw_plain_fp32, Plain, float)
extern "C" void adamw_bind(const int* cores, int count) { Team::get().bind(cores, count); }
