"""Makes a module with its loss a function of named fake parameters, buffers and input leaves, which the tracers
call."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import (
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    composite_ops,
    has_hook,
    quiet_fakes,
    slots,
    storage_of,
)
from sbpc.errors import CaptureError
from sbpc.graph import ports, product_shapes  # noqa: F401 - the latter tells shapes of products
from sbpc.graph.guards import GUARDS, LOSS, Planned
from sbpc.graph.loss import named_loss
from sbpc.graph.ports import Port, Ports
from sbpc.graph.pytree import flatten, paths, unflatten
from sbpc.graph.rewrite import drop_unused
from sbpc.passes.capture.attributes import Attributes
from sbpc.passes.capture.contents import First

Named = dict[str, Tensor]


@dataclass(frozen=True)
class FakeModel:
    """A module with its loss, and the fake tensors on which it runs.

    arguments: the structure of (args and targets, kwargs); the first `count` positional ones go to the module.
    parameters, buffers: fakes by first qualified name. inputs: fakes of the argument leaves; labels: readable names
    for them. known: by id the real tensors that may turn up in the forward although nothing passes them in, with the
    fake that stands for each, or None where its values are constants (a buffer of a loss module). shared: by name of
    a parameter or buffer another over the same memory. guards, roots, first: what `Attributes` found in the last
    forward.
    """

    module: nn.Module
    loss: Callable[..., Any] | str | None
    count: int
    arguments: Any
    parameters: Named
    buffers: Named
    inputs: list[Tensor]
    labels: list[str]
    tied: dict[str, str]
    known: dict[int, tuple[Tensor, Tensor | None]]
    device: torch.device
    dtype: torch.dtype | None
    mode: FakeTensorMode
    shared: dict[str, str] = field(default_factory=dict)
    guards: dict[str, str] = field(default_factory=dict)
    roots: dict[str, Any] = field(default_factory=dict)
    first: list[First] = field(default_factory=list)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Returns the tensor leaves and the structure of the result. Raises CaptureError if it holds no tensor."""
        args, kwargs = unflatten(self.arguments, inputs)
        autocast = contextlib.nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)
        with autocast:
            result = self.module(*args[: self.count], **kwargs)
            if callable(self.loss):
                result = self.loss(result, *args[self.count :])
        leaves, structure = flatten(result, "the result", drops=True)
        if isinstance(self.loss, str):  # others get no gradient
            number = named_loss(structure, self.loss)
            leaves = [leaf if at == number else leaf.detach() for at, leaf in enumerate(leaves)]
        if not leaves:
            raise CaptureError("the model returns no tensor\n  Return the tensors that you want computed.")
        return leaves, structure

    @contextlib.contextmanager
    def substituted(self, parameters: Mapping[str, Tensor], buffers: Named) -> Iterator[Callable[[], Named]]:
        """Puts `parameters` and `buffers` into the module while this lasts. Afterwards every attribute is as it was.

        Yields a function that returns which buffers the forward has replaced (`self.count = self.count + 1`) and by
        what.
        """
        given = {**parameters, **buffers}
        places = list(slots(self.module))
        with self._watched() as attributes:
            for name, table, key in places:
                table[key] = given[self.tied.get(name, name)]

            def replaced() -> Named:
                values: Named = {}
                for name, table, key in places:
                    value = table.get(key)
                    if value is given[self.tied.get(name, name)]:
                        continue
                    if name not in buffers or not isinstance(value, Tensor):
                        raise CaptureError(f"the forward replaces {name!r}\n  Only buffers may change in a forward.")
                    values[name] = value
                attributes.check(given.values())
                return values

            yield replaced

    @contextlib.contextmanager
    def _watched(self) -> Iterator[Attributes]:
        """Watches the attributes of the module and its loss while this lasts. Afterwards all are as they were."""
        attributes = Attributes(self.module.named_modules())
        try:
            if callable(self.loss):
                attributes.begin(LOSS, self.loss)
            yield attributes
        finally:
            attributes.restore()
        self.guards.update(attributes.guards)
        self.roots.update(attributes.roots)
        self.first[:] = attributes.first

    def seed(self) -> Tensor:
        """Returns a fake for the seed of a step."""
        with self.mode:
            return torch.empty((), dtype=torch.int64, device=self.device)

    def placeholders(self) -> Iterator[tuple[Port, str, Tensor]]:
        """Yields port, wished name and fake of every placeholder in order, except the seed and the tangents."""
        for name, value in self.parameters.items():
            yield Port(ports.PARAMETER, name), name.replace(".", "_"), value
        for name, value in self.buffers.items():
            yield Port(ports.BUFFER, name), name.replace(".", "_"), value
        for at, (label, value) in enumerate(zip(self.labels, self.inputs)):
            yield Port(ports.INPUT, str(at)), label, value

    def wanted(self, train: bool) -> list[tuple[Port, Tensor]]:
        """Returns the gradients to compute: their ports, and the fakes with respect to which."""
        kinds = {ports.PARAMETER: ports.GRADIENT, ports.INPUT: ports.INPUT_GRADIENT}
        asked = [(port, value) for port, _, value in self.placeholders() if train and value.requires_grad]
        return [(Port(kinds[port.kind], port.name), value) for port, value in asked]


