//! Exchanges messages among the devices of a mesh: a board on which each device of a group leaves its message and takes those of
//! the others.
//!
//! All devices begin the same exchanges in the same order, so a message is named by its run, its group and the number of
//! exchanges that the group had before in this run. Messages of devices in other processes are left on the board by whoever
//! receives them. If a device fails, the exchanges of its run fail on all others, so none waits for it. If a process fails or the
//! connection to it does, all exchanges do, and a [`Watch`] learns why: it ends what devices do without the exchange. Messages from one
//! device to another: [`mail`].

mod mail;

pub use mail::Mail;

use perilune_core::Mesh;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::{Axis, Coordinates};
use perilune_plan::{Peers, Ticket};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an exchange waits for the cause after a device of another process has failed.
const CAUSE_WAIT: Duration = Duration::from_secs(2);

/// The devices that take part in an exchange: those along an axis, or all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Group {
    /// `None` for all devices of the mesh.
    pub axis: Option<Axis>,
    /// The coordinates that its devices share; those along the axis are 0.
    pub at: Coordinates,
}

impl Group {
    /// The group of the device at `at` along an axis.
    pub fn along(axis: Axis, mut at: Coordinates) -> Group {
        at[axis as usize] = 0;
        Group { axis: Some(axis), at }
    }

    /// All devices.
    pub const ALL: Group = Group { axis: None, at: [0; Axis::ALL.len()] };

    /// The number of its devices.
    pub fn len(&self, mesh: &Mesh) -> usize {
        self.axis.map_or(mesh.devices(), |axis| mesh.size(axis))
    }

    /// The rank of its member `k`.
    pub fn member(&self, mesh: &Mesh, k: usize) -> usize {
        let Some(axis) = self.axis else { return k };
        let mut at = self.at;
        at[axis as usize] = k;
        mesh.rank(&at)
    }

    /// Which member the device at `at` is.
    pub fn index(&self, mesh: &Mesh, at: &Coordinates) -> usize {
        self.axis.map_or_else(|| mesh.rank(at), |axis| at[axis as usize])
    }
}

/// Names one exchange.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Round {
    /// Number of the run.
    pub run: u64,
    pub group: Group,
    /// Exchanges of the group before this one, in this run.
    pub number: u64,
}

/// What the members of a group have left so far.
#[derive(Debug)]
struct Messages {
    left: Vec<Option<Arc<[u8]>>>,
    /// How many members of this process have yet to take them.
    takers: usize,
    /// How many of those wait.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Board {
    rounds: FxHashMap<Round, Messages>,
    /// Messages from one device to another that have not been received.
    mail: FxHashMap<Mail, Arc<[u8]>>,
    /// Those for which a device of this process waits.
    expected: FxHashSet<Mail>,
    /// The program of each run, as far as it is known.
    programs: FxHashMap<u64, u64>,
    /// The last run of each device that has left a message.
    latest: FxHashMap<usize, u64>,
    /// The last run in which a device of this process failed, and the first one that did.
    failed: Option<(u64, usize)>,
    /// The same for devices of other processes, and when it became known.
    failed_elsewhere: Option<(u64, usize, Instant)>,
    /// Why no exchange can complete from now on.
    broken: Option<Error>,
    /// Devices whose process has ended, and how.
    ended: FxHashMap<usize, Arc<str>>,
}

/// Sends what a device leaves to other processes.
pub trait Carrier: Send + Sync + std::fmt::Debug {
    /// Sends the message of member `from` of a round to those processes that drive other members. `program` identifies what the
    /// device runs, or is 0. Returns before the others have received it.
    fn carry(&self, round: &Round, program: u64, from: usize, message: &Arc<[u8]>) -> Result<()>;

    /// Sends a message to the process that drives the device that receives it. Returns before it has received it.
    fn carry_to(&self, mail: &Mail, program: u64, message: &Arc<[u8]>) -> Result<()>;

    /// Reports that a device of this process has failed in a run.
    fn fail(&self, _run: u64, _rank: usize) {}
}

