"""Forged files: content that sbpc wrote, changed here and there with checksums made right, and what becomes of whoever opens it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Interpreter

import sbpc
from sbpc.cli.main import main
from sbpc.errors import CheckpointError, SbpcError
from sbpc.graph.ports import placeholders
from sbpc.plans.plan_bytes import FORMAT, VERSION, number_traces, read
from sbpc.runtime.one_process.simulate import whole_inputs
from sbpc.runtime.state.block_files import bytes_of, header
from sbpc.runtime.state.blocks import blocks_of
from sbpc.runtime.state.checkpoint import Checkpoints, weights_in
from sbpc.runtime.state.checkpoint_record import MARKER, digest
from sbpc.runtime.state.weight_files import RECORD, SEAL, read_weights, weights_of
from tests import models
from tests.processes import forks
from tests.test_checkpoint import TOKENS, Tied

SECONDS, BYTES = 60, 3 << 30  # that one file may take, and a process above what it has after its imports
TEXTS = (
    "", "\x1b[2J", "a\nb", "a\x00", "x" * 5000, "\u202e", "\ud800", "</script><script>", "../..", "class", "__import__('os')", "é", "1", "[B]",
    "S(7)", "[S(0)]", "[P]", "cpu", "nan", "float64",
    "aten._reshape_alias.default", "aten.as_strided.default", "aten.add_.Tensor", "aten.from_file.default", "os.system", "aten.mul.Tensor",
    "aten.native_layer_norm_backward.default", "aten.embedding_dense_backward.default", "_c10d_functional.wait_tensor.default", "getitem",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 7, 1 << 31, 1 << 62, 1 << 80, 0.5, math.nan, math.inf, 1e308, True)
FIRST, LAST = "step-000000001", "step-000000002"
LIBRARY = torch.library.Library("forged", "DEF")
LIBRARY.define("op(Tensor x, Tensor w, bool flag=False) -> Tensor")
LIBRARY.define("other(Tensor x) -> Tensor")
DEEP: Any = json.loads("[" * 300 + "]" * 300)


def forged(body: Any, chance: random.Random) -> Any:
    """A copy of JSON in which one value, or a few, are others."""
    body = json.loads(json.dumps(body))
    texts = sorted(set(texts_in(body)))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.25:
            body = everywhere(body, chance.choice(texts), chance.choice(TEXTS))
            continue
        holder = {"": body}
        container: Any = holder
        while True:  # down to a random place
            key = chance.choice(sorted(container)) if isinstance(container, dict) else chance.randrange(len(container))
            inner = container[key]
            if not isinstance(inner, (dict, list)) or not inner or (container is not holder and chance.random() < 0.15):
                break
            container = inner
        changed = other(inner, texts, chance)
        if isinstance(inner, (str, int)) and not isinstance(changed, (list, dict)) and chance.random() < 0.4:
            holder[""] = everywhere(body, inner, changed)
        else:
            container[key] = changed
        body = holder[""]
    return body


def everywhere(value: Any, old: Any, new: Any) -> Any:
    """JSON with a text or number in the place of an equal one, wherever that stands."""
    if isinstance(value, dict):
        return {
            new if key == old and isinstance(new, str) else key: everywhere(item, old, new)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [everywhere(item, old, new) for item in value]
    return new if type(value) is type(old) and value == old else value


def texts_in(value: Any) -> Iterator[str]:
    """All texts within JSON."""
    if isinstance(value, str):
        yield value
    yield from value if isinstance(value, dict) else ()
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(inner)


def other(value: Any, texts: Sequence[str], chance: random.Random) -> Any:
    """Another value in the place of one: most often of its kind."""
    kind = chance.choice((bool, int, str, list, dict, None)) if chance.random() < 0.1 else type(value)
    if kind is list and isinstance(value, list) and value:
        one, two = chance.randrange(len(value)), chance.randrange(len(value))
        swapped = [*value]
        swapped[one], swapped[two] = value[two], value[one]
        dropped, doubled = value[:one] + value[one + 1 :], [*value, value[one]]
        return chance.choice(
            (
                swapped,
                dropped,
                doubled,
                value[::-1],
                [*value[:one], other(value[one], texts, chance), *value[one + 1 :]],
            )
        )
    if kind is dict and isinstance(value, dict) and value:
        key, second = chance.choice(sorted(value)), chance.choice(sorted(value))
        dropped = {name: item for name, item in value.items() if name != key}
        more = {**value, chance.choice(TEXTS): value[key]}
        return chance.choice(
            (
                dropped,
                more,
                {**value, key: value[second], second: value[key]},
                {**value, key: other(value[key], texts, chance)},
            )
        )
    if kind in (int, float, bool):
        near = [value + 1, value - 1, 2 * value, float(value)] if isinstance(value, (int, float)) else []
        return chance.choice([*NUMBERS, *near])
    if kind is str:
        return chance.choice(TEXTS if chance.random() < 0.5 else texts)
    return chance.choice(([], {}, None, DEEP, 0, ""))


def sealed(body: Any) -> bytes:
    """The file of a plan with a right checksum."""
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return f"{json.dumps(head)}\n{text}\n".encode()


def body_of(file: Path) -> dict[str, Any]:
    """What a plan's file holds, as `sealed` takes it."""
    body = read(file)
    number_traces(body)
    return body


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Bytes of which some are gone, others or twice."""
    at, length = chance.randrange(len(data)), chance.choice((1, 1, 8, 100, len(data)))
    noise = bytes(chance.randrange(256) for _ in range(min(length, 100)))
    return chance.choice(
        (data[:at], data[:at] + noise + data[at + len(noise) :], data[:at] + data[at + length :], data + data[at:])
    )


def others_of(path: Path, count: int, seed: int) -> Iterator[bytes]:
    """Forged copies of a file of sbpc's: every eighth is damaged in its bytes."""
    data = path.read_bytes()
    text = data.partition(b"\n")[2]
    for number in range(count):
        chance = random.Random(f"{path.name} {seed} {number}")
        if number % 8 == 7:
            yield damaged(data, chance)
        elif path.suffix == ".txt":
            words = re.split(r"(\s+|[,;()@])", data.decode())
            words[chance.randrange(len(words))] = chance.choice(TEXTS if number % 2 else words)
            yield "".join(words).encode(errors="replace")
        elif path.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + size])
            if number % 2:
                header = forged(header, chance)
            else:
                about = header["__metadata__"]
                about[RECORD] = json.dumps(forged(json.loads(about[RECORD]), chance))
                about[SEAL] = hashlib.sha256(about[RECORD].encode()).hexdigest()
            found = json.dumps(header).encode()
            yield len(found).to_bytes(8, "little") + found + data[8 + size :]
        elif path.suffix == ".sbpc":
            yield sealed(forged(json.loads(text), chance))
        elif path.name == MARKER:
            record = json.loads(data)
            del record["sha256"]
            record = forged(record, chance)
            yield json.dumps(record | {"sha256": digest(record)} if isinstance(record, dict) else record).encode()
        else:
            yield json.dumps(forged(json.loads(data), chance)).encode()


