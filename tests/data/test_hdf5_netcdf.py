"""HDF5 and NetCDF: layouts, chunks, what numbers mean; numbers are compared with those of h5py and netCDF4."""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import netCDF4
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oars.data
from oars.data.errors import DataError

FILTERS = [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"},
           {"shuffle": True, "fletcher32": True}, {"compression": "gzip", "shuffle": True, "fletcher32": True}]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), shape=st.sampled_from([(), (5,), (3, 4)]), chunk=st.integers(1, 9),
       inner=st.integers(1, 4), kind=st.sampled_from(["<f4", ">i2", "u1", "<f8", "bool", "S3"]),
       filters=st.sampled_from(FILTERS), data=st.data())
def test_chunks_of_any_shape_and_filter_are_read(tmp_path_factory, rows, shape, chunk, inner, kind, filters, data):
    path = tmp_path_factory.mktemp("h") / "a.h5"
    whole = np.random.default_rng(rows).integers(0, 100, (rows, *shape)).astype(kind)
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (rows, *shape), kind, chunks=(chunk, *(min(inner, size) for size in shape)),
                                   maxshape=(None, *shape), fillvalue=whole.dtype.type(7), **filters)
        written = rows - rows // 3  # the others hold the fill value
        made[:written] = whole[:written]
        expected = made[()]
    found = oars.data.open(path)
    if whole.dtype.kind == "S":
        expected = np.array([value.decode() for value in expected.reshape(-1)], object).reshape(expected.shape)
    np.testing.assert_array_equal(found.numpy(), expected)
    some = data.draw(st.lists(st.integers(0, max(0, rows - 1)), max_size=12)) if rows else []
    assert len(some) == len(found.__getitems__(some))
    for row, sample in zip(some, found.__getitems__(some), strict=True):
        np.testing.assert_array_equal(sample, expected[row])


def test_several_named_sets_are_columns(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["masks"] = np.zeros((6, 4, 4), np.uint8), np.ones((6, 4, 4), bool)
        file["kind"] = np.array([b"cat", b"dog"] * 3)
        file["meta/long"] = np.arange(9)
    with pytest.raises(DataError, match=r"different lengths .*images \(6, 4, 4\).*meta/long \(9,\).*columns="):
        oars.data.open(tmp_path / "a.h5")
    data = oars.data.open(tmp_path / "a.h5", columns=["images", "masks"], label="kind")
    assert data.shape == {"images": (6, 4, 4), "masks": (6, 4, 4)} and data.classes == ["cat", "dog"]
    x, y = data[1]
    assert x["images"].dtype == np.uint8 and x["masks"].all() and y == 1
    assert len(oars.data.open(tmp_path / "a.h5", group="meta")) == 9
    with pytest.raises(DataError, match="no group 'train' with data sets in it; there is meta"):
        oars.data.open(tmp_path / "a.h5", group="train")
    with pytest.raises(DataError, match="no data set z; there is images, kind, masks, meta/long"):
        oars.data.open(tmp_path / "a.h5", columns=["z"])


def test_sets_of_different_lengths_and_one_kind_are_classes(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["dog"], file["cat"] = np.full((3, 2), 1.0), np.full((5, 2), 2.0)
    data = oars.data.open(tmp_path / "a.h5")
    assert data.classes == ["cat", "dog"] and data.numpy()[1].tolist() == [0] * 5 + [1] * 3
    assert data.numpy()[0][:, 0].tolist() == [2.0] * 5 + [1.0] * 3


def test_links_compound_rows_and_huge_rows(tmp_path):
    pair = np.array([(1, [2.0, 3.0]), (4, [5.0, 6.0])], [("a", "i4"), ("b", "f8", (2,))])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["pair"] = pair
        file["here"] = h5py.SoftLink("/pair")
        file["gone"] = h5py.SoftLink("/nothing")
        file["other"] = h5py.ExternalLink("/etc/passwd", "/x")
        file["loop"] = h5py.SoftLink("/")
        file["huge"] = np.arange(2 * 3_000_000).reshape(2, -1)
    data = oars.data.open(tmp_path / "a.h5", columns=["pair", "huge"])
    assert data[1]["pair"]["b"].tolist() == [5.0, 6.0] and data[1]["huge"][-1] == 5_999_999


def test_the_file_is_not_open_before_a_row_is_read(tmp_path):
    path = (tmp_path / "a.h5").resolve()
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((9, 2)), chunks=(3, 2), compression="lzf")

    def open_here():
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]

    data = oars.data.open(tmp_path / "a.h5")
    assert not open_here()
    data[0]
    assert open_here()


def test_a_crash_of_the_library_is_one_line_about_the_file(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3)
    monkeypatch.setattr("oars.data.hdf5.look", lambda path: os.kill(os.getpid(), 11))
    with pytest.raises(DataError, match=r"a.h5: damaged: it crashes the library that reads it \(signal 11\)"):
        oars.data.open(tmp_path / "a.h5")
    monkeypatch.setattr("oars.data.hdf5.look", lambda path: np.ones(1 << 34))
    with pytest.raises(DataError, match="a.h5: damaged .*allocate"):
        oars.data.open(tmp_path / "a.h5")


