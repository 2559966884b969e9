"""The structure of an annotated graph that experts see: its batch, its layers, and states followed from op to op."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.errors import PlanError
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import INPUT, OUTPUT, PARAMETER, TANGENT, placeholders, results
from sbpc.mesh.states import B, Partial, Split, State
from sbpc.rules import Signature
from sbpc.rules.sum_types import CAST

Key = tuple[Node, int]  # a value: a node, and which of its outputs
States = dict[Key, State]  # of values, on one axis


@dataclass(frozen=True)
class Layer:
    """A product of an activation (operand number `read`) and a parameter.

    column: the signature that splits the features of the result, of the first such; row: the one that splits the
    features of the operand, and leaves a partial sum. sources: by number of an operand, the parameter it is a view of
    and the views in between, last one first.
    """

    node: Node
    read: int
    weight: int
    column: Signature
    row: Signature
    sources: tuple[tuple[int, Node, tuple[Node, ...]], ...]

    @property
    def convolution(self) -> bool:
        """Whether the layer is a convolution."""
        return "conv" in str(self.node.target)

    @property
    def parameter(self) -> Node:
        """The parameter that is the layer's weight."""
        return next(parameter for slot, parameter, _ in self.sources if slot == self.weight)

    def homes(self, signature: Signature) -> dict[Node, State]:
        """Returns the states of the layer's parameters that are read as a signature says."""
        states: dict[Node, State] = {}
        for slot, parameter, views in self.sources:
            state = signature.inputs[slot]
            for view in views:
                state = next((s.inputs[0] for s in view.meta["signatures"] if s.outputs[0] == state), B)
            states[parameter] = B if isinstance(state, Partial) else state
        return states


class Model:
    """An annotated graph as experts see it.

    results: the values that the model returns. tangents: by placeholder of a tangent, the value that it belongs to.
    views: by node that is a parameter, or a view or a cast of one, the parameter and what is in between, last one
    first.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.nodes = [node for node in gm.graph.nodes if "signatures" in node.meta]
        calls = [node for node in self.nodes if node.op == "call_function"]
        self.forward = [node for node in calls if node.meta.get("phase") != "backward"]
        ports = placeholders(gm)
        self.parameters = [node for port, node in ports.items() if port.kind == PARAMETER]
        self.inputs = [node for port, node in ports.items() if port.kind == INPUT and node.meta["val"].dim()]
        named = zip(gm.meta["ports"].outputs, results(gm))
        outputs = {port.name: value_of(node) for port, node in named if node is not None and port.kind == OUTPUT}
        self.results = list(outputs.values())
        tangents = [(port.name, node) for port, node in ports.items() if port.kind == TANGENT]
        self.tangents = {node: outputs[name] for name, node in tangents if name in outputs}
        self.views: dict[Node, tuple[Node, tuple[Node, ...]]] = {node: (node, ()) for node in self.parameters}
        for node in self.forward:
            match, reads = node.meta.get("match"), nodes_read(node)
            one = isinstance(node.meta["val"], Tensor) and len(reads) == 1
            same = match is not None and (match.view or node.target is CAST)  # autocast reads them in another type
            if same and one and reads[0] in self.views:
                parameter, views = self.views[reads[0]]
                self.views[node] = (parameter, (node, *views))

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers of the forward."""
        return [layer for node in self.forward if (layer := self.layer(node)) is not None]

    @property
    def batch(self) -> int:
        """How many samples the inputs hold. Raises PlanError if no input has dims."""
        if not self.inputs:
            raise PlanError("no input has dims\n  The batch is dim 0 of the inputs.")
        return int(self.inputs[0].meta["val"].shape[0])

    @property
    def batch_states(self) -> States:
        """The inputs that hold the batch, split."""
        return {(node, 0): Split(0) for node in self.inputs if node.meta["val"].shape[0] == self.batch}

    def layer(self, node: Node) -> Layer | None:
        """Returns the layer that a call is, if it is one."""
        reads = nodes_read(node)
        weights = [slot for slot, read in enumerate(reads) if read in self.views and read.meta["val"].dim() > 1]
        others = [slot for slot, read in enumerate(reads) if read not in self.views]
        if len(weights) != 1 or len(others) != 1 or node in self.views:
            return None
        (weight,), (read,) = weights, others
        cuts = [s for s in node.meta["signatures"] if isinstance(s.inputs[weight], Split) and not s.ordered]
        column = next((s for s in cuts if s.inputs[read] == B and isinstance(s.outputs[0], Split)), None)
        row = next((s for s in cuts if isinstance(s.inputs[read], Split) and isinstance(s.outputs[0], Partial)), None)
        if column is None or row is None:
            return None
        sources = tuple((slot, *self.views[source]) for slot, source in enumerate(reads) if source in self.views)
        return Layer(node, read, weight, column, row, sources)

    def between(self, columns: Iterable[Layer], rows: Iterable[Layer]) -> list[Node]:
        """Returns what reads the rows and what the columns read, in the forward."""
        made = {layer.node for layer in rows}
        read = {nodes_read(layer.node)[layer.read] for layer in columns}
        near = [node for node in self.forward if node in read or not made.isdisjoint(nodes_read(node))]
        return [node for node in near if node not in made and not is_product(node)]


