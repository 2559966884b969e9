"""Probes: the rules that they infer, what they leave out, ops that misbehave, and the file that a person reviews."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import RuleError
from sbpc.mesh.states import B, P, S
from sbpc.rules import match, registry
from sbpc.rules.binding import Signature
from sbpc.rules.proof.infer import Evidence, infer
from sbpc.rules.proof.probe import probe_call, refuted
from sbpc.rules.proof.prove import short
from sbpc.rules.proof.small_calls import SmallCall, scales, small_calls
from tests import own_ops
from tests.processes import forked
from tests.samples import case, x
from tests.test_own_rules import Scaled

own, aten = torch.ops.own, torch.ops.aten


@pytest.fixture(autouse=True)
def same_rules():
    """What a test loads is taken out again."""
    before = dict(registry.TABLE)
    yield
    for op in [op for op in registry.TABLE if registry.TABLE[op] is not before.get(op)]:
        registry.put(op, before.get(op))


def refused(*call: object) -> str:
    """The message with which a probe ends."""
    with pytest.raises(RuleError) as error:
        sbpc.probe(*call)
    return str(error.value)


RULES = [
    (("aten::mm", x(4, 6), x(6, 5)), "a b, b c -> a c ; +b ; lin(0) ; lin(1)"),
    (("aten::mm", x(6, 6), x(6, 6)), "a b, b c -> a c ; +b ; lin(0) ; lin(1)"),
    (("aten::add.Tensor", x(4, 6), x(4, 6)), "a b, a b -> a b ; lin(0,1) ; when(alpha == 1)"),
    (("aten::addmm", x(5), x(4, 6), x(6, 5)), "a, b c, c a -> b a ; +c ; add(0) ; lin(0,1) ; lin(0,2) ; when(beta == 1 and alpha == 1)"),
    (("aten::_softmax", x(4, 6), 1, False), "a b -> a b ; fix b ; when(dim == 1 and not half_to_float)"),
    (("aten::sum.dim_IntList", x(4, 6), [0]), "a b -> b ; +a ; lin(0) ; when(dim == [0] and not keepdim and dtype is None)"),
    (("aten::reshape", x(4, 6, 3), [4, 18]), "a b c, [a (b c)] -> a (b c) ; fix c ; lin(0)"),
    (("aten::cat", [x(4, 6), x(3, 6)]), "a b, c b -> d b ; fix a c d ; lin(0,1) ; when(dim == 0)"),
    (("aten::mul.Tensor", x(4, 6), x(4, 1)), "a b, a 1 -> a b ; lin(0) ; lin(1)"),
    (("own::peak", x(4, 5)), "a b -> a ; max b"),
    (("aten::max", x(3, 4, 5)), "a b c -> () ; max a b c"),
    (("aten::frac", torch.tensor([[0.25, 1.5, 2.75], [-0.5, 3.125, 0.625]])), "a b -> a b"),
    (("aten::polar", x(4, 6), x(6)), "a b, b -> a b ; lin(0)"),
    (("own::heads", x(3, 5, 12), 4), "a b (c d), [c] -> a b (c d) ; fix d"),
    (("own::pool", x(8, 5)), "(a b) c -> a c ; fix b ; lin(0)"),
    (("own::norm", x(3, 4, 5), x(5)), "a c d, d -> a c d, a c ; fix d ; lin(1 -> 0) ; when(b is None and eps == 1e-05)"),
    (("own::picky", x(5, 4)), "a b -> a b ; fix a ; lin(0)"),
]  # fmt: skip


def probed(calls):
    """Of each call what its probe finds: the rule, what is left out, what is remarked."""
    torch.set_num_threads(1)
    return [(found.rule, found.left_out, found.remarks) for found in (sbpc.probe(*call) for call in calls)]


def test_a_probe_infers_the_rule_that_derives_every_valid_signature():
    for (_, text), (rule, left_out, _) in zip(RULES, forked(probed, [call for call, _ in RULES]), strict=True):
        assert (rule, left_out) == (text, ())


def test_what_one_string_cannot_say_is_listed():
    assert (
        str(sbpc.probe("own::mix", x(3, 4), x(3), x(4, 5)))
        == """\
