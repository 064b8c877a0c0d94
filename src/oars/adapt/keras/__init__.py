"""Keras 3 aboard: a model's call runs on own rows and gives the global result; the script sees global tensors.

``install`` puts the patches in place (docs/keras.md lists them): models' calls (``calls``), what in a model looks at
the whole batch (``norm``, ``noise``), gradients (``gradients`` here for JAX, ``adapt/tensorflow`` for TensorFlow) and
steps, which are done again when a rank is lost (``steps``). On the PyTorch backend the tensors are PyTorch's, and
``adapt/torch`` has already done all of this: only steps are counted.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from oars.plan import Plan


def install(keras: Any, world: Any, plan: Plan, record: Any) -> None:
    """Patch Keras for this rank (``world`` is None on one rank: then only steps are counted)."""
    if plan.tf1:  # its layers are part of a session's graph, which is cut (``adapt/tf1/sessions.py``)
        keras.Model.compile = _not_in_sessions
        return
    from oars.adapt.keras import steps
    from oars.adapt.meet import meet

    backend, apart = keras.backend.backend(), None  # type: str, Any
    meet.record, meet.plan, meet.backend = record, plan, backend
    if world is not None:
        meet.check_plan()
        from keras.src import backend as of_keras

        of_keras.IS_THREAD_SAFE = False  # callbacks in a thread of their own would talk to ranks out of turn
    if world is not None and backend in ("tensorflow", "jax"):
        from oars.adapt.keras import batchnorm, call, dropout

        wire: Any
        if backend == "tensorflow":
            from oars.adapt.tensorflow import collectives as wire
        else:
            from oars.adapt.jax import collectives as wire

            meet.active = True
        call.install(keras, wire)
        dropout.install(keras)
        batchnorm.install(keras, wire)
        if plan.sync == "local":
            from oars.adapt.keras.async_modes import install as on_their_own

            apart = on_their_own(keras, wire, backend)
    elif world is not None and backend == "torch":
        if plan.sync != "allreduce":
            from oars.adapt.keras import async_torch

            apart = async_torch.install(keras)
        else:
            _moving_weights(keras)
        if plan.local_batchnorm:
            from oars.adapt.keras import batchnorm

            batchnorm.install_torch(keras)
        _let_check(keras)
    elif world is not None:
        record.notice(f"Keras on {backend} runs whole on every rank, no faster: "
                      "the backends torch, tensorflow and jax are cut")
    steps.install(keras, backend, world is not None, apart)


def _not_in_sessions(*args: Any, **kwargs: Any) -> None:
    raise SystemExit("oars: today's Keras compiles no models in graphs of TensorFlow 1: leave --tf1 out, and use "
                     "optimizers of Keras for tf.train's")


def _moving_weights(keras: Any) -> None:
    """On PyTorch: tell where an optimizer changes weights."""
    from oars.adapt.torch.context import ctx
    from oars.adapt.torch.recovery import lineage

    optimizer = keras.optimizers.Optimizer
    plain, known = optimizer.apply, weakref.WeakSet()  # type: Any, weakref.WeakSet

    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if self not in known:
            known.add(self)
            for v in trainable_variables or self._trainable_variables:
                ctx.optimizer_of[v.value] = ctx.number(self)
        lineage.before_step(ctx.number(self))
        out = plain(self, grads, trainable_variables)
        lineage.stepped(ctx.number(self))
        return out

    optimizer.apply = apply


def _let_check(keras: Any) -> None:
    """On PyTorch: a layer that checks the shape of what it is given does not depend on the batch's size by that, unless
    it asks for a certain one. So a model of such layers may run on own rows."""
    from keras.src.layers import input_spec

    from oars.adapt.torch.context import ctx

    check = input_spec.assert_input_compatibility

    def assert_input_compatibility(specs: Any, inputs: Any, layer_name: str) -> None:
        traces = ctx.traces
        if traces and not any(spec is not None and _of_a_size(spec) for spec in keras.tree.flatten(specs)):
            ctx.traces = []
        try:
            check(specs, inputs, layer_name)
        finally:
            ctx.traces = traces

    input_spec.assert_input_compatibility = assert_input_compatibility


def _of_a_size(spec: Any) -> bool:
    return bool(spec.shape and spec.shape[0] is not None) or 0 in (spec.axes or ())
