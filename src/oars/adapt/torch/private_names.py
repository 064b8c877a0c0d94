"""What PyTorch does not promise to keep and this package uses, and what breaks without each.

A name is private if it has an underscore, or if it is on no page of PyTorch's documentation.
``tests/properties/test_private_names.py`` checks that all of them are in the PyTorch that is installed, and that no
other with an underscore is used. With another version of PyTorch: run that test first, then ``make test-versions
TORCH=…``, then change ``TESTED``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

TESTED = ((2, 7), (2, 13))  # the oldest and the newest version that the tests were run with


class Private(NamedTuple):
    """Names in one place of PyTorch, and what does not work without them."""

    place: str  # what is imported, or in brackets what a script makes
    names: str
    without: str


ITERATOR, WORKERS, SCALER, MODULE, FUNCTION = (
    "(iterator of a DataLoader)", "(iterator with workers)", "(GradScaler)", "(Module)", "(autograd.Function)")
STORAGE, STATE_DICT, COMPILED = "(storage)", "(state_dict)", "(compiled module)"

NAMES = (
    # rows of a batch
    Private("torch.Tensor", "_make_wrapper_subclass", "Rows and placeholders: nothing can be split, nothing resumed"),
    Private("torch.Tensor", "_base _version _backward_hooks _post_accumulate_grad_hooks _is_view",
            "Rows would not answer like a tensor; changes of a data set's tensors in place would not be seen"),
    Private("torch._C", "DisableTorchFunction", "own rows could not be computed on without coming back to Rows"),
    Private("torch._C", "_len_torch_function_stack _pop_torch_function_stack _push_on_torch_function_stack",
            "a script's own TorchFunctionMode would see what is ours"),
    Private("torch._C", "_len_torch_dispatch_stack", "a script's own TorchDispatchMode would count own rows only"),
    Private("torch._C", "_are_functorch_transforms_active", "torch.func.grad and vmap would meet Rows, and fail"),
    Private("torch.nn._reduction", "legacy_get_string", "losses with size_average or reduce would be gathered"),
    Private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack", "the same"),
    Private("torch.utils._python_dispatch", "_disable_current_modes", "the same as of the dispatch stack"),
    Private("torch._prims_common", "suggest_memory_format", "gathered images would lose channels_last"),
    Private("torch.utils._pytree", "tree_flatten tree_unflatten tree_leaves tree_map TreeSpec",
            "arguments and results of models: nothing can be split"),
    # gradients
    Private("torch._C.TensorBase", "grad", "gradients could not be read past what notes the script's reads"),
    Private("torch._C.TensorBase", "numpy", "weights could not be compared past what records the script's reads"),
    Private("torch._C._functions", "AccumulateGrad", "leaves of a graph could not be known from what is computed"),
    Private(FUNCTION, "_backward_cls", "what crosses ranks in a graph could not be found again after a death"),
    Private("torch", "_foreach_copy_ _foreach_norm", "gradients could not be copied at once; no norm in the record"),
    Private("torch.optim.Optimizer", "profile_hook_step", "no step is seen: nothing is recorded, counted or repeated"),
    Private("torch._compile", "_disable_dynamo", "the start takes seconds longer: PyTorch imports its compiler"),
    Private(SCALER, "_scale _growth_tracker", "a resumed run would begin with another scale"),
    # models
    Private("torch.nn.Module", "_call_impl _wrapped_call_impl", "no call of a model is seen: nothing is split"),
    Private(MODULE, "_parameters _buffers", "weights of a snapshot could not be put back"),
    Private(MODULE, "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _compiled_call_impl",
            "hooks of the script's would see own rows only"),
    Private("torch.nn.modules.module", "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks "
            "_global_backward_pre_hooks", "the same for hooks of all modules"),
    Private("torch.nn.modules.batchnorm", "_BatchNorm _NormBase", "--prune and --widen would leave these layers out"),
    Private("torch.nn.modules.conv", "_ConvNd", "the same"),
    Private(COMPILED, "_orig_mod", "models given to torch.compile could not be traced"),
    Private(STATE_DICT, "_metadata", "with --prune a checkpoint would forget its versions"),
    Private(STORAGE, "_cdata", "with --sync server, reads of weights would not be recognised"),
    # loaders
    Private("torch.utils.data.dataloader", "_BaseDataLoaderIter _MultiProcessingDataLoaderIter _DatasetKind",
            "loaders could not be cut: every rank reads all samples"),
    Private("torch.utils.data.dataloader._BaseDataLoaderIter", "_next_index _reset", "the same"),
    Private("torch.utils.data.DataLoader", "_get_iterator _index_sampler check_worker_number_rationality",
            "a resumed epoch could not go on in its middle"),
    Private("torch.utils.data._utils.fetch", "_MapDatasetFetcher", "the same as of the iterators"),
    Private("torch.utils.data._utils.worker", "ManagerWatchdog WorkerInfo", "workers would not end with their rank"),
    Private("torch.utils.data._utils.collate", "default_collate default_convert", "batches could not be distinguished"),
    Private(ITERATOR, "_auto_collation _base_seed _collate_fn _dataset_kind _drop_last _index_sampler _num_workers "
            "_sampler_iter", "the same as of the iterators"),
    Private(WORKERS, "_index_queues _rcvd_idx _shutdown_workers _workers", "the same, with workers"),
    Private("(DataLoader)", "_dataset_kind _iterator", "a resumed run could not find its place in an epoch"),
    Private("torch._utils", "ExceptionWrapper", "an error in a worker would not have the text of one process"),
    # processes
    Private("torch.distributed.distributed_c10d", "rendezvous", "scripts that start processes would not be refused"),
)
# Asked for, and done without: the compiler's, Keras', and what only older versions have (2.7; not 2.13).
MAYBE = "_torchdynamo_orig_callable _torch_params _NoopSaveInputs"


def missing() -> Iterator[Private]:
    """What this PyTorch does not have, of all that can be looked up without making anything."""
    import importlib

    for place, names, without in NAMES:
        if place.startswith("("):
            continue
        module, found = place, None
        while found is None and module:
            try:
                found = importlib.import_module(module)
            except ImportError:
                module = module.rpartition(".")[0]
        gone = [name for name in names.split() if not has(found, place.removeprefix(module).strip("."), name)]
        if gone:
            yield Private(place, " ".join(gone), without)


def has(found: Any, path: str, name: str) -> bool:
    """Whether ``found.path.name`` is there."""
    for part in [*path.split("."), name] if path else [name]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def outside(torch: ModuleType) -> str:
    """One line if this PyTorch is older or newer than those that were tested; else nothing."""
    version = torch.__version__.partition("+")[0]
    first, second = (int(part) for part in version.split(".")[:2])
    oldest, newest = (".".join(map(str, tested)) for tested in TESTED)
    if TESTED[0] <= (first, second) <= TESTED[1]:
        return ""
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    text = (f"PyTorch {version} is not a version that oars was tested with ({tested}): check the training with "
            "oars verify")
    gone = [f"{place}.{name}" for place, names, _ in missing() for name in names.split()]
    return f"{text}; it has no {', '.join(gone)}" if gone else text
