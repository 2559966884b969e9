/* The sweeps of trws.py and stars.py as machine code. compiled.py lays out the tables that are read here.

   The middle part is compiled twice, by including this file in itself: for numbers of type double, and of type float. */

#ifndef real

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

/* On the larger vectors of newer processors too; the results are the same. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx2", "default")))
#else
#define CLONED
#endif

#define LANES 32  /* numbers that are compared at a time */

#define real double
#define NAME(name) name##_double
#include "sweeps.c"
#undef real
#undef NAME
#define real float
#define NAME(name) name##_float
#include "sweeps.c"

static PyObject *sweep(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer nodes, links, stars, sizes;
    int single, back, balance, failed;
    double bound = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*y*pii", &nodes, &links, &stars, &sizes, &single, &back, &balance))
        return NULL;
    failed = (single ? run_float : run_double)(&nodes, &links, &stars, sizes.buf, back, balance, &bound);
    PyBuffer_Release(&nodes);
    PyBuffer_Release(&links);
    PyBuffer_Release(&stars);
    PyBuffer_Release(&sizes);
    return failed ? PyErr_NoMemory() : PyFloat_FromDouble(bound);
}

static PyMethodDef methods[] = {
    {"sweep", sweep, METH_VARARGS, "sweep(nodes, links, stars, sizes, single, back, balance): one way; returns the bound."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sweeps", "The sweeps of trws.py as machine code.", 0, methods,
                                    NULL, NULL, NULL, NULL};

_Static_assert(sizeof(void *) == 8, "a row holds addresses as numbers of 8 bytes");

/* `rows`: the bytes of a row of each table, by which compiled.py knows that the module was built from these sources. */
PyMODINIT_FUNC PyInit__sweeps(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *sizes = Py_BuildValue("(nnnn)", (Py_ssize_t)sizeof(Node_double), (Py_ssize_t)sizeof(Link_double),
                                    (Py_ssize_t)sizeof(Star_double), (Py_ssize_t)sizeof(Branch_double));
    if (!made || !sizes || PyModule_AddObject(made, "rows", sizes) < 0) {
        Py_XDECREF(made);
        Py_XDECREF(sizes);
        return NULL;
    }
    return made;
}

#else

typedef struct {
    const real *costs;
    const real *inbox;
    const int64_t *gather;
    int64_t labels, star, links, earlier, later;
} NAME(Node);

typedef struct {
    const real *seconds;
    real *inbox;
    double part;
    int64_t here, there, by_row, star, branch;
} NAME(Link);

typedef struct {
    real *shares, *over, *direct, *sent;
    const int64_t *columns, *source, *place;
    int64_t layouts, straight, late;
} NAME(Branch);

typedef struct {
    const real *seconds, *price, *equal;
    real *made;
    const NAME(Branch) *branch;
    int64_t sources, aliases, layouts, branches;
} NAME(Star);

typedef struct {
    const NAME(Node) *nodes;
    const NAME(Link) *links;
    const NAME(Star) *stars;
    int64_t count;
    real *belief, *rest;  /* by label, or by pair of a star */
    real *sent, *line, *other;  /* by layout */
    real *needs, *pays;  /* by branch and layout of a star */
} NAME(Tables);

/* --- numbers side by side ---------------------------------------------------------------------------------------------- */

static inline void NAME(lower)(real *restrict least, const real *restrict x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        least[i] = x[i] < least[i] ? x[i] : least[i];
}

static inline real NAME(least_of)(const real *x, int64_t count)
{
    real low[LANES], least = (real)Py_HUGE_VAL;
    if (count >= LANES) {
        memcpy(low, x + count - LANES, sizeof low);
        for (int64_t i = 0; i + LANES < count; i += LANES)
            NAME(lower)(low, x + i, LANES);
        x = low;
        count = LANES;
    }
    for (int64_t i = 0; i < count; i++)
        least = x[i] < least ? x[i] : least;
    return least;
}

static inline void NAME(subtract)(real *x, int64_t count, real much)
{
    for (int64_t i = 0; i < count; i++)
        x[i] -= much;
}

static inline void NAME(fill)(real *restrict x, int64_t count, real with)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = with;
}

static inline void NAME(add)(real *restrict x, const real *restrict more, int64_t count, real times)
{
    for (int64_t i = 0; i < count; i++)
        x[i] += times * more[i];
}

