"""Rules that a user registers: proved on examples or refused, taken out again, and told of in the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError, RuleError
from sbpc.rules import match, registry
from tests import own_ops
from tests.samples import x

own = torch.ops.own


@pytest.fixture(autouse=True)
def same_rules():
    """No test leaves a rule behind."""
    before = dict(registry.TABLE)
    yield
    assert before == registry.TABLE


def refused(op, text, *examples, **more) -> str:
    """The message with which a rule is refused; nothing is registered then."""
    with pytest.raises(RuleError) as error:
        sbpc.rule(op, text, examples=examples, **more)
    return str(error.value)


def signatures(op, *args) -> list[str]:
    return [str(signature) for signature in match(op, args, {}, op(*args)).signatures]


def test_a_rule_holds_until_it_is_removed():
    args = x(3, 4, 5), x(5)
    with sbpc.rule("own::scale", "*b d, d -> *b d ; lin(0) ; lin(1)", examples=[args]):
        assert signatures(own.scale.default, *args) == [
            "B, B -> B",
            "S(0), B -> S(0)    split b.0",
            "S(1), B -> S(1)    split b.1",
            "S(2), S(0) -> S(2)    split d",
            "P, B -> P",
            "B, P -> P",
        ]
    assert match(own.scale.default, args, {}, args[0]) is None


def test_an_op_goes_by_name_overload_packet_or_definition():
    for op in ["own::scale", "own::scale.default", own.scale, own.scale.default, own_ops.scale]:
        done = sbpc.rule(op, "*b d, d -> *b d", examples=[(x(3, 4), x(4))])
        assert done.op == own.scale.default
        done.remove()


def test_a_rule_that_its_proof_refutes_is_refused_with_the_inputs_and_both_results():
    message = refused("own::center", "a b, _ -> a b", (torch.tensor([[1.0, 2.0], [5.0, 9.0], [3.0, 4.0]]), 0))
    assert (
        message
        == """own.center.default: the rule is refuted: S(0) -> S(0), split a, on 2 ranks: output 0 has other values
  a b, _ -> a b
  own.center.default(float64[3, 2], 0)
  operand 0: [[1.0, 2.0], [5.0, 9.0], [3.0, 4.0]]
  one device: [[-2.0, -3.0], [2.0, 4.0], [0.0, -1.0]]
  the ranks:  [[-2.0, -3.5], [2.0, 3.5], [0.0, 0.0]]
  Fix the rule: leave the factor fixed (fix f) where no split of it is right."""
    )


PARTIAL = {
    "b k, b, k n -> b n, b ; +k ; same(n -> 1)": "S(1), B, S(0) -> P, P, split k, on 2 ranks: output 1 has other values",
    "b k, b, k n -> b n, b ; +k ; same(n k -> 1) ; lin(1 -> 1)": "B, P, B -> B, P, on 2 ranks: output 1 has other values",
    "b k, b, k n -> b n, b ; +k ; same(n k -> 1) ; lin(0,2 -> 0)": "P, B, P -> P, B, on 2 ranks: output 0 has other values",
}  # fmt: skip


def test_a_partial_sum_that_is_none_is_refused():
    for text in PARTIAL:
        message = refused("own::mix", text, (x(3, 4), x(3), x(4, 5)))
        assert message.splitlines()[0] == f"own.mix.default: the rule is refuted: {PARTIAL[text]}"


STRINGS = {
    "a d, d, d -> a d": ("own.scale.default has 2 arguments", 8, "They are x, w."),
    "a d -> a d": ("no operand for the tensor 'w' of own.scale.default", 4, "Write its dims."),
    "a d, _ -> a d": ("argument 'w' of own.scale.default is a tensor", 5, "Write its dims."),
    "a d, v=d -> a d": ("own.scale.default has no argument 'v'", 5, "They are x, w."),
    "a d, d -> a d, a d": ("own.scale.default has 1 outputs, the rule 2", 15, "Write one for each."),
    "a d, d -> a d ; idx a": ("idx a needs a local kernel, for the op alone knows no offsets", 21, "Give local=, or leave the factor fixed."),
    "a d, d -> a d ; when(not q)": ("when(...): 'q' is no argument and no factor", 16, "Name one."),
    "a d, d - a d": ("expected '->' after the arguments, found '-'", 7, "See the grammar in sbpc/rules/grammar.py."),
}  # fmt: skip


def test_a_string_that_cannot_be_of_the_op_is_pointed_at():
    for text in STRINGS:
        what, at, todo = STRINGS[text]
        assert refused("own::scale", text) == f"{what}\n  {text}\n  {' ' * at}^\n  {todo}"


OPS = {
    "own::scal": "there is no op 'own::scal'\n  Close to it are own::scale",
    "nowhere::op": "there is no op 'nowhere::op'\n  Import what registers it first.",
    "own.scale": "'own.scale' is no op\n  Give its name, as in 'mylib::myop' or 'aten::add.Tensor'.",
    "aten::add.Nope": "'aten::add.Nope' is none of the overloads of aten::add\n  Name one of Tensor, Scalar",
    "own::into": "own.into.default writes into its argument 'out', so it has no signature\n  Register an op that returns a new tensor instead.",
    "aten::bernoulli": "aten.bernoulli.default draws random numbers",
    "aten::relu": "aten.relu.default has a rule already\n  written by a function of its arguments\n  Pass replace=True",
    "aten::mm": "aten.mm.default has a rule already\n  m k, k n -> m n ; +k ; lin(0) ; lin(1)\n  Pass replace=True",
}  # fmt: skip


def test_an_op_that_can_have_no_rule_is_refused():
    for op in OPS:
        text = "a b, b c -> a c ; +b" if op == "aten::mm" else "a -> a"
        assert refused(op, text).startswith(OPS[op])


def test_an_op_that_is_no_function_is_refused():
    secret, dice = (refused(op, "*a -> *a", (x(3, 4),)) for op in ("own::secret", "own::dice"))
    assert secret.startswith(
        "own.secret.default(float64[3, 4]) changes its operands, though its schema does not say so"
    )
    assert dice.startswith("own.dice.default(float64[3, 4]) gives other values when it is run again")


def test_the_examples_are_left_as_they_were():
    example = x(3, 4)
    refused("own::secret", "*a -> *a", (example,))
    assert torch.equal(example, x(3, 4))


def test_examples_that_prove_nothing_are_refused():
    examples = (x(3, 1), x(1)), (torch.zeros(3, 4), x(4)), x(3), (x(3, 4), x(5)), (x(3, 4).to("meta"), x(4))
    single, zeros, bare, wrong, meta = (
        refused("own::scale", "a d, d -> a d ; lin(0)", example) for example in examples
    )
    assert single.startswith(
        "own.scale.default: no example splits the factor 'd', which has one element in all of them"
    )
    assert "with B, B -> B, on 2 ranks output 0 passes as P" in zeros
    assert bare == "an example for own.scale.default is a Tensor\n  Give a tuple of its arguments."
    assert wrong.startswith("an example for own.scale.default fails: The size of tensor a (4) must match")
    assert meta.startswith("an example for own.scale.default is on the meta device")


def test_registering_once_more_is_refused_unless_it_is_the_same_rule():
    first = sbpc.rule("own::scale", "*b d, d -> *b d", examples=[(x(3, 4), x(4))])
    assert "has a rule already" in refused("own::scale", "a d, d -> a d")
    again = sbpc.rule("own::scale", "*b d, d -> *b d", examples=[(x(3, 4), x(4))])
    other = sbpc.rule("own::scale", "a d, d -> a d ; fix d", examples=[(x(3, 4), x(4))], replace=True)
    assert signatures(own.scale.default, x(3, 4), x(4)) == ["B, B -> B", "S(0), B -> S(0)    split a"]
    other.remove()
    assert len(signatures(own.scale.default, x(3, 4), x(4))) == 3
    again.remove()
    first.remove()
    assert registry.row(own.scale.default) is None


def test_a_factor_on_which_the_op_fails_when_empty_leaves_no_rank_empty():
    with sbpc.rule("own::peak", "a b -> a ; max b", examples=[(torch.rand(6, 5),)]):
        assert match(own.peak.default, (x(6, 5),), {}, x(6)).nonempty == {"a", "b"}
    with sbpc.rule("own::crash", "a b -> a b ; fix b", examples=[(x(12, 5),)]):
        m = match(own.crash.default, (x(12, 5),), {}, x(12, 5))
        assert m.nonempty == {"a"}


def test_a_rule_without_examples_is_called_unproved_and_is_careful_with_empty_shards():
    with sbpc.rule("own::scale", "*b d, d -> *b d"):
        assert match(own.scale.default, (x(3, 4), x(4)), {}, x(3, 4)).nonempty == {"b.0", "d"}
        plan = sbpc.plan(Scaled(), (torch.randn(8, 6),), Mesh(x=2), objective="serial")
    assert plan.notes == ("unproved rule for own.scale.default: it was registered without example inputs",)
    assert "LOUD      unproved rule for own.scale.default" in str(plan)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return own_ops.scale(self.linear(x), self.linear.bias)


def test_a_plan_with_an_op_of_ones_own_is_saved_and_loaded_where_the_rule_is_known(tmp_path):
    model, args = Scaled(), (torch.randn(8, 6),)
    with sbpc.rule("own::scale", "*b d, d -> *b d ; lin(0) ; lin(1)", examples=[(x(3, 4), x(4))]):
        plan = sbpc.plan(model, args, Mesh(x=2), train=False, objective="serial")
        plan.save(tmp_path / "plan.sbpc")
        loaded = sbpc.load(tmp_path / "plan.sbpc")
        assert loaded.remarks == ("proved rule for own.scale.default",)
        outputs, _ = sbpc.simulate(loaded, model, args)
        assert torch.allclose(outputs, model(*args))
        assert plan.cost.flops < 0.6 * plan.cost.flops_one_device
    with pytest.raises(PlanError, match=r"unless sbpc\.rule gives it a rule first"):
        sbpc.load(tmp_path / "plan.sbpc")


def test_an_op_without_a_rule_costs_what_the_plan_says():
    plan = sbpc.plan(Scaled(), (torch.randn(8, 6),), Mesh(x=2), train=False, objective="serial")
    (note,) = plan.notes
    assert note.startswith("no rule for own.scale.default, so every rank computes all of it (%scale")
    assert "in the model): 128 bytes of results" in note and "to gather its operands" in note


REVIEWED = """# seen on small shapes
own::scale    a d, d -> a d          # two dims
own::scale    a b d, d -> a b d ; fix a

