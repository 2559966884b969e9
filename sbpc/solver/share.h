/* What share.py says of stars, in numbers of type `real`. Of charges one alias is done at a time, in rows over all layouts. */

CLONED static void NAME(star_belief)(const NAME(Star) *star, real heat, real *belief, real *product)
{
    const real cool = 1 / heat;
    for (int64_t s = 0; s < star->sources; s++) {
        real *row = belief + s * star->aliases;
        const real *seconds = star->seconds + s * star->aliases;
        for (int64_t a = 0; a < star->aliases; a++) {
            row[a] = seconds[a] + star->made[s];
            product[a] = 1;
        }
        for (int64_t j = 0; j < star->branches; j++) {
            const real *over = star->branch[j].over, direct = star->branch[j].direct[s];
            if (heat == 0) {
                for (int64_t a = 0; a < star->aliases; a++)
                    row[a] += over[a] < direct ? over[a] : direct;
                continue;
            }
            for (int64_t a = 0; a < star->aliases; a++) {
                row[a] += over[a] < direct ? over[a] : direct;
                real apart = over[a] < direct ? over[a] - direct : direct - over[a];
                product[a] *= 1 + NAME(exponential)(apart * cool);
            }
            if (j % 64 == 63 || j == star->branches - 1)  /* before 2^64, of which the square is too large for a float */
                for (int64_t a = 0; a < star->aliases; a++) {
                    row[a] -= heat * NAME(logarithm)(product[a]);
                    product[a] = 1;
                }
        }
    }
}

/* The message to the producer (number 0) or to a consumer, from a belief [sources, aliases]. */
static void NAME(star_tell)(const NAME(Star) *star, int64_t number, const real *belief, real heat, const NAME(Scratch) *scratch, real *out)
{
    int64_t sources = star->sources, aliases = star->aliases;
    real *rest = scratch->rest, *by_alias = scratch->lines, *by_source = by_alias + scratch->longest;
    real *line = by_source + scratch->longest;
    if (number == 0) {
        NAME(least_across)(belief, sources, aliases, NULL, heat, out, line);
        for (int64_t s = 0; s < sources; s++)
            out[s] -= star->made[s];
        return;
    }
    const NAME(Branch) *branch = star->branch + number - 1;
    for (int64_t s = 0; s < sources; s++) {
        const real direct = branch->direct[s];
        memcpy(rest + s * aliases, belief + s * aliases, aliases * sizeof(real));
        NAME(take_lesser)(rest + s * aliases, branch->over, direct, aliases, heat);
    }
    NAME(least_down)(rest, sources, aliases, NULL, heat, by_alias, line);
    NAME(least_down)(branch->charges, aliases, branch->count, by_alias, heat, out, line);
    if (branch->straight)
        NAME(least_across)(rest, sources, aliases, NULL, heat, by_source, line);
    for (int64_t i = 0; i < branch->straight; i++)
        out[branch->to[i]] = NAME(lesser)(out[branch->to[i]], by_source[branch->at[i]], heat);
}

/* Take what the producer sent, or a consumer: in `sent` of its branch. What is taken off. */
static double NAME(star_hear)(const NAME(Star) *star, int64_t number, const real *sent, real heat, real *line)
{
    if (number == 0) {
        real floor = NAME(floor_of)(sent, star->sources);
        for (int64_t s = 0; s < star->sources; s++)
            star->made[s] = sent[s] - floor;
        return floor;
    }
    const NAME(Branch) *branch = star->branch + number - 1;
    if (sent != branch->sent)
        memcpy(branch->sent, sent, branch->count * sizeof(real));
    NAME(least_across)(branch->charges, star->aliases, branch->count, sent, heat, branch->over, line);
    real floor = NAME(floor_of)(branch->over, star->aliases);
    for (int64_t i = 0; i < branch->straight; i++)
        floor = sent[branch->to[i]] < floor ? sent[branch->to[i]] : floor;
    NAME(take_off)(branch->over, star->aliases, floor);
    for (int64_t i = 0; i < branch->straight; i++)
        branch->direct[branch->at[i]] = sent[branch->to[i]] - floor;
    return floor;
}

/* By branch and layout what consumers sent, infinite where they cannot have a layout. */
static void NAME(share_sent)(const NAME(Star) *star, const NAME(Scratch) *scratch)
{
    NAME(fill)(scratch->pays, star->branches * star->layouts, REAL_INFINITY);
    for (int64_t j = 0; j < star->branches; j++)
        for (int64_t t = 0; t < star->branch[j].count; t++)
            scratch->pays[j * star->layouts + star->branch[j].columns[t]] = star->branch[j].sent[t];
}

/* By branch and layout what is charged at an alias, 0 where a consumer cannot have a layout. */
static void NAME(share_open)(const NAME(Star) *star, int64_t a, const NAME(Scratch) *scratch)
{
    NAME(fill)(scratch->needs, star->branches * star->layouts, 0);
    for (int64_t j = 0; j < star->branches; j++) {
        const NAME(Branch) *branch = star->branch + j;
        for (int64_t t = 0; t < branch->count; t++)
            scratch->needs[j * star->layouts + branch->columns[t]] = branch->charges[a * branch->count + t];
    }
}

