"""Make the weights of a model that is too large for one device: record its constructor, then replay it tensor by
tensor.

First the constructor runs on fake tensors, and every op is recorded. Then its random ops alone run in their order,
and the state of the generator before each of them is recorded. Then each tensor is computed from the ops that it
depends on, where random ops start from their recorded state: the numbers are those that one device would draw.
The idea of a recorded constructor is torchdistX's (`deferred_init`, 2022).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sbpc._compat import FakeTensor, FakeTensorMode, TorchDispatchMode, schema_of, storage_of, tree_leaves, tree_map
from sbpc.errors import PlanError
from sbpc.runtime.start import process_groups
from sbpc.runtime.state.dtensors import of_rank_zero

aten = torch.ops.aten
DRAWS = {
    *(aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.bernoulli_.float),
    *(
        aten.random_.default,
        aten.random_.to,
        getattr(aten.random_, "from"),
        aten.cauchy_.default,
        aten.log_normal_.default,
    ),
    *(aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.randperm.default),
}
"""Random ops whose draws depend only on the sizes of their arguments."""


@dataclass(frozen=True)
class Slot:
    """The number of a recorded tensor, which stands for it in arguments."""

    number: int


@dataclass
class RecordedOp:
    """One call of an op, with slots in the place of tensors.

    results: the numbers of the results. makes, reads: the storages that it makes or writes, and that it reads.
    drawn: shape, strides and dtype of what a random op draws. state: the state of the generator before it.
    """

    op: Any
    args: Any
    kwargs: Any
    results: list[int]
    makes: set[int]
    reads: set[int]
    drawn: tuple[Any, Any, torch.dtype] | None = None
    state: Tensor | None = None


class Recorder(TorchDispatchMode):
    """Records every op on fake tensors. It keeps all tensors and storages alive, so that no id is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedOp] = []
        self.numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.storages: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and func not in DRAWS:
            raise PlanError(
                f"the constructor calls {func}, whose random draws depend on values\n"
                "  Initialise with normal_, uniform_ and the like, or give a model that has its weights."
            )
        reads = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)}
        slots: tuple[Any, Any] = tree_map(self.slot, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made and not reads and any(argument.name == "dtype" for argument in schema_of(func).arguments):
            slots[1]["dtype"] = made[0].dtype  # which may be the default, and another one when it is replayed
        written = [
            storage_of(value)
            for argument, value in zip(schema_of(func).arguments, args)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        call = RecordedOp(func, *slots, [self.number(leaf) for leaf in made], {*map(storage_of, made), *written}, reads)
        if func in DRAWS:
            call.drawn = made[0].shape, made[0].stride(), made[0].dtype
        self.calls.append(call)
        return result

    def slot(self, value: Any) -> Any:
        """Returns the slot of a fake tensor. Any other value is a constant of the constructor."""
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in self.numbers:
            raise PlanError(
                "the constructor uses a tensor that no op has made\n  Give a model that has its weights, without init=."
            )
        return Slot(self.numbers[id(value)])

    def number(self, value: Tensor) -> int:
        """Returns the number of a result, a new one if it has none."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.storages.append(value.untyped_storage())
        return self.numbers[id(value)]


class Recording:
    """The ops of a constructor, and the model of fake tensors that it made. `tensor` computes the real ones."""

    def __init__(self, init: Callable[[], nn.Module]) -> None:
        state = torch.get_rng_state()
        recorder = Recorder()
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), recorder:
                self.model = init()
        except (NotImplementedError, RuntimeError) as error:
            raise PlanError(
                f"init= cannot be recorded: {type(error).__name__}: {error}\n"
                "  It may not look at values; give a model that has its weights, without init=."
            ) from error
        if not torch.equal(state, torch.get_rng_state()):
            raise PlanError("init= seeds torch or draws outside of torch's ops\n  Seed before parallelize.")
        if not isinstance(self.model, nn.Module):
            raise PlanError(f"init= returns {self.model!r:.80}\n  Return the module, as in init=Model.")
        self.recorder, self.calls = recorder, recorder.calls
        self.named: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        self.named |= dict(self.model.named_buffers(remove_duplicate=False))
        for name, value in self.named.items():
            if not isinstance(value, FakeTensor) or value.is_meta:
                raise PlanError(
                    f"init= leaves {name!r} without values\n  Build the model as on one device, not on meta."
                )
        for call in self.calls:
            if call.drawn is not None:
                draw(call)

    def digest(self) -> str:
        """Returns the SHA-256 of the recorded ops."""
        text = [f"{call.op} {call.args} {call.kwargs} {call.drawn}" for call in self.calls]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def tensor(self, name: str) -> Tensor:
        """Returns a parameter or buffer, computed by the ops that it depends on and no others."""
        fake = self.named[name]
        needed, chosen = {storage_of(fake)}, []
        for call in reversed(self.calls):
            if not needed.isdisjoint(call.makes):
                needed |= call.reads
                chosen.append(call)
        values: dict[int, Tensor] = {}
        ended = torch.get_rng_state()
        with torch.no_grad():
            for call in reversed(chosen):
                if call.state is not None:
                    torch.set_rng_state(call.state)
                args, kwargs = tree_map(lambda leaf: real(leaf, values), (call.args, call.kwargs))
                made = tree_leaves(call.op(*args, **kwargs))
                values.update(zip(call.results, (leaf for leaf in made if isinstance(leaf, Tensor))))
        torch.set_rng_state(ended)
        recorded = self.recorder.tensors
        base = next(value for number, value in values.items() if storage_of(recorded[number]) == storage_of(fake))
        return base.as_strided(fake.shape, fake.stride(), fake.storage_offset())


def real(leaf: Any, values: dict[int, Tensor]) -> Any:
    """Returns the value in a slot. A constant tensor is copied, as a later op may write it."""
    if isinstance(leaf, Slot):
        return values[leaf.number]
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def draw(call: RecordedOp) -> None:
    """Records the generator's state before a random op, and draws what the op draws."""
    if call.kwargs.get("generator") is not None:
        raise PlanError("init= draws from a generator of its own\n  Draw from torch's, and seed it before parallelize.")
    assert call.drawn is not None
    call.state = torch.get_rng_state()
    shape, stride, dtype = call.drawn
    scratch = torch.empty_strided(shape, stride, dtype=dtype)
    args = [scratch if isinstance(arg, Slot) else arg for arg in call.args]
    call.op(*args, **call.kwargs)


def check_agreement(recording: Recording) -> None:
    """Raises PlanError on all ranks unless all have recorded the same ops."""
    digests = process_groups.from_all_ranks(recording.digest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PlanError(f"init= builds another model on the ranks {others} than on rank 0\n  Build the same on all.")


def same_start() -> None:
    """Gives every rank the state of rank 0's generator."""
    torch.set_rng_state(of_rank_zero(torch.get_rng_state(), torch.device("cpu")))
