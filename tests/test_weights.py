"""Files of weights: what sbpc wrote is read as it was written, or not at all; strangers' files are read as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from sbpc.errors import PlanError
from sbpc.runtime.state.weight_files import (
    RECORD,
    SEAL,
    Weights,
    read_tensors,
    read_weights,
    reader,
    save_tensors,
    save_weights,
    sealed,
)
from tests.test_plan import refused


def tensors() -> dict[str, Tensor]:
    """Two of one shape; views; without elements, without dims; dtypes that numpy has not."""
    torch.manual_seed(0)
    return {
        "one": torch.randn(2, 3),
        "other": torch.randn(2, 3),
        "turned": torch.randn(4, 6).T,
        "every other": torch.randn(8)[::2],
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(7),
        "bfloat16": torch.randn(5).bfloat16(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "bits": torch.tensor([True, False]),
        "asks": torch.randn(2, requires_grad=True),
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    bits = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that sbpc wrote, with a tied name and one that a state_dict leaves out."""
    path = tmp_path / "weights.safetensors"
    save_weights(Weights(tensors(), {"again": "one"}, ("empty",)), path)
    return path


def test_tensors_of_every_kind_are_read_as_they_were_written(file: Path) -> None:
    found, written = read_weights(file), tensors()
    assert found.tensors.keys() == written.keys() and (found.tied, found.left_out) == ({"again": "one"}, ("empty",))
    assert all(same(found.tensors[name], written[name]) for name in written)
    assert all(same(reader(file, written)(name), written[name]) for name in written)
    assert load_file(file).keys() == written.keys()
    state = found.state_dict()
    assert state["again"] is state["one"] and "empty" not in state


def swapped(path: Path) -> None:
    """The names of two tensors of one shape change places in the header: both data and metadata stay as they are."""
    data = path.read_bytes()
    for old, new in ((b'"one":{', b'"\0":{'), (b'"other":{', b'"one":{'), (b'"\0":{', b'"other":{')):
        assert data.count(old) == 1
        data = data.replace(old, new)
    path.write_bytes(data)


def rewritten(change: Callable[[dict[str, Tensor], dict[str, str]], Any]) -> Callable[[Path], None]:
    """Another file with the old metadata, both changed."""

    def rewrite(path: Path) -> None:
        held = {name: tensor.clone() for name, tensor in load_file(path).items()}
        with safe_open(path, framework="pt") as opened:
            about = opened.metadata()
        change(held, about)
        save_file(held, path, about)

    return rewrite


def forged(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Another text with a right digest."""

    def forge(held: dict[str, Tensor], about: dict[str, str]) -> None:
        record = json.loads(about[RECORD])
        about[RECORD] = json.dumps(change(record) or record)
        about[SEAL] = sealed(about[RECORD])

    return rewritten(forge)


SUM = "is not what sbpc wrote there: its sha256 is"
CHANGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("two names swapped", swapped, SUM),
    ("a number changed", rewritten(lambda held, _: held["one"].view(-1)[0].add_(1)), SUM),
    ("another dtype", rewritten(lambda held, _: held.update(number=held["number"].view(torch.float64))), SUM),
    ("another shape", rewritten(lambda held, _: held.update(one=held["one"].reshape(3, 2))), SUM),
    ("another shape of none", rewritten(lambda held, _: held.update(empty=torch.zeros(3, 0))), SUM),
    ("a tensor less", rewritten(lambda held, _: held.pop("one")), "of other tensors: one"),
    ("a tensor more", rewritten(lambda held, _: held.update(more=torch.ones(1))), "of other tensors: more"),
    ("metadata cut", rewritten(lambda _, about: about.update({RECORD: about[RECORD][:-9]})), "is not what sbpc wrote"),
    ("metadata gone", rewritten(lambda _, about: about.pop(RECORD)), "is not what sbpc wrote"),
    ("its digest gone", rewritten(lambda _, about: about.pop(SEAL)), "is not what sbpc wrote"),
    ("no object", forged(lambda _: [1]), "cannot be read"),
    ("no digests", forged(lambda record: record.pop("sha256") and None), "cannot be read"),
    ("digests of no kind", forged(lambda record: record["sha256"].update(one=3)), "what are no texts"),
    ("tied to none", forged(lambda record: record["tied"].update(again="none")), "of other tensors"),
]


def test_changed_files_are_refused(file: Path) -> None:
    written = file.read_bytes()
    for what, change, said in CHANGES:
        file.write_bytes(written)
        change(file)
        assert said in refused(PlanError, lambda: read_tensors(file)), what
        assert said in refused(PlanError, lambda: read_weights(file)), what


def test_message_of_a_changed_tensor_says_which_and_what_to_do(file: Path) -> None:
    swapped(file)
    read = reader(file, tensors())
    message = refused(PlanError, lambda: read("other")).replace(str(file), "FILE")
    assert message == (
        "other in FILE is not what sbpc wrote there: its sha256 is b35179375902b289, not d36c3d01c5f0f435\n"
        "  The file is damaged, or was changed: copy it or write it anew; without the metadata 'sbpc' it is read as it is."
    )
    assert read("number").item() == 7


def test_no_flipped_bit_of_a_file_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    written = Weights({"a": torch.randn(2), "b": torch.randn(2)}, {"c": "b"})
    save_weights(written, path)
    data = path.read_bytes()
    accepted = []
    for at in range(8 * len(data)):
        path.write_bytes(data[: at // 8] + bytes([data[at // 8] ^ (1 << at % 8)]) + data[at // 8 + 1 :])
        try:
            found = read_weights(path)
        except PlanError:
            continue
        accepted.append(data[at // 8 - 12 : at // 8 + 12])
        assert found.tied == written.tied, accepted[-1]
        assert all(same(found.tensors[name], value) for name, value in written.tensors.items()), accepted[-1]
    assert all(b"format" in around or b'"pt"' in around for around in accepted), accepted  # what no reader asks for


class Tied(nn.Module):
    """A head tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


def test_files_of_strangers_are_read_as_they_are(tmp_path: Path) -> None:
    path, written = tmp_path / "theirs.safetensors", {"a": torch.randn(2, 3), "b": torch.tensor(1)}
    for about in (None, {"format": "pt"}, {"sbpc of": "no digests"}):
        save_file(written, path, about)
        assert all(same(found, written[name]) for name, found in read_tensors(path).items())
    model = Tied()
    save_model(model, str(path))
    found = read_weights(path)
    Tied().load_state_dict(found.state_dict())
    assert sorted([*found.tensors, *found.tied]) == ["head.weight", "table.weight"]
    assert torch.equal(reader(path, {"table.weight": model.table.weight})("table.weight"), model.table.weight)


def test_dtype_that_the_format_has_not_is_refused(tmp_path: Path) -> None:
    held = {"wide": torch.ones(2, dtype=torch.complex128)}
    assert "safetensors has no torch.complex128" in refused(
        PlanError, lambda: save_tensors(held, tmp_path / "a.safetensors")
    )
