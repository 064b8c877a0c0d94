"""Which ``GradientTape``s of the script record now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

recording: list[Any] = []  # outermost first
true_gradient = tf.GradientTape.gradient  # as TensorFlow has it


def pushed(inner: Callable[..., Any]) -> Any:
    """Around ``GradientTape._push_tape``."""
    @functools.wraps(inner)
    def push(self: tf.GradientTape) -> None:
        inner(self)
        recording.append(self)
        self._oars_graph = tf.compat.v1.get_default_graph()

    return push


def popped(inner: Callable[..., Any]) -> Any:
    """Around ``GradientTape._pop_tape``."""
    @functools.wraps(inner)
    def pop(self: tf.GradientTape) -> None:
        inner(self)
        recording.remove(self)

    return pop


def through_a_loop() -> bool:
    """Whether a loop or a branch is being traced that was begun when a tape had begun to record."""
    graph, inner = tf.compat.v1.get_default_graph(), []
    while isinstance(graph, FuncGraph):
        inner.append(graph)
        if isinstance(graph, ControlFlowFuncGraph) and any(tape._oars_graph not in inner for tape in recording):
            return True
        graph = graph.outer_graph
    return False
