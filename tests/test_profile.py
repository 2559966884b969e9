"""sbpc profile: the fit, figures measured on real processes, what the command refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sbpc import Cluster, Mesh
from sbpc.cli.commands import profile as command
from sbpc.cli.main import main
from sbpc.errors import MeshError
from sbpc.mesh.cluster import CLUSTERS, COLLECTIVES
from sbpc.mesh.kernels import Device, Product
from sbpc.runtime.measure import measure_cluster as module
from sbpc.runtime.measure.measure_cluster import Grouping, LinearCost, Message, fit, measure, profile, rates, straight
from sbpc.runtime.measure.measure_device import PARTS, SHAPES, attention_of, attentions, cache_of, products_of
from tests.processes import run_ranks


def test_a_line_is_fitted_exactly_where_there_is_one() -> None:
    points = [(size, 3e-4 + size / 2e7) for size in (4e3, 64e3, 5e5, 4e6)]
    for start, rate in (straight(points), (fit(points).start, fit(points).rate)):
        assert start == pytest.approx(3e-4, rel=1e-9) and rate == pytest.approx(2e7, rel=1e-9)
    assert fit(points).least == 0.0


def test_what_small_messages_take_is_told_from_the_line_of_large_ones() -> None:
    points = [(1e3 * 4**power, max(7e-3, 1e-3 + 1e3 * 4**power / 5e7)) for power in range(8)]
    line = fit(points)
    assert line.least == pytest.approx(7e-3, rel=1e-9)
    assert line.start == pytest.approx(1e-3, rel=1e-6) and line.rate == pytest.approx(5e7, rel=1e-6)


def test_a_line_has_no_negative_start_and_weighs_relative_errors() -> None:
    start, rate = straight([(1e3, 1e-6), (1e6, 2e-3)])
    assert start == 0.0 and 5e8 <= rate <= 1e9
    start, rate = straight([(1e3, 1.1e-3), (1e3, 0.9e-3), (1e6, 1.1), (1e6, 0.9)])
    assert rate == pytest.approx(1e6, rel=0.05)


def test_what_small_messages_take_is_told_of_a_group_size_however_its_lines_were_fitted() -> None:
    groupings = [Grouping(2, stride, "g") for stride in (1, 2)]
    lines = {
        ("all_reduce", groupings[0]): LinearCost(1e-3, 5e7, 7e-3),
        ("all_reduce", groupings[1]): LinearCost(6.8e-3, 5e7, 0.0),
    }
    (rate,) = rates(lines, CLUSTERS["ethernet"])
    assert rate.least == pytest.approx(6.9e-3) and rate.latency == pytest.approx(3.9e-3 / 2)


def test_a_slow_spell_falls_on_one_repeat_and_long_messages_end_a_series(monkeypatch: pytest.MonkeyPatch) -> None:
    grouping = Grouping(2, 1, "g")
    asked: list[int] = []

    def timed_once(message: Message, work: torch.Tensor) -> tuple[float, float]:
        asked.append(message.sent)
        slow = 50.0 if 48 + 16 < len(asked) <= 48 + 32 else 1.0  # in the second of five turns
        return slow * (1e-3 + message.textbook / 5e7), 1.5 * message.textbook

    for name, other in (
        ("timed_once", timed_once),
        ("groupings", lambda world: [grouping]),
        ("from_all_ranks", lambda mine: [mine, mine]),
    ):
        monkeypatch.setattr(module, name, other)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    sizes = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)
    lines = measure(torch.device("cpu"), 5, sizes, lambda text: None)
    assert {collective for collective, _ in lines} == set(COLLECTIVES)
    assert max(asked) == 1 << 23 and len(asked) == 4 * 4 * (3 + 5), "one long message is timed, none that is longer"
    for line in lines.values():
        assert line.start == pytest.approx(1e-3, rel=1e-6) and line.rate == pytest.approx(5e7, rel=1e-6)
        assert line.traffic == pytest.approx(1.5)


def on_one_machine(monkeypatch: pytest.MonkeyPatch, seconds: float, moved: float) -> None:
    """Two ranks, whose messages take so long and move so much, per byte."""
    figures = {
        "timed_once": lambda message, work: (seconds * message.textbook, moved * message.textbook),
        "groupings": lambda world: [Grouping(2, 1, "g")],
        "from_all_ranks": lambda mine: [mine, mine],
    }
    for name, other in figures.items():
        monkeypatch.setattr(module, name, other)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)


def test_a_slow_link_is_measured_by_two_messages_though_both_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_machine(monkeypatch, seconds=1e-6, moved=1.0)
    for line in measure(torch.device("cpu"), 1, (1 << 20, 1 << 23, 1 << 25), lambda text: None).values():
        assert line.rate == pytest.approx(1e6, rel=1e-6)


def test_messages_that_come_to_one_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_machine(monkeypatch, seconds=1e-9, moved=1.0)
    with pytest.raises(MeshError) as error:
        measure(torch.device("cpu"), 1, (1, 2), lambda text: None)
    assert str(error.value) == (
        "all_gather over 2 ranks sends 4 bytes where [1, 2] are asked for\n  Give sizes that are further apart."
    )


def test_what_does_not_leave_through_the_interface_is_as_the_textbook_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for moved, traffic in [(1.5, 1.5), (0.0, 1.0), (1e-5, 1.0)]:
        on_one_machine(monkeypatch, seconds=1e-9, moved=moved)
        lines = measure(torch.device("cpu"), 1, (1 << 12, 1 << 16), lambda text: None)
        assert {line.traffic for line in lines.values()} == {traffic}


def measured(folder: str) -> dict[str, float]:
    """On one rank: profile with few and small messages; what a plan's link makes of it."""
    cluster = profile("here", repeats=2, sent=(1 << 10, 1 << 16), size=64)
    cluster.save(Path(folder, "cluster.json"))
    latency, bandwidth, _ = Mesh(x=4, cluster=cluster).link((0,), "all_reduce")
    return {"latency": latency, "bandwidth": bandwidth, "rates": len(cluster.collectives)}