/* out[j] = min over i of m[i, j] + add[i] */
CLONED static void NAME(least_down)(const real *m, int64_t rows, int64_t columns, const real *add, real *restrict out)
{
    NAME(fill)(out, columns, (real)Py_HUGE_VAL);
    for (int64_t i = 0; i < rows; i++) {
        const real *row = m + i * columns, more = add ? add[i] : 0;
        for (int64_t j = 0; j < columns; j++) {
            real sum = row[j] + more;
            out[j] = sum < out[j] ? sum : out[j];
        }
    }
}

/* out[i] = min over j of m[i, j] + add[j]; line has room for `columns` */
CLONED static void NAME(least_across)(const real *m, int64_t rows, int64_t columns, const real *add, real *out, real *line)
{
    for (int64_t i = 0; i < rows; i++) {
        const real *row = m + i * columns;
        for (int64_t j = 0; j < columns; j++)
            line[j] = add ? row[j] + add[j] : row[j];
        out[i] = NAME(least_of)(line, columns);
    }
}

/* --- stars, as stars.py says -------------------------------------------------------------------------------------------- */

CLONED static void NAME(star_belief)(const NAME(Star) *star, real *belief)
{
    for (int64_t s = 0; s < star->sources; s++) {
        real *row = belief + s * star->aliases;
        for (int64_t a = 0; a < star->aliases; a++)
            row[a] = star->seconds[s * star->aliases + a] + star->made[s];
        for (int64_t j = 0; j < star->branches; j++) {
            const real *over = star->branch[j].over, direct = star->branch[j].direct[s];
            for (int64_t a = 0; a < star->aliases; a++)
                row[a] += over[a] < direct ? over[a] : direct;
        }
    }
}

CLONED static void NAME(star_message)(const NAME(Star) *star, int64_t number, const real *belief, real part,
                                      const NAME(Tables) *room, real *out)
{
    int64_t sources = star->sources, aliases = star->aliases;
    if (number == 0) {
        NAME(least_across)(belief, sources, aliases, NULL, out, room->line);
        for (int64_t s = 0; s < sources; s++)
            out[s] = part * out[s] - star->made[s];
        return;
    }
    const NAME(Branch) *branch = star->branch + number - 1;
    real *rest = room->rest;
    for (int64_t s = 0; s < sources; s++)
        for (int64_t a = 0; a < aliases; a++) {
            real came = branch->over[a] < branch->direct[s] ? branch->over[a] : branch->direct[s];
            rest[s * aliases + a] = part * belief[s * aliases + a] - came;
        }
    NAME(least_down)(rest, sources, aliases, NULL, room->line);
    NAME(least_down)(branch->shares, aliases, branch->layouts, room->line, out);
    for (int64_t i = 0; i < branch->straight; i++) {
        real least = NAME(least_of)(rest + branch->source[i] * aliases, aliases), *to = out + branch->place[i];
        *to = least < *to ? least : *to;
    }
}

static double NAME(star_receive)(const NAME(Star) *star, int64_t number, const real *sent, real *line)
{
    if (number == 0) {
        real floor = NAME(least_of)(sent, star->sources);
        for (int64_t s = 0; s < star->sources; s++)
            star->made[s] = sent[s] - floor;
        return floor;
    }
    const NAME(Branch) *branch = star->branch + number - 1;
    memmove(branch->sent, sent, branch->layouts * sizeof(real));
    NAME(least_across)(branch->shares, star->aliases, branch->layouts, sent, branch->over, line);
    real floor = NAME(least_of)(branch->over, star->aliases);
    for (int64_t i = 0; i < branch->straight; i++)
        floor = sent[branch->place[i]] < floor ? sent[branch->place[i]] : floor;
    NAME(subtract)(branch->over, star->aliases, floor);
    for (int64_t i = 0; i < branch->straight; i++)
        branch->direct[branch->source[i]] = sent[branch->place[i]] - floor;
    return floor;
}

/* What a consumer needs as its share by layout, to send `value` to an alias. */
static inline void NAME(needed)(real *restrict need, const real *restrict pays, int64_t layouts, real value)
{
    for (int64_t l = 0; l < layouts; l++)
        need[l] = value - pays[l] > 0 ? value - pays[l] : 0;
}

