"""Where a step is cut into stages: every call has a place in the order of the forward, and the places are cut where
stages are even.

What depends on no parameter (masks, positions, rotary angles) has no place: every stage that reads it computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.errors import PlanError
from sbpc.graph.about import REDUCE
from sbpc.graph.operands import is_late, operands, tensors_of, value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, Port, outputs, placeholders
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import is_ordered
from sbpc.passes.loop.recompute import block_of
from sbpc.plans.staged.estimate import best_steps
from sbpc.rules.local_rows import CASTS, SORTS, VIEWS, behind
from sbpc.rules.sum_types import narrows

Places = dict[Node, int]
ALIAS = torch.ops.aten.alias.default


def places_of(gm: GraphModule) -> Places:
    """Returns the place of every call that depends on a parameter: of the forward, its number among these; of the
    backward, the last place at which it can run: not after the gradients it reads, and where what it reads of the
    forward is made or read. What depends on parameters alone has the place at which it is first read: it is made
    once a step, by every stage that reads it. An alias, which stands for what the backward reads where bytes are
    limited, has no place of its own: a body is cut with them as without.
    """
    bound = set(placeholders(gm, PARAMETER).values())
    fixed = set(bound)
    known: Places = {}
    at: dict[Node, list[int]] = {}  # of values of the forward and parameters: places that make or read them
    late: list[Node] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or not any(used in bound for used in node.all_input_nodes):
            continue
        bound.add(node)
        if is_late(node):
            late.append(node)
            continue
        if fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
            if node.target is ALIAS:  # what reads it goes where what reads its value goes
                at[node] = at.setdefault(node.all_input_nodes[0], [])
            continue
        if node.target is ALIAS:
            known[node] = max(at[node.all_input_nodes[0]])
            at[node] = [known[node]]
            continue
        place = at_producer(node, known, len(set(known.values())))
        known[node] = place
        for value in (node, *read_here(node, fixed, known, place)):
            at.setdefault(value, []).append(place)
    last = max(known.values(), default=0)
    for node in late:
        if value_of(node)[0] is not node:  # one of several results of a call
            known[node] = known[value_of(node)[0]]
            continue
        place = min((known[used] for used in node.all_input_nodes if used in known and is_late(used)), default=last)
        for _ in range(2):  # the second operand may move what the first one fixed
            for used in node.all_input_nodes:
                if not is_late(used) and used in at:
                    place = max((each for each in at[used] if each <= place), default=place)
        known[node] = place
    # read late alone
    for node in reversed([each for each in gm.graph.nodes if each in fixed and each.op == "call_function"]):
        known.setdefault(node, min((known[user] for user in node.users if user in known), default=last))
    return delayed(gm, known, late, at)


def read_here(node: Node, fixed: set[Node], known: Places, place: int) -> list[Node]:
    """Returns what a call reads, and what that is made of where it depends on parameters alone: it gets the call's
    place if it has none."""
    found, todo = dict[Node, None](), list(node.all_input_nodes)
    while todo:
        used = todo.pop()
        found[used] = None
        if used in fixed and used.op == "call_function":
            known.setdefault(used, place)
            todo += used.all_input_nodes
    return list(found)


def delayed(gm: GraphModule, known: Places, late: list[Node], at: dict[Node, list[int]]) -> Places:
    """Moves calls of the backward that read one value (sums, views) to the places that read them; a gradient to its
    parameter's. What widens a value before it is summed over ranks stays with that value."""
    stored = placeholders(gm)
    homes: dict[Node, int] = {}
    for port, node in outputs(gm, GRADIENT):
        homes[node] = max(at.get(stored[Port(PARAMETER, port.name)], [known.get(node, 0)]))
    for node in reversed(late):
        if value_of(node)[0] is not node or (REDUCE in node.meta and not narrows(node)):
            continue
        readers = [known[user] for user in node.users if user in known]
        readers += [homes[node]] if node in homes else []
        if len([used for used in node.all_input_nodes if used in known or used.op == "placeholder"]) == 1 and readers:
            known[node] = min(known[node], max(readers))
    return known


