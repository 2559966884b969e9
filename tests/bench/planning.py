"""How fast large models are planned and how good the plans are: `python -m tests.bench.planning [cases] [--json FILE]`.

Every case runs in a process of its own. Seconds are CPU seconds by pass; "outside" is all but capture; memory is the
peak of the process, the libraries included. A case whose repeats are not one chain is followed by a GPT of about as many
nodes on the same mesh, and by how many times as long it takes per node.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CASES: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "gpt 2x2": ("gpt", {}, {"x": 2, "y": 2}),
    "llama 32x8": ("llama", {}, {"x": 32, "y": 8}),
    "llama loss 32x8": ("llama_loss", {}, {"x": 32, "y": 8}),
    "llama loss 16x4x4": ("llama_loss", {}, {"x": 16, "y": 4, "z": 4}),
    "block 4x4x4": ("block", {}, {"x": 4, "y": 4, "z": 4}),
    "llama 16x4x4": ("llama", {}, {"x": 16, "y": 4, "z": 4}),
    "gpt3-12 8x4x4x8": ("gpt3", {"layers": 12}, {"x": 8, "y": 4, "z": 4, "w": 8}),
    "gpt3 8x4x4x8": ("gpt3", {}, {"x": 8, "y": 4, "z": 4, "w": 8}),
    "gpt3 32x8": ("gpt3", {}, {"x": 32, "y": 8}),
    "t5 16x8": ("t5", {}, {"x": 16, "y": 8}),
    "mixtral 8x8": ("mixtral", {}, {"x": 8, "y": 8}),
    "unet 8x8": ("unet", {}, {"x": 8, "y": 8}),
}
UNCHAINED = ("t5 16x8", "mixtral 8x8", "unet 8x8")
LAYER, REST = 79, 43  # nodes of a layer of the GPT, and of what is around them


def measured(
    name: str, certify: float, layers: int = 0, limits: Sequence[float] = (), objective: str = "seconds"
) -> dict[str, Any]:
    """One case in this process; layers: a GPT of so many on its mesh instead; limits: parts of what the plan takes."""
    import sbpc
    from sbpc import Mesh
    from tests.bench import zoo

    model_name, options, axes = CASES[name]
    if layers:
        name, model_name, options = f"  gpt3 {layers} layers", "gpt3", {"layers": layers}
    model, args, kwargs = getattr(zoo, model_name)(**options)
    gc.collect()
    start = time.process_time()
    plan = sbpc.plan(model, args, Mesh(cluster="h100", **axes), kwargs=kwargs, objective=objective)
    cost = plan.cost
    row = {
        "case": name, "nodes": len(plan.graph.graph.nodes), "times": {k: round(v, 3) for k, v in plan.times.items()},
        "total": time.process_time() - start, "seconds": cost.seconds, "lower_bound": cost.lower_bound, "gap": cost.gap,
    }  # fmt: skip
    row["outside"] = row["total"] - plan.times["capture"]
    row["mebibytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if certify:
        start = time.process_time()
        plan.certify(seconds=certify)
        row |= {"certify": time.process_time() - start, "certified gap": plan.cost.gap}
    start = time.process_time()
    local = plan.local
    row["local ms per node"] = (time.process_time() - start) / len(local.graph.nodes) * 1e3
    what = (model, args, Mesh(cluster="h100", **axes))
    row["limits"] = [
        limited(share, cost.memory["total"], what, {"kwargs": kwargs, "objective": objective}) for share in limits
    ]
    return row


def limited(share: float, most: int, what: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The plan that takes at most `share` of `most` bytes; what cannot be met has no seconds."""
    import sbpc

    start = time.process_time()
    try:
        plan = sbpc.plan(*what, **options, memory=share * most)
    except sbpc.errors.MemoryLimitError as error:
        return {"share": share, "refused": str(error).splitlines()[0], "total": time.process_time() - start}
    outside = time.process_time() - start - plan.times["capture"]
    return {"share": share, "seconds": plan.cost.seconds, "gap": plan.cost.gap, "outside": outside}


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    passes = " ".join(f"{name} {seconds:.2f}" for name, seconds in row["times"].items())
    more = f" certified {row['certified gap']:.2%} in {row['certify']:.0f} s" if "certify" in row else ""
    limits = "".join(
        f"\n  under {each['share']:.0%} of its bytes: "
        + (
            f"{each['outside']:.1f} s  plan {each['seconds']:.5g} s  gap {each['gap']:.3%}"
            if "gap" in each
            else each["refused"]
        )
        for each in row["limits"]
    )
    return (
        f"{row['case']:18} {row['nodes']:6} nodes  outside {row['outside']:6.2f} s  {row['mebibytes']:5.0f} MiB  "
        f"plan {row['seconds']:.5g} s  bound {row['lower_bound']:.5g} s  gap {row['gap']:.3%}{more}  "
        f"local {row['local ms per node']:.2f} ms/node  ({passes}){limits}"
    )


def run(name: str, certify: float, layers: int, limits: Sequence[float], objective: str) -> dict[str, Any] | None:
    """One case in a process of its own, its line printed; None if it fails."""
    options = [
        "--here",
        "--objective",
        objective,
        "--certify",
        str(certify),
        "--layers",
        str(layers),
        "--memory",
        *map(str, limits),
    ]
    command = [sys.executable, "-m", "tests.bench.planning", name, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{name:18} failed", flush=True)
        return None
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(line(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join(CASES)}; all without")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--certify", type=float, default=0.0, help="seconds for tightening each bound")
    parser.add_argument("--layers", type=int, default=0, help="a GPT of so many layers on the mesh of the case")
    parser.add_argument(
        "--memory", type=float, nargs="*", default=[], help="also plans under these parts of the plan's bytes"
    )
    parser.add_argument(
        "--objective", default="seconds", help="of sbpc.plan; serial: the layouts alone, no order of collectives"
    )
    parser.add_argument("--here", action="store_true", help="run one case in this process and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.here:
        options = arguments.certify, arguments.layers, arguments.memory, arguments.objective
        print(json.dumps(measured(arguments.cases[0], *options)))
        return
    rows: list[dict[str, Any]] = []
    for name in arguments.cases or CASES:
        row = run(name, arguments.certify, arguments.layers, arguments.memory, arguments.objective)
        rows += [row] if row else []
        if row and name in UNCHAINED and not arguments.layers:
            chain = run(name, arguments.certify, round((row["nodes"] - REST) / LAYER), (), arguments.objective)
            if chain:
                row["times a chain"] = row["outside"] / row["nodes"] / (chain["outside"] / chain["nodes"])
                print(f"{name:18} takes {row['times a chain']:.2f} times as long per node", flush=True)
                rows.append(chain)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
