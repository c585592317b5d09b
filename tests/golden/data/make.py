"""Writes the golden files of this folder with reference libraries: NumPy, safetensors, PyTorch (for bf16), and
PNG by the standard library. Run it in an environment with these three; the files are committed."""

import pathlib
import struct
import zlib

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent


def arrays():
    signed, plain = np.arange(-2, 4).reshape(2, 3), np.arange(6).reshape(2, 3)
    for code in ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "u4"]:
        np.save(HERE / f"le_{code}.npy", (plain if code[0] == "u" else signed).astype("<" + code))
    for code in ["f8", "f4", "i2", "u4"]:
        np.save(HERE / f"be_{code}.npy", (plain if code[0] == "u" else signed).astype(">" + code))
    np.save(HERE / "fortran_f4.npy", np.asfortranarray(signed.astype("<f4")))
    np.save(HERE / "fortran_be_i8.npy", np.asfortranarray(signed.astype(">i8")))
    np.save(HERE / "fortran_3d_u2.npy", np.asfortranarray(np.arange(65500, 65524).reshape(2, 3, 4).astype("<u2")))
    for version in (2, 3):
        with open(HERE / f"version{version}_f4.npy", "wb") as out:
            npy.write_array(out, signed.astype("<f4"), version=(version, 0))
    np.save(HERE / "bool.npy", np.eye(2, dtype=bool))
    np.save(HERE / "wide_u4.npy", np.array([0, 2**32 - 1], "<u4"))
    np.save(HERE / "scalar.npy", np.float32(2.5))
    np.save(HERE / "u8.npy", np.array([2**63], "<u8"))
    np.save(HERE / "text.npy", np.array(["ab"]))
    np.save(HERE / "object.npy", np.array([None], dtype=object), allow_pickle=True)
    np.save(HERE / "record.npy", np.zeros(2, dtype=[("a", "<f4"), ("b", "<i4")]))
    parts = dict(x=plain.astype("<f4"), y=np.array([3, 1, 2]), zeros=np.zeros((64, 64)))
    np.savez(HERE / "stored.npz", **{**parts, "zeros": np.zeros((64, 64), "u1")})
    np.savez_compressed(HERE / "deflated.npz", **parts)


def tensors():
    plain = torch.arange(6).reshape(2, 3)
    dtypes = dict(f64=torch.float64, f32=torch.float32, f16=torch.float16, bf16=torch.bfloat16, i64=torch.int64,
                  i32=torch.int32, u8=torch.uint8)
    out = {f"m.{name}": plain.to(dtype) for name, dtype in dtypes.items()}
    out["m.bool"] = torch.tensor([False, True, True])
    out["m.empty"] = torch.zeros(0, 4)
    out["m.scalar"] = torch.tensor(2.5)
    save_file(out, HERE / "mixed.safetensors", metadata={"made_by": "make.py"})


def png(name, width, height, depth, color, rows, extra=()):
    """`rows` are packed scanlines without filter bytes; `extra` holds (type, data) chunks before IDAT."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    ihdr = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = b"".join(b"\0" + row for row in rows)
    chunks = [(b"IHDR", ihdr), *extra, (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")]
    (HERE / name).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in chunks))


def images():
    png("grey8.png", 3, 2, 8, 0, [bytes([0, 1, 2]), bytes([253, 254, 255])])
    png("grey16.png", 2, 1, 16, 0, [struct.pack(">HH", 0x1234, 0xFFFF)])
    png("grey1.png", 3, 1, 1, 0, [bytes([0b10100000])])
    png("grey_alpha8.png", 2, 1, 8, 4, [bytes([10, 20, 30, 40])])
    png("rgb8.png", 2, 1, 8, 2, [bytes([1, 2, 3, 4, 5, 6])])
    png("rgb16.png", 1, 1, 16, 2, [struct.pack(">HHH", 0x0102, 0x0304, 0x0506)])
    png("rgba8.png", 1, 2, 8, 6, [bytes([1, 2, 3, 4]), bytes([5, 6, 7, 8])])
    palette = (b"PLTE", bytes([9, 8, 7, 1, 2, 3, 255, 0, 0]))
    png("palette2.png", 3, 1, 2, 3, [bytes([0b00011000])], [palette])
    png("palette_alpha8.png", 2, 1, 8, 3, [bytes([1, 2])], [palette, (b"tRNS", bytes([255, 7]))])


if __name__ == "__main__":
    arrays()
    tensors()
    images()
