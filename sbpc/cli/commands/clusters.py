"""Define `sbpc clusters`: list the clusters that plans may be made for, with what their figures are from."""

from __future__ import annotations

import argparse

from sbpc.cli.options import cluster_at
from sbpc.cli.output import print_json
from sbpc.inspect.tables import Table, quantity
from sbpc.mesh.cluster import CLUSTERS, Cluster
from sbpc.mesh.kernels import WIDTHS

NAME = "clusters"
HELP = "list the clusters that --cluster knows, with what their figures are from"
HEADS = ("cluster", "peak", "memory", "its rate", "ranks a node", "a rank sends inside", "a node sends", "collectives")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    text = "clusters to list, by name or file (default: all that have a name)"
    parser.add_argument("clusters", nargs="*", metavar="NAME_OR_FILE", help=text)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc clusters`."""
    found = [cluster_at(name) for name in options.clusters or CLUSTERS]
    if options.json:
        print_json([cluster.figures() for cluster in found])
        return 0
    rows = [(each.name, *figures_of(each), how_they_run(each)) for each in found]
    print(*Table("", HEADS, rows, left=("cluster", "collectives")).lines(), sep="\n")
    for each in found:
        print(f"\n{each.name}", *(types_of(each), *each.source.split(" | ")), sep="\n  ")
    return 0


def figures_of(cluster: Cluster) -> list[str]:
    """Returns the figures of devices and links as texts."""
    rates = [quantity(number, "B/s") for number in (cluster.intra_bandwidth, cluster.inter_bandwidth)]
    device = quantity(cluster.peak, "flop/s"), quantity(cluster.memory, "B"), quantity(cluster.memory_bandwidth, "B/s")
    return [*device, f"{cluster.ranks_per_node:,}", *rates]


def types_of(cluster: Cluster) -> str:
    """Returns in words how long numbers of each type take to multiply."""
    if cluster.device is None:
        return "products of all types of numbers take as long, and kernels by flops and bytes alone"
    known = [f"{kind} x {cluster.device.times(kind):.3g}" for kind in WIDTHS]
    return f"kernels by the shape of their work; products take, for as many flops at the peak, {', '.join(known)}"


def how_they_run(cluster: Cluster) -> str:
    """Returns in words how collectives run."""
    if cluster.collectives:
        return "as measured"
    return ", ".join(dict.fromkeys(way.algorithm for way in cluster.ways)) or "ring"
