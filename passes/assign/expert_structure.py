"""The structure of an annotated graph that experts see: its batch, its layers, and states followed from op to op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import GraphModule, Node

from sbpc.errors import PlanError
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import INPUT, OUTPUT, PARAMETER, TANGENT, Port, placeholders
from sbpc.mesh.states import B, Partial, Split, State
from sbpc.rules import Signature

States = dict[tuple[Node, int], State]  # of values, on one axis


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
        return "conv" in str(self.node.target)

    @property
    def parameter(self) -> Node:
        return next(parameter for slot, parameter, _ in self.sources if slot == self.weight)

    def stored(self, signature: Signature) -> dict[Node, State]:
        """The states of the layer's parameters that are read as a signature says."""
        found: dict[Node, State] = {}
        for slot, parameter, views in self.sources:
            state = signature.inputs[slot]
            for view in views:
                state = next((s.inputs[0] for s in view.meta["signatures"] if s.outputs[0] == state), B)
            found[parameter] = B if isinstance(state, Partial) else state
        return found


class Model:
    """An annotated graph, read once."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes = [node for node in gm.graph.nodes if "signatures" in node.meta]
        ports = placeholders(gm)
        self.parameters = [node for port, node in ports.items() if port.kind == PARAMETER]
        self.inputs = [node for port, node in ports.items() if port.kind == INPUT and node.meta["val"].dim()]
        results = dict(zip(gm.meta["ports"].outputs, list(gm.graph.output_node().args[0])))  # type: ignore[arg-type]
        self.results = {value_of(node) for port, node in results.items() if node is not None and port.kind == OUTPUT}
        self.tangents = {
            node: value_of(result)
            for port, node in ports.items()
            if port.kind == TANGENT and (result := results.get(Port(OUTPUT, port.name))) is not None
        }
        self.views: dict[Node, tuple[Node, tuple[Node, ...]]] = {node: (node, ()) for node in self.parameters}
        for node in self.forward:
            match, reads = node.meta.get("match"), [value_of(operand)[0] for operand in operands(node)]
            several = isinstance(node.meta["val"], (tuple, list))
            if match is not None and match.view and not several and len(reads) == 1 and reads[0] in self.views:
                parameter, views = self.views[reads[0]]
                self.views[node] = (parameter, (node, *views))
        self.layers = [layer for node in self.forward if (layer := self.layer(node)) is not None]

    @cached_property
    def forward(self) -> list[Node]:
        """The calls of the forward, in order."""
        return [node for node in self.nodes if node.op == "call_function" and not self.backward(node)]

    @staticmethod
    def backward(node: Node) -> bool:
        return bool(node.meta.get("phase") == "backward")

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
        """The layer that a call is, if it is one."""
        reads = [value_of(operand)[0] for operand in operands(node)]
        weights = [slot for slot, read in enumerate(reads) if read in self.views and read.meta["val"].dim() > 1]
        others = [slot for slot, read in enumerate(reads) if read not in self.views]
        if len(weights) != 1 or len(others) != 1 or node in self.views:
            return None
        (weight,), (read,) = weights, others
        cuts = [s for s in node.meta["signatures"] if isinstance(s.inputs[weight], Split)]
        column = next((s for s in cuts if s.inputs[read] == B and isinstance(s.outputs[0], Split)), None)
        row = next((s for s in cuts if isinstance(s.inputs[read], Split) and isinstance(s.outputs[0], Partial)), None)
        if column is None or row is None:
            return None
        sources = tuple((slot, *self.views[source]) for slot, source in enumerate(reads) if source in self.views)
        return Layer(node, read, weight, column, row, sources)

    def between(self, columns: Iterable[Layer], rows: Iterable[Layer]) -> list[Node]:
        """What reads the rows and what the columns read, in the forward."""
        made = {layer.node for layer in rows}
        read = {value_of(operands(layer.node)[layer.read])[0] for layer in columns}
        found = []
        for node in self.forward:
            reads = any(value_of(operand)[0] in made for operand in operands(node))
            if (reads or node in read) and node not in made and not sums(node):
                found.append(node)
        return found

    @staticmethod
    def leaving(node: Node, state: State) -> Signature | None:
        """The first signature that leaves a node in a state, nothing partial."""
        whole = (s for s in node.meta["signatures"] if not any(isinstance(i, Partial) for i in s.inputs))
        return next((s for s in whole if s.outputs[0] == state), None)


def sums(node: Node) -> bool:
    """Whether a node is a product that sums over what two operands have."""
    return any(
        isinstance(s.outputs[0], Partial) and sum(isinstance(state, Split) for state in s.inputs) > 1
        for s in node.meta["signatures"]
    )


@dataclass
class Follower:
    """Follows states on one axis from op to op, and pins the ops whose rules take the states as they are.

    fixed: signatures as given; none for `loose` nodes. A tangent has the state of its output. reduced: the state to which
    the partial sum that a node leaves is reduced before what is not linear; without, nothing is known of it. gathered: a
    state in which activations are not read by products, but whole.
    """

    model: Model
    states: States
    fixed: Mapping[Node, Signature] = field(default_factory=dict)
    loose: Iterable[Node] = ()
    reduced: Callable[[Node], State] | None = None
    gathered: State | None = None
    partial: States = field(default_factory=dict)

    def run(self) -> dict[Node, Signature]:
        """The signatures of the pinned nodes."""
        model, skipped = self.model, set(self.loose)
        given = set(self.states)
        for _ in range(2):  # the second time with the states of tangents
            found: dict[Node, Signature] = {}
            for node in model.nodes:
                if node.op == "call_function" and node not in skipped:
                    keys = [value_of(operand) for operand in operands(node)]
                    signature = self.fixed.get(node) or self.taking(node, keys)
                    if signature is not None:
                        found[node] = signature
                        self.leave(node, signature)
                    if node in self.fixed and signature is not None:  # as it reads an input, the input is held
                        inputs = [key for key in keys if key[0] in model.inputs and key not in given]
                        self.states |= {key: signature.inputs[keys.index(key)] for key in inputs}
            self.states |= {(node, 0): self.states[key] for node, key in model.tangents.items() if key in self.states}
        return found

    def leave(self, node: Node, signature: Signature) -> None:
        """Note the states of a node's results."""
        for index, state in enumerate(signature.outputs):
            if not isinstance(state, Partial):
                self.states[node, index] = state
            elif self.reduced is not None:
                self.states[node, index], self.partial[node, index] = self.reduced(node), state

    def taking(self, node: Node, keys: Sequence[tuple[Node, int]]) -> Signature | None:
        """The signature that takes the operands in their states, as far as these are known; None if none does."""
        signatures: tuple[Signature, ...] = node.meta["signatures"]
        if keys and all(key in self.partial for key in keys):
            sums_alike = [s for s in signatures if list(s.inputs) == [self.partial[key] for key in keys]]
            if sums_alike and len(keys) > 1:
                return sums_alike[0]
            if sums_alike:  # a view: whether the sum is reduced before or behind it is the same
                self.leave(node, sums_alike[0])
                return None
        product, read = sums(node), [self.states.get(key) for key in keys]
        if product and self.gathered is not None:
            read = [
                B if state == self.gathered and key[0] not in self.model.views else state
                for state, key in zip(read, keys)
            ]
        if any(isinstance(state, Split) for state in read):
            fitting = (s for s in signatures if all(r in (None, state) for r, state in zip(read, s.inputs)))
            return next((s for s in fitting if s.factor is not None), None)
        return None if B not in read or (None in read and product) else signatures[0]


