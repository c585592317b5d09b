//! Lets the processes of a job find each other.
//!
//! Process 0 listens on the address of the job. Every other process opens a port of its own and says hello to process 0, which
//! compares what must be equal and, when all are there, sends everyone the addresses of all. Each process then connects to those
//! of lower ranks. Connections of strangers are closed, so a port scanner or a process of another job does no harm.

use super::Inner;
use super::frame::{Decoder, Encoder};
use crate::rendezvous::{Address, Place};
use perilune_core::error::{Error, Result};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 8] = b"perilune";
/// Changes with every change of what processes send each other.
const PROTOCOL: usize = 1;
/// The most bytes of a hello or of an answer to it.
const MOST_HELLO: usize = 4 << 20;
/// How long a connected process has for its hello.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// How long process 0 refuses processes that come after a failure.
const REFUSE_TIME: Duration = Duration::from_secs(5);
/// How long a process tries to reach another one that is known to listen.
const REACH_TIME: Duration = Duration::from_secs(10);
/// Connections whose hello is being read.
const MOST_PENDING: usize = 64;
const POLL: Duration = Duration::from_millis(5);

/// What a process says when it connects.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Hello {
    /// To process 0.
    Job(Box<JobHello>),
    /// To another process, with the session that process 0 has chosen.
    Direct { session: u64, rank: usize },
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct JobHello {
    rank: usize,
    host: String,
    /// Where this process listens.
    port: u16,
    /// Names and values that have to be equal.
    terms: Vec<(String, String)>,
}

/// The answer of process 0.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Answer {
    Refused(String),
    /// The session, and the host and address of every process.
    Welcome {
        session: u64,
        table: Vec<(String, SocketAddr)>,
    },
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        match self {
            Hello::Direct { session, rank } => Encoder::default().u8(1).u64(*session).u32(*rank).0,
            Hello::Job(hello) => {
                let JobHello { rank, host, port, terms } = &**hello;
                let mut out =
                    Encoder::default().u8(2).u32(*rank).text(host, 255).u32(usize::from(*port)).u32(terms.len());
                for (name, value) in terms {
                    out = out.text(name, 1000).text(value, 4000);
                }
                out.0
            }
        }
    }

    fn decode(bytes: &[u8]) -> Option<Hello> {
        let mut d = Decoder(bytes);
        let hello = match d.u8()? {
            1 => Hello::Direct { session: d.u64()?, rank: d.u32()? },
            2 => {
                let (rank, host, port, n) = (d.u32()?, d.text()?, u16::try_from(d.u32()?).ok()?, d.u32()?);
                let terms = (0..n.min(1000)).map(|_| Some((d.text()?, d.text()?))).collect::<Option<_>>()?;
                Hello::Job(Box::new(JobHello { rank, host, port, terms }))
            }
            _ => return None,
        };
        d.end()?;
        Some(hello)
    }
}

impl Answer {
    fn encode(&self) -> Vec<u8> {
        match self {
            Answer::Refused(text) => Encoder::default().u8(1).text(text, 64 << 10).0,
            Answer::Welcome { session, table } => {
                let mut out = Encoder::default().u8(2).u64(*session).u32(table.len());
                for (host, address) in table {
                    out = out.text(host, 255).text(&address.to_string(), 255);
                }
                out.0
            }
        }
    }

    fn decode(bytes: &[u8]) -> Option<Answer> {
        let mut d = Decoder(bytes);
        let answer = match d.u8()? {
            1 => Answer::Refused(d.text()?),
            2 => {
                let (session, n) = (d.u64()?, d.u32()?);
                let table = (0..n).map(|_| Some((d.text()?, d.text()?.parse().ok()?))).collect::<Option<_>>()?;
                Answer::Welcome { session, table }
            }
            _ => return None,
        };
        d.end()?;
        Some(answer)
    }
}

fn send(mut stream: &TcpStream, payload: &[u8]) -> io::Result<()> {
    let mut out = MAGIC.to_vec();
    out.extend((PROTOCOL as u32).to_le_bytes());
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend(payload);
    stream.write_all(&out)
}

/// What was read instead of a hello or an answer.
#[derive(Debug)]
enum Unread {
    /// The connection has ended, or the time is over.
    Gone(io::Error),
    /// The other side is no process of Perilune.
    Stranger,
    Protocol(usize),
}

impl From<io::Error> for Unread {
    fn from(e: io::Error) -> Unread {
        Unread::Gone(e)
    }
}

