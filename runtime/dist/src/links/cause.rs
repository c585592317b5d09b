//! Describes why a job of several processes has failed.

use super::frame::{Decoder, Encoder, Frame, Kind};
use perilune_core::error::Error;

/// Bytes of the text of a cause that are sent.
const MOST_TEXT: usize = 64 << 10;

/// The first failure of a job, as far as this process knows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cause {
    /// The process that failed.
    pub rank: usize,
    /// Its exit status; 1 if it could not say one.
    pub status: u8,
    /// Whether `text` is the process's own error. Otherwise it is what another one has observed.
    pub raised: bool,
    pub text: String,
}

impl Cause {
    /// What another process has observed of `rank`.
    pub fn observed(rank: usize, text: String) -> Cause {
        Cause { rank, status: 1, raised: false, text }
    }

    /// The message for the process of rank `own`, the cause first. `name` names a process.
    pub fn message(&self, own: usize, name: impl Fn(usize) -> String) -> String {
        match (self.raised, self.rank == own) {
            (true, true) => self.text.clone(),
            (true, false) => format!("{} ended: {}", name(self.rank), self.text),
            (false, true) => format!("the other processes have given up on this one: {}", self.text),
            (false, false) => self.text.clone(),
        }
    }

    pub fn error(&self, own: usize, name: impl Fn(usize) -> String) -> Error {
        Error::system("", self.message(own, name))
    }

    pub fn frame(&self) -> Frame {
        let head = Encoder::default().u32(self.rank).u8(self.status).u8(self.raised.into()).text(&self.text, MOST_TEXT);
        Frame::new(Kind::Abort, head.0)
    }

    pub fn decode(bytes: &[u8]) -> Option<Cause> {
        let mut d = Decoder(bytes);
        let (rank, status, raised, text) = (d.u32()?, d.u8()?, d.u8()? != 0, d.text()?);
        d.end()?;
        Some(Cause { rank, status, raised, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_round_trips_and_is_said_from_every_point_of_view() {
        let name = |rank| format!("rank {rank} (host h{rank})");
        let raised = Cause { rank: 3, status: 3, raised: true, text: "recipe.lua:12: x is nil".into() };
        assert_eq!(Cause::decode(&raised.frame().head), Some(raised.clone()));
        assert_eq!(raised.message(0, name), "rank 3 (host h3) ended: recipe.lua:12: x is nil");
        assert_eq!(raised.message(3, name), "recipe.lua:12: x is nil");
        let silent = Cause::observed(3, "rank 3 (host h3) has not answered for 20 s".into());
        assert_eq!(silent.message(1, name), "rank 3 (host h3) has not answered for 20 s");
        assert!(silent.message(3, name).starts_with("the other processes have given up on this one: rank 3"));
        assert_eq!(Cause::decode(&[1, 2, 3]), None);
    }
}