static void NAME(share_close)(const NAME(Star) *star, int64_t a, const NAME(Scratch) *scratch)
{
    for (int64_t j = 0; j < star->branches; j++) {
        const NAME(Branch) *branch = star->branch + j;
        for (int64_t t = 0; t < branch->count; t++)
            branch->charges[a * branch->count + t] = scratch->needs[j * star->layouts + branch->columns[t]];
    }
}

/* What a consumer needs to be charged by layout, to send as much as it does to an alias. */
static inline void NAME(needed)(real *restrict need, const real *restrict pays, int64_t layouts, real message)
{
    for (int64_t l = 0; l < layouts; l++)
        need[l] = message - pays[l] > 0 ? message - pays[l] : 0;
}

/* `Share.balance` for every alias on its own; the messages are left in `over` of the branches. */
CLONED static void NAME(share_balance)(const NAME(Star) *star, int backwards, const NAME(Scratch) *scratch)
{
    int64_t layouts = star->layouts, many = star->branches;
    real *restrict room = scratch->lines, *restrict fewest = room + scratch->longest;
    NAME(share_sent)(star, scratch);
    for (int64_t a = 0; a < star->aliases; a++) {
        NAME(share_open)(star, a, scratch);
        memcpy(room, star->price + a * layouts, layouts * sizeof(real));
        for (int64_t j = 0; j < many; j++) {
            real *need = scratch->needs + j * layouts, *pays = scratch->pays + j * layouts;
            if (star->branch[j].late) {
                NAME(add_up)(need, pays, layouts, 1);
                star->branch[j].over[a] = NAME(floor_of)(need, layouts);
                NAME(needed)(need, pays, layouts, star->branch[j].over[a]);
            }
            NAME(add_up)(room, need, layouts, -1);
        }
        for (int64_t turn = 0; turn < many; turn++) {
            int64_t j = backwards ? many - 1 - turn : turn;
            real *need = scratch->needs + j * layouts, *pays = scratch->pays + j * layouts, *over = star->branch[j].over + a;
            if (!star->branch[j].late)
                continue;
            NAME(fill)(fewest, layouts, REAL_INFINITY);
            for (int64_t other = 0; other < many; other++)
                if (other != j)
                    NAME(lower)(fewest, scratch->needs + other * layouts, layouts);
            NAME(add_up)(room, need, layouts, 1);
            for (int64_t l = 0; l < layouts; l++) {
                real free = fewest[l] + room[l];
                fewest[l] = (free > 0 ? free : 0) + pays[l];
            }
            real best = NAME(floor_of)(fewest, layouts);
            *over = best > *over ? best : *over;
            NAME(needed)(need, pays, layouts, *over);
            NAME(add_up)(room, need, layouts, -1);
        }
        NAME(fill)(fewest, layouts, REAL_INFINITY);
        for (int64_t j = 0; j < many; j++)
            NAME(lower)(fewest, scratch->needs + j * layouts, layouts);
        for (int64_t l = 0; l < layouts; l++) {
            real spare = room[l] + fewest[l];
            fewest[l] = (spare > 0 ? spare : 0) * star->parts[l];
        }
        for (int64_t j = 0; j < many; j++)
            if (star->branch[j].late)
                NAME(add_up)(scratch->needs + j * layouts, fewest, layouts, 1);
        NAME(share_close)(star, a, scratch);
    }
}

/* `Share.fill` of `needs` with the price of an alias. */
static inline void NAME(share_fill)(const NAME(Star) *star, const real *restrict price, real part, const NAME(Scratch) *scratch)
{
    int64_t layouts = star->layouts, many = star->branches;
    real *restrict first = scratch->lines, *restrict second = first + scratch->longest;
    NAME(fill)(first, layouts, REAL_INFINITY);
    NAME(fill)(second, layouts, REAL_INFINITY);
    for (int64_t j = 0; j < many; j++) {
        real *restrict needs = scratch->needs + j * layouts;
        const real *restrict pays = scratch->pays + j * layouts;
        for (int64_t l = 0; l < layouts; l++) {
            real need = needs[l] > part * price[l] ? needs[l] : part * price[l];
            need = pays[l] < REAL_INFINITY ? need : 0;
            real more = need > first[l] ? need : first[l];
            second[l] = more < second[l] ? more : second[l];
            first[l] = need < first[l] ? need : first[l];
            needs[l] = need;
        }
    }
    for (int64_t l = 0; l < layouts; l++)  /* the least charge is free up to the second least */
        first[l] = -second[l];
    for (int64_t j = 0; j < many; j++) {
        real *restrict needs = scratch->needs + j * layouts;
        for (int64_t l = 0; l < layouts; l++) {
            needs[l] = needs[l] > second[l] ? needs[l] : second[l];
            first[l] += needs[l];
        }
    }
    for (int64_t l = 0; l < layouts; l++)
        first[l] = first[l] > (real)star->least * price[l] ? price[l] / first[l] : 0;
    for (int64_t j = 0; j < many; j++) {
        real *restrict needs = scratch->needs + j * layouts;
        for (int64_t l = 0; l < layouts; l++)
            needs[l] *= first[l];
    }
}

