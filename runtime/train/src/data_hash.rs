//! Hashes data files and folders, on a thread of its own while a run trains.

use perilune_policy::{DataRead, FileList, Opener, Policy, ReadKind};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Bytes that are read and hashed at one time, few enough to be still in the processor's cache.
const CHUNK: usize = 1 << 20;
/// The size up to which a file is hashed whole.
const WHOLE: u64 = 16 << 30;
/// Chunks of a larger file that are hashed.
const SAMPLES: u64 = 64;
/// Threads that ask for the sizes of a folder's files: on a network file system each waits for an answer.
const THREADS: usize = 8;

/// The hash of a file's content, or of the names and sizes of a folder's files, and the bytes of all files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Digest {
    pub hash: String,
    pub bytes: u64,
}

/// Hashes what a reader opened. `Err` has the reason: it cannot be read, is another file by now, or `stop` was set.
pub(crate) fn digest(read: &DataRead, policy: &Policy, stop: &AtomicBool) -> Result<Digest, String> {
    match &read.kind {
        ReadKind::File { len, modified } => {
            let mut file = policy.open(&read.path).map_err(|e| e.rule())?;
            if (file.len(), file.modified()) != (*len, *modified) {
                return Err("it has been changed since it was opened".into());
            }
            if *len > WHOLE {
                return sampled(&file.into_file(), *len, stop);
            }
            let (mut hasher, mut chunk) = (blake3::Hasher::new(), vec![0; CHUNK]);
            loop {
                let n = file.read(&mut chunk).map_err(|e| e.to_string())?;
                if n == 0 {
                    break;
                }
                hasher.update(&chunk[..n]);
                going(stop)?;
            }
            let bytes = hasher.count();
            if bytes != *len {
                return Err("it has been changed while it was hashed".into());
            }
            Ok(Digest { hash: hasher.finalize().to_hex().to_string(), bytes })
        }
        ReadKind::Folder(list) => folder(&**list, policy, stop),
    }
}

/// Hashes the length and [`SAMPLES`] chunks of a file, evenly spaced from its first to its last: reading a file of terabytes
/// takes longer than many runs do. The name of the hash tells it from that of a whole file.
fn sampled(file: &File, len: u64, stop: &AtomicBool) -> Result<Digest, String> {
    let (mut hasher, mut chunk) = (blake3::Hasher::new(), vec![0; CHUNK]);
    hasher.update(&len.to_le_bytes());
    for k in 0..SAMPLES {
        let at = (u128::from(len - CHUNK as u64) * u128::from(k) / u128::from(SAMPLES - 1)) as u64;
        file.read_exact_at(&mut chunk, at).map_err(|e| e.to_string())?;
        hasher.update(&chunk);
        going(stop)?;
    }
    Ok(Digest { hash: format!("sampled-{}", hasher.finalize().to_hex()), bytes: len })
}

fn going(stop: &AtomicBool) -> Result<(), String> {
    if stop.load(Ordering::Relaxed) { Err("the run has ended".into()) } else { Ok(()) }
}

fn folder(list: &dyn FileList, policy: &Policy, stop: &AtomicBool) -> Result<Digest, String> {
    let count = list.count();
    let mut sizes = vec![0u64; count];
    let part = count.div_ceil(THREADS).max(1000);
    std::thread::scope(|scope| {
        let parts = sizes.chunks_mut(part).enumerate().map(|(k, sizes)| {
            let work = move || {
                for (i, size) in sizes.iter_mut().enumerate() {
                    *size = policy.size(&list.file(k * part + i).1).map_err(|e| e.rule())?;
                    going(stop)?;
                }
                Ok::<(), String>(())
            };
            std::thread::Builder::new().spawn_scoped(scope, work).map_err(|e| e.to_string())
        });
        let threads: Vec<_> = parts.collect();
        threads.into_iter().try_for_each(|t| t?.join().unwrap_or_else(|_| Err("its thread ended".into())))
    })?;
    let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0u64);
    for (i, size) in sizes.into_iter().enumerate() {
        let (name, _) = list.file(i);
        let name = name.as_os_str().as_bytes();
        // Lengths first, so that no two lists give the same text.
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name).update(&size.to_le_bytes());
        bytes = bytes.saturating_add(size);
    }
    Ok(Digest { hash: hasher.finalize().to_hex().to_string(), bytes })
}

