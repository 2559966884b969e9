"""What sbpc uses of torch's private parts, each name by itself: a new torch that breaks one breaks the test that is called after it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbpc import _compat
from sbpc.graph.product_shapes import shape_of_grouped_mm, shape_of_scaled_mm
from sbpc.plans.staged.schedules import zbv
from tests import test_compat_processes

aten = torch.ops.aten
X = torch.arange(6.0).reshape(2, 3)


class Calls(_compat.TorchDispatchMode):
    """Calls of ops in the order in which they came, and what `at_call` returns at each."""

    def __init__(self, at_call: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.at_call, self.found = at_call, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        self.found.append(self.at_call())
        return func(*args, **(kwargs or {}))


class Counted(nn.Module):
    """A module with a parameter, and a buffer that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.weight


def described() -> set[Any]:
    """What AOTAutograd says of every input and output of the joint graph of Counted."""
    with contextlib.ExitStack() as stack:
        joint = _compat.aot_export_joint_with_descriptors(stack, Counted(), (X.clone().requires_grad_(),))
    nodes = joint.graph_module.graph
    return {*(node.meta["desc"] for node in nodes.find_nodes(op="placeholder")), *nodes.output_node().meta["desc"]} - {
        None
    }


def raised_on_fakes(function: Callable[[Tensor], Any]) -> type[BaseException]:
    """The class of what a function raises on a tensor without values."""
    with _compat.FakeTensorMode() as mode, pytest.raises(Exception) as caught:
        function(mode.from_tensor(X))
    return caught.type


def without_fake(_: Tensor) -> Any:
    """Calls an op that does not say what it gives."""
    with torch.library._scoped_library("sbpc_test_compat", "DEF") as library:
        library.define("silent(Tensor x) -> Tensor")
        return torch.ops.sbpc_test_compat.silent(_)


def lazy_module_makes_its_code_at_the_first_call() -> bool:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), 2)))
    made = _compat.LazyGraphModule(nn.Module(), graph)
    before = made._needs_recompile()
    return before and torch.equal(made(X), 2 * X) and not made._needs_recompile()


def python_dispatcher_is_on() -> bool:
    key = torch._C.DispatchKey.PythonDispatcher
    with _compat.enable_python_dispatcher():
        on = torch._C._dispatch_tls_is_dispatch_key_included(key)
    return on and not torch._C._dispatch_tls_is_dispatch_key_included(key)


def fakes_have_shapes_and_no_values() -> bool:
    with _compat.FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        return (
            isinstance(fake @ fake.T, _compat.FakeTensor)
            and (fake @ fake.T).shape == (2, 2)
            and fake.device.type == "cpu"
        )


def mode_sees_every_op() -> bool:
    with Calls() as calls:
        torch.relu(X.exp())
    return calls.ops == ["aten.exp.default", "aten.relu.default"]


def no_mode_sees_an_op() -> bool:
    with Calls() as calls:
        torch.relu(X)
        with _compat.without_modes():
            torch.exp(X)
    return calls.ops == ["aten.relu.default"]


def meta_tensors_are_made_beside_fakes() -> bool:
    """Inside, what is made on the meta device is a plain tensor, and a fake can be made of it."""
    with _compat.FakeTensorMode() as mode, _compat.in_kernel_invocation_manager(mode):
        value = torch.empty_strided((2, 3), (3, 1), device="meta")
        fake = _compat.FakeTensor(mode, value, torch.device("cpu"))
    return type(value) is torch.Tensor and fake.device.type == "cpu" and fake.shape == (2, 3)


