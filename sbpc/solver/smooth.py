"""Messages that do not come to rest too low: steps on a smooth bound, ever less smooth, then on the true one.

Savchynskyy, Schmidt, Kappes and Schnoerr, "Efficient MRF energy minimization via adaptive diminishing smoothing", UAI 2012,
for the messages; what consumers are charged for shared boxings goes up the same bound, each charge by a factor. A sweep is
then a smooth map, of which the fixed point is found in a fraction of the sweeps by mixing the last few ones (Anderson,
"Iterative procedures for nonlinear integral equations", J. ACM 1965).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from sbpc.solver.trws import Messages

SWEEPS = 20  # at each heat
HEATS = 0.8, 0.16, 0.03  # in what a node costs of the bound, on average
COLD = 0.1, 0.03, 0.01  # the same on more than two axes, where a sweep takes a tenth of a second
PLAIN = 2  # sweeps at a heat before the first mixture
MIXED = 8  # most sweeps that are mixed
SHARP = 6  # sweeps on the true bound after each heat
GAINED = 5e-3  # of the bound: where the last heat gave more than that, there are two more, and so on
BEGIN = 1e-2  # the least part of its price that a boxing is charged at first
RIDGE = 1e-10  # relative: what keeps mixtures of nearly equal steps small


def smooth(messages: Messages, aim: float, until: float = math.inf) -> None:
    """Better the bound of messages over all layouts at a few heats. A later call, and this one where the last heat gave much,
    goes on at that heat and at half of it.

    aim: a bound in seconds that is good enough. until: CPU time of this process at which no more is begun.
    """
    best, kept = messages.bound, state(messages)
    if best <= np.finfo(messages.real).eps * messages.cap or not messages.edges:
        return
    wide = messages.problem.variables[0].digits.shape[1] > 2
    if messages.soft is None:
        heats = list(COLD if wide else HEATS)
        for star in messages.stars.values():
            star.share.fill(BEGIN)
    else:
        heats = further(messages.soft[0])
        put(messages, messages.soft[1])
    for heat in heats:
        if best >= aim or time.process_time() > until:
            break
        before = best
        mix(messages, heat * best / len(messages.names), SWEEPS, until)
        soft, messages.bound = state(messages), -np.inf
        if not all(np.isfinite(part).all() for part in soft):
            soft = kept
            put(messages, kept)
        for _ in range(SHARP):
            messages.sweep()
        if messages.bound > best:
            best, kept = messages.bound, state(messages)
        messages.soft = heat, soft
        put(messages, soft)
        if heat == heats[-1] and best - before > GAINED * best:
            heats += further(heat)
    put(messages, kept)
    messages.bound = best
    messages.sweep()


def further(heat: float) -> list[float]:
    """The heats after one that was the last."""
    return [heat, heat / 2]


def mix(messages: Messages, heat: float, sweeps: int, until: float) -> None:
    """Sweeps at a heat, each from a mixture of where the last ones ended."""
    steps, ends = list[np.ndarray](), list[np.ndarray]()
    for turn in range(sweeps):
        before = vector(messages, heat)
        with np.errstate(over="ignore"):  # of what is that much dearer the part is 0
            messages.forward(heat)
            messages.backward(heat)
        ends.append(vector(messages, heat))
        steps.append(ends[-1] - before)
        if PLAIN <= turn < sweeps - 1:
            put_vector(messages, mixture(steps, ends), heat)
        del steps[:-MIXED], ends[:-MIXED]
        if time.process_time() > until:
            break


def mixture(steps: Sequence[np.ndarray], ends: Sequence[np.ndarray]) -> np.ndarray:
    """Of where sweeps ended, a mixture for which the same mixture of their steps is least."""
    turns, moves = np.diff(np.stack(steps), axis=0), np.diff(np.stack(ends), axis=0)
    square = (turns @ turns.T).astype(np.float64)
    square += RIDGE * np.trace(square) * np.eye(len(square)) + np.finfo(float).tiny * np.eye(len(square))
    return ends[-1] - np.linalg.solve(square, turns @ steps[-1]).astype(moves.dtype) @ moves


def state(messages: Messages) -> list[np.ndarray]:
    """All that a sweep begins with: messages to earlier nodes, what stars hear from later ones, charges; no later sweep
    changes it."""
    stars = messages.stars.values()
    return [
        *(edge.first.inbox.copy() for edge in messages.edges),
        *(sent for star in stars for sent in star.sent if sent is not None),
        *(charges.copy() for star in stars for charges in star.share.charges),
    ]


def put(messages: Messages, found: Sequence[np.ndarray]) -> None:
    """Set messages to a state."""
    parts = iter(found)
    for edge in messages.edges:
        edge.first.inbox[:] = next(parts)
    stars = messages.stars.values()
    for star in stars:
        star.sent = [None if sent is None else next(parts) for sent in star.sent]
    for star in stars:
        for charges in star.share.charges:
            charges[:] = next(parts)
        for at, sent in enumerate(star.sent):
            if sent is not None:
                star.hear(1 + at, sent)


def vector(messages: Messages, heat: float) -> np.ndarray:
    """The state as one vector, in which charges are `heat` times their logarithms."""
    found = state(messages)
    count = sum(len(star.share.charges) for star in messages.stars.values())
    least = np.finfo(messages.real).tiny
    logs = [heat * np.log(np.maximum(charges, least)) for charges in found[len(found) - count :]]
    return np.concatenate([part.ravel() for part in found[: len(found) - count] + logs])


def put_vector(messages: Messages, found: np.ndarray, heat: float) -> None:
    """Set messages to the state of a vector."""
    shapes = state(messages)
    parts = np.split(found, np.cumsum([part.size for part in shapes])[:-1])
    count = sum(len(star.share.charges) for star in messages.stars.values())
    whole = [part.reshape(shape.shape) for part, shape in zip(parts, shapes)]
    whole[len(whole) - count :] = [np.exp(np.clip(part / heat, -80, 80)) for part in whole[len(whole) - count :]]
    put(messages, whole)
    for star in messages.stars.values():
        star.share.fill(0.0)
