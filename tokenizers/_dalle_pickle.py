"""Reads a pickle as data: its opcodes become inert records; nothing is imported, looked up, called.

A pickle is a program for a machine that may call anything. This machine knows the opcodes and has
no such power: a global stays a `Name`, and calling one a `Made` that says what would be called.
Names that the caller did not list are refused when they are asked for, before they do anything.

Why not `torch.load(weights_only=True)` with stand-ins as its `safe_globals`: it reads the zip
layout that way, but refuses the persistent id 'module' of the older layout (torch 2.14), its list
of allowed names holds for the whole process, and what is on the list, it runs. Cutting the bytes
into opcodes is left to `pickletools`, the standard library's disassembler.
"""

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO

ORDERED_DICT = "collections OrderedDict"  # the only name whose records take items

_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
)


class RefusedError(Exception):
    """Why a file is not read any further: a clause to put behind its name."""


@dataclass(frozen=True, eq=False, repr=False)
class Name:
    """A global that the pickle names, "module name"; nobody has looked it up."""

    text: str


@dataclass(eq=False, repr=False)
class Made:
    """What a call of the global `name` would have made, and what was put into it afterwards."""

    name: str
    arguments: tuple[object, ...]
    state: object = None
    entries: dict[str | int, object] = field(default_factory=dict)


def read_pickle(
    stream: BytesIO, *, known: frozenset[str], refer: Callable[[object], object]
) -> object:
    """What the next pickle of `stream` describes: plain values, `Name` and `Made`.

    The stream is left behind the pickle. Every value is as large as its bytes in the stream, so
    the caller bounds the memory with the stream.

    Args:
        stream: bytes that may be hostile.
        known: the globals that may be named, each "module name".
        refer: persistent id -> what stands for it; raises `RefusedError`.

    Raises:
        RefusedError: another global is asked for, an opcode does what torch.save never does, or the
            bytes are no pickle.
    """
    machine = _Machine(known, refer)
    try:
        with warnings.catch_warnings():
            # pickletools takes a backslash in a name for an escape, and warns of odd ones.
            warnings.simplefilter("ignore", DeprecationWarning)
            for opcode, argument, _ in pickletools.genops(stream):
                machine.step(opcode.name, argument)
        return machine.pop(1)[0]
    except (ValueError, LookupError) as error:
        raise RefusedError(f"it is no whole pickle ({str(error)[:100]})") from error


class _Machine:
    def __init__(self, known: frozenset[str], refer: Callable[[object], object]) -> None:
        self._known, self._refer = known, refer
        self._stack: list[object] = []
        self._marks: list[list[object]] = []  # stacks that were set aside
        self._memo: dict[object, object] = {}

    def pop(self, num: int) -> list[object]:
        if len(self._stack) < num:
            raise LookupError("it takes more than it has put down")
        items = self._stack[-num:]
        del self._stack[-num:]
        return items

    def step(self, opcode: str, argument: object) -> None:
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                return
            case "MARK":
                self._marks.append(self._stack)
                self._stack = []
            case "APPEND" | "APPENDS" | "ADDITEMS":
                self._extend(self._items(opcode, single=1))
            case "SETITEM" | "SETITEMS":
                self._set(self._items(opcode, single=2))
            case "BUILD":
                self._build(*self.pop(1))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                key = len(self._memo) if opcode == "MEMOIZE" else argument
                self._memo[key] = self._top()
            case _:
                value = self._value(opcode, argument)  # which may set the stack aside
                self._stack.append(value)

    def _value(self, opcode: str, argument: object) -> object:
        """What the opcodes push that push one value."""
        match opcode:
            case "NONE":
                return None
            case "NEWTRUE" | "NEWFALSE":
                return opcode == "NEWTRUE"
            case "EMPTY_LIST" | "EMPTY_SET":
                return []
            case "EMPTY_DICT":
                return {}
            case "EMPTY_TUPLE":
                return ()
            case "TUPLE":
                return tuple(self._since_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple(self.pop(int(opcode[-1])))
            case "BINGET" | "LONG_BINGET":
                return self._remembered(argument)
            case "GLOBAL":
                return self._name(argument)
            case "STACK_GLOBAL":
                return self._name(" ".join(map(str, self._plain(self.pop(2)))))
            case "REDUCE" | "NEWOBJ":
                return self._made(*self.pop(2))
            case "BINPERSID":
                return self._refer(*self.pop(1))
        if opcode in _LITERALS:
            return argument
        asked = "" if argument is None else f" {str(argument)[:80]!r}"
        raise RefusedError(f"its pickle uses {opcode}{asked}, which torch.save never writes")

    def _remembered(self, key: object) -> object:
        if key not in self._memo:
            raise LookupError(f"it remembers nothing under {key}")
        return self._memo[key]

    def _name(self, text: object) -> Name:
        if text not in self._known:
            raise RefusedError(f"its pickle asks for {str(text).replace(' ', '.')[:80]!r}")
        return Name(str(text))

    def _made(self, function: object, arguments: object) -> Made:
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise RefusedError(f"its pickle calls {_kind(function)} with {_kind(arguments)}")
        return Made(function.text, arguments)

    def _build(self, state: object) -> None:
        target = self._top()
        if not isinstance(target, Made) or target.state is not None:
            raise RefusedError(f"its pickle sets the state of {_kind(target)}")
        target.state = state

    def _extend(self, items: list[object]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise RefusedError(f"its pickle puts {len(items)} items into {_kind(target)}")
        target.extend(items)

    def _set(self, items: list[object]) -> None:
        target = self._top()
        if isinstance(target, Made) and target.name == ORDERED_DICT:
            target = target.entries
        if not isinstance(target, dict) or len(items) % 2:
            raise RefusedError(f"its pickle puts {len(items)} items into {_kind(target)}")
        # Other keys would be hashed, and hashing a deeply nested tuple overflows the C stack.
        target.update(zip(self._plain(items[::2]), items[1::2], strict=True))

    def _plain(self, keys: list[object]) -> list[str | int]:
        plain = [key for key in keys if isinstance(key, str | int)]
        if len(plain) < len(keys):
            raise RefusedError("its pickle has keys or names that are neither text nor numbers")
        return plain

    def _items(self, opcode: str, *, single: int) -> list[object]:
        return self._since_mark() if opcode.endswith("S") else self.pop(single)

    def _since_mark(self) -> list[object]:
        if not self._marks:
            raise LookupError("it has no mark where it needs one")
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _top(self) -> object:
        if not self._stack:
            raise LookupError("it takes more than it has put down")
        return self._stack[-1]


def _kind(value: object) -> str:
    if isinstance(value, Name | Made):
        text = value.text if isinstance(value, Name) else value.name
        return f"'{text.replace(' ', '.')}'"
    return f"a {type(value).__name__}"
