//! Writes checkpoints on a background thread: the training loop passes a snapshot and continues.

use crate::read::list_in;
use crate::write::{checkpoints, discard, tidy};
use crate::{CHECKPOINTS, Error, Found, Result, Source, write};
use perilune_policy::Directory;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Selects the checkpoints to keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// Keeps this many of the last checkpoints; 0 keeps all.
    pub last: usize,
    /// Also keeps checkpoints whose step is a multiple of this; 0 for none.
    pub every: u64,
}

/// Writes checkpoints of one run, one at a time, on a thread.
#[derive(Debug)]
pub struct Saver {
    /// The run directory. The directory of the checkpoints in it is opened for each save, so that a link in its place is an
    /// error of that save.
    run: Directory,
    pub keep: Keep,
    /// Files larger than this many bytes are split into shards.
    limit: u64,
    /// The step of the best checkpoint by a metric, which is kept at any age.
    best: Option<u64>,
    running: Option<(u64, Writing)>,
}

/// A checkpoint that is being written.
#[derive(Debug)]
enum Writing {
    Thread(JoinHandle<Result<PathBuf>>),
    /// The system refused a thread, so it was written at once.
    Done(Result<PathBuf>),
}

impl Saver {
    /// Creates a saver for the `checkpoints` of a run directory. Leftovers of crashes are removed; failing to remove them is
    /// not an error.
    pub fn new(run: Directory, keep: Keep, limit: u64) -> Saver {
        let _ = run.subdirectory(CHECKPOINTS).map(|dir| tidy(&dir));
        Saver { run, keep, limit, best: None, running: None }
    }

    /// Removes the checkpoints of later steps, after the run returned to an earlier step.
    pub fn forget_after(&mut self, step: u64) -> Result<Option<(u64, PathBuf)>> {
        let before = self.wait()?;
        match self.run.subdirectory(CHECKPOINTS) {
            Ok(dir) => list_in(&dir)?.iter().filter(|f| f.step > step).try_for_each(|f| discard_found(&dir, f))?,
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e.into()),
        }
        self.best = self.best.filter(|b| *b <= step);
        Ok(before)
    }

    /// Marks this step's checkpoint as the best. It is kept, and the previous best may be removed.
    pub fn set_best(&mut self, step: u64) {
        self.best = Some(step);
    }

    /// Waits for the previous checkpoint, starts to write that of `step`, and returns the result of the previous one. Callers
    /// with large snapshots call `wait` before they take one, so that only one snapshot is in memory.
    pub fn save(&mut self, step: u64, mut source: impl Source) -> Result<Option<(u64, PathBuf)>> {
        let before = self.wait()?;
        let (run, keep, limit, best) = (self.run.clone(), self.keep, self.limit, self.best);
        let thread = std::thread::Builder::new().name("perilune-checkpoint".into());
        let work = move || {
            let snapshot = source.snapshot()?;
            let dir = checkpoints(&run)?;
            let path = write(&dir, &snapshot, limit)?;
            prune(&dir, keep, best, step)?;
            Ok(path)
        };
        // A thread that cannot be started drops its closure: the work is shared, so that it can be done here.
        let work = Arc::new(Mutex::new(Some(work)));
        let once = move || {
            let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
            work.map_or(Err(Error::Lost(step)), |mut work| work())
        };
        let writing = match thread.spawn(once.clone()) {
            Ok(handle) => Writing::Thread(handle),
            Err(_) => Writing::Done(once()),
        };
        self.running = Some((step, writing));
        Ok(before)
    }

    /// Returns the checkpoint in progress if it has been completed.
    pub fn poll(&mut self) -> Result<Option<(u64, PathBuf)>> {
        let is_finished = |w: &Writing| match w {
            Writing::Thread(handle) => handle.is_finished(),
            Writing::Done(_) => true,
        };
        if self.running.as_ref().is_some_and(|r| is_finished(&r.1)) { self.wait() } else { Ok(None) }
    }

    /// Waits for the checkpoint in progress.
    pub fn wait(&mut self) -> Result<Option<(u64, PathBuf)>> {
        let Some((step, writing)) = self.running.take() else { return Ok(None) };
        let result = match writing {
            Writing::Thread(handle) => handle.join().unwrap_or(Err(Error::Lost(step))),
            Writing::Done(result) => result,
        };
        result.map(|path| Some((step, path)))
    }
}

