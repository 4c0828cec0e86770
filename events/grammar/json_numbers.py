"""Grammars of integers and decimal numbers within bounds, as xgrammar writes them.

An integer has no leading zeros, and is never `-0`. A number with bounds has at most six digits after the point and no exponent.
The bounds are rounded inwards to six digits after the point. Bounds are compared as digit strings of equal length.
"""

from events.grammar.model import (
    EMPTY,
    Expression,
    Repeat,
    characters,
    choice,
    literal,
    repeat,
    sequence,
)
from events.grammar.refusals import refuse

PRECISION = 6  # digits after the point of a number with bounds
SCALE = 10**PRECISION
MAX_BOUND = 2**53  # above, xgrammar's own arithmetic is not exact
DIGIT = characters(((48, 57),))
DIGITS = Repeat(DIGIT, 0, None)
NON_ZERO = characters(((49, 57),))
NATURAL = choice(literal("0"), sequence(NON_ZERO, DIGITS))


def check_bound(value: int | float, where: str) -> None:
    """Raise GrammarRefused if a bound is above 2**53 or below -2**53.

    Beyond these values, xgrammar may round the bound.
    """
    if not abs(value) <= MAX_BOUND:
        refuse(f"a bound of a number is beyond {MAX_BOUND}", where, "reduce the bound, or remove it")


def integer_range(low: int | None, high: int | None) -> Expression:
    """Return an expression for the integers from `low` to `high`, both included.

    None means that there is no bound. The range must not be empty.
    """
    options: list[Expression] = []
    if low is None or low < 0:
        first = 1 if high is None or high >= 0 else -high
        options.append(sequence(literal("-"), _naturals(first, None if low is None else -low)))
    if (low is None or low <= 0) and (high is None or high >= 0):
        options.append(literal("0"))
    if high is None or high > 0:
        options.append(_naturals(max(1, low or 1), high))
    return choice(*options)


def _naturals(low: int, high: int | None) -> Expression:
    """Return an expression for the integers from `low` (at least 1) to `high` (None: no bound)."""
    length = len(str(low))
    options: list[Expression] = []
    if high is None:
        options = [_between(str(low), "9" * length), sequence(NON_ZERO, Repeat(DIGIT, length, None))]
        return choice(*options)
    for count in range(length, len(str(high)) + 1):
        first = str(low) if count == length else "1" + "0" * (count - 1)
        last = str(high) if count == len(str(high)) else "9" * count
        options.append(_between(first, last))
    return choice(*options)


def _between(low: str, high: str) -> Expression:
    """Return an expression for the digit strings from `low` to `high`, which have the same length."""
    if not low:
        return EMPTY
    if low == "0" * len(low) and high == "9" * len(high):
        return repeat(DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    if first == last:
        return sequence(literal(low[0]), _between(low[1:], high[1:]))
    options: list[Expression] = []
    if low[1:] != "0" * (len(low) - 1):
        options.append(sequence(literal(low[0]), _between(low[1:], "9" * (len(low) - 1))))
        first += 1
    upper: list[Expression] = []
    if high[1:] != "9" * (len(high) - 1):
        upper.append(sequence(literal(high[0]), _between("0" * (len(high) - 1), high[1:])))
        last -= 1
    if first <= last:
        group = characters(((48 + first, 48 + last),))
        options.append(sequence(group, repeat(DIGIT, len(low) - 1, len(low) - 1)))
    return choice(*options, *upper)


def number_range(
    low: float | None, high: float | None, low_excluded: bool = False, high_excluded: bool = False
) -> Expression:
    """Return an expression for the decimal numbers from `low` to `high`.

    None means that there is no bound. At least one bound must be given, and the range must not be empty. The bounds themselves
    belong to the range, unless `low_excluded` or `high_excluded` is set.
    """
    least = None if low is None else _to_grid(low, low_excluded, upwards=True)
    most = None if high is None else _to_grid(high, high_excluded, upwards=False)
    options: list[Expression] = []
    if least is None or least < 0:
        first = 1 if most is None or most >= 0 else -most
        options.append(sequence(literal("-"), _decimals(first, None if least is None else -least)))
    if (least is None or least <= 0) and (most is None or most >= 0):
        zeros = sequence(literal("."), Repeat(literal("0"), 1, PRECISION))
        options.append(sequence(literal("0"), choice(EMPTY, zeros)))
        if low is None or low < 0:
            options.append(sequence(literal("-0"), zeros))
    if most is None or most > 0:
        options.append(_decimals(max(1, least or 1), most))
    return choice(*options)


def _to_grid(bound: float, excluded: bool, upwards: bool) -> int:
    """Return a bound in millionths (units of the sixth digit after the point), rounded inwards.

    A lower bound (`upwards`) is rounded up, and an upper bound down. With `excluded`, the bound itself is outside the range.
    """
    text = f"{bound:.{PRECISION}f}"
    units = int(text.replace(".", ""))
    exact = float(text) == bound
    step = 1 if upwards else -1
    if exact:
        return units + step if excluded else units
    return units + step if (float(text) < bound) == upwards else units


def _decimals(low: int, high: int | None) -> Expression:
    """Return an expression for the decimal numbers from `low` to `high`, both in millionths.

    `low` is at least 1.
    """
    if high is not None and high < low:
        return choice()
    whole, fraction = divmod(low, SCALE)
    if high is None:
        rest = sequence(integer_range(whole + 1, None), _any_fraction())
        return choice(_with_fraction(whole, fraction, SCALE - 1), rest)
    last_whole, last_fraction = divmod(high, SCALE)
    if whole == last_whole:
        return _with_fraction(whole, fraction, last_fraction)
    options = [_with_fraction(whole, fraction, SCALE - 1)]
    if last_whole - whole > 1:
        options.append(sequence(integer_range(whole + 1, last_whole - 1), _any_fraction()))
    return choice(*options, _with_fraction(last_whole, 0, last_fraction))


def _any_fraction() -> Expression:
    return choice(EMPTY, sequence(literal("."), Repeat(DIGIT, 1, PRECISION)))


def _with_fraction(whole: int, low: int, high: int) -> Expression:
    """Return an expression for the decimal numbers with the integer part `whole` and a fraction within bounds.

    The fraction is from `low` to `high`, both in millionths.
    """
    digits = _fractions(f"{low:0{PRECISION}}", f"{high:0{PRECISION}}", first=True)
    with_point = [sequence(literal("."), digits)]
    return sequence(literal(str(whole)), choice(*([EMPTY] if low == 0 else []), *with_point))


def _fractions(low: str, high: str, first: bool = False) -> Expression:
    """Return an expression for the digit strings that lie from `low` to `high` when padded with zeros at the end.

    `low` and `high` have the same length. With `first`, the digit string has at least one digit.
    """
    if not low:
        return EMPTY
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    options: list[Expression] = []
    if not first and low == zeros + "0":
        options.append(EMPTY)
    start, stop = int(low[0]), int(high[0])
    if start == stop:
        return choice(*options, sequence(literal(low[0]), _fractions(low[1:], high[1:])))
    ends: list[Expression] = []
    if low[1:] != zeros:
        options.append(sequence(literal(low[0]), _fractions(low[1:], nines)))
        start += 1
    if high[1:] != nines:
        ends.append(sequence(literal(high[0]), _fractions(zeros, high[1:])))
        stop -= 1
    if start <= stop:
        free = repeat(DIGIT, 0, len(low) - 1)
        options.append(sequence(characters(((48 + start, 48 + stop),)), free))
    return choice(*options, *ends)
