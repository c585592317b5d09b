//! Sends messages from one device to another: from stage to stage of a pipeline.
//!
//! A message is named by its run, sender, receiver and number, and kept on the board of the receiver's process until it is received, so
//! sending waits for nothing. The wait for a message ends as that for the messages of a round does.

use super::{Board, CAUSE_WAIT, Exchange};
use perilune_core::error::{Error, Result};
use std::sync::{Arc, PoisonError};

/// Names a message from one device to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Mail {
    pub run: u64,
    /// The rank of the sender.
    pub from: usize,
    /// The rank of the receiver.
    pub to: usize,
    pub number: u64,
}

impl Exchange {
    /// Leaves a message for one device of this process, or sends it to the process of the device. `program` identifies what the sender
    /// runs, or is 0.
    pub(super) fn post(&self, mail: Mail, program: u64, message: Arc<[u8]>) -> Result<()> {
        match &self.carrier {
            _ if self.local[mail.to] => self.deliver(mail, program, message),
            Some(carrier) => return carrier.carry_to(&mail, program, &message),
            None => return Err(self.belongs_to_another(mail.to)),
        }
        Ok(())
    }

    /// Puts a message on the board for a device of this process.
    pub fn deliver(&self, mail: Mail, program: u64, message: Arc<[u8]>) {
        let mut board = self.lock();
        board.mail.insert(mail, message);
        self.note(&mut board, mail.run, mail.from, program);
        drop(board);
        self.changed.notify_all();
    }

    /// Waits for a message to a device of this process.
    pub(super) fn collect(&self, mail: Mail) -> Result<Arc<[u8]>> {
        if self.carrier.is_none() && !self.local[mail.from] {
            return Err(self.belongs_to_another(mail.from));
        }
        let mut board = self.lock();
        loop {
            let found = self.find(&mut board, &mail);
            if let Some(outcome) = found.transpose() {
                board.expected.remove(&mail);
                return outcome;
            }
            board.expected.insert(mail);
            board = match board.failed_elsewhere.filter(|f| f.0 == mail.run) {
                None => self.changed.wait(board).unwrap_or_else(PoisonError::into_inner),
                Some(_) => self.changed.wait_timeout(board, CAUSE_WAIT).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Takes a message if it has come; an error if it cannot come any more.
    fn find(&self, board: &mut Board, mail: &Mail) -> Result<Option<Arc<[u8]>>> {
        if let Some((_, rank)) = board.failed.filter(|f| f.0 == mail.run) {
            return Err(self.device_failed(rank));
        }
        if let Some(error) = &board.broken {
            return Err(error.clone());
        }
        if let Some((_, rank, since)) = board.failed_elsewhere.filter(|f| f.0 == mail.run) {
            return if since.elapsed() >= CAUSE_WAIT { Err(self.device_failed(rank)) } else { Ok(None) };
        }
        if let Some(message) = board.mail.remove(mail) {
            return Ok(Some(message));
        }
        // A device sends all messages of a run before those of the next one.
        if let Some(run) = board.latest.get(&mail.from).filter(|run| **run > mail.run) {
            let (device, mesh) = (mail.from, &self.mesh);
            return Err(
                self.diverged(format!("device {device} of mesh {mesh} is in run {run}, others in run {}", mail.run))
            );
        }
        match board.ended.get(&mail.from) {
            Some(ended) => {
                let message = format!("{ended}, but the other processes still wait for it in a step");
                Err(Error::system("mesh", message))
            }
            None => Ok(None),
        }
    }

    fn belongs_to_another(&self, rank: usize) -> Error {
        let message = format!("this is a bug: device {rank} of mesh {} belongs to another process", self.mesh);
        Error::system("mesh", message)
    }
}
