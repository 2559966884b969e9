"""Real processes: training through `sbpc run`, and ranks that die."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

import sbpc
from sbpc.cli.main import main
from sbpc.cli.target import load_target
from sbpc.cli.train_loop import loss_of, optimizer_of, train
from sbpc.runtime.start.launch import RankError, launch
from tests.faults import processes
from tests.processes import forks

MLP = f"{Path(__file__).with_name('models.py')}:mlp"


MEET = """
import torch.distributed as dist
from sbpc.runtime.start.launch import as_rank
with as_rank():
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()
    time.sleep(600)
"""


def script(folder: Path, body: str) -> list[str]:
    """The arguments of a rank that notes its process number and then runs `body`."""
    path = folder / "rank.py"
    note = f"Path({str(folder)!r}, f'pid{{rank}}').write_text(str(os.getpid()))\n"
    path.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n" + note + body
    )
    return [str(path)]


def gone(folder: Path, ranks: int) -> bool:
    """Whether no rank of a script is left."""
    for rank in range(ranks):
        try:
            os.kill(int((folder / f"pid{rank}").read_text()), 0)
        except ProcessLookupError:
            continue
        return False
    return True


def test_two_gloo_ranks_started_by_sbpc_run_train_as_one_process_does(capfd):
    options = ["--mesh", "data=2", "--steps", "3", "--lr", "0.01", "--dtype", "float64", "--json"]
    assert main(["run", MLP, *options]) == 0
    target = load_target(MLP, "float64")
    batches = [(target.args, target.kwargs)] * 3
    expected = train(target.model, batches, optimizer_of("adamw", target.model, 0.01))
    assert json.loads(capfd.readouterr().out)["losses"] == pytest.approx(expected, rel=1e-12)
    assert expected[2] < expected[0]


def test_sbpc_run_tells_the_measured_speed_beside_the_predicted_one(capfd):
    assert main(["run", MLP, "--mesh", "data=2", "--cluster", "ethernet", "--steps", "3"]) == 0
    measured, predicted = capfd.readouterr().out.splitlines()[-2:]
    for line, name in ((measured, "measured"), (predicted, "predicted")):
        assert re.fullmatch(
            rf"{name} +[\d.e-]+ s a step.*: [\d.]+ % of the peak \(MFU\), [\d,.]+ samples/s a device", line
        )


def test_the_message_of_the_rank_that_failed_first_is_shown(tmp_path):
    with pytest.raises(RankError, match="rank one is unwell") as error:
        launch(script(tmp_path, MEET), 2)
    assert error.value.rank == 1 and gone(tmp_path, 2)


def test_a_rank_that_ignores_being_told_to_end_is_killed_with_what_it_started(tmp_path):
    mark = tmp_path / "grandchild"
    body = f"""
mark = Path({str(mark)!r})
if rank == 0:
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {{mark}}"])
    mark.touch()
    time.sleep(600)
while not mark.exists():
    time.sleep(0.05)
os._exit(3)
"""
    with pytest.raises(RankError, match="rank 1 ended with exit code 3"):
        launch(script(tmp_path, body), 2)
    assert gone(tmp_path, 2) and not processes(str(mark))


def launcher(rank):
    """A process that launches ranks, forked where all is imported."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    launch(rank, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(tmp_path, number):
    sleep = "Path(__file__).with_name(f'asleep{rank}').touch(); time.sleep(600)\n"
    follow = "from sbpc.runtime.start.launch import as_rank\nwith as_rank(): " + sleep
    rank = script(tmp_path, follow if number == signal.SIGKILL else sleep)
    process = forks().Process(target=launcher, args=(rank,))
    process.start()
    deadline = time.monotonic() + 100
    while not all((tmp_path / f"asleep{at}").exists() for at in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode
    while not gone(tmp_path, 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(tmp_path, 2)


def test_a_loss_is_found_in_whatever_a_model_returns():
    import torch

    loss = torch.ones((), requires_grad=True) * 2
    logits = torch.ones(3, requires_grad=True) * 1
    for result in (loss, loss.reshape(1), (loss, logits), [loss], {"logits": logits, "loss": loss}, (logits, loss)):
        assert loss_of(result).item() == 2.0
    assert loss_of([logits, {"a": loss}], 1).item() == 2.0
    for result in (logits, (logits, loss, logits.sum())):
        with pytest.raises(sbpc.SbpcError, match="returns no loss"):
            loss_of(result)