def pairs(model: Model, layers: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
    """The layers to be split by columns, and those to be split by rows, whose operands' features are then split already.

    Every layer whose operand is whole is tried as a column; those whose features get to where they cannot be split, or
    leave the model, or reach no row are taken back, until none is.
    """
    mine = {layer.node: layer for layer in layers}
    refused: dict[Node, None] = {}
    while True:
        trial = Trial(model, mine, refused)
        if not trial.refused:
            return trial.columns, trial.rows
        refused |= trial.refused


class Trial:
    """One attempt at pairs: columns, rows, and the columns that cannot be."""

    def __init__(self, model: Model, mine: Mapping[Node, Layer], refused: Mapping[Node, None]) -> None:
        self.model, self.refused = model, dict[Node, None]()
        self.columns: list[Layer] = []
        self.rows: list[Layer] = []
        self.split: States = {}
        self.origins: dict[tuple[Node, int], tuple[Node, ...]] = {}  # by split value, the columns it comes from
        used: dict[Node, None] = {}
        for node in model.forward:
            keys = [value_of(operand) for operand in operands(node)]
            origins = tuple(dict.fromkeys(column for key in keys for column in self.origins.get(key, ())))
            layer = mine.get(node)
            if layer is None:
                self.carry(node, keys, origins)
            elif not origins:
                if node not in refused:
                    self.columns.append(layer)
                    self.put(node, layer.column, (node,))
            elif self.split.get(keys[layer.read]) == layer.row.inputs[layer.read]:
                self.rows.append(layer)
                used |= dict.fromkeys(origins)
            else:
                self.refused |= dict.fromkeys(origins)
        leaving = [column for key in model.results for column in self.origins.get(key, ())]
        self.refused |= dict.fromkeys([*leaving, *(c.node for c in self.columns if c.node not in used)])

    def carry(self, node: Node, keys: Sequence[tuple[Node, int]], origins: tuple[Node, ...]) -> None:
        """Go on with the split of the operands, if the node can; operands that are not split stay whole, or are weights."""
        if not origins:
            return
        for signature in node.meta["signatures"]:
            fits = all(
                state == self.split[key] if key in self.split else state == B or key[0] in self.model.views
                for key, state in zip(keys, signature.inputs)
            )
            if fits and not any(isinstance(state, Partial) for state in signature.outputs):
                self.put(node, signature, origins)
                return
        self.refused |= dict.fromkeys(origins)

    def put(self, node: Node, signature: Signature, origins: tuple[Node, ...]) -> None:
        """Note the split results of a node."""
        for index, state in enumerate(signature.outputs):
            if isinstance(state, Split):
                self.split[node, index], self.origins[node, index] = state, origins
