"""What a compiled program does, read from its text and its trace: collectives and matrix products, loops counted in full."""

import math
import re
from collections import defaultdict
from typing import Any, NamedTuple

from jax.interpreters.partial_eval import dce_jaxpr

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast",
)  # fmt: skip
# s4, s8, bf16, f32, f8e4m3fn ...: the first number is the width in bits; pred takes a byte
_ARRAY = re.compile(r"\b(pred|[a-z]{1,2}(\d+)\w*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z-]+)\((.*)")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=(%[\w.-]+)|branch_computations=\{([^}]*)\}")


class Sent(NamedTuple):
    """Collectives of one kind, a device and a run of the program."""

    times: int
    bytes: int
    """of their results"""


class Instruction(NamedTuple):
    """`result = opcode(rest`, a line of a compiled program."""

    root: bool
    """its result is that of its computation"""
    result: str
    opcode: str
    rest: str

    @property
    def sizes(self) -> list[int]:
        """Elements of each array of the result."""
        return [_elements(dims) for _, _, dims in _ARRAY.findall(self.result)]


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of a compiled program (`compiled.as_text()`), by the name of their computation: ENTRY, or %NAME."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.split()[0]
            found[name] = []
        elif match := _INSTRUCTION.match(line):
            found[name].append(Instruction(bool(match[1]), *match.groups()[1:]))
    return found


def collectives(text: str) -> dict[str, Sent]:
    """Collectives of a compiled program (`compiled.as_text()`), by kind.

    One in a loop counts as often as the loop runs; a loop whose length only the run decides (decoding) counts as one round.
    TPUs spread one over fusions (also in a later loop) beside whose work it runs: those parts share a chain, and it counts once. A
    channel says nothing: all calls of one jitted function (a layer) share theirs.
    """
    program = computations(text)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def walk(name: str, times: int, seen: set[str]) -> None:
        for instruction in program.get(name, ()):
            opcode = instruction.opcode.removesuffix("-done")  # an asynchronous one is counted where its result is complete
            chain = re.search(r'chain_id="(\d+)"', instruction.rest)
            if opcode in COLLECTIVES:
                if chain and chain[1] in seen:
                    continue
                seen |= {chain[1]} if chain else set()
                arrays = _ARRAY.findall(instruction.result)
                found[opcode][0] += times * len(arrays)
                found[opcode][1] += times * sum(_bytes(*array) for array in arrays)
            elif opcode == "while":
                (body,) = re.findall(r"body=(%[\w.-]+)", instruction.rest)
                walk(body, times * _trips(instruction.rest, program), set(seen))
            elif not instruction.opcode.endswith(("-done", "-update")):
                for one, several in _CALLED.findall(instruction.rest):
                    for called in [one] if one else several.split(", "):
                        walk(called, times, seen)

    walk("ENTRY", 1, set())
    return {kind: Sent(*found[kind]) for kind in COLLECTIVES if kind in found}


def _trips(rest: str, program: dict[str, list[Instruction]]) -> int:
    """How often a while loop runs: as XLA notes it, or by a condition that counts from 0 up to a constant; else 1."""
    noted = re.search(r'known_trip_count":?\{"n":"(\d+)"', rest)
    if noted:
        return int(noted[1])
    condition = program[re.findall(r"condition=(%[\w.-]+)", rest)[0]]
    counts = [x.rest for x in condition if x.root and x.opcode == "compare" and "direction=LT" in x.rest]
    limits = [int(number[1]) for x in condition if x.opcode == "constant" and (number := re.match(r"(\d+)\)", x.rest))]
    return limits[0] if counts and len(limits) == 1 else 1


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def _bytes(kind: str, bits: str, dims: str) -> int:
    return (_elements(dims) * int(bits or 8) + 7) // 8


def product_flops(jaxpr: Any) -> int:
    """Operations in the matrix products of a traced program (`traced.jaxpr`), of all devices together: 2 a multiply-add.

    Products in a scan count as often as it runs, those of a `while_loop` once; of a `cond` the dearest branch counts. What no
    result needs is not run and not counted (the target's layers above its last tap).
    """
    return _products(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _products(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = [_products(x) for value in equation.params.values() for x in _jaxprs(value)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        elif equation.primitive.name == "scan":
            total += equation.params["length"] * sum(inner)
        elif equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += sum(inner)
    return total


def _jaxprs(value: Any) -> list[Any]:
    """Programs among the parameters of an equation."""
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in _jaxprs(part)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []
