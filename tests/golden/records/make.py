"""Writes columnar files by pyarrow, and beside each its records as tagged JSON lines.

    python3 make.py          in this folder; needs pyarrow and numpy

Tags: {"i": "1"} an integer, {"f": "0x1p+0"} a float, {"t": ""} text, {"y": "00ff"} bytes in hex, [...] a list,
{"m": [["name", value]]} a map, null, true, false. Values come from pyarrow's scalars and numpy's calendar, not from Perilune.
"""

import datetime
import decimal
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

ROWS = 40


def iso(count, unit):
    """ISO text with 0, 3, 6 or 9 digits of a second."""
    text = str(np.datetime_as_string(np.datetime64(count, unit).astype("datetime64[ns]" if unit == "ns" else f"datetime64[{unit}]")))
    whole, _, fraction = text.partition(".")
    fraction = fraction.rstrip("0")
    fraction = fraction.ljust(-(-len(fraction) // 3) * 3, "0")
    return whole + ("." + fraction if fraction else "")


def tagged(s):
    """A pyarrow scalar as tagged JSON."""
    t = s.type
    if pa.types.is_dictionary(t):
        return tagged(s.value) if s.is_valid and s.value is not None else None
    if not s.is_valid:
        return None
    if isinstance(t, pa.RunEndEncodedType):
        return tagged(pa.scalar(s.as_py(), t.value_type))
    if pa.types.is_boolean(t):
        return s.as_py()
    if pa.types.is_integer(t):
        v = s.as_py()
        return {"i": str(v)} if v < 2**63 else {"f": float(v).hex()}
    if pa.types.is_floating(t):
        return {"f": float(s.as_py()).hex()}
    if pa.types.is_decimal(t):
        return {"f": float(s.as_py()).hex()}
    if pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t):
        return {"t": s.as_py()}
    if pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t) or pa.types.is_binary_view(t):
        return {"y": s.as_py().hex()}
    if pa.types.is_date(t):
        return {"t": s.as_py().isoformat()}
    if pa.types.is_time(t):
        return {"t": iso(s.value, t.unit).partition("T")[2]}
    if pa.types.is_timestamp(t):
        return {"t": iso(s.value, t.unit) + ("Z" if t.tz else "")}
    if pa.types.is_duration(t):
        return {"i": str(s.value)}
    if pa.types.is_map(t):
        pairs = list(zip(pa.array([k for k, _ in s.as_py()], t.key_type), pa.array([v for _, v in s.as_py()], t.item_type)))
        if pa.types.is_string(t.key_type):
            return {"m": [[k.as_py(), tagged(v)] for k, v in pairs]}
        return [{"m": [["key", tagged(k)], ["value", tagged(v)]]} for k, v in pairs]
    if pa.types.is_struct(t):
        return {"m": [[f.name, tagged(s[f.name])] for f in t]}
    if pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t):
        return [tagged(v) for v in s.values]
    raise TypeError(t)


def write_expected(name, table):
    with open(name + ".jsonl", "w", encoding="utf-8") as out:
        columns = [table.column(k).combine_chunks() if table.num_rows else None for k in range(table.num_columns)]
        for row in range(table.num_rows):
            record = {"m": [[n, tagged(c[row])] for n, c in zip(table.column_names, columns)]}
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


