"""Reading: of a ``tf.data`` pipeline that reads or decodes files, each rank does its own elements of every batch.

A pipeline ``source -> map -> batch`` gives the same batches as ``source -> batch -> map of each row``. So where the
functions that are mapped draw nothing and change nothing, what comes from the source (names of files, records) is put
into batches on every rank, a rank maps its rows of them, and the rows of all ranks are joined when the script takes the
batch: to it, it is whole as ever. That pays where mapping is reading or decoding; a mapped cast costs less than the
message. What else stands behind the functions (``shuffle``, ``cache``, ``repeat``, a second ``batch``) leaves the
pipeline as it is, and so does an iterator that a ``tf.function`` or a checkpoint takes.

The source's rows come along. After a loss those of a batch that was made for more ranks are mapped again.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python.data.ops import batch_op, dataset_ops, iterator_ops, map_op, prefetch_op, zip_op
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

from oars.adapt.meet import meet
from oars.adapt.tensorflow import collectives
from oars.engine.world import RankLost

if TYPE_CHECKING:
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

_PASSED = (prefetch_op._PrefetchDataset, dataset_ops._OptionsDataset)  # they change no element
_MAPS = (map_op._MapDataset, map_op._ParallelMapDataset)
_BATCHES = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
_HARMLESS = {"Assert", "StatefulPartitionedCall", "While", "If", "Case"}  # stateful by name; what is in them is seen
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # dataset -> (what reads it, mapping rows), or None


class _Mapped(NamedTuple):
    """A dataset as ``work`` on each (flat) element of ``source``; whether that reads or decodes, and in parallel."""

    source: Any
    work: Callable[[list[Any]], list[Any]]
    reads: bool = False
    parallel: bool = False


def _traced(dataset: tf.data.Dataset) -> _Mapped:
    """``dataset``, its maps taken off."""
    if isinstance(dataset, _PASSED):
        return _traced(dataset._input_dataset)
    if isinstance(dataset, zip_op._ZipDataset):
        parts = [_traced(part) for part in tf.nest.flatten(dataset._datasets)]
        return _Mapped(tf.data.Dataset.zip(tuple(part.source for part in parts)), functools.partial(_beside, parts),
                       any(part.reads for part in parts), any(part.parallel for part in parts))
    if isinstance(dataset, _MAPS) and getattr(dataset, "_deterministic", "") != "false":
        function = dataset._map_func.function
        kinds = _kinds(function)
        if all(kind in _HARMLESS or _same_every_time(kind) for kind in kinds):
            before = _traced(dataset._input_dataset)
            return _Mapped(before.source, lambda flat: list(function(*before.work(flat))),
                           before.reads or any(_reads(kind) for kind in kinds),
                           before.parallel or isinstance(dataset, map_op._ParallelMapDataset))
    return _Mapped(dataset, list)


def _beside(parts: list[_Mapped], flat: list[Any]) -> list[Any]:
    out, rest = [], list(flat)
    for part in parts:
        width = len(tf.nest.flatten(part.source.element_spec))
        out += part.work(rest[:width])
        rest = rest[width:]
    return out


def _kinds(function: ConcreteFunction) -> set[str]:
    """The types of all operations of a function, and of functions within it."""
    graph = function.graph.as_graph_def()
    inner = [node for f in graph.library.function for node in f.node_def]
    names = {f.signature.name for f in graph.library.function}
    return {node.op for node in [*graph.node, *inner]} - names


def _same_every_time(kind: str) -> bool:
    known = op_def_registry.get(kind)
    return known is not None and not known.is_stateful


def _reads(kind: str) -> bool:
    return kind in ("ReadFile", "PyFuncStateless") or kind.startswith(("Decode", "Parse"))


def _plain(specs: list[Any], fixed: bool) -> bool:
    """Whether these are dense tensors, of numbers, or (``fixed``) of anything in shapes that are known."""
    return bool(specs) and all(type(spec) is tf.TensorSpec and (
        spec.shape.is_fully_defined() if fixed else spec.dtype.is_bool or spec.dtype.is_floating
        or spec.dtype.is_integer) for spec in specs)


def _pipeline(dataset: tf.data.Dataset) -> tuple[Any, Any] | None:
    """What gives for each batch of ``dataset`` the source's rows and this rank's of the result; None: it is left."""
    inner, ahead = dataset, None
    while isinstance(inner, _PASSED):
        ahead = getattr(inner, "_buffer_size", ahead)
        inner = inner._input_dataset
    if not isinstance(inner, _BATCHES) or getattr(inner, "_deterministic", "") == "false":
        return None
    mapped = _traced(inner._input_dataset)
    specs = tf.nest.flatten(inner._input_dataset.element_spec)
    if not mapped.reads or not _plain(specs, False) or not _plain(tf.nest.flatten(mapped.source.element_spec), True):
        return None
    if dataset.options().deterministic is False:
        return None

    def own(*element: Any) -> Any:
        raw = tf.nest.flatten(element)
        share = collectives.Share(raw[0])
        made = tf.map_fn(lambda row: tuple(mapped.work(list(row))), tuple(share.cut(part) for part in raw),
                         fn_output_signature=tuple(specs))
        return tuple(raw), made, collectives.place().read_value()

    batches = mapped.source.batch(int(inner._batch_size), bool(inner._drop_remainder))
    rows = batches.map(own, tf.data.AUTOTUNE, deterministic=True) if mapped.parallel else batches.map(own)
    return (rows if ahead is None else rows.prefetch(int(ahead))).with_options(dataset.options()), tf.function(own)


class Reader(iterator_ops.OwnedIterator):
    """An iterator whose batches are joined from all ranks' rows; TensorFlow's own as soon as TensorFlow takes it."""

    def __init__(self, dataset: tf.data.Dataset, rows: tf.data.Dataset, own: Callable[..., Any]) -> None:
        self._whole, self._rows, self._own, self._given = dataset, rows, own, False
        self._element_spec = dataset.element_spec

    def begin(self) -> None:
        """Make what it takes its rows from. A shuffle draws its order then: so before the next iterator is made."""
        if "_taken" not in self.__dict__ and "_iterator_resource" not in self.__dict__:
            self._taken = iterator_ops.OwnedIterator(self._rows)

    def __getattr__(self, name: str) -> Any:
        if name not in ("_iterator_resource", "_dataset", "_flat_output_types", "_flat_output_shapes"):
            raise AttributeError(name)
        if self._given:
            raise SystemExit("oars: an iterator that gave batches to the script is given to a tf.function or a "
                             "checkpoint: give it away before its first batch")
        if "_taken" in self.__dict__:
            meet.record.notice("an iterator is given to a tf.function or a checkpoint after others were made: if its "
                               "dataset is shuffled, that is in another order than on one process")
        iterator_ops.OwnedIterator.__init__(self, self._whole)
        return self.__dict__[name]

    def _maybe_initialize_trackable(self) -> None:
        super()._maybe_initialize_trackable()
        if not self._given:
            self._iterator_resource  # noqa: B018 (a checkpoint will want it)

    def _next_internal(self) -> Any:
        elsewhere = not tf.executing_eagerly() or threading.current_thread() is not threading.main_thread()
        if "_iterator_resource" in self.__dict__ or elsewhere:
            return super()._next_internal()
        self.begin()
        self._given = True
        raw, made, place = self._taken.get_next()
        while True:
            try:
                if place.numpy().tolist() != [meet.rank, meet.size]:
                    collectives.place().assign([meet.rank, meet.size])
                    _, made, place = self._own(*raw)
                count = int(raw[0].shape[0])
                joined = [tf.convert_to_tensor(meet.gather(part.numpy(), count), part.dtype) for part in made]
                return structure.from_compatible_tensor_list(self._element_spec, joined)
            except RankLost:
                collectives.renew()


_last: list[Reader] = []


def iter_(inner: Callable[..., Any]) -> Any:
    """Around ``iter`` of a dataset."""
    @functools.wraps(inner)
    def iter_(self: tf.data.Dataset) -> Any:
        if not tf.executing_eagerly() or threading.current_thread() is not threading.main_thread():
            return inner(self)
        while _last:
            _last.pop().begin()
        if self not in _known:
            _known[self] = None if meet.inside or not meet.leads else _pipeline(self)
        if _known[self] is None:
            return inner(self)
        _last.append(Reader(self, *_known[self]))
        return _last[0]

    return iter_
