"""Evaluates expressions of numbers, variables and functions exactly, with a small parser. No code is executed.

Python's own `ast` would accept another language (no 007, no variable named `in`) and describe errors in other words,
which a policy reads in its responses.

statements = statement (";" statement)*        statement = [name "="] sum
sum = product (("+" | "-") product)*           product = signed (("*" | "/" | "%") signed)*
signed = ("+" | "-") signed | power            power = atom [("^" | "**") signed]
atom = number | name | name "(" sum ("," sum)* ")" | "(" sum ")"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_LENGTH = 1000
MAX_DEPTH = 40
MAX_BITS = 4096
"""Largest size of a numerator or denominator, so that a tower of powers cannot exhaust the memory."""
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|([A-Za-z_]\w*)|(\*\*|[-+*/%^(),;=]))", re.ASCII)

Function = Callable[..., Fraction]


class ExpressionError(ValueError):
    """An expression cannot be evaluated. The message says why in a few words, which the policy reads."""


def evaluate(text: str, functions: Mapping[str, Function] | None = None) -> Fraction:
    """The value of the last statement. If `functions` is None, only numbers and operators are allowed."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError("too long")
    return _Parser(_tokens(text), functions).statements()


def format_value(value: Fraction) -> str:
    """`value` as an integer, or as a decimal with 10 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    if max(abs(value.numerator), value.denominator).bit_length() > 1000:
        raise ExpressionError("too large")
    return f"{float(value):.10g}"


def _tokens(text: str) -> list[str]:
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ExpressionError(f"unknown {text[place:].strip()[0]!r}")
        tokens.append(match.group(match.lastindex or 0))
        place = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str], functions: Mapping[str, Function] | None) -> None:
        self.tokens = tokens
        self.functions = functions
        self.names: dict[str, Fraction] = {}
        self.depth = 0

    def statements(self) -> Fraction:
        value = self.statement()
        while self.accept(";"):
            if self.tokens:
                value = self.statement()
        if self.tokens:
            raise ExpressionError(f"unexpected {self.tokens[0]!r}")
        return value

    def statement(self) -> Fraction:
        if self.functions is None or self.tokens[1:2] != ["="]:
            return self.sum()
        name = self.next()
        if not name.isidentifier():
            raise ExpressionError(f"{name!r} is no name")
        self.next()
        self.names[name] = self.sum()
        return self.names[name]

    def sum(self) -> Fraction:
        value = self.product()
        while self.tokens[:1] in (["+"], ["-"]):
            value = value + self.product() if self.next() == "+" else value - self.product()
        return bounded(value)

    def product(self) -> Fraction:
        value = self.signed()
        while self.tokens[:1] in (["*"], ["/"], ["%"]):
            operator, other = self.next(), self.signed()
            if operator != "*" and not other:
                raise ExpressionError("division by zero")
            value = bounded(
                {"*": Fraction.__mul__, "/": Fraction.__truediv__, "%": Fraction.__mod__}[operator](value, other)
            )
        return value

    def signed(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError("too deep")
        value = -self.signed() if self.accept("-") else self.signed() if self.accept("+") else self.power()
        self.depth -= 1
        return value

    def power(self) -> Fraction:
        base = self.atom()
        return raised(base, self.signed()) if self.accept("^") or self.accept("**") else base

    def atom(self) -> Fraction:
        token = self.next()
        if token == "(":
            value = self.sum()
            self.expect(")")
            return value
        if token[0].isdigit() or token[0] == ".":
            return Fraction(token)
        if self.functions is not None and self.tokens[:1] == ["("] and token in self.functions:
            return self.call(self.functions[token])
        if token in self.names:
            return self.names[token]
        raise ExpressionError(f"unknown {token!r}")

    def call(self, function: Function) -> Fraction:
        self.expect("(")
        arguments = [self.sum()]
        while self.accept(","):
            arguments.append(self.sum())
        self.expect(")")
        try:
            return bounded(Fraction(function(*arguments)))
        except (TypeError, OverflowError) as error:  # another number of arguments, or one beyond floats
            raise ExpressionError("wrong arguments") from error

    def next(self) -> str:
        if not self.tokens:
            raise ExpressionError("incomplete")
        return self.tokens.pop(0)

    def accept(self, token: str) -> bool:
        is_next = self.tokens[:1] == [token]
        if is_next:
            self.tokens.pop(0)
        return is_next

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise ExpressionError(f"missing {token!r}")


def bounded(value: Fraction) -> Fraction:
    """`value`, unless it exceeds MAX_BITS."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError("too large")
    return value


def raised(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent for integer exponents. The size of the result is checked before it is computed."""
    if exponent.denominator != 1:
        raise ExpressionError("only whole exponents")
    if base == 0 and exponent < 0:
        raise ExpressionError("division by zero")
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError("too large")
    return Fraction(base**exponent.numerator)


def root(value: Fraction) -> Fraction:
    """The square root: exact if it is a fraction, else rounded to a float."""
    if value < 0:
        raise ExpressionError("root of a negative number")
    sides = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    return sides if sides**2 == value else Fraction(math.sqrt(value))


FUNCTIONS: Mapping[str, Function] = {
    "abs": abs,
    "ceil": lambda value: Fraction(math.ceil(value)),
    "floor": lambda value: Fraction(math.floor(value)),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "round": lambda value: Fraction(round(value)),
    "sqrt": root,
    "sum": lambda *values: sum(values, Fraction(0)),
}
