/* The passes of trws.py, in numbers of type `real`. */

static real NAME(node_belief)(const NAME(Node) *node, real *belief)
{
    memcpy(belief, node->costs, node->labels * sizeof(real));
    for (int64_t e = 0; e < node->earlier + node->later; e++) {
        const int64_t *gather = node->gather + e * node->labels;
        for (int64_t i = 0; i < node->labels; i++)
            belief[i] += node->inbox[gather[i]];
    }
    real floor = NAME(floor_of)(belief, node->labels);
    NAME(take_off)(belief, node->labels, floor);
    return floor;
}

/* What a node sends over an edge, by layout: the least of its part of the belief, of the labels of each, less what came from
   there. */
static void NAME(node_project)(const NAME(Node) *node, int64_t e, const real *belief, int64_t start, int64_t count, real heat,
                               const NAME(Scratch) *scratch, real *sent)
{
    const int64_t *gather = node->gather + e * node->labels;
    real *sums = scratch->lines;
    for (int64_t t = 0; t < count; t++)
        sent[t] = REAL_INFINITY;
    for (int64_t i = 0; i < node->labels; i++) {
        real *low = sent + (gather[i] - start);
        *low = belief[i] < *low ? belief[i] : *low;
    }
    if (heat != 0) {
        real *parts = scratch->rest, cool = 1 / heat;
        for (int64_t i = 0; i < node->labels; i++)
            parts[i] = (sent[gather[i] - start] - belief[i]) * cool;
        for (int64_t i = 0; i < node->labels; i++)
            parts[i] = NAME(exponential)(parts[i]);
        memset(sums, 0, count * sizeof(real));
        for (int64_t i = 0; i < node->labels; i++)
            sums[gather[i] - start] += parts[i];
        for (int64_t t = 0; t < count; t++)
            sent[t] -= heat * NAME(logarithm)(sums[t]);
    }
    for (int64_t t = 0; t < count; t++)
        sent[t] -= node->inbox[start + t];
}

/* Send messages from a node over its edges to one side; what is taken off the messages. */
static double NAME(node_send)(const NAME(Tables) *tables, const NAME(Node) *node, int back, real heat, const real *belief,
                              int64_t size, const NAME(Scratch) *scratch)
{
    int64_t edges = back ? node->earlier : node->later, start = 0, e = 0;
    double taken = 0;
    if (!back)
        for (; e < node->earlier; e++)
            start += tables->links[node->links + e].here;
    for (int64_t i = 0; i < edges; i++, e++) {
        const NAME(Link) *link = tables->links + node->links + e;
        real *sent = scratch->sent, *inbox = link->inbox, *part = scratch->part;
        for (int64_t k = 0; k < size; k++)
            part[k] = belief[k] * (real)link->part;
        if (node->star >= 0)
            NAME(star_tell)(tables->stars + node->star, link->branch, part, heat, scratch, inbox);
        else {
            NAME(node_project)(node, e, part, start, link->here, heat, scratch, sent);
            start += link->here;
            if (link->star >= 0 && back)  /* heard when its turn comes */
                memcpy(tables->stars[link->star].branch[link->branch - 1].sent, sent, link->here * sizeof(real));
            else if (link->star >= 0)
                NAME(star_hear)(tables->stars + link->star, link->branch, sent, heat, scratch->lines);
            else if (link->by_row)
                NAME(least_down)(link->seconds, link->here, link->there, sent, heat, inbox, scratch->lines);
            else
                NAME(least_across)(link->seconds, link->there, link->here, sent, heat, inbox, scratch->lines);
            if (link->star >= 0)
                continue;
        }
        if (back || node->star >= 0) {
            real floor = NAME(floor_of)(inbox, link->there);
            NAME(take_off)(inbox, link->there, floor);
            taken += floor;
        }
    }
    return taken;
}

static double NAME(pass)(const NAME(Tables) *tables, int kind, real heat, int balance, const NAME(Scratch) *scratch)
{
    const int back = kind == BACKWARD;
    double bound = 0;
    for (int64_t turn = 0; turn < tables->count; turn++) {
        const NAME(Node) *node = tables->nodes + (back ? tables->count - 1 - turn : turn);
        const NAME(Star) *star = node->star >= 0 ? tables->stars + node->star : NULL;
        real *belief = scratch->belief, floor;
        int64_t size = star ? star->sources * star->aliases : node->labels;
        if (kind == HEAR || kind == FILL) {
            if (star)
                NAME(star_again)(star, kind == FILL, scratch);
            continue;
        }
        if (!back && !node->later)
            continue;
        if (star && back && heat != 0)
            NAME(star_shift)(star, node->weight, heat, scratch);
        else if (star && back)
            bound += NAME(star_turn)(star, balance, scratch);
        if (star) {
            NAME(star_belief)(star, heat, belief, scratch->lines);
            floor = back ? NAME(floor_of)(belief, size) : 0;
            NAME(take_off)(belief, size, floor);
        } else
            floor = NAME(node_belief)(node, belief);
        if (isnan(NAME(sum_of)(belief, size)))  /* comparisons pass over what is not a number */
            bound = Py_NAN;
        bound += floor + NAME(node_send)(tables, node, back, heat, belief, size, scratch);
    }
    return bound;
}

/* A pass over tables; -1 where there is no memory. sizes: the most labels or pairs of a node, the longest line, and the most
   of a star's branches times layouts and times aliases. */
static int NAME(pass_on)(const Py_buffer *nodes, const Py_buffer *links, const Py_buffer *stars, const int64_t *sizes, int kind,
                         double heat, int balance, double *bound)
{
    NAME(Tables) tables = {nodes->buf, links->buf, stars->buf, nodes->len / (int64_t)sizeof(NAME(Node))};
    NAME(Scratch) scratch;
    real *room = PyMem_Malloc((3 * sizes[0] + 4 * sizes[1] + 3 * sizes[2] + sizes[3] + 1) * sizeof(real));
    if (!room)
        return -1;
    scratch.belief = room;
    scratch.rest = scratch.belief + sizes[0];
    scratch.part = scratch.rest + sizes[0];
    scratch.sent = scratch.part + sizes[0];
    scratch.lines = scratch.sent + sizes[1];
    scratch.needs = scratch.lines + 3 * sizes[1];
    scratch.pays = scratch.needs + sizes[2];
    scratch.odds = scratch.pays + sizes[2];
    scratch.boxed = scratch.odds + sizes[2];
    scratch.longest = sizes[1];
    *bound = NAME(pass)(&tables, kind, (real)heat, balance, &scratch);
    PyMem_Free(room);
    return 0;
}
