"""Numbers, fields and records as protocol buffers and TFRecord files write them: what TensorBoard's events, TFRecord
files of images and the tape are made of. Knows bytes only, and imports nothing heavy."""

from __future__ import annotations

import struct
from collections.abc import Callable


def varint(value: int) -> bytes:
    """A number from 0 on, seven bits a byte."""
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, content: bytes) -> bytes:
    """A field of a message that holds bytes."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = _table()


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C (Castagnoli) of a few bytes; ``oars.data.tfrecord`` has one for many."""
    crc = 0xFFFFFFFF
    for byte in bytes(data):
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> bytes:
    """A checksum as it stands in a file: rotated and shifted."""
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes, crc: Callable[[bytes], int] = crc32c) -> bytes:
    """A record: a length, the length's checksum, the bytes, their checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, masked(crc32c(length)), data, masked(crc(data))))
