"""Experiment trackers that talk to a server log one run, the first rank's: on other ranks they keep theirs on disk.

Each has a switch of its own for that, which is set before it is imported. What it then writes goes to the rank's
overlay, so it is there if the rank becomes the voice. wandb writes by a program in Go, which the overlay does not
reach; it is off on these ranks. Comet's switch is for ``comet_ml.start`` alone; its classes that always send are off.
Trackers that only write files (Aim, TensorBoard, MLflow without a server) need none of this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

# module: its variable, the value that keeps a run on disk, and how such a run is uploaded later
OFFLINE = {
    "wandb": ("WANDB_MODE", "disabled", ""),
    "neptune": ("NEPTUNE_MODE", "offline", "neptune sync"),
    "neptune_scale": ("NEPTUNE_MODE", "offline", "neptune sync"),
    "clearml": ("CLEARML_OFFLINE_MODE", "1", "clearml-task --import-offline-session"),
    "comet_ml": ("COMET_START_ONLINE", "0", "comet upload; one that Experiment() began is off"),
    "swanlab": ("SWANLAB_MODE", "offline", "swanlab sync"),
}
_OFF = ("disabled", "debug")  # what a user may have asked for
MLFLOW_URI = "MLFLOW_TRACKING_URI"
_LOCAL = "sqlite:///mlflow.db"  # MLflow's own default
_not_sent: list[str] = []  # MLflow's servers that this rank did not send to


def keep_local() -> None:
    """This is not the first rank: set the switches of all of them."""
    for variable, value, _ in OFFLINE.values():
        if os.environ.get(variable) not in _OFF:
            os.environ[variable] = value
    if MLFLOW_URI in os.environ:
        os.environ[MLFLOW_URI] = _kept_here(os.environ[MLFLOW_URI])


def local_uri(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``mlflow.set_tracking_uri``, on the same ranks."""
    def set_uri(uri: Any) -> Any:
        return plain(_kept_here(uri))

    return set_uri


def off(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``comet_ml.Experiment``'s ``__init__``, on the same ranks."""
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "disabled": True})

    return init


def _kept_here(uri: Any) -> Any:
    if not str(uri).startswith(("http:", "https:", "databricks")):
        return uri
    _not_sent.append(str(uri))
    return _LOCAL


def of_a_new_voice() -> str:
    """What to say when this rank goes on in place of the one that logged to a server; empty: nothing was."""
    ways = [f"{name} keeps its run on disk ({upload})" if upload else f"{name} is off"
            for name, (*_, upload) in OFFLINE.items() if name in sys.modules]
    if "mlflow" in sys.modules and _not_sent:
        ways.append(f"mlflow keeps its run on disk ({_LOCAL})")
    return ", ".join(ways)
