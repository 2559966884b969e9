"""Writes ops that draw random numbers with `sbpc::bits`: every element's value depends on a seed and its global index.

Each draw of a forward has a stream of its own, the number of the draw in program order. The number is kept as the seed
of torch's CPU generator while capturing: what saves and restores the state of that generator in order to draw the same
numbers again, as torch.utils.checkpoint does when it computes anew, so draws the same stream again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbpc.graph.operands import named_arguments
from sbpc.graph.random_bits import BITS, DIGITS
from sbpc.passes.capture.source_lines import user_error, user_stack

aten = torch.ops.aten
FIRST = 0x5BC00000000  # the seed of torch's generator that stands for stream 0
STREAMS = 1 << 32
MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # binary digits


@dataclass(frozen=True)
class Draw:
    """What a random op is written with: `call(op, *args, **kwargs)` runs or records an op, `seed` is that of the
    step."""

    call: Callable[..., Any]
    seed: Tensor

    def bits(self, size: Sequence[int]) -> Tensor:
        """Returns integers of [0, 2**53), of a stream of their own."""
        return self.call(BITS, self.seed, list(size), next_stream())

    def below(self, size: Sequence[int], chance: float) -> Tensor:
        """Returns True with a probability."""
        return self.call(aten.lt.Scalar, self.bits(size), math.ceil(chance * 2**DIGITS))

    def uniform(self, size: Sequence[int], dtype: torch.dtype, inside: bool = False) -> Tensor:
        """Returns numbers of [0, 1), as fine as the dtype has them near 1; `inside`: of (0, 1), a digit coarser."""
        if dtype not in MANTISSA:
            raise user_error(f"random numbers of {dtype} are drawn", user_stack(), "Draw float32 and convert.")
        digits = MANTISSA[dtype] - inside
        found = self.call(aten.bitwise_right_shift.Tensor_Scalar, self.bits(size), DIGITS - digits)
        found = self.cast(found, dtype)
        found = self.call(aten.add.Scalar, found, 0.5) if inside else found
        return self.call(aten.mul.Scalar, found, 2.0**-digits)

    def normal(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns numbers of mean 0 and variance 1 (Box and Muller 1958)."""
        wide = torch.promote_types(dtype, torch.float32)
        length = self.call(aten.log.default, self.uniform(size, wide, inside=True))
        length = self.call(aten.sqrt.default, self.call(aten.mul.Scalar, length, -2.0))
        angle = self.call(aten.mul.Scalar, self.uniform(size, wide), 2 * math.pi)
        return self.cast(self.call(aten.mul.Tensor, length, self.call(aten.cos.default, angle)), dtype)

    def integers(self, low: int, high: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns integers of [low, high)."""
        if not 0 < high - low <= STREAMS:
            what = f"random integers of [{low}, {high}) are drawn"
            raise user_error(what, user_stack(), "Give a range of 1 to 2**32 integers.")
        found = self.call(aten.remainder.Scalar, self.bits(size), high - low)
        return self.cast(self.call(aten.add.Scalar, found, low), dtype)

    def scaled(self, x: Tensor, factor: Any, offset: Any) -> Tensor:
        """Returns x * factor + offset, each a number or a tensor."""
        times = aten.mul.Tensor if isinstance(factor, Tensor) else aten.mul.Scalar
        plus = aten.add.Tensor if isinstance(offset, Tensor) else aten.add.Scalar
        return self.call(plus, self.call(times, x, factor), offset)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns x in another dtype."""
        return x if x.dtype == dtype else self.call(aten._to_copy.default, x, dtype=dtype)

    def write(self, target: Tensor, values: Tensor) -> Tensor:
        """Puts the values into a tensor that the forward holds."""
        self.call(aten.copy_.default, target, values)
        return target


def native_dropout(draw: Draw, *, input: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    keep = draw.below(input.shape, 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return draw.call(aten.mul.Scalar, draw.call(aten.mul.Tensor, input, keep), scale), keep


def bernoulli(draw: Draw, *, self: Tensor, p: Any = None) -> Tensor:
    p = self if p is None else p
    if not isinstance(p, Tensor):
        return draw.cast(draw.below(self.shape, p), self.dtype)
    return draw.cast(draw.call(aten.lt.Tensor, draw.uniform(self.shape, p.dtype), p), self.dtype)


def exponential(draw: Draw, *, self: Tensor, lambd: float) -> Tensor:
    found = draw.call(aten.log.default, draw.uniform(self.shape, self.dtype, inside=True))
    return draw.call(aten.mul.Scalar, found, -1 / lambd)


def integers(draw: Draw, *, high: int, size: Sequence[int], dtype: Any, low: int = 0) -> Tensor:
    return draw.integers(low, high, size, dtype or torch.int64)


def integers_like(draw: Draw, *, self: Tensor, high: int, dtype: Any, low: int = 0) -> Tensor:
    return draw.integers(low, high, self.shape, dtype or self.dtype)


def normal(draw: Draw, *, mean: Any, std: Any, size: Sequence[int] | None = None, dtype: Any = None) -> Tensor:
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(value.shape for value in given)) if size is None else size
    dtype = dtype or (given[0].dtype if given else torch.get_default_dtype())
    return draw.scaled(draw.normal(shape, dtype), std, mean)


def rrelu(draw: Draw, *, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool) -> Tensor:
    slopes = draw.scaled(draw.uniform(self.shape, self.dtype), upper - lower, lower)
    slopes = draw.call(aten.where.ScalarOther, draw.call(aten.le.Scalar, self, 0), slopes, 1.0)
    draw.write(noise, slopes)
    return draw.call(aten.mul.Tensor, self, slopes)


DRAWS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.default: bernoulli,
    aten.bernoulli.p: bernoulli,
    aten.bernoulli_.Tensor: bernoulli,
    aten.bernoulli_.float: bernoulli,
    aten.exponential_.default: exponential,
    aten.native_dropout.default: native_dropout,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.float_float: normal,
    aten.normal_.default: lambda draw, *, self, mean, std: normal(
        draw, mean=mean, std=std, size=self.shape, dtype=self.dtype
    ),
    aten.rand.default: lambda draw, *, size, dtype: draw.uniform(size, dtype or torch.get_default_dtype()),
    aten.rand_like.default: lambda draw, *, self, dtype: draw.uniform(self.shape, dtype or self.dtype),
    aten.randint.default: integers,
    aten.randint.low: integers,
    aten.randint_like.default: integers_like,
    aten.randint_like.low_dtype: integers_like,
    aten.randn.default: lambda draw, *, size, dtype: draw.normal(size, dtype or torch.get_default_dtype()),
    aten.randn_like.default: lambda draw, *, self, dtype: draw.normal(self.shape, dtype or self.dtype),
    getattr(aten.random_, "from"): lambda draw, *, self, **ends: draw.integers(
        ends["from"], ends["to"], self.shape, self.dtype
    ),
    aten.random_.to: lambda draw, *, self, to: draw.integers(0, to, self.shape, self.dtype),
    aten.rrelu_with_noise.default: rrelu,
    aten.rrelu_with_noise_.default: rrelu,
    aten.uniform_.default: lambda draw, *, self, **ends: draw.scaled(
        draw.uniform(self.shape, self.dtype), ends["to"] - ends["from"], ends["from"]
    ),
}
"""Random op -> what computes its result from a Draw and from its arguments by name (generator, layout and the like
left out)."""
PLACED = ("device", "generator", "layout", "memory_format", "pin_memory")


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether this call draws random numbers; with a probability of 0, or outside training, it draws none."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = named_arguments(func, args, kwargs)
    chance = given.get("dropout_p", given.get("p"))
    never = not isinstance(chance, Tensor) and chance == 0 and "bernoulli" not in str(func)
    return not never and given.get("train") is not False and given.get("training") is not False


def drawn(call: Callable[..., Any], seed: Callable[[], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what a random op gives, by `call`. Raises CaptureError, with the user's line, if it cannot be written
    so."""
    given, write = named_arguments(func, args, kwargs), DRAWS.get(func)
    if write is None or given.get("generator") is not None:
        raise refusal(func, given)
    draw = Draw(call, seed())
    found = write(draw, **{name: value for name, value in given.items() if name not in PLACED})
    where = given.get("device")
    if where is not None and where.type != draw.seed.device.type:
        found = call(aten._to_copy.default, found, device=where)
    return draw.write(args[0], found) if func._schema.name.endswith("_") else found


def refusal(func: Any, given: Mapping[str, Any], stack: str | None = None) -> Exception:
    """Returns the error for a random op that cannot be drawn element by element."""
    what, todo = (
        f"{func} draws random numbers in a way that no rank can follow alone",
        "Pass the result as an argument.",
    )
    if given.get("generator") is not None:
        what, todo = (
            f"{func} draws from a generator of its own",
            "Leave the generator out: the program has its own seed.",
        )
    elif given.get("dropout_p") is not None:
        todo = "Take the plain kernel, with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or a dropout of 0."
    return user_error(what, user_stack() if stack is None else stack, todo)


@contextmanager
def streams() -> Iterator[None]:
    """Lets torch's CPU generator count streams while this lasts. Afterwards it is as it was."""
    with torch.random.fork_rng(devices=[]):
        restart()
        yield


def restart() -> None:
    """Makes the next draw the first of the program."""
    torch.default_generator.manual_seed(FIRST)


def next_stream() -> int:
    """Returns the number of this draw. Raises CaptureError if the forward has seeded torch's generator."""
    number = torch.default_generator.initial_seed() - FIRST
    if not 0 <= number < STREAMS:
        what = "the forward seeds torch's generator, and a program draws from a seed of its own"
        raise user_error(what, user_stack(), "Leave the seeding out: simulate and parallelize take the seed.")
    torch.default_generator.manual_seed(FIRST + number + 1)
    return number
