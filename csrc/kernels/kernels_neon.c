/* kernels_neon.c: the kernels for any aarch64: 4 lanes in a register, four registers make the 16 of the definition. */
#include "tables.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#define TABLE kernels_neon
#define NAME "neon"
#define LANES 4
#define TILE_X 4 /* 4 x 6 sums: 24 of 32 registers; six weights and one x fit beside them */
#define TILE_W 6
#define BATCH_X 6 /* 6 x 4 registers of sums; four of weights and one x fit beside them */
#define PANEL_VECS 4
#define TILE_W1 4 /* 16 chains cover the latency of four FMA units */

typedef float32x4_t vec;

#define v_keep(a) __asm__("" : "+w"(a))

static inline vec v_set(float f) { return vdupq_n_f32(f); }
static inline vec v_load(const void *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
static inline void v_store(void *p, vec v) { vst1q_u8(p, vreinterpretq_u8_f32(v)); }
static inline vec v_load_f16(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
static inline vec v_load_bf16(const void *p) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16)); }

static inline vec v_load_part(const void *p, int count)
{
    float lanes[4] = {0};
    memcpy(lanes, p, 4 * (size_t)count);
    return vld1q_f32(lanes);
}
static inline void v_store_part(void *p, vec v, int count)
{
    float lanes[4];
    vst1q_f32(lanes, v);
    memcpy(p, lanes, 4 * (size_t)count);
}
static inline vec v_first(int count, vec a, vec b)
{
    static const int32_t lane[4] = {0, 1, 2, 3};
    return vbslq_f32(vcltq_s32(vld1q_s32(lane), vdupq_n_s32(count)), a, b);
}

static inline vec v_add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec v_sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec v_mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec v_div(vec a, vec b) { return vdivq_f32(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
static inline vec v_negate(vec a) { return vnegq_f32(a); }

/* A compare with a NaN is false, and fmax gives a NaN when either is one. */
static inline vec v_at_most(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), b, a); }
static inline vec v_at_least(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), b, a); }
static inline vec v_max(vec a, vec b) { return vmaxq_f32(a, b); }

static inline vec v_quiet(vec a)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(a), is_number = vceqq_f32(a, a);
    return vreinterpretq_f32_u32(vorrq_u32(bits, vbicq_u32(vdupq_n_u32(0x00400000), is_number)));
}

static inline vec v_scale(vec e, vec shifted)
{
    int32x4_t n = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000)); /* the bits of EXP_ROUND */
    int32x4_t first = vshrq_n_s32(n, 1), second = vsubq_s32(n, first), bias = vdupq_n_s32(127);
    e = vmulq_f32(e, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(first, bias), 23)));
    return vmulq_f32(e, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(second, bias), 23)));
}

static inline float v_fold(vec a)
{
    float32x2_t two = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

static inline void v_transpose(vec r[4])
{
    const float32x4x2_t a = vzipq_f32(r[0], r[2]), b = vzipq_f32(r[1], r[3]);
    const float32x4x2_t c = vzipq_f32(a.val[0], b.val[0]), d = vzipq_f32(a.val[1], b.val[1]);
    r[0] = c.val[0];
    r[1] = c.val[1];
    r[2] = d.val[0];
    r[3] = d.val[1];
}

static inline void v_store_quad(float *p, vec v, const int q)
{
    (void)q;
    v_store(p, v);
}

#include "lanes_kernels.h"
#endif
