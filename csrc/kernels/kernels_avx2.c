/* kernels_avx2.c: the kernels in AVX2 with FMA and F16C: 8 lanes in a register, two registers make the 16 of the definition. */
#include "tables.h"

#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif
#include <immintrin.h>

#define TABLE kernels_avx2
#define NAME "avx2"
#define LANES 8
#define TILE_X 4 /* 4 x 3 sums: 12 of 16 registers; three weights and one x fill the rest */
#define TILE_W 3
#define BATCH_X 6 /* 6 x 2 registers of sums; two of weights and one x fill the rest */
#define PANEL_VECS 2
#define TILE_W1 4 /* 8 chains cover the latency of two FMA units */

typedef __m256 vec;

#define v_keep(a) __asm__("" : "+x"(a))

static inline vec v_set(float f) { return _mm256_set1_ps(f); }
static inline vec v_load(const void *p) { return _mm256_loadu_ps(p); }
static inline void v_store(void *p, vec v) { _mm256_storeu_ps(p, v); }
static inline vec v_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
static inline vec v_load_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

static inline __m256i mask_of(int count) /* lanes below count */
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vec v_load_part(const void *p, int count) { return _mm256_maskload_ps(p, mask_of(count)); }
static inline void v_store_part(void *p, vec v, int count) { _mm256_maskstore_ps(p, mask_of(count), v); }
static inline vec v_first(int count, vec a, vec b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask_of(count))); }

static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_negate(vec a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }

/* minps and maxps give their second operand when either is NaN. */
static inline vec v_at_most(vec a, vec b) { return _mm256_min_ps(b, a); }
static inline vec v_at_least(vec a, vec b) { return _mm256_max_ps(b, a); }
static inline vec v_max(vec a, vec b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }

static inline vec v_quiet(vec a)
{
    const vec quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000));
    return _mm256_or_ps(a, _mm256_and_ps(quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}

static inline vec v_scale(vec e, vec shifted)
{
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000)); /* the bits of EXP_ROUND */
    __m256i first = _mm256_srai_epi32(n, 1), second = _mm256_sub_epi32(n, first), bias = _mm256_set1_epi32(127);
    e = _mm256_mul_ps(e, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(e, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}

static inline float v_fold(vec a)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#define v_fold4 v_fold4
static inline void v_fold4(float *out, const vec a[4])
{
    const vec ab = _mm256_add_ps(_mm256_permute2f128_ps(a[0], a[1], 0x20), _mm256_permute2f128_ps(a[0], a[1], 0x31));
    const vec cd = _mm256_add_ps(_mm256_permute2f128_ps(a[2], a[3], 0x20), _mm256_permute2f128_ps(a[2], a[3], 0x31));
    const vec two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee)); /* a a c c, b b d d */
    const vec one = _mm256_add_ps(two, _mm256_movehdup_ps(two));
    const __m128 acbd = _mm_shuffle_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1), 0x88);
    _mm_storeu_ps(out, _mm_shuffle_ps(acbd, acbd, 0xd8));
}

static inline void v_transpose(vec r[4])
{
    const vec a = _mm256_unpacklo_ps(r[0], r[1]), b = _mm256_unpackhi_ps(r[0], r[1]);
    const vec c = _mm256_unpacklo_ps(r[2], r[3]), d = _mm256_unpackhi_ps(r[2], r[3]);
    r[0] = _mm256_shuffle_ps(a, c, 0x44);
    r[1] = _mm256_shuffle_ps(a, c, 0xee);
    r[2] = _mm256_shuffle_ps(b, d, 0x44);
    r[3] = _mm256_shuffle_ps(b, d, 0xee);
}
static inline void v_store_quad(float *p, vec v, const int q)
{
    _mm_storeu_ps(p, q == 0 ? _mm256_castps256_ps128(v) : _mm256_extractf128_ps(v, 1));
}

#include "lanes_kernels.h"
#endif
