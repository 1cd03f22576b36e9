"""Tools answer what they are asked, and nothing can be asked that is not arithmetic."""

from __future__ import annotations

import math
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.models.language.arithmetic import FUNCTIONS, ExpressionError, evaluate, format_value
from unirl.models.language.tools import Calculator, ExpressionEvaluator, Tools

Value = Fraction | None
"""None where something is divided by zero."""


def combined(parts: tuple[tuple[str, Value], str, tuple[str, Value]]) -> tuple[str, Value]:
    """Two expressions in brackets, joined by an operator, and the value by Python's own fractions."""
    (left, a), sign, (right, b) = parts
    text = f"({left}) {sign} ({right})"
    if a is None or b is None or (sign in "/%" and not b):
        return text, None
    return text, {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod}[
        sign
    ](a, b)


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(lambda number: (str(number), Fraction(number))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/%"), inner).map(combined),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_values_are_those_of_exact_fractions(expression: tuple[str, Value]) -> None:
    text, value = expression
    if value is None:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 + 3 * 4", "14"), ("-2^2", "-4"), ("2^3^2", "512"), ("2**-1", "0.5"), ("7 % 4", "3"), ("1/3", "0.3333333333")],
)
def test_operators_bind_as_in_mathematics(expression: str, value: str) -> None:
    assert format_value(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [("x = 3; y = x + 1; sqrt(x^2 + y^2)", 5), ("max(1, 2/3, floor(3.7))", 3), ("sum(1, 2, 3) + abs(-4)", 10)],
)
def test_the_evaluator_knows_names_and_functions(expression: str, value: int) -> None:
    assert evaluate(expression, FUNCTIONS) == value


def test_roots_are_exact_where_they_can_be() -> None:
    assert evaluate("sqrt(4/9)", FUNCTIONS) == Fraction(2, 3)
    assert math.isclose(evaluate("sqrt(2)", FUNCTIONS), math.sqrt(2))


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9^9^9", "too large"),
        ("2^5000", "too large"),
        ("(" * 60 + "1" + ")" * 60, "too deep"),
        ("-" * 900 + "1", "too deep"),
        ("1" * 2000, "too long"),
        ("1 / (2 - 2)", "division by zero"),
        ("0^-1", "division by zero"),
        ("2 +", "incomplete"),
        ("", "incomplete"),
        ("2 3", "unexpected '3'"),
        ("__import__('os')", "unknown"),
        ("x = 2", "unknown 'x'"),
        ("sqrt(4)", "unknown 'sqrt'"),
    ],
)
def test_the_calculator_names_what_it_does_not_compute(expression: str, problem: str) -> None:
    with pytest.raises(ExpressionError, match=problem):
        evaluate(expression)
    assert f"<result>error: {problem.split()[0]}" in str(Calculator().answer(f"<calculator>{expression}</calculator>"))


@given(st.text(max_size=40))
def test_any_text_is_answered_or_refused_in_words(text: str) -> None:
    try:
        assert format_value(evaluate(text, FUNCTIONS))
    except ExpressionError as error:
        assert str(error)


def test_a_tool_is_silent_where_its_call_is_not_closed_or_not_opened() -> None:
    tool = Calculator()
    assert tool.answer("<calculator>1 + 1") is None
    assert tool.answer("1 + 1</calculator>") is None
    assert tool.answer("<calculator>1 + 1</calculator> is 2") is None
    assert tool.answer("so <calculator>1</calculator>9<calculator>1 + 1</calculator>\n") == "<result>2</result>"


def test_several_tools_answer_each_to_its_own_call() -> None:
    tools = Tools(boxes=[Calculator(), ExpressionEvaluator()])
    assert tools.closings == ("</calculator>", "</evaluate>")
    assert tools.answer("<evaluate>x = 2; x + 1</evaluate>") == "<result>3</result>"
    assert tools.answer("<calculator>2 + 2</calculator>") == "<result>4</result>"
    assert tools.answer("neither") is None
    assert "<evaluate>" in tools.instruction and "<calculator>" in tools.instruction