def at_producer(node: Node, known: Places, new: int) -> int:
    """Returns the place of a call: that of its producer where it takes one of several results, else a new one."""
    producer = value_of(node)[0]
    return known[producer] if producer is not node and producer in known else new


def cuts_of(gm: GraphModule, places: Places, stages: int, mesh: Mesh) -> list[int]:
    """Returns the first place of every stage but the first, so that the slowest stage takes the least time with what
    it sends.

    Between equals, what all stages send is least. Where that can be, every stage has a trained parameter. Cuts are
    between blocks (the modules of a list, such as "layers.3"); in a model with fewer blocks than stages, where less
    is sent than before and behind. mesh: that of one stage. Raises PlanError if there are fewer places to cut.
    """
    work, sent = work_at(places, mesh.cluster, mesh.ranks), sent_at(places)
    here = between_blocks(places)
    if len(here) < stages - 1:
        here = [p for p in range(1, len(work)) if sent[p] <= sent[p - 1] and sent[p] <= sent[min(p + 1, len(work) - 1)]]
    if mesh.ranks > 1:
        here = [p for p in here if p not in among_experts(places)]
    if len(here) < stages - 1:
        todo = "Give fewer stages, or a schedule with fewer chunks on each."
        raise PlanError(f"{stages} chunks of a model that can be cut at {len(here)} places\n  {todo}")
    bandwidth = mesh.cluster.inter_bandwidth * mesh.ranks
    ends = np.array([0, *here, len(work)])
    total = np.concatenate([[0.0], np.cumsum(work)])[ends]
    border = np.array([0.0, *(2 * sent[p] / bandwidth for p in here), 0.0])
    # it sends while it computes
    took = np.maximum(total[None, :] - total[:, None], np.maximum(border[:, None], border[None, :]))
    took[np.tril_indices(len(ends))] = np.inf
    # of trained parameters before each end
    count = np.cumsum([0, *np.bincount(trained_at(gm, places), minlength=len(work))])[ends]
    idle = count[None, :] == count[:, None]
    if np.isfinite(best_steps(np.where(idle, np.inf, took), stages, np.maximum)[0]):
        took[idle] = np.inf
    most, _ = best_steps(took, stages, np.maximum)
    sent_over = np.where(took <= most * (1 + 1e-9), border[None, :], np.inf)
    return [int(ends[at]) for at in best_steps(sent_over, stages, np.add)[1][1:-1]]


def among_experts(places: Places) -> set[int]:
    """Returns the places that would begin a stage amid rows that stand sorted by expert, from what chooses the experts
    on: ranks that share them out know them in one graph alone."""
    found = set[int]()
    for node, place in places.items():
        signatures = [each for each in node.meta.get("signatures", ()) if each.ordered]
        for at, used in enumerate(operands(node) if signatures and not is_late(node) else ()):
            sorts = node.target in SORTS
            source = behind(used, (*CASTS, *VIEWS)) if sorts else used
            if source in places and (sorts or any(is_ordered(each.inputs[at]) for each in signatures)):
                found.update(range(places[source] + 1, place + 1))
    return found


def first_reads(gm: GraphModule, places: Places) -> dict[str, int]:
    """Returns by parameter the first place that reads it, 0 if none does."""
    stored = placeholders(gm, PARAMETER)
    return {
        port.name: min((places[user] for user in node.users if user in places and not is_late(user)), default=0)
        for port, node in stored.items()
    }