/* `Star.balance` of one alias; needs, pays [branches, layouts]. The values that consumers send are left in `over`. */
CLONED static void NAME(balance_alias)(const NAME(Star) *star, int64_t a, int backwards, const NAME(Tables) *work)
{
    int64_t layouts = star->layouts, many = star->branches;
    real *restrict room = work->line, *restrict free = work->other;
    memcpy(room, star->price + a * layouts, layouts * sizeof(real));
    for (int64_t j = 0; j < many; j++) {
        real *need = work->needs + j * layouts, *pays = work->pays + j * layouts;
        if (star->branch[j].late) {
            NAME(add)(need, pays, layouts, 1);
            star->branch[j].over[a] = NAME(least_of)(need, layouts);
            NAME(needed)(need, pays, layouts, star->branch[j].over[a]);
        }
        NAME(add)(room, need, layouts, -1);
    }
    for (int64_t turn = 0; turn < many; turn++) {
        int64_t j = backwards ? many - 1 - turn : turn;
        real *need = work->needs + j * layouts, *pays = work->pays + j * layouts, *value = star->branch[j].over + a;
        if (!star->branch[j].late)
            continue;
        NAME(fill)(free, layouts, (real)Py_HUGE_VAL);
        for (int64_t other = 0; other < many; other++)
            if (other != j)
                NAME(lower)(free, work->needs + other * layouts, layouts);
        NAME(add)(room, need, layouts, 1);
        for (int64_t l = 0; l < layouts; l++) {
            real more = free[l] + room[l];
            free[l] = (more > 0 ? more : 0) + pays[l];
        }
        real best = NAME(least_of)(free, layouts);
        *value = best > *value ? best : *value;
        NAME(needed)(need, pays, layouts, *value);
        NAME(add)(room, need, layouts, -1);
    }
    NAME(fill)(free, layouts, (real)Py_HUGE_VAL);
    for (int64_t j = 0; j < many; j++)
        NAME(lower)(free, work->needs + j * layouts, layouts);
    for (int64_t l = 0; l < layouts; l++) {
        real spare = room[l] + free[l];
        free[l] = (spare > 0 ? spare : 0) * star->equal[l];
    }
    for (int64_t j = 0; j < many; j++)
        if (star->branch[j].late)
            NAME(add)(work->needs + j * layouts, free, layouts, 1);
}

static void NAME(star_balance)(const NAME(Star) *star, int backwards, const NAME(Tables) *work)
{
    int64_t layouts = star->layouts, many = star->branches;
    NAME(fill)(work->pays, many * layouts, (real)Py_HUGE_VAL);  /* infinite where a consumer cannot have a layout */
    for (int64_t j = 0; j < many; j++)
        for (int64_t t = 0; t < star->branch[j].layouts; t++)
            work->pays[j * layouts + star->branch[j].columns[t]] = star->branch[j].sent[t];
    for (int64_t a = 0; a < star->aliases; a++) {
        NAME(fill)(work->needs, many * layouts, 0);
        for (int64_t j = 0; j < many; j++)
            for (int64_t t = 0; t < star->branch[j].layouts; t++)
                work->needs[j * layouts + star->branch[j].columns[t]] = star->branch[j].shares[a * star->branch[j].layouts + t];
        NAME(balance_alias)(star, a, backwards, work);
        for (int64_t j = 0; j < many; j++)
            for (int64_t t = 0; t < star->branch[j].layouts; t++)
                star->branch[j].shares[a * star->branch[j].layouts + t] = work->needs[j * layouts + star->branch[j].columns[t]];
    }
}

/* --- sweeps, as trws.py says ---------------------------------------------------------------------------------------------- */

static real NAME(node_belief)(const NAME(Node) *node, real *belief)
{
    memcpy(belief, node->costs, node->labels * sizeof(real));
    for (int64_t e = 0; e < node->earlier + node->later; e++) {
        const int64_t *gather = node->gather + e * node->labels;
        for (int64_t i = 0; i < node->labels; i++)
            belief[i] += node->inbox[gather[i]];
    }
    return NAME(least_of)(belief, node->labels);
}