/// Is told that a device has failed, on the thread that learns of it.
pub type Watch = Box<dyn Fn(&Error) + Send + Sync>;

/// The board of one process.
pub struct Exchange {
    mesh: Mesh,
    /// Whether this process drives a device, by rank.
    local: Vec<bool>,
    carrier: Option<Arc<dyn Carrier>>,
    board: Mutex<Board>,
    changed: Condvar,
    watch: OnceLock<Watch>,
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Exchange").field("mesh", &self.mesh).field("board", &self.board).finish_non_exhaustive()
    }
}

impl Exchange {
    /// An exchange among devices that this process drives.
    pub fn new(mesh: Mesh) -> Exchange {
        Exchange::among(mesh, vec![true; mesh.devices()], None)
    }

    /// An exchange whose devices other processes drive too, except those that are `local`.
    pub fn among(mesh: Mesh, local: Vec<bool>, carrier: Option<Arc<dyn Carrier>>) -> Exchange {
        Exchange { mesh, local, carrier, board: Mutex::default(), changed: Condvar::new(), watch: OnceLock::new() }
    }

    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Sets who is told of failures, once.
    pub fn set_watch(&self, watch: Watch) {
        // There is one backend for an exchange.
        let _ = self.watch.set(watch);
    }

    fn tell(&self, why: &Error) {
        if let Some(watch) = self.watch.get() {
            watch(why);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        // Every change of the board is a single insertion or removal, so a panic leaves nothing half done.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the message of member `from` of a round, which comes from a device that runs `program` (0 if it is unknown).
    pub fn leave(&self, round: Round, program: u64, from: usize, message: Arc<[u8]>) {
        let device = round.group.member(&self.mesh, from);
        let mut board = self.lock();
        self.messages(&mut board, round).left[from] = Some(message);
        self.note(&mut board, round.run, device, program);
        drop(board);
        self.changed.notify_all();
    }

    /// Notes that a device has sent something in a run of a program.
    fn note(&self, board: &mut Board, run: u64, device: usize, program: u64) {
        let latest = board.latest.entry(device).or_default();
        *latest = run.max(*latest);
        let differs = program != 0 && *board.programs.entry(run).or_insert(program) != program;
        if differs && board.broken.is_none() {
            board.broken = Some(self.diverged(format!(
                "device {device} of mesh {} runs another program than the others in run {run}",
                self.mesh
            )));
        }
    }

    fn diverged(&self, what: String) -> Error {
        let message = format!("{what}: the processes have taken different branches, or have different data");
        Error::system("mesh", message).hint("a recipe has to make the same steps, in the same order, in all processes")
    }

    fn messages<'a>(&self, board: &'a mut Board, round: Round) -> &'a mut Messages {
        board.rounds.entry(round).or_insert_with(|| {
            let n = round.group.len(&self.mesh);
            let takers = (0..n).filter(|k| self.local[round.group.member(&self.mesh, *k)]).count();
            Messages { left: vec![None; n], takers, waiting: 0 }
        })
    }

