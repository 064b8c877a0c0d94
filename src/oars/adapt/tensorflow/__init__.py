"""TensorFlow 2: gradients of the global loss (``gradients``), collectives inside graphs (``collectives``), steps that
are repeated after a loss (``recovery``), pipelines of which each rank reads its
part (``reading``), functions that leave the script (``exported``). ``seams`` lists what is replaced.

What is split is a Keras model's call (``adapt/keras``); all other tensors are global on every rank. Scripts for
TensorFlow 1 are in ``adapt/tf1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oars.plan import Plan

if TYPE_CHECKING:
    from types import ModuleType

    from oars.engine.world import World
    from oars.rank.record import Record


def install(tf: ModuleType, world: World, plan: Plan, record: Record) -> None:
    """Patch TensorFlow for this rank of several."""
    from oars.adapt.meet import meet
    from oars.adapt.python.imports import when_imported
    from oars.adapt.python.random import common_seed
    from oars.adapt.tensorflow import seams

    meet.start(world, plan, record)
    tf.random.set_seed(common_seed("tensorflow"))
    seams.install()
    when_imported("tf_keras", lambda _: record.notice(
        "tf_keras (Keras 2) runs replicated on every rank (correct, not faster): only Keras 3 is split",
        "use Keras 3: import keras, and unset TF_USE_LEGACY_KERAS", "model"))
