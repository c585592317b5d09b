"""Does what the tests ask of minisign, on py-minisign: -GW -p PUB -s KEY, -Sm FILE -s KEY, -Vm FILE -p PUB."""
import argparse
import pathlib
import sys

import minisign

parser = argparse.ArgumentParser()
for flag in "GWSV":
    parser.add_argument(f"-{flag}", action="store_true")
for name in "mps":
    parser.add_argument(f"-{name}")
args = parser.parse_args()
if args.G:
    pair = minisign.KeyPair.generate()
    pathlib.Path(args.p).write_bytes(bytes(pair.public_key))
    pathlib.Path(args.s).write_bytes(bytes(pair.secret_key))
elif args.S:
    signature = minisign.SecretKey.from_file(args.s).sign(pathlib.Path(args.m).read_bytes())
    pathlib.Path(args.m + ".minisig").write_bytes(bytes(signature))
else:
    signature = minisign.Signature.from_file(args.m + ".minisig")
    try:
        minisign.PublicKey.from_file(args.p).verify(pathlib.Path(args.m).read_bytes(), signature)
    except minisign.Error as error:
        sys.exit(f"Signature verification failed: {error}")
    print("Signature and comment signature verified\nTrusted comment:", signature.trusted_comment)
