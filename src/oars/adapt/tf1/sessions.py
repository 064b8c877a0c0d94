"""``oars run --tf1``: scripts written for TensorFlow 1 on today's TensorFlow, unchanged.

``import tensorflow as tf`` has the names of 2017 (``names``). A run of a session that trains is split: each rank
computes on its rows of what is fed (``cut``, ``stages``). Every rank does all other runs whole. ``seams`` puts the
layers of this file in place.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from oars.adapt.meet import meet
from oars.adapt.python.random import common_seed
from oars.adapt.tf1 import stages

if TYPE_CHECKING:
    from types import ModuleType

    import tensorflow as tf
    from tensorflow.python.ops.control_flow_ops import WhileContext

    from oars.rank.record import Record

_trains: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # graph -> an operation that trains -> its loss
_drawn = itertools.count()


def behave(tf: ModuleType) -> None:
    """Switch TensorFlow to its behaviour of 2017."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # that this is not the future is no news to these scripts
    tf.compat.v1.disable_v2_behavior()
    logger.setLevel(level)


def compute_gradients(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.compute_gradients``: remember the loss."""
    @functools.wraps(inner)
    def compute_gradients(self: tf.compat.v1.train.Optimizer, loss: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._oars_loss = loss.name if getattr(loss, "shape", None) == () else None
        return inner(self, loss, *args, **kwargs)

    return compute_gradients


def apply_gradients(inner: Callable[..., Any]) -> Any:
    """Around ``Optimizer.apply_gradients``, which ``minimize`` calls: a run of what it gives trains."""
    @functools.wraps(inner)
    def apply_gradients(self: tf.compat.v1.train.Optimizer,
                        grads_and_vars: Iterable[tuple[tf.Tensor | None, tf.Variable]], *args: object,
                        **kwargs: object) -> Any:
        pairs = list(grads_and_vars)
        with stages.updates_behind([grad for grad, _ in pairs]):
            op = inner(self, pairs, *args, **kwargs)
        _trains.setdefault(op.graph, {})[op.name] = getattr(self, "_oars_loss", None)
        return op

    return apply_gradients


def run(record: Record) -> Any:
    """Around ``Session.run``: cut the runs that train, and count them."""
    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(inner)
        def run(self: tf.compat.v1.Session, fetches: Any, feed_dict: dict[Any, Any] | None = None,
                options: tf.compat.v1.RunOptions | None = None,
                run_metadata: tf.compat.v1.RunMetadata | None = None) -> Any:
            known = _trains.get(self.graph)
            training = [] if known is None else [op for op in known if op in stages.names(self.graph, fetches)]
            loss = known[training[0]] if known and training else None
            if loss is not None and not stages.comes_along(self.graph, loss, fetches):
                loss = None
            asked = fetches if loss is None else (fetches, loss)
            if meet.world is None or (known is None and not stages.draws(self.graph, fetches)):
                out = inner(self, asked, feed_dict, options, run_metadata)
            else:
                out = stages.run(self, inner, asked, feed_dict, options, run_metadata, bool(training))
            value = None
            if loss is not None:
                out, value = out
            if training:
                fed = [v for v in (feed_dict or {}).values() if hasattr(v, "__len__") and getattr(v, "ndim", None) != 0]
                rows = max(map(len, fed), default=0)
                record.step(None if value is None else float(value), rows)
            return out

        return run

    return layer


def draws_in_order(inner: Callable[..., Any]) -> Any:
    """Around ``WhileContext.BuildLoop``. A loop that draws random numbers takes its turns one by one. TensorFlow would
    let them overlap, and deal the numbers out as it comes: another dropout in every process, and ranks would part ways.
    """
    import tensorflow as tf

    old = tf.compat.v1

    @functools.wraps(inner)
    def build(self: WhileContext, *args: Any, **kwargs: Any) -> Any:
        built = inner(self, *args, **kwargs)
        ops = old.get_default_graph().get_operations()
        if any("seed2" in op.node_def.attr and _within(op, self) for op in ops):
            self._parallel_iterations = 1
            for op in ops:
                if op.type in ("Enter", "RefEnter") and op.get_attr("frame_name") == self.name.encode():
                    op._set_attr("parallel_iterations", old.AttrValue(i=1))
        return built

    return build


def _within(op: tf.Operation, loop: WhileContext) -> bool:
    context = op._get_control_flow_context()
    while context is not None and context is not loop:
        context = context.outer_context
    return context is loop


def whole_graph_placed(inner: Callable[..., Any]) -> Any:
    """Around ``Session.__init__``. A session that places only what it runs, as an InteractiveSession does, loses what a
    partial run is fed later."""
    import tensorflow as tf

    old = tf.compat.v1

    @functools.wraps(inner)
    def init(self: tf.compat.v1.Session, target: str = "", graph: tf.Graph | None = None,
             config: tf.compat.v1.ConfigProto | None = None) -> None:
        if isinstance(config, old.ConfigProto):
            config = old.ConfigProto.FromString(config.SerializeToString())
            config.graph_options.place_pruned_graph = False
        inner(self, target, graph, config)

    return init


def get_seed(inner: Callable[..., Any]) -> Any:
    """Around ``get_seed``: an operation without a seed, in a graph without one, draws what it draws on all ranks."""
    @functools.wraps(inner)
    def get_seed(op_seed: int | None) -> Any:
        seeds = inner(op_seed)
        return (common_seed("tensorflow"), next(_drawn)) if seeds == (None, None) else seeds

    return get_seed