# own::mix, run on (float64[3, 4], float64[3], float64[4, 5]); again on (float64[7, 10], float64[11], float64[10, 8])
#   12 valid signatures in 18 ways to split, on 2 ranks, tried on 3 and 4
#   valid, and not offered: P, S(0), B -> P, S(0) (no rule string says it beside the others)
#   valid, and not offered: B, S(0), P -> P, S(0) (no rule string says it beside the others)
#   valid, and not offered: B, S(0), S(1) -> S(1), S(0) (no rule string says it beside the others)
#   valid, and not offered: S(0), S(0), B -> S(0), S(0) (no rule string says it beside the others)
#   valid, and not offered: S(1), S(0), S(0) -> P, S(0) (no rule string says it beside the others)
? own::mix    a b, c, b d -> a d, c ; +b ; same(a b d -> 1) ; same(c -> 0) ; lin(0 -> 0) ; lin(2 -> 0)"""
    )


def test_what_is_wrong_on_uneven_sizes_is_left_out():
    found = sbpc.probe("own::swap", x(8))
    assert [(short(s), why) for s, why in found.left_out] == [("S(0) -> S(0)", "not on 3 ranks of (float64[8])")]
    assert found.rule == "a -> a ; fix a ; lin(0)"
    assert sbpc.probe("own::even", x(8, 3)).rule == "a b -> a b ; fix a ; lin(0)"


def test_an_op_that_must_be_whole_has_no_rule_and_says_so():
    found = sbpc.probe("aten::linalg_matrix_exp", x(4, 4))
    assert found.rule is None and found.valid == 1
    assert str(found).endswith("\n#   no rule: aten::linalg_matrix_exp stays whole on every rank")


def test_what_the_proof_refuses_is_told_and_not_offered():
    ((rule, _, remarks),) = forked(probed, [("aten::zeros_like", x(4, 6))])
    assert rule is None
    assert remarks[0].startswith("refused by its proof: a b -> a b ; lin(0 -> ) ; when(")
    assert "passes as P" in remarks[1]


def test_a_rule_that_follows_from_a_false_signature_is_refused():
    one = case(own.center.default, x(6, 5), 0)
    valid = {Signature((B,), (B,)): None, Signature((S(0),), (S(0),)): None}
    made = infer(Evidence(one, (torch.empty(6, 5),), valid, {}))
    assert made.text == "a b -> a b ; fix b ; when(dim == 0)"
    assert "the rule is refuted: S(0) -> S(0)" in str(refuted((made.text, [one])))
    assert registry.TABLE.pop(own.center.default, None) is None


def test_a_signature_is_offered_only_where_every_one_derived_is_valid():
    one = case(aten.mm.default, x(4, 6), x(6, 5))
    known = {Signature(s.inputs, s.outputs): None for s in one.match().signatures}
    without = {s: size for s, size in known.items() if s.inputs != (P, B)}
    assert infer(Evidence(one, (torch.empty(4, 5),), without, {})).text == "a b, b c -> a c ; +b ; lin(1)"
    uneven = {Signature((S(1), S(0)), (P,)): False}
    assert infer(Evidence(one, (torch.empty(4, 5),), known, uneven)).text == "a b, b c -> a c ; fix b ; lin(0) ; lin(1)"


def test_ops_that_crash_or_hang_on_some_shards_are_probed_on_the_others():
    pair = sbpc.probe("own::pair", x(6, 5), x(6, 5, seed=1))
    assert pair.rule == "a b, a b -> a b ; lin(0) ; lin(1)"
    assert pair.remarks == (
        "not tried: splits of dims that do not go together, for the op does not check shapes (killed by SIGFPE)",
    )
    hang = probe_call(own.hang.default, [SmallCall((x(6, 5),), {})], seconds=0.4)
    assert hang.rule == "a b -> a b ; fix a b ; lin(0)" and "(not done after 0.4 s)" in hang.remarks[0]


def test_an_op_that_crashes_on_everything_is_an_error():
    assert refused("own::boom", x(3)) == (
        "own.boom.default(float64[3]): the op does not survive it: killed by SIGSEGV\n  Give arguments that the op takes on one device."
    )


NOT_PROBED = [
    (("own::secret", x(3, 4)), "own.secret.default(float64[3, 4]) changes its operands, though its schema does not say so"),
    (("own::dice", x(3, 4)), "own.dice.default(float64[3, 4]) gives other values when it is run again"),
    (("own::into", x(3), x(3)), "own.into.default writes into its argument 'out', so it has no signature"),
    (("aten::bernoulli", x(3)), "aten.bernoulli.default draws random numbers"),
    (("own::nope", x(3)), "there is no op 'own::nope'"),
    (("own::scale", x(3), x(4)), "own.scale.default(float64[3], float64[4]) fails: The size of tensor a (3) must match"),
    (("own::scale", x(3).to("meta"), x(3)), "an example for own.scale.default is on the meta device"),
    (("aten::zeros", [3], {"dtype": torch.float64}), "aten.zeros.default([3], dtype=torch.float64): no rule string can say that the argument 'dtype'"),
]  # fmt: skip


def test_an_op_that_cannot_be_probed_is_an_error():
    for call, message in NOT_PROBED:
        *args, last = call
        with pytest.raises(RuleError) as error:
            sbpc.probe(*args, **last) if isinstance(last, dict) else sbpc.probe(*call)
        assert str(error.value).startswith(message)


def test_the_arguments_are_left_as_they_were():
    given = x(3, 4)
    refused("own::secret", given)
    assert torch.equal(given, x(3, 4))


# --- the file ---------------------------------------------------------------------------------------------------------
def review(file: Path) -> None:
    """What a person does to a file that is right."""
    file.write_text(re.sub(r"(?m)^\? ", "", file.read_text()))


def test_a_reviewed_probe_splits_the_op(tmp_path):
    file, mesh = tmp_path / "rules.txt", Mesh(x=2)
    assert sbpc.probe("own::scale", x(4, 5), x(5)).save(file)
    before = sbpc.plan(Scaled(), (torch.randn(8, 6),), mesh, train=False)
    assert before.notes[0].endswith("`sbpc probe` looks for a rule")
    review(file)
    sbpc.load_rules(file)
    model, args = Scaled().double(), (torch.randn(8, 6, dtype=torch.float64),)
    plan = sbpc.plan(model, args, mesh, train=False)
    assert plan.notes == () and plan.remarks == ("reviewed, rules.txt:7 rule for own.scale.default",)
    assert plan.cost.flops < 0.6 * plan.cost.flops_one_device
    outputs, _ = sbpc.simulate(plan, model, args)
    assert torch.allclose(outputs, model(*args))


def test_a_rule_says_nothing_of_arguments_that_were_not_probed(tmp_path):
    sbpc.probe("own::center", x(4, 5), 0).save(tmp_path / "rules.txt")
    review(tmp_path / "rules.txt")
    sbpc.load_rules(tmp_path / "rules.txt")
    assert match(own.center.default, (x(4, 5), 0), {}, x(4, 5)) is not None
    assert match(own.center.default, (x(4, 5), 1), {}, x(4, 5)) is None


def test_what_nobody_has_reviewed_is_not_loaded(tmp_path):
    file = tmp_path / "rules.txt"
    sbpc.probe("own::scale", x(4, 5), x(5)).save(file)
    with pytest.raises(RuleError) as error:
        sbpc.load_rules(file)
    assert (
        str(error.value)
        == f"""{file}, line 7: the rule of own::scale was inferred by a probe, and nobody has reviewed it
  a b, b -> a b ; lin(0) ; lin(1)
  Remove the '?' if it is right, or put a '#' before it to go without."""
    )
    assert registry.row(own.scale.default) is None


def test_a_file_keeps_what_it_has_and_takes_every_entry_once(tmp_path):
    file = tmp_path / "rules.txt"
    file.write_text("# mine\nown::peak    a b -> a ; fix b\n")
    scale, whole = sbpc.probe("own::scale", x(4, 5), x(5)), sbpc.probe("aten::linalg_matrix_exp", x(4, 4))
    assert [one.save(file) for one in (scale, whole, scale, whole)] == [True, True, False, False]
    text = file.read_text()
    assert text.startswith("# mine\nown::peak    a b -> a ; fix b\n\n# own::scale, run on ")
    review(file)
    assert not scale.save(file)
    assert file.read_text() == text.replace("? own", "own")


def test_an_op_that_has_a_rule_gets_none_in_a_file(tmp_path):
    with pytest.raises(RuleError, match=r"aten\.mm\.default has a rule already"):
        sbpc.probe("aten::mm", x(4, 6), x(6, 5)).save(tmp_path / "rules.txt")
    assert not (tmp_path / "rules.txt").exists()


BAD = {
    "own::scale a d, d - a d": "rules.txt, line 2: expected '->' after the arguments, found '-'\n  a d, d - a d\n         ^\n",
    "own::scale": "rules.txt, line 2: expected an operand, found the end",
    "? own::scale a -> ": "rules.txt, line 2: expected an operand, found the end",
}


def test_a_malformed_file_is_an_error_with_its_line_and_is_left_alone(tmp_path):
    file = tmp_path / "rules.txt"
    for line in BAD:
        file.write_text(f"\n{line}\n")
        for use in (lambda: sbpc.load_rules(file), lambda: sbpc.probe("own::scale", x(4), x(4)).save(file)):
            with pytest.raises(RuleError) as error:
                use()
            assert str(error.value).startswith(f"{tmp_path}/{BAD[line]}")
        assert file.read_text() == f"\n{line}\n"


# --- calls of a model -------------------------------------------------------------------------------------------------
def test_large_sizes_are_scaled_down_and_small_ones_stay():
    calls = small_calls((torch.empty(3, 64, 4096, device="meta"), [4096, 2]), {})
    assert [[*calls[0].args[0].shape], calls[0].args[1]] == [[3, 6, 8], [8, 2]]
    assert calls[0].remarks == ("scaled down: 64 as 6, 4096 as 8, the argument 4096 as 8",)
    assert [[*call.args[0].shape] for call in calls] == [[3, 6, 8]] * 2 + [[3, 4, 256]] * 2
    assert list(scales([3, 8])) == [{}]


TARGET = """
import torch
from torch import nn
from tests import own_ops
from tests.processes import forked

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)
    def forward(self, x):
        with torch.no_grad():
            h = own_ops.scale(own_ops.scale(self.linear(x), self.linear.bias), self.linear.bias)
            return own_ops.center(h, 1), own_ops.dice(h)

