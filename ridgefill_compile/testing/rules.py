"""One op's row rule against the truth: `op(x)[rows] == rule(op)(x[rows])`, on samples given or made of its schema."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ridgefill_compile.passes.calls import Call, CausalTail, Need, Rule
from ridgefill_compile.testing import source
from ridgefill_compile.testing.difference import Mismatch
from ridgefill_compile.testing.square import Finding, Sample, Square, judge

MOST_SAMPLES = 60
MOST_TRIED = 6000
SHAPES: tuple[tuple[int, ...], ...] = ((3,), (3, 3), (2, 3), (1, 3), (3, 1), (2, 3, 3), (1, 3, 2), (2, 1, 3), ())
FIRST: tuple[tuple[int, ...], ...] = ((3,), (3, 3), (2, 3, 3), (1, 3, 2), (2, 3, 3, 3))  # of an op's first operand
_LISTS = ([0], [1], [-1], [0, 1], [1, 2], [3], [3, 3], [9], [6, 3], [2, 9], [2, 3, 3], [18], [0, 2, 1])


def check_rule(
    op: Any, rule: Rule | None = None, samples: Iterable[Sample | Sequence[Any]] | None = None
) -> list[Finding]:
    """Hold a row rule to the commuting square: rows of the result are the narrowed call's, on truly narrower operands.

    Every sample is asked for one, two, all but one and all rows of every dimension, in one block and in several, and
    for the last with some that are selected.

    Args:
        op: an operator, such as `torch.ops.aten.cumsum.default`.
        rule: the candidate; None: the one of the table.
        samples: calls of the op (see `sample`), or their positional arguments; None: small ones, made from its schema,
            on sizes that collide.

    Returns:
        What was found of each demand: "right", or "none" where the rule says nothing.

    Raises:
        Mismatch: an AssertionError that shows the smallest counterexample, and code that fails the same way.
        ValueError: no sample could be made of the schema, or the rule narrowed nothing of any: give samples.
    """
    calls = [s if isinstance(s, Sample) else Sample(op, tuple(s)) for s in samples or ()] or samples_of(op)
    if not calls:
        raise ValueError(f"no sample of {op} could be made of its schema: give samples")
    found = [finding for given in calls for finding in judge(given, gaps=False, rule=rule)]
    wrong = [finding for finding in found if finding.verdict == "wrong"]
    if wrong:
        smallest = min(wrong, key=_size)
        what = f"the rule of {op} is wrong on {len(wrong)} of {len(found)} demands; the smallest:"
        raise Mismatch(f"{what}\n{_described(smallest, rule)}", _program(op, rule, smallest.sample))
    if not any(f.verdict == "right" and f.rows.length * f.rows.blocks != f.size[f.rows.dim] for f in found):
        raise ValueError(f"the rule of {op} narrows nothing of {len(calls)} samples: give others")
    return found


def _size(finding: Finding) -> tuple[int, int]:
    return entries(finding.sample), finding.rows.last


def entries(given: Sample) -> int:
    """Entries of all tensors of a sample."""
    leaves = tree_leaves([given.args, given.kwargs])
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _described(finding: Finding, rule: Rule | None) -> str:
    """The sample, what was asked for, what the rule says, and what came of it."""
    which = "" if finding.result is None else f" of result {finding.result}"
    square = Square(finding.sample, rule)
    try:
        call = square.narrowed_call(square.results[finding.result], finding.rows)
    except Exception as error:
        said = f"an error: {error}"
    else:
        said = _said(call)
    lines = [f"{finding.sample} -> {list(finding.size)}", f"wanted: {finding.rows}{which}", f"the rule says: {said}"]
    return "\n".join(f"  {line}" for line in [*lines, *finding.detail.strip().splitlines()] if line)


def _said(argument: Any) -> str:
    if isinstance(argument, Call):
        args = [_said(a) for a in argument.args] + [f"{k}={_said(v)}" for k, v in argument.kwargs.items()]
        return args[0] if argument.target is None else f"{argument.target}({', '.join(args)})"
    if isinstance(argument, Need):
        return f"<{argument.rows} of {argument.node}>"
    if isinstance(argument, CausalTail):
        return "<causal mask of the tail>"
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_said, argument))}]"
    return str(argument)


def _program(op: Any, rule: Rule | None, given: Sample) -> str:
    args = [_written(value) for value in given.args]
    args += [f"{name}={_written(value)}" for name, value in given.kwargs.items()]
    args += [f"dynamic={list(given.dynamic)!r}"] if given.dynamic else []
    lines = [source.of_function(rule, "rule")] if rule is not None else []
    lines += [
        f"op = torch.ops.{op}",
        f"check_rule(op, {'rule, ' if rule is not None else ''}samples=[sample({', '.join(['op', *args])})])",
    ]
    return source.program(["check_rule", "sample"], lines)


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, torch.dtype | torch.memory_format):
        return str(value)
    return source.of_value(value)


# ---------------------------------------------------------------- samples of a schema


def samples_of(op: Any) -> list[Sample]:
    """Small calls of an op, made from its schema: those of many tried that run, on sizes that collide."""
    for make in (_normal, _whole, _flags, _complex):
        found = list(itertools.islice(_that_run(op, make), MOST_TRIED))
        if found:
            found.sort(key=entries)
            step = max(1, -(-len(found) // MOST_SAMPLES))
            return found[::step]
    return []


def _that_run(op: Any, make: Any) -> Iterator[Sample]:
    wanted = [a for a in op._schema.arguments if not a.has_default_value() or a.name in ("dim", "dims", "keepdim")]
    tensors = [a.name for a in wanted if "Tensor" in str(a.type)]
    choices = [list(_values(a, make, tensors)) for a in wanted]
    for picked in itertools.islice(itertools.product(*choices), MOST_TRIED):
        given = dict(zip((a.name for a in wanted), picked, strict=True))
        positional = [a for a in op._schema.arguments if not a.kwarg_only]
        last = max((i for i, a in enumerate(positional) if a.name in given), default=-1)
        args = tuple(given.get(a.name, a.default_value) for a in positional[: last + 1])
        kwargs = {a.name: given[a.name] for a in wanted if a.kwarg_only}
        try:
            result = op(*args, **kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
            continue
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if results and all(leaf.dim() and leaf.numel() and not leaf.isnan().any() for leaf in results):
            yield Sample(op, args, kwargs)


def _values(argument: Any, make: Any, tensors: Sequence[str]) -> Iterator[Any]:
    """What to try for an argument of a schema."""
    kind, name = str(argument.type), argument.name
    if argument.has_default_value():
        yield argument.default_value
    if "Tensor" in kind:
        shapes = FIRST if tensors[0] == name else SHAPES
        maker = _whole if name.startswith(("index", "indices")) else _flags if name in ("condition", "mask") else make
        if kind.startswith("Optional"):
            yield None
        if "List" in kind:
            yield from ([maker(*size), maker(*size)] for size in shapes)
        else:
            yield from (maker(*size) for size in shapes)
    elif "List" in kind:
        yield from (list(value) for value in _LISTS)
    elif "bool" in kind:
        yield from (False, True)
    elif "int" in kind.lower():
        yield from (0, 1, -1) if name.startswith("dim") else (1, 2, 0)
    elif "float" in kind or "number" in kind:
        yield 2
    elif not argument.has_default_value():
        yield None


def _generator(size: Sequence[int]) -> torch.Generator:
    return torch.Generator().manual_seed(sum(size))


def _normal(*size: int) -> Tensor:
    return (4 * torch.randn(size, generator=_generator(size))).round() / 4  # short when written out


def _whole(*size: int) -> Tensor:
    return torch.randint(3, size, generator=_generator(size))


def _flags(*size: int) -> Tensor:
    return _normal(*size) > 0


def _complex(*size: int) -> Tensor:
    return torch.complex(_normal(*size), _normal(*size))