def fake_model(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Any, targets: Sequence[Any], dtype: Any
) -> FakeModel:
    """Returns the model with fakes in the place of all parameters, buffers and arguments, which may be real, meta or
    fake.

    Raises CaptureError for tensors that are not plain, that share memory without being one, or have no shape yet.
    """
    _check_request(module, loss, targets, dtype)
    for path, given in (("args", tuple(args)), ("kwargs", dict(kwargs)), ("targets", tuple(targets))):
        flatten(given, path)  # for the error, which names the argument
    leaves, arguments = flatten(((*args, *targets), dict(kwargs)))
    parameters, tied = _first_names(module.named_parameters(remove_duplicate=False))
    buffers, tied_buffers = _first_names(module.named_buffers(remove_duplicate=False))
    labels = _labels(module, loss, len(args), paths(arguments))
    for name, value in (*parameters.items(), *buffers.items(), *zip(labels, leaves)):
        _check_plain(name, value)
    shared = _shared_memory(parameters, {**parameters, **buffers})
    device, mode = _device((*parameters.values(), *buffers.values(), *leaves)), FakeTensorMode()
    fakes: Named = {}
    for name, value in parameters.items():
        fakes[name] = nn.Parameter(_fake(value, device, mode), value.requires_grad)
    fake_buffers = {name: _fake(value, device, mode) for name, value in buffers.items()}
    inputs = [_fake(value, device, mode).requires_grad_(value.requires_grad) for value in leaves]
    known: dict[int, tuple[Tensor, Tensor | None]] = {
        id(buffers[name]): (buffers[name], fake_buffers[name]) for name in buffers
    }
    if isinstance(loss, nn.Module):
        known |= {id(value): (value, None) for value in loss.buffers()}
    return FakeModel(
        module,
        loss,
        len(args),
        arguments,
        fakes,
        fake_buffers,
        inputs,
        labels,
        {**tied, **tied_buffers},
        known,
        device,
        dtype,
        mode,
        shared,
    )


def _check_request(module: nn.Module, loss: Any, targets: Sequence[Any], dtype: Any) -> None:
    """Raises CaptureError for a module, an autocast type or a loss that cannot be captured."""
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            where = f": {name!r} is one" if name else ""
            raise CaptureError(
                f"a TorchScript module cannot be captured{where}\n  Give the module that it was scripted from."
            )
        if isinstance(each, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise CaptureError(
                f"{name or 'the model'} is a {type(each).__name__}, and the plan is the parallelism\n  Give the module "
                "within, its .module."
            )
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise CaptureError(f"dtype is {dtype}\n  The autocast type is torch.bfloat16 or torch.float16.")
    hooked = next((name for name, value in module.named_parameters() if has_hook(value)), None)
    if hooked is not None:
        raise CaptureError(
            f"the parameter {hooked!r} has a hook, which no program calls\n  Register it on that of the parallel "
            "module."
        )
    if not callable(loss) and targets:
        raise CaptureError(
            "targets without a loss that takes them\n  Give a function, or pass the targets as arguments."
        )
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        raise CaptureError("the loss has parameters\n  Make the loss part of the module.")


@contextlib.contextmanager
def environment(train: bool) -> Iterator[None]:
    """Sets the modes in which a forward runs, whatever those of the caller are."""
    with torch.inference_mode(False), torch.set_grad_enabled(train), composite_ops(), quiet_fakes():
        yield


def finish(
    source: FakeModel,
    graph: Graph,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Port],
    outputs: Sequence[tuple[Port, Node]],
    results: Any,
    values: Mapping[Node, Any],
    train: bool,
) -> GraphModule:
    """Returns the module of a traced graph: without dead nodes, with ports in its meta and `values` as its `val`."""
    for port, _ in outputs:
        if port.kind == ports.MUTATION and (other := source.shared.get(port.name)):
            raise CaptureError(
                f"the forward writes {port.name!r}, which shares memory with {other!r}: a write into one reaches the "
                "other in eager mode\n  Register one of them, and make the other of it in the forward."
            )
    end = graph.output(tuple(node for _, node in outputs))
    end.meta = {"module": "", "stack_trace": "", "phase": "backward" if train else "forward"}
    drop_unused(graph)
    known: dict[Any, Tensor] = {}
    for node in graph.nodes:
        if node is not end:
            node.meta["val"] = _snapshot(values[node], source.mode, known)
    gm: GraphModule = LazyGraphModule({n.target: constants[n.target] for n in graph.find_nodes(op="get_attr")}, graph)
    gm.meta["ports"] = _ports(source, inputs, [port for port, _ in outputs], results, train)
    gm.meta[GUARDS] = Planned({path: [text] for path, text in sorted(source.guards.items())}, source.roots)
    return gm


