"""Messages that do not come to rest too low: steps on a smooth bound, ever less smooth, then on the true one.

Savchynskyy, Schmidt, Kappes and Schnoerr, "Efficient MRF energy minimization via adaptive diminishing smoothing", UAI 2012,
for the messages; what consumers are charged for shared boxings goes up the same bound, each charge by a factor. A sweep is
then a smooth map, of which the fixed point is found in a fraction of the sweeps by mixing the last few ones (Anderson,
"Iterative procedures for nonlinear integral equations", J. ACM 1965).
"""

from __future__ import annotations

import math
import time

import numpy as np

from sbpc.solver.trws import Messages

SWEEPS = 20  # at each heat
HEATS = 0.8, 0.16, 0.03  # in what a node costs of the bound, on average
COLD = 0.1, 0.03, 0.01  # the same on more than two axes, where a sweep takes a tenth of a second
AGAIN = 6, 3, 1.5, 0.75  # heats at which a later call goes on, as multiples of the last one
PLAIN = 2  # sweeps at a heat before the first mixture
MIXED = 8  # most sweeps that are mixed
SHARP = 6  # sweeps on the true bound after each heat
GAINED = 5e-3  # of the bound: where the last heat gave more than that, there are two more, and so on
BEGIN = 1e-2  # the least part of its price that a boxing is charged at first
RIDGE = 1e-10  # relative: what keeps mixtures of nearly equal steps small


def smooth(messages: Messages, aim: float, until: float = math.inf) -> None:
    """Better the bound of messages over all layouts at a few heats; where the last one gave much, at that heat again and at half
    of it. A later call goes on from where the heats ended, at higher ones again.

    aim: a bound in seconds that is good enough. until: CPU time of this process at which no more is begun.
    """
    if messages.bound <= np.finfo(messages.real).eps * messages.cap or not messages.edges:
        return
    best, kept = messages.bound, messages.state.copy()
    wide = messages.problem.variables[0].digits.shape[1] > 2
    soft = messages.single
    soft.split(None)
    messages.split(None)
    if messages.soft is None:
        heats = list(COLD if wide else HEATS)
        put(soft, kept)
        for star in soft.stars.values():
            star.share.fill(BEGIN)
    else:
        heats = [messages.soft[0] * times for times in AGAIN]
        put(soft, messages.soft[1])
    for heat in heats:
        if best >= aim or time.process_time() > until:
            break
        before = best
        mix(soft, heat * best / len(messages.names), SWEEPS, until)
        if not np.isfinite(soft.state).all():
            put(soft, kept)
        messages.soft, messages.bound = (heat, soft.state.copy()), -np.inf
        put(messages, soft.state, fill=messages is not soft)  # charges are rounded: not above the price
        for _ in range(SHARP):
            messages.sweep()
        if messages.bound > best:
            best, kept = messages.bound, messages.state.copy()
        put(soft, messages.soft[1])
        if heat == heats[-1] and best - before > GAINED * best:
            heats += further(heat)
    put(messages, kept)
    messages.bound = best
    messages.sweep()


def further(heat: float) -> list[float]:
    """The heats after one that was the last."""
    return [heat, heat / 2]


@np.errstate(over="ignore", invalid="ignore")  # of what is far too dear
def mix(messages: Messages, heat: float, sweeps: int, until: float) -> None:
    """Sweeps at a heat, each from a mixture of where the last ones ended."""
    end = vector(messages, heat)
    step = np.zeros_like(end)
    turns, moves = np.zeros((2, MIXED - 1, len(end)), end.dtype)  # by how much steps and ends differ from the last ones
    square = np.zeros((MIXED - 1, MIXED - 1))  # of turns
    for turn in range(sweeps):
        before, last, row = vector(messages, heat), end, (turn - 1) % len(turns)
        messages.forward(heat)
        messages.backward(heat)
        end = vector(messages, heat)
        np.subtract(end, last, out=moves[row])
        np.negative(step, out=turns[row])
        np.subtract(end, before, out=step)
        turns[row] += step
        if PLAIN <= turn < sweeps - 1:
            used = slice(turn)
            if turn == PLAIN:
                square[used, used] = [products(turns[used], found) for found in turns[used]]
            square[row, used] = square[used, row] = products(turns[used], turns[row])
            put_vector(messages, mixture(square[used, used], turns[used], moves[used], step, end), heat)
        if time.process_time() > until:
            break


def mixture(square: np.ndarray, turns: np.ndarray, moves: np.ndarray, step: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of where sweeps ended, a mixture for which the same mixture of their steps is least.

    step, end: of the last sweep. turns, moves: by how much the steps and the ends of others differ from the ones before them;
    square: the products of turns.
    """
    ridge = RIDGE * np.trace(square) + np.finfo(float).tiny
    found = end.copy()
    for part, move in zip(np.linalg.solve(square + ridge * np.eye(len(square)), products(turns, step)), moves):
        found -= end.dtype.type(part) * move
    return found


def products(vectors: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of each vector with another one. Matrix products would begin threads, of which each takes the time of a core."""
    return (vectors * other).sum(1).astype(np.float64)


def put(messages: Messages, found: np.ndarray, fill: bool = False) -> None:
    """Set messages to a state; fill: charges to as much as there may be."""
    messages.state[:] = found
    messages.hear(fill)


def vector(messages: Messages, heat: float) -> np.ndarray:
    """The state, in which charges are `heat` times their logarithms."""
    found = messages.state.copy()
    charges = found[messages.charged :]
    np.maximum(charges, np.finfo(found.dtype).tiny, out=charges)
    np.log(charges, out=charges)
    charges *= heat
    return found


def put_vector(messages: Messages, found: np.ndarray, heat: float) -> None:
    """Set messages to the state of a vector, which is changed."""
    charges = found[messages.charged :]
    charges /= heat
    np.clip(charges, -80, 80, out=charges)
    np.exp(charges, out=charges)
    put(messages, found, fill=True)
