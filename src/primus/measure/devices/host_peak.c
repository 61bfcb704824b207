/* Rate of the multiply-add units of one core, on registers only: the limit of matrix products.
 *
 * run_<kind>(rounds) returns the operations that it did, or 0 if this machine lacks the instructions.
 * Enough independent accumulators hide the latency of a multiply-add (4 cycles on two units need 8; Intel 64 and IA-32
 * Optimization Reference Manual, throughput and latency tables). */
#define _GNU_SOURCE
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ACCUMULATORS 12

static volatile float sink;

#if defined(__AVX512F__)
typedef __m512 vector;
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SET(x) _mm512_set1_ps(x)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 vector;
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define SET(x) _mm256_set1_ps(x)
#define LANES 8
#endif

double run_fp32(long rounds) {
#ifdef LANES
    vector sums[ACCUMULATORS], a = SET(1.0001f), b = SET(0.9999f);
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = SET((float)i);
    for (long round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = FMA(a, b, sums[i]);
        __asm__ volatile("" : "+x"(a), "+x"(b));
    }
    for (int i = 0; i < ACCUMULATORS; i++) sink += ((float *)&sums[i])[0];
    return 2.0 * LANES * ACCUMULATORS * (double)rounds;
#else
    return 0;
#endif
}

#ifdef __AMX_BF16__
#define ARCH_REQ_XCOMP_PERM 0x1023 /* Linux, Documentation/arch/x86/xstate.rst */
#define XFEATURE_XTILEDATA 18
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

static double run_amx(long rounds) {
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return 0;
    struct tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
    for (long round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 32 * (double)rounds; /* 16 x 32 by 32 x 16 in each */
}
#endif

double run_bf16(long rounds) {
#ifdef __AMX_BF16__
    double done = run_amx(rounds);
    if (done) return done;
#endif
#ifdef __AVX512BF16__
    __m512 sums[ACCUMULATORS];
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = a;
    for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_set1_ps((float)i);
    for (long round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < ACCUMULATORS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
        __asm__ volatile("" : "+x"(a), "+x"(b));
    }
    for (int i = 0; i < ACCUMULATORS; i++) sink += ((float *)&sums[i])[0];
    return 4.0 * 16 * ACCUMULATORS * (double)rounds;
#else
    return 0;
#endif
}
