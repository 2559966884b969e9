"""Traces lightly: every op that torch dispatches on fake tensors becomes a node of one graph.

Tensors are matched to nodes by identity and all kept alive; a tensor that was never seen raises, so that nothing is
silently left out. A write into fresh memory, or into a slice of it, is made functional; for any other write
`NeedsAot` is raised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from sbpc._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    UnsupportedOperatorException,
    autograd_node,
    next_sequence_number,
    storage_of,
)
from sbpc.errors import CaptureError
from sbpc.graph.operands import functional_form
from sbpc.graph.ports import SEED_PORT, Port
from sbpc.graph.rewrite import called, put
from sbpc.passes.capture.fake_model import FakeModel, placeholder
from sbpc.passes.capture.random_ops import drawn, is_random
from sbpc.passes.capture.repeats import Repeats
from sbpc.passes.capture.source_lines import user_error, user_stack

aten, DEVICE = torch.ops.aten, torch.ops.prim.device.default
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
LIFTS = (aten.lift_fresh.default, aten.lift.default)
PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # real tensors, that is
STATISTICS = {  # arguments that are written in training although the schema does not say so
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
# By view what writes it back into the whole.
SCATTERS: dict[Any, Any] = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}


class NeedsAot(Exception):
    """The light tracer cannot do this; AOTAutograd may."""


class Watch(TorchDispatchMode):
    """Watches every op of a forward: refuses what no graph can hold, and knows which submodule is being called."""

    supports_higher_order_operators = True  # so that `refuse` sees them

    def __init__(self, source: FakeModel) -> None:
        super().__init__()
        self.source, self.known = source, source.known
        self.modules = {id(part): name for name, part in source.module.named_modules()}
        self.path = [""]
        self.given_seed: Tensor | None = None
        self.memory: dict[int, tuple[int, Tensor]] = {}  # by id of a tensor, which is kept alive: its storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse(func)
        if is_random(func, args, kwargs):
            return drawn(self.again, self.seed, func, args, kwargs)
        if func._schema.is_mutable and func.namespace != "aten":
            raise user_error(
                f"{func} writes into its arguments", user_stack(), "Give it a form that returns new tensors."
            )
        if func._schema.name.startswith("aten::_fused_") and func._schema.is_mutable:
            return self._write_lists(func, args, kwargs)
        for value in tensors_in((args, kwargs)):
            if type(value) in PLAIN and func not in LIFTS and self.known.get(id(value), (None, value))[1] is not None:
                raise unregistered(value)
            self.check_memory(value)
        torch.fx.traceback.get_current_meta()["custom"] = {"sbpc": (self.path[-1], user_stack())}
        out = run(func, args, kwargs, self.stack())
        for value in tensors_in(out):
            self.check_memory(value)
        return out

    def _write_lists(self, func: Any, args: Any, kwargs: Any) -> None:
        """Runs a fused step of an optimizer in its functional form: AOTAutograd cannot take one with an empty list."""
        results = self.again(functional_form(func), *args, **kwargs)
        for before, after in zip(args, results):
            for old, new in zip(before, after):
                self.again(aten.copy_.default, old, new)

    def stack(self) -> str:
        """Returns the lines of the model that led here."""
        return user_stack()

    def again(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs another op in the place of one that was dispatched."""
        return self.__torch_dispatch__(op, (), args, kwargs)

    def seed(self) -> Tensor:
        """Returns the seed of the step, an input of the program."""
        assert self.given_seed is not None
        return self.given_seed

    def check_memory(self, value: Tensor) -> None:
        """Remembers the memory of `value`. Raises CaptureError if it is another one than before."""
        storage = storage_of(value)
        if self.memory.setdefault(id(value), (storage, value))[0] != storage:
            what = "the forward assigns to the .data of a tensor, which no op shows"
            raise user_error(what, user_stack(), "Compute a new tensor instead.")

    @contextmanager
    def watching(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Keeps `path` at the submodule that is being called while this lasts. `values` must keep their memory."""

        def enter(module: nn.Module, _: Any) -> None:
            self.path.append(self.modules.get(id(module), self.path[-1]))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self.path.pop()

        for value in values:
            self.check_memory(value)
        before = nn.modules.module.register_module_forward_pre_hook(enter)
        after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
        for value in values:
            self.check_memory(value)


class Light(Watch):
    """Records every op into `graph`. `phase` is "forward" until the caller sets it to "backward"."""

    def __init__(self, source: FakeModel) -> None:
        super().__init__(source)
        self.graph, self.repeats, self.lines = Graph(), Repeats(source.mode), dict[Any, str]()
        self.phase = "forward"
        self.ports: list[Port] = []
        self.front: Node | None = None  # the last placeholder
        self.nodes: dict[int, Node] = {}
        self.kept: list[tuple[Node, Any]] = []  # every node with its value: ids stay unique while the values live
        self.constants: dict[str, Tensor] = {}
        self.fakes: dict[int, Tensor] = {}  # by id of a known real tensor
        self.sharing: dict[int, list[Tensor]] = {}  # by storage: the tensors that share it
        self.given: set[int] = set()  # storages that were there before the forward
        self.by_number: dict[int, Node] = {}  # by autograd sequence number: the forward op that made the autograd node
        self.last: Node | None = None

    def placeholder(self, port: Port, name: str, value: Tensor) -> None:
        """Makes `value` known as an input of the graph. What shares its memory may not be written."""
        with self.graph.inserting_after(self.front) if self.front else nullcontext():
            node = self.front = placeholder(self.graph, name)
        node.meta.update(module="", stack_trace="", phase=self.phase)
        self.ports.append(port)
        self._keep(node, value)
        self.given.add(storage_of(value))

    def seed(self) -> Tensor:
        """Returns the seed of the step. The first draw makes it an input."""
        if self.given_seed is None:
            self.given_seed = self.source.seed()
            self.placeholder(SEED_PORT, SEED_PORT.name, self.given_seed)
        return self.given_seed

    def node_of(self, value: Tensor) -> Node:
        """Returns the node that made `value`. Raises NeedsAot if it was made behind the tracer's back."""
        node = self.nodes.get(id(value))
        if node is None:
            raise NeedsAot("a tensor was made without an op that can be seen")
        self.check_memory(value)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:  # two calls of three: autograd asks it of every gradient
            return args[0].device
        kwargs = kwargs or {}
        refuse(func)
        if func in LIFTS and type(args[0]) in PLAIN:
            return self._fresh_constant(func, args[0])
        if is_random(func, args, kwargs):
            return drawn(self.again, self.seed, func, args, kwargs)
        if any(type(value) in PLAIN for value in tensors_in((args, kwargs))):
            args, kwargs = map_tensors((args, kwargs), self._registered)
        if any(args[at] is not None for at in STATISTICS.get(func, ())) and args[5]:
            raise NeedsAot(f"{func} writes running statistics")
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        out = self.repeats.call(func, args, kwargs, lambda: run(func, args, kwargs, self.stack()))
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            if id(out) not in self.nodes:
                self._keep(self._emit(func, args, kwargs), out)
        elif isinstance(out, (tuple, list)) and any(isinstance(item, Tensor) for item in out):
            node = self._emit(func, args, kwargs)
            self.kept.append((node, out))
            for at, item in enumerate(out):
                if isinstance(item, Tensor):
                    self._keep(called(self.graph, operator.getitem, (node, at), {}, meta=node.meta), item)

    def _emit(self, func: Any, args: Any, kwargs: Any) -> Node:
        args, kwargs = map_tensors((args, kwargs), self.node_of)
        node = called(self.graph, func, args, kwargs, func._schema.name.split("::")[1])
        path, stack = self.path[-1], user_stack(self.lines)
        if self.phase == "backward":
            source = self._forward_of()
            if source is not None and not stack:
                path, stack = source.meta["module"], source.meta["stack_trace"]
            self.last = node
        else:
            self.by_number.setdefault(next_sequence_number() - 1, node)
        put(node, "meta", {"module": path, "stack_trace": stack, "phase": self.phase})
        return node

    def stack(self) -> str:
        """Returns the lines of the model that led here, those of the forward op where autograd runs its backward."""
        source = self._forward_of() if self.phase == "backward" else None
        return user_stack() or (source.meta["stack_trace"] if source is not None else "")

    def _forward_of(self) -> Node | None:
        running: Any = autograd_node()
        maker = None if running is None else self.by_number.get(running._sequence_nr())
        return maker or self.last

    def _keep(self, node: Node, value: Tensor) -> None:
        self.kept.append((node, value))
        self.nodes[id(value)] = node
        self.check_memory(value)
        self.sharing.setdefault(storage_of(value), []).append(value)

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an in-place op whose target nothing else can see, and records its functional form instead."""
        target = args[0] if args else None
        written = [at for at, arg in enumerate(func._schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        functional = functional_form(func)
        simple = written == [0] and torch.Tag.inplace_view not in func.tags
        if not simple or functional is None or not isinstance(target, Tensor):
            raise NeedsAot(f"{func} has no functional form")
        self.node_of(target)
        views = None if storage_of(target) in self.given else self._views(target)
        if views is None:
            raise NeedsAot(f"{func} writes into memory that others can see")
        fresh = run(functional, args, kwargs, self.stack())
        other = fresh.dtype != target.dtype if views else fresh.stride() != target.stride()
        if other or fresh.shape != target.shape:
            raise NeedsAot(f"{func} keeps another shape or type than its functional form")
        node = self._emit(functional, args, kwargs)
        if views:
            self.kept.append((node, fresh))
        elif fresh.dtype != target.dtype:
            self.kept.append((node, fresh))
            node = called(self.graph, aten._to_copy.default, (node,), {"dtype": target.dtype}, "_to_copy", node.meta)
        run(func, args, kwargs, self.stack())
        self._written(target, node, fresh, views)
        return target

    def _views(self, target: Tensor) -> list[tuple[Node, Tensor]] | None:
        """Returns the views that lead to a tensor, last first, and what each is one of, from the whole of its
        memory; None if others do."""
        sharing = self.sharing[storage_of(target)]
        made = {self.nodes[id(value)]: value for value in reversed(sharing)}
        found, node = list[tuple[Node, Tensor]](), self.node_of(target)
        while node.target in SCATTERS and node.all_input_nodes[0] in made:
            view, node = node, node.all_input_nodes[0]
            found.append((view, made[node]))
        return found if place_of(made[node]) == place_of(sharing[0]) else None

    def _written(self, target: Tensor, node: Node, fresh: Tensor, views: Sequence[tuple[Node, Tensor]]) -> None:
        """Makes `node`, whose value is `fresh`, what a tensor is now, and of it its memory and the views that lead
        to it. Other views are forgotten: one that is read again needs AOTAutograd. A detached tensor is the whole of
        the other: a write is one of both.
        """
        for view, source in views:
            scatter, place, named = SCATTERS[view.target], view.args[1:], dict(view.kwargs)
            fresh = run(scatter, (source, fresh, *place), named, self.stack())
            node = self._emit(scatter, (source, node, *place), named)
            self.kept.append((node, fresh))
            if source is views[-1][1] and fresh.stride() != source.stride():
                raise NeedsAot(f"{scatter} gives other strides than the tensor into which a view writes")
        sharing, whole = self.sharing.pop(storage_of(target)), views[-1][1] if views else target
        for value in sharing:
            self.nodes.pop(id(value), None)
        self._share(sharing, whole, node)
        values = [target, *(source for _, source in views)]
        for (view, source), value in zip(reversed(views), reversed(values[:-1])):
            op: Any = view.target
            self._share(sharing, value, self._emit(op, (source, *view.args[1:]), dict(view.kwargs)))

    def _share(self, sharing: Sequence[Tensor], value: Tensor, node: Node) -> None:
        """Makes a node that of all tensors that are the same elements as a value."""
        for other in sharing:
            if place_of(other) == place_of(value):
                self._keep(node, other)

    def _fresh_constant(self, func: Any, value: Tensor) -> Tensor:
        """Keeps the tensor of `torch.tensor(1.)` in the model as a constant: nobody else holds it."""
        out: Tensor = func(value)
        self._keep(self._constant(value), out)
        return out

    def _constant(self, value: Tensor) -> Node:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.create_node("get_attr", name, name=name)
        put(node, "meta", {"module": self.path[-1], "stack_trace": user_stack(), "phase": self.phase})
        return node

    def _registered(self, value: Tensor) -> Tensor:
        """Returns `value` itself, or the fake for a real tensor that is a buffer under another name or one of the
        loss."""
        if isinstance(value, FakeTensor):
            return value
        if id(value) not in self.fakes:
            if id(value) not in self.known:
                raise unregistered(value)
            fake = self.known[id(value)][1]
            if fake is None:
                fake = self.source.mode.from_tensor(value)
                self._keep(self._constant(value), fake)
                self.given.add(storage_of(fake))
            self.fakes[id(value)] = fake
        return self.fakes[id(value)]


def run(func: Any, args: Any, kwargs: Any, stack: str) -> Any:
    """Runs an op on fake tensors. Raises CaptureError if it needs their values, or gives other than dense tensors."""
    try:
        out = func(*args, **kwargs)
    except DATA_DEPENDENT as error:
        what = f"{func} needs the values of a tensor, and a captured graph has none"
        todo = "To log it, return it; call .item() on what the module returns. For a branch or mask, write torch.where."
        raise user_error(what, stack, todo) from error
    except UnsupportedOperatorException as error:
        what = f"{func} does not say what it gives for tensors without values"
        raise user_error(what, stack, "Tell it with torch.library.register_fake, or use another op.") from error
    for value in tensors_in(out):
        if value.layout != torch.strided or value.is_nested:
            what = f"{func} gives a tensor of layout {value.layout}"
            raise user_error(what, stack, "Only dense tensors can be planned: an nn.Embedding with sparse=False, say.")
    return out


def refuse(func: Any) -> None:
    """Raises CaptureError for an operator that takes functions, and for one that makes nested tensors."""
    if isinstance(func, HigherOrderOperator):
        what = f"{func} takes functions, and a captured graph holds plain ops"
        raise user_error(what, user_stack(), "Write it out: torch.where keeps both sides of a branch.")
    if "nested_tensor" in func.name():
        raise user_error(f"{func} makes a nested tensor", user_stack(), "Pad to one length, and mask the padding.")


def unregistered(value: Tensor) -> CaptureError:
    """Returns the error for a tensor that the model holds in an attribute: a graph could not follow later changes to
    it."""
    what = f"the model uses a tensor {list(value.shape)} that is no parameter, no buffer and no argument"
    return user_error(what, user_stack(), "Register it with register_buffer, or pass it as an argument.")


def place_of(value: Tensor) -> tuple[Any, ...]:
    """Returns which elements of its storage a tensor has, and in which order."""
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns the nested value with every tensor changed, without a frame of torch between caller and `change`: see
    `user_stack`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Returns all tensors inside a nested value."""
    tensors: list[Tensor] = []
    map_aggregate(value, lambda item: tensors.append(item) if isinstance(item, Tensor) else None)
    return tensors