    /// Waits until all members of a round have left their messages.
    fn take(&self, round: Round) -> Result<Vec<Arc<[u8]>>> {
        let mut board = self.lock();
        loop {
            if let Some((_, rank)) = board.failed.filter(|f| f.0 == round.run) {
                return Err(self.device_failed(rank));
            }
            if let Some(error) = &board.broken {
                return Err(error.clone());
            }
            let elsewhere = board.failed_elsewhere.filter(|f| f.0 == round.run);
            if let Some((_, rank, _)) = elsewhere.filter(|f| f.2.elapsed() >= CAUSE_WAIT) {
                return Err(self.device_failed(rank));
            }
            let messages = self.messages(&mut board, round);
            if elsewhere.is_none() {
                if let Some(all) = messages.left.iter().cloned().collect::<Option<Vec<_>>>() {
                    messages.takers -= 1;
                    if messages.takers == 0 {
                        board.rounds.remove(&round);
                    }
                    return Ok(all);
                }
                let missing = missing(&self.mesh, &round, messages);
                // A device leaves all messages of a run before those of the next one.
                let ahead =
                    missing.iter().find_map(|d| Some((*d, *board.latest.get(d).filter(|run| **run > round.run)?)));
                if let Some((device, run)) = ahead {
                    let what =
                        format!("device {device} of mesh {} is in run {run}, others in run {}", self.mesh, round.run);
                    return Err(self.diverged(what));
                }
                if let Some(ended) = missing.iter().find_map(|device| board.ended.get(device)) {
                    let message = format!("{ended}, but the other processes still wait for it in a step");
                    return Err(Error::system("mesh", message));
                }
            }
            self.messages(&mut board, round).waiting += 1;
            board = match elsewhere {
                None => self.changed.wait(board).unwrap_or_else(PoisonError::into_inner),
                Some(_) => self.changed.wait_timeout(board, CAUSE_WAIT).unwrap_or_else(PoisonError::into_inner).0,
            };
            let messages = self.messages(&mut board, round);
            messages.waiting = messages.waiting.saturating_sub(1);
        }
    }

    fn device_failed(&self, rank: usize) -> Error {
        Error::system("mesh", format!("device {rank} of mesh {} has failed", self.mesh))
    }

    /// Ends all exchanges of a run, because a device of this process has failed. The first failure of a run counts.
    pub fn fail(&self, run: u64, rank: usize) {
        let mut board = self.lock();
        let known = board.broken.is_some() || board.failed_elsewhere.is_some_and(|f| f.0 == run);
        let first = board.failed.is_none_or(|f| f.0 < run);
        if first {
            board.failed = Some((run, rank));
        }
        drop(board);
        self.changed.notify_all();
        self.tell(&self.device_failed(rank));
        if let Some(carrier) = self.carrier.as_ref().filter(|_| first && !known) {
            carrier.fail(run, rank);
        }
    }

    /// Ends all exchanges of a run, because a device of another process has failed.
    pub fn fail_elsewhere(&self, run: u64, rank: usize) {
        let mut board = self.lock();
        if board.failed_elsewhere.is_none_or(|f| f.0 < run) {
            board.failed_elsewhere = Some((run, rank, Instant::now()));
        }
        drop(board);
        self.changed.notify_all();
        self.tell(&self.device_failed(rank));
    }

    /// Ends all exchanges of this and later runs with an error. The first one counts.
    pub fn break_off(&self, error: &Error) {
        self.lock().broken.get_or_insert_with(|| error.clone());
        self.changed.notify_all();
        self.tell(error);
    }

    /// Ends exchanges that still need a message of these devices: their process has ended, as `how` says.
    pub fn end_devices(&self, devices: impl IntoIterator<Item = usize>, how: &str) {
        let how: Arc<str> = how.into();
        self.lock().ended.extend(devices.into_iter().map(|device| (device, how.clone())));
        self.changed.notify_all();
    }

