"""What experts do by hand, as pins: found in the structure of an annotated graph, never by names.

On each axis of a mesh states are followed through the graph: where a rule has a signature that takes the states of the
operands as they are, the node is pinned to it; where it has none (a weight is stored split and used whole, a sum is
still to be reduced) the node is left to the solver. So a baseline is the best plan of its scheme under the cost model.

data: every axis splits the batch (dim 0 of the inputs), parameters are whole. fsdp: the same, parameters are stored
once. megatron (Shoeybi et al. 2019): columns then rows on the last axis, the batch on the others. megatron+sp
(Korthikanti et al. 2022): between those pairs the last axis splits the sequence. summa (Xu and You 2021, "Optimus"):
batch and features on the last two axes. agarwal (Agarwal et al. 1995; Singh et al. 2024, "AxoNN"): the last three axes
are z, y, x; layers are summed over x and y in turn. one weird trick (Krizhevsky 2014): convolutions split the batch,
linear layers are columns then rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.fx import Node

from sbpc.errors import PlanError
from sbpc.graph.operands import operands, value_of
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.mesh.states import B, Partial, Split, State
from sbpc.passes.assign.expert_structure import Follower, Key, Layer, Model, States, column_row_pairs
from sbpc.rules import Signature
from sbpc.rules.choices import Candidates, Choice, may_cut


@dataclass
class Scheme:
    """What an expert asks for: by axis the signatures of nodes, and by parameter the states of its home.

    order: by parameter, axes that cut one dim, first cut first. spread: axes over which every parameter is stored once.
    """

    signatures: dict[int, dict[Node, Signature]] = field(default_factory=dict)
    homes: dict[Node, dict[int, State]] = field(default_factory=dict)
    order: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    spread: tuple[int, ...] = ()

    def store(self, axis: int, layer: Layer, signature: Signature) -> None:
        """Stores the parameters of a layer on `axis` as the signature reads them."""
        for node, state in layer.homes(signature).items():
            self.homes.setdefault(node, {})[axis] = state

    def store_whole(self, axes: Iterable[int], parameters: Iterable[Node]) -> None:
        """Stores parameters whole on every rank of the axes."""
        for node in parameters:
            self.homes.setdefault(node, {}).update(dict.fromkeys(axes, B))

    def homes_on(self, axis: int) -> States:
        """Returns the states of homes on one axis."""
        return {(node, 0): states[axis] for node, states in self.homes.items() if axis in states}


def data(model: Model, mesh: Mesh) -> Scheme:
    return split_batch(model, mesh, range(len(mesh.axes)), range(len(mesh.axes)))


def fsdp(model: Model, mesh: Mesh) -> Scheme:
    axes = tuple(range(len(mesh.axes)))
    return replace(split_batch(model, mesh, axes), spread=axes)


def megatron(model: Model, mesh: Mesh, stream: State = B) -> Scheme:
    *outer, tensor = range(len(mesh.axes))
    scheme = split_batch(model, mesh, outer, outer)
    columns_then_rows(scheme, model, tensor, stream, [layer for layer in model.layers if not layer.convolution])
    return scheme


def sequence_parallel(model: Model, mesh: Mesh) -> Scheme:
    if all(layer.node.meta["val"].dim() < 3 for layer in model.layers):
        raise PlanError("no linear layer has a sequence\n  Take 'megatron'.")
    return megatron(model, mesh, Split(1))


def summa(model: Model, mesh: Mesh) -> Scheme:
    *outer, i, j = need_axes(mesh, 2, "batch and features")
    scheme = split_batch(model, mesh, (*outer, i), outer)
    layers = linear_layers(model)
    for layer in layers:
        scheme.store(j, layer, layer.column)
        scheme.store(i, layer, layer.row)
    fixed = {layer.node: layer.column for layer in layers}
    scheme.signatures[j] = Follower(model, scheme.homes_on(j), fixed, reduced=split_features).run()
    return scheme


def agarwal(model: Model, mesh: Mesh) -> Scheme:
    *outer, z, y, x = need_axes(mesh, 3, "z, y and x")
    scheme = split_batch(model, mesh, (*outer, z), outer)
    summed_on = axes_of_sums(model, linear_layers(model), (x, y))
    for layer, axis in summed_on.items():
        scheme.store(axis, layer, layer.row)
        scheme.store(y if axis == x else x, layer, layer.column)
        scheme.homes[layer.parameter][z] = scheme.homes[layer.parameter][axis]
        scheme.order[layer.parameter] = (axis, z)
    for axis in (x, y):
        fixed = {layer.node: layer.row if on == axis else layer.column for layer, on in summed_on.items()}
        scheme.signatures[axis] = Follower(model, scheme.homes_on(axis), fixed, reduced=lambda _: B).run()
    return scheme


def one_weird_trick(model: Model, mesh: Mesh) -> Scheme:
    axes = range(len(mesh.axes))
    convolutions = [layer for layer in model.layers if layer.convolution]
    if not convolutions:
        raise PlanError("the model has no convolutions\n  Take 'megatron' for linear layers alone.")
    layers = linear_layers(model)
    batch = split_batch(model, mesh, axes, loose=[layer.node for layer in layers])
    scheme, forward = Scheme(), set(model.forward)
    scheme.store_whole(axes, [layer.parameter for layer in convolutions])
    for axis in axes:
        columns_then_rows(scheme, model, axis, B, layers)
        pinned = scheme.signatures[axis]
        for node, signature in batch.signatures[axis].items():
            if "convolution" in str(node.target) or (node not in pinned and node in forward):
                pinned[node] = signature
    return scheme


EXPERTS: dict[str, Callable[[Model, Mesh], Scheme]] = {
    "data": data,
    "fsdp": fsdp,
    "megatron": megatron,
    "megatron+sp": sequence_parallel,
    "summa": summa,
    "agarwal": agarwal,
    "one weird trick": one_weird_trick,
}


def expert_wishes(model: Model, mesh: Mesh, name: str) -> dict[str, Wish]:
    """Returns the pins of an expert by node.

    Raises PlanError if there is none of that name, or if the scheme does not fit the model or the mesh.
    """
    if name not in EXPERTS:
        raise PlanError(f"no baseline is called {name!r}\n  There are {', '.join(map(repr, EXPERTS))}.")
    try:
        scheme = EXPERTS[name](model, mesh)
    except PlanError as error:
        raise PlanError(f"the baseline {name!r} does not fit {mesh}: {error}") from error
    wishes: dict[str, Wish] = {}
    reason = f"the baseline {name!r}"
    for node in model.nodes:
        on = {axis: signatures[node] for axis, signatures in scheme.signatures.items() if node in signatures}
        if on and legal(node.meta["candidates"], on, mesh):
            wishes[node.name] = Wish(tuple((axis, s.outputs[0]) for axis, s in sorted(on.items())), reason=reason)
    for node in model.parameters:
        states = home_states(node, scheme, mesh)
        if states:
            axes = tuple(axis for axis in scheme.order.get(node, ()) if isinstance(states.get(axis), Split))
            order = (axes,) if len(axes) > 1 else ()
            wishes[node.name] = Wish(tuple(sorted(states.items())), order, reason=reason)
    return wishes


def home_states(node: Node, scheme: Scheme, mesh: Mesh) -> dict[int, State]:
    """Returns the states of a parameter's home on the axes on which the expert says one, where it can be cut so."""
    shape = node.meta["val"].shape
    if scheme.spread:
        ranks = tuple(mesh.sizes[axis] for axis in scheme.spread)
        dim = next((dim for dim, size in enumerate(shape) if may_cut(size, ranks, False, True)), None)
        return dict.fromkeys(scheme.spread, B if dim is None else Split(dim))
    asked = scheme.homes.get(node, {})
    states: dict[int, State] = {}
    for axis in dict.fromkeys((*scheme.order.get(node, ()), *asked)):
        state = asked[axis]
        if isinstance(state, Split):
            ranks = tuple(mesh.sizes[at] for at in (*(at for at in states if states[at] == state), axis))
            state = state if may_cut(shape[state.dim], ranks, len(ranks) > 1, True) else B
        states[axis] = state
    return states