def other_checkpoints(source: Path, count: int, seed: int) -> Iterator[Path]:
    """Forged copies of a folder of checkpoints: in the last what `state.json` says, what lies beside it, or both."""
    for number, data in enumerate(others_of(source / LAST / MARKER, count, seed)):
        path = source.with_name(f"{source.name}-{seed}-{number}")
        shutil.copytree(source, path)
        if number % 3 != 2:
            (path / LAST / MARKER).write_bytes(data)
        if number % 3:
            misplace(path / LAST, random.Random(f"{source.name} {seed} {number}"))
        yield path


def misplace(folder: Path, chance: random.Random) -> None:
    """Makes a file of a checkpoint another, or that of another rank, step or parameter, takes it away, or adds one."""
    files = sorted(folder.iterdir())
    one, two = chance.sample(files, 2)
    match chance.randrange(11):
        case 0 | 1 | 2:
            one.write_bytes(damaged(one.read_bytes(), chance))
        case 3:
            one.rename(folder / "third")
            two.rename(one)
            (folder / "third").rename(two)
        case 4:  # what another step wrote, below the first line of this one
            older = chance.choice(sorted(folder.with_name(FIRST).glob("*.blocks"))).read_bytes()
            place = chance.choice(sorted(folder.glob("*.blocks")))
            place.write_bytes(header(place.name[:32]) + older.partition(b"\n")[2])
        case 5 | 6:
            one.unlink()
            chance.choice((lambda: None, one.mkdir, lambda: os.mkfifo(one)))()
        case 7:
            one.unlink()
            one.symlink_to(chance.choice((one, two, folder, Path("/dev/zero"), Path("/dev/null"), Path("none"))))
        case 8:
            (folder / chance.choice(("more.blocks", "\x1b[2J", "x" * 200))).write_bytes(b"more")
        case 9:  # a hole, which takes no place on the disk
            os.truncate(one, chance.choice((1 << 12, 1 << 34, 1 << 40)))
        case 10:  # two pieces of a file in each other's place
            place = chance.choice(sorted(folder.glob("*.blocks")))
            data = bytearray(place.read_bytes())
            at, to = (chance.randrange(47, len(data) - 16) // 16 * 16 for _ in "ab")
            data[at : at + 16], data[to : to + 16] = data[to : to + 16], data[at : at + 16]
            place.write_bytes(data)


def outcomes(paths: Sequence[Path], trial: str) -> list[str]:
    """What comes of each file, tried in another process with little memory: `refused`, `loaded`, or what is wrong.

    A process that dies, or is stopped after SECONDS, has died of the file that it was at; another goes on behind it.
    """
    context = forks()
    found: list[str] = []
    while len(found) < len(paths):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(paths[len(found) :], trial, theirs))
        process.start()
        theirs.close()
        with contextlib.suppress(EOFError):
            while True:
                found.append(mine.recv())
        process.join()
        if len(found) < len(paths):
            found.append(f"WRONG: the process ended with {process.exitcode}")
    return found


