//! Connects the processes of a job by TCP: messages of devices, calls of all processes, and the news of a failure.
//!
//! Every process has a connection to every other one. A star through process 0 would carry each tensor twice over its link, and
//! only process 0 would notice that a process has ended. The number of processes is that of hosts (or GPUs), so there are few
//! connections.
//!
//! The first failure of a job is its [`Cause`]: a process that fails sends the text of its error to all others, and they fail with
//! it. A process that disappears is noticed by its closed connections, one that is stopped or cut off by its silence.
//!
//! Anyone who can connect to the port and knows the job could take part: the network has to be trusted, as for NCCL.

mod calls;
mod cause;
mod frame;
mod join;
mod peer;
#[cfg(test)]
mod tests;

pub use cause::Cause;

use crate::exchange::{Carrier, Exchange, Group, Mail, Round};
use crate::rendezvous::Place;
use calls::Inbox;
use frame::{Decoder, Encoder, Frame, Kind, MessageHead};
use peer::Peer;
use perilune_core::Mesh;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;
use rustc_hash::FxHashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Times and limits of the connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// How long processes wait for each other at the start.
    pub join: Duration,
    /// The time between two signs of life.
    pub heartbeat: Duration,
    /// A process that sends nothing for this time has failed.
    pub silence: Duration,
    /// How long a closed connection waits for the news of its cause.
    pub grace: Duration,
    /// The most bytes of a device's message.
    pub message_limit: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            join: Duration::from_secs(300),
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(20),
            grace: Duration::from_millis(500),
            message_limit: 16 << 30,
        }
    }
}

/// How long a failing process waits until the others have its error.
const ABORT_WAIT: Duration = Duration::from_secs(2);
/// Messages that are kept for an exchange which this process has not made yet.
const MOST_PARKED: usize = 1 << 16;

/// The connections of this process to all others of its job.
///
/// Dropping it without [`Links::finish`] or [`Links::abort`] tells the others that this process has failed.
#[derive(Debug)]
pub struct Links {
    inner: Arc<Inner>,
    /// The number of calls so far; one at a time.
    calls: Mutex<u64>,
    /// An exchange whose devices are the processes.
    all: Option<Arc<Exchange>>,
}

/// What the threads share.
#[derive(Debug)]
struct Inner {
    rank: usize,
    options: Options,
    start: Instant,
    /// The host of each process; empty until they have met.
    hosts: OnceLock<Vec<String>>,
    /// By rank; empty for this process.
    peers: Vec<OnceLock<Arc<Peer>>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Where the recipe is, as `recipe.lua:12`; empty if that is unknown.
    place: Mutex<String>,
    /// The call that this process waits in, or 0, and how many it has entered.
    calling: Mutex<Calling>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default, Debug)]
struct Calling {
    now: u64,
    what: String,
    entered: u64,
}

#[derive(Default, Debug)]
struct State {
    cause: Option<Cause>,
    /// A process whose connection has ended, and since when.
    suspect: Option<(Instant, Cause)>,
    /// By rank.
    standing: Vec<Standing>,
    exchanges: Vec<Attached>,
    /// By number of the exchange.
    parked: FxHashMap<usize, Vec<(usize, Item)>>,
    inbox: Inbox,
    /// This process sends nothing more.
    closing: bool,
    /// The monitor ends.
    stop: bool,
}

#[derive(Clone, Default, Debug)]
struct Standing {
    /// It has said goodbye.
    ended: bool,
    /// It has sent an abort.
    aborted: bool,
    /// Its connection has ended.
    gone: bool,
    /// It has seen the last frame of this process.
    seen: bool,
}

#[derive(Debug)]
struct Attached {
    exchange: Weak<Exchange>,
    /// The process that drives each device.
    owners: Arc<[usize]>,
}

/// What a device of another process does.
#[derive(Debug)]
enum Item {
    Message(MessageHead, Arc<[u8]>),
    Failed { run: u64, device: usize },
}