/* boxed[a] += the probability that a consumer is reached over alias a from a source, where its belief is `odds`. */
static inline void NAME(add_boxed)(real *restrict boxed, const real *restrict odds, const real *restrict over, real direct,
                                   int64_t aliases, real cool)
{
    for (int64_t a = 0; a < aliases; a++) {
        real apart = over[a] < direct ? over[a] - direct : direct - over[a];
        real less = NAME(exponential)(apart * cool);
        boxed[a] += odds[a] * (over[a] < direct ? 1 : less) / (1 + less);
    }
}

/* `Star.shift`. */
CLONED static void NAME(star_shift)(const NAME(Star) *star, real weight, real heat, const NAME(Scratch) *scratch)
{
    const real cool = 1 / heat;
    int64_t sources = star->sources, aliases = star->aliases, layouts = star->layouts, many = star->branches;
    real *belief = scratch->belief, *line = scratch->lines, *boxed = scratch->boxed;
    real *most = line + scratch->longest, *rates = most + scratch->longest;  /* till `share_fill`, which has all lines */
    for (int64_t j = 0; j < many; j++)
        if (star->branch[j].late)
            NAME(star_hear)(star, 1 + j, star->branch[j].sent, heat, line);
    NAME(star_belief)(star, heat, belief, line);
    NAME(soften)(belief, sources * aliases, NAME(floor_of)(belief, sources * aliases), weight * cool);
    const real part = 1 / NAME(sum_of)(belief, sources * aliases);
    NAME(fill)(boxed, many * aliases, 0);
    for (int64_t j = 0; j < many; j++)
        for (int64_t s = 0; s < sources; s++)
            NAME(add_boxed)(boxed + j * aliases, belief + s * aliases, star->branch[j].over, star->branch[j].direct[s], aliases, cool);
    NAME(share_sent)(star, scratch);
    for (int64_t a = 0; a < aliases; a++) {
        const real *restrict price = star->price + a * layouts;
        NAME(share_open)(star, a, scratch);
        NAME(fill)(most, layouts, REAL_TINY);
        for (int64_t j = 0; j < many; j++) {
            real *restrict odds = scratch->odds + j * layouts;
            memcpy(odds, scratch->needs + j * layouts, layouts * sizeof(real));
            NAME(add_up)(odds, scratch->pays + j * layouts, layouts, 1);
            NAME(soften)(odds, layouts, NAME(floor_of)(odds, layouts), cool);
            const real taken = boxed[j * aliases + a] * part / NAME(sum_of)(odds, layouts);
            for (int64_t l = 0; l < layouts; l++) {
                odds[l] *= taken;
                most[l] = odds[l] > most[l] ? odds[l] : most[l];
            }
        }
        for (int64_t l = 0; l < layouts; l++) {
            real rate = (real)star->step * heat / (price[l] > heat ? price[l] : heat), rare = most[l] / (real)star->rare;
            rates[l] = (rate < 1 ? rate : 1) * (rare < 1 ? rare : 1);
            most[l] = 1 / most[l];
        }
        for (int64_t j = 0; j < many; j++) {
            const real *restrict odds = scratch->odds + j * layouts;
            real *restrict needs = scratch->needs + j * layouts;
            for (int64_t l = 0; l < layouts; l++) {
                real change = rates[l] * (odds[l] * most[l] - 1);
                needs[l] *= NAME(exponential)(change < 0 ? change : 0);
            }
        }
        NAME(share_fill)(star, price, (real)star->faint, scratch);
        NAME(share_close)(star, a, scratch);
    }
    for (int64_t j = 0; j < many; j++)
        NAME(star_hear)(star, 1 + j, star->branch[j].sent, heat, line);
}

/* A star hears its later consumers, its charges balanced (1 forwards, 2 backwards) or not (0); what is taken off. */
static double NAME(star_turn)(const NAME(Star) *star, int balance, const NAME(Scratch) *scratch)
{
    double taken = 0;
    if (balance)
        NAME(share_balance)(star, balance == 2, scratch);
    for (int64_t j = 0; j < star->branches; j++)
        if (star->branch[j].late)
            taken += NAME(star_hear)(star, 1 + j, star->branch[j].sent, 0, scratch->lines);
    return taken;
}

/* A star hears its later consumers once more, its charges filled first. */
static void NAME(star_again)(const NAME(Star) *star, int fill, const NAME(Scratch) *scratch)
{
    if (fill)
        NAME(share_sent)(star, scratch);
    for (int64_t a = 0; fill && a < star->aliases; a++) {
        NAME(share_open)(star, a, scratch);
        NAME(share_fill)(star, star->price + a * star->layouts, 0, scratch);
        NAME(share_close)(star, a, scratch);
    }
    NAME(star_turn)(star, 0, scratch);
}