HANDED_ON: dict[str, Callable[[], bool]] = {
    "BufferAOTInput": lambda: _compat.BufferAOTInput("calls") in described(),
    "DataDependentOutputException": lambda: (
        raised_on_fakes(lambda x: x.sum().item()) is _compat.DataDependentOutputException
    ),
    "DynamicOutputShapeException": lambda: raised_on_fakes(torch.nonzero) is _compat.DynamicOutputShapeException,
    "FakeTensor": fakes_have_shapes_and_no_values,
    "FakeTensorMode": fakes_have_shapes_and_no_values,
    "GradAOTOutput": lambda: _compat.GradAOTOutput(_compat.ParamAOTInput("weight")) in described(),
    "HigherOrderOperator": lambda: isinstance(torch.ops.higher_order.cond, _compat.HigherOrderOperator),
    "InputMutationAOTOutput": lambda: _compat.InputMutationAOTOutput(_compat.BufferAOTInput("calls")) in described(),
    "LazyGraphModule": lazy_module_makes_its_code_at_the_first_call,
    "OpOverload": lambda: isinstance(aten.mm.default, _compat.OpOverload) and aten.mm.default.name() == "aten::mm",
    "ParamAOTInput": lambda: _compat.ParamAOTInput("weight") in described(),
    "PlainAOTInput": lambda: _compat.PlainAOTInput(0) in described(),
    "PlainAOTOutput": lambda: _compat.PlainAOTOutput(0) in described(),
    "StridedShard": test_compat_processes.strided_shards_are_put_together,
    "TangentAOTInput": lambda: _compat.TangentAOTInput(_compat.PlainAOTOutput(0)) in described(),
    "TorchDispatchMode": mode_sees_every_op,
    "UnsupportedOperatorException": lambda: raised_on_fakes(without_fake) is _compat.UnsupportedOperatorException,
    "enable_python_dispatcher": python_dispatcher_is_on,
    "in_kernel_invocation_manager": meta_tensors_are_made_beside_fakes,
    "tree_leaves": lambda: _compat.tree_leaves([{"b": 1, "a": (2, 3)}, None]) in ([1, 2, 3, None], [2, 3, 1, None]),
    "tree_map": lambda: _compat.tree_map(lambda x: x + 1, [{"b": 1, "a": (2, 3)}, 4]) == [{"b": 2, "a": (3, 4)}, 5],
    "without_modes": no_mode_sees_an_op,
}


@pytest.mark.parametrize("name", sorted(HANDED_ON))
def test_what_is_handed_on_does_what_it_is_for(name: str) -> None:
    assert HANDED_ON[name]()


def test_every_name_has_a_test_that_is_called_after_it() -> None:
    own = [
        name
        for name, value in vars(_compat).items()
        if name.isupper() or getattr(value, "__module__", "") == _compat.__name__
    ]
    assert len(own) > 30 and sorted(HANDED_ON) == sorted(_compat.__all__)
    tests = [name for name in (*globals(), *vars(test_compat_processes)) if name.startswith("test_")]
    lacking = [name for name in own if not any(test.startswith(f"test_{name.lower()}_") for test in tests)]
    assert not lacking, lacking


def test_compiled_enough_has_dynamo_raise_from_its_limit_on() -> None:
    config: Any = torch._dynamo.config
    with config.patch(fail_on_recompile_limit_hit=False):
        assert not _compat.compiled_enough(config.recompile_limit - 1) and not config.fail_on_recompile_limit_hit
        assert _compat.compiled_enough(config.recompile_limit) and config.fail_on_recompile_limit_hit


def test_aot_export_joint_with_descriptors_describes_all_inputs_and_outputs() -> None:
    found = Counter(type(each).__name__ for each in described())
    assert found == {
        "PlainAOTInput": 1, "ParamAOTInput": 1, "BufferAOTInput": 2, "TangentAOTInput": 1,
        "PlainAOTOutput": 1, "InputMutationAOTOutput": 1, "GradAOTOutput": 2,
    }  # fmt: skip


def test_autograd_node_is_the_one_whose_backward_runs_and_has_the_number_of_its_forward() -> None:
    x = X.clone().requires_grad_()
    out = x.exp()
    number = out.grad_fn._sequence_nr()
    with Calls(_compat.autograd_node) as calls:
        out.sum().backward()
    assert number in [node._sequence_nr() for node in calls.found if node is not None]
    assert _compat.autograd_node() is None


def test_next_sequence_number_is_that_of_the_node_made_next() -> None:
    number = _compat.next_sequence_number()
    assert X.clone().requires_grad_().exp().grad_fn._sequence_nr() == number


def test_composite_ops_hold_while_they_last() -> None:
    layer, lstm = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), nn.LSTM(8, 8)
    found = []
    for context in (contextlib.nullcontext(), _compat.composite_ops(), contextlib.nullcontext()):
        with torch.no_grad(), context, Calls() as calls:
            layer(torch.ones(2, 3, 8))
            lstm(torch.ones(2, 3, 8))
        found.append({op for op in calls.ops if "mkldnn" in op or "_transformer_encoder_layer_fwd" in op})
    assert "aten._transformer_encoder_layer_fwd.default" in found[0] and found[1] == set() and found[2] == found[0]


