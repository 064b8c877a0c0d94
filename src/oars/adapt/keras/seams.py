"""What of Keras is replaced, by which layers, outermost first, on which backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
from keras.src import backend as backend_module
from keras.src.backend import random
from keras.src.layers import input_spec
from keras.src.trainers import trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from oars.adapt.keras import batchnorm, call, dropout, steps
from oars.adapt.python import patching
from oars.adapt.python.patching import Mode, Seam, instead
from oars.plan import Plan

if TYPE_CHECKING:
    from types import ModuleType

SEPARATE = Mode("separate")  # --sync local, gossip
LOCAL_BATCHNORM = Mode("local batchnorm")
EXACT = Mode("exact")  # no separate training

_BatchNorm = keras.layers.BatchNormalization
_DRAWS = " ".join(name for name in ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")
                  if hasattr(random, name))
EVERYWHERE = (Seam(keras.Model, "make_train_function", (steps.make_train_function,)),)


def split_models(wire: ModuleType, separate: Any) -> tuple[Seam, ...]:
    """On TensorFlow and JAX, whose ranks talk by ``wire``."""
    from oars.adapt.keras import async_modes as modes

    return (
        Seam(keras.Model, "__call__", (SEPARATE(modes.called(separate, wire)), call.called)),
        Seam(keras.Model, "stateless_call", (call.stateless_called,)),
        Seam(keras.Model, "export save", (call.uncut,)),
        Seam(keras.Model, "_get_metrics_result_or_logs", (SEPARATE(modes.logs(separate)),)),
        Seam(random, _DRAWS, (dropout.drawing,)),
        Seam(random, "dropout", (dropout.dropout,)),
        Seam(random, "categorical shuffle", (dropout.of_all_rows,)),
        Seam(_BatchNorm, "_moments", (batchnorm.moments(wire),)),
        Seam(_BatchNorm, "call", (batchnorm.averages(wire),)),
    )


def tensorflow() -> tuple[Seam, ...]:
    """On TensorFlow alone."""
    return (
        Seam(keras.Model, "_make_function", (steps.make_function,)),
        Seam(keras.Model, "jit_compile", (steps.jit_compile,)),
        Seam(trainer, "model_supports_jit", (instead(lambda model: False),)),
        Seam(keras.optimizers.Optimizer, "apply", (steps.apply,)),
        Seam(TorchDataLoaderAdapter, "__init__", (steps.own_loader,)),
    )


def torch() -> tuple[Seam, ...]:
    """On PyTorch."""
    from oars.adapt.keras import async_torch, on_torch

    return (
        Seam(keras.Model, "_get_metrics_result_or_logs", (SEPARATE(async_torch.logs),)),
        Seam(ArrayDataAdapter, "get_torch_dataloader", (SEPARATE(async_torch.one_loader),)),
        Seam(keras.optimizers.Optimizer, "apply", (EXACT(on_torch.apply),)),
        Seam(_BatchNorm, "call", (LOCAL_BATCHNORM(batchnorm.averages_on_torch),)),
        Seam(input_spec, "assert_input_compatibility", (on_torch.checked,)),
    )


def install(backend: str, many: bool, plan: Plan) -> None:
    """Put all layers of this backend in place; on one rank only steps are counted."""
    separate: Any = None
    seams: tuple[Seam, ...] = ()
    modes = {EXACT if plan.sync == "allreduce" else SEPARATE} | ({LOCAL_BATCHNORM} if plan.local_batchnorm else set())
    if many:
        # callbacks in a thread of their own would talk to ranks out of turn
        patching.put(backend_module, "IS_THREAD_SAFE", False)
    if many and backend in ("tensorflow", "jax"):
        wire: Any
        if backend == "tensorflow":
            from oars.adapt.tensorflow import collectives as wire
        else:
            from oars.adapt.jax import collectives as wire
        call.begin(wire)
        if SEPARATE in modes:
            from oars.adapt.keras import async_modes

            separate = async_modes.begin(wire, backend)
        seams = split_models(wire, separate) + (tensorflow() if backend == "tensorflow" else ())
    elif many and backend == "torch":
        if SEPARATE in modes:
            from oars.adapt.keras import async_torch

            separate = async_torch.Separate()
        seams = torch()
    patching.install(seams, modes)
    if separate is not None:
        from oars.adapt.keras.async_modes import UNITED, united

        patching.install((Seam(keras.Model, " ".join(UNITED), (united(separate.unite),)),), modes)
    steps.begin(separate)
    patching.install(EVERYWHERE, modes)


def refuse_in_sessions() -> None:
    """Under ``--tf1``."""
    patching.put(keras.Model, "compile", _not_in_sessions)


def _not_in_sessions(*args: object, **kwargs: object) -> None:
    raise SystemExit("oars: Keras 3 cannot compile models in graphs of TensorFlow 1: leave out --tf1, and use "
                     "optimizers of Keras instead of tf.train's")
