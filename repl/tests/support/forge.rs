//! A forger who knows the format: edits a run directory and computes all its hashes and seals again.
#![allow(dead_code, clippy::unwrap_used)]

use perilune_checkpoint::seal::{Chain, LINE_SEAL, seal, unseal};
use perilune_data::sample_log::{Entry, SampleLog, decode};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

const SAMPLES: &str = "samples.bin";

pub struct Forger {
    pub dir: PathBuf,
}

fn hash_of(path: &Path) -> String {
    blake3::hash(&fs::read(path).unwrap()).to_hex().to_string()
}

/// Edits a sealed record.
fn edit(path: &Path, f: impl FnOnce(&mut Map<String, Value>)) {
    let text = fs::read_to_string(path).unwrap();
    let mut record: Map<String, Value> = serde_json::from_str(&text).unwrap();
    unseal(&mut record, &text).unwrap();
    f(&mut record);
    fs::write(path, seal(record)).unwrap();
}

impl Forger {
    /// Copies the run `from` to `to`, to be edited there.
    pub fn copy(from: &Path, to: &Path) -> Forger {
        let status = std::process::Command::new("cp").arg("-r").args([from, to]).status().unwrap();
        assert!(status.success());
        Forger { dir: to.to_path_buf() }
    }

    fn checkpoint(&self, step: u64) -> PathBuf {
        self.dir.join(format!("checkpoints/step-{step}"))
    }

    /// Lists the steps of the checkpoints.
    pub fn checkpoints(&self) -> Vec<u64> {
        let names = fs::read_dir(self.dir.join("checkpoints")).unwrap().flatten().map(|e| e.file_name());
        let mut out: Vec<u64> = names.filter_map(|n| n.to_str()?.strip_prefix("step-")?.parse().ok()).collect();
        out.sort_unstable();
        out
    }

    /// Edits `run.json`.
    pub fn record(&self, f: impl FnOnce(&mut Map<String, Value>)) {
        edit(&self.dir.join("run.json"), f);
    }

    pub fn get(&self, key: &str) -> Value {
        let text = fs::read_to_string(self.dir.join("run.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()[key].clone()
    }

    /// Edits the record of a checkpoint, with the hashes of its files as they are now.
    pub fn checkpoint_record(&self, step: u64, f: impl FnOnce(&mut Map<String, Value>)) {
        let dir = self.checkpoint(step);
        edit(&dir.join("run.json"), |record| {
            f(record);
            let files = record.get_mut("files").and_then(Value::as_object_mut).unwrap();
            for (name, entry) in files {
                let path = dir.join(name);
                *entry = json!({ "bytes": fs::metadata(&path).unwrap().len(), "blake3": hash_of(&path) });
            }
        });
    }

    /// Puts the checkpoint of one step in the place of another.
    pub fn replace_checkpoint(&self, step: u64, by: u64) {
        for file in ["model.safetensors", "optimizer.safetensors"] {
            fs::copy(self.checkpoint(by).join(file), self.checkpoint(step).join(file)).unwrap();
        }
        self.checkpoint_record(step, |_| ());
    }

    /// Edits the bytes of a tensor of a checkpoint: `file` is `model` or `optimizer`.
    pub fn tensor(&self, step: u64, file: &str, name: &str, f: impl FnOnce(&mut [u8])) {
        let path = self.checkpoint(step).join(format!("{file}.safetensors"));
        let mut bytes = fs::read(&path).unwrap();
        let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..head]).unwrap();
        let at = |k: usize| {
            let offset = header[name]["data_offsets"][k].as_u64();
            head + offset.unwrap_or_else(|| panic!("{name} is not in {header}")) as usize
        };
        let (from, to) = (at(0), at(1));
        f(&mut bytes[from..to]);
        fs::write(&path, bytes).unwrap();
        self.checkpoint_record(step, |_| ());
    }

    /// Makes `weights` of `run.json` the hash of the States of the checkpoint of a step.
    pub fn rehash_weights(&self, step: u64) {
        let snapshot = perilune_checkpoint::read(&self.checkpoint(step)).unwrap();
        let model = snapshot.model.into_iter().map(|(path, t)| (format!("model.{path}"), t));
        let mut states: Vec<_> = model.chain(snapshot.optimizer).collect();
        states.sort_by(|a, b| a.0.cmp(&b.0));
        let mut hash = blake3::Hasher::new();
        let text = |hash: &mut blake3::Hasher, t: &[u8]| {
            hash.update(&(t.len() as u64).to_le_bytes());
            hash.update(t);
        };
        for (path, t) in states {
            text(&mut hash, path.as_bytes());
            text(&mut hash, t.dtype.name().as_bytes());
            hash.update(&(t.shape.rank() as u64).to_le_bytes());
            t.shape.dims().iter().for_each(|d| {
                let _ = hash.update(&(*d as u64).to_le_bytes());
            });
            text(&mut hash, &t.bytes);
        }
        let hash = hash.finalize().to_hex().to_string();
        self.record(|record| drop(record.insert("weights".into(), hash.into())));
    }

    /// Sets heads of logs in `run.json` and in all checkpoints: `renew` maps old ones to new ones.
    fn renew_heads(&self, log: &str, renew: impl Fn(&str) -> String) {
        let of = |record: &mut Map<String, Value>| {
            if let Some(head) = record.get_mut("logs").and_then(|l| l.get_mut(log)) {
                *head = renew(head.as_str().unwrap()).into();
            }
        };
        self.record(of);
        for step in self.checkpoints() {
            self.checkpoint_record(step, of);
        }
    }

