"""Rules of the user's own ops: `sbpc.rule`; with example inputs a rule is proved at once, or refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from sbpc._compat import OpOverload, op_names, overload_of
from sbpc.errors import RuleError, check_kinds, shown
from sbpc.graph.operands import leaves
from sbpc.mesh.states import Ints, chunk_sizes
from sbpc.rules import registry
from sbpc.rules.binding import Signature, base, is_list
from sbpc.rules.grammar import Operand, Rule, parse, refuse
from sbpc.rules.match import Count, Entry, Kernel, Match, Write
from sbpc.rules.predicate import names_in
from sbpc.rules.proof.prove import RANKS, Case, Inapplicable, Refuted, check, equal, prove
from sbpc.rules.proof.worker import attempt
from sbpc.rules.registry import row

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
UNPROVED, PROVED = "unproved", "proved"
SECONDS = 10.0  # that an op may take on an empty shard


@dataclass(frozen=True)
class Registered:
    """A rule that is in force; `remove()`, or leaving a `with` of it, puts back what there was before."""

    op: OpOverload
    before: Entry | None

    def remove(self) -> None:
        """Puts back what there was before."""
        registry.put(self.op, self.before)

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *unused: object) -> None:
        self.remove()


def rule(
    op: Any,
    text: str | Write,
    *,
    examples: Sequence[Sequence[Any]] = (),
    flops: str | Count | None = None,
    nonempty: str = "",
    local: Kernel | None = None,
    replace: bool = False,
) -> Registered:
    """Says what `op` ("mylib::myop", or the op itself) may do with split, whole and partial operands; returns the
    rule in force.

    text names the dims of the arguments, then those of the outputs, then clauses: "b s d, d -> b s d ; lin(0) ;
    lin(1)". A dim of an output may be split: arguments that have it are split with it, the others are whole.
    sbpc/rules/grammar.py has all; these are the usual parts:

    _, (), [d]         an argument that is no tensor; a scalar; a list of sizes
    +k, max k, min k   k is reduced: where it is split, the outputs are partial sums, maxima, minima
    lin(0), lin(0,2)   the op is linear in argument 0, in 0 and 2 together: they may be partial sums, outputs then are
    fix d              d is never split
    via d = scaled     d is split through a function of ATen calls, with collectives between them:
                       `@sbpc.rules.decomposition` on `def scaled(x): return x / x.amax(-1, True)`

    text may also be a function of the arguments by name and of the outputs that returns a string, or None for a call
    without rule.

    examples   the arguments of calls, each a tuple of positional ones, with keyword arguments as a dict at its end.
               Every signature that follows from the rule is run on them over 2, 3 and 4 ranks and compared with the op
               on one device. Each dim must have more than one element in one of them; small distinct sizes do best.
               Without examples the rule is taken as it is, and every plan that uses it says "unproved rule".
    flops      "2 m k n"; by default one for each point.
    nonempty   dims of which no rank may be left an empty shard; the proof adds those on which the op fails.
    local      what runs on shards where the op alone is not enough.
    replace    put the rule in the place of another.

    examples/05_own_rule.py has an op with its backward; `sbpc.probe` looks for the rule of an op.

    >>> import sbpc, torch
    >>> schema = "(Tensor x, Tensor w) -> Tensor"
    >>> scale = torch.library.custom_op("doc::scale", torch.mul, mutates_args=(), schema=schema)
    >>> with sbpc.rule("doc::scale", "b d, d -> b d ; lin(0) ; lin(1)", examples=[(torch.randn(3, 4), torch.randn(4))]):
    ...     pass  # in force here

    Raises RuleError for a malformed string (it points at the character), an op that there is not, that writes into its
    arguments or has a rule already, and for a rule that the proof refutes, with the signature, the inputs and both
    results.
    """
    check_kinds(RuleError, text=(text, "a text", "a function"), examples=(examples, "a list"))
    overload = resolve(op)
    require_pure(overload)
    if isinstance(text, str):
        fits(parse(text), overload, local is not None)
    if not replace:
        require_free(overload, text)
    untried = isinstance(text, str) and not examples  # on empty shards either
    factors = tuple(parse(text).factors if untried else nonempty.split())
    made = Entry(overload, text, flops, local, factors, source=PROVED if examples else UNPROVED)
    done = Registered(overload, registry.TABLE.get(overload))
    registry.put(overload, made)
    try:
        prove_on([case_of(overload, example) for example in examples], made)
    except BaseException:
        done.remove()
        raise
    return done


def resolve(op: Any) -> OpOverload:
    """The op that is meant. Raises RuleError if there is none such, or several."""
    found = overload_of(op)
    if found is not None:
        return found
    if not isinstance(op, str) or "::" not in op:
        raise RuleError(f"{shown(op)} is no op\n  Give its name, as in 'mylib::myop' or 'aten::add.Tensor'.")
    space, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, space), name)
    except AttributeError:
        known = [key for key in op_names() if key.startswith(space + "::")]
        near = difflib.get_close_matches(op, [key.partition(".")[0] for key in known], 3)
        todo = f"Close to it are {', '.join(dict.fromkeys(near))}." if near else "Import what registers it first."
        raise RuleError(f"there is no op {op!r}\n  {todo}") from None
    names = packet.overloads()
    if (overload or "default") not in names:
        raise RuleError(f"{op!r} is none of the overloads of {space}::{name}\n  Name one of {', '.join(names[:6])}.")
    return getattr(packet, overload or "default")


def require_free(op: OpOverload, text: str | Write) -> None:
    """Raises RuleError for an op that has another rule already."""
    known = row(op)
    if known is not None and known.text != text:
        written = known.text if isinstance(known.text, str) else "written by a function of its arguments"
        raise RuleError(f"{op} has a rule already\n  {written}\n  Pass replace=True to put another in its place.")


def require_pure(op: OpOverload) -> None:
    """Raises RuleError for an op that is no function of its arguments."""
    written = [each.name for each in op._schema.arguments if each.alias_info and each.alias_info.is_write]
    if written or op._schema.is_mutable:
        what = f"{op} writes into its argument {written[0]!r}" if written else f"{op} writes into its arguments"
        raise RuleError(f"{what}, so it has no signature\n  Register an op that returns a new tensor instead.")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise RuleError(f"{op} draws random numbers: its shards would not be those of one device\n  Pass them in.")


def fits(rule: Rule, op: OpOverload, local: bool) -> None:
    """Raises RuleError, pointing at the operand, if the string cannot be about calls of `op`."""
    arguments, made = list(op._schema.arguments), op._schema.returns
    names = [argument.name for argument in arguments]
    lists = any(is_list(argument) for argument in arguments)
    for number, operand in enumerate(rule.inputs):
        if operand.name is not None or not lists:
            operand_fits(rule, operand, number, op)
    taken = {operand.name or names[at] for at, operand in enumerate(rule.inputs) if operand.name or at < len(names)}
    lacking = [a.name for a in arguments if str(a.type) == "Tensor" and a.name not in taken and not lists]
    if lacking:
        refuse(rule.text, rule.text.index("->"), f"no operand for the tensor {lacking[0]!r} of {op}", "Write its dims.")
    if len(made) != len(rule.outputs) and not any("List" in str(value.type) for value in made):
        at = rule.outputs[min(len(made), len(rule.outputs) - 1)].at
        refuse(rule.text, at, f"{op} has {len(made)} outputs, the rule {len(rule.outputs)}", "Write one for each.")
    if rule.idx and not local:
        what = f"idx {rule.idx[0][0]} needs a local kernel, for the op alone knows no offsets"
        refuse(rule.text, len(rule.text), what, "Give local=, or leave the factor fixed.")
    for name in names_in(rule.when or ""):
        if name not in (*names, *rule.factors):
            refuse(rule.text, rule.text.index("when"), f"when(...): {name!r} is no argument and no factor", "Name one.")


def operand_fits(rule: Rule, operand: Operand, number: int, op: OpOverload) -> None:
    """Raises RuleError if operand `number` of the string cannot be about an argument of `op`."""
    arguments = {argument.name: argument for argument in op._schema.arguments}
    if operand.name is None and number >= len(arguments):
        refuse(rule.text, operand.at, f"{op} has {len(arguments)} arguments", f"They are {', '.join(arguments)}.")
    name = operand.name or list(arguments)[number]
    if name not in arguments:
        refuse(rule.text, operand.at, f"{op} has no argument {name!r}", f"They are {', '.join(arguments)}.")
    kind = str(arguments[name].type)
    if operand.kind == "tensor" and "Tensor" not in kind:
        refuse(rule.text, operand.at, f"argument {name!r} of {op} is no tensor ({kind})", "Write '_' for it.")
    if operand.kind != "tensor" and kind == "Tensor":
        refuse(rule.text, operand.at, f"argument {name!r} of {op} is a tensor", "Write its dims.")


# --- proving ----------------------------------------------------------------------------------------------------------
def case_arguments(op: OpOverload, example: Sequence[Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """The arguments and keyword arguments that an example stands for. Raises RuleError if they are none."""
    if isinstance(example, (Tensor, str)) or not isinstance(example, Sequence):
        raise RuleError(f"an example for {op} is a {type(example).__name__}\n  Give a tuple of its arguments.")
    *args, last = [*example] or [{}]
    kwargs: Mapping[str, Any] = last if isinstance(last, Mapping) else {}
    args = args if isinstance(last, Mapping) else [*args, last]
    if any(value.is_meta for value in leaves((args, kwargs), Tensor)):
        raise RuleError(f"an example for {op} is on the meta device\n  Give tensors that hold values.")
    return args, kwargs


def case_of(op: OpOverload, example: Sequence[Any]) -> Case:
    """The call that an example stands for, in float64 where the op takes it."""
    args, kwargs = case_arguments(op, example)
    for convert in (wide, detached):
        one = Case(op, *map_aggregate((tuple(args), dict(kwargs)), convert))
        try:
            outputs = leaves(one.run(), Tensor)
        except Exception as error:
            failed = error
            continue
        return Case(op, one.args, one.kwargs, tolerance=tolerance_of([*one.operands, *outputs]))
    raise RuleError(f"an example for {op} fails: {failed}\n  Give arguments that the op takes.") from failed


def tolerance_of(values: Iterable[Tensor]) -> float:
    """How far apart equal values may be in the types of these tensors."""
    return max((TOLERANCE.get(value.dtype, 0.0) for value in values), default=0.0)


def detached(value: Any) -> Any:
    """A copy of a tensor, without autograd; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def wide(value: Any) -> Any:
    """A copy of a tensor, in float64 if it is a floating-point one; anything else as it is."""
    return detached(value.double() if isinstance(value, Tensor) and value.is_floating_point() else value)