/// Reads exactly as many bytes as fit, until a deadline.
fn fill(mut stream: &TcpStream, buffer: &mut [u8], until: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        let left = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero());
        stream.set_read_timeout(Some(left.ok_or(ErrorKind::TimedOut)?))?;
        match stream.read(&mut buffer[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn receive(stream: &TcpStream, until: Instant) -> std::result::Result<Vec<u8>, Unread> {
    let mut head = [0; 16];
    fill(stream, &mut head, until)?;
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i])) as usize;
    if head[..8] != MAGIC[..] || number(12) > MOST_HELLO {
        return Err(Unread::Stranger);
    }
    if number(8) != PROTOCOL {
        return Err(Unread::Protocol(number(8)));
    }
    let mut payload = vec![0; number(12)];
    fill(stream, &mut payload, until)?;
    Ok(payload)
}

/// Accepts connections and reads their hellos beside each other, so that a silent one delays no other.
struct Acceptor {
    listener: TcpListener,
    pending: Arc<AtomicUsize>,
    hellos: Sender<(TcpStream, std::result::Result<Hello, Unread>)>,
    received: Receiver<(TcpStream, std::result::Result<Hello, Unread>)>,
}

impl Acceptor {
    fn new(listener: TcpListener) -> io::Result<Acceptor> {
        listener.set_nonblocking(true)?;
        let (hellos, received) = channel();
        Ok(Acceptor { listener, pending: Arc::default(), hellos, received })
    }

    /// The next connection that has said hello, if there is one now.
    fn poll(&self) -> io::Result<Option<(TcpStream, std::result::Result<Hello, Unread>)>> {
        while self.pending.load(Ordering::Relaxed) < MOST_PENDING {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // The connection has ended already.
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted
                    ) =>
                {
                    continue;
                }
                Err(e) => return Err(e),
            };
            stream.set_nonblocking(false)?;
            self.pending.fetch_add(1, Ordering::Relaxed);
            let (hellos, pending) = (self.hellos.clone(), self.pending.clone());
            let read = move || {
                let hello = receive(&stream, Instant::now() + HELLO_TIME);
                let hello = hello.and_then(|bytes| Hello::decode(&bytes).ok_or(Unread::Stranger));
                pending.fetch_sub(1, Ordering::Relaxed);
                // Nobody receives it when all processes are there.
                let _ = hellos.send((stream, hello));
            };
            std::thread::Builder::new().name("hello".into()).spawn(read)?;
        }
        Ok(self.received.recv_timeout(POLL).ok())
    }
}

/// This machine's name.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "unknown".into() } else { name }
}

fn system(message: String) -> Error {
    Error::system("", message)
}

/// An I/O error without its number.
fn plain(e: &io::Error) -> String {
    let text = match e.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => "it does not answer".to_string(),
        ErrorKind::UnexpectedEof => "it has closed the connection".to_string(),
        _ => e.to_string(),
    };
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}

/// What has to be equal in all processes of a job, in the order in which it is compared.
fn terms(place: &Place, own: &[(&str, String)]) -> Vec<(String, String)> {
    let mut all = vec![
        ("job".to_string(), place.job.clone()),
        ("restart of the job".to_string(), place.attempt.to_string()),
        ("version of Perilune".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("number of processes".to_string(), place.processes.to_string()),
    ];
    all.extend(own.iter().map(|(name, value)| (name.to_string(), value.clone())));
    all
}

/// How many of the terms say whether a process belongs to the job at all.
const JOB_TERMS: usize = 2;

/// The first term that differs: its position and both values.
fn difference(own: &[(String, String)], other: &[(String, String)]) -> Option<(usize, String, String)> {
    let none = (String::new(), "nothing".to_string());
    (0..own.len().max(other.len())).find_map(|k| {
        let (a, b) = (own.get(k).unwrap_or(&none), other.get(k).unwrap_or(&none));
        let show = |v: &(String, String), name: &str| match (v.0 == name, v.1.is_empty()) {
            (true, true) => "none".to_string(),
            (true, false) => v.1.clone(),
            (false, _) => format!("nothing under this name, but {:?}", v.0),
        };
        (a != b).then(|| (k, show(a, &a.0), show(b, &a.0)))
    })
}

/// Connects a process to all others.
pub fn join(links: &Arc<Inner>, place: &Place, own: &[(&str, String)]) -> Result<()> {
    let address = place.address.as_ref().ok_or_else(|| system("this is a bug: processes without an address".into()))?;
    let until = Instant::now() + links.options.join;
    let terms = terms(place, own);
    match place.rank {
        0 => Host { links, place, address, terms }.join(until),
        _ => Guest { links, place, address, terms }.join(until),
    }
}

/// Opens a port: on the loopback device if all processes are on this host, where it is what they connect to.
fn listen(place: &Place, port: u16) -> io::Result<TcpListener> {
    if place.one_host() {
        return TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    }
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
        Err(e) if e.kind() != ErrorKind::AddrInUse => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
        other => other,
    }
}

