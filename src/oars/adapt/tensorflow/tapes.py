"""Which ``GradientTape``s of the script record now."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

recording: list[Any] = []  # outermost first


def install() -> None:
    """Patch GradientTape: know which of them record."""
    push, pop = tf.GradientTape._push_tape, tf.GradientTape._pop_tape

    @functools.wraps(push)
    def pushed(self: Any) -> None:
        push(self)
        recording.append(self)
        self._oars_graph = tf.compat.v1.get_default_graph()

    @functools.wraps(pop)
    def popped(self: Any) -> None:
        pop(self)
        recording.remove(self)

    tf.GradientTape._push_tape, tf.GradientTape._pop_tape = pushed, popped


def through_a_loop() -> bool:
    """Whether a loop or a branch is being traced that was begun when a tape had begun to record."""
    graph, inner = tf.compat.v1.get_default_graph(), []
    while isinstance(graph, FuncGraph):
        inner.append(graph)
        if isinstance(graph, ControlFlowFuncGraph) and any(tape._oars_graph not in inner for tape in recording):
            return True
        graph = graph.outer_graph
    return False