def work(paths: Sequence[Path], trial: str, pipe: Any) -> None:
    """Tries files one by one and tells what comes of each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.suppress(OSError, ValueError):  # where there is no such file, there is no such limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    for path in paths:
        signal.alarm(SECONDS)
        pipe.send(outcome(path, TRIALS[trial]))


def outcome(path: Path, trial: Callable[[Path], list[str]]) -> str:
    """What comes of one file."""
    try:
        texts = trial(path)
        told = "loaded"
    except SbpcError as error:
        texts, told = chain(error), "refused"
    except BaseException:
        return f"WRONG: {traceback.format_exc()}"
    escaped = [text for text in texts if not text.replace("\n", "").isprintable()]
    return f"WRONG: printed {escaped[0]!r}" if escaped else told


def chain(error: BaseException | None) -> list[str]:
    """The texts of an error and of those that it comes from, all of which a traceback shows."""
    return [] if error is None else [str(error), *chain(error.__cause__)]


def printed(*arguments: Any) -> str:
    """What the command line prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([str(argument) for argument in arguments]) in (0, 2)
    return out.getvalue() + err.getvalue()


def step_of(plan: Any, model: Any, args: Any) -> list[str]:
    """Checks a plan that came from a forged file: it is sound, or says that it is not; its numbers are those of its own graph."""
    try:
        plan.verify()
        found = sbpc.simulate(plan, model, args)
    except SbpcError as error:
        return chain(error)
    if isinstance(plan, sbpc.Plan) and plan.loop is None:
        given = whole_inputs(plan, model, args, None, None, 0)
        with torch.no_grad():
            values = Interpreter(plan.graph).run(*(given[port] for port in placeholders(plan.graph)))
        for port, value in zip(plan.ports.outputs, values):
            if port.kind == "gradient":
                torch.testing.assert_close(found.gradients[port.name], value, equal_nan=True)
            elif port.kind == "output" and isinstance(found.outputs, torch.Tensor):
                torch.testing.assert_close(found.outputs, value, equal_nan=True)
    return []


def model_of(name: str) -> Any:
    """The model of which a file holds the plan, with its arguments."""
    torch.manual_seed(0)
    if name == "tied":
        return Tied(), TOKENS
    if name == "gpt2":
        return models.gpt2(batch=4, seq=4, vocab=12, width=8, heads=2, layers=1)
    return models.vgg() if name == "vgg" else models.mlp(layers=2)


