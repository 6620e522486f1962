/* kernels_avx512.c: the kernels in AVX-512 (F, BW, DQ, VL): the 16 lanes of the definition in one register, masks for the end of
 * a row. */
#include "tables.h"

#if defined(__x86_64__)
#if defined(COLIBRI_EMULATE_AVX512) /* a test defines it, after an emulation of the intrinsics */
#define v_keep(a) ((void)0)
#else
#if !defined(__AVX512F__) || !defined(__AVX512DQ__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c"
#endif
#include <immintrin.h>
#define v_keep(a) __asm__("" : "+v"(a))
#endif

#define TABLE kernels_avx512
#define NAME "avx512"
#define LANES 16
#define TILE_X 4 /* 4 x 6 sums: 24 of 32 registers; six weights and one x fit beside them */
#define TILE_W 6
#define BATCH_X 8 /* 8 x 3 registers of sums; three of weights and one x fit beside them */
#define PANEL_VECS 3
#define TILE_W1 8 /* 8 chains cover the latency of two FMA units */

typedef __m512 vec;

static inline vec v_set(float f) { return _mm512_set1_ps(f); }
static inline vec v_load(const void *p) { return _mm512_loadu_ps(p); }
static inline void v_store(void *p, vec v) { _mm512_storeu_ps(p, v); }
static inline vec v_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
static inline vec v_load_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}

static inline __mmask16 mask_of(int count) { return (__mmask16)((1u << count) - 1); } /* lanes below count */
static inline vec v_load_part(const void *p, int count) { return _mm512_maskz_loadu_ps(mask_of(count), p); }
static inline void v_store_part(void *p, vec v, int count) { _mm512_mask_storeu_ps(p, mask_of(count), v); }
static inline vec v_first(int count, vec a, vec b) { return _mm512_mask_blend_ps(mask_of(count), b, a); }

static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec v_negate(vec a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }

/* vminps and vmaxps give their second operand when either is NaN. */
static inline vec v_at_most(vec a, vec b) { return _mm512_min_ps(b, a); }
static inline vec v_at_least(vec a, vec b) { return _mm512_max_ps(b, a); }
static inline vec v_max(vec a, vec b)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_max_ps(a, b), a);
}

static inline vec v_quiet(vec a)
{
    const vec quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x00400000));
    return _mm512_mask_or_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a, quiet);
}

static inline vec v_scale(vec e, vec shifted)
{
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000)); /* the bits of EXP_ROUND */
    __m512i first = _mm512_srai_epi32(n, 1), second = _mm512_sub_epi32(n, first), bias = _mm512_set1_epi32(127);
    e = _mm512_mul_ps(e, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(first, bias), 23)));
    return _mm512_mul_ps(e, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(second, bias), 23)));
}

static inline float v_fold(vec a)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline void v_transpose(vec r[4])
{
    const vec a = _mm512_unpacklo_ps(r[0], r[1]), b = _mm512_unpackhi_ps(r[0], r[1]);
    const vec c = _mm512_unpacklo_ps(r[2], r[3]), d = _mm512_unpackhi_ps(r[2], r[3]);
    r[0] = _mm512_shuffle_ps(a, c, 0x44);
    r[1] = _mm512_shuffle_ps(a, c, 0xee);
    r[2] = _mm512_shuffle_ps(b, d, 0x44);
    r[3] = _mm512_shuffle_ps(b, d, 0xee);
}
static inline void v_store_quad(float *p, vec v, const int q)
{
    _mm_storeu_ps(p, q == 0   ? _mm512_castps512_ps128(v)
                     : q == 1 ? _mm512_extractf32x4_ps(v, 1)
                     : q == 2 ? _mm512_extractf32x4_ps(v, 2)
                              : _mm512_extractf32x4_ps(v, 3));
}

#include "lanes_kernels.h"
#endif
