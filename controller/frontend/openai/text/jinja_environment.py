"""The Jinja2 environment of chat templates: Hugging Face's dialect, in a sandbox with a budget.

A template comes with a model's files, and is a program. Without limits, ten nested loops over `range(99999)` never
end, and `"x" * 10**9` uses all memory. So each rendering has a budget of steps and seconds:

    a loop's body or condition, a call, a filter, an operator   1 step
    a text that is read or created                              1 step per 256 characters
    a list that is read or created                              1 step per 8 items
    a value that is compared or converted to text               the steps of reading all texts and lists in the value
    slower operations (sorting, `tojson` with an indent …)      8 or 16 times as many steps
    one operation                                               at most `OPERATION_STEPS_MAX`
    an argument that sets a width or a count                    at most `WIDTH_MAX`

So no single operation takes long. The clock is read every 64 steps and before each large operation, so a rendering
that has used up its seconds is stopped soon afterwards.

The syntax tree is rewritten once, when a template is compiled. The dialect is that of transformers' `apply_chat_template`:
trimmed blocks, loop controls, `{% generation %}`, `tojson` with `json.dumps`' arguments, `raise_exception`, `strftime_now`.

The module is imported with the first template: a process that only counts tokens does not need Jinja2.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from datetime import UTC, datetime
from functools import wraps
from itertools import chain
from time import thread_time
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Enough for 1,000 messages with 1,000 steps each, or for 256 million characters. A step takes about 0.3 µs.
STEPS_MAX = 1_000_000
SECONDS_MAX = 0.25  # of CPU time of the thread; the largest known conversations take 50 ms
# enough for a text of 8 million characters, which is longer than any model's context
OPERATION_STEPS_MAX = 32_768
WIDTH_MAX = 1000  # width of indent, center, ljust …; the largest width in known templates is 8
JSON_INDENT_MAX = 16  # up to JSON_DEPTH_MAX indents may precede each value
JSON_DEPTH_MAX = 100
INTEGER_BITS_MAX = 256  # size of a product, because templates only count
CHARS_OF_A_STEP, ITEMS_OF_A_STEP = 256, 8
SLOWER, INDENTED = 16, 8  # cost of slow filters, and of `tojson` with an indent, relative to copying
PRINTED = 4  # cost of printed text, because it is kept and copied again at the end
STEPS_BETWEEN_CLOCK_READS = 64
REMOVED_FILTERS = (
    "filesizeformat", "forceescape", "pprint", "random", "striptags", "sum", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters that are useless in a prompt and have no simple limit of their cost."""
SIZE_FILTERS = {"count", "d", "default", "first", "last", "length"}  # filters that read at most one item
REFERENCE_FILTERS = {
    "attr", "batch", "items", "join", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
}  # fmt: skip
"""Filters that read the items of a list but not the contents of the items. For `join`, `_parts` charges the contents."""
SLOW_FILTERS = {"dictsort", "groupby", "sort", "title", "unique", "urlencode", "wordcount"}
READING_TESTS = {
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt", "ne",
    "upper",
}  # fmt: skip
TEXT_FILTERS = {"format", "indent", "replace"}  # filters that convert their value to text
WIDE = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "zfill"}
"""Filters and methods with an argument that sets a width or a count."""
QUADRATIC = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim"}
"""Filters and methods that take time proportional to the text length times the argument length."""
# methods that build results without a simple limit of their size
REFUSED_METHODS = {"encode", "from_bytes", "to_bytes", "translate"}

_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, range, Namespace, *_VIEWS)
_wide_format = re.compile(r"\d{4,}|\*|\{[^{}]+\{|\{\{\}").search


class OverBudget(TemplateError):
    """A rendering exceeded its budget."""