def test_compiling_is_what_libraries_are_told_while_it_lasts() -> None:
    with _compat.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_decompositions_compute_what_their_ops_compute() -> None:
    table = _compat.decompositions()
    assert torch.allclose(table[aten.addcmul.default](X, X, X, value=2), torch.addcmul(X, X, X, value=2))
    assert torch.allclose(table[aten.silu_backward.default](X, X), aten.silu_backward(X, X))


def test_children_of_a_module_are_in_this_table() -> None:
    assert vars(torch.nn.Sequential(net := torch.nn.Identity()))[_compat.CHILDREN] == {"0": net}


def test_tensors_of_a_module_are_in_these_tables() -> None:
    net = torch.nn.BatchNorm1d(2)
    assert [name for table in _compat.TENSORS for name in vars(net)[table]] == [
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
    ]  # fmt: skip


def test_quiet_fakes_keep_torch_from_logging_what_it_raises() -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    level, off = log.level, logging.root.manager.disable  # which whoever ran before may have set
    log.setLevel(logging.DEBUG)
    logging.disable(logging.NOTSET)
    try:
        for context, most in ((_compat.quiet_fakes(), 0), (contextlib.nullcontext(), 99)):
            with context:
                raised_on_fakes(lambda x: x @ x)
            assert len(logged) <= most
        assert logged and not log.disabled
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        logging.disable(off)


ENDS = torch.tensor([1, 2], dtype=torch.int32)
GROUPED = (
    (torch.ones(2, 8), torch.ones(2, 8, 16), ENDS, (2, 16)),
    (torch.ones(8, 8).t(), torch.ones(8, 16), ENDS, (2, 8, 16)),
    (torch.ones(2, 8, 8), torch.ones(2, 8, 16), None, (2, 8, 16)),
)


def test_shape_of_grouped_mm_is_that_of_the_product_for_float32_too() -> None:
    for x, weights, ends, shape in GROUPED:
        assert shape_of_grouped_mm(x, weights, ends).shape == shape
        assert torch._grouped_mm(x.bfloat16(), weights.bfloat16(), offs=ends).shape == shape
    with pytest.raises(RuntimeError, match="a multiple of 16 bytes has to lie between rows"):
        shape_of_grouped_mm(torch.ones(2, 3), torch.ones(2, 3, 4), ENDS)


def test_meta_is_where_torch_finds_the_shape_of_grouped_products() -> None:
    for context in (contextlib.nullcontext(), _compat.enable_python_dispatcher()):
        for x, weights, ends, shape in GROUPED:
            with context, _compat.FakeTensorMode() as mode:
                fakes = [each if each is None else mode.from_tensor(each) for each in (x, weights, ends)]
                assert torch._grouped_mm(fakes[0], fakes[1], offs=fakes[2]).shape == shape
    assert "aten/_grouped_mm/Meta" in _compat.META._op_impls


def test_give_shapes_tells_that_of_float8_products_of_operands_of_any_strides() -> None:
    a, b, one = torch.ones(8, 4).to(torch.float8_e4m3fn).t(), torch.ones(8, 6).to(torch.float8_e4m3fn), torch.ones(())
    for kind in (None, torch.bfloat16):
        made, found = (each(a, b, one, one, None, None, kind) for each in (torch._scaled_mm, shape_of_scaled_mm))
        assert (found.shape, found.dtype) == (made.shape, made.dtype)
        meta = torch._scaled_mm(*(each.to("meta") for each in (a, b, one, one)), out_dtype=kind)
        assert (meta.shape, meta.dtype) == (made.shape, made.dtype)
    with pytest.raises(RuntimeError, match="do not go together"):
        shape_of_scaled_mm(a, a, one, one)


def test_flex_parts_are_what_torch_makes_a_backward_of() -> None:
    graph, index = _compat.flex_parts()
    table, at = torch.randn(3, requires_grad=True), torch.tensor(2)
    assert index(table, [at]) == table[2]
    score, places = torch.zeros((), requires_grad=True), [torch.tensor(0)] * 4
    _, joint = graph(lambda score, b, h, q, kv, x: score * x, (score, *places), (torch.tensor(3.0),))
    of_score, *_ = joint(score, *places, torch.tensor(2.0), torch.tensor(3.0))
    assert of_score == 6.0


def test_differentiating_is_possible_within_the_kernel_of_an_op() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
        assert not (x * 3).requires_grad
        with _compat.differentiating():
            (found,) = torch.autograd.grad((x * 3).sum(), x)
    assert found.tolist() == [3.0, 3.0]


