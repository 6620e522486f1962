/* kernels_sse2.c: the kernels for any x86-64: 4 lanes in a register, four registers make the 16 of the definition.
 *
 * There is no fused multiply-add here: v_fma works in double, and where that could show it does what fma_f32_portable in
 * float32.h does, four numbers at a time. */
#include "tables.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#include <string.h>

#define TABLE kernels_sse2
#define NAME "sse2"
#define LANES 4
#define TILE_X 2 /* v_fma sets the pace, not the loads: larger tiles are no faster, and three times the code */
#define TILE_W 1
#define BATCH_X 2
#define PANEL_VECS 1
#define TILE_W1 1

typedef __m128 vec;

#define v_keep(a) __asm__("" : "+x"(a))

static inline vec v_set(float f) { return _mm_set1_ps(f); }
static inline vec v_load(const void *p) { return _mm_loadu_ps(p); }
static inline void v_store(void *p, vec v) { _mm_storeu_ps(p, v); }
static inline vec v_load_bf16(const void *p)
{
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(p)));
}
static inline vec v_load_f16(const void *p) /* as f16_to_float: exponent and mantissa move up, the exponent's bias is changed */
{
    const __m128i half = _mm_unpacklo_epi16(_mm_loadl_epi64(p), _mm_setzero_si128()), rebias = _mm_set1_epi32((127 - 15) << 23);
    const __m128i magnitude = _mm_and_si128(half, _mm_set1_epi32(0x7fff));
    const __m128i sign = _mm_slli_epi32(_mm_xor_si128(half, magnitude), 16);
    const __m128i infinite = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff)); /* or NaN: the bias is added twice, 31 -> 255 */
    const __m128i tiny = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(0x0400));
    __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 13), rebias);
    normal = _mm_add_epi32(normal, _mm_and_si128(infinite, rebias));
    const __m128i subnormal = _mm_castps_si128(_mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0x1p-24f))); /* exact */
    const __m128i chosen = _mm_or_si128(_mm_and_si128(tiny, subnormal), _mm_andnot_si128(tiny, normal));
    return _mm_castsi128_ps(_mm_or_si128(chosen, sign));
}

static inline __m128i mask_of(int count) /* lanes below count */
{
    return _mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_setr_epi32(0, 1, 2, 3));
}
static inline vec v_choose(__m128i mask, vec a, vec b) /* a where the mask is set, else b */
{
    return _mm_or_ps(_mm_and_ps(_mm_castsi128_ps(mask), a), _mm_andnot_ps(_mm_castsi128_ps(mask), b));
}
static inline vec v_load_part(const void *p, int count) /* two elements at once, and one */
{
    const __m128i two = count > 1 ? _mm_loadl_epi64(p) : _mm_setzero_si128();
    float one = 0;
    if (count != 2)
        memcpy(&one, (const unsigned char *)p + 4 * (count - 1), 4);
    return count > 1 ? _mm_movelh_ps(_mm_castsi128_ps(two), _mm_set_ss(one)) : _mm_set_ss(one);
}
static inline void v_store_part(void *p, vec v, int count)
{
    if (count > 1)
        _mm_storel_epi64(p, _mm_castps_si128(v));
    const float one = _mm_cvtss_f32(count > 1 ? _mm_movehl_ps(v, v) : v);
    if (count != 2)
        memcpy((unsigned char *)p + 4 * (count - 1), &one, 4);
}
static inline vec v_first(int count, vec a, vec b) { return v_choose(mask_of(count), a, b); }

static inline vec v_add(vec a, vec b) { return _mm_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm_div_ps(a, b); }
static inline vec v_negate(vec a) { return _mm_xor_ps(a, _mm_set1_ps(-0.0f)); }

/* a * b + c as a double rounded to odd: between that and the exact sum lies neither a float32 nor a tie of two. The product is
 * exact; TwoSum gives the error of the sum, or NaN (which is neither above nor below 0) when the sum is not finite. A sum beyond
 * the exact one, whose error points to zero, steps back; then the last bit of every inexact one is set. The square of an error is
 * no zero: errors are multiples of 2^-298. */