class RenderingBudget:
    """The remaining steps and seconds of one rendering.

    The time limit starts when the clock is first read, after 64 steps. The limit thus starts some 10 µs late, but
    short renderings need no system call.
    """

    __slots__ = ("_deadline", "_look", "_seconds", "_steps")

    def __init__(self, steps: int = STEPS_MAX, seconds: float = SECONDS_MAX) -> None:
        self._steps = steps
        self._seconds = seconds
        self._deadline: float | None = None  # set at the first clock read
        self._look = STEPS_BETWEEN_CLOCK_READS

    def spend(self, steps: int) -> None:
        """Charge the steps of one operation to the budget, before the operation runs.

        Raise OverBudget if the budget is exceeded.
        """
        if steps > OPERATION_STEPS_MAX:
            raise OverBudget(f"one operation takes more than {OPERATION_STEPS_MAX:,} steps")
        self._steps -= steps
        self._look -= steps
        if self._steps < 0:
            raise OverBudget(f"it takes more than {STEPS_MAX:,} steps")
        if self._look < 0:
            self._look = STEPS_BETWEEN_CLOCK_READS
            now = self.now()
            if self._deadline is None:
                self._deadline = now + self._seconds
            elif now > self._deadline:
                raise OverBudget(f"it takes more than {SECONDS_MAX:g} s")

    def now(self) -> float:
        """Return the CPU seconds of this thread."""
        return thread_time()


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that charges a template's operations to a budget. One environment renders one template at a time."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        # of the current rendering, or of constant folding while a template is compiled
        self.budget = RenderingBudget()
        self.finalize = self._printed
        self.filters = {
            name: self._counted_filter(name, filter)
            for name, filter in (self.filters | {"tojson": _tojson}).items()
            if name not in REMOVED_FILTERS
        }
        charges = (self._step, self._concat, self._slice, self._compared, self._searched)
        self.filters |= {charge.__name__: charge for charge in charges}
        self.tests = {
            name: self._counted_test(test) if name in READING_TESTS else test
            for name, test in self.tests.items()
        }
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Rewriter().visit(Parser(self, source, name, filename).parse())
        assert isinstance(tree, nodes.Template)
        return tree

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Apply an operator. Raise OverBudget before an oversized result is built."""
        match operator:
            case "*":
                self.budget.spend(1 + _product_cost(left, right))
            case "**":
                if isinstance(left, int) and isinstance(right, int):
                    _check_bits(left.bit_length() * max(0, right))
                self.budget.spend(1)
            case _:
                cost = _cost(left) + _cost(right)
                if isinstance(left, str) and operator == "%":
                    _check_format(left)
                    cost += left.count("%") * _whole_cost(right)
                self.budget.spend(1 + cost)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Call a function, a method or a macro. Raise OverBudget if the cost of the call exceeds the budget."""
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        name = getattr(obj, "__name__", "")
        if owner is not None and name in REFUSED_METHODS:
            raise OverBudget(f"it calls {name}, which is not allowed")
        cost = _whole_cost(owner) if isinstance(owner, list | tuple) else _cost(owner)
        if isinstance(owner, str):
            self._spend_on_text(name, owner, args, (*args, *kwargs.values()))
            if name == "join" and args:
                args = (self._parts(args[0], owner), *args[1:])
        if not isinstance(obj, Macro):
            cost += sum(map(_whole_cost, (*args, *kwargs.values())))
        self.budget.spend(1 + cost)
        return self._counted_value(super().call(context, obj, *args, **kwargs))

    def _spend_on_text(
        self, name: str, text: str, args: tuple[object, ...], given: tuple[object, ...]
    ) -> None:
        """Charge to the budget what a filter or method costs besides reading its text and its arguments.

        `args` are the arguments given by position, and `given` are all arguments. Raise OverBudget if the budget is
        exceeded.
        """
        spend = self.budget.spend
        if name in WIDE:
            _check_widths(given)
        if name == "expandtabs":
            spend(text.count("\t") * WIDTH_MAX // CHARS_OF_A_STEP)
        elif name == "indent":
            spend(text.count("\n") * _width(given) // CHARS_OF_A_STEP)
        elif name in ("format", "format_map"):
            _check_format(text)
            spend(text.count("{") * sum(map(_whole_cost, given)))
        elif name == "replace" and len(args) >= 2:
            spend(_replacing_cost(text, *args[:2]))
        elif name in ("split", "rsplit", "splitlines"):
            separator = given[0] if given and isinstance(given[0], str) and given[0] else ""
            spend((text.count(separator) if separator else len(text) // 2) // ITEMS_OF_A_STEP)
        elif name == "list":
            spend(len(text) // ITEMS_OF_A_STEP)
        if name in QUADRATIC:
            longest = max((len(one) for one in given if isinstance(one, str)), default=0)
            spend(len(text) * longest // CHARS_OF_A_STEP)

    def _counted_filter(self, name: str, filter: Callable[..., object]) -> Callable[..., object]:
        """Return a filter that works like `filter` and charges its inputs and its result to the budget."""
        # index of the value among the filter's arguments
        first = 1 if hasattr(filter, "jinja_pass_arg") else 0
        cost = _cost if name in REFERENCE_FILTERS else _whole_cost
        factor = SLOWER if name in SLOW_FILTERS else 1

        @wraps(filter)
        def counted(*args: object, **kwargs: object) -> object:
            value, rest = args[first], args[first + 1 :]
            given = (*rest, *kwargs.values())
            if name in SIZE_FILTERS:
                self.budget.spend(1)
            elif name == "tojson" and (kwargs.get("indent") is not None or len(rest) > 1):
                self.budget.spend(1 + INDENTED * _whole_cost(value))
            else:
                if factor > 1 and isinstance(value, Iterator):
                    value = list(self._items(value))
                    args = (*args[:first], value, *rest)
                self.budget.spend(1 + factor * (cost(value) + sum(map(cost, given))))
            text = str(value) if isinstance(value, str) or name in TEXT_FILTERS else ""
            self._spend_on_text(name, text, rest, given)
            if name == "join":
                separator = rest[0] if rest else kwargs.get("d", "")
                args = (*args[:first], self._parts(value, str(separator)), *rest)
            return self._counted_value(filter(*args, **kwargs))

        return counted

    def _counted_test(self, test: Any) -> Callable[..., object]:
        """Return a Jinja2 test (as in `x is defined`) that works like `test` and charges its inputs to the budget."""

        @wraps(test)
        def counted(value: object, *args: object, **kwargs: object) -> object:
            others = (*args, *kwargs.values()) or (value,)
            self.budget.spend(1 + sum(map(_whole_cost, others)))
            return test(value, *args, **kwargs)

        return counted

    def _printed(self, value: object) -> object:
        """Charge the cost of printing a value and all values in it to the budget. Return the value."""
        if type(value) is str and len(value) < CHARS_OF_A_STEP:  # the common case
            return value
        cost = _whole_cost(value)
        for _ in range(PRINTED):
            self.budget.spend(cost)
        return value

    def _compared(self, value: object) -> object:
        """Charge the cost of comparing a value and all values in it to the budget. Return the value."""
        self.budget.spend(_whole_cost(value))
        return value

    def _searched(self, value: object) -> object:
        """Charge the cost of searching a container to the budget, and return the container.

        Searching a dict costs nothing extra, because only one key is read.
        """
        if not isinstance(value, dict):
            self.budget.spend(_whole_cost(value))
        return self._items(value) if isinstance(value, Iterator) else value

    def _counted_value(self, value: object) -> object:
        """Charge the cost of reading a value to the budget, and return the value.

        A lazily computed sequence is charged item by item, as it is read.
        """
        if type(value) is str and len(value) < CHARS_OF_A_STEP:  # the common case
            return value
        if isinstance(value, Iterator):
            return self._items(value)
        self.budget.spend(_cost(value))
        return value

    def _items(self, values: Iterable[object]) -> Iterator[object]:
        for value in values:
            self.budget.spend(1 + _cost(value))
            yield value

    def _parts(self, value: Any, separator: str) -> list[object]:
        """Return the parts of a `join` filter as a list, and charge the cost of joining them to the budget.

        Raise OverBudget if the joined text would exceed the limit of one operation.
        """
        parts, made = [], 0
        for part in value:
            steps = 1 + _whole_cost(part) + len(separator) // CHARS_OF_A_STEP
            made += steps - 1
            self.budget.spend(steps)
            if made > OPERATION_STEPS_MAX:
                raise OverBudget(f"one operation takes more than {OPERATION_STEPS_MAX:,} steps")
            parts.append(part)
        return parts

    def _step(self, value: object, steps: int) -> object:
        """Charge `steps` to the budget, and return `value`. Called by loops and macros of the rewritten syntax tree."""
        self.budget.spend(steps)
        return value

    def _concat(self, parts: Sequence[object]) -> str:
        """Return the concatenation of parts, as the operator `~` does, and charge its cost to the budget."""
        self.budget.spend(1 + sum(map(_whole_cost, parts)))
        texts = [str(part) for part in parts]
        self.budget.spend(sum(map(len, texts)) // CHARS_OF_A_STEP)
        return "".join(texts)

    def _slice(self, value: Any, start: int | None, stop: int | None, step: int | None) -> object:
        return self._counted_value(value[start:stop:step])


class _Generation(Extension):
    """Parses `{% generation %} … {% endgeneration %}`, which marks the assistant's text for training.

    The tags render nothing.
    """

    tags = {"generation"}  # noqa: RUF012 (the name and type that Jinja2 requires)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Rewriter(NodeTransformer):
    """Rewrites a syntax tree so that its operations charge the budget.

    Each loop and macro gets an instruction that charges steps. The operator `~`, slices and comparisons become filters.
    """

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        """Rewrite the children of a node, then the node. Return the node, or the node that replaces it."""
        return _charged(super().generic_visit(node))


def _charged(node: nodes.Node) -> nodes.Node:
    """Make a node charge its own operation to the budget, but not the operations of its children.

    Return the node, or the node that replaces it.
    """
    match node:
        case nodes.For():
            if node.test is not None:
                node.test = nodes.And(_filter(nodes.Const(True), "_step", [nodes.Const(1)]), node.test)
            _count_in(node.body)
        case nodes.Macro() | nodes.CallBlock():
            _count_in(node.body)
        case nodes.Concat():
            return _filter(nodes.List(node.nodes), "_concat", [])
        case nodes.Getitem(arg=nodes.Slice() as part):
            bounds = [bound or nodes.Const(None) for bound in (part.start, part.stop, part.step)]
            return _filter(node.node, "_slice", bounds)
        case nodes.Compare():
            for operand in node.ops:
                name = "_searched" if operand.op in ("in", "notin") else "_compared"
                operand.expr = _filter(operand.expr, name, [])
    return node


def _count_in(body: list[nodes.Node]) -> None:
    """Insert a charge at the start of the body of a loop or macro.

    The charge is one step, plus the cost of the constant text in the body.
    """
    constant = sum(len(text.data) for text in nodes.Template(body).find_all(nodes.TemplateData))
    steps = nodes.Const(1 + constant // CHARS_OF_A_STEP)
    body.insert(0, nodes.ExprStmt(_filter(nodes.Const(True), "_step", [steps])))


def _filter(value: nodes.Expr, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None)


def _cost(value: object) -> int:
    """Return the number of steps that reading or copying a value costs, without the values inside a list or mapping."""
    if isinstance(value, str):
        return len(value) // CHARS_OF_A_STEP
    return len(value) // ITEMS_OF_A_STEP if isinstance(value, list | tuple | dict | range) else 0


def _whole_cost(value: object) -> int:
    """Return the number of steps that reading a value and all values in it costs.

    The count may stop as soon as it exceeds the limit of one operation, because the operation is then refused. Raise
    OverBudget if the value is nested too deeply.
    """
    if isinstance(value, str):
        return len(value) // CHARS_OF_A_STEP
    if not isinstance(value, _CONTAINERS):
        return 0
    chars = items = 0
    open_: list[Iterator[object]] = [iter((value,))]
    while open_:
        for part in open_[-1]:
            if isinstance(part, str):
                chars += len(part)
            elif isinstance(part, _CONTAINERS):
                # Jinja2 keeps a namespace's values in this attribute and prints them.
                inner: Any = part._Namespace__attrs if isinstance(part, Namespace) else part
                items += len(inner)
                if chars // CHARS_OF_A_STEP + items // ITEMS_OF_A_STEP > OPERATION_STEPS_MAX:
                    return OPERATION_STEPS_MAX + 1
                if type(inner) is range or not inner:
                    continue
                if len(open_) > JSON_DEPTH_MAX:
                    raise OverBudget(f"it reads a value that nests more than {JSON_DEPTH_MAX} levels")
                open_.append(chain(inner, inner.values()) if isinstance(inner, dict) else iter(inner))
                break
        else:
            open_.pop()
    return chars // CHARS_OF_A_STEP + items // ITEMS_OF_A_STEP


def _width(values: Sequence[object]) -> int:
    """Return an upper bound of the width of an indentation: the largest width among the arguments, but at least 4."""
    widths = [len(value) if isinstance(value, str) else value for value in values]
    return max([4, *(width for width in widths if isinstance(width, int))])


def _product_cost(left: object, right: object) -> int:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return 0
    sized, times = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(times, int) or not isinstance(sized, str | list | tuple):
        return 0
    return len(sized) * max(0, times) // (CHARS_OF_A_STEP if isinstance(sized, str) else ITEMS_OF_A_STEP)


def _replacing_cost(text: str, old: object, new: object) -> int:
    old, new = str(old), str(new)
    return (len(text) + (text.count(old) if old else len(text) + 1) * len(new)) // CHARS_OF_A_STEP


def _check_bits(bits: int) -> None:
    if bits > INTEGER_BITS_MAX:
        raise OverBudget(f"it computes an integer of more than {INTEGER_BITS_MAX} bits")


def _check_widths(values: Sequence[object]) -> None:
    if any(isinstance(value, int) and abs(value) > WIDTH_MAX for value in values):
        raise OverBudget(f"it requests a width or count of more than {WIDTH_MAX:,}")
    if any(isinstance(value, str) and len(value) > WIDTH_MAX for value in values):
        raise OverBudget(f"it pads with a text of more than {WIDTH_MAX:,} characters")


def _check_format(text: str) -> None:
    if _wide_format(text):
        raise OverBudget("a format string requests a width of four digits, or a computed width")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON.

    The arguments are those of `tojson` in transformers' `apply_chat_template`, in the same order.
    """
    if (len(indent) if isinstance(indent, str) else indent or 0) > JSON_INDENT_MAX:
        raise OverBudget(f"it requests an indent of more than {JSON_INDENT_MAX}")
    _check_widths(separators or ())
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_format(format)
    return datetime.now(UTC).strftime(format)  # noqa: TID251 (a date for the prompt, not an order)


def format_of(tree: nodes.Template) -> tuple[bool, bool, bool]:
    """Return the message format that a template expects: the fields of `MessageFormat`, in order.

    The format is derived from the template's syntax tree.
    """
    parts = _loops_over_parts(tree)
    strings = not parts or any(test.name == "string" for test in tree.find_all(nodes.Test))
    developer = any(constant.value == "developer" for constant in tree.find_all(nodes.Const))
    return parts, strings, developer


def _loops_over_parts(tree: nodes.Template) -> bool:
    """Return whether the template loops over the content of a message, which means that it expects a list of parts."""
    # pairs of a name and what the name refers to: "messages", "message" or "content"
    names = {("messages", "messages")}
    for _ in range(3):  # up to three levels of aliases
        for assigned in tree.find_all(nodes.Assign):
            if isinstance(assigned.target, nodes.Name):
                names |= {(assigned.target.name, kind) for kind in _kinds(assigned.node, names)}
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and "messages" in _kinds(loop.iter, names):
                names.add((loop.target.name, "message"))
    return any("content" in _kinds(loop.iter, names) for loop in tree.find_all(nodes.For))


def _kinds(value: nodes.Node, names: Set[tuple[str, str]]) -> set[str]:
    """Return what a value may refer to ("messages", "message" or "content"), through any filters and slices.

    `names` contains each variable of the template together with what it may refer to.
    """
    while isinstance(value, nodes.Filter) and value.node is not None:
        value = value.node
    match value:
        case nodes.Name():
            return {kind for name, kind in names if name == value.name}
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return {"content"} if "message" in _kinds(value.node, names) else set()
        case nodes.Getitem():
            return {"message"} if "messages" in _kinds(value.node, names) else set()
    return set()
