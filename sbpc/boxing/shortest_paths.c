/* The cheapest totals over the edges of a graph, as shortest_paths.py says: relaxed in turn, for some sources at a time. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* On the larger vectors of newer processors too; the results are the same. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx2", "default")))
#else
#define CLONED
#endif

#define LANES 32 /* sources at a time */

typedef struct {
    const int64_t *into, *before; /* by node where the edges to it begin, and where the last end; by edge where it comes from */
    const int64_t *out, *after;   /* the same of the edges from it; by edge where it leads */
    const double *prices;         /* by edge of `before` */
    int64_t nodes;
} Graph;

/* When a node's totals were lowered last, and when they were looked for last: the number of that look, 0 for never. */
typedef struct {
    int64_t lowered, looked;
} Times;

/* The least of what a node has and of the totals that its edges give it, [LANES], where these are new; whether any is lower. */
CLONED static int lower(const Graph *graph, int64_t node, double *totals, const Times *times)
{
    double least[LANES], *own = totals + node * LANES;
    int lowered = 0;
    memcpy(least, own, sizeof least);
    for (int64_t edge = graph->into[node]; edge < graph->into[node + 1]; edge++) {
        if (times[graph->before[edge]].lowered <= times[node].looked)
            continue;
        const double *row = totals + graph->before[edge] * LANES, price = graph->prices[edge];
        for (int k = 0; k < LANES; k++) {
            double found = row[k] + price;
            least[k] = found < least[k] ? found : least[k];
        }
    }
    for (int k = 0; k < LANES; k++)
        lowered |= least[k] < own[k];
    memcpy(own, least, sizeof least);
    return lowered;
}

/* The totals from up to LANES sources to all nodes, [nodes, LANES]; waiting: by node, one that was lowered leads there. */
static void relax(const Graph *graph, const int64_t *sources, int64_t count, double *totals, char *waiting, Times *times)
{
    int64_t look = 1;
    for (int64_t i = 0; i < graph->nodes * LANES; i++)
        totals[i] = Py_HUGE_VAL;
    memset(times, 0, graph->nodes * sizeof *times);
    for (int64_t k = 0; k < count; k++) {
        totals[sources[k] * LANES + k] = 0;
        times[sources[k]].lowered = look;
        for (int64_t edge = graph->out[sources[k]]; edge < graph->out[sources[k] + 1]; edge++)
            waiting[graph->after[edge]] = 1;
    }
    for (int again = 1; again;) {
        again = 0;
        for (int64_t node = 0; node < graph->nodes; node++) {
            if (!waiting[node])
                continue;
            waiting[node] = 0;
            int lowered = lower(graph, node, totals, times);
            times[node].looked = look++;
            if (!lowered)
                continue;
            times[node].lowered = look;
            again = 1;
            for (int64_t edge = graph->out[node]; edge < graph->out[node + 1]; edge++)
                waiting[graph->after[edge]] = 1;
        }
    }
}

static PyObject *totals(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer into, before, out, after, prices, sources, found;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*w*", &into, &before, &out, &after, &prices, &sources, &found))
        return NULL;
    Graph graph = {into.buf, before.buf, out.buf, after.buf, prices.buf, into.len / 8 - 1};
    double *room = malloc(graph.nodes * LANES * sizeof *room), *rows = found.buf;
    char *waiting = calloc(graph.nodes, 1);
    Times *times = malloc(graph.nodes * sizeof *times);
    int64_t count = sources.len / 8;
    for (int64_t first = 0; room && waiting && times && first < count; first += LANES) {
        int64_t some = count - first < LANES ? count - first : LANES;
        relax(&graph, (const int64_t *)sources.buf + first, some, room, waiting, times);
        for (int64_t k = 0; k < some; k++)
            for (int64_t node = 0; node < graph.nodes; node++)
                rows[(first + k) * graph.nodes + node] = room[node * LANES + k];
    }
    int failed = !room || !waiting || !times;
    free(room);
    free(waiting);
    free(times);
    Py_buffer *buffers[] = {&into, &before, &out, &after, &prices, &sources, &found};
    for (int i = 0; i < 7; i++)
        PyBuffer_Release(buffers[i]);
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

_Static_assert(sizeof(void *) == 8, "numpy counts in numbers of 8 bytes");

static PyMethodDef methods[] = {
    {"totals", totals, METH_VARARGS, "totals(into, before, out, after, prices, sources, found): fills `found`, as shortest_paths.py says."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shortest_paths", "The totals of shortest_paths.py as machine code.", 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shortest_paths(void)
{
    return PyModule_Create(&module);
}
