"""TFRecords without TensorFlow: what we write TensorFlow reads, what it writes we read, and damage is told."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oars.data import tfrecord
from oars.data.errors import DataError


def bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksum_is_crc32c():
    assert tfrecord.crc32c(b"123456789") == 0xE3069283 and tfrecord.crc32c(b"") == 0  # the standard's own check value
    rng = random.Random(1)
    for size in (1, 63, 64, 65, 255, 256, 257, 511, 513, 1023, 5000):
        data = rng.randbytes(size)
        assert tfrecord.crc32c(data) == bit_by_bit(data), size


numbers = st.lists(st.integers(-2**63, 2**63 - 1), min_size=1, max_size=5)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=5)
texts = st.lists(st.binary(max_size=300), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=20), st.one_of(numbers, floats, texts), max_size=6))
def test_what_is_written_is_read(example):
    assert tfrecord.decode(tfrecord.encode(example)) == example


def sample(n: int) -> dict:
    boxes = np.array([[0.1, 0.2, 0.5, 0.6], [0, 0, 1, 1]], np.float32)[:n % 3]
    return {"image": bytes([255, 216]) + bytes(range(n)) * 9, "label": n % 4, "class": f"n{n % 4:08d}",
            "name": f"x/{n}.JPEG", "width": 40, "height": 30, "boxes": boxes}


@pytest.fixture
def folder(tmp_path):
    for k in range(3):
        with open(tmp_path / f"train-{k:05d}-of-00003", "wb") as file:
            for n in range(5 * k, 5 * k + 5):
                file.write(tfrecord.record(tfrecord.encode(tfrecord.image_example(sample(n)))))
    return tmp_path


def test_samples_come_back_by_number_with_labels_from_zero(folder):
    reader = tfrecord.Reader(folder)
    assert len(reader) == 15
    for n in (14, 0, 5, 9, 3):
        found, want = reader.sample(n), sample(n)
        assert reader.example(n)["image/class/label"] == [want["label"] + 1]  # as the Inception scripts count
        assert np.allclose(found.pop("boxes"), want.pop("boxes"))
        assert {**found, "name": f"x/{found['name']}"} == {**want, "key": f"{n:08d}"}
    with pytest.raises(IndexError):
        reader.sample(15)


def test_tensorflow_reads_what_we_write_and_we_read_what_it_writes(folder, tmp_path):
    import tensorflow as tf

    theirs = [tf.train.Example.FromString(raw.numpy())
              for raw in tf.data.TFRecordDataset(sorted(map(str, folder.glob("train-*"))))]
    assert len(theirs) == 15
    for n, example in enumerate(theirs):
        feature = example.features.feature
        assert feature["image/encoded"].bytes_list.value[0] == sample(n)["image"]
        assert feature["image/class/label"].int64_list.value[0] == sample(n)["label"] + 1
        assert np.allclose(feature["image/object/bbox/xmin"].float_list.value, sample(n)["boxes"][:, 0])
    with tf.io.TFRecordWriter(str(tmp_path / "theirs.tfrecord")) as writer:
        for example in theirs:
            writer.write(example.SerializeToString())
    ours = list(tfrecord.read(tmp_path / "theirs.tfrecord"))
    assert ours == [tfrecord.Reader(folder).example(n) for n in range(15)]


def test_damage_anywhere_is_told(folder):
    path = folder / "train-00001-of-00003"
    good, data, rng, told = list(tfrecord.read(path)), path.read_bytes(), random.Random(2), 0
    for trial in range(300):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        if trial % 3 == 0:
            del changed[rng.randrange(len(changed)):]
        path.write_bytes(changed)
        try:
            found = list(tfrecord.read(path))
            # Only a cut between two records leaves a file that is sound.
            assert found == good[:len(found)] and changed == data[:len(changed)]
        except DataError as error:
            told += 1
            assert "train-00001-of-00003" in str(error) and "\n" not in str(error)
    assert told > 250


@pytest.mark.parametrize("head", [2**63, 2**40, 2**31])
def test_an_absurd_length_costs_nothing(tmp_path, head):
    length = struct.pack("<Q", head)
    (tmp_path / "x.tfrecord").write_bytes(length + tfrecord.masked(length) + b"abc")
    with pytest.raises(DataError, match="cut off within record 0"):
        tfrecord.Reader(tmp_path / "x.tfrecord")


def test_random_bytes_are_no_example():
    rng = random.Random(4)
    for _ in range(500):
        try:
            tfrecord.decode(rng.randbytes(rng.randrange(60)))
        except DataError:
            pass