/// The name of what was hashed, and its digest.
type Hashed = (String, Result<Digest, String>);

/// A thread that hashes one file after the other.
pub(crate) struct Hasher {
    policy: Arc<Policy>,
    /// Both ends to the thread, which is started with the first file.
    thread: Option<(Sender<DataRead>, Receiver<Hashed>)>,
    /// Files whose digests have not been taken.
    waiting: usize,
    /// A digest that has been received by a wait.
    received: Option<Hashed>,
    stop: Arc<AtomicBool>,
}

impl Hasher {
    pub fn new(policy: Arc<Policy>) -> Hasher {
        Hasher { policy, thread: None, waiting: 0, received: None, stop: Arc::default() }
    }

    /// Hashes a file later. Without a thread it is not hashed.
    pub fn start(&mut self, read: DataRead) {
        if self.thread.is_none() {
            let (send, jobs) = channel::<DataRead>();
            let (done, results) = channel();
            let (policy, stop) = (self.policy.clone(), self.stop.clone());
            let work = move || {
                for read in jobs {
                    let digest = digest(&read, &policy, &stop);
                    if done.send((read.name, digest)).is_err() {
                        break;
                    }
                }
            };
            let spawned = std::thread::Builder::new().name("data-hash".into()).spawn(work);
            self.thread = spawned.is_ok().then_some((send, results));
        }
        let sent = self.thread.as_ref().is_some_and(|(jobs, _)| jobs.send(read).is_ok());
        self.waiting += usize::from(sent);
    }

    /// Returns a digest that is complete.
    pub fn take(&mut self) -> Option<Hashed> {
        if self.waiting == 0 {
            return None;
        }
        let found = self.received.take().or_else(|| self.thread.as_ref()?.1.try_recv().ok())?;
        self.waiting -= 1;
        Some(found)
    }

    /// Whether every digest has been taken.
    pub fn is_idle(&self) -> bool {
        self.waiting == 0
    }

    /// Waits for a digest, at most for this time.
    pub fn wait(&mut self, time: Duration) {
        if self.received.is_none()
            && let Some((_, results)) = &self.thread
        {
            self.received = results.recv_timeout(time).ok();
        }
    }
}

impl Drop for Hasher {
    fn drop(&mut self) {
        // The thread ends by itself: it may wait for a file system that does not answer.
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A large file is hashed by its length and samples: the first and the last chunk are among them.
    #[test]
    fn large_files_are_sampled() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("large.bin");
        let file = File::create(&path).unwrap();
        if file.set_len(WHOLE + 1).is_err() {
            println!("skipped: large_files_are_sampled: this file system has no sparse file of 16 GiB");
            return;
        }
        let policy = Policy::builder().allow_read(dir.path()).unwrap().build();
        let hash = || {
            let opened = policy.open(&path).unwrap();
            let kind = ReadKind::File { len: opened.len(), modified: opened.modified() };
            let read = DataRead { name: "large.bin".into(), path: path.clone(), kind };
            digest(&read, &policy, &AtomicBool::new(false)).unwrap()
        };
        let zeros = hash();
        assert!(zeros.hash.starts_with("sampled-") && zeros.bytes == WHOLE + 1, "{zeros:?}");
        assert_eq!(hash(), zeros);
        for at in [0, WHOLE] {
            file.write_all_at(&[1], at).unwrap();
            assert_ne!(hash().hash, zeros.hash, "byte {at}");
            file.write_all_at(&[0], at).unwrap();
        }
        assert_eq!(hash(), zeros);
        file.set_len(WHOLE + 2).unwrap();
        assert_ne!(hash().hash, zeros.hash);
    }
}
