//! Reads from and writes to one other process, each in a thread of its own.
//!
//! A writer takes frames from a queue without a limit, so whoever sends never blocks, and the reader never waits for a writer: two
//! processes can send each other any amounts at once. Devices exchange in rounds, which bounds the queue.

use super::frame::{Frame, HEADER, Kind, MESSAGE_HEAD, MessageHead, header, parse_header};
use super::{Inner, lock};
use perilune_core::host_memory;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Bytes that are read or written at once. Each piece counts as a sign of life.
const PIECE: usize = 1 << 20;
/// A body up to this size is sent in one write with its header.
const SMALL: usize = 16 << 10;

/// The connection to another process.
#[derive(Debug)]
pub struct Peer {
    pub rank: usize,
    stream: TcpStream,
    queue: Mutex<Queue>,
    ready: Condvar,
    /// When bytes came from it, and when a frame was sent to it, in milliseconds since the start of this process's links.
    pub heard: AtomicU64,
    pub sent: AtomicU64,
    /// The call of all processes in which it waits, by its last heartbeat; 0 if in none.
    pub calling: Mutex<(u64, String)>,
}

#[derive(Default, Debug)]
struct Queue {
    frames: VecDeque<Frame>,
    /// A frame is being written.
    writing: bool,
    /// No further frame is accepted; the writer ends after those that are there.
    closed: bool,
}

/// How reading from a peer ended.
enum End {
    Closed,
    /// It sent what it must not.
    Damaged(String),
}

impl Peer {
    pub fn new(rank: usize, stream: TcpStream, now: u64) -> Peer {
        let (heard, sent) = (AtomicU64::new(now), AtomicU64::new(now));
        let (queue, ready, calling) = Default::default();
        Peer { rank, stream, queue, ready, heard, sent, calling }
    }

    /// Queues a frame. After the last frame it does nothing.
    pub fn send(&self, frame: Frame) {
        let mut queue = lock(&self.queue);
        if !queue.closed {
            queue.frames.push_back(frame);
            self.ready.notify_one();
        }
    }

    /// Sends a frame instead of the messages of devices that wait to be sent. The verdict of a call still goes before it.
    pub fn send_instead(&self, frame: Frame) {
        let mut queue = lock(&self.queue);
        if !queue.closed {
            queue.frames.retain(|frame| frame.kind == Kind::Call);
            queue.frames.push_back(frame);
            self.ready.notify_one();
        }
    }

    /// Sends nothing after the frames that are queued.
    pub fn close_queue(&self) {
        lock(&self.queue).closed = true;
        self.ready.notify_one();
    }

    /// Whether nothing waits to be sent.
    pub fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.frames.is_empty() && !queue.writing
    }

    /// Ends the connection at once; its threads end too.
    pub fn disconnect(&self) {
        let mut queue = lock(&self.queue);
        queue.closed = true;
        queue.frames.clear();
        self.ready.notify_one();
        // It fails where the other side has ended the connection before.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Writes frames until the queue is closed.
    pub fn write(&self, links: &Inner) {
        loop {
            let mut queue = lock(&self.queue);
            let frame = loop {
                if let Some(frame) = queue.frames.pop_front() {
                    break frame;
                }
                if queue.closed {
                    let _ = self.stream.shutdown(Shutdown::Write);
                    return;
                }
                queue = self.ready.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            queue.writing = true;
            drop(queue);
            let result = write_frame(&self.stream, &frame);
            self.sent.store(links.now(), Ordering::Relaxed);
            let mut queue = lock(&self.queue);
            queue.writing = false;
            if result.is_err() {
                queue.closed = true;
                queue.frames.clear();
                drop(queue);
                links.lost(self.rank);
                return;
            }
        }
    }

    /// Reads frames until the connection ends.
    pub fn read(&self, links: &Inner) {
        let end = loop {
            if let Err(end) = self.read_frame(links) {
                break end;
            }
        };
        if let End::Damaged(what) = end {
            links.damaged(self.rank, &what);
            // What follows cannot be read, so the other side must not wait for its bytes to be taken.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        links.lost(self.rank);
    }

    fn fill(&self, links: &Inner, buffer: &mut [u8]) -> Result<(), End> {
        let mut done = 0;
        while done < buffer.len() {
            let end = buffer.len().min(done + PIECE);
            match (&self.stream).read(&mut buffer[done..end]) {
                Ok(0) => return Err(End::Closed),
                Ok(n) => done += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Err(End::Closed),
            }
            self.heard.store(links.now(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn read_frame(&self, links: &Inner) -> Result<(), End> {
        let mut head = [0; HEADER];
        self.fill(links, &mut head)?;
        let (kind, length) = parse_header(&head, links.options.message_limit).map_err(End::Damaged)?;
        let damaged = || End::Damaged("it has sent a frame that cannot be read".into());
        if kind == Kind::Message {
            let size = length.checked_sub(MESSAGE_HEAD).ok_or_else(damaged)?;
            let mut head = [0; MESSAGE_HEAD];
            self.fill(links, &mut head)?;
            let head = MessageHead::decode(&head).ok_or_else(damaged)?;
            host_memory::check("mesh", size).map_err(|e| End::Damaged(format!("its message does not fit: {e}")))?;
            let mut body: Arc<[u8]> = std::iter::repeat_n(0, size).collect();
            self.fill(links, Arc::get_mut(&mut body).ok_or_else(damaged)?)?;
            return links.message(self.rank, head, body).map_err(End::Damaged);
        }
        let mut body = vec![0; length];
        self.fill(links, &mut body)?;
        links.frame(self, kind, &body).ok_or_else(damaged)
    }
}

fn write_frame(mut stream: &TcpStream, frame: &Frame) -> io::Result<()> {
    let Frame { kind, head, body } = frame;
    let mut start = Vec::with_capacity(HEADER + head.len() + if body.len() <= SMALL { body.len() } else { 0 });
    start.extend(header(*kind, head.len() + body.len()));
    start.extend(head);
    if body.len() <= SMALL {
        start.extend(&**body);
        return stream.write_all(&start);
    }
    stream.write_all(&start)?;
    stream.write_all(body)
}
