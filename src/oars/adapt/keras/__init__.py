"""Keras 3: a model's call runs on own rows and gives the global result; the script sees global tensors.

``seams`` lists what is replaced (docs/keras.md too): models' calls (``call``), what in a model looks at the whole batch
(``batchnorm``, ``dropout``), and steps, which are repeated when a rank is lost (``steps``). Gradients are those of
``adapt/jax`` and ``adapt/tensorflow``. On the PyTorch backend the tensors are PyTorch's, and ``adapt/torch`` does all
of this: only steps are counted (``on_torch``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oars.plan import Plan

if TYPE_CHECKING:
    from types import ModuleType

    from oars.engine.world import World
    from oars.rank.record import Record


def install(keras: ModuleType, world: World | None, plan: Plan, record: Record) -> None:
    """Patch Keras for this rank (``world`` is None on one rank: then only steps are counted)."""
    from oars.adapt.keras import seams
    from oars.adapt.meet import meet

    if plan.tf1:  # its layers are part of a session's graph, which is cut (``adapt/tf1/sessions.py``)
        seams.refuse_in_sessions()
        return
    backend = keras.backend.backend()
    meet.record, meet.plan, meet.backend = record, plan, backend
    if world is not None:
        meet.check_plan()
        if backend not in ("torch", "tensorflow", "jax"):
            record.notice(f"Keras on {backend} runs replicated on every rank (correct, not faster): "
                          "only the backends torch, tensorflow and jax are split",
                          "set KERAS_BACKEND to torch, tensorflow or jax", "model")
        meet.keras_on_jax = backend == "jax"
    seams.install(backend, world is not None, plan)
