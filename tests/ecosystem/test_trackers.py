"""Trackers with a server of their own: one run is logged, not one by every rank."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Run, wait_for

TRAIN = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(40, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(log, wait=0.0):
    for epoch in range(3):
        for (rows,) in DataLoader(TensorDataset(x), 8):
            loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss.item())
            time.sleep(wait)
"""
OF_MLFLOW = TRAIN + """
import mlflow
if "MLFLOW_TRACKING_URI" not in os.environ:
    mlflow.set_tracking_uri(os.environ["SERVER"])
mlflow.set_experiment("small")
with mlflow.start_run():
    mlflow.log_param("rows", len(x))
    train(lambda loss: mlflow.log_metric("loss", loss), float(os.environ.get("WAIT", 0)))
print("done")
"""
OF_WANDB = TRAIN + """
import wandb
run = wandb.init(project="small", config={"rows": len(x)})
train(lambda loss: run.log({"loss": loss}))
run.finish()
"""
OF_COMET = TRAIN + """
os.environ["COMET_API_KEY"] = f"{os.getpid():025}"  # with every question
print(os.environ["COMET_API_KEY"])
import comet_ml
begin = {"start": comet_ml.start, "start, online": lambda: comet_ml.start(online=True),
         "Experiment": comet_ml.Experiment,
         "ExistingExperiment": lambda: comet_ml.ExistingExperiment(experiment_key="0" * 32)}[os.environ["BEGIN"]]
experiment = begin()
train(lambda loss: experiment.log_metric("loss", loss))
experiment.end()
print("done")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real one, on this machine."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("mlflow")), "server", "--host", "127.0.0.1", "--port", str(port),
               "--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True,
                                   env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    uri = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=1) as got:
            return got.status == 200
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.3)
        return False

    wait_for(answers, "the server answers", 90)
    yield uri
    os.killpg(process.pid, 15)
    process.wait()


def asked(server: str, what: str, **body: object) -> dict:
    request = urllib.request.Request(f"{server}/api/2.0/mlflow/{what}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as got:
        return json.load(got)


def logged(server: str) -> list[dict]:
    """The runs that the server knows, newest first."""
    experiments = [one["experiment_id"] for one in asked(server, "experiments/search", max_results=9)["experiments"]]
    return asked(server, "runs/search", experiment_ids=experiments).get("runs", [])


@pytest.mark.parametrize("by", ["SERVER", "MLFLOW_TRACKING_URI"])
def test_mlflow_logs_one_run(by: str, server: str, tmp_path: Path) -> None:
    before = len(logged(server))
    (tmp_path / "script.py").write_text(OF_MLFLOW)
    run = Run(tmp_path, "--quiet", "-n", 2, "script.py", **{by: server})
    assert run.code == 0 and run.lines[-1:] == ["done"], run
    runs = logged(server)
    assert len(runs) == before + 1 and runs[0]["info"]["status"] == "FINISHED"
    history = urllib.request.urlopen(f"{server}/api/2.0/mlflow/metrics/get-history?metric_key=loss&run_id="
                                     + runs[0]["info"]["run_id"])
    assert len(json.load(history)["metrics"]) == 15
    assert not list(tmp_path.glob("mlflow.db"))  # what the other rank kept is not left behind


def test_mlflow_goes_on_on_disk_when_the_voice_dies(server: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OF_MLFLOW)
    run = Run(tmp_path, "--quiet", "-n", 2, "script.py", SERVER=server, WAIT="0.3")
    run.wait_for_step(4)
    run.kill(0)
    assert run.code == 0 and run.lines[-1:] == ["done"], run
    assert ("the rank that logged to a tracker's server has died; from now on mlflow keeps its run on disk "
            "(sqlite:///mlflow.db)") in run.err
    assert (tmp_path / "mlflow.db").exists()


def test_wandb_keeps_one_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OF_WANDB)
    run = Run(tmp_path, "--quiet", "-n", 2, "script.py", WANDB_MODE="offline", WANDB_SILENT="true")
    assert run.code == 0, run
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1


@pytest.mark.parametrize("begin", ["start", "start, online", "Experiment", "ExistingExperiment"])
def test_comet_is_spoken_to_by_the_first_rank_only(begin: str, tmp_path: Path) -> None:
    """A server that says no to all: the script goes on."""
    asked: set[str] = set()

    class No(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
            asked.update(re.findall(r"(?<!\d)0{10}\d{15}(?!\d)", f"{self.path} {self.headers} {body}"))
            self.send_error(400)

        do_GET = do_PUT = do_POST

        def log_message(self, *words: object) -> None:
            pass

    (tmp_path / "script.py").write_text(OF_COMET)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), No) as refuses:
        threading.Thread(target=refuses.serve_forever, daemon=True).start()
        run = Run(tmp_path, "--quiet", "-n", 2, "script.py", BEGIN=begin, HOME=str(tmp_path),
                  COMET_URL_OVERRIDE=f"http://127.0.0.1:{refuses.server_port}/clientlib/")
        assert run.code == 0 and run.lines[-1:] == ["done"], run
        refuses.shutdown()
    assert asked == {run.lines[0]}


@pytest.mark.parametrize(("asked_for", "rank", "kept"), [
    ("", 0, ""), ("online", 0, "online"), ("", 1, "disabled"), ("online", 1, "disabled"), ("offline", 0, "offline")])
def test_other_ranks_than_the_first_do_not_send(asked_for: str, rank: int, kept: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nprint(os.environ.get('WANDB_MODE', ''))\n")
    run = Run(tmp_path, "--quiet", "-n", 2, "script.py", WANDB_MODE=asked_for)
    assert run.code == 0, run
    assert (run.folder / f"rank-{rank}.log").read_text() == f"{kept}\n"
