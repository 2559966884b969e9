/* The sweeps of trws.py as machine code: compiled.py lays the tables that are read here, of its arrays' own memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

/* On the larger vectors of newer processors too; the results are the same. */
#if defined(CLONED)
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("avx2", "default")))
#else
#define CLONED
#endif

enum { FORWARD, BACKWARD, HEAR, FILL };

#define LANES 32  /* numbers that are compared or added at a time */

/* Everything twice. The exponential is 2 to a whole power times a series of the rest, the logarithm its inverse: EXP_SHIFT added
   to a number leaves its whole part in the last bits, INTEGERS is where those are whole numbers, and LOG2_HIGH has few bits. */
#define real double
#define bits uint64_t
#define NAME(name) name##_double
#define MANTISSA 52
#define EXPONENT_OF_1 1023
#define EXP_SHIFT 6755399441055744.0
#define EXP_LEAST -708.0
#define INTEGERS 4503599627370496.0
#define LOG2_HIGH 0.693147180369123816490
#define LOG2_LOW 1.90821492927058770002e-10
#define REAL_INFINITY ((double)Py_HUGE_VAL)
#define REAL_TINY 2.2250738585072014e-308
#define EXP_TERMS(x)                                                                                                     \
    (1 + x * (1 + x * (1. / 2 + x * (1. / 6 + x * (1. / 24 + x * (1. / 120 + x * (1. / 720 + x * (1. / 5040 +             \
     x * (1. / 40320 + x * (1. / 362880 + x * (1. / 3628800 + x * (1. / 39916800 + x * (1. / 479001600)))))))))))))
#define LOG_TERMS(t)                                                                                                     \
    (2 + t * (2. / 3 + t * (2. / 5 + t * (2. / 7 + t * (2. / 9 + t * (2. / 11 + t * (2. / 13 + t * (2. / 15 +             \
     t * (2. / 17 + t * (2. / 19))))))))))
#include "tables.h"
#include "least.h"
#include "share.h"
#include "trws.h"
#undef real
#undef bits
#undef NAME
#undef MANTISSA
#undef EXPONENT_OF_1
#undef EXP_SHIFT
#undef EXP_LEAST
#undef INTEGERS
#undef LOG2_HIGH
#undef LOG2_LOW
#undef REAL_INFINITY
#undef REAL_TINY
#undef EXP_TERMS
#undef LOG_TERMS

#define real float
#define bits uint32_t
#define NAME(name) name##_float
#define MANTISSA 23
#define EXPONENT_OF_1 127
#define EXP_SHIFT 12582912.0f
#define EXP_LEAST -87.0f
#define INTEGERS 8388608.0f
#define LOG2_HIGH 0.693359375f
#define LOG2_LOW -2.12194440e-4f
#define REAL_INFINITY ((float)Py_HUGE_VAL)
#define REAL_TINY 1.17549435e-38f
#define EXP_TERMS(x)                                                                                                     \
    (1 + x * (1 + x * (1.f / 2 + x * (1.f / 6 + x * (1.f / 24 + x * (1.f / 120 + x * (1.f / 720 + x * (1.f / 5040))))))))
#define LOG_TERMS(t) (2 + t * (2.f / 3 + t * (2.f / 5 + t * (2.f / 7 + t * (2.f / 9)))))
#include "tables.h"
#include "least.h"
#include "share.h"
#include "trws.h"

static PyObject *pass_on(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer nodes, links, stars, sizes;
    int single, kind, balance, failed;
    double heat, bound = 0;
    if (!PyArg_ParseTuple(args, "y*y*y*y*pidi", &nodes, &links, &stars, &sizes, &single, &kind, &heat, &balance))
        return NULL;
    failed = (single ? pass_on_float : pass_on_double)(&nodes, &links, &stars, sizes.buf, kind, heat, balance, &bound);
    PyBuffer_Release(&nodes);
    PyBuffer_Release(&links);
    PyBuffer_Release(&stars);
    PyBuffer_Release(&sizes);
    return failed ? PyErr_NoMemory() : PyFloat_FromDouble(bound);
}

static PyMethodDef methods[] = {
    {"pass_on", pass_on, METH_VARARGS,
     "pass_on(nodes, links, stars, sizes, single, kind, heat, balance): one pass, as compiled.py says; what it finds of the bound."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sweeps", "The sweeps of trws.py as machine code.", 0, methods,
                                    NULL, NULL, NULL, NULL};

_Static_assert(sizeof(void *) == 8, "a row holds addresses as numbers of 8 bytes");

/* The module; `rows`: the bytes of a row of each table, by which compiled.py knows that it was built of these sources. */
PyMODINIT_FUNC PyInit__sweeps(void)
{
    const Py_ssize_t rows[] = {sizeof(Node_double), sizeof(Link_double), sizeof(Star_double), sizeof(Branch_double)};
    PyObject *made = PyModule_Create(&module), *sizes = Py_BuildValue("(nnnn)", rows[0], rows[1], rows[2], rows[3]);
    if (!made || !sizes || PyModule_AddObject(made, "rows", sizes) < 0) {
        Py_XDECREF(made);
        Py_XDECREF(sizes);
        return NULL;
    }
    return made;
}