    /// Edits a log, and seals its lines again. The field `seal` of a line tells the lines apart; a new line has none.
    pub fn log(&self, name: &str, f: impl FnOnce(&mut Vec<Value>)) {
        let path = self.dir.join(name);
        let text = fs::read_to_string(&path).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let stated = |line: &Value| line[LINE_SEAL].as_str().unwrap_or_default().to_string();
        let before: Vec<String> = lines.iter().map(stated).collect();
        f(&mut lines);
        let mut chain = Chain::new(&format!("{} {name}", self.get("id").as_str().unwrap()));
        let origin = chain.head().to_string();
        let (mut out, mut heads, mut last) = (String::new(), Vec::new(), None);
        for mut line in lines {
            last = before.iter().position(|old| *old == stated(&line)).or(last);
            line.as_object_mut().unwrap().shift_remove(LINE_SEAL);
            out += &(chain.append(&line.to_string()) + "\n");
            heads.push((last, chain.head().to_string()));
        }
        fs::write(&path, out).unwrap();
        self.renew_heads(name, |head| {
            let Some(at) = before.iter().position(|old| old == head) else { return head.to_string() };
            let kept = heads.iter().filter(|(old, _)| *old <= Some(at)).count();
            kept.checked_sub(1).map_or(origin.clone(), |k| heads[k].1.clone())
        });
    }

    /// Edits the events of a step in `metrics.jsonl`.
    pub fn event(&self, kind: &str, step: u64, f: impl Fn(&mut Value)) {
        self.log("metrics.jsonl", |lines| {
            let found: Vec<_> = lines.iter_mut().filter(|l| l["event"] == kind && l["step"] == step).collect();
            assert!(!found.is_empty(), "no {kind} of step {step}");
            found.into_iter().for_each(&f);
        });
    }

    /// Edits the sample log, and chains its blocks again.
    pub fn samples(&self, f: impl FnOnce(&mut Vec<Entry>)) {
        let path = self.dir.join(SAMPLES);
        let name = format!("{} {SAMPLES}", self.get("id").as_str().unwrap());
        let old = decode(&fs::read(&path).unwrap(), &name, u32::MAX, &path).unwrap();
        let mut entries = old.range(0, u32::MAX).unwrap();
        f(&mut entries);
        let mut new = SampleLog::new(&name);
        for source in old.sources() {
            new.source(source);
        }
        let mut renewed = Vec::new();
        for block in old.blocks().0 {
            let steps: Vec<u32> = (block.first_step..=block.last_step).collect();
            for step in steps {
                let of_step: Vec<Entry> = entries.iter().filter(|e| e.step == step).copied().collect();
                if !of_step.is_empty() {
                    new.add(step, of_step).unwrap();
                }
            }
            new.seal().unwrap();
            renewed.push((hex(&block.hash), hex(&new.head())));
        }
        let bytes: Vec<u8> = new.blocks().0.iter().flat_map(|b| b.bytes.clone()).collect();
        fs::write(&path, bytes).unwrap();
        let new_head = |head: &str| renewed.iter().find(|r| r.0 == head).map_or(head, |r| r.1.as_str()).to_string();
        self.renew_heads(SAMPLES, new_head);
    }

    /// Replaces the text of a file of a version: `folder` is `recipe` or `recipe@STEP`. The hashes that name it follow.
    pub fn text(&self, folder: &str, file: &str, text: &str) {
        fs::write(self.dir.join(folder).join(file), text).unwrap();
        let hash = blake3::hash(text.as_bytes()).to_hex().to_string();
        let set = |files: &mut Value| {
            for f in files.as_array_mut().unwrap().iter_mut().filter(|f| f["path"] == file) {
                f["blake3"] = hash.clone().into();
            }
        };
        if folder == "recipe" {
            return self.record(|record| set(record.get_mut("files").unwrap()));
        }
        self.log("ledger.jsonl", |lines| {
            lines.iter_mut().filter(|l| l["dir"] == folder).for_each(|l| set(&mut l["files"]))
        });
    }

    /// Makes the hashes of data files in `run.json` those of the files in `place`.
    pub fn rehash_data(&self, place: &Path) {
        self.record(|record| {
            for entry in record.get_mut("data").and_then(Value::as_array_mut).unwrap() {
                let path = place.join(entry["path"].as_str().unwrap());
                entry["blake3"] = hash_of(&path).into();
                entry["bytes"] = fs::metadata(&path).unwrap().len().into();
                let modified = fs::metadata(&path).unwrap().modified().unwrap();
                let since = modified.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap();
                entry["mtime_ns"] = u64::try_from(since.as_nanos()).unwrap().into();
            }
        });
    }

    /// Replaces words of the recorded command.
    pub fn command(&self, from: &str, to: &str) {
        self.record(|record| {
            let words = record.get_mut("command").and_then(Value::as_array_mut).unwrap();
            let found = words.iter_mut().filter(|w| **w == from).map(|w| *w = to.into()).count();
            assert!(found > 0, "{from} is not in the command");
        });
    }

    /// Removes words of the recorded command.
    pub fn without(&self, words: &[&str]) {
        self.record(|record| {
            let all = record.get_mut("command").and_then(Value::as_array_mut).unwrap();
            all.retain(|w| !words.iter().any(|word| w == word));
        });
    }
}

fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}