    /// The devices of other processes for which a device of this one waits.
    pub fn awaited(&self) -> Vec<usize> {
        let board = self.lock();
        let waiting = board.rounds.iter().filter(|(_, messages)| messages.waiting > 0);
        let mut all: Vec<usize> = waiting.flat_map(|(round, m)| missing(&self.mesh, round, m)).collect();
        all.extend(board.expected.iter().map(|mail| mail.from));
        all.retain(|device| !self.local[*device]);
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The device of this process that failed first in a run.
    pub fn failed(&self, run: u64) -> Option<usize> {
        self.lock().failed.filter(|f| f.0 == run).map(|f| f.1)
    }

    /// Forgets the messages of runs up to `run`: all its devices of this process have ended.
    pub fn end(&self, run: u64) {
        let mut board = self.lock();
        board.rounds.retain(|round, _| round.run > run);
        board.mail.retain(|mail, _| mail.run > run);
        board.programs.retain(|of, _| *of > run);
    }
}

/// The devices that have not left their messages.
fn missing(mesh: &Mesh, round: &Round, messages: &Messages) -> Vec<usize> {
    let absent = messages.left.iter().enumerate().filter(|(_, m)| m.is_none());
    absent.map(|(k, _)| round.group.member(mesh, k)).collect()
}

/// One device of a mesh in one run.
#[derive(Debug)]
pub struct Rank {
    exchange: Arc<Exchange>,
    run: u64,
    program: u64,
    has_stages: bool,
    at: Coordinates,
    /// Exchanges so far in this run along each axis, and among all devices.
    counts: [AtomicU64; Axis::ALL.len() + 1],
}

impl Rank {
    pub fn new(exchange: Arc<Exchange>, run: u64, rank: usize) -> Rank {
        let at = exchange.mesh.coordinates(rank);
        Rank { exchange, run, program: 0, has_stages: false, at, counts: Default::default() }
    }

    /// Names the program of the run, so that devices of other processes that run another one are found out.
    #[must_use]
    pub fn of_program(self, program: u64) -> Rank {
        Rank { program, ..self }
    }

    /// Says whether the devices along `pp` run programs of their own.
    #[must_use]
    pub fn in_stages(self, has_stages: bool) -> Rank {
        Rank { has_stages, ..self }
    }

    /// Leaves a message for the next exchange of a group.
    fn leave_for(&self, group: Group, message: Arc<[u8]>) -> Result<Round> {
        let Exchange { mesh, carrier, .. } = &*self.exchange;
        let count = &self.counts[group.axis.map_or(Axis::ALL.len(), |axis| axis as usize)];
        let round = Round { run: self.run, group, number: count.fetch_add(1, Ordering::Relaxed) };
        let index = group.index(mesh, &self.at);
        if let Some(carrier) = carrier {
            carrier.carry(&round, self.program, index, &message)?;
        }
        self.exchange.leave(round, self.program, index, message);
        Ok(round)
    }
}

impl Rank {
    /// The rank of the device at a coordinate along an axis, the others being those of this one.
    fn rank_at(&self, axis: Axis, coordinate: usize) -> usize {
        let mut at = self.at;
        at[axis as usize] = coordinate;
        self.exchange.mesh.rank(&at)
    }

    /// Takes part in the barriers of the devices whose programs have not ended, until those of all have: programs of other pipeline
    /// stages may have more barriers than this one's.
    pub fn end(&self) -> Result<()> {
        loop {
            let all = self.exchange.take(self.leave_for(Group::ALL, Arc::from([ENDED]))?)?;
            if all.iter().all(|message| message[..] == [ENDED]) {
                return Ok(());
            }
        }
    }
}

/// What a device sends to the barriers of others after its program has ended; in a barrier of its own it sends nothing.
const ENDED: u8 = 1;

impl Peers for Rank {
    fn send_to(&self, axis: Axis, to: usize, number: u64, bytes: &[u8]) -> Result<()> {
        let (own, other) = (self.exchange.mesh.rank(&self.at), self.rank_at(axis, to));
        let mail = Mail { run: self.run, from: own, to: other, number };
        self.exchange.post(mail, self.program, bytes.into())
    }

    fn receive_from(&self, axis: Axis, from: usize, number: u64) -> Result<Arc<[u8]>> {
        let (own, other) = (self.exchange.mesh.rank(&self.at), self.rank_at(axis, from));
        self.exchange.collect(Mail { run: self.run, from: other, to: own, number })
    }

    fn coordinate(&self, axis: Axis) -> usize {
        self.at[axis as usize]
    }

    fn has_stages(&self) -> bool {
        self.has_stages
    }

    fn send(&self, axis: Axis, bytes: &[u8]) -> Result<Ticket> {
        let round = self.leave_for(Group::along(axis, self.at), bytes.into())?;
        Ok(Ticket { axis, number: round.number })
    }

