"""Plans that were made before, in a folder: the same step, mesh and options are planned once.

A plan's file is named by a digest of all that planning depends on: the captured graph with its lines of the source,
the mesh with its cluster, the options, the user's rules, the precision of float32 products, the code of sbpc, and the
versions of torch and HiGHS. What is read is checked as any plan's file is, and what sbpc makes of it when that is first
used. Guards are those of the capture at hand.

SBPC_CACHE names the folder; 0 is none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch

from sbpc.api.loading import plan_in
from sbpc.api.task import Captured
from sbpc.errors import PlanError
from sbpc.graph.no_gc import uncollected
from sbpc.mesh.mesh import Mesh
from sbpc.plans import plan_bytes, plan_file
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.rules.registry import TABLE

VARIABLE, NO_CACHE = "SBPC_CACHE", "0"
MOST_BYTES = 1 << 30  # of the folder; what was read or written longest ago goes first
log = logging.getLogger("sbpc")


@uncollected()
def remembered(step: Captured, mesh: Mesh, asked: Options) -> Plan:
    """Returns the plan of a step: from the folder, or made and put there. A dump shows the passes, so it runs them."""
    folder = None if step.stages.dump is not None else cache_folder()
    name = None if folder is None else digest(step, mesh, asked)
    if folder is None or name is None:
        return step.task.planned(mesh, asked)
    file = folder / f"{name}.sbpc"
    found = recalled(file, step, mesh, asked)
    if found is None:
        found = step.task.planned(mesh, asked)
        keep(found, file)
    return found


def cache_folder() -> Path | None:
    """Returns the folder, None where there is to be none."""
    named = os.environ.get(VARIABLE)
    if named == NO_CACHE:
        return None
    home = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # a user without a home
        if named:
            return Path(named).expanduser()
        return (Path(home) if home else Path.home() / ".cache") / "sbpc"
    return None


def digest(step: Captured, mesh: Mesh, asked: Options) -> str | None:
    """Returns the name of a plan; None if the step, or a rule of the user's, cannot be written down."""
    rules = {str(op): (entry.text, entry.flops, entry.view) for op, entry in TABLE.items() if entry.source}
    about = {key: value for key, value in step.about.items() if key != "guards"}
    try:
        options = plan_file.encode_options(asked)
        graph = plan_file.encode_graph(step.gm) | {"ports": asdict(step.gm.meta["ports"])}
        plan_bytes.number_traces(graph)
        where = list(zip(mesh.axes, mesh.sizes)), mesh.cluster.figures()
        # which rates of kernels follow
        precision = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        text = json.dumps([graph, where, options, about, rules, precision, code()], sort_keys=True)
    except (PlanError, TypeError, ValueError) as error:
        log.info("the plan is not looked for in the cache: %s", error)
        return None
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def code() -> str:
    """Returns a digest of the code of sbpc, and of what it plans with."""
    found = hashlib.sha256(f"{torch.__version__} {version('highspy')}".encode())
    root = Path(__file__).parents[1]
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith((".py", ".json", ".c")):
                found.update(f"{Path(folder, name).relative_to(root)}\n".encode() + Path(folder, name).read_bytes())
    return found.hexdigest()


def recalled(file: Path, step: Captured, mesh: Mesh, asked: Options) -> Plan | None:
    """Returns the plan in a file, None if there is none, or one that is damaged."""
    start = time.process_time()
    try:
        if not file.exists():
            return None
        decoder = plan_file.decode(file)
        with decoder.reading():
            plan = plan_in(decoder, known=True)
        os.utime(file)
    except (PlanError, OSError) as error:
        log.info("the plan in the cache is made anew: %s", error)
        return None

    options = replace(plan.options, guards=step.about["guards"])
    times = {**step.stages.times, "cache": time.process_time() - start}
    found = replace(plan, options=options, times=times)
    found.cached, found.anew = file, lambda: step.task.planned(mesh, asked)
    found.again = lambda **other: found.origin.again(**other)
    return found


def keep(plan: Plan, file: Path) -> None:
    """Writes a plan to a file of the folder, and takes away the oldest ones where there is no room. No plan is worse
    for a folder that cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        plan_bytes.write(plan_file.encode(plan), file, checked=False)
        known = sorted(file.parent.glob("*.sbpc"), key=lambda each: (each.stat().st_mtime_ns, each.name))
        room = sum(each.stat().st_size for each in known) - MOST_BYTES
        for each in known:
            if room <= 0:
                break
            room -= each.stat().st_size
            each.unlink()
    except (PlanError, OSError) as error:  # another process may have taken a file away
        log.info("the plan is not put into the cache: %s", error)