/// Process 0.
struct Host<'a> {
    links: &'a Arc<Inner>,
    place: &'a Place,
    address: &'a Address,
    terms: Vec<(String, String)>,
}

/// A process that has said hello to process 0.
struct Joined {
    stream: TcpStream,
    host: String,
    port: u16,
}

impl Joined {
    /// Whether its connection has ended.
    fn has_left(&self) -> bool {
        let ended = |n: io::Result<usize>| match n {
            Ok(n) => n == 0,
            Err(e) => e.kind() != ErrorKind::WouldBlock,
        };
        let looked = self.stream.set_nonblocking(true).map(|()| ended(self.stream.peek(&mut [0])));
        let back = self.stream.set_nonblocking(false);
        looked.unwrap_or(true) || back.is_err()
    }
}

impl Host<'_> {
    fn join(&self, until: Instant) -> Result<()> {
        let listener = listen(self.place, self.address.port).map_err(|e| {
            let error = system(format!("rank 0 cannot listen on {}: {}", self.address, plain(&e)));
            error.hint("another job may use the port: choose a free one (MASTER_PORT, or --master HOST:PORT)")
        })?;
        let failed =
            |e: io::Error| system(format!("rank 0 cannot accept connections on {}: {}", self.address, plain(&e)));
        let acceptor = Acceptor::new(listener).map_err(failed)?;
        let n = self.place.processes;
        let mut joined: Vec<Option<Joined>> = (0..n).map(|_| None).collect();
        let mut strangers = Vec::new();
        while joined[1..].iter().any(Option::is_none) {
            if Instant::now() >= until {
                let error = self.nobody(&joined, &strangers);
                self.refuse_all(&joined, &error);
                return Err(error);
            }
            joined.iter_mut().for_each(|j| *j = j.take().filter(|j| !j.has_left()));
            let Some((stream, hello)) = acceptor.poll().map_err(failed)? else { continue };
            match hello {
                Ok(Hello::Job(hello)) => {
                    let rank = hello.rank;
                    match self.judge(&hello, &joined) {
                        Ok(()) => joined[rank] = Some(Joined { stream, host: hello.host, port: hello.port }),
                        Err((error, fatal)) => {
                            refuse(&stream, &error);
                            if fatal {
                                self.refuse_all(&joined, &error);
                                self.refuse_late(&acceptor, &joined, hello.rank, &error);
                                return Err(error);
                            }
                            strangers.push(error.message);
                        }
                    }
                }
                Err(Unread::Protocol(other)) => {
                    let from = stream.peer_addr().map(|a| a.ip().to_string()).unwrap_or_default();
                    let message = format!(
                        "a process on {from} uses version {other} of the protocol, and rank 0 version {PROTOCOL}"
                    );
                    let error = system(message).hint("run the same release of Perilune on all hosts");
                    refuse(&stream, &error);
                    strangers.push(error.message);
                }
                // A port scanner, or a process that has ended.
                Ok(Hello::Direct { .. }) | Err(Unread::Stranger | Unread::Gone(_)) => {}
            }
        }
        self.welcome(joined.into_iter().flatten().collect())
    }

    /// Whether a process may join; else the error, and whether the job fails with it.
    fn judge(&self, hello: &JobHello, joined: &[Option<Joined>]) -> std::result::Result<(), (Error, bool)> {
        let name = format!("rank {} (host {})", hello.rank, hello.host);
        let own = format!("rank 0 (host {})", host_name());
        if let Some((k, ours, theirs)) = difference(&self.terms, &hello.terms) {
            let what = self.terms.get(k).map_or("terms", |t| t.0.as_str());
            let error = system(format!("{name} and {own} differ in the {what}: {theirs} and {ours}"));
            let cure = match k < JOB_TERMS {
                true => "another job uses this address: choose another port (MASTER_PORT, or --master HOST:PORT)",
                false => "start all processes with the same release, recipe and options",
            };
            return Err((error.hint(cure), k >= JOB_TERMS));
        }
        let n = self.place.processes;
        if hello.rank == 0 || hello.rank >= n {
            let error =
                system(format!("{name} connects to {own} of {n} processes: its rank must be from 1 to {}", n - 1));
            return Err((error.hint("give each process a rank of its own"), true));
        }
        if let Some(first) = &joined[hello.rank] {
            let error = system(format!(
                "two processes have rank {}: on host {} and on host {}",
                hello.rank, first.host, hello.host
            ));
            return Err((error.hint("give each process a rank of its own"), true));
        }
        Ok(())
    }

    /// The error if processes are missing at the end.
    fn nobody(&self, joined: &[Option<Joined>], strangers: &[String]) -> Error {
        let missing: Vec<String> = (1..joined.len()).filter(|k| joined[*k].is_none()).map(|k| k.to_string()).collect();
        let shown = missing.len().min(20);
        let mut message = format!(
            "{} of {} processes have not come within {} s: rank {}",
            missing.len(),
            joined.len(),
            self.links.options.join.as_secs_f64(),
            missing[..shown].join(", ")
        );
        if shown < missing.len() {
            message.push_str(", …");
        }
        for stranger in strangers.iter().take(3) {
            message.push_str(&format!("\n  refused: {stranger}"));
        }
        system(message).hint(format!("see whether they run, and whether they can reach {}", self.address))
    }

    fn refuse_all(&self, joined: &[Option<Joined>], error: &Error) {
        joined.iter().flatten().for_each(|j| refuse(&j.stream, error));
    }

    /// Tells the error to processes that come a little later: they would try to reach this one until their time is over.
    fn refuse_late(&self, acceptor: &Acceptor, joined: &[Option<Joined>], refused: usize, error: &Error) {
        let mut missing: Vec<usize> = (1..joined.len()).filter(|k| joined[*k].is_none() && *k != refused).collect();
        let until = Instant::now() + REFUSE_TIME;
        while !missing.is_empty() && Instant::now() < until {
            let Ok(next) = acceptor.poll() else { return };
            if let Some((stream, Ok(Hello::Job(hello)))) = next {
                refuse(&stream, error);
                missing.retain(|k| *k != hello.rank);
            }
        }
    }

    fn welcome(&self, joined: Vec<Joined>) -> Result<()> {
        let random = RandomState::new().build_hasher().finish();
        let session = random ^ u64::from(std::process::id());
        let hosts = std::iter::once(host_name()).chain(joined.iter().map(|j| j.host.clone())).collect();
        // Only this function sets them.
        let _ = self.links.hosts.set(hosts);
        let lost = |rank: usize, e: io::Error| system(format!("{} has left: {}", self.links.name(rank), plain(&e)));
        let mut seen = Vec::new();
        for (k, j) in joined.iter().enumerate() {
            seen.push(j.stream.peer_addr().map_err(|e| lost(k + 1, e))?.ip().to_canonical());
        }
        for (k, j) in joined.iter().enumerate() {
            let reached_by = j.stream.local_addr().map_err(|e| lost(k + 1, e))?.ip().to_canonical();
            let table = |k: usize, ip: &IpAddr| {
                // A process on the host of rank 0 may have come by the loopback device, which is another one for the others.
                let ip = if ip.is_loopback() { reached_by } else { *ip };
                (joined[k].host.clone(), SocketAddr::new(ip, joined[k].port))
            };
            let own = (host_name(), SocketAddr::new(reached_by, self.address.port));
            let table = std::iter::once(own).chain(seen.iter().enumerate().map(|(k, ip)| table(k, ip))).collect();
            send(&j.stream, &Answer::Welcome { session, table }.encode()).map_err(|e| lost(k + 1, e))?;
        }
        for (k, j) in joined.into_iter().enumerate() {
            self.links.add(k + 1, j.stream)?;
        }
        Ok(())
    }
}