def _ports(source: FakeModel, inputs: Sequence[Port], outputs: Sequence[Port], results: Any, train: bool) -> Ports:
    trainable = [name for name, value in source.parameters.items() if value.requires_grad]
    return Ports(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        arguments=source.arguments,
        results=results,
        tied=source.tied,
        unused=tuple(name for name in trainable if train and Port(ports.GRADIENT, name) not in outputs),
        frozen=tuple(name for name in source.parameters if name not in trainable),
    )


def placeholder(graph: Graph, label: str) -> Node:
    """Returns a placeholder that is called `label` where it can be: no keyword, no second of that name."""
    node = graph.placeholder(label)
    node.target = node.name
    return node


def _snapshot(value: Any, mode: FakeTensorMode, known: dict[Any, Tensor]) -> Any:
    """Returns a value free of autograd. Values of the same metadata share one fake."""
    if isinstance(value, Tensor):
        key = (value.shape, value.stride(), value.dtype, value.device)
        if key not in known:
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            known[key] = FakeTensor(mode, meta, value.device)
        return known[key]
    return tuple(_snapshot(item, mode, known) for item in value) if isinstance(value, (tuple, list)) else None


def _device(tensors: Iterable[Tensor]) -> torch.device:
    """Returns where the program runs: the device of the tensors, cpu where they are meta or that device is not
    there."""
    cpu = torch.device("cpu")
    device = next((value.device for value in tensors if value.device.type not in ("meta", "cpu")), cpu)
    return device if device.type == "cpu" or torch.get_device_module(device).is_available() else cpu


def _fake(value: Tensor, device: torch.device, mode: FakeTensorMode) -> Tensor:
    at = device if value.device.type == "meta" or device.type == "cpu" else value.device
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=at)


def _first_names(named: Iterable[tuple[str, Tensor]]) -> tuple[Named, dict[str, str]]:
    """Returns the tensors by their first names, and by every further name of one its first name."""
    first: dict[int, str] = {}
    values: Named = {}
    tied: dict[str, str] = {}
    for name, value in named:
        if first.setdefault(id(value), name) == name:
            values[name] = value
        else:
            tied[name] = first[id(value)]
    return values, tied


def _check_plain(name: str, value: Tensor) -> None:
    kinds = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
    if nn.parameter.is_lazy(value):
        raise CaptureError(f"{name!r} has no shape yet\n  Run the model once, so that its lazy layers are made.")
    if value.is_nested:
        raise CaptureError(f"{name!r} is a nested tensor\n  Pad to one length, and mask the padding.")
    if type(value) not in kinds or value.layout != torch.strided:
        kind = type(value).__name__ if value.layout == torch.strided else f"tensor of layout {value.layout}"
        raise CaptureError(f"{name!r} is a {kind}\n  Only plain dense tensors can be captured.")
    if not all(isinstance(size, int) for size in value.shape):
        raise CaptureError(f"{name!r} has the symbolic shape {tuple(value.shape)}\n  Give sizes that are numbers.")


def _shared_memory(parameters: Named, named: Named) -> dict[str, str]:
    """Returns by name of what shares its memory with another, that one's name. Refuses two parameters over the same
    memory: they are one in eager mode, and would be trained apart here."""
    shared: dict[str, str] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, value in named.items():
        start = int(value.storage_offset()) * value.itemsize
        extent = sum((int(size) - 1) * int(stride) for size, stride in zip(value.shape, value.stride())) + 1
        end = start + (extent * value.itemsize if value.numel() else 0)
        for low, high, other in spans.setdefault(storage_of(value), []):
            trained = any(n in parameters and parameters[n].requires_grad for n in (name, other))
            if start < high and low < end:
                if trained:
                    what = f"{name!r} shares memory with {other!r}"
                    raise CaptureError(f"{what}\n  Tie them as one parameter: a.weight = b.weight.")
                shared |= {name: other, other: name}
        spans[storage_of(value)].append((start, end, name))
    return shared


def _labels(module: nn.Module, loss: Any, count: int, leaf_paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Returns readable names of the argument leaves: the name in the signature, then keys and numbers."""
    names = _positional(module.forward)
    after = _positional(loss.forward if isinstance(loss, nn.Module) else loss)[1:] if callable(loss) else []
    labels = []
    for group, *path in leaf_paths:
        first, *rest = path
        if group == 0:
            at, table = (first, names) if first < count else (first - count, after)
            first = table[at] if at < len(table) else f"input_{at}" if first < count else f"target_{at}"
        labels.append("_".join(map(str, (first, *rest))))
    return labels


def _positional(function: Any) -> list[str]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