def model():
    return Model(), (torch.randn(8, 16),)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / f"probed_{tmp_path.name}.py"
    path.write_text(TARGET)
    return f"{path}:model"


def test_the_command_probes_what_has_no_rule_and_plans_with_what_was_reviewed(target, tmp_path, capsys):
    file = tmp_path / "rules.txt"
    assert main(["probe", target, "--no-train", "-o", str(file)]) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()][:2] == [
        ["op", "calls", "valid", "rule"],
        ["own::scale", "2", "5", "a", "b,", "b", "->", "a", "b", ";", "lin(0)", ";", "lin(1)"],
    ]
    assert f"written   {file}: 3 added; review them" in out
    assert "own::dice, not probed: own.dice.default(float64[8, 6]) gives other values" in file.read_text()
    assert "#   scaled down: 32 as 6\n" in file.read_text()
    plan = ["plan", target, "--no-train", "--mesh", "x=2", "--json", "--rules", str(file)]
    assert main(plan) == 2
    assert f"{file}, line 8: the rule of own::scale was inferred by a probe" in capsys.readouterr().err
    review(file)
    assert main(plan) == 0
    told = json.loads(capsys.readouterr().out)
    assert [note.split()[3] for note in told["notes"]] == ["own.dice.default,"]
    assert "reviewed, rules.txt:8 rule for own.scale.default" in told["remarks"]