def legal(candidates: Candidates, on: Mapping[int, Signature], mesh: Mesh) -> bool:
    """Whether a node may have these signatures at once, on the axes that have more than one rank."""
    first = candidates.signatures[0]
    if any(mesh.sizes[axis] == 1 and signature != first for axis, signature in on.items()):
        return False
    axes = tuple(range(len(mesh.axes)))
    return candidates.legal(Choice(tuple(on.get(axis, first) for axis in axes), axes), mesh.sizes)


def split_batch(
    model: Model, mesh: Mesh, axes: Sequence[int], whole: Iterable[int] = (), loose: Iterable[Node] = ()
) -> Scheme:
    """Returns a scheme that splits the batch on `axes`, everywhere but where it meets `loose` nodes.

    whole: axes on which parameters are whole.

    Raises PlanError if the batch is too small.
    """
    batch, ranks = model.batch, tuple(mesh.sizes[axis] for axis in axes)
    if axes and not may_cut(batch, ranks, False, True):
        problem = f"a batch of {batch} for {math.prod(ranks)} ranks"
        raise PlanError(f"{problem}\n  Give a larger batch, or fewer ranks on these axes.")
    signatures = Follower(model, model.batch_states, loose=loose).run() if axes else {}
    scheme = Scheme({axis: dict(signatures) for axis in axes})
    scheme.store_whole(whole, model.parameters)
    return scheme