def prove_on(cases: Sequence[Case], made: Entry) -> None:
    """Prove the rule in force on these calls, and that every factor is split in one of them; see `rule`."""
    for one in cases:
        require_function(one)
    weak = dict.fromkeys(factor for one in cases for factor in breaking(one))
    if weak:
        made = replace(made, nonempty=(*made.nonempty, *weak))
        registry.put(made.op, made)
    sizes: dict[str, int] = {}
    for one in cases:
        m = one.match()
        prove(one, ranks=ranks_for(m))
        for factor, size in m.sizes.items():
            sizes[base(factor)] = max(size, sizes.get(base(factor), 0))
    if cases and isinstance(made.text, str):
        parsed = parse(made.text)
        single = [f for f in parsed.factors if f not in parsed.fixed and sizes.get(f, 0) < 2]
        if single:
            what = f"{made.op}: no example splits the factor {single[0]!r}, which has one element in all of them"
            raise RuleError(f"{what}\n  {made.text}\n  Give an example where it has more, or fix it: fix {single[0]}.")


def ranks_for(m: Match) -> Ints:
    """2, 3 and 4 ranks, and for each factor a number of ranks that leaves one of them without elements."""
    split = dict.fromkeys(s.factor for s in m.signatures if s.factor and s.factor not in (*m.divides, *m.nonempty))
    return tuple(sorted({*RANKS, *(ranks_beyond(m.sizes[factor]) for factor in split)}))


