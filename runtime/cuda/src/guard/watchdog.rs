//! Limits the time of each launch of a recipe's kernel.
//!
//! Events around a launch tell a thread when it begins and ends. At the limit the thread writes the number of the launch to the stop
//! word, at which the threads of a rewritten kernel exit and report that they did. CUDA cannot end a kernel that does not read the word
//! (it waits at a barrier that is never complete, or could not be rewritten), so the process ends then.

use super::report::Subject;
use crate::driver::{Address, Device, Event, Pinned};
use perilune_core::KernelLimits;
use perilune_core::error::{Error, Result};
use perilune_core::kernel_limits::EXPIRED_STATUS;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two looks at a launch.
const LOOK: Duration = Duration::from_millis(2);
/// The time in which a kernel stops after its limit.
const GRACE: Duration = Duration::from_millis(800);
/// The launches of a kernel whose addresses are remembered, for messages.
const REMEMBERED: usize = 256;

/// The addresses of the buffers of a kernel's last launches.
#[derive(Debug, Default)]
pub struct History(Mutex<VecDeque<(u32, Vec<Address>)>>);

impl History {
    fn note(&self, number: u32, bases: &[Address]) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.push_back((number, bases.to_vec()));
        if list.len() > REMEMBERED {
            list.pop_front();
        }
    }

    /// The addresses of a launch, if they are remembered.
    pub fn of(&self, number: u32) -> Option<Vec<Address>> {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().rev().find(|(n, _)| *n == number).map(|(_, bases)| bases.clone())
    }
}

/// A launch that is watched.
struct Watched {
    number: u32,
    subject: Arc<Subject>,
    begin: Event,
    end: Event,
}

/// Numbers the launches of recipes' kernels on a device and watches them.
pub struct Watchdog {
    device: Arc<Device>,
    limits: KernelLimits,
    stop: Arc<Pinned>,
    last: AtomicU32,
    /// To the thread, from the first launch with a limit on.
    watched: Mutex<Option<Sender<Watched>>>,
}

impl Watchdog {
    pub fn new(device: &Arc<Device>, limits: KernelLimits) -> Result<Watchdog> {
        let stop = Arc::new(Pinned::new(device, 8)?);
        Ok(Watchdog { device: device.clone(), limits, stop, last: AtomicU32::new(0), watched: Mutex::new(None) })
    }

    /// The address of the stop word.
    pub fn stop_address(&self) -> Address {
        self.stop.address
    }

    /// The limit of a launch.
    pub fn time(&self) -> Option<Duration> {
        self.limits.time
    }

    /// Takes a number for the next launch, whose buffers are at `bases`. It is never 0.
    pub fn number(&self, history: &History, bases: &[Address]) -> u32 {
        let number = self.last.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
        history.note(number, bases);
        number
    }

    /// Queues a launch, and watches it if its time is limited.
    pub fn launch(&self, number: u32, subject: &Arc<Subject>, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.limits.time.is_none() {
            return queue();
        }
        let begin = Event::untimed(&self.device)?;
        begin.again()?;
        queue()?;
        let end = Event::untimed(&self.device)?;
        end.again()?;
        self.sender()?
            .send(Watched { number, subject: subject.clone(), begin, end })
            .map_err(|_| Error::system("cuda", "the thread that limits the time of kernels has ended"))
    }

    fn sender(&self) -> Result<Sender<Watched>> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*watched {
            return Ok(sender.clone());
        }
        let (sender, receiver) = mpsc::channel();
        let (device, limits, stop) = (self.device.clone(), self.limits, self.stop.clone());
        let work = move || watch(&device, &limits, &stop, &receiver);
        std::thread::Builder::new().name("kernel limit".into()).spawn(work).map_err(|e| {
            Error::system("cuda", format!("cannot start the thread that limits the time of kernels: {e}"))
        })?;
        *watched = Some(sender.clone());
        Ok(sender)
    }
}

/// Waits for each launch in turn.
fn watch(device: &Device, limits: &KernelLimits, stop: &Pinned, launches: &Receiver<Watched>) {
    let Some(limit) = limits.time else { return };
    if device.bind().is_err() {
        return;
    }
    while let Ok(launch) = launches.recv() {
        while launch.begin.is_pending() {
            std::thread::sleep(LOOK);
        }
        if ends(&launch.end, limit) {
            continue;
        }
        stop.write(0, u64::from(launch.number));
        if !ends(&launch.end, GRACE) {
            let error = launch.subject.timed_out(limit, false);
            let status = limits.expired.map_or(EXPIRED_STATUS, |expired| expired(&error));
            end_process(i32::from(status));
        }
    }
}

/// Whether an event occurs within a time.
fn ends(event: &Event, within: Duration) -> bool {
    let began = Instant::now();
    while event.is_pending() {
        if began.elapsed() >= within {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Ends the process without the work that a normal end does: CUDA's would wait for the kernel.
fn end_process(status: i32) -> ! {
    #[cfg(unix)]
    {
        unsafe extern "C" {
            fn _exit(status: i32) -> !;
        }
        // SAFETY: the C library's function takes any status, and does not return.
        unsafe { _exit(status) }
    }
    #[cfg(not(unix))]
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_launches_are_remembered() {
        let history = History::default();
        (1..=300).for_each(|n| history.note(n, &[u64::from(n), 7]));
        assert_eq!(history.of(300), Some(vec![300, 7]));
        assert_eq!(history.of(45), Some(vec![45, 7]));
        assert_eq!(history.of(44), None);
    }
}
