"""Where PyTorch is taken hold of: the one table of what is replaced, by which layers, in which mode.

Layers are named outermost first: the first one is entered first when the script calls, the last one is next to
PyTorch's own function (``instead``: in its place). ``RECORDED(layer)`` is there only where the run can be snapshot, and
so is what plays a resumed run: the same layers, with the tape playing. ``ASYNC`` is ``--sync local``, ``gossip`` and
``server``, ``SERVER`` the last of these; ``SHARING`` is ``--split auto``, ``PRUNED`` is ``--prune`` and ``--widen``,
``THINNED`` is ``--samples thin``.

Not in the table are the seeds of PyTorch's generators (``adapt/python/seams.py``) and, in recorded runs of one rank,
``torch.save`` (``adapt/replay/seams.py``). What is replaced only for a while is not in it either: ``Tensor.grad`` while
exchanges are put off (``backward/gradients.py``, ``async_modes/lost_samples.py``) or a run is played
(``replay/player.py``), a loader's sampler where a resumed epoch goes on (``replay/player.py``), ``math.log`` while a
model is traced (``model/trace.py``), which worker this is while a batch is collated (``batches/loaders.py``), the
handling of log records while samples are looked at (``batches/memory.py``), the rendezvous in a child that the script
spawns (``refuse_ddp.py``), and what would import PyTorch's compiler (``lazy_dynamo.py``).
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing.pool
import multiprocessing.process
import multiprocessing.queues
import queue
import threading
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, _utils, dataloader

from oars.adapt.python import patching
from oars.adapt.python.imports import when_imported
from oars.adapt.python.patching import Layer, Mode, Only, Seam, compose, instead
from oars.adapt.torch import lazy_dynamo, step_log
from oars.adapt.torch.context import ctx
from oars.adapt.torch.replay import reads, recorder


def aside(own: Callable[..., Any]) -> Layer:
    """Outermost: where ranks are not in step (a thread of the script's, a data set that trains) it is PyTorch's own."""
    def layer(inner: Callable[..., Any]) -> Any:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (inner if ctx.in_step else own)(*args, **kwargs)

        return call

    return layer


RECORDED = Mode("recorded")
ASYNC = Mode("async")
SERVER = Mode("server")
SHARING = Mode("sharing")
PRUNED = Mode("pruned")
THINNED = Mode("thinned")
Layers = tuple[Layer | Only, ...]

_Iter: Any = dataloader._BaseDataLoaderIter
_TRANSFORMS = "grad grad_and_value jacrev jacfwd hessian vmap"  # of a function, give a function
_LOSSES = ("cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
           "binary_cross_entropy_with_logits")
_OF_VALUES = "vjp jvp linearize"  # of a function and its arguments, give values

# ---- recorded runs, on one rank and on several ----------------------------------------------------------------------

RECORDING = (
    Seam(Optimizer, "__init__", (RECORDED(recorder.registering("optimizers")),)),
    Seam(LRScheduler, "__init__", (RECORDED(recorder.registering("schedulers")),)),
    Seam(ReduceLROnPlateau, "__init__", (RECORDED(recorder.registering("schedulers")),)),
    Seam(torch.amp.GradScaler, "__init__", (RECORDED(recorder.registering("scalers")),)),
    Seam(torch.amp.GradScaler, "step", (RECORDED(recorder.scaler_step),)),
    Seam(torch.amp.GradScaler, "update", (RECORDED(recorder.step_and_hooks),)),
    Seam(torch, "equal allclose is_nonzero", (RECORDED(reads.scalar),)),
    Seam(torch.Tensor, "__bool__ __index__ __complex__ is_nonzero equal allclose", (RECORDED(reads.scalar),)),
    Seam(torch.Tensor, "__array__", (RECORDED(reads.array),)),
    Seam(torch.Tensor, "__repr__", (RECORDED(reads.unseen),)),
    Seam(torch.Tensor, "__format__", (RECORDED(reads.format_),)),
)

# ---- one rank: steps are counted, nothing is changed ----------------------------------------------------------------

ONE_RANK = (
    Seam(nn.Module, "__call__", (RECORDED(recorder.call_of_one_rank),)),
    Seam(DataLoader, "__iter__", (RECORDED(recorder.loader_iter),)),
    Seam(_Iter, "_next_index", (RECORDED(recorder.next_index),)),
    Seam(_Iter, "__next__", (RECORDED(recorder.iter_next), step_log.timed_next, step_log.noting_next)),
    Seam(torch.autograd, "backward",
         (RECORDED(recorder.backward), step_log.timed_backward, step_log.noting_backward)),
    Seam(torch.autograd, "grad", (RECORDED(recorder.grad),)),
    Seam(Optimizer, "add_param_group", (step_log.add_param_group,)),
    Seam(torch, "compile", (RECORDED(recorder.compile_),)),
    Seam(torch.func, _TRANSFORMS, (RECORDED(recorder.transform),)),
    Seam(torch.func, _OF_VALUES, (RECORDED(recorder.passed_over),)),
    Seam(torch.jit, "trace", (RECORDED(recorder.jit_trace),)),
    Seam(torch.Tensor, "item __float__ __int__", (RECORDED(reads.scalar),)),
    Seam(torch.Tensor, "tolist numpy", (RECORDED(reads.array),)),
)
STEP_AND_HOOKS_OF_ONE_RANK: Layers = (RECORDED(recorder.step_and_hooks),)
STEP_OF_ONE_RANK: Layers = (RECORDED(recorder.step),)


# ---- several ranks --------------------------------------------------------------------------------------------------


def _several_ranks() -> tuple[tuple[Seam, ...], Layers, Layers]:
    """The table of several ranks; the layers around an optimizer's step and its hooks; those around the step alone.
    (One rank need not import what is named here.)"""
    from oars.adapt.torch import guard, sharing
    from oars.adapt.torch.async_modes import phases, ps_worker, weight_reads
    from oars.adapt.torch.backward import grad_hooks, gradients
    from oars.adapt.torch.batches import loaders, workers
    from oars.adapt.torch.model import batchnorm, call, changes, compiled, custom_functions, dropout
    from oars.adapt.torch.rows import leaving, tensor

    hooks = " ".join(name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook"))
    seams = (
        # the script's own calls: models, loaders, batches, backward; the optimizer's step is in ``install``, below
        Seam(nn.Module, "__call__",
             (RECORDED(recorder.module_call), ASYNC(phases.module_call), SHARING(sharing.module_call),
              instead(call.module_call))),
        Seam(DataLoader, "__iter__",
             (aside(DataLoader.__iter__), RECORDED(recorder.loader_iter), ASYNC(phases.meets_at(phases.LOADER)),
              instead(loaders.loader_iter))),
        Seam(_Iter, "__next__",
             (RECORDED(recorder.iter_next), ASYNC(phases.iter_next), step_log.timed_next, instead(loaders.iter_next))),
        Seam(torch.autograd, "backward",
             (aside(gradients.backward_aside), RECORDED(recorder.backward), step_log.timed_backward,
              SHARING(sharing.backward), instead(ctx.gradients.backward))),
        Seam(Optimizer, "add_param_group", (ASYNC(phases.add_param_group), step_log.add_param_group)),
        # models
        Seam(nn.Module, "__setattr__", (instead(changes.setattr_),)),
        Seam(nn.Module, hooks, (changes.register_hook,)),
        Seam(torch, "compile", (instead(compiled.compile_),)),
        Seam(F, "dropout dropout1d dropout2d dropout3d", (dropout.patched,)),
        Seam(F, "scaled_dot_product_attention", (instead(dropout.attention),)),
        Seam(torch.utils.checkpoint, "checkpoint", (instead(dropout.checkpoint),)),
        Seam(F, "batch_norm", (instead(batchnorm.batch_norm),)),
        Seam(torch.autograd.Function, "apply", (instead(classmethod(custom_functions.apply)),)),
        Seam(torch.jit.ScriptFunction, "__call__", (instead(custom_functions.scripted),)),
        Seam(torch.inference_mode, "__enter__", (instead(custom_functions.inference_enter),)),
        Seam(torch.inference_mode, "__exit__", (instead(custom_functions.inference_exit),)),
        Seam(torch, "is_inference_mode_enabled", (instead(custom_functions.is_inferring),)),
        Seam(torch.func, _TRANSFORMS, (RECORDED(recorder.transform), custom_functions.on_whole)),
        Seam(torch.func, _OF_VALUES, (RECORDED(recorder.passed_over), custom_functions.on_whole)),
        Seam(torch.func, "functional_call", (custom_functions.functional_call,)),
        Seam(torch.jit, "trace",
             (RECORDED(recorder.jit_trace), ASYNC(weight_reads.of_modules), custom_functions.alike)),
        Seam(torch.jit, "script", (ASYNC(weight_reads.of_modules), custom_functions.script)),
        Seam(torch.jit, "save", (ASYNC(weight_reads.of_modules),)),
        Seam(torch.export, "export", (ASYNC(weight_reads.of_modules),)),
        # loaders
        Seam(DataLoader, "check_worker_number_rationality", (workers.worker_number,)),
        Seam(DataLoader, "__len__", (instead(loaders.loader_len),)),
        Seam(_Iter, "__init__", (instead(loaders.iter_init),)),
        Seam(_Iter, "_reset", (instead(loaders.iter_reset),)),
        Seam(_Iter, "_next_index", (RECORDED(recorder.next_index), instead(loaders.next_index))),
        Seam(dataloader._MultiProcessingDataLoaderIter, "__init__", (instead(workers.workers_init),)),
        Seam(_utils.fetch._MapDatasetFetcher, "fetch", (instead(loaders.fetch),)),
        Seam(_utils.worker, "ManagerWatchdog", (instead(workers.Watchdog),)),
        # rows that leave the main thread
        Seam(threading.Thread, "start", (leaving.started,)),
        Seam(multiprocessing.process.BaseProcess, "start", (leaving.started,)),
        Seam(queue.Queue, "put", (leaving.given_away,)),
        Seam(multiprocessing.queues.Queue, "put", (leaving.given_away,)),
        Seam(concurrent.futures.ThreadPoolExecutor, "submit", (leaving.given_away,)),
        Seam(concurrent.futures.ProcessPoolExecutor, "submit", (leaving.given_away,)),
        Seam(multiprocessing.pool.Pool, "apply_async map_async starmap_async imap imap_unordered map starmap",
             (leaving.given_away,)),
        # gradients
        Seam(nn.Parameter, "__new__", (staticmethod, gradients.parameter_new)),
        Seam(torch.autograd, "grad",
             (aside(torch.autograd.grad), RECORDED(recorder.grad), instead(ctx.gradients.grad))),
        Seam(torch.Tensor, "register_hook", (instead(grad_hooks.register_hook),)),
        Seam(torch.Tensor, "retain_grad", (instead(grad_hooks.retain_grad),)),
        Seam(torch.Tensor, "register_post_accumulate_grad_hook",
             (instead(grad_hooks.register_post_accumulate_grad_hook),)),
        # values that the script reads, weights among them
        Seam(torch.Tensor, "item __float__ __int__", (RECORDED(reads.scalar), ASYNC(weight_reads.of_tensor))),
        Seam(torch.Tensor, "tolist numpy", (RECORDED(reads.array), ASYNC(weight_reads.of_tensor))),
        Seam(torch.Tensor, "cpu", (ASYNC(weight_reads.of_tensor),)),
        Seam(nn.Parameter, "__repr__ __deepcopy__ __reduce_ex__", (ASYNC(weight_reads.of_tensor),)),
        Seam(nn.Module, "state_dict", (ASYNC(phases.meets_at(phases.WEIGHTS)),)),
        Seam(torch.utils.dlpack, "to_dlpack", (tensor.to_dlpack,)),
        Seam(torch, "to_dlpack", (tensor.to_dlpack,)),
        Seam(torch, "save", (guard.saving, ASYNC(phases.meets_at(phases.WEIGHTS)),)),
        Seam(Optimizer, "state_dict", (SERVER(phases.meets_at(phases.WEIGHTS)),)),
        Seam(nn.Module, "load_state_dict", (guard.loading, SERVER(phases.meets_at(phases.EVALUATION)),)),
        Seam(Optimizer, "load_state_dict", (guard.loading, SERVER(phases.meets_at(phases.EVALUATION)),)),
        *_distributed(),
    )
    return seams, (RECORDED(recorder.step_and_hooks), step_log.step_unless_lost), (
        SERVER(ps_worker.push), RECORDED(recorder.step))


def _distributed() -> tuple[Seam, ...]:
    """Scripts that start processes themselves are refused."""
    if not torch.distributed.is_available():
        return ()
    from oars.adapt.torch import refuse_ddp

    return (Seam(torch.distributed.distributed_c10d, "rendezvous", (refuse_ddp.rendezvous,)),
            Seam(torch.multiprocessing, "spawn", (refuse_ddp.spawn,)))


def _pruned() -> tuple[Seam, ...]:
    """``--prune``: the layers around all others."""
    from oars.adapt.torch import pruned_calls

    return (
        Seam(nn.Module, "__call__", (pruned_calls.module_call,)),
        Seam(DataLoader, "__iter__", (pruned_calls.loader_iter,)),
        Seam(_Iter, "__next__", (pruned_calls.iter_next,)),
        Seam(nn.Module, "state_dict", (pruned_calls.state_dict,)),
        Seam(nn.Module, "load_state_dict", (pruned_calls.load_state_dict,)),
        Seam(Optimizer, "state_dict", (pruned_calls.optimizer_state_dict,)),
        Seam(Optimizer, "load_state_dict", (pruned_calls.optimizer_load_state_dict,)),
    )


def _thinned() -> tuple[Seam, ...]:
    """``--samples thin``: the layers around all others."""
    from oars.adapt.torch import thin

    return (
        Seam(DataLoader, "__iter__", (thin.loader_iter,)),
        Seam(BatchSampler, "__iter__", (thin.sampler_iter,)),
        Seam(_Iter, "__next__", (thin.iter_next,)),
        Seam(F, _LOSSES, (thin.loss,)),
    )


def install(modes: Set[Mode]) -> None:
    """Put all layers of these modes in place; ``ctx`` is filled already."""
    lazy_dynamo.put_off()
    around, inside = STEP_AND_HOOKS_OF_ONE_RANK, STEP_OF_ONE_RANK
    seams: tuple[Seam, ...] = ONE_RANK
    if ctx.world is not None:
        from oars.adapt.torch.model import batchnorm

        seams, around, inside = _several_ranks()
        when_imported("torch._dynamo", batchnorm.keep_compiler_out)
    patching.install(seams, modes)
    patching.install(RECORDING, modes)
    if PRUNED in modes:
        patching.install(_pruned(), modes)
    if THINNED in modes:
        patching.install(_thinned(), modes)
    patching.put(torch, "vmap", torch.func.vmap)
    with_hooks: Any = Optimizer.profile_hook_step  # makes of a step one with its hooks
    patching.put(Optimizer, "profile_hook_step", staticmethod(
        lambda step: aside(with_hooks(step))(compose(around, with_hooks(compose(inside, step, modes)), modes))))
    register_optimizer_step_pre_hook(step_log.before_step)
    register_optimizer_step_post_hook(step_log.after_step)
    if PRUNED in modes:
        from oars.adapt.torch import pruned_calls

        register_optimizer_step_post_hook(pruned_calls.after_step)
    if THINNED in modes:
        from oars.adapt.torch import thin

        register_optimizer_step_post_hook(thin.after_step)
    if ASYNC in modes:
        from oars.adapt.torch.async_modes import phases

        register_optimizer_step_pre_hook(phases.before_step)
        register_optimizer_step_post_hook(phases.after_step)