def ranks_beyond(size: int) -> int:
    """The least number of ranks that leaves one of them an empty shard."""
    return next(ranks for ranks in range(2, size + 2) if 0 in chunk_sizes(size, ranks))


def require_function(one: Case) -> None:
    """Raises RuleError if the op gives other values when it is run again, or changes its operands."""
    before = [operand.clone() for operand in one.operands]
    again = replace(one).run()
    if not all(torch.equal(a, b) for a, b in zip(before, one.operands)):
        what = f"{one} changes its operands, though its schema does not say so"
        raise RuleError(f"{what}\n  Return a new tensor instead.")
    if not all(equal(a, b, one.tolerance) for a, b in zip(leaves(again, Tensor), leaves(one.run(), Tensor))):
        what = f"{one} gives other values when it is run again"
        raise RuleError(f"{what}\n  Only a function of its arguments has a rule.")


def breaking(one: Case) -> Iterable[str]:
    """The factors that may leave no rank an empty shard, since the op fails on one: found in a worker, as it may
    crash."""
    m = one.match()

    def fails(signature: Signature) -> bool:
        try:
            check(one, m, (signature,), (ranks_beyond(m.sizes[str(signature.factor)]),))
        except Refuted:
            return True
        except Inapplicable:
            pass
        return False

    splits = [s for s in m.signatures if s.factor and s.factor not in m.divides]
    forked = all(operand.is_cpu for operand in one.operands)
    results = attempt(fails, splits, SECONDS) if forked else ((s, fails(s)) for s in splits)
    return [base(str(s.factor)) for s, failed in results if failed]