def test_op_names_are_those_of_all_registered_ops() -> None:
    assert {"aten::mm", "aten::add.Tensor"} <= set(_compat.op_names())
    with torch.library._scoped_library("sbpc_test_compat", "DEF") as library:
        library.define("named(Tensor x) -> Tensor")
        assert "sbpc_test_compat::named" in _compat.op_names()


def test_overload_of_is_the_op_that_is_called() -> None:
    @torch.library.custom_op("sbpc_test_compat::own", mutates_args=())
    def own(x: Tensor) -> Tensor:
        return x.clone()

    assert _compat.overload_of(aten.mm) is _compat.overload_of(aten.mm.default) is aten.mm.default
    assert _compat.overload_of(own) is torch.ops.sbpc_test_compat.own.default
    assert _compat.overload_of(aten.pow) is None and _compat.overload_of("aten.mm") is None


def test_resolve_finds_the_overload_that_takes_the_arguments() -> None:
    assert _compat.resolve(aten.pow, X, 2) is aten.pow.Tensor_Scalar
    assert _compat.resolve(aten.pow, X, X) is aten.pow.Tensor_Tensor
    assert _compat.resolve(aten.sum, X, dim=[0]) is aten.sum.dim_IntList


def test_rename_gives_a_node_a_free_name() -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("a", "b")]
    _compat.rename(nodes[0], "c")
    _compat.rename(nodes[1], "c")
    assert [node.name for node in graph.nodes] == ["c", "c_1"]


def test_global_hooks_are_the_tables_of_what_calls_of_all_modules_run() -> None:
    tables = [getattr(nn.modules.module, name) for name in _compat.GLOBAL_HOOKS]
    before, hook = list(map(len, tables)), nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert [len(table) - count for table, count in zip(tables, before)] == [1, 0, 0, 0]
    hook.remove()
    assert list(map(len, tables)) == before


def test_has_hook_sees_what_a_backward_calls_with_a_gradient() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight = nn.Parameter(X.clone())
        assert not _compat.has_hook(weight)
        hook = getattr(weight, register)(lambda *_: None)
        assert _compat.has_hook(weight)
        hook.remove()
        assert not _compat.has_hook(weight)


def test_hooks_are_all_that_a_call_runs_besides_forward() -> None:
    module, called = nn.Linear(3, 3), list[str]()
    module.register_forward_hook(lambda *_: called.append("_forward_hooks"))
    module.register_forward_pre_hook(lambda *_: called.append("_forward_pre_hooks"))
    module.register_full_backward_hook(lambda *_: called.append("_backward_hooks"))
    module.register_full_backward_pre_hook(lambda *_: called.append("_backward_pre_hooks"))
    module(X.clone().requires_grad_()).sum().backward()
    assert sorted(called) == sorted(_compat.HOOKS)
    for kind in _compat.HOOKS:
        getattr(module, kind).clear()
    module(X.clone().requires_grad_()).sum().backward()
    assert len(called) == 4
    assert {key for key in vars(module) if re.fullmatch(r"_(forward|backward)\w*_hooks", key)} <= set(_compat.HOOKS)


def test_schema_of_an_op_tells_arguments_views_and_writes() -> None:
    (first, second, alpha), (result,) = (
        _compat.schema_of(aten.add_.Tensor).arguments,
        _compat.schema_of(aten.add_.Tensor).returns,
    )
    assert (first.name, second.name, alpha.name, alpha.kwarg_only, alpha.default_value) == (
        "self",
        "other",
        "alpha",
        True,
        1,
    )
    assert (
        first.alias_info.is_write
        and second.alias_info is None
        and result.alias_info.before_set == first.alias_info.before_set
    )
    assert not _compat.schema_of(aten.view.default).returns[0].alias_info.is_write


def test_slots_are_where_a_module_reads_its_weights() -> None:
    module = nn.Sequential(Counted(), nn.Linear(3, 3, bias=False))
    found = {name: (table, key) for name, table, key in _compat.slots(module)}
    assert set(found) == {"0.weight", "0.calls", "0.scratch", "1.weight"}
    table, key = found["1.weight"]
    assert table[key] is module[1].weight
    table[key] = torch.zeros(3, 3)
    assert not module[1](X).any()