def nodes_read(node: Node) -> list[Node]:
    """Returns the producers of a node's operands."""
    return [value_of(operand)[0] for operand in operands(node)]


def is_product(node: Node) -> bool:
    """Whether a node is a product that sums over what two operands have."""
    return any(
        isinstance(s.outputs[0], Partial) and sum(isinstance(state, Split) for state in s.inputs) > 1
        for s in node.meta["signatures"]
    )


@dataclass
class Follower:
    """Follows states on one axis from op to op, and pins the ops whose rules take the states as they are.

    fixed: signatures as given; none for `loose` nodes. A tangent has the state of its output. reduced: the state to
    which the partial sum that a node leaves is reduced before what is not linear; without, nothing is known of it.
    gathered: a state in which activations are not read by products, but whole. partial: the partial sums, before
    they are reduced.
    """

    model: Model
    states: States
    fixed: Mapping[Node, Signature] = field(default_factory=dict)
    loose: Iterable[Node] = ()
    reduced: Callable[[Node], State] | None = None
    gathered: State | None = None
    partial: States = field(default_factory=dict)

    def run(self) -> dict[Node, Signature]:
        """Returns the signatures of the pinned nodes: those of a second walk, which knows the states of tangents."""
        given = set(self.states)
        self.walk(given)
        self.states |= {(node, 0): self.states[key] for node, key in self.model.tangents.items() if key in self.states}
        return self.walk(given)

    def walk(self, given: Container[Key]) -> dict[Node, Signature]:
        """Returns the signatures of the pinned nodes. given: values whose states no op changes."""
        pinned: dict[Node, Signature] = {}
        skipped = set(self.loose)
        for node in self.model.nodes:
            if node.op != "call_function" or node in skipped:
                continue
            keys = [value_of(operand) for operand in operands(node)]
            signature = self.fixed.get(node) or self.taking(node, keys)
            if signature is None:
                continue
            pinned[node] = signature
            self.leave(node, signature)
            if node in self.fixed:  # an input has the state in which it is read here
                inputs = [key for key in keys if key[0] in self.model.inputs and key not in given]
                self.states |= {key: signature.inputs[keys.index(key)] for key in inputs}
        return pinned

    def leave(self, node: Node, signature: Signature) -> None:
        """Notes the states of a node's results."""
        for index, state in enumerate(signature.outputs):
            if not isinstance(state, Partial):
                self.states[node, index] = state
            elif self.reduced is not None:
                self.states[node, index], self.partial[node, index] = self.reduced(node), state

    def taking(self, node: Node, keys: Sequence[Key]) -> Signature | None:
        """Returns the signature that takes the operands in their states, as far as these are known; None if none
        does."""
        signatures = tuple(s for s in node.meta["signatures"] if not s.ordered)
        sums = tuple(self.partial.get(key) for key in keys)
        linear = next((s for s in signatures if keys and s.inputs == sums), None)
        if linear is not None and len(keys) > 1:
            return linear
        if linear is not None:  # a view: whether the sum is reduced before or behind it is the same
            self.leave(node, linear)
            return None
        states = self.states_read(node, keys)
        if any(isinstance(state, Split) for state in states):
            cutting = (s for s in signatures if s.factor is not None)
            return next((s for s in cutting if all(a in (None, b) for a, b in zip(states, s.inputs))), None)
        return None if B not in states or (None in states and is_product(node)) else signatures[0]

    def states_read(self, node: Node, keys: Sequence[Key]) -> list[State | None]:
        """Returns the states in which a node reads its operands; None where it is unknown."""
        states = [self.states.get(key) for key in keys]
        if self.gathered is None or not is_product(node):
            return states
        activation = [key[0] not in self.model.views for key in keys]
        if all(activation) and any(
            s.inputs == tuple(states) and isinstance(s.outputs[0], Split) for s in node.meta["signatures"]
        ):
            return states  # attention that is written out: its heads may be the same dim as the sequence of activations
        return [B if state == self.gathered and whole else state for state, whole in zip(states, activation)]