own::center   a b, _ -> a b ; fix a ; when(dim == 0)
"""


def test_the_rules_of_a_reviewed_file_are_alternatives(tmp_path):
    (tmp_path / "rules.txt").write_text(REVIEWED)
    done = sbpc.load_rules(tmp_path / "rules.txt")
    assert len(signatures(own.scale.default, x(3, 4), x(4))) == 3
    assert signatures(own.scale.default, x(2, 3, 4), x(4))[1] == "S(1), B -> S(1)    split b"
    assert match(own.scale.default, (x(3), x(3)), {}, x(3)) is None
    assert signatures(own.center.default, x(3, 4), 0) == ["B -> B", "S(1) -> S(1)    split b"]
    assert match(own.center.default, (x(3, 4), 1), {}, x(3, 4)) is None
    plan = sbpc.plan(Scaled(), (torch.randn(8, 6),), Mesh(x=2), train=False, objective="serial")
    assert plan.remarks == ("reviewed, rules.txt:2 rule for own.scale.default",)
    for one in reversed(done):
        one.remove()


def test_a_reviewed_file_that_is_wrong_is_an_error_with_its_line(tmp_path):
    for line, what in [
        ("own::scale a d -> a d", "no operand for the tensor 'w'"),
        ("own::nope a -> a", "there is no op"),
        ("aten::relu a -> a", "has a rule already"),
    ]:
        (tmp_path / "rules.txt").write_text(f"\n{line}\n")
        with pytest.raises(RuleError, match=r"rules\.txt, line 2: ") as error:
            sbpc.load_rules(tmp_path / "rules.txt")
        assert what in str(error.value)