def test_left_out_of_a_state_dict_are_buffers_that_are_not_persistent() -> None:
    module = nn.Sequential(Counted())
    assert _compat.left_out_of(module) == ("0.scratch",)
    assert {name for name, _, _ in _compat.slots(module)} - set(module.state_dict()) == {"0.scratch"}


def seen_by_dynamo(at_compile: Callable[[torch.fx.GraphModule], Any], *calls: Tensor) -> tuple[nn.Module, list[Any]]:
    """A module, and what `at_compile` returns of every graph that dynamo makes of it for these arguments."""
    module, found = Counted(), list[Any]()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.append(at_compile(gm))
        return gm.forward

    compiled = torch.compile(module, backend=backend, dynamic=False)
    for value in calls:
        compiled(value)
    return module, found


def test_source_of_an_input_is_an_expression_for_it() -> None:
    texts: Any = lambda gm: [_compat.source_of(node) for node in gm.graph.find_nodes(op="placeholder")]  # noqa: E731
    module, (sources,) = seen_by_dynamo(texts, X)
    found = [eval(text, {"L": {"self": module, "x": X}}) for text in sources]
    assert {id(each) for each in found} == {id(module.weight), id(module.calls), id(X)}
    assert _compat.source_of(torch.fx.Graph().placeholder("x")) == "x"


def test_compile_id_counts_functions_and_compilations() -> None:
    _, (first, second) = seen_by_dynamo(lambda gm: _compat.compile_id(), X, X[:1])
    assert second == (first[0], first[1] + 1) and _compat.compile_id() == (0, 0)


def test_outside_dynamo_nothing_of_its_context_is_seen() -> None:
    def modes(_: Any) -> list[Any]:
        with _compat.outside_dynamo():
            inside = torch._guards.detect_fake_mode()
        return [torch._guards.detect_fake_mode() is None, inside is None]

    assert seen_by_dynamo(modes, X)[1] == [[False, True]]


def test_has_kernel_tells_devices_apart() -> None:
    with torch.library._scoped_library("sbpc_test_compat", "DEF") as library:
        library.define("on_cpu(Tensor x) -> Tensor")
        library.impl("on_cpu", lambda x: x, "CPU")
        op = torch.ops.sbpc_test_compat.on_cpu.default
        assert _compat.has_kernel(op, "cpu") and not _compat.has_kernel(op, "cuda")
    assert _compat.has_kernel(aten.mm.default, "cpu")


def test_inductor_compile_gives_a_function_that_empties_its_list() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(aten.mm.default, (x, y)),))
    given = [X, X.T.contiguous()]
    compiled = _compat.inductor_compile(torch.fx.GraphModule(nn.Module(), graph), list(given))
    (found,) = compiled(given)
    assert torch.allclose(found, X @ X.T) and given == []


def test_float8_product_is_that_of_the_numbers_times_both_scales() -> None:
    a, b = (torch.randn(32, 32, generator=torch.manual_seed(0)).to(torch.float8_e4m3fn) for _ in range(2))
    found = _compat.float8_product(a, b.t(), torch.tensor(2.0))
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), 4 * (a.float() @ b.float().t()), rtol=1e-2, atol=1e-2)


def test_storage_of_views_is_the_same() -> None:
    x = X.clone()
    assert _compat.storage_of(x) == _compat.storage_of(x.T[1:]) != _compat.storage_of(X)


def test_writes_of_a_tensor_are_counted() -> None:
    x = X.clone()
    before = _compat.writes_of(x)
    x.view(-1)[0] = 5
    x.add_(1)
    assert _compat.writes_of(x) == before + 2


@pytest.mark.parametrize("keep", [True, False])
def test_keeps_graph_is_what_backward_was_told(keep: bool) -> None:
    found = []
    x = X.clone().requires_grad_()
    x.register_hook(lambda _: found.append(_compat.keeps_graph()))
    x.exp().sum().backward(retain_graph=keep)
    assert found == [keep]


def test_torchs_zbv_order_runs_each_part_of_each_micro_batch_once() -> None:
    for stages, count in itertools.product((1, 2, 3), (1, 2, 4, 5)):
        order = zbv(stages, count)
        assert order[0][0] == ("F", 0, 0)
        for rank, actions in enumerate(order):
            parts = Counter(
                (part, chunk, batch) for kind, chunk, batch in actions for part in {"B": "IW"}.get(kind, kind)
            )
            chunks = rank, 2 * stages - 1 - rank
            assert parts == Counter(itertools.product("FIW", chunks, range(count)))