def column_row_pairs(model: Model, layers: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
    """Returns the layers to split by columns, and those to split by rows, whose operands' features are then split
    already.

    Every layer whose operand is whole is tried as a column; those whose features get to where they cannot be split, or
    leave the model, or reach no row are taken back, until none is.
    """
    by_node = {layer.node: layer for layer in layers}
    excluded: set[Node] = set()
    while True:
        columns, rows, refused = try_pairs(model, by_node, excluded)
        if not refused:
            return columns, rows
        excluded |= refused


def try_pairs(
    model: Model, layers: Mapping[Node, Layer], excluded: Container[Node]
) -> tuple[list[Layer], list[Layer], set[Node]]:
    """Returns the columns and rows of one attempt, and the columns that cannot be."""
    columns: list[Layer] = []
    rows: list[Layer] = []
    split: States = {}
    columns_of: dict[Key, tuple[Node, ...]] = {}  # by split value, the columns it comes from
    refused, reaching_rows = set[Node](), set[Node]()
    for node in model.forward:
        keys = [value_of(operand) for operand in operands(node)]
        origins = tuple(dict.fromkeys(column for key in keys for column in columns_of.get(key, ())))
        layer, signature = layers.get(node), None
        if layer is None and origins:
            signature = carrying(model, node, keys, split)
        elif layer is not None and not origins and node not in excluded:
            columns.append(layer)
            signature, origins = layer.column, (node,)
        elif layer is not None and split.get(keys[layer.read]) == layer.row.inputs[layer.read]:
            rows.append(layer)
            reaching_rows.update(origins)
            continue
        if signature is None:
            refused.update(origins)
            continue
        for index, state in enumerate(signature.outputs):
            if isinstance(state, Split):
                split[node, index], columns_of[node, index] = state, origins
    refused.update(*(columns_of.get(key, ()) for key in model.results))
    refused.update(layer.node for layer in columns if layer.node not in reaching_rows)
    return columns, rows, refused


def carrying(model: Model, node: Node, keys: Sequence[Key], split: States) -> Signature | None:
    """Returns the signature that goes on with the split of the operands; those that are not split stay whole, or are
    weights."""
    for signature in node.meta["signatures"]:
        fits = all(
            state == split[key] if key in split else state == B or key[0] in model.views
            for key, state in zip(keys, signature.inputs)
        )
        if fits and not any(isinstance(state, Partial) for state in signature.outputs):
            return signature  # type: ignore[no-any-return]
    return None