fn discard_found(dir: &Directory, found: &Found) -> Result<()> {
    let name = found.path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    discard(dir, name)
}

/// Removes the checkpoints that the policy does not keep. The newest one always stays.
fn prune(dir: &Directory, keep: Keep, best: Option<u64>, now: u64) -> Result<()> {
    if keep.last == 0 {
        return Ok(());
    }
    let found = list_in(dir)?;
    let first = found.len().saturating_sub(keep.last);
    for f in &found[..first] {
        let stays = f.step == now || Some(f.step) == best || (keep.every > 0 && f.step % keep.every == 0);
        if !stays {
            discard_found(dir, f)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RECORD, SHARD_LIMIT, Snapshot, list, read};
    use std::path::Path;

    const MODEL: &str = "model.safetensors";
    const OPTIMIZER: &str = "optimizer.safetensors";
    use perilune_core::{DType, HostTensor, Shape};
    use serde_json::{Map, Value, json};

    fn snapshot(step: u64) -> Snapshot {
        let tensor = |x: f32| {
            HostTensor::new(DType::F32, Shape::of(&[2]), [x, -x].iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        let record = Map::from_iter([("cursor".to_string(), json!({ "index": step }))]);
        Snapshot {
            step,
            model: vec![("0.weight".into(), tensor(step as f32)), ("0.bias".into(), tensor(0.5))],
            optimizer: vec![("optim.adamw.m.0.weight".into(), tensor(7.0))],
            record,
        }
    }

    fn open(dir: &Path) -> Directory {
        Directory::open(dir).expect("a directory")
    }

    fn steps(dir: &Path) -> Vec<u64> {
        list(dir).expect("a list").into_iter().map(|f| f.step).collect()
    }

    #[test]
    fn a_written_checkpoint_is_read_back() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(list(&dir.path().join("none")).expect("none"), []);
        for _ in 0..2 {
            let path = write(&open(dir.path()), &snapshot(3), SHARD_LIMIT).expect("written");
            assert_eq!(read(&path).expect("read"), snapshot(3));
        }
        let names: Vec<_> = std::fs::read_dir(dir.path()).expect("listed").flatten().map(|e| e.file_name()).collect();
        assert_eq!(names, ["step-3"]);
    }

    #[test]
    fn retention_keeps_the_last_the_best_and_the_milestones() {
        let dir = tempfile::tempdir().expect("a directory");
        let inside = dir.path().join(CHECKPOINTS);
        let mut saver = Saver::new(open(dir.path()), Keep { last: 2, every: 4 }, SHARD_LIMIT);
        for step in 1..=7 {
            if step == 3 {
                saver.set_best(2);
            }
            saver.save(step, snapshot(step)).expect("saved");
        }
        assert_eq!(saver.wait().expect("written"), Some((7, inside.join("step-7"))));
        assert_eq!(saver.poll().expect("nothing"), None);
        assert_eq!(steps(&inside), [2, 4, 6, 7]);
        saver.forget_after(4).expect("forgotten");
        assert_eq!(steps(&inside), [2, 4]);
    }

    /// A run directory or a directory of checkpoints that becomes a link redirects no write.
    #[test]
    fn a_link_redirects_no_save() {
        let dir = tempfile::tempdir().expect("a directory");
        let [run, victim] = ["run", "victim"].map(|name| dir.path().join(name));
        for path in [&run, &victim] {
            std::fs::create_dir(path).expect("made");
        }
        std::fs::create_dir_all(victim.join(".step-2.new")).expect("made");
        std::fs::create_dir_all(victim.join("step-1")).expect("made");
        let mut saver = Saver::new(open(&run), Keep { last: 1, every: 0 }, SHARD_LIMIT);
        let mut save = |step| saver.save(step, snapshot(step)).and_then(|_| saver.wait());
        save(1).expect("written");
        std::fs::rename(run.join(CHECKPOINTS), run.join("aside")).expect("renamed");
        std::os::unix::fs::symlink(&victim, run.join(CHECKPOINTS)).expect("linked");
        let error = save(2).expect_err("refused").to_string();
        assert!(error.contains("run/checkpoints: directory: is a link; a directory is needed"), "{error}");

        std::fs::remove_file(run.join(CHECKPOINTS)).expect("removed");
        std::fs::rename(&run, dir.path().join("moved")).expect("renamed");
        std::os::unix::fs::symlink(&victim, &run).expect("linked");
        save(3).expect("written where the directory is now");
        assert_eq!(steps(&dir.path().join("moved").join(CHECKPOINTS)), [3]);
        let mut names: Vec<_> = std::fs::read_dir(&victim).expect("listed").flatten().map(|e| e.file_name()).collect();
        names.sort();
        assert_eq!(names, [".step-2.new", "step-1"], "nothing was written or tidied there");
    }

    #[test]
    fn a_crash_while_writing_leaves_nothing_that_counts() {
        let dir = tempfile::tempdir().expect("a directory");
        write(&open(dir.path()), &snapshot(1), SHARD_LIMIT).expect("written");
        let half = dir.path().join(".step-2.new");
        std::fs::create_dir(&half).expect("made");
        std::fs::write(half.join(MODEL), b"half").expect("written");
        assert_eq!(steps(dir.path()), [1]);
        write(&open(dir.path()), &snapshot(2), SHARD_LIMIT).expect("written over");
        assert_eq!(steps(dir.path()), [1, 2]);
        assert_eq!(read(&dir.path().join("step-2")).expect("whole"), snapshot(2));
    }

    /// Sharded files are read back unchanged, and every shard is checked.
    #[test]
    fn large_files_are_cut_into_shards() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = write(&open(dir.path()), &snapshot(3), 8).expect("written");
        let shard = path.join("model-00002-of-00002.safetensors");
        assert!(shard.exists() && path.join("model.safetensors.index.json").exists() && !path.join(MODEL).exists());
        assert!(path.join(OPTIMIZER).exists());
        assert_eq!(read(&path).expect("read"), snapshot(3));
        let mut bytes = std::fs::read(&shard).expect("bytes");
        *bytes.last_mut().expect("a byte") ^= 1;
        std::fs::write(&shard, bytes).expect("written");
        let e = read(&path).expect_err("refused").to_string();
        assert!(e.contains("model-00002-of-00002.safetensors: blake3: is "), "{e}");
        std::fs::remove_file(&shard).expect("removed");
        let e = read(&path).expect_err("refused").to_string();
        assert!(e.contains("model-00002-of-00002.safetensors: cannot open"), "{e}");
    }

    /// Every kind of damage gives an error with the file and the rule, without a panic.
    #[test]
    fn damage_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = write(&open(dir.path()), &snapshot(5), SHARD_LIMIT).expect("written");
        let says = |text: &str| {
            let e = read(&path).expect_err("refused").to_string();
            assert!(e.contains(text), "{text}: {e}");
        };
        let record = std::fs::read_to_string(path.join(RECORD)).expect("a record");
        let set = |f: &dyn Fn(&mut Value)| {
            let mut v: Value = serde_json::from_str(&record).expect("JSON");
            f(&mut v);
            std::fs::write(path.join(RECORD), v.to_string()).expect("written");
        };
        set(&|v| v["schema"] = 9.into());
        says("run.json: schema: is 9; this version reads 1 to 2");
        set(&|v| v["cursor"]["index"] = 6.into());
        says("run.json: blake3: is ");
        set(&|v| v["blake3"] = "".into());
        says("run.json: blake3: must be the hash of the record");
        // The rules also apply to records of schema 1, which have no hash.
        set(&|v| (v["schema"], v["step"]) = (1.into(), (-1).into()));
        says("run.json: step: must be a whole number");
        set(&|v| (v["schema"], v["step"]) = (1.into(), 7.into()));
        says("run.json: step: is 7, but the directory is named for step 5");
        set(&|v| (v["schema"], v["files"][OPTIMIZER]) = (1.into(), Value::Null));
        says("files.optimizer.safetensors: must have");
        std::fs::write(path.join(RECORD), "[1]").expect("written");
        says("record: is not a JSON object");
        std::fs::write(path.join(RECORD), &record[..40]).expect("written");
        says("record: is not JSON");
        std::fs::write(path.join(RECORD), &record).expect("written");

        let whole = std::fs::read(path.join(MODEL)).expect("bytes");
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            std::fs::write(path.join(MODEL), &bytes).expect("written");
            says("model.safetensors: blake3: is ");
        }
        std::fs::write(path.join(MODEL), &whole[..whole.len() - 1]).expect("written");
        says("model.safetensors: size: is ");
        std::fs::remove_file(path.join(MODEL)).expect("removed");
        says("model.safetensors: cannot open");
        #[cfg(unix)]
        {
            std::fs::write(dir.path().join("elsewhere"), &whole).expect("written");
            std::os::unix::fs::symlink(dir.path().join("elsewhere"), path.join(MODEL)).expect("linked");
            says("model.safetensors: file: is a link; a regular file is needed");
            let link = dir.path().join("step-8");
            std::os::unix::fs::symlink(&path, &link).expect("linked");
            for link in [link.clone(), link.join("")] {
                let e = read(&link).expect_err("refused").to_string();
                assert!(e.contains("step-8: directory: is a link"), "{e}");
            }
        }
    }

    /// Every changed bit of a record is detected, and an unchanged record is read as written.
    #[test]
    fn a_record_has_a_hash_of_its_own() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut said = snapshot(5);
        said.record.insert("blake3".into(), "".into()); // a field of the same name does not confuse the reader
        said.record.insert("params".into(), json!({ "blake3": "", "x": "\"\"" }));
        let path = write(&open(dir.path()), &said, SHARD_LIMIT).expect("written");
        said.record.remove("blake3");
        assert_eq!(read(&path).expect("read"), said);
        let whole = std::fs::read(path.join(RECORD)).expect("bytes");
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 5);
            std::fs::write(path.join(RECORD), &bytes).expect("written");
            let e = read(&path).expect_err("refused").to_string();
            assert!(e.contains("run.json: "), "{e}");
        }
    }

    /// Replacing a checkpoint takes two renames. After a crash between them the old one is valid.
    #[test]
    fn a_crash_while_replacing_leaves_the_old_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let inside = &dir.path().join(CHECKPOINTS);
        std::fs::create_dir(inside).expect("made");
        let to = write(&open(inside), &snapshot(4), SHARD_LIMIT).expect("written");
        let old = inside.join(".step-4.old");
        std::fs::rename(&to, &old).expect("as `write` begins to replace it");
        assert_eq!(list(inside).expect("a list"), [crate::Found { step: 4, path: old.clone() }]);
        assert_eq!(read(&old).expect("read"), snapshot(4));
        std::fs::create_dir(inside.join(".step-4.new")).expect("half of the new one");
        std::fs::create_dir(inside.join(".step-2.gone")).expect("half of one that was removed");
        let mut saver = Saver::new(open(dir.path()), Keep { last: 1, every: 0 }, SHARD_LIMIT);
        let names = || std::fs::read_dir(inside).expect("listed").flatten().map(|e| e.file_name()).collect::<Vec<_>>();
        assert_eq!(names(), [".step-4.old"], "the rest is tidied up");
        for step in [4, 5] {
            saver.save(step, snapshot(step)).expect("saved");
            saver.wait().expect("written");
            assert_eq!(names(), [format!("step-{step}").as_str()]);
        }
    }
}