def cuts_at(gm: GraphModule, places: Places, named: Sequence[str], mesh: Mesh) -> list[int]:
    """Returns the first place of every stage but the first: where the block of a named parameter begins, or what reads
    it where others of the block are in the stage before; of a text such as "up.weight+2" two places behind that which
    reads it. Raises PlanError for names that part no stages, or rows of experts."""
    here, found, first = [0, *between_blocks(places)], [0], first_reads(gm, places)
    for name in named:
        named_alone, sign, further = name.rpartition("+")
        if sign and name not in first and named_alone in first and further.removeprefix("-").isdecimal():
            found.append(first[named_alone] + int(further))
        else:
            place = first.get(name, 0)
            before = max((each for each in first.values() if each < place), default=0)
            start = max(each for each in here if each <= place)
            found.append(start if start > before else place)
        if found[-1] <= found[-2] or found[-1] > max(places.values()):
            raise PlanError(f"cuts= names {name!r}, before which no stage ends\n  Give plan.cuts of a plan like this.")
        if mesh.ranks > 1 and found[-1] in among_experts(places):
            what = f"cuts= names {name!r}, before which rows stand sorted by expert, and ranks may share them out"
            raise PlanError(f"{what}\n  Name the first parameter of a block.")
    return found[1:]


def names_of(gm: GraphModule, places: Places, cuts: Sequence[int]) -> list[str]:
    """Returns texts for which `cuts_at` gives these places: of the last parameter that is first read before."""
    first, found = first_reads(gm, places), list[str]()
    for place in cuts:
        name = max(
            first, key=lambda each: (first[each] <= place, first[each] if first[each] <= place else -first[each])
        )
        found.append(f"{name}+{place - first[name]}")
    return found


def trained_at(gm: GraphModule, places: Places) -> list[int]:
    """Returns the places at which trained parameters are first read."""
    stored = placeholders(gm)
    trained = [stored[Port(PARAMETER, port.name)] for port in gm.meta["ports"].outputs if port.kind == GRADIENT]
    readers = ([places[user] for user in node.users if user in places and not is_late(user)] for node in trained)
    return [min(each) for each in readers if each]


def between_blocks(places: Places) -> list[int]:
    """Returns the places at which a block of the model begins, or what is behind the last one."""
    blocks = blocks_at(places)
    return [at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1]]


def blocks_at(places: Places) -> list[str]:
    """Returns by place the block of the model that it is in, "" where it is in none."""
    first: dict[int, str] = {}
    for node, place in places.items():
        if not is_late(node):
            first.setdefault(place, block_of(node.meta.get("module") or ""))
    return [first[place] for place in sorted(first)]


def work_at(places: Places, cluster: Cluster, parts: int) -> np.ndarray:
    """Returns by place the seconds of forward and backward on a device that has one of so many equal parts of every
    call."""
    work = np.zeros(max(places.values(), default=-1) + 1)
    for node, place in places.items():
        match = node.meta.get("match")
        if value_of(node)[0] is node and not (match is not None and match.view):
            moved = sum(size * int(np.prod(shape)) for size, shape in tensors_of(node)) / parts
            if match is None:
                work[place] += cluster.kernel_seconds("", 0.0, moved)
                continue
            shape = match.shape(match.sizes, {})
            about = moved, None if shape is None else shape.part(parts)
            work[place] += cluster.kernel_seconds(str(match.op), float(match.flops(match.sizes)) / parts, *about)
    return work


def sent_at(places: Places) -> np.ndarray:
    """Returns by place the bytes that would cross to it from those before, in the forward."""
    change = np.zeros(max(places.values(), default=-1) + 2)
    for node, place in places.items():
        value = node.meta.get("val")
        if is_late(node) or not isinstance(value, Tensor):
            continue
        readers = [places[user] for user in node.users if user in places and not is_late(user)]
        last = max(readers, default=place)
        change[place + 1] += value.numel() * value.element_size() if last > place else 0
        change[last + 1] -= value.numel() * value.element_size() if last > place else 0
    return np.cumsum(change)[:-1]


def stage_at(place: int, cuts: Sequence[int]) -> int:
    """Returns the stage that a place is in."""
    return int(np.searchsorted(np.asarray(cuts), place, side="right"))