def plan_trial(path: Path) -> list[str]:
    plan = sbpc.load(path)
    return [
        str(plan),
        *step_of(plan, *model_of(path.name.split("-")[0])),
        printed("show", path, "--python"),
        printed("show", path),
    ]


def exported_trial(path: Path) -> list[str]:
    programs, (model, args) = sbpc.load_programs(path), model_of(path.name.split("-")[0])
    shown = printed("show", path, "--python")
    try:
        sbpc.simulate(programs, model, args)
    except SbpcError as error:
        return [shown, *chain(error)]
    return [shown]


def cluster_trial(path: Path) -> list[str]:
    cluster = sbpc.Cluster.load(path)
    return [str(cluster), str(sbpc.Mesh(x=2, cluster=cluster))]


def rules_trial(path: Path) -> list[str]:
    sbpc.load_rules(path)
    return []


def weights_trial(path: Path) -> list[str]:
    for name, tensor in read_weights(path).state_dict().items():
        assert tensor.numel() >= 0, name
    return []


def checkpoint_trial(path: Path) -> list[str]:
    texts, refusals = [printed("convert", path, "-o", path / "weights.safetensors")], []
    for step in (None, 2):  # of a bad one the one before may be loaded, unless it is asked for
        model, _ = model_of("tied")
        optimizer = optimizer_of(model)
        before = {name: block.local.clone() for name, block in blocks_of(model, optimizer).items()}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                check_loaded(path / f"step-{Checkpoints(path).load(model, optimizer, step):09d}", model, optimizer)
            except CheckpointError as error:
                after = {name: block.local for name, block in blocks_of(model, optimizer).items()}
                assert "holds a part of it" in str(error) or same(before, after)
                refusals.append(error)
        texts += [str(each.message) for each in warned]
    try:
        assert same(weights_in(path, 2).tensors, told(path / LAST, "model/"))
    except CheckpointError as error:
        refusals.append(error)
    for error in refusals:
        assert str(path) in str(error) and str(error).count("\n  ") == str(error).count("\n") == 1, error
        raise error
    return texts


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer with which checkpoints are forged."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)


def told(folder: Path, kind: str = "") -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint holds by what its record says, each of whose elements stands in one block, whose CRC-32 is right."""
    record, tensors = json.loads((folder / MARKER).read_text()), {}
    for name, (dtype, shape) in ((name, each) for name, each in record["tensors"].items() if name.startswith(kind)):
        whole, count = torch.zeros(shape, dtype=getattr(torch, dtype)), torch.zeros(shape, dtype=torch.int64)
        for start, size, rank, offset, crc in record["blocks"][name]:
            data = (folder / f"{record['save']}-{rank:05d}.blocks").read_bytes()[offset:][
                : math.prod(size) * whole.element_size()
            ]
            assert zlib.crc32(data) == crc
            place = tuple(slice(a, a + n) for a, n in zip(start, size))
            whole[place] = torch.frombuffer(bytearray(data), dtype=whole.dtype).view(size)
            count[place] += 1
        assert count.eq(1).all(), name
        tensors[name.removeprefix(kind)] = whole
    return tensors


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors have the same names, types, shapes and bytes."""
    pairs = [(one[name], two[name]) for name in one if name in two]
    return len(pairs) == len(one) == len(two) and all(
        a.shape == b.shape and a.dtype == b.dtype and bytes_of(a) == bytes_of(b) for a, b in pairs
    )


def check_loaded(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Checks that a module and its optimizer hold what a checkpoint says, each tensor under one of its names."""
    tensors, tied = told(folder), json.loads((folder / MARKER).read_text())["tied"]
    weights = weights_of(model)
    for name, block in blocks_of(model, optimizer).items():
        first = name.removeprefix("model/")
        names = (
            [first, *(other for other, it in weights.tied.items() if it == first)] if first in weights.tensors else []
        )
        found = {f"model/{tied.get(other, other)}" for other in names} | {name}
        values = [tensors[each] for each in found if each in tensors]
        assert any(same({"": block.local}, {"": value}) for value in values) or (
            not values and first in weights.left_out
        ), name


TRIALS = {
    "weights": weights_trial, "plan": plan_trial, "exported": exported_trial, "cluster": cluster_trial, "rules": rules_trial,
    "checkpoint": checkpoint_trial,
}  # fmt: skip
