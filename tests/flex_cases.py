"""Cases of FlexAttention as an op, with functions that depend on all places and on captured tensors."""

from __future__ import annotations

import math

import torch

from sbpc.graph.flex import BACKWARD, FORWARD
from sbpc.rules.proof.prove import Case
from tests.samples import close, f, y

DISTANCE = "t0 = sub.Tensor(kv, q); t1 = index.Tensor(x0, [h]); t2 = mul.Tensor(t0, t1); t3 = add.Tensor(score, t2)"
TABLE = f"{DISTANCE}; t4 = index.Tensor(x1, [b, q, kv]); t5 = tanh(t3); t6 = add.Tensor(t4, t5)"
DOCUMENTS = "t0 = index.Tensor(x0, [b, q]); t1 = index.Tensor(x0, [b, kv]); t2 = eq.Tensor(t0, t1)"
CAUSAL = "t0 = ge.Tensor(q, kv); t1 = eq.Scalar(h, 1); t2 = bitwise_or.Tensor(t0, t1)"


def cases() -> list[Case]:
    found = []
    for groups, score, mask in ((1, "", ""), (2, TABLE, CAUSAL), (1, DISTANCE, DOCUMENTS), (2, "", DOCUMENTS)):
        q, k, v = f(4, 4 * groups, 6, 5), f(4, 4, 7, 5, seed=1), f(4, 4, 7, 3, seed=2)
        places = [torch.arange(size) for size in (4, 4 * groups, 6, 7)]
        places = [x if name in score + mask else None for name, x in zip(("[b", "h", "q", "kv"), places)]
        captured = [f(4 * groups, seed=5).abs(), f(4, 6, 7, seed=6)][: 2 if score == TABLE else int(score != "")]
        rest = *places, captured, [y(2, 4, 7)] if mask == DOCUMENTS else [], score, mask, 0.3
        found.append(close(FORWARD, q, k, v, *rest))
        out, lse = found[-1].run()
        lse = lse.clamp(min=-1e3)  # -inf where all is hidden
        for statistics in (None, lse.sin()):
            wanted = [at == 0 or statistics is None for at, _ in enumerate(captured)]
            back = f(*out.shape, seed=4), statistics, q, k, v, out, lse.masked_fill(lse == -1e3, -math.inf), *rest
            found.append(close(BACKWARD, *back, wanted))
    return found


FAMILIES = {"flex": cases}