static inline __m128d sum_to_odd(__m128d a, __m128d b, __m128d c)
{
    const __m128d product = _mm_mul_pd(a, b), sum = _mm_add_pd(product, c), shadow = _mm_sub_pd(sum, product);
    const __m128d error = _mm_add_pd(_mm_sub_pd(product, _mm_sub_pd(sum, shadow)), _mm_sub_pd(c, shadow));
    const __m128i inexact = _mm_castpd_si128(_mm_cmplt_pd(_mm_setzero_pd(), _mm_mul_pd(error, error)));
    const __m128i signs = _mm_srai_epi32(_mm_castpd_si128(_mm_xor_pd(error, sum)), 31);
    const __m128i beyond = _mm_and_si128(_mm_shuffle_epi32(signs, _MM_SHUFFLE(3, 3, 1, 1)), inexact); /* -1 where so */
    const __m128i stepped = _mm_add_epi64(_mm_castpd_si128(sum), beyond);
    return _mm_castsi128_pd(_mm_or_si128(stepped, _mm_srli_epi64(inexact, 63)));
}

static inline __m128d lower(vec a) { return _mm_cvtps_pd(a); }
static inline __m128d upper(vec a) { return _mm_cvtps_pd(_mm_movehl_ps(a, a)); }
static inline vec joined(__m128d low, __m128d high) { return _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high)); }

static __attribute__((noinline, cold)) vec fma_of_ties(vec a, vec b, vec c)
{
    return joined(sum_to_odd(lower(a), lower(b), lower(c)), sum_to_odd(upper(a), upper(b), upper(c)));
}

/* Rounding twice, to double and to float32, goes wrong only where the double lies on a tie of two float32: its last 29 bits are
 * 1000..., or the result is so small that float32 has fewer bits. Few sums are like that, and they take the way above. */
static inline vec v_fma(vec a, vec b, vec c)
{
    const __m128d low = _mm_add_pd(_mm_mul_pd(lower(a), lower(b)), lower(c));
    const __m128d high = _mm_add_pd(_mm_mul_pd(upper(a), upper(b)), upper(c));
    const vec sum = joined(low, high);
    const __m128i last = _mm_castps_si128(_mm_shuffle_ps(_mm_castpd_ps(low), _mm_castpd_ps(high), _MM_SHUFFLE(2, 0, 2, 0)));
    const __m128i tie = _mm_cmpeq_epi32(_mm_slli_epi32(last, 3), _mm_set1_epi32(INT32_MIN));
    const __m128i size = _mm_and_si128(_mm_castps_si128(sum), _mm_set1_epi32(INT32_MAX));
    const __m128i tiny = _mm_cmplt_epi32(size, _mm_set1_epi32(0x00800001)); /* up to the smallest normal number */
    const bool wrong = _mm_movemask_epi8(_mm_or_si128(tie, tiny)) != 0;
    return __builtin_expect(wrong, 0) ? fma_of_ties(a, b, c) : sum;
}

/* minps and maxps give their second operand when either is NaN. */
static inline vec v_at_most(vec a, vec b) { return _mm_min_ps(b, a); }
static inline vec v_at_least(vec a, vec b) { return _mm_max_ps(b, a); }
static inline vec v_max(vec a, vec b) { return v_choose(_mm_castps_si128(_mm_cmpunord_ps(a, a)), a, _mm_max_ps(a, b)); }

static inline vec v_quiet(vec a)
{
    const vec quiet = _mm_castsi128_ps(_mm_set1_epi32(0x00400000));
    return _mm_or_ps(a, _mm_and_ps(quiet, _mm_cmpunord_ps(a, a)));
}

static inline vec v_scale(vec e, vec shifted)
{
    __m128i n = _mm_sub_epi32(_mm_castps_si128(shifted), _mm_set1_epi32(0x4b400000)); /* the bits of EXP_ROUND */
    __m128i first = _mm_srai_epi32(n, 1), second = _mm_sub_epi32(n, first), bias = _mm_set1_epi32(127);
    e = _mm_mul_ps(e, _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(first, bias), 23)));
    return _mm_mul_ps(e, _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(second, bias), 23)));
}

static inline float v_fold(vec a)
{
    vec two = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline void v_transpose(vec r[4]) { _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]); }

static inline void v_store_quad(float *p, vec v, const int q)
{
    (void)q;
    v_store(p, v);
}

#include "lanes_kernels.h"
#endif
