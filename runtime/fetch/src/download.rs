//! Downloads one file: resumes, retries, limits size and idle time, verifies the hash and publishes it in the cache.

use crate::address::Address;
use crate::cache::{Cache, Cached, Slot};
use crate::client::{self, Reply, Resume};
use crate::error::{Error, Result};
use crate::grants::Grants;
use crate::hash::{Algorithm, ContentHash, Hasher};
use crate::origin::Environment;
use crate::process::Event;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The bounds of a download.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The size of a file.
    pub max_bytes: Option<u64>,
    /// The time without a byte, or below `low_speed`, after which a connection is given up.
    pub stall: Duration,
    /// Bytes in a second.
    pub low_speed: u64,
    /// Attempts in a row that bring no byte.
    pub attempts: u32,
    /// The pause before the second attempt; it doubles.
    pub pause: Duration,
    /// Bytes of the disk that stay free.
    pub reserve: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_bytes: None,
            stall: Duration::from_secs(60),
            low_speed: 100,
            attempts: 5,
            pause: Duration::from_secs(1),
            reserve: 64 << 20,
        }
    }
}

/// What to download and where to.
pub struct Download<'a> {
    pub address: &'a Address,
    /// The hash that the content must have; without one its hash is computed.
    pub hash: Option<&'a ContentHash>,
    /// The hash to compute if none is given.
    pub algorithm: Algorithm,
    pub cache: &'a Cache,
    pub grants: &'a Grants,
    pub limits: &'a Limits,
    /// Environment variables: endpoints and secrets.
    pub env: &'a Environment<'a>,
}

/// Attempts in all; a server that sends one byte each does not hold a process for ever.
const MOST_ATTEMPTS: u32 = 100;
const CHUNK: usize = 256 << 10;
/// Bytes between two looks at the free space, where the server states no size.
const CHECKED: u64 = 64 << 20;

type Report<'a> = &'a mut dyn FnMut(Event) -> Result<()>;

/// Downloads a file into the cache, or finds it there. An error of `report` ends the download.
///
/// # Errors
/// A host that is not granted, a server that refuses or stalls, another content than the hash says, a full disk. What has
/// arrived is kept and continued by the next download, unless its hash is wrong.
pub fn download(job: &Download<'_>, report: Report<'_>) -> Result<Cached> {
    let algorithm = job.hash.map_or(job.algorithm, ContentHash::algorithm);
    let key = job.hash.map_or_else(
        || format!("address-{}", blake3::hash(job.address.to_string().as_bytes()).to_hex()),
        |h| h.hex().to_string(),
    );
    let slot = job.cache.slot(algorithm, &key);
    let _lock = job.cache.lock(&slot, &mut || report(Event::Waiting))?;
    if let Some(found) = job.hash.and_then(|hash| job.cache.find(hash)) {
        return Ok(found);
    }
    let mut part = Part::open(&slot, algorithm, job)?;
    let (mut idle, mut all) = (0, 0);
    loop {
        let (before, mut wait) = (part.len, None);
        let failed = match part.attempt(job, &mut wait, report) {
            Ok(()) => break,
            Err(e) => e,
        };
        part.keep();
        (idle, all) = (if part.len > before { 1 } else { idle + 1 }, all + 1);
        if !failed.transient || idle >= job.limits.attempts || all >= MOST_ATTEMPTS {
            return Err(failed);
        }
        let doubled = job.limits.pause.saturating_mul(1 << (idle - 1).min(6));
        std::thread::sleep(wait.unwrap_or(doubled));
    }
    part.finish(job)
}

/// A download that has not ended.
struct Part<'a> {
    slot: &'a Slot,
    file: File,
    /// Bytes that are in the file and in the hash.
    len: u64,
    hasher: Hasher,
    algorithm: Algorithm,
    etag: Option<String>,
}