@pytest.mark.prove
def test_profile_measures_every_collective_for_every_group_size(tmp_path: Path) -> None:
    found = run_ranks(measured, 4, str(tmp_path))
    assert all(isinstance(figures, dict) for figures in found), found
    assert found == [found[0]] * 4, "all ranks have the same cluster"
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert {(rate.collective, rate.ranks, rate.link) for rate in cluster.collectives} == {
        (collective, ranks, "intra") for collective in COLLECTIVES for ranks in (2, 4)
    }
    assert cluster.ranks_per_node == 4 and "inter is not measured" in cluster.source
    assert 1e6 < cluster.peak < 1e15 and 1e6 < cluster.memory_bandwidth < 1e14 and 0 < cluster.launch < 1


def commanded(arguments: list[str]) -> str:
    """On one rank: the command with few and small messages; what it prints."""
    command.profile = functools.partial(profile, sent=(1 << 10, 1 << 16), size=64)  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return printed.getvalue()


def test_the_command_writes_a_file_that_plans_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.json"
    launched: list[Any] = []
    monkeypatch.setattr(command, "launch", lambda *given: launched.append(given))
    assert main(["profile", "--ranks", "2", "--repeats", "1", "--name", "here", "-o", str(path), "--json"]) == 0
    ((start, ranks),) = launched
    assert start[:2] == ["-m", "sbpc"] and ranks == 2
    printed, nothing = run_ranks(commanded, ranks, start[2:])
    assert json.loads(printed) == json.loads(path.read_text()) and nothing == ""
    assert Mesh(data=2, cluster=Cluster.load(path)).cluster.name == "here"


