/* The least of some numbers, sharply or softly, as least.py says: the kernels of sweeps.c, in numbers of type `real`.

   Sums are made in an order of their own, which is the same on all processors. */

static inline void NAME(lower)(real *restrict least, const real *restrict x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        least[i] = x[i] < least[i] ? x[i] : least[i];
}

/* The least of `count` numbers. */
static inline real NAME(floor_of)(const real *x, int64_t count)
{
    real low[LANES], some[4] = {REAL_INFINITY, REAL_INFINITY, REAL_INFINITY, REAL_INFINITY};
    int64_t left = count;
    if (count >= LANES) {
        memcpy(low, x + count - LANES, sizeof low);
        for (int64_t i = 0; i + LANES < count; i += LANES)
            NAME(lower)(low, x + i, LANES);
        x = low;
        left = LANES;
    }
    for (; left % 4; left--)
        some[0] = x[left - 1] < some[0] ? x[left - 1] : some[0];
    for (int64_t i = 0; i < left; i += 4)
        for (int k = 0; k < 4; k++)
            some[k] = x[i + k] < some[k] ? x[i + k] : some[k];
    some[0] = some[1] < some[0] ? some[1] : some[0];
    some[2] = some[3] < some[2] ? some[3] : some[2];
    return some[2] < some[0] ? some[2] : some[0];
}

static inline real NAME(sum_of)(const real *x, int64_t count)
{
    real sum[LANES], some[4] = {0, 0, 0, 0};
    int64_t i = 0;
    if (count >= LANES) {
        for (int k = 0; k < LANES; k++)
            sum[k] = x[k];
        for (i = LANES; i + LANES <= count; i += LANES)
            for (int k = 0; k < LANES; k++)
                sum[k] += x[i + k];
        for (int k = 0; k < LANES; k++)
            some[k % 4] += sum[k];
    }
    for (; i + 4 <= count; i += 4)
        for (int k = 0; k < 4; k++)
            some[k] += x[i + k];
    for (; i < count; i++)
        some[0] += x[i];
    return (some[0] + some[1]) + (some[2] + some[3]);
}

static void NAME(take_off)(real *x, int64_t count, real floor)
{
    for (int64_t i = 0; i < count; i++)
        x[i] -= floor;
}

/* exp(x) for x <= 0, to a few parts in the precision. */
static inline real NAME(exponential)(real x)
{
    x = x > EXP_LEAST ? x : EXP_LEAST;
    union { real part; bits whole; } shifted = {x * (real)1.4426950408889634 + EXP_SHIFT}, two;
    real turns = shifted.part - EXP_SHIFT;  /* whole ones, which the last bits of the shifted number hold too */
    real rest = (x - turns * LOG2_HIGH) - turns * LOG2_LOW;
    two.whole = (shifted.whole + EXPONENT_OF_1) << MANTISSA;
    return EXP_TERMS(rest) * two.part;
}

/* log(x) for finite x >= 1. */
static inline real NAME(logarithm)(real x)
{
    union { real part; bits whole; } number = {x}, low = {(real)0.70710678118654752}, twos = {INTEGERS};
    bits away = number.whole - low.whole;
    twos.whole += away >> MANTISSA;
    number.whole = (away & (((bits)1 << MANTISSA) - 1)) + low.whole;  /* between the root of 1/2 and that of 2 */
    real s = (number.part - 1) / (number.part + 1), t = s * s;
    return (twos.part - INTEGERS) * (LOG2_HIGH + LOG2_LOW) + s * LOG_TERMS(t);
}

/* By how much less probable than the least number the others are at a heat of 1 / cool, in their place. */
static inline void NAME(soften)(real *restrict x, int64_t count, real floor, real cool)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = NAME(exponential)((floor - x[i]) * cool);
}

static inline void NAME(fill)(real *restrict x, int64_t count, real with)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = with;
}

static inline void NAME(add_up)(real *restrict x, const real *restrict more, int64_t count, real times)
{
    for (int64_t i = 0; i < count; i++)
        x[i] += times * more[i];
}

/* out[j] = the least over i of m[i, j] + add[i]; both as long as `columns`. */
CLONED static void NAME(least_down)(const real *m, int64_t rows, int64_t columns, const real *add, real heat, real *out, real *sums)
{
    const real cool = 1 / heat;
    NAME(fill)(out, columns, REAL_INFINITY);
    for (int64_t i = 0; i < rows; i++) {
        const real *row = m + i * columns, more = add ? add[i] : 0;
        for (int64_t j = 0; j < columns; j++) {
            real found = row[j] + more;
            out[j] = found < out[j] ? found : out[j];
        }
    }
    if (heat == 0)
        return;
    memset(sums, 0, columns * sizeof(real));
    for (int64_t i = 0; i < rows; i++) {
        const real *row = m + i * columns, more = add ? add[i] : 0;
        for (int64_t j = 0; j < columns; j++)
            sums[j] += NAME(exponential)((out[j] - (row[j] + more)) * cool);
    }
    for (int64_t j = 0; j < columns; j++)
        out[j] -= heat * NAME(logarithm)(sums[j]);
}

/* out[i] = the least over j of m[i, j] + add[j]; `line` is as long as `columns`. */
CLONED static void NAME(least_across)(const real *m, int64_t rows, int64_t columns, const real *add, real heat, real *out, real *line)
{
    const real cool = 1 / heat;
    for (int64_t i = 0; i < rows; i++) {
        const real *row = m + i * columns;
        for (int64_t j = 0; j < columns; j++)
            line[j] = add ? row[j] + add[j] : row[j];
        real floor = NAME(floor_of)(line, columns);
        out[i] = floor;
        if (heat == 0)
            continue;
        NAME(soften)(line, columns, floor, cool);
        out[i] -= heat * NAME(logarithm)(NAME(sum_of)(line, columns));
    }
}

static inline real NAME(lesser)(real one, real other, real heat)
{
    const real cool = 1 / heat;
    real low = one < other ? one : other;
    if (heat == 0)
        return low;
    real apart = one < other ? one - other : other - one;
    return low - heat * NAME(logarithm)(1 + NAME(exponential)(apart * cool));
}

/* x[i] -= the lesser of one[i] and other */
CLONED static void NAME(take_lesser)(real *restrict x, const real *restrict one, real other, int64_t count, real heat)
{
    if (heat == 0)
        for (int64_t i = 0; i < count; i++)
            x[i] -= one[i] < other ? one[i] : other;
    else
        for (int64_t i = 0; i < count; i++)
            x[i] -= NAME(lesser)(one[i], other, heat);
}