def column(rng, kind, rows=ROWS, null=0.15):
    """Values of a type, some of them null."""
    edge = {
        "int8": [-128, 127], "int16": [-(2**15), 2**15 - 1], "int32": [-(2**31), 2**31 - 1], "int64": [-(2**63), 2**63 - 1],
        "uint8": [0, 255], "uint16": [0, 2**16 - 1], "uint32": [0, 2**32 - 1], "uint64": [2**63 - 1, 2**63, 2**64 - 1],
        "float": [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40],
        "double": [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1.7976931348623157e308],
        "halffloat": [0.0, -0.0, float("inf"), 6e-8, 65504.0],
    }
    t, name = kind, str(kind)
    words = ["", "a", "Ünïcödé", "😀", "line\nbreak", "x" * 70, "quote\"d", "nul\0byte"]

    def one():
        if rng.random() < null:
            return None
        if pa.types.is_boolean(t):
            return rng.random() < 0.5
        if pa.types.is_integer(t):
            return rng.choice(edge[name]) if rng.random() < 0.3 else rng.randrange(0, 100)
        if pa.types.is_floating(t):
            v = rng.choice(edge[name]) if rng.random() < 0.3 else rng.uniform(-100, 100)
            return np.float16(v) if name == "halffloat" else v
        if pa.types.is_decimal(t):
            return decimal.Decimal(rng.randrange(-(10**9), 10**9)).scaleb(-t.scale)
        if pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t):
            return rng.choice(words)
        if pa.types.is_fixed_size_binary(t):
            return rng.randbytes(t.byte_width)
        if pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t):
            return rng.randbytes(rng.choice([0, 1, 5, 40]))
        if pa.types.is_date(t):
            return datetime.date(1970, 1, 1) + datetime.timedelta(days=rng.randrange(-200_000, 200_000))
        if pa.types.is_time(t):
            per = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[t.unit]
            return rng.choice([0, 1, 86_400 * per - 1, rng.randrange(86_400) * per])
        if pa.types.is_timestamp(t):
            per = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[t.unit]
            return rng.choice([0, -1, rng.randrange(-(2**32), 2**32) * per, rng.randrange(-(2**32) * per, 2**32 * per)])
        if pa.types.is_duration(t):
            return rng.randrange(-(10**9), 10**9)
        raise TypeError(t)

    return pa.array([one() for _ in range(rows)], t)


def lists(rng, make, kind, rows=ROWS):
    """A column of lists, whose items `make` returns for a count."""
    offsets, sizes = [0], []
    for _ in range(rows):
        sizes.append(rng.choice([0, 1, 3]))
        offsets.append(offsets[-1] + sizes[-1])
    items = make(offsets[-1])
    mask = [s == 0 and rng.random() < 0.5 for s in sizes]
    made = pa.LargeListArray if kind == "large" else pa.ListArray
    wide = pa.int64() if kind == "large" else pa.int32()
    return made.from_arrays(pa.array(offsets, wide), items, mask=pa.array(mask))


def flat(rng, parquet):
    kinds = {
        "i8": pa.int8(), "i16": pa.int16(), "i32": pa.int32(), "i64": pa.int64(), "u8": pa.uint8(), "u16": pa.uint16(), "u32": pa.uint32(),
        "u64": pa.uint64(), "f16": pa.float16(), "f32": pa.float32(), "f64": pa.float64(), "bool": pa.bool_(), "text": pa.string(),
        "large_text": pa.large_string(), "bytes": pa.binary(), "large_bytes": pa.large_binary(), "bytes5": pa.binary(5), "dec9": pa.decimal128(9, 2),
        "dec18": pa.decimal128(18, 4), "dec38": pa.decimal128(38, 10), "dec70": pa.decimal256(70, 3), "date": pa.date32(), "date64": pa.date64(),
        "t_ms": pa.time32("ms"), "t_us": pa.time64("us"), "t_ns": pa.time64("ns"), "ts_ms": pa.timestamp("ms"), "ts_us": pa.timestamp("us", "UTC"),
        "ts_ns": pa.timestamp("ns"), "ts_zone": pa.timestamp("ms", "Europe/Berlin"), "none": pa.null(),
    }
    if not parquet:
        kinds |= {"t_s": pa.time32("s"), "ts_s": pa.timestamp("s"), "dur": pa.duration("us"), "view": pa.string_view(), "bview": pa.binary_view()}
    columns = {}
    for name, kind in kinds.items():
        columns[name] = pa.nulls(ROWS) if pa.types.is_null(kind) else column(rng, kind)
    columns["required"] = column(rng, pa.int32(), null=0)
    schema = pa.schema([pa.field(n, c.type, nullable=n != "required") for n, c in columns.items()])
    return pa.table(list(columns.values()), schema=schema)