    fn receive(&self, ticket: Ticket) -> Result<Vec<Arc<[u8]>>> {
        let group = Group::along(ticket.axis, self.at);
        self.exchange.take(Round { run: self.run, group, number: ticket.number })
    }

    fn barrier(&self) -> Result<()> {
        self.exchange.take(self.leave_for(Group::ALL, Arc::from([]))?).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a function as every device of a mesh, each in its own thread.
    fn on_all<T: Send>(text: &str, f: impl Fn(&Rank, usize) -> T + Sync) -> (Vec<T>, Arc<Exchange>) {
        let mesh = Mesh::parse(text).unwrap();
        let exchange = Arc::new(Exchange::new(mesh));
        let all = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..mesh.devices())
                .map(|rank| {
                    let (peer, f) = (Rank::new(exchange.clone(), 7, rank), &f);
                    scope.spawn(move || f(&peer, rank))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        (all, exchange)
    }

    #[test]
    fn members_get_all_messages_in_the_order_of_their_coordinates() {
        let (all, exchange) = on_all("dp=2,tp=3", |peer, rank| {
            let along = |axis| peer.exchange(axis, &[rank as u8]).unwrap().iter().map(|m| m[0]).collect::<Vec<_>>();
            let both = (along(Axis::Dp), along(Axis::Tp), along(Axis::Tp));
            peer.barrier().unwrap();
            both
        });
        for (rank, (dp, tp, again)) in all.iter().enumerate() {
            let rank = rank as u8;
            assert_eq!(*dp, [rank % 3, rank % 3 + 3]);
            assert_eq!(*tp, [rank / 3 * 3, rank / 3 * 3 + 1, rank / 3 * 3 + 2]);
            assert_eq!(again, tp);
        }
        assert!(exchange.lock().rounds.is_empty(), "taken messages stay on the board");
    }

    #[test]
    fn a_failed_device_ends_the_exchanges_of_its_run() {
        let (all, exchange) = on_all("dp=4", |peer, rank| {
            if rank == 2 {
                peer.exchange.fail(peer.run, rank);
                return String::new();
            }
            peer.barrier().unwrap_err().message
        });
        assert_eq!(all[0], "device 2 of mesh dp=4 has failed");
        assert_eq!((exchange.failed(7), exchange.failed(6)), (Some(2), None));
        exchange.end(7);
        assert!(exchange.lock().rounds.is_empty());
        // The next run is not affected.
        let ranks = [0, 1, 2, 3].map(|rank| Rank::new(exchange.clone(), 8, rank));
        std::thread::scope(|scope| {
            for peer in &ranks {
                scope.spawn(|| peer.barrier().unwrap());
            }
        });
    }

    #[test]
    fn a_watch_is_told_of_every_failure() {
        let exchange = Exchange::new(Mesh::parse("dp=2").unwrap());
        let told = Arc::new(Mutex::new(Vec::new()));
        let heard = told.clone();
        exchange.set_watch(Box::new(move |why| heard.lock().unwrap().push(why.message.clone())));
        exchange.fail(3, 1);
        exchange.fail_elsewhere(4, 0);
        exchange.break_off(&Error::system("mesh", "rank 1 ended"));
        let want = ["device 1 of mesh dp=2 has failed", "device 0 of mesh dp=2 has failed", "rank 1 ended"];
        assert_eq!(*told.lock().unwrap(), want);
    }

    #[test]
    fn a_message_reaches_its_device_only_and_sending_does_not_wait() {
        let (all, exchange) = on_all("pp=3,dp=2", |peer, rank| {
            let stage = peer.coordinate(Axis::Pp);
            // The last stage receives in another order than that in which the first one sends.
            if stage == 0 {
                (0..4).for_each(|k| peer.send_to(Axis::Pp, 2, k, &[rank as u8, k as u8]).unwrap());
            }
            let got = if stage == 2 { vec![3, 1, 0, 2] } else { Vec::new() };
            let got = got.into_iter().map(|k| peer.receive_from(Axis::Pp, 0, k).unwrap().to_vec()).collect::<Vec<_>>();
            // Some devices have no barrier in their program.
            if stage > 0 {
                peer.barrier().unwrap();
            }
            peer.end().unwrap();
            got
        });
        for (rank, got) in all.iter().enumerate() {
            let sender = rank as u8 % 2;
            let want = if rank < 4 { Vec::new() } else { [3, 1, 0, 2].map(|k| vec![sender, k]).to_vec() };
            assert_eq!(*got, want, "device {rank}");
        }
        assert!(exchange.lock().rounds.is_empty() && exchange.lock().mail.is_empty());
    }

    #[test]
    fn a_failed_device_ends_the_wait_for_its_message() {
        let (all, _) = on_all("pp=2", |peer, rank| match rank {
            0 => {
                peer.exchange.fail(peer.run, rank);
                String::new()
            }
            _ => peer.receive_from(Axis::Pp, 0, 5).unwrap_err().message,
        });
        assert_eq!(all[1], "device 0 of mesh pp=2 has failed");
        let mesh = Mesh::parse("pp=2").unwrap();
        let peer = Rank::new(Arc::new(Exchange::among(mesh, vec![true, false], None)), 1, 0);
        assert_eq!(
            peer.send_to(Axis::Pp, 1, 0, &[1]).unwrap_err().message,
            "this is a bug: device 1 of mesh pp=2 belongs to another process"
        );
    }

    #[test]
    fn messages_of_other_processes_arrive_through_the_carrier() {
        #[derive(Debug)]
        struct Other(std::sync::Weak<Exchange>);
        impl Carrier for Other {
            fn carry_to(&self, mail: &Mail, program: u64, message: &Arc<[u8]>) -> Result<()> {
                let answer: Arc<[u8]> = message.iter().map(|b| b + 50).collect();
                let back = Mail { from: mail.to, to: mail.from, ..*mail };
                self.0.upgrade().unwrap().deliver(back, program, answer);
                Ok(())
            }

            fn carry(&self, round: &Round, program: u64, from: usize, message: &Arc<[u8]>) -> Result<()> {
                // The other process answers with its own message.
                let answer: Arc<[u8]> = message.iter().map(|b| b + 100).collect();
                self.0.upgrade().unwrap().leave(*round, program, 1 - from, answer);
                Ok(())
            }
        }
        let mesh = Mesh::parse("dp=2").unwrap();
        let exchange =
            Arc::new_cyclic(|me| Exchange::among(mesh, vec![true, false], Some(Arc::new(Other(me.clone())))));
        let peer = Rank::new(exchange.clone(), 1, 0);
        assert_eq!(peer.exchange(Axis::Dp, &[5]).unwrap().iter().map(|m| m[0]).collect::<Vec<_>>(), [5, 105]);
        peer.send_to(Axis::Dp, 1, 3, &[7]).unwrap();
        assert_eq!(peer.receive_from(Axis::Dp, 1, 3).unwrap()[..], [57]);
        assert!(exchange.lock().rounds.is_empty() && exchange.lock().mail.is_empty());
        // Of a process that has gone on to the next run, or has ended, no message of this one comes.
        let late = Mail { run: 2, from: 1, to: 0, number: 0 };
        exchange.deliver(late, 0, Arc::from([1]));
        let e = peer.receive_from(Axis::Dp, 1, 4).unwrap_err().message;
        assert!(e.contains("device 1 of mesh dp=2 is in run 2, others in run 1"), "{e}");
        exchange.end_devices([1], "rank 1 has finished");
        let next = Rank::new(exchange.clone(), 2, 0);
        assert_eq!(next.receive_from(Axis::Dp, 1, 0).unwrap()[..], [1]);
        let e = next.receive_from(Axis::Dp, 1, 1).unwrap_err().message;
        assert_eq!(e, "rank 1 has finished, but the other processes still wait for it in a step");
        assert!(exchange.lock().expected.is_empty());
    }
}