def test_every_command_that_plans_takes_rules(target, tmp_path, capsys, monkeypatch):
    for command in [["show"], ["export", "--no-weights", "-o", "model.sbpc"], ["sweep", "--devices", "2"], ["run"]]:
        monkeypatch.chdir(tmp_path)
        name, *more = command
        planning = [] if name == "sweep" else ["--mesh", "x=2"]
        assert main([name, target, *planning, *more, "--rules", "nowhere.txt"]) == 2
        err = capsys.readouterr().err
        assert "cannot read the rules of nowhere.txt: " in err and "Each line holds an op and its rule string" in err
        assert {*os.listdir(tmp_path)} - {"__pycache__"} == {f"probed_{tmp_path.name}.py"}


def test_a_file_is_written_where_no_op_lacks_a_rule_too(tmp_path, capsys):
    file = tmp_path / "rules.txt"
    target = Path(__file__).parent.parent / "examples" / "01_two_layers.py"
    for _ in range(2):
        assert main(["probe", f"{target}:two_layers", "-o", str(file)]) == 0
        out = capsys.readouterr().out
        assert out == f"every op of the model has a rule\nwritten   {file}: 0 added; there is no more than it holds\n"
        assert file.read_text().startswith("# Rules for sbpc.load_rules") and sbpc.load_rules(file) == []


def test_the_command_probes_a_call_that_is_described(capsys):
    command = ["probe", own_ops.__file__, "--op", "own::norm", "--json"]
    assert main([*command, "--args", "float64[3, 4, 5], float64[5], b=float64[5]"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["ops"]
    assert row["found"][0]["rule"] == "a c d, d, d -> a c d, a c ; fix d ; lin(1,2 -> 0) ; when(eps == 1e-05)"
    assert main([*command, "--args", "float64[3, 4], nothing"]) == 2
    assert "--args: 'nothing' is no argument" in capsys.readouterr().err
    assert main(["probe", "--op", "own::norm"]) == 2
    assert "there is nothing to probe" in capsys.readouterr().err
