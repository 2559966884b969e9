"""What is captured: a module with its loss, as a function of named fake parameters, buffers and input leaves."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import FakeTensor, FakeTensorMode, LazyGraphModule, composite_ops, slots, storage_of
from sbpc.errors import CaptureError
from sbpc.graph import ports
from sbpc.graph.ports import Port, Ports
from sbpc.graph.pytree import flatten, paths, unflatten

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Program:
    """`arguments` is the structure of (args and targets, kwargs); the first `count` positional ones go to the module.

    `parameters` and `buffers` are fakes by first qualified name, `inputs` the fakes of the argument leaves, `labels`
    readable names for them. `known`: real tensors that may turn up in the forward although nothing passes them in, by
    id: with the fake that stands for them, or None where their values are constants (the buffers of a loss module).
    """

    module: nn.Module
    loss: Callable[..., Any] | None
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

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The tensor leaves and the structure of the result. Raises CaptureError if it holds no tensor."""
        args, kwargs = unflatten(self.arguments, inputs)
        with self._autocast():
            result = self.module(*args[: self.count], **kwargs)
            if self.loss is not None:
                result = self.loss(result, *args[self.count :])
        leaves, structure = flatten(result, "the result")
        if not leaves:
            raise CaptureError("the model returns no tensor\n  Return the tensors that you want computed.")
        return leaves, structure

    @contextlib.contextmanager
    def substituted(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> Iterator[Callable[[], Named]]:
        """While this lasts the module holds `parameters` and `buffers`; afterwards it is as it was in every attribute.

        Gives a function that tells which buffers the forward has replaced (`self.count = self.count + 1`) and by what.
        """
        given = {**parameters, **buffers}
        places = list(slots(self.module))
        with _unchanged(self.module):
            for name, table, key in places:
                table[key] = given[self.tied.get(name, name)]

            def replaced() -> Named:
                found: Named = {}
                for name, table, key in places:
                    value = table.get(key)
                    if value is given[self.tied.get(name, name)]:
                        continue
                    if name not in buffers or not isinstance(value, Tensor):
                        raise CaptureError(f"the forward replaces {name!r}\n  Only buffers may change in a forward.")
                    found[name] = value
                return found

            yield replaced

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def seed(self) -> Tensor:
        """A fake for the seed of a step."""
        with self.mode:
            return torch.empty((), dtype=torch.int64, device=self.device)

    def placeholders(self) -> Iterator[tuple[Port, str, Tensor]]:
        """Every placeholder but the seed and the tangents, in order: its port, the name it should have, its fake."""
        for name, value in self.parameters.items():
            yield Port(ports.PARAMETER, name), name.replace(".", "_"), value
        for name, value in self.buffers.items():
            yield Port(ports.BUFFER, name), name.replace(".", "_"), value
        for at, (label, value) in enumerate(zip(self.labels, self.inputs)):
            yield Port(ports.INPUT, str(at)), label, value

    def wanted(self, train: bool) -> list[tuple[Port, Tensor]]:
        """The gradients to compute: their ports, and the fakes with respect to which."""
        kinds = {ports.PARAMETER: ports.GRADIENT, ports.INPUT: ports.INPUT_GRADIENT}
        asked = [(port, value) for port, _, value in self.placeholders() if train and value.requires_grad]
        return [(Port(kinds[port.kind], port.name), value) for port, value in asked]


def program(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[..., Any] | None,
    targets: Sequence[Any],
    dtype: torch.dtype | None,
) -> Program:
    """Fake tensors in the place of all parameters, buffers and arguments, which may be real, meta or fake.

    Raises CaptureError for tensors that are not plain, that share memory without being one, or have no shape yet.
    """
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise CaptureError(f"dtype is {dtype}\n  The autocast type is torch.bfloat16 or torch.float16.")
    if loss is None and targets:
        raise CaptureError("targets without a loss\n  Give the loss, or pass the targets as arguments.")
    for path, given in (("args", tuple(args)), ("kwargs", dict(kwargs)), ("targets", tuple(targets))):
        flatten(given, path)  # for the error, which names the argument
    leaves, arguments = flatten(((*args, *targets), dict(kwargs)))
    parameters, tied = _first_names(module.named_parameters(remove_duplicate=False))
    buffers, tied_buffers = _first_names(module.named_buffers(remove_duplicate=False))
    named = {**parameters, **buffers}
    labels = _labels(module, loss, len(args), paths(arguments))
    for name, value in (*named.items(), *zip(labels, leaves)):
        _check_plain(name, value)
    _check_memory(parameters, named)
    device = _device((*named.values(), *leaves))
    mode = FakeTensorMode()
    fakes: Named = {}
    for name, value in parameters.items():
        fakes[name] = nn.Parameter(_fake(value, device, mode), value.requires_grad)
    fakes_of_buffers = {name: _fake(value, device, mode) for name, value in buffers.items()}
    inputs = [_fake(value, device, mode).requires_grad_(value.requires_grad) for value in leaves]
    known: dict[int, tuple[Tensor, Tensor | None]] = {}
    for name, value in buffers.items():
        known[id(value)] = value, fakes_of_buffers[name]
    if isinstance(loss, nn.Module):
        if next(loss.parameters(), None) is not None:
            raise CaptureError("the loss has parameters\n  Make the loss part of the module.")
        known.update({id(value): (value, None) for value in loss.buffers()})
    return Program(
        module, loss, len(args), arguments, fakes, fakes_of_buffers, inputs, labels, {**tied, **tied_buffers},
        known, device, dtype, mode,
    )  # fmt: skip


@contextlib.contextmanager
def environment(train: bool) -> Iterator[None]:
    """What a forward runs in, wherever the caller stands."""
    with torch.inference_mode(False), torch.set_grad_enabled(train), composite_ops():
        yield


def finish(
    source: Program,
    graph: Graph,
    constants: Mapping[str, Tensor],
    inputs: Sequence[Port],
    outputs: Sequence[tuple[Port, Node]],
    results: Any,
    values: Mapping[Node, Any],
    train: bool,
) -> GraphModule:
    """The module of a traced graph: dead nodes gone, ports in its meta, `val` from `values` but free of autograd."""
    end = graph.output(tuple(node for _, node in outputs))
    end.meta = {"module": "", "stack_trace": "", "phase": "backward" if train else "forward"}
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    known: dict[Any, Tensor] = {}
    for node in graph.nodes:
        if node is not end:
            node.meta["val"] = _snapshot(values[node], source.mode, known)
    held = {node.target: constants[node.target] for node in graph.find_nodes(op="get_attr")}
    gm: GraphModule = LazyGraphModule(held, graph)
    done = {port.name for port, _ in outputs if port.kind == ports.GRADIENT}
    trainable = [name for name, value in source.parameters.items() if value.requires_grad]
    gm.meta["ports"] = Ports(
        inputs=tuple(inputs),
        outputs=tuple(port for port, _ in outputs),
        arguments=source.arguments,
        results=results,
        tied=source.tied,
        unused=tuple(name for name in trainable if train and name not in done),
        frozen=tuple(name for name in source.parameters if name not in trainable),
    )
    return gm


def placeholder(graph: Graph, label: str) -> Node:
    """A placeholder that is called `label` where it can be: no keyword, no second of that name."""
    node = graph.placeholder(label)
    node.target = node.name
    return node


def _snapshot(value: Any, mode: FakeTensorMode, known: dict[Any, Tensor]) -> Any:
    """A value free of autograd; values that look alike share one fake."""
    if isinstance(value, Tensor):
        key = (value.shape, value.stride(), value.dtype, value.device)
        if key not in known:
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            known[key] = FakeTensor(mode, meta, value.device)
        return known[key]
    return tuple(_snapshot(item, mode, known) for item in value) if isinstance(value, (tuple, list)) else None


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Put the attributes of all submodules back afterwards: a forward may cache fake tensors or count its calls."""
    tables = ("_parameters", "_buffers", "_modules")
    before = [(part, dict(vars(part)), [dict(vars(part)[table]) for table in tables]) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, entries in before:
            vars(part).clear()
            vars(part).update(attributes)
            for table, items in zip(tables, entries):
                vars(part)[table].clear()
                vars(part)[table].update(items)


def _device(tensors: Iterable[Tensor]) -> torch.device:
    """Where the program runs: the device of the tensors, cpu where they are meta or that device is not there."""
    cpu = torch.device("cpu")
    found = next((value.device for value in tensors if value.device.type not in ("meta", "cpu")), cpu)
    return found if found.type == "cpu" or torch.get_device_module(found).is_available() else cpu


def _fake(value: Tensor, device: torch.device, mode: FakeTensorMode) -> Tensor:
    at = device if value.device.type == "meta" or device.type == "cpu" else value.device
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=at)


def _first_names(named: Iterable[tuple[str, Tensor]]) -> tuple[Named, dict[str, str]]:
    first: dict[int, str] = {}
    found: Named = {}
    tied: dict[str, str] = {}
    for name, value in named:
        if id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)] = name
            found[name] = value
    return found, tied


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


def _check_memory(parameters: Named, named: Named) -> None:
    """Two parameters over the same memory are one in eager mode, and would be trained apart here."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, value in named.items():
        start = int(value.storage_offset()) * value.itemsize
        extent = sum((int(size) - 1) * int(stride) for size, stride in zip(value.shape, value.stride())) + 1
        end = start + (extent * value.itemsize if value.numel() else 0)
        for low, high, other in spans.setdefault(storage_of(value), []):
            trained = any(n in parameters and parameters[n].requires_grad for n in (name, other))
            if start < high and low < end and trained:
                what = f"{name!r} shares memory with {other!r}"
                raise CaptureError(f"{what}\n  Tie them as one parameter: a.weight = b.weight.")
        spans[storage_of(value)].append((start, end, name))


def _labels(module: nn.Module, loss: Any, count: int, leaf_paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Readable names of the argument leaves: the name in the signature, then keys and numbers."""
    names = _positional(module.forward)
    after = _positional(loss.forward if isinstance(loss, nn.Module) else loss)[1:] if loss is not None else []
    found = []
    for group, *path in leaf_paths:
        first, *rest = path
        if group == 0:
            at, table = (first, names) if first < count else (first - count, after)
            first = table[at] if at < len(table) else f"input_{at}" if first < count else f"target_{at}"
        found.append("_".join(map(str, (first, *rest))))
    return found


def _positional(function: Any) -> list[str]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