/// Locks a mutex whose changes are single assignments, so a panic leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn new(place: &Place, options: Options) -> Inner {
        let state = State { standing: vec![Standing::default(); place.processes], ..State::default() };
        Inner {
            rank: place.rank,
            options,
            start: Instant::now(),
            hosts: OnceLock::new(),
            peers: (0..place.processes).map(|_| OnceLock::new()).collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            place: Mutex::default(),
            calling: Mutex::default(),
            threads: Mutex::default(),
        }
    }

    /// Milliseconds since the start.
    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// `rank 3 (host b)`.
    fn name(&self, rank: usize) -> String {
        match self.hosts.get().and_then(|hosts| hosts.get(rank)) {
            Some(host) => format!("rank {rank} (host {host})"),
            None => format!("rank {rank}"),
        }
    }

    fn error(&self, cause: &Cause) -> Error {
        cause.error(self.rank, |rank| self.name(rank))
    }

    fn peers(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.peers.iter().filter_map(OnceLock::get)
    }

    fn spawn(self: &Arc<Self>, name: String, work: impl FnOnce(&Inner) + Send + 'static) -> Result<()> {
        let inner = self.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&inner));
        lock(&self.threads)
            .push(thread.map_err(|e| Error::system("mesh", format!("no thread for a connection: {e}")))?);
        Ok(())
    }

    /// Takes over the connection to another process.
    fn add(self: &Arc<Self>, rank: usize, stream: std::net::TcpStream) -> Result<()> {
        let usable = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
        let usable = usable.and_then(|()| stream.set_read_timeout(None)).and_then(|()| stream.set_write_timeout(None));
        usable.map_err(|e| Error::system("mesh", format!("the connection to {} failed: {e}", self.name(rank))))?;
        let peer = Arc::new(Peer::new(rank, stream, self.now()));
        let (reader, writer) = (peer.clone(), peer.clone());
        self.spawn(format!("from-{rank}"), move |links| reader.read(links))?;
        self.spawn(format!("to-{rank}"), move |links| writer.write(links))?;
        // The place is empty: a rank connects once.
        let _ = self.peers[rank].set(peer);
        self.changed.notify_all();
        Ok(())
    }

    /// Handles a frame that is no message. `None` if it cannot be read.
    fn frame(&self, peer: &Peer, kind: Kind, body: &[u8]) -> Option<()> {
        let mut d = Decoder(body);
        match kind {
            Kind::Heartbeat => {
                let calling = (d.u64()?, d.text()?);
                d.end()?;
                *lock(&peer.calling) = calling;
            }
            Kind::DeviceFailed => {
                let (exchange, run, device) = (d.u32()?, d.u64()?, d.u32()?);
                d.end()?;
                self.deliver(peer.rank, exchange, Item::Failed { run, device }).ok()?;
            }
            Kind::Call => {
                let message = calls::decode(body)?;
                lock(&self.state).inbox.insert(peer.rank, message);
                self.changed.notify_all();
            }
            Kind::Abort => {
                let cause = Cause::decode(body).filter(|cause| cause.rank < self.peers.len())?;
                lock(&self.state).standing[peer.rank].aborted = true;
                self.fail(cause);
                peer.send(Frame::new(Kind::Seen, Vec::new()));
            }
            Kind::Goodbye => self.ended(peer),
            Kind::Seen => {
                lock(&self.state).standing[peer.rank].seen = true;
                self.changed.notify_all();
            }
            Kind::Message => return None,
        }
        Some(())
    }

    /// A process has finished.
    fn ended(&self, peer: &Peer) {
        let mut state = lock(&self.state);
        state.standing[peer.rank].ended = true;
        let attached: Vec<_> = state.exchanges.iter().map(|a| (a.exchange.clone(), a.owners.clone())).collect();
        drop(state);
        self.changed.notify_all();
        for (exchange, owners) in attached {
            if let Some(exchange) = exchange.upgrade() {
                self.end_devices(&exchange, &owners, peer.rank);
            }
        }
        peer.send(Frame::new(Kind::Seen, Vec::new()));
    }

    fn end_devices(&self, exchange: &Exchange, owners: &[usize], rank: usize) {
        let devices = (0..owners.len()).filter(|device| owners[*device] == rank);
        exchange.end_devices(devices, &format!("{} has finished", self.name(rank)));
    }

    /// A device of another process has left a message. The error says what is wrong with it.
    fn message(&self, rank: usize, head: MessageHead, body: Arc<[u8]>) -> std::result::Result<(), String> {
        self.deliver(rank, head.exchange, Item::Message(head, body))
    }

    fn deliver(&self, rank: usize, number: usize, item: Item) -> std::result::Result<(), String> {
        let mut state = lock(&self.state);
        let Some(attached) = state.exchanges.get(number) else {
            let parked = state.parked.entry(number).or_default();
            parked.push((rank, item));
            return match parked.len() > MOST_PARKED {
                true => Err("it sends messages for an exchange that does not exist".into()),
                false => Ok(()),
            };
        };
        let (exchange, owners) = (attached.exchange.upgrade(), attached.owners.clone());
        drop(state);
        // The devices of an exchange that was dropped wait for nothing.
        let Some(exchange) = exchange else { return Ok(()) };
        let device = match &item {
            Item::Message(head, _) => head.device(exchange.mesh()),
            Item::Failed { device, .. } => Some(*device),
        };
        if device.and_then(|device| owners.get(device)) != Some(&rank) {
            return Err("it has sent the message of a device that it does not drive".into());
        }
        match item {
            Item::Message(MessageHead { round, program, from, to: Some(to), .. }, body) => {
                if owners.get(to) != Some(&self.rank) {
                    return Err("it has sent a message for a device of another process".into());
                }
                exchange.deliver(Mail { run: round.run, from, to, number: round.number }, program, body);
            }
            Item::Message(head, body) => exchange.leave(head.round, head.program, head.from, body),
            Item::Failed { run, device } => exchange.fail_elsewhere(run, device),
        }
        Ok(())
    }

    /// Fails the job in this process, and tells all others why. The first cause counts.
    fn fail(&self, cause: Cause) {
        let mut state = lock(&self.state);
        if state.cause.is_some() || state.closing {
            return;
        }
        let (error, frame) = (self.error(&cause), cause.frame());
        state.cause = Some(cause);
        let exchanges: Vec<_> = state.exchanges.iter().filter_map(|a| a.exchange.upgrade()).collect();
        drop(state);
        self.changed.notify_all();
        exchanges.iter().for_each(|exchange| exchange.break_off(&error));
        self.peers().for_each(|peer| peer.send_instead(frame.clone()));
    }

    /// The connection to a process has ended. That is a failure unless the process has said why.
    fn lost(&self, rank: usize) {
        let mut state = lock(&self.state);
        let standing = &mut state.standing[rank];
        standing.gone = true;
        let expected = standing.ended || standing.aborted;
        if !expected && !state.closing && state.cause.is_none() {
            let text = format!(
                "{} ended without a message: it was killed, or its machine or network failed (noticed by rank {})",
                self.name(rank),
                self.rank
            );
            state.suspect.get_or_insert_with(|| (Instant::now(), Cause::observed(rank, text)));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A process has sent what cannot be read.
    fn damaged(&self, rank: usize, what: &str) {
        let (rank_name, own) = (self.name(rank), self.rank);
        self.fail(Cause::observed(rank, format!("{rank_name} and rank {own} do not understand each other: {what}")));
    }

    /// Sends signs of life and looks for those of the others, until the links are closed.
    fn monitor(&self) {
        let Options { heartbeat, silence, grace, .. } = self.options;
        let tick = (heartbeat / 2).min(silence / 8).clamp(Duration::from_millis(5), Duration::from_millis(250));
        let ms = |d: Duration| d.as_millis() as u64;
        let mut last = self.now();
        let mut state = lock(&self.state);
        while !state.stop {
            state = self.changed.wait_timeout(state, tick).unwrap_or_else(PoisonError::into_inner).0;
            let due = state.suspect.as_ref().filter(|(since, _)| since.elapsed() >= grace).map(|s| s.1.clone());
            let standing = state.standing.clone();
            drop(state);
            let now = self.now();
            if now - last > ms(tick + silence / 4) {
                // This process was stopped itself: what came meanwhile has not been read yet.
                self.peers().for_each(|peer| peer.heard.store(now, Ordering::Relaxed));
            }
            last = now;
            if let Some(cause) = due {
                self.fail(cause);
            }
            for peer in self.peers() {
                let Standing { ended, aborted, gone, .. } = standing[peer.rank];
                if ended || aborted || gone {
                    continue;
                }
                if now.saturating_sub(peer.sent.load(Ordering::Relaxed)) >= ms(heartbeat) && peer.is_idle() {
                    peer.sent.store(now, Ordering::Relaxed);
                    peer.send(self.heartbeat());
                }
                if now.saturating_sub(peer.heard.load(Ordering::Relaxed)) >= ms(silence) {
                    let name = self.name(peer.rank);
                    let text = format!("{name} has not answered for {} s", silence.as_secs_f64());
                    self.fail(Cause::observed(peer.rank, text));
                }
            }
            self.find_deadlock();
            state = lock(&self.state);
        }
    }

    fn heartbeat(&self) -> Frame {
        let calling = lock(&self.calling);
        Frame::new(Kind::Heartbeat, Encoder::default().u64(calling.now).text(&calling.what, 1000).0)
    }

    /// Finds a process for which a device of this one waits, and which itself waits in a call that this one has not entered.
    /// Neither can ever continue: a process sends all messages of a step before it makes a call.
    fn find_deadlock(&self) {
        let mut found = None;
        // The calls are read first: messages that a process has sent before it entered one have arrived by now.
        let calling: Vec<_> = self.peers().map(|p| (p.rank, lock(&p.calling).clone())).filter(|c| c.1.0 > 0).collect();
        if calling.is_empty() {
            return;
        }
        let entered = lock(&self.calling).entered;
        let state = lock(&self.state);
        for attached in &state.exchanges {
            let Some(exchange) = attached.exchange.upgrade() else { continue };
            let owners: Vec<usize> = exchange.awaited().into_iter().map(|device| attached.owners[device]).collect();
            found = found.or_else(|| calling.iter().find(|c| c.1.0 > entered && owners.contains(&c.0)));
        }
        drop(state);
        if let Some((rank, (_, what))) = found {
            let place = lock(&self.place).clone();
            let at = if place.is_empty() { String::new() } else { format!(" at {place}") };
            let text = format!(
                "{} waits for all processes to {what}, while {} runs a step{at} and waits for it: they have taken different \
                 branches, or have different data",
                self.name(*rank),
                self.name(self.rank)
            );
            self.fail(Cause::observed(*rank, text));
        }
    }

    /// Sends a last frame, waits until the others have it, and ends the connections and threads.
    fn close(&self, last: Option<Frame>, instead: bool, wait: Duration) {
        let mut state = lock(&self.state);
        if state.closing {
            return;
        }
        state.closing = true;
        let exchanges: Vec<_> = state.exchanges.iter().filter_map(|a| a.exchange.upgrade()).collect();
        for peer in self.peers() {
            match &last {
                Some(frame) if instead => peer.send_instead(frame.clone()),
                Some(frame) => peer.send(frame.clone()),
                None => {}
            }
            peer.close_queue();
        }
        let until = Instant::now() + wait;
        let done = |state: &State| self.peers().all(|p| state.standing[p.rank].seen || state.standing[p.rank].gone);
        while last.is_some() && !done(&state) {
            let Some(left) = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) else { break };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.stop = true;
        drop(state);
        self.changed.notify_all();
        let closed = Error::system("mesh", "the connections to the other processes are closed");
        exchanges.iter().for_each(|exchange| exchange.break_off(&closed));
        self.peers().for_each(|peer| peer.disconnect());
        let threads = std::mem::take(&mut *lock(&self.threads));
        // A thread that panicked has reported it.
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Links {
    /// Connects this process with all others of its job, and returns when all are there. `terms` are names and values that have to
    /// be the same everywhere, such as the mesh and the hash of the recipe; a difference is an error in all processes.
    pub fn join(place: &Place, terms: &[(&str, String)], options: Options) -> Result<Links> {
        let mut links = Links { inner: Arc::new(Inner::new(place, options)), calls: Mutex::default(), all: None };
        if place.processes > 1 {
            let joined = links.inner.spawn("monitor".into(), Inner::monitor);
            let joined = joined.and_then(|()| join::join(&links.inner, place, terms));
            let all = || {
                let mesh = Mesh::new(&[(Axis::Dp, place.processes)])?;
                links.exchange(mesh, &(0..place.processes).collect::<Vec<_>>())
            };
            match joined.and_then(|()| links.barrier("start")).and_then(|()| all()) {
                Ok(all) => links.all = Some(all),
                Err(e) => {
                    links.abort(1, &e.to_string());
                    return Err(e);
                }
            }
        }
        Ok(links)
    }

    /// The rank of this process.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    pub fn processes(&self) -> usize {
        self.inner.peers.len()
    }

    /// `rank 3 (host b)`.
    pub fn name(&self, rank: usize) -> String {
        self.inner.name(rank)
    }

    /// Sets where the recipe of this process is, for messages.
    pub fn set_place(&self, place: String) {
        *lock(&self.inner.place) = place;
    }

    /// Spreads the devices of a mesh over the processes: neighbours, which exchange the most, stay together. Returns the process of
    /// each device.
    pub fn spread(&self, mesh: &Mesh) -> Result<Vec<usize>> {
        let (devices, n) = (mesh.devices(), self.processes());
        if !devices.is_multiple_of(n) {
            let message = format!("{n} processes cannot share the {devices} devices of mesh {mesh} evenly");
            return Err(Error::argument("mesh", message).hint(format!("use a mesh whose size is a multiple of {n}")));
        }
        Ok((0..devices).map(|device| device / (devices / n)).collect())
    }

    /// The exchange of a mesh whose devices all processes drive; `owners` has the process of each device. All processes make the
    /// same exchanges in the same order.
    pub fn exchange(&self, mesh: Mesh, owners: &[usize]) -> Result<Arc<Exchange>> {
        let n = self.processes();
        let bad = owners.iter().find(|owner| **owner >= n);
        if owners.len() != mesh.devices() || bad.is_some() {
            let message = format!(
                "this is a bug: mesh {mesh} has {} devices, and {} processes drive {owners:?}",
                mesh.devices(),
                n
            );
            return Err(Error::system("mesh", message));
        }
        let (inner, owners): (_, Arc<[usize]>) = (self.inner.clone(), owners.into());
        let local = owners.iter().map(|owner| *owner == inner.rank).collect();
        let mut state = lock(&inner.state);
        let number = state.exchanges.len();
        let route = Route { links: inner.clone(), number, mesh, owners: owners.clone() };
        let carrier = (n > 1).then(|| Arc::new(route) as Arc<dyn Carrier>);
        let exchange = Arc::new(Exchange::among(mesh, local, carrier));
        state.exchanges.push(Attached { exchange: Arc::downgrade(&exchange), owners: owners.clone() });
        let parked = state.parked.remove(&number).unwrap_or_default();
        let ended: Vec<usize> = (0..n).filter(|rank| state.standing[*rank].ended).collect();
        let error = state.cause.as_ref().map(|cause| inner.error(cause));
        drop(state);
        if let Some(error) = error {
            exchange.break_off(&error);
        }
        ended.into_iter().for_each(|rank| inner.end_devices(&exchange, &owners, rank));
        for (rank, item) in parked {
            if let Err(what) = inner.deliver(rank, number, item) {
                inner.damaged(rank, &what);
            }
        }
        Ok(exchange)
    }

    /// Why the job has failed, as far as this process knows.
    pub fn cause(&self) -> Option<Cause> {
        lock(&self.inner.state).cause.clone()
    }

    /// The message of a failure for the user, with its cause first.
    pub fn message(&self, cause: &Cause) -> String {
        cause.message(self.inner.rank, |rank| self.inner.name(rank))
    }

    /// Fails the job: sends the error of this process to all others, whose exchanges and calls fail with it, and closes the
    /// connections. Returns the cause of the failure: if the job has failed before, the first one, unless its text is the same.
    pub fn abort(&self, status: u8, text: &str) -> Cause {
        let own = Cause { rank: self.inner.rank, status, raised: true, text: text.to_string() };
        self.inner.fail(own.clone());
        let cause = self.cause().unwrap_or_else(|| own.clone());
        self.inner.close(Some(cause.frame()), true, ABORT_WAIT);
        if cause.raised && cause.text == own.text { own } else { cause }
    }

    /// Ends the connections without a failure. Messages that were sent still arrive; others do not wait for this process to the end.
    pub fn finish(&self) -> Result<()> {
        if let Some(cause) = self.cause() {
            self.abort(1, "");
            return Err(self.inner.error(&cause));
        }
        self.inner.close(Some(Frame::new(Kind::Goodbye, Vec::new())), false, self.inner.options.silence);
        Ok(())
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { "a thread panicked" } else { "it has not said why" };
        self.abort(1, how);
    }
}

/// Carries the messages of one exchange.
#[derive(Debug)]
struct Route {
    links: Arc<Inner>,
    number: usize,
    mesh: Mesh,
    owners: Arc<[usize]>,
}

impl Route {
    /// Refuses a message that no process would take, and any after the job has failed.
    fn check(&self, message: &[u8]) -> Result<()> {
        let limit = self.links.options.message_limit;
        if message.len() > limit {
            let message = format!("a message of {} bytes to other processes; the limit is {limit}", message.len());
            return Err(Error::system("mesh", message));
        }
        match &lock(&self.links.state).cause {
            Some(cause) => Err(self.links.error(cause)),
            None => Ok(()),
        }
    }
}

impl Carrier for Route {
    fn carry_to(&self, mail: &Mail, program: u64, message: &Arc<[u8]>) -> Result<()> {
        self.check(message)?;
        let round = Round { run: mail.run, group: Group::ALL, number: mail.number };
        let head = MessageHead { exchange: self.number, round, program, from: mail.from, to: Some(mail.to) };
        if let Some(peer) = self.links.peers[self.owners[mail.to]].get() {
            peer.send(Frame { kind: Kind::Message, head: head.encode(), body: message.clone() });
        }
        Ok(())
    }

    fn carry(&self, round: &Round, program: u64, from: usize, message: &Arc<[u8]>) -> Result<()> {
        self.check(message)?;
        let group = round.group;
        let members = (0..group.len(&self.mesh)).map(|k| self.owners[group.member(&self.mesh, k)]);
        let mut targets: Vec<usize> = members.filter(|owner| *owner != self.links.rank).collect();
        targets.sort_unstable();
        targets.dedup();
        let head = MessageHead { exchange: self.number, round: *round, program, from, to: None }.encode();
        for peer in targets.iter().filter_map(|rank| self.links.peers[*rank].get()) {
            peer.send(Frame { kind: Kind::Message, head: head.clone(), body: message.clone() });
        }
        Ok(())
    }

    fn fail(&self, run: u64, rank: usize) {
        let head = Encoder::default().u32(self.number).u64(run).u32(rank).0;
        self.links.peers().for_each(|peer| peer.send(Frame::new(Kind::DeviceFailed, head.clone())));
    }
}
