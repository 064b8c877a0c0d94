"""What of TensorFlow is replaced, by which layers, outermost first; on one rank nothing. Files are in ``files``."""

from __future__ import annotations

import os

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, structured_function
from tensorflow.python.eager.polymorphic_function import function_context, polymorphic_function
from tensorflow.python.ops import gradients as gradients_ops
from tensorflow.python.saved_model import save as saved_model

from oars.adapt.python import patching
from oars.adapt.python.patching import Seam
from oars.adapt.tensorflow import exported, gradients, options, reading, recovery, tapes

_Function = polymorphic_function.Function

SEAMS = (
    # gradients
    Seam(tf.GradientTape, "_push_tape", (tapes.pushed,)),
    Seam(tf.GradientTape, "_pop_tape", (tapes.popped,)),
    Seam(tf.GradientTape, "gradient", (gradients.gradient,)),
    Seam(tf.GradientTape, "jacobian batch_jacobian", (gradients.one_by_one,)),
    Seam(tf, "gradients", (gradients.exchanging,)),
    Seam(tf.compat.v1, "gradients", (gradients.exchanging,)),
    Seam(gradients_ops, "gradients", (gradients.exchanging,)),
    # compiled functions
    Seam(tf, "function", (options.function,)),
    Seam(_Function, "__call__", (recovery.call,)),
    Seam(_Function, "get_concrete_function", (exported.get_concrete_function,)),
    Seam(_Function, "_get_concrete_function_garbage_collected", (exported.traced,)),
    Seam(function_context, "make_function_context", (exported.make_function_context,)),
    Seam(saved_model, "save_and_return_nodes", (exported.save_and_return_nodes,)),
    # data
    Seam(dataset_ops.DatasetV2, "__iter__", (reading.iter_,)),
    Seam(structured_function.StructuredFunctionWrapper, "__init__", (options.whole_in_pipelines,)),
    # devices
    Seam(tf.distribute, "MirroredStrategy", (options.one_device,)),
)
# Where the script has no TF_CONFIG there are no other processes either.
NO_OTHER_PROCESSES = (
    Seam(tf.distribute, "MultiWorkerMirroredStrategy", (options.one_device,)),
    Seam(tf.distribute.experimental, "MultiWorkerMirroredStrategy", (options.one_device,)),
)


def install() -> None:
    """Put all of it in place."""
    patching.install(SEAMS, frozenset())
    if "TF_CONFIG" not in os.environ:
        patching.install(NO_OTHER_PROCESSES, frozenset())
