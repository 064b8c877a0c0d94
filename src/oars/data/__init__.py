"""Files become rows: ``oars.data.open("events.csv", label="class")`` (docs/data.md).

This room knows nothing of ranks. A loader asks for the rows of its batches, under ``oars run`` for this rank's alone,
and a reader reads these and no others. Readers (``csv.py``, ``hdf5.py``, ``netcdf.py``, ...) are files as rows by
number; ``dataset.py`` makes samples of rows; ``kinds.py`` tells which reader a file needs. Heavy packages are imported
when a file needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from oars.data.errors import DataError

if TYPE_CHECKING:
    from oars.data.dataset import Data

__all__ = ["DataError", "open"]


def open(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    label: Any = None,
    columns: Sequence[Any] | None = None,
    dtype: Any = None,
    on_bad: str = "raise",
    delimiter: str | None = None,
    header: bool | None = None,
    types: dict[Any, Any] | None = None,
    group: str | None = None,
    layout: str | None = None,
    along: str | None = None,
    labels: str | PathLike[str] | None = None,
    how: Sequence[str] | None = None,
) -> Data:
    """The rows of a file, of a folder, of all files that fit a pattern, or of a list of files.

    ``label``: the column (by name or number, or a list) that is the second half of each sample. ``columns``: use these
    and no others. ``dtype``: make numbers this type. ``on_bad``: ``raise``, ``skip`` or ``quarantine`` rows that cannot
    be read. CSV: ``delimiter``, ``header`` and ``types`` (by column) are found out unless given. HDF5: ``group``;
    ``layout``, ``columns`` or ``classes`` (one data set per class). NetCDF: the dimension ``along`` which rows are.
    ``labels``: a file of ``oars label --export``; only rows with a label given in one of the ways ``how`` (human, page,
    audit, model; or exam, to test with) are there, and this label is the second half of each sample.

    >>> data = oars.data.open("events.csv", label="class", dtype="float32")
    >>> train, test = data.split(0.8, 0.2)
    >>> loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
    """
    from oars.data.opening import open_data

    given = {"delimiter": delimiter, "header": header, "types": types, "group": group, "layout": layout, "along": along}
    return open_data(path, columns, label, dtype, on_bad, given, labels, how)
