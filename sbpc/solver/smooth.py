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
    if messages.bound <= np.finfo(messages.real).eps * messages.cap or not messages.edges:
        return
    best, kept = messages.bound, state(messages)
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
        if not np.isfinite(soft).all():
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


@np.errstate(over="ignore", invalid="ignore")  # of what is far too dear
def mix(messages: Messages, heat: float, sweeps: int, until: float) -> None:
    """Sweeps at a heat, each from a mixture of where the last ones ended."""
    end = vector(messages, heat)
    step = np.zeros_like(end)
    turns, moves = np.empty((2, MIXED - 1, len(end)), end.dtype)  # by how much steps and ends differ from the last ones
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
            put_vector(messages, mixture(turns[:turn], moves[:turn], step, end), heat)
        if time.process_time() > until:
            break


def mixture(turns: np.ndarray, moves: np.ndarray, step: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of where sweeps ended, a mixture for which the same mixture of their steps is least.

    step, end: of the last sweep. turns, moves: by how much the steps and the ends of others differ from the ones before them.
    """
    square = (turns @ turns.T).astype(np.float64)
    square += RIDGE * np.trace(square) * np.eye(len(square)) + np.finfo(float).tiny * np.eye(len(square))
    return end - np.linalg.solve(square, turns @ step).astype(end.dtype) @ moves


def parts(messages: Messages) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """All that a sweep begins with: messages to earlier nodes and what stars hear from later ones; charges."""
    stars = messages.stars.values()
    sent = [sent for star in stars for sent in star.later if sent is not None]
    charges = [charges for star in stars for charges in star.share.charges]
    return [edge.first.inbox for edge in messages.edges] + sent, charges


def state(messages: Messages) -> np.ndarray:
    """Those numbers, one after the other."""
    sent, charges = parts(messages)
    return np.concatenate([part.ravel() for part in sent + charges])


def put(messages: Messages, found: np.ndarray, fill: bool = False) -> None:
    """Set messages to a state; fill: charges to as much as there may be."""
    sent, charges = parts(messages)
    at = 0
    for part in sent + charges:
        part[...] = found[at : at + part.size].reshape(part.shape)
        at += part.size
    messages.hear(fill)


def vector(messages: Messages, heat: float) -> np.ndarray:
    """The state, in which charges are `heat` times their logarithms."""
    found = state(messages)
    charges = found[len(found) - sum(part.size for part in parts(messages)[1]) :]
    np.maximum(charges, np.finfo(found.dtype).tiny, out=charges)
    np.log(charges, out=charges)
    charges *= heat
    return found


def put_vector(messages: Messages, found: np.ndarray, heat: float) -> None:
    """Set messages to the state of a vector, which is changed."""
    charges = found[len(found) - sum(part.size for part in parts(messages)[1]) :]
    np.exp(np.clip(charges / heat, -80, 80), out=charges)
    put(messages, found, fill=True)
