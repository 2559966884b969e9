"""sbpc: a compiler for distributed PyTorch. A model for one device in, the program of every rank of a mesh out."""

from sbpc.api import baseline, load, plan
from sbpc.cluster import Cluster
from sbpc.errors import SbpcError
from sbpc.exported import load_module, load_programs
from sbpc.layout import Layout
from sbpc.mesh import Mesh
from sbpc.plan import Plan
from sbpc.rules.own import rule
from sbpc.rules.probe import probe
from sbpc.rules.reviewed import load_rules
from sbpc.runtime.checkpoint import Checkpoints
from sbpc.runtime.groups import start, stop
from sbpc.runtime.module import parallelize
from sbpc.runtime.simulate import simulate
from sbpc.states import B, P, Partial, S
from sbpc.sweep import sweep

__all__ = [
    "B",
    "Checkpoints",
    "Cluster",
    "Layout",
    "Mesh",
    "P",
    "Partial",
    "Plan",
    "S",
    "SbpcError",
    "baseline",
    "load",
    "load_module",
    "load_programs",
    "load_rules",
    "parallelize",
    "plan",
    "probe",
    "rule",
    "simulate",
    "start",
    "stop",
    "sweep",
]
