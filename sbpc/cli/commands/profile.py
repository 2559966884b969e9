"""Define `sbpc profile`: measure the machine and write the cluster file that `--cluster` takes."""

from __future__ import annotations

import argparse
import os

import torch
from rich.console import Console

from sbpc.cli.commands.clusters import types_of
from sbpc.cli.options import add_file, cluster_at, positive
from sbpc.cli.output import check_file, print_json, write
from sbpc.errors import SbpcError
from sbpc.inspect.tables import Table, quantity
from sbpc.mesh.cluster import Cluster
from sbpc.runtime.measure.measure_cluster import profile
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.launch import as_rank, launch

NAME = "profile"
HELP = "measure this machine, under torchrun as its rank, and write a file for --cluster"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_file(parser, "-o", "--output", help="write the figures to this file (*.json)")
    parser.add_argument("--name", default="measured", help="what plans call the cluster (default: measured)")
    parser.add_argument("--ranks", type=positive, metavar="N", help="ranks to start here (default: one per GPU, or 2)")
    links = "take all figures of links from this cluster, and measure devices alone, for which one rank is enough"
    add_file(parser, "--links", metavar="NAME_OR_FILE", help=links)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="of each measurement (default: 7)")


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc profile`: as a rank where a launcher has set RANK, else as the launcher."""
    check_file(options.output)
    if options.repeats < 1:
        raise SbpcError(f"--repeats {options.repeats}\n  Measure once at least.")
    if "RANK" in os.environ:
        if options.ranks is not None:
            raise SbpcError(
                f"--ranks {options.ranks} under a launcher\n  Remove it: the launcher has started the ranks."
            )
        with as_rank():
            return run_rank(options)
    least = 1 if options.links else 2
    ranks = options.ranks or max(least, torch.cuda.device_count())
    if ranks < least:
        raise SbpcError(
            f"--ranks {ranks}\n  Profile 2 ranks at least, or give --links a cluster whose links are known."
        )
    if options.links:
        cluster_at(options.links)
    arguments = ["-m", "sbpc", "profile", "--name", options.name, "--repeats", str(options.repeats)]
    arguments += [
        text for name in ("output", "links") if getattr(options, name) for text in (f"--{name}", getattr(options, name))
    ]
    launch(arguments + ["--json"] * options.json + ["--verbose"] * options.verbose, ranks)
    return 0


def run_rank(options: argparse.Namespace) -> int:
    """Measures as one rank of those that torchrun or `launch` has started. Rank 0 prints and writes."""
    first = os.environ["RANK"] == "0"
    console = Console(stderr=True)

    def tell(text: str) -> None:
        if first and not options.json:
            console.print(f"measuring {text}", highlight=False)

    links = cluster_at(options.links) if options.links else None
    cluster = profile(options.name, options.repeats, tell=tell, links=links)
    process_groups.stop()
    if not first:
        return 0
    if options.output:
        write(options.output, cluster.save)
    if options.json:
        print_json(cluster.figures())
        return 0
    print_cluster(cluster, Console())
    if options.output:
        print(f"written   {options.output}: give it to --cluster, or to Cluster.load")
    return 0


def print_cluster(cluster: Cluster, console: Console) -> None:
    """Prints the figures of a cluster."""
    lines = [
        f"cluster   {cluster.name!r}: {cluster.source}",
        f"device    {quantity(cluster.peak, 'flop/s')}, {quantity(cluster.memory_bandwidth, 'B/s')} of memory, "
        f"{1e6 * cluster.launch:.3g} us a kernel at least, {quantity(cluster.memory, 'B')}; "
        f"the longest of the three hides {cluster.hidden:.0%} of the others",
        f"intra     {1e6 * cluster.intra_latency:.3g} us a round, {quantity(cluster.intra_bandwidth, 'B/s')} a rank",
        f"inter     {1e6 * cluster.inter_latency:.3g} us a round, {quantity(cluster.inter_bandwidth, 'B/s')} a node",
    ]
    lines += [
        f"kernels   {types_of(cluster).removeprefix('kernels ')}; "
        f"a convolution takes {cluster.convolution:.3g} x as long as a product of as "
        f"many flops; to start a collective costs a rank {1e6 * cluster.start:.3g} us",
        f"together  a rank computes {cluster.sharing:.3g} x as fast while no other one does; beside a collective "
        "kernels take "
        f"{cluster.kernels_beside:.3g} x as long, and it takes {cluster.links_beside:.3g} x as long beside kernels",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    titles = ("collective", "link", "ranks", "us a round", "efficiency", "bytes on the wire", "us at least")
    rows = []
    for rate in cluster.collectives:
        latency = "" if rate.latency is None else f"{1e6 * rate.latency:.3g}"
        figures = f"{rate.efficiency:.3f}", f"x {rate.traffic:.3f}", f"{1e6 * rate.least:.3g}"
        rows.append((rate.collective, rate.link or "", str(rate.ranks), latency, *figures))
    for line in Table("", titles, rows, left=("collective", "link")).lines():
        console.print(line, highlight=False, soft_wrap=True)