impl Part<'_> {
    /// Opens what an earlier process left, if its server can continue it.
    fn open<'a>(slot: &'a Slot, algorithm: Algorithm, job: &Download<'_>) -> Result<Part<'a>> {
        let path = &slot.part;
        let file = File::options().create(true).read(true).write(true).truncate(false).open(path);
        let file = file.map_err(|e| Error::disk("open", path, &e))?;
        let mut part = Part { slot, file, len: 0, hasher: Hasher::new(algorithm), algorithm, etag: None };
        let note = std::fs::read_to_string(&slot.etag).unwrap_or_default();
        match note.split_once('\n') {
            Some((etag, address)) if address == job.address.to_string() => {
                let mut chunk = vec![0; CHUNK];
                loop {
                    match part.file.read(&mut chunk).map_err(|e| Error::disk("read", path, &e))? {
                        0 => break,
                        n => part.hasher.update(chunk.get(..n).unwrap_or_default()),
                    }
                }
                part.len = part.file.stream_position().map_err(|e| Error::disk("read", path, &e))?;
                part.etag = Some(etag.to_string());
            }
            _ => part.restart()?,
        }
        Ok(part)
    }

    fn restart(&mut self) -> Result<()> {
        let failed = |e| Error::disk("write", &self.slot.part, &e);
        self.file.set_len(0).map_err(failed)?;
        self.file.seek(SeekFrom::Start(0)).map_err(failed)?;
        (self.len, self.hasher, self.etag) = (0, Hasher::new(self.algorithm), None);
        Ok(())
    }

    /// Puts what has arrived on the disk, for the next attempt.
    fn keep(&self) {
        let _ = self.file.sync_data();
    }

    fn attempt(&mut self, job: &Download<'_>, wait: &mut Option<Duration>, report: Report<'_>) -> Result<()> {
        let etag = self.etag.clone().filter(|_| self.len > 0);
        let resume = etag.as_deref().map(|etag| Resume { from: self.len, etag });
        let reply = client::get(job.address, job.hash, resume, job.grants, job.env, job.limits, wait)?;
        if reply.status == 416 {
            self.restart()?;
            return Err(Error::transient(format!("{}: the server cannot continue the download", job.address)));
        }
        if reply.first != self.len {
            self.restart()?;
        }
        self.check_size(job, reply.total)?;
        if let Some(etag) = &reply.etag {
            let note = format!("{etag}\n{}", job.address);
            std::fs::write(&self.slot.etag, note).map_err(|e| Error::disk("write", &self.slot.etag, &e))?;
        } else {
            let _ = std::fs::remove_file(&self.slot.etag);
        }
        self.etag.clone_from(&reply.etag);
        report(Event::Size { total: reply.total, done: self.len })?;
        self.receive(job, reply, report)
    }

    /// Checks a size that the server states, or the bytes so far.
    fn check_size(&self, job: &Download<'_>, total: Option<u64>) -> Result<()> {
        let size = total.unwrap_or(self.len);
        if let Some(most) = job.limits.max_bytes.filter(|most| size > *most) {
            let text = format!(
                "{}: it has {} bytes{}, more than the limit of {most}",
                job.address,
                size,
                if total.is_some() { "" } else { " or more" }
            );
            return Err(Error::new(text).hint("raise the limit: --max-download=BYTES"));
        }
        let needed = size.saturating_sub(self.len).saturating_add(job.limits.reserve);
        match job.cache.free().filter(|free| needed > *free) {
            Some(free) => Err(Error::new(format!(
                "{}: {needed} bytes are needed and {free} are free in {}",
                job.address,
                job.cache.root().display()
            ))
            .hint("free space, or set PERILUNE_CACHE to a folder of a larger disk")),
            None => Ok(()),
        }
    }

    /// Writes the body. A thread reads it, so that a server that sends nothing is noticed.
    fn receive(&mut self, job: &Download<'_>, reply: Reply, report: Report<'_>) -> Result<()> {
        let (send, chunks) = mpsc::sync_channel::<std::io::Result<Vec<u8>>>(4);
        let mut body = reply.body;
        std::thread::spawn(move || {
            loop {
                let mut chunk = vec![0; CHUNK];
                let read = body.read(&mut chunk).map(|n| {
                    chunk.truncate(n);
                    chunk
                });
                let last = read.as_ref().map_or(true, Vec::is_empty);
                if send.send(read).is_err() || last {
                    break;
                }
            }
        });
        let cut = |why: &str| {
            Error::transient(format!("{}: {why}", job.address))
                .hint("start again: the download continues where it stopped")
        };
        let limits = job.limits;
        let (mut since, mut brought, mut shown, mut checked) = (Instant::now(), 0_u64, Instant::now(), self.len);
        loop {
            let chunk = match chunks.recv_timeout(limits.stall) {
                Ok(Ok(chunk)) => chunk,
                Ok(Err(e)) => return Err(cut(&format!("the connection was cut: {e}"))),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(cut(&format!("the server has sent nothing for {} s", limits.stall.as_secs_f64())));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(cut("the connection was cut")),
            };
            if chunk.is_empty() {
                break;
            }
            let n = chunk.len() as u64;
            if reply.total.is_some_and(|total| self.len.saturating_add(n) > total) {
                return Err(Error::new(format!("{}: the server sends more bytes than it has stated", job.address)));
            }
            self.file.write_all(&chunk).map_err(|e| Error::disk("write", &self.slot.part, &e))?;
            self.hasher.update(&chunk);
            (self.len, brought) = (self.len.saturating_add(n), brought.saturating_add(n));
            if reply.total.is_none() && (job.limits.max_bytes.is_some() || self.len - checked >= CHECKED) {
                self.check_size(job, None)?;
                checked = self.len;
            }
            let elapsed = since.elapsed();
            if elapsed >= limits.stall {
                if (brought as f64) < limits.low_speed as f64 * elapsed.as_secs_f64() {
                    return Err(cut(&format!("the server sends less than {} bytes a second", limits.low_speed)));
                }
                (since, brought) = (Instant::now(), 0);
            }
            if shown.elapsed() >= Duration::from_millis(100) {
                report(Event::Progress { done: self.len })?;
                shown = Instant::now();
            }
        }
        match reply.total {
            Some(total) if self.len < total => {
                Err(cut(&format!("the connection was cut after {} of {total} bytes", self.len)))
            }
            _ => Ok(()),
        }
    }

    fn finish(self, job: &Download<'_>) -> Result<Cached> {
        let got = self.hasher.finish();
        if let Some(hash) = job.hash.filter(|hash| **hash != got) {
            let _ = std::fs::remove_file(&self.slot.part);
            let _ = std::fs::remove_file(&self.slot.etag);
            return Err(mismatch(job.address, hash, &got.to_string()));
        }
        job.cache.publish(self.slot, &self.file, &got, &job.address.to_string())
    }
}

pub(crate) fn mismatch(address: &Address, wanted: &ContentHash, got: &str) -> Error {
    Error::new(format!("{address}: its content has another hash\n  expected {wanted}\n  received {got}")).hint(
        "the file was changed, or the hash is of another file; look at what changed before you paste the new hash",
    )
}
