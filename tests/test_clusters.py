"""The files of examples/clusters start the jobs that they promise, on two nodes that are both this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"
CLUSTERS = EXAMPLES / "clusters"
BOTH_NODES = """for node in 0 1; do "$@" & done; wait -n; wait -n"""


def environment(folder: Path, **programs: str) -> dict[str, str]:
    """One in whose PATH torchrun is that of this Python, and the other programs are scripts of one line."""
    programs["torchrun"] = f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"'
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/bash\nset -e\n{line}\n")
        (folder / name).chmod(0o700)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def trained(folder: Path, env: dict[str, str], *command: str, **options: Any) -> None:
    """Runs a job of two nodes, a rank each, and looks whether rank 0 printed two steps and both ranks saved them."""
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step +(\d+)  loss", done.stdout) == ["1", "2"], done.stdout
    assert len(list(folder.glob("step-*2/*.blocks"))) == 2


def test_the_script_of_slurm_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    env = environment(tmp_path, srun=BOTH_NODES, scontrol="echo localhost; echo other")
    env |= {"SLURM_JOB_NODELIST": "two", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "1"}
    env |= {"SLURM_SUBMIT_DIR": str(EXAMPLES.parent), "PORT": str(free_port())}
    saved = tmp_path / "saved"
    trained(saved, env, "bash", str(CLUSTERS / "slurm.sh"), "--steps", "2", "--checkpoint", str(saved))


@pytest.mark.prove
def test_the_command_of_kubernetes_finds_the_job_in_its_environment(tmp_path: Path) -> None:
    """The operator sets PET_*, by which torchrun takes its flags."""
    job = yaml.safe_load((CLUSTERS / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["name"] == "pytorch" and worker["replicas"] == 2  # the operator looks for that name
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    env = environment(tmp_path, both=BOTH_NODES)
    env |= {"PET_NNODES": str(worker["replicas"]), "PET_NPROC_PER_NODE": "1", "PET_RDZV_BACKEND": policy["rdzvBackend"]}
    env |= {"PET_MAX_RESTARTS": str(policy["maxRestarts"]), "PET_RDZV_ENDPOINT": f"localhost:{free_port()}"}
    saved = tmp_path / "saved"
    command = [{"1000": "2", "/checkpoints/gpt": str(saved)}.get(word, word) for word in container["command"]]
    trained(saved, env, "both", *command, cwd=EXAMPLES.parent)
