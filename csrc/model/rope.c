/* rope.c: inverse frequencies of the rotary embedding, rounded to float32 where the reference rounds.
 *
 * The reference computes 1 / theta^(2j/d) in float32: exponent, power and reciprocal are each rounded. One unit in the last place
 * of the power matters: at position 30,000 it turns the fast pairs by 1e-3. So the power is rounded as the reference rounds it,
 * which is not always to nearest. torch hands whole blocks of 16 exponents to a vector routine (powf of SLEEF, one unit
 * off in 1.6 % of cases) and a shorter rest to the C library's powf (off in 1 of 10,000). power_of_block and power_nearest below
 * gave the bits of torch 2.13 for 64,931 of 64,935 powers (117 bases, 12 head sizes); nearest alone differs in 1,033. Where torch
 * finds AVX-512 its blocks hold 32 exponents: the same for head_dim 64, 128, 192 and 256; other sizes may differ by that unit.
 *
 * log and exp are our own, because those of the C library give other bits on other systems, and then the same checkpoint would
 * give other logits. All is a fixed chain of + - * / and fma, so the bits are the same everywhere.
 *
 * Formulas of the scaled types, with p = theta^(2j/d): linear 1 / (p factor); llama3 scales long waves by 1 / factor and blends
 * between two wavelengths; yarn blends 1 / p and 1 / (factor p) along a ramp over j (arXiv 2309.00071). */
#include "config.h"

#include <math.h>

#define TWO_PI 6.283185307179586 /* nearest float64 */

/* ln 2 in two parts; the high one has 32 bits, so n * high is exact. */
static const double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;

/* ln x for normal x > 0: x = 2^n m with sqrt(1/2) <= m < sqrt(2); ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.1716. The
 * series s^(2i+1) / (2i+1) is cut at i = 11, where 0.1716^24 / 25 < 2^-65. */
static double log_portable(double x)
{
    int n;
    double m = frexp(x, &n);
    if (m < 0x1.6a09e667f3bcdp-1) { /* sqrt(1/2) */
        m *= 2;
        n--;
    }
    double s = (m - 1) / (m + 1), square = s * s, sum = 0;
    for (int i = 11; i >= 1; i--)
        sum = (sum + 1.0 / (2 * i + 1)) * square;
    return n * ln2_high + (2 * s + (2 * s * sum + n * ln2_low));
}

/* e^x for |x| < 700: x = n ln 2 + r with |r| <= 0.3466; the Taylor series is cut at r^14 / 14!, below 2^-57. */
static double exp_portable(double x)
{
    double n = floor(x / (ln2_high + ln2_low) + 0.5), r = (x - n * ln2_high) - n * ln2_low, sum = 1;
    for (int i = 14; i >= 1; i--)
        sum = 1 + sum * r / i;
    return ldexp(sum, (int)n);
}

static float power_nearest(double log_base, float exponent)
{
    return (float)exp_portable((double)exponent * log_base);
}

/* SLEEF's powf: ln base = n ln 2 + 2 s + s^3 p(s^2) with base = 2^n m and 0.75 <= m < 1.5, and e^r = 1 + r + r^2 h(r). The short
 * p and h are in float32, all else in about 48 bits, for which float64 stands here: their error makes the result. */
static float power_of_block(float base, float exponent)
{
    int n;
    double m = 2 * frexp(base, &n);
    n--;
    if (m >= 1.5) {
        m /= 2;
        n++;
    }
    double s = (m - 1) / (m + 1), square = s * s;
    float q = (float)square, p = fmaf(fmaf(0.24032035f, q, 0.28511268f), q, 0.40000799f);
    double log_base = n * (ln2_high + ln2_low) + (2 * s + s * square * (0.66666663062252 + square * p));
    double y = log_base * exponent, k = floor((float)y * 1.44269504f + 0.5f); /* 1 / ln 2 */
    double r = (y - k * ln2_high) - k * ln2_low;
    float f = (float)r, h = fmaf(fmaf(0.0013632465f, f, 0.0083659692f), f, 0.041671082f);
    h = fmaf(fmaf(h, f, 0.16666552f), f, 0.49999985f);
    return ldexpf((float)(1 + (r + r * r * h)), (int)k);
}

double rope_yarn_attention_factor(double factor, double mscale, double mscale_all_dim)
{
    double log_factor = factor <= 1 ? 0 : log_portable(factor);
    if (mscale != 0 && mscale_all_dim != 0)
        return (0.1 * mscale * log_factor + 1) / (0.1 * mscale_all_dim * log_factor + 1);
    return 0.1 * log_factor + 1;
}

static float llama3(const rope_config *rope, float inverse)
{
    float factor = (float)rope->factor, low = (float)rope->low_freq_factor;
    float range = (float)(rope->high_freq_factor - rope->low_freq_factor);
    double length = (double)rope->original_max_position_embeddings;
    float wavelength = (1.0f / inverse) * (float)TWO_PI;
    if (wavelength > (float)(length / rope->low_freq_factor))
        return inverse / factor;
    if (wavelength < (float)(length / rope->high_freq_factor))
        return inverse;
    float smooth = ((1.0f / wavelength) * (float)length - low) / range;
    return (1.0f - smooth) * inverse / factor + smooth * inverse;
}

/* Ends of yarn's ramp: the pair index at which a wave turns `turns` times within the original length,
 * d ln(length / (2 pi turns)) / (2 ln theta). */
static double yarn_pair(const rope_config *rope, double turns, double d)
{
    return d * log_portable((double)rope->original_max_position_embeddings / (turns * TWO_PI)) / (2 * log_portable(rope->theta));
}

static void yarn_ramp(const rope_config *rope, double d, double *low, double *high)
{
    *low = yarn_pair(rope, rope->beta_fast, d);
    *high = yarn_pair(rope, rope->beta_slow, d);
    if (rope->truncate) {
        *low = floor(*low);
        *high = ceil(*high);
    }
    *low = *low < 0 ? 0 : *low;
    *high = *high > d - 1 ? d - 1 : *high;
    if (*low == *high)
        *high += 0.001; /* as the reference avoids 0 / 0 */
}

static float yarn(const rope_config *rope, float power, int64_t j, double low, double high)
{
    float ramp = ((float)j - (float)low) / (float)(high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    float keep = 1.0f - ramp;
    return 1.0f / ((float)rope->factor * power) * (1.0f - keep) + 1.0f / power * keep;
}

void rope_inv_freq(const config *c, float *inv_freq)
{
    const rope_config *rope = &c->rope;
    double low = 0, high = 1, log_theta = log_portable((double)(float)rope->theta);
    int64_t in_blocks = c->head_dim / 2 / 16 * 16;
    if (rope->type == ROPE_YARN)
        yarn_ramp(rope, (double)c->head_dim, &low, &high);
    for (int64_t j = 0; j < c->head_dim / 2; j++) {
        float exponent = (float)(2 * j) / (float)c->head_dim;
        float power = j < in_blocks ? power_of_block((float)rope->theta, exponent) : power_nearest(log_theta, exponent);
        float inverse = 1.0f / power;
        switch (rope->type) {
        case ROPE_DEFAULT: inv_freq[j] = inverse; break;
        case ROPE_LINEAR: inv_freq[j] = inverse / (float)rope->factor; break;
        case ROPE_LLAMA3: inv_freq[j] = llama3(rope, inverse); break;
        case ROPE_YARN: inv_freq[j] = yarn(rope, power, j, low, high); break;
        }
    }
}
