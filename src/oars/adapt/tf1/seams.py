"""What of today's TensorFlow is replaced under ``--tf1``: names of 2017, sessions, random numbers.

``numpy_names.py`` gives NumPy its names of 2017, those that are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.framework import random_seed
from tensorflow.python.ops.control_flow_ops import WhileContext

from oars.adapt.python import patching
from oars.adapt.python.patching import Mode, Seam
from oars.adapt.tf1 import names, sessions, stages

if TYPE_CHECKING:
    from oars.rank.record import Record

SEVERAL_RANKS = Mode("several ranks")

_old = tf.compat.v1
_Session = _old.Session.__mro__[1]
_LOSSES = " ".join(f"{name}_cross_entropy_with_logits" for name in ("softmax", "sparse_softmax", "sigmoid"))


def older() -> tuple[Seam, ...]:
    """Functions whose arguments had another order; ``tf.nn`` is that of 2017 once the names are given."""
    return (Seam(tf, "concat", (names.concat,)), Seam(tf, "split", (names.split,)), Seam(tf.nn, _LOSSES, (names.loss,)))


def table(record: Record) -> tuple[Seam, ...]:
    """Sessions: steps go to ``record``."""
    return (
        Seam(_old.train.Optimizer, "compute_gradients", (sessions.compute_gradients,)),
        Seam(_old.train.Optimizer, "apply_gradients", (sessions.apply_gradients,)),
        Seam(_Session, "run", (sessions.run(record),)),
        Seam(_Session, "__init__", (SEVERAL_RANKS(sessions.whole_graph_placed),)),
        Seam(_old.Graph, "as_graph_def", (stages.unseen,)),
        Seam(WhileContext, "BuildLoop", (sessions.draws_in_order,)),
        Seam(random_seed, "get_seed", (SEVERAL_RANKS(sessions.get_seed),)),
    )


def install(many: bool, record: Record) -> None:
    """Give the module ``tensorflow`` the names and the behaviour of TensorFlow 1."""
    sessions.behave(tf)
    for owner, name, value in names.given(tf):
        patching.put(owner, name, value)
    patching.install(older(), frozenset())
    patching.install(table(record), {SEVERAL_RANKS} if many else frozenset())