def columns_then_rows(scheme: Scheme, model: Model, axis: int, stream: State, layers: Sequence[Layer]) -> None:
    """Splits layers by columns, then by rows on `axis`; what leaves rows and enters columns is in the state
    `stream`."""
    columns, rows = column_row_pairs(model, layers)
    if not rows:
        raise PlanError(
            "no linear layer's features reach another one that sums them\n  The model has no column-row pair."
        )
    fixed = {layer.node: layer.column for layer in columns} | {layer.node: layer.row for layer in rows}
    for layer in (*columns, *rows):
        scheme.store(axis, layer, fixed[layer.node])
    loose = [layer.node for layer in model.layers if layer.node not in fixed]
    fixed = streamed(model, columns, rows, stream) | fixed
    gathered = stream if isinstance(stream, Split) else None
    scheme.signatures[axis] = Follower(model, scheme.homes_on(axis), fixed, loose, lambda _: stream, gathered).run()


def streamed(model: Model, columns: Sequence[Layer], rows: Sequence[Layer], stream: State) -> dict[Node, Signature]:
    """Returns the signatures that leave what is between rows and columns in the state `stream`."""
    signatures: dict[Node, Signature] = {}
    for node in model.between(columns, rows):
        not_partial = (s for s in node.meta["signatures"] if not any(isinstance(state, Partial) for state in s.inputs))
        signature = next((s for s in not_partial if s.outputs[0] == stream), None)
        if signature is None:
            raise PlanError(f"%{node.name} cannot be {stream}\n  Take 'megatron', which leaves it whole.")
        signatures[node] = signature
    return signatures


def split_features(node: Node) -> State:
    """Returns the last dim of a node's result, split."""
    value = node.meta["val"]
    return Split(value.dim() - 1) if isinstance(value, Tensor) and value.dim() else B


def linear_layers(model: Model) -> list[Layer]:
    """Returns the linear layers. Raises PlanError if there are none."""
    layers = [layer for layer in model.layers if not layer.convolution]
    if not layers:
        raise PlanError("the model has no linear layer\n  Take 'data'.")
    return layers


def need_axes(mesh: Mesh, count: int, what: str) -> range:
    """Returns the numbers of the axes. Raises PlanError if there are fewer than `count`."""
    if len(mesh.axes) < count:
        raise PlanError(f"it needs {count} axes, for {what}\n  Give a mesh of {count} axes or more.")
    return range(len(mesh.axes))


def axes_of_sums(model: Model, layers: Sequence[Layer], axes: tuple[int, int]) -> dict[Layer, int]:
    """Returns the axis on which each layer sums: that on which its operand's features are split, the first for what
    comes in."""
    by_node = {layer.node: layer for layer in layers}
    features_on: dict[Key, int] = {}  # by value, the axis on which its features are split
    summed_on: dict[Layer, int] = {}
    for node in model.forward:
        keys = [value_of(operand) for operand in operands(node)]
        layer = by_node.get(node)
        if layer is not None:
            summed_on[layer] = features_on.get(keys[layer.read], axes[0])
            features_on[node, 0] = axes[1] if summed_on[layer] == axes[0] else axes[0]
            continue
        known = [features_on[key] for key in keys if key in features_on]
        if known:
            features_on |= {(node, index): known[0] for index in range(len(node.meta["signatures"][0].outputs))}
    return summed_on
