"""The rule language: what parses to what, and errors that point at the character."""

from __future__ import annotations

import pytest

from sbpc.errors import RuleError
from sbpc.rules.grammar import CLAUSES, Dim, Operand, parse
from sbpc.rules.predicate import holds

GRAMMAR = "See the grammar in sbpc/rules/grammar.py."
OPERAND = "An operand is dims such as 'b s d', '()' for a scalar, '[d]' for sizes, or '_'."
COMPARE = "Compare arguments and sizes, as in when(not is_causal and s > 1)."
NUMBERED = "Operands count from 0, '_' and '[..]' included."


def test_operands_are_dims_scalars_sizes_and_what_is_no_tensor():
    rule = parse("(a b) 1 *c 7, (), [d (a b)], _, mask=d d2 -> a ; fix b c d d2")
    assert rule.inputs == (
        Operand("tensor", (Dim(("a", "b")), Dim(literal=1), Dim(("c",), star=True), Dim(literal=7))),
        Operand("tensor"),
        Operand("sizes", (Dim(("d",)), Dim(("a", "b")))),
        Operand("none"),
        Operand("tensor", (Dim(("d",)), Dim(("d2",))), "mask"),
    )


def test_blanks_do_not_matter():
    spaced, dense = parse("m k, k n -> m n ; + k ; lin( 0 ) ; lin(1)"), parse("m k,k n->m n;+k;lin(0);lin(1)")
    assert (spaced.inputs, spaced.outputs, spaced.summed, spaced.linear) == (
        dense.inputs,
        dense.outputs,
        dense.summed,
        dense.linear,
    )


def test_every_clause_is_read():
    rule = parse(
        "a b c d e f, a, a -> a, () ; +b ; max c ; min d ; fix e f ; same(a -> 1) ; add(1, 2) ; lin(0, 1) ; "
        "lin(2 -> 0) ; lin(1 -> ) ; idx a @ 1 ; idx b ; via e f = softmax ; "
        "when(not causal and (a > 1 or p == 0))"
    )
    assert (rule.summed, rule.maxed, rule.minned, rule.fixed) == (("b",), ("c",), ("d",), ("e", "f"))
    assert rule.same == ((("a",), (1,)),)
    assert rule.added == (1, 2)
    assert rule.linear == (((0, 1), (0, 1)), ((2,), (0,)), ((1,), ()))
    assert rule.idx == (("a", 1), ("b", None))
    assert (rule.via, rule.when) == (((("e", "f"), "softmax"),), "not causal and (a > 1 or p == 0)")


def test_lin_all_is_every_tensor_operand():
    assert parse("a, _, a -> a ; lin(all)").linear == (((0, 2), (0,)),)


def test_a_predicate_sees_arguments_and_sizes():
    assert holds("not causal and -1 < n <= 3", {"causal": False, "n": 3})
    assert not holds("p == 0 or p is None", {"p": 0.5})


ERRORS = {
    "m k, k n ! m n": ("unexpected character '!'", 9, "A rule holds names, numbers and -> , ; ( ) [ ] + * @ = :."),
    "m k, k n": ("expected '->' after the arguments, found the end", 8, GRAMMAR),
    "m k, k n -> ": ("expected an operand, found the end", 12, OPERAND),
    "m k, , n -> m": ("expected an operand, found ','", 5, OPERAND),
    "(a b -> a": ("expected ')' after the factors of a group, found '->'", 5, GRAMMAR),
    "( ) ( -> a": ("expected '->' after the arguments, found '('", 4, GRAMMAR),
    "a (1) -> a": ("expected a factor of a group, found '1'", 3, "A factor is a name such as b or d1."),
    "a, [b -> a": ("expected ']' after the sizes, found '->'", 6, GRAMMAR),
    "* a b, *1 -> a": ("expected a factor after '*'", 8, GRAMMAR),
    "*a b, a -> b": ("factor 'a' is one dim here and any number of dims there", 6, "Write a or *a everywhere."),
    "m k -> m ; k": ("unknown clause 'k'", 11, f"A clause is one of {CLAUSES}."),
    "m k -> m ;": ("expected a clause, found the end", 10, f"A clause is one of {CLAUSES}."),
    "m k -> m + k": ("expected ';' or the end, found '+'", 9, "Clauses are separated by ';'."),
    "m k -> m ; +q": ("no operand has the factor 'q'", 12, "Name a factor of the signature."),
    "m k -> m ; +": ("expected a factor, found the end", 12, "A factor is a name such as b or d1."),
    "m k -> m ; +k ; lin(1)": ("input 1 is no tensor of this rule", 20, NUMBERED),
    "m, _ -> m ; lin(1)": ("input 1 is no tensor of this rule", 16, NUMBERED),
    "m -> m ; lin(0 -> 2)": ("output 2 is no tensor of this rule", 18, NUMBERED),
    "m -> m ; lin(x)": ("expected the number of an operand, found 'x'", 13, "Operands count from 0."),
    "m -> m ; lin 0": ("expected '(' after the name of the clause, found '0'", 13, GRAMMAR),
    "m -> m ; lin(0": ("expected ')' at the end of the clause, found the end", 14, GRAMMAR),
    "m -> m ; idx m @ 4": ("input 4 is no tensor of this rule", 17, NUMBERED),
    "m -> m ; same(m 0)": ("expected '->' after the factors, found '0'", 16, GRAMMAR),
    "m -> m ; via m, softmax": ("expected '=' after the factors, found ','", 14, GRAMMAR),
    "m n -> m n ; via m = a ; via n = b": ("a second decomposition", 33, "All factors are split through one function."),
    "m -> m ; when(m > )": ("'m >' is no predicate", 14, COMPARE),
    "m -> m ; when(f(m))": ("a predicate cannot hold Call", 14, COMPARE),
    "m -> m ; when(m": ("expected ')' at the end of the clause, found the end", 15, GRAMMAR),
    "m k, k n -> m, n ; +k": (
        "output 0 lacks the factor 'n' of the inputs",
        12,
        "Say +n, max n, min n, fix n or same(n -> 0).",
    ),
    "m k -> m ; +k ; max k": ("factor 'k' is reduced twice", 21, "Keep one of +, max and min."),
}  # fmt: skip


def test_an_error_points_at_the_character():
    for text in ERRORS:
        what, at, todo = ERRORS[text]
        with pytest.raises(RuleError) as error:
            parse(text)
        assert str(error.value) == f"{what}\n  {text}\n  {' ' * at}^\n  {todo}"


def test_a_rule_that_is_refused_reads_like_this():
    with pytest.raises(RuleError) as error:
        parse("m k, k n -> m n")
    assert (
        str(error.value)
        == """output 0 lacks the factor 'k' of the inputs
  m k, k n -> m n
              ^
  Say +k, max k, min k, fix k or same(k -> 0)."""
    )