/// Tells a process why it cannot join. It may have left already.
fn refuse(stream: &TcpStream, error: &Error) {
    let hint = error.hint.as_ref().map(|h| format!("\n  hint: {h}")).unwrap_or_default();
    let _ = stream.set_write_timeout(Some(HELLO_TIME));
    let _ = send(stream, &Answer::Refused(format!("{}{hint}", error.message)).encode());
}

/// A process other than 0.
struct Guest<'a> {
    links: &'a Arc<Inner>,
    place: &'a Place,
    address: &'a Address,
    terms: Vec<(String, String)>,
}

impl Guest<'_> {
    fn join(&self, until: Instant) -> Result<()> {
        let failed = |e: io::Error| system(format!("rank {} cannot listen: {}", self.place.rank, plain(&e)));
        let listener = listen(self.place, 0).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let acceptor = Acceptor::new(listener).map_err(failed)?;
        let (stream, session, table) = self.say_hello(port, until)?;
        let hosts = table.iter().map(|t| t.0.clone()).collect();
        // Only this function sets them.
        let _ = self.links.hosts.set(hosts);
        self.links.add(0, stream)?;
        for (rank, (_, address)) in table.iter().enumerate().take(self.place.rank).skip(1) {
            let stream = self.reach(rank, *address)?;
            let hello = Hello::Direct { session, rank: self.place.rank };
            send(&stream, &hello.encode()).map_err(|e| self.unreachable(rank, *address, &e))?;
            self.links.add(rank, stream)?;
        }
        while let Some(missing) =
            (0..self.place.processes).find(|k| *k != self.place.rank && self.links.peers[*k].get().is_none())
        {
            self.still_fine()?;
            if Instant::now() >= until {
                let seconds = self.links.options.join.as_secs_f64();
                return Err(system(format!("{} has not connected within {seconds} s", self.links.name(missing))));
            }
            let Some((stream, hello)) = acceptor.poll().map_err(failed)? else { continue };
            if let Ok(Hello::Direct { session: theirs, rank }) = hello
                && theirs == session
                && rank > self.place.rank
                && self.links.peers.get(rank).is_some_and(|peer| peer.get().is_none())
            {
                self.links.add(rank, stream)?;
            }
        }
        Ok(())
    }

    /// Fails when the job has.
    fn still_fine(&self) -> Result<()> {
        let state = self.links.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.cause.as_ref().map_or(Ok(()), |cause| Err(self.links.error(cause)))
    }

    /// Connects to process 0, which may not have started yet, and waits for its answer.
    fn say_hello(&self, port: u16, until: Instant) -> Result<(TcpStream, u64, Vec<(String, SocketAddr)>)> {
        let hello = JobHello { rank: self.place.rank, host: host_name(), port, terms: self.terms.clone() };
        let hello = Hello::Job(Box::new(hello)).encode();
        let mut pause = Duration::from_millis(20);
        loop {
            let answer = self.ask(&hello, until);
            let why = match answer {
                Ok((stream, bytes)) => match Answer::decode(&bytes) {
                    Some(Answer::Refused(text)) => {
                        return Err(system(format!("refused by rank 0 at {}: {text}", self.address)));
                    }
                    Some(Answer::Welcome { session, table }) if table.len() == self.place.processes => {
                        return Ok((stream, session, table));
                    }
                    _ => return Err(self.stranger()),
                },
                Err(Unread::Stranger) => return Err(self.stranger()),
                Err(Unread::Protocol(other)) => {
                    let message = format!(
                        "rank 0 at {} uses version {other} of the protocol, and this process version {PROTOCOL}",
                        self.address
                    );
                    return Err(system(message).hint("run the same release of Perilune on all hosts"));
                }
                Err(Unread::Gone(e)) => plain(&e),
            };
            if Instant::now() + pause >= until {
                let seconds = self.links.options.join.as_secs_f64();
                let message = format!("rank 0 at {} was not reached within {seconds} s: {why}", self.address);
                return Err(
                    system(message).hint("see whether it runs there, and whether the port is open to this host")
                );
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(Duration::from_secs(1));
        }
    }

    fn stranger(&self) -> Error {
        let message = format!("{} answers, but it is not rank 0 of a job of Perilune", self.address);
        system(message).hint("another program uses the port: choose a free one (MASTER_PORT, or --master HOST:PORT)")
    }

    fn ask(&self, hello: &[u8], until: Instant) -> std::result::Result<(TcpStream, Vec<u8>), Unread> {
        let mut last = io::Error::other("the name has no address");
        let host = if self.place.one_host() { "127.0.0.1" } else { self.address.host.as_str() };
        for address in (host, self.address.port).to_socket_addrs()? {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&address, left.min(Duration::from_secs(5))) {
                Ok(stream) => {
                    send(&stream, hello)?;
                    let answer = receive(&stream, until)?;
                    return Ok((stream, answer));
                }
                Err(e) => last = e,
            }
        }
        Err(last.into())
    }

    /// Connects to a process that listens.
    fn reach(&self, rank: usize, address: SocketAddr) -> Result<TcpStream> {
        let until = Instant::now() + REACH_TIME.min(self.links.options.join);
        loop {
            self.still_fine()?;
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(e) if Instant::now() >= until => return Err(self.unreachable(rank, address, &e)),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    fn unreachable(&self, rank: usize, address: SocketAddr, e: &io::Error) -> Error {
        let message =
            format!("rank {} cannot reach {} at {address}: {}", self.place.rank, self.links.name(rank), plain(e));
        system(message)
            .hint("the processes connect to each other on ports that the system chooses: open them between the hosts")
    }
}
