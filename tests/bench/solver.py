"""How fast and how near the bound the solver is on hand-built joint graphs of GPT: `python tests/bench/solver.py`.

Modelled: factor rules on every axis, ring collectives, paths over single-axis boxings, parameters with one home for the
weight and its gradient. Not modelled: orders of splits, merged axes, memory.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.problem import Problem, Value, Variable
from sbpc.solver.search import solve

KINDS = {"ideal": (1e12, 1e12, 0.0, 0.0, 0.0), "h100": (989e12, 450e9, 3e-6, 4e-6, 1 / 3.35e12)}


@dataclass
class Graph:
    """A problem under construction; a value is named by the text of its factors, as in "b s d"."""

    sizes: dict[str, int]
    mesh: tuple[int, ...]
    kind: str
    variables: list[Variable] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    closures: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def shape(self, text: str) -> tuple[int, ...]:
        return tuple(self.sizes[f] for f in text.split())

    def op(self, ins, outs: list[str], lin=(), fix: str = "", points: float = 1.0) -> list[tuple[int, str]]:
        """One op on `ins`, [(value, factors)]; returns its values. lin: (inputs, outputs) that may be P together."""
        texts = [text for _, text in ins]
        factors = sorted({f for text in [*texts, *outs] for f in text.split()})
        found = [(("B",) * len(texts), ("B",) * len(outs), None)]
        for f in factors:
            if f not in fix.split() and self.sizes[f] > 1:
                at = [text.split().index(f) if f in text.split() else "B" for text in texts]
                to = [text.split().index(f) if f in text.split() else "P" for text in outs]
                found.append((tuple(at), tuple(to), f))
        for i, o in lin:
            states = [
                tuple("P" if n in held else "B" for n in range(many))
                for held, many in ((i, len(texts)), (o, len(outs)))
            ]
            found.append((*states, None))
        peak, _, _, launch, memory = KINDS[self.kind]
        names = list(itertools.product(range(len(found)), repeat=len(self.mesh)))
        costs = []
        for digits in names:
            local = dict.fromkeys(factors, 1.0)
            for axis, d in enumerate(digits):
                if found[d][2]:
                    local[found[d][2]] /= self.mesh[axis]
            local = {f: -(-self.sizes[f] * part // 1) for f, part in local.items()}
            volume = np.prod([local[f] for f in factors])
            moved = sum(np.prod([local[f] for f in text.split()]) for text in [*texts, *outs]) * 2
            costs.append(max(points * volume / peak, moved * memory, launch))
        at = len(self.variables)
        self.variables.append(Variable(f"op{at}", np.array(costs), np.array(names)))
        for number, (value, text) in enumerate(ins):
            assert self.shape(text) == self.shape(value[1]), (text, value)
            self.values[value[0]].consumers.append((at, self.port([s[0][number] for s in found], names, text)))
        return [self.value(at, [s[1][number] for s in found], names, text) for number, text in enumerate(outs)]

    def parameter(self, text: str) -> tuple[int, str]:
        """A weight with a home layout, free to be anywhere."""
        states = [*range(len(text.split())), "B"]
        names = list(itertools.product(range(len(states)), repeat=len(self.mesh)))
        at = len(self.variables)
        self.variables.append(Variable(f"w{at}", np.zeros(len(names)), np.array(names)))
        return self.value(at, states, names, text)

    def land(self, parameter, gradient) -> None:
        """The gradient comes to the home of the parameter."""
        made = self.values[parameter[0]]
        self.values[gradient[0]].consumers.append((made.producer, made.out))

    def value(self, at, states, names, text) -> tuple[int, str]:
        self.values.append(Value(at, self.port(states, names, text), [], self.closure(self.shape(text))))
        return len(self.values) - 1, text

    def port(self, states, names, text) -> np.ndarray:
        dims = len(text.split())
        number = np.array([dims if s == "B" else dims + 1 if s == "P" else s for s in states])
        return (number[np.array(names)] * (dims + 2) ** np.arange(len(self.mesh))[::-1]).sum(1)

    def closure(self, shape) -> np.ndarray:
        """Seconds between all layouts of a tensor of this shape, 2 bytes an element."""
        if shape in self.closures:
            return self.closures[shape]
        dims, (_, wire, latency, _, _) = len(shape), KINDS[self.kind]
        layouts = list(itertools.product(range(dims + 2), repeat=len(self.mesh)))
        number = {states: at for at, states in enumerate(layouts)}
        seconds = np.full((len(layouts),) * 2, np.inf)
        np.fill_diagonal(seconds, 0)
        for states, (axis, p) in itertools.product(layouts, enumerate(self.mesh)):
            rest = [self.mesh[a] for a, s in enumerate(states) if a != axis and s < dims]
            n = 2 * np.prod(shape) / np.prod(rest)
            for to in range(dims + 2):
                a, b = states[axis], to
                if a == b:
                    continue
                kinds = max(0, a - dims + 1), max(0, b - dims + 1)  # 0: split, 1: broadcast, 2: partial
                ring = {(0, 1): 1, (2, 0): 1, (2, 1): 2, (0, 0): 1 / p}.get(kinds, 0)
                rounds = 0 if ring == 0 else 2 * (p - 1) if ring == 2 else p - 1
                cost = ring * (p - 1) / p * n / wire + rounds * latency
                seconds[number[states], number[(*states[:axis], to, *states[axis + 1 :])]] = cost
        for at in range(len(layouts)):
            np.minimum(seconds, seconds[:, at, None] + seconds[None, at], out=seconds)
        self.closures[shape] = seconds
        return seconds


def gpt(layers: int, mesh: tuple[int, ...], kind: str = "ideal", batch: int = 8, llama: bool = False) -> Problem:
    """The joint graph of a GPT: tokens, layers, head, loss, and all gradients."""
    g = Graph(dict(b=batch, s=1024, t=1024, d=1024, h=16, e=64, k=64, f=4096, v=32768), mesh, kind)
    (tokens,), tape = g.op([], ["b s"], points=0), []

    def mm(x, w, ins: str, weight: str, out: str):
        (y,) = g.op([(x, ins), (w, weight)], [out], [((0,), (0,)), ((1,), (0,))], points=2)

        def back(dy):
            (dx,) = g.op([(dy, out), (w, weight)], [ins], [((0,), (0,)), ((1,), (0,))], points=2)
            (dw,) = g.op([(x, ins), (dy, out)], [weight], [((0,), (0,)), ((1,), (0,))], points=2)
            g.land(w, dw)
            return dx

        return y, back

    def norm(x):
        w = g.parameter("d")
        y, r = g.op([(x, "b s d"), (w, "d")], ["b s d", "b s"], fix="d")

        def back(dy):
            dx, dw = g.op([(dy, "b s d"), (x, "b s d"), (r, "b s"), (w, "d")], ["b s d", "d"], fix="d")
            g.land(w, dw)
            return dx

        return y, back

    def add(a, b, text="b s d"):
        return g.op([(a, text), (b, text)], [text], [((0, 1), (0,))])[0]

    def layer(x):
        wq, wk, wv, wo = (g.parameter("d h e") for _ in range(4))
        up, down = g.parameter("d f"), g.parameter("f d")
        h, b1 = norm(x)
        q, bq = mm(h, wq, "b s d", "d h e", "b s h e")
        k, bk = mm(h, wk, "b s d", "d h e", "b s h e")
        v, bv = mm(h, wv, "b s d", "d h e", "b s h e")
        a, lse = g.op([(q, "b s h e"), (k, "b t h e"), (v, "b t h e")], ["b s h e", "b s h"], fix="s t e", points=4)
        o, bo = mm(a, wo, "b s h e", "d h e", "b s d")
        x2 = add(x, o)
        h2, b2 = norm(x2)
        u, bu = mm(h2, up, "b s d", "d f", "b s f")
        act = g.op([(u, "b s f")], ["b s f"])[0]
        m, bd = mm(act, down, "b s f", "f d", "b s d")
        y = add(x2, m)

        def back(dy):
            da = bd(dy)
            du = g.op([(da, "b s f"), (u, "b s f")], ["b s f"], [((0,), (0,))])[0]
            dx2 = add(dy, b2(bu(du)))
            dout = bo(dx2)
            ins = [(dout, "b s h e"), (q, "b s h e"), (k, "b t h e"), (v, "b t h e"), (a, "b s h e"), (lse, "b s h")]
            dq, dk, dv = g.op(ins, ["b s h e"] * 3, [((0,), (0, 1, 2))], fix="s t e", points=10)
            return add(dx2, b1(add(add(bq(dq), bk(dk)), bv(dv))))

        return y, back

    table = g.parameter("v d")
    (x,) = g.op([(table, "v d"), (tokens, "b s")], ["b s d"], [((0,), (0,))], points=0)
    for _ in range(layers):
        x, back = layer(x)
        tape.append(back)
    x, back = norm(x)
    tape.append(back)
    logits, back = mm(x, table, "b s d", "v d", "b s v")
    (dlogits,) = g.op([(logits, "b s v"), (tokens, "b s")], ["b s v"], fix="v", points=5)
    dx = back(dlogits)
    for back in reversed(tape):
        dx = back(dx)
    (dtable,) = g.op([(dx, "b s d"), (tokens, "b s")], ["v d"], [((0,), (0,))], points=0)
    g.land(table, dtable)
    return Problem(g.variables, g.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--axes", type=int, nargs="*", default=[1, 2, 3])
    for axes in (arguments := parser.parse_args()).axes:
        for kind, batch, p in itertools.product(KINDS, (1, 8, 64), (2, 4)):
            problem = gpt(arguments.layers, (p,) * axes, kind, batch)
            begin = time.process_time()
            found = solve(problem)
            cpu = time.process_time() - begin
            labels, layouts = max(len(v.costs) for v in problem.variables), max(len(v.closure) for v in problem.values)
            what = (
                f"{len(problem.variables)} variables, {labels} labels, {len(problem.values)} values, {layouts} layouts"
            )
            how = f"{found.seconds * 1e3:.4f} ms, gap {found.gap:.4%}{' exact' if found.exact else ''}, {cpu:.2f} s"
            print(f"{kind:6} {p}^{axes} batch {batch:3}  {what}: {how}", flush=True)


if __name__ == "__main__":
    main()