def test_a_crash_of_the_library_is_no_crash_of_the_rank(tmp_path):
    """A rank writes down its own crash (``fatal-<rank>``), not that of the child that looks at a file."""
    code = f"""if True:
        import faulthandler, os
        from oars.data.errors import DataError
        from oars.data.guard import ask
        faulthandler.enable(open({str(tmp_path / "fatal")!r}, "wb", buffering=0))
        try:
            ask("a.h5", lambda path: os.kill(os.getpid(), 11))
        except DataError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "a.h5: damaged: it crashes the library that reads it (signal 11)\n", done.stderr
    assert (tmp_path / "fatal").read_bytes() == b""


# ---- NetCDF ----------------------------------------------------------------------------------------------------------

FORMS = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA", "NETCDF4", "NETCDF4_CLASSIC"]


def weather(path, form, rows=11):
    """Packed, missing, unsigned, text; interleaved records of odd sizes; fixed variables beside them."""
    rng = np.random.default_rng(0)
    with netCDF4.Dataset(path, "w", format=form) as file:
        for name, size in (("time", None), ("lat", 3), ("lon", 5), ("letters", 6), ("station", 4)):
            file.createDimension(name, size)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(rows)
        packed = file.createVariable("t2m", "i2", ("time", "lat", "lon"), fill_value=-32767)
        packed.scale_factor, packed.add_offset = 0.01, 273.15
        packed[:] = np.ma.masked_less(rng.normal(280, 5, (rows, 3, 5)), 275)
        rain = file.createVariable("rain", "f4", ("time", "lat"))
        rain[: rows - 1] = rng.random((rows - 1, 3))
        rain[rows - 1, 0] = 1.0  # the others of this record are never written
        odd = file.createVariable("odd", "i1", ("time", "lat"))
        odd.setncattr("_Unsigned", "true")
        odd.set_auto_maskandscale(False)
        odd[:] = rng.integers(-128, 128, (rows, 3)).astype("i1")
        count = file.createVariable("count", "i4", ("time",), fill_value=-1)
        count[:] = np.ma.masked_equal(np.arange(rows) % 4, 3)
        name = file.createVariable("name", "S1", ("time", "letters"))
        name[:] = np.array([f"día{at}".encode() for at in range(rows)], "S6").view("S1").reshape(rows, 6)
        file.createVariable("height", "f4", ("station", "lat"))[:] = rng.random((4, 3))


@pytest.mark.parametrize("form", FORMS)
def test_numbers_mean_what_netcdf4_says(tmp_path, form):
    weather(tmp_path / "a.nc", form)
    data = oars.data.open(tmp_path / "a.nc")
    assert data.columns == ["time", "t2m", "rain", "odd", "count", "name"] or sorted(data.columns) == sorted(
        ["time", "t2m", "rain", "odd", "count", "name"])
    ours = data.numpy()
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        for name in ("time", "t2m", "rain", "odd", "count"):
            theirs = np.ma.filled(file[name][:].astype(float), np.nan)
            np.testing.assert_allclose(ours[name].astype(float), theirs, rtol=1e-6)
    assert ours["name"].tolist() == [f"día{at}" for at in range(11)]
    assert ours["t2m"].dtype == np.float64 and ours["rain"].dtype == np.float32 and ours["odd"].dtype == np.uint8
    for row in (10, 3):
        np.testing.assert_array_equal(data[row]["t2m"], ours["t2m"][row])
    np.testing.assert_array_equal([sample["count"] for sample in data[2:9:3]], ours["count"][2:9:3])


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_lie_along_another_dimension(tmp_path, form):
    weather(tmp_path / "a.nc", form)
    data = oars.data.open(tmp_path / "a.nc", along="station")
    assert data.columns == ["height"] and data.shape == (4, 3)
    with pytest.raises(DataError, match="dimensions: .*lat.*station"):
        oars.data.open(tmp_path / "a.nc", along="nowhere")
    with pytest.raises(DataError, match="height is not along dimension time"):
        oars.data.open(tmp_path / "a.nc", columns=["t2m", "rain", "height"])


def test_a_lone_record_variable_has_no_padding(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("n", None)
        file.createDimension("k", 3)
        file.createVariable("x", "i1", ("n", "k"))[:] = np.arange(21).reshape(7, 3)
    np.testing.assert_array_equal(oars.data.open(tmp_path / "a.nc").numpy(), np.arange(21).reshape(7, 3))


def test_a_header_of_absurd_size_is_refused(tmp_path):
    weather(tmp_path / "a.nc", "NETCDF3_64BIT_DATA")
    raw = bytearray((tmp_path / "a.nc").read_bytes())
    raw[4:12] = (1 << 60).to_bytes(8, "big")  # the number of records
    (tmp_path / "a.nc").write_bytes(raw)
    with pytest.raises(DataError, match=r"1152921504606846976 rows .* but the file ends at"):
        oars.data.open(tmp_path / "a.nc")