/* What a node sends over edge e, by layout: the least part of its belief among its labels, less what came from there. */
static void NAME(node_project)(const NAME(Node) *node, int64_t e, const real *belief, real part, int64_t start, int64_t count, real *sent)
{
    const int64_t *gather = node->gather + e * node->labels;
    NAME(fill)(sent, count, (real)Py_HUGE_VAL);
    for (int64_t i = 0; i < node->labels; i++) {
        real *low = sent + (gather[i] - start);
        *low = belief[i] < *low ? belief[i] : *low;
    }
    for (int64_t t = 0; t < count; t++)
        sent[t] = part * sent[t] - node->inbox[start + t];
}

/* Sends messages over the edges of a node to one side; what is subtracted from them. */
static double NAME(node_send)(const NAME(Tables) *tables, const NAME(Node) *node, int back)
{
    int64_t edges = back ? node->earlier : node->later, start = 0, e = 0;
    double taken = 0;
    if (!back)
        for (; e < node->earlier; e++)
            start += tables->links[node->links + e].here;
    for (int64_t i = 0; i < edges; i++, e++) {
        const NAME(Link) *link = tables->links + node->links + e;
        if (node->star >= 0)
            NAME(star_message)(tables->stars + node->star, link->branch, tables->belief, (real)link->part, tables, link->inbox);
        else {
            NAME(node_project)(node, e, tables->belief, (real)link->part, start, link->here, tables->sent);
            start += link->here;
            if (link->star >= 0 && back) {  /* received when the star's turn comes */
                memcpy(tables->stars[link->star].branch[link->branch - 1].sent, tables->sent, link->here * sizeof(real));
                continue;
            }
            if (link->star >= 0) {
                NAME(star_receive)(tables->stars + link->star, link->branch, tables->sent, tables->line);
                continue;
            }
            if (link->by_row)
                NAME(least_down)(link->seconds, link->here, link->there, tables->sent, link->inbox);
            else
                NAME(least_across)(link->seconds, link->there, link->here, tables->sent, link->inbox, tables->line);
        }
        if (back || node->star >= 0) {
            real floor = NAME(least_of)(link->inbox, link->there);
            NAME(subtract)(link->inbox, link->there, floor);
            taken += floor;
        }
    }
    return taken;
}

/* All nodes one way; -1 if there is no memory. A belief that is not a number shows in the bound. */
static int NAME(run)(const Py_buffer *nodes, const Py_buffer *links, const Py_buffer *stars, const int64_t *sizes, int back,
                     int balance, double *bound)
{
    NAME(Tables) tables = {nodes->buf, links->buf, stars->buf, nodes->len / (int64_t)sizeof(NAME(Node)), 0, 0, 0, 0, 0, 0, 0};
    real *room = PyMem_Malloc((2 * sizes[0] + 3 * sizes[1] + 2 * sizes[2]) * sizeof(real));
    if (!room)
        return -1;
    tables.belief = room;
    tables.rest = tables.belief + sizes[0];
    tables.sent = tables.rest + sizes[0];
    tables.line = tables.sent + sizes[1];
    tables.other = tables.line + sizes[1];
    tables.needs = tables.other + sizes[1];
    tables.pays = tables.needs + sizes[2];
    for (int64_t turn = 0; turn < tables.count; turn++) {
        const NAME(Node) *node = tables.nodes + (back ? tables.count - 1 - turn : turn);
        const NAME(Star) *star = node->star >= 0 ? tables.stars + node->star : NULL;
        int64_t size = star ? star->sources * star->aliases : node->labels;
        real floor, sum = 0;
        if (!back && !node->later)
            continue;
        if (star && back && balance)
            NAME(star_balance)(star, balance == 2, &tables);
        for (int64_t j = 0; star && back && j < star->branches; j++)
            if (star->branch[j].late)
                *bound += NAME(star_receive)(star, 1 + j, star->branch[j].sent, tables.line);
        if (star) {
            NAME(star_belief)(star, tables.belief);
            floor = NAME(least_of)(tables.belief, size);
        } else
            floor = NAME(node_belief)(node, tables.belief);
        for (int64_t i = 0; i < size; i++) {
            sum += tables.belief[i];
            tables.belief[i] -= floor;
        }
        *bound += floor + NAME(node_send)(&tables, node, back);
        if (isnan(sum))
            *bound = Py_NAN;
    }
    PyMem_Free(room);
    return 0;
}

#endif
