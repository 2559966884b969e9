"""sbpc: a compiler for distributed PyTorch. A model for one device in, the program of every rank of a mesh out."""

from sbpc.api.loading import load
from sbpc.api.planning import baseline, plan
from sbpc.api.sweep import sweep
from sbpc.errors import SbpcError
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, P, Partial, S
from sbpc.plans.plan import Plan
from sbpc.rules.proof.probe import probe
from sbpc.rules.proof.rule_files import load_rules
from sbpc.rules.proof.user_rules import rule
from sbpc.runtime.exported import load_module, load_programs
from sbpc.runtime.module import parallelize
from sbpc.runtime.one_process.simulate import simulate
from sbpc.runtime.start.process_groups import start, stop
from sbpc.runtime.state.checkpoint import Checkpoints

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
