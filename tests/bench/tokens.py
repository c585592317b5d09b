"""Measures the speed of encoding: Perilune, tiktoken and tokenizers with one vocabulary, trained here.

    python3 -m venv /tmp/bench && /tmp/bench/bin/pip install tiktoken tokenizers blake3
    cargo build --release -p perilune-tokenizer --example encode_speed
    /tmp/bench/bin/python tests/bench/tokens.py [TEXT_FILE ...]

Trains a byte-level BPE of 32,000 ids by each pattern on the files (recipes/data/alice.txt by default), cuts them into texts of some
kilobytes, and prints megabytes per second on one thread and on all, best of several rounds in one run. The ids have to be equal.
"""

import json, os, pathlib, subprocess, sys, tempfile, time
import blake3, tiktoken, tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).parents[2]
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
ROUNDS = 5


def vocabulary(pattern, texts, folder):
    found = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=32000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    found.train_from_iterator(texts, trainer)
    path = folder / "tokenizer.json"
    found.save(str(path))
    # tokenizers' own expression engine splits as it saved it; ours reads the same file.
    return found, path


def alphabet():
    """The character that byte-level BPE writes for each byte."""
    known = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in known]
    return {chr(b): b for b in known} | {chr(256 + k): b for k, b in enumerate(rest)}


def rival(found, pattern):
    """tiktoken with the same vocabulary: its ranks are the ids, which a trained vocabulary has in the order of merges."""
    table = alphabet()
    ranks = {bytes(table[c] for c in token): id for token, id in found.get_vocab().items()}
    return tiktoken.Encoding("same", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def best(f):
    least, last = float("inf"), None
    for _ in range(ROUNDS):
        start = time.perf_counter()
        last = f()
        least = min(least, time.perf_counter() - start)
    return least, last


def digest(ids):
    hash = blake3.blake3()
    for one in ids:
        hash.update(b"".join(id.to_bytes(4, "little") for id in one))
    return hash.hexdigest()


def main():
    files = [pathlib.Path(f) for f in sys.argv[1:]] or [ROOT / "recipes/data/alice.txt"]
    whole = "".join(f.read_text(encoding="utf-8") for f in files)
    whole *= max(1, 20_000_000 // len(whole))
    texts = [whole[k : k + 4000] for k in range(0, len(whole), 4000)]
    threads = len(os.sched_getaffinity(0))
    print(f"{sum(len(t.encode()) for t in texts) / 1e6:.1f} MB in {len(texts)} texts, MB/s on 1 thread and on {threads}")
    for name, pattern in PATTERNS.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            found, path = vocabulary(pattern, texts[: 4_000_000 // 4000], folder)
            (folder / "texts").write_text("".join(json.dumps(t) + "\n" for t in texts))
            command = [ROOT / "target/release/examples/encode_speed", path, folder / "texts", str(ROUNDS)]
            ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            same = rival(found, pattern)
            tik_one, tik_ids = best(lambda: [same.encode_ordinary(t) for t in texts])
            tik_all, _ = best(lambda: same.encode_ordinary_batch(texts, num_threads=threads))
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            hf_one, hf = best(lambda: found.encode_batch_fast(texts))
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
            hf_all, _ = best(lambda: found.encode_batch_fast(texts))
            hashes = {"Perilune": ours["ids"], "tiktoken": digest(tik_ids), "tokenizers": digest([e.ids for e in hf])}
            assert ours["fast"] and len(set(hashes.values())) == 1, hashes
            mb = ours["bytes"] / 1e6
            for who, one, all in [("Perilune", ours["one"], ours["all"]), ("tiktoken", tik_one, tik_all), ("tokenizers", hf_one, hf_all)]:
                print(f"{name:7} {who:10} {mb / one:8.1f} {mb / all:8.1f}")


main()