def nested(rng):
    ints = lists(rng, lambda n: column(rng, pa.int32(), n), "small")
    deep = lists(rng, lambda n: lists(rng, lambda m: column(rng, pa.string(), m), "small", n), "large")
    point = pa.StructArray.from_arrays([column(rng, pa.float64()), column(rng, pa.string())], ["x", "label"], mask=column(rng, pa.bool_(), null=0))
    messages = lists(rng, lambda n: pa.StructArray.from_arrays([column(rng, pa.string(), n, 0), column(rng, pa.string(), n)], ["role", "content"]), "small")
    fixed = pa.FixedSizeListArray.from_arrays(column(rng, pa.float32(), ROWS * 3), 3)
    named = pa.array([[(f"k{j}", j) for j in range(rng.randrange(4))] if rng.random() < 0.8 else None for _ in range(ROWS)], pa.map_(pa.string(), pa.int64()))
    by_number = pa.array([[(j, f"v{j}") for j in range(1, 1 + rng.randrange(1, 3))] for _ in range(ROWS)], pa.map_(pa.int32(), pa.string()))
    words = column(rng, pa.string()).dictionary_encode()
    image = pa.StructArray.from_arrays([column(rng, pa.binary()), column(rng, pa.string())], ["bytes", "path"])
    return pa.table({"ints": ints, "deep": deep, "point": point, "messages": messages, "fixed": fixed, "named": named, "by_number": by_number, "words": words, "image": image})


def small(rng, rows=200):
    return pa.table({"id": pa.array(range(rows), pa.int64()), "text": [f"row {k} " + "ab" * rng.randrange(20) for k in range(rows)], "score": column(rng, pa.float64(), rows)})


def main():
    rng = random.Random(7)
    table = flat(rng, True)
    pq.write_table(table, "flat.parquet", row_group_size=17, version="2.6", write_batch_size=8)
    write_expected("flat.parquet", table)
    table = nested(rng)
    pq.write_table(table, "nested.parquet", row_group_size=17, compression="zstd", data_page_size=200)
    write_expected("nested.parquet", table)
    table = small(rng)
    for codec in ["none", "snappy", "gzip", "zstd", "lz4"]:
        version = "2.0" if codec in ("zstd", "none") else "1.0"
        pq.write_table(table, f"{codec}.parquet", compression=codec, row_group_size=60, data_page_version=version)
    write_expected("codecs.parquet", table)
    pq.write_table(table, "gzip_v2.parquet", compression="gzip", row_group_size=60, data_page_version="2.0", data_page_size=300)
    pq.write_table(table.slice(0, 20), "brotli.parquet", compression="brotli")
    encodings = {"id": "DELTA_BINARY_PACKED", "text": "DELTA_BYTE_ARRAY", "score": "BYTE_STREAM_SPLIT"}
    pq.write_table(table, "encodings.parquet", use_dictionary=False, column_encoding=encodings, compression="none")
    old = pa.table({"when": pa.array([0, 1, -1, 10**18], pa.timestamp("ns")), "text": ["a", None, "b", "c"]})
    pq.write_table(old, "int96.parquet", use_deprecated_int96_timestamps=True, column_encoding={"text": "DELTA_LENGTH_BYTE_ARRAY"}, use_dictionary=False)
    write_expected("int96.parquet", old)
    pq.write_table(table.slice(0, 0), "empty.parquet")

    table = flat(rng, False)
    with ipc.new_stream("flat_stream.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=17)
    with ipc.new_file("flat_file.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=17)
    write_expected("flat.arrow", table)
    table = nested(rng)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([10, 11, ROWS], pa.int32()), pa.array(["p", None, "q"]))
    table = table.append_column("runs", pa.chunked_array([runs]))
    for codec in ["lz4", "zstd"]:
        with ipc.new_file(f"nested_{codec}.arrow", table.schema, options=ipc.IpcWriteOptions(compression=codec)) as out:
            out.write_table(table, max_chunksize=19)
    write_expected("nested.arrow", table)
    # A stream whose dictionary is extended by deltas, then replaced.
    parts = [["a", "b"], ["a", "b", "c"], ["z", "y"]]
    batches = [pa.record_batch({"word": pa.DictionaryArray.from_arrays(pa.array([k % len(p) for k in range(5)], pa.int8()), pa.array(p))}) for p in parts]
    with ipc.new_stream("dictionaries.arrow", batches[0].schema, options=ipc.IpcWriteOptions(emit_dictionary_deltas=True)) as out:
        for batch in batches:
            out.write_batch(batch)
    write_expected("dictionaries.arrow", pa.table({"word": pa.concat_arrays([b.column(0).cast(pa.string()) for b in batches])}))
    with ipc.new_stream("empty.arrow", table.schema):
        pass


main()
