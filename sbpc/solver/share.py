"""Who pays for a boxing that several consumers of a value share: a bound of its star that adapts to the messages.

Every consumer j of an alias is charged P_j(a, t) for a boxing a -> t, such that no m-1 of the m consumers together pay
more than its price c(a, t): for every (a, t), sum_j P_j - min_j P_j <= c. Then the cheapest star of charges costs no
more than the true one. For layouts t_j that are not all the same, a target t is wanted by at most m-1 consumers, whose
charges do not exceed c(a, t), which the star pays once. If all want the same t, the star costs c(source, t), as other
aliases are detours, and that is what alias = t costs here (c(t, t) = 0, so nobody is charged anything there).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class Share:
    """The charges of one value: price [aliases, layouts]; by consumer the columns of its layouts, and charges there."""

    price: np.ndarray
    columns: list[np.ndarray]
    charges: list[np.ndarray]

    def messages(self, sent: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """What each consumer sends to the alias at the charges as they are: the least of sent(t) + charge(a, t)."""
        pairs = zip(self.charges, sent)
        return [np.zeros(len(charges)) if pays is None else (charges + pays).min(1) for charges, pays in pairs]

    def balance(self, sent: Sequence[np.ndarray | None], backwards: bool) -> list[np.ndarray]:
        """Charge those who would pay, and return the new messages to the alias, one per consumer; none is lowered.

        sent: what each consumer pays elsewhere, by layout (None: its charges stay). A consumer that sends v(a) needs
        charges of only v(a) - sent(t); what is left of the price lets the others raise theirs.
        This is dual ascent for facility location (Erlenkotter 1978), each alias being one such problem.
        """
        needs, messages = [], self.messages(sent)
        for columns, charges, pays, message in zip(self.columns, self.charges, sent, messages):
            need = np.zeros(self.price.shape, self.price.dtype)
            need[:, columns] = charges if pays is None else np.maximum(message[:, None] - pays, 0)
            needs.append(need)
        room = self.price - functools.reduce(np.add, needs)
        for at in range(len(sent))[:: -1 if backwards else 1]:
            pays, columns = sent[at], self.columns[at]
            if pays is not None:
                free = room + needs[at]
                free += functools.reduce(np.minimum, needs[:at] + needs[at + 1 :])
                messages[at] = np.maximum((np.maximum(free[:, columns], 0) + pays).min(1), messages[at])
                room += needs[at]
                needs[at][:, columns] = np.maximum(messages[at][:, None] - pays, 0)
                room -= needs[at]
        room += functools.reduce(np.minimum, needs)
        spare = np.maximum(room, 0) * shares(self.columns, self.price.shape[1]).astype(room.dtype)
        for at, pays in enumerate(sent):
            if pays is not None:
                self.charges[at][:] = (needs[at] + spare)[:, self.columns[at]]
        return messages


def shares(columns: Sequence[np.ndarray], layouts: int) -> np.ndarray:
    """By layout: what part of the price all may be charged alike: 1/(m-1), or 1/k if only k < m can want it."""
    count = np.zeros(layouts)
    for found in columns:
        count[found] += 1
    return 1 / np.maximum(np.where(count == len(columns), count - 1, count), 1)