def test_one_device_is_measured_for_the_links_of_a_known_cluster(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, known = tmp_path / "cluster.json", CLUSTERS["h100"]
    assert main(["profile", "--ranks", "1", "--repeats", "1", "--links", "h100", "-o", str(path)]) == 0, (
        capfd.readouterr().err
    )
    cluster = Cluster.load(path)
    for name in (
        "ranks_per_node",
        "intra_latency",
        "intra_bandwidth",
        "inter_latency",
        "inter_bandwidth",
        "collectives",
    ):
        assert getattr(cluster, name) == getattr(known, name), name
    device = cluster.device
    assert device is not None and device.multiprocessors == 1 and cluster.attention == 1.0 != cluster.convolution
    assert cluster.peak != known.peak and device.float32 and device.float64 and device.tf32 is None
    assert device.float64 > 0.5 * device.float32  # twice, but for what else the machine does while it is measured
    assert "1 ranks" in cluster.source and "links as in 'h100'" in cluster.source


def test_times_that_do_not_grow_with_work_give_the_rate_of_the_fastest_product() -> None:
    """As where each is measured once on a machine that does much else besides."""
    measured = {Product(1, *(int(768 * part) for part in each)): 1e-2 / (1 + at) for at, each in enumerate(SHAPES)}
    device = Device(4, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    peak, part, found = products_of(measured, device, 1e15, 4)
    most = max(2 * s.rows * s.columns * s.depth / took for s, took in measured.items())
    assert most <= peak < math.inf and 0 <= part <= 1 and 0 < found.product <= 1


def test_a_device_is_found_again_by_what_its_kernels_take() -> None:
    exact: dict[str, Any] = {"tile": 8, "ramp": 60.0, "diagonal": 300.0, "cache": 1e6, "cached": 3.0}
    device = Device(4, 1.0, 0.9, 2e-8, 3e-6, 1.0, 2e-11, float(PARTS[30]), 5e-11, **exact)
    rates, hidden = (1e11, 2e10, 1e-6), 0.25

    def told(flops: float, moved: float, shape: Any, by: Device = device) -> float:
        return float(by.seconds(flops, moved, shape, rates, hidden))

    shapes = [Product(1, *(int(768 * part) for part in each)) for each in SHAPES]
    works = [
        (s, 2 * s.rows * s.columns * s.depth, 4 * (s.rows + s.columns) * s.depth + 4 * s.rows * s.columns)
        for s in shapes
    ]
    measured = {shape: told(flops, moved, shape) for shape, flops, moved in works}
    peak, part, found = products_of(measured, dataclasses.replace(device, tile=1, product=1.0), rates[1], 4)
    assert part == pytest.approx(hidden) and (found.tile, found.begin, found.wave) == pytest.approx((8, 3e-6, 2e-8))
    assert peak * found.product == pytest.approx(0.9 * rates[0])
    calls = list(attentions(torch.device("cpu"), torch.float32))
    seconds = attention_of([(each, told(each.flops, 0.0, each.shape)) for each in calls], rates[0])
    assert seconds == pytest.approx({name: getattr(device, name) for name in seconds})
    moved = {size: device.moved(size, 2e10) for size in (1e5, 1e6, 1e8, 1e12)}
    assert cache_of(moved, 0.0) == pytest.approx((2e10, 1e6, 3.0), rel=1e-3)


def test_a_convolution_takes_so_many_times_as_long_as_a_product_of_as_many_flops() -> None:
    cluster = dataclasses.replace(CLUSTERS["ideal"], convolution=3.0)
    seconds = {
        op: cluster.kernel_seconds(op, 1e12, 1.0) for op in ("aten.mm", "aten.convolution", "aten.convolution_backward")
    }
    assert seconds == {"aten.mm": 1.0, "aten.convolution": 3.0, "aten.convolution_backward": 3.0}


def test_the_command_refuses_what_it_cannot_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--ranks", "1"]) == 2
    assert "Profile 2 ranks at least, or give --links" in capsys.readouterr().err
    assert main(["profile", "--ranks", "1", "--links", "nowhere"]) == 2
    assert "no cluster is called 'nowhere'" in capsys.readouterr().err
    assert main(["profile", "--repeats", "0"]) == 2
    assert "Measure once at least." in capsys.readouterr().err
    assert main(["profile", "-o", str(tmp_path / "none" / "file.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
