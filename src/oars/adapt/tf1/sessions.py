"""``oars run --tf1``: scripts written for TensorFlow 1 on today's TensorFlow, unchanged.

``import tensorflow as tf`` has the names of 2017 (``names``). A run of a session that trains is cut: each rank computes
on its rows of what is fed (``cut``, ``stages``). All other runs every rank does whole.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

from oars.adapt.python.random import common_seed
from oars.adapt.tf1 import names


def install(tf: Any, world: Any, record: Any) -> None:
    """Give the module ``tensorflow`` the names and the behaviour of TensorFlow 1."""
    old = tf.compat.v1
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # that this is not the future is no news to these scripts
    old.disable_v2_behavior()
    logger.setLevel(level)
    names.install(tf)
    _draws_in_order(old)
    _runs(old, world, record)
    if world is not None:
        _same_random_numbers()
        _whole_graphs_placed(old)


def _runs(old: Any, world: Any, record: Any) -> None:
    """Cut the runs that train, by what an optimizer's ``minimize`` or ``apply_gradients`` gave, and count them."""
    from oars.adapt.tf1 import stages

    trains: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> such an operation -> its loss
    optimizer, plain_run = old.train.Optimizer, old.Session.run
    plain_compute, plain_apply = optimizer.compute_gradients, optimizer.apply_gradients

    @functools.wraps(plain_compute)
    def compute_gradients(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._oars_loss = loss.name if getattr(loss, "shape", None) == () else None
        return plain_compute(self, loss, *args, **kwargs)

    @functools.wraps(plain_apply)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        with stages.updates_behind([grad for grad, _ in pairs]):
            op = plain_apply(self, pairs, *args, **kwargs)
        trains.setdefault(op.graph, {})[op.name] = getattr(self, "_oars_loss", None)
        return op

    @functools.wraps(plain_run)
    def run(self: Any, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None) -> Any:
        known = trains.get(self.graph)
        training = [] if known is None else [op for op in known if op in stages.names(self.graph, fetches)]
        loss = known[training[0]] if known and training else None
        if loss is not None and not stages.comes_along(self.graph, loss, fetches):
            loss = None
        asked = fetches if loss is None else (fetches, loss)
        if world is None or (known is None and not stages.draws(self.graph, fetches)):
            out = plain_run(self, asked, feed_dict, options, run_metadata)
        else:
            out = stages.run(self, plain_run, asked, feed_dict, options, run_metadata, bool(training))
        value = None
        if loss is not None:
            out, value = out
        if training:
            fed = [v for v in (feed_dict or {}).values() if hasattr(v, "__len__") and getattr(v, "ndim", None) != 0]
            rows = max(map(len, fed), default=0)
            record.step(None if value is None else float(value), rows)
        return out

    optimizer.compute_gradients, optimizer.apply_gradients = compute_gradients, apply_gradients
    base = old.Session.__mro__[1]
    base.run = run
    old.Graph.as_graph_def = stages.unseen(old.Graph.as_graph_def)


def _draws_in_order(old: Any) -> None:
    """A loop that draws random numbers takes its turns one by one. TensorFlow would let them overlap, and deal the
    numbers out as it comes: another dropout in every process, and ranks would part ways."""
    from tensorflow.python.ops.control_flow_ops import WhileContext

    plain = WhileContext.BuildLoop

    @functools.wraps(plain)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        built = plain(self, *args, **kwargs)
        ops = old.get_default_graph().get_operations()
        if any("seed2" in op.node_def.attr and _within(op, self) for op in ops):
            self._parallel_iterations = 1
            for op in ops:
                if op.type in ("Enter", "RefEnter") and op.get_attr("frame_name") == self.name.encode():
                    op._set_attr("parallel_iterations", old.AttrValue(i=1))
        return built

    WhileContext.BuildLoop = build


def _within(op: Any, loop: Any) -> bool:
    context = op._get_control_flow_context()
    while context is not None and context is not loop:
        context = context.outer_context
    return context is loop


def _whole_graphs_placed(old: Any) -> None:
    """A session that places only what it runs, as an InteractiveSession does, loses what a partial run is fed later."""
    base = old.Session.__mro__[1]
    plain = base.__init__

    @functools.wraps(plain)
    def init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        if isinstance(config, old.ConfigProto):
            config = old.ConfigProto.FromString(config.SerializeToString())
            config.graph_options.place_pruned_graph = False
        plain(self, target, graph, config)

    base.__init__ = init


def _same_random_numbers() -> None:
    """An operation without a seed, in a graph without one, draws what it draws on all ranks."""
    from tensorflow.python.framework import random_seed

    plain, drawn = random_seed.get_seed, itertools.count()

    @functools.wraps(plain)
    def get_seed(op_seed: Any) -> Any:
        seeds = plain(op_seed)
        return (common_seed("tensorflow"), next(drawn)) if seeds == (None, None) else seeds

    random_seed.get_seed = get_seed
