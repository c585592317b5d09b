//! Lets the devices along an axis meet: each tells the others where its pieces are, and which of its events they wait for.
//!
//! An offer of a device lists its pieces where others read them: in its own memory, or where it has copied them to in host memory.

use super::host::Copied;
use super::ring::Ends;
use super::{Mesh, State, Transport};
use crate::driver::{Address, Endpoint, Lane, Recorded};
use crate::library::collective::MOST;
use perilune_core::error::{Error, Result};
use perilune_core::mesh::Axis;

/// One tensor of a collective: where its piece and its result are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Piece {
    pub nbytes: u64,
    pub input: Address,
    pub output: Address,
}

/// What a device sends when it meets others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Offer {
    /// The number of the device's endpoint, and which of its events are recorded.
    pub number: u64,
    pub turn: u64,
    /// Whether its host has seen a bad index.
    pub failed: u64,
    /// The number of the point behind which its pieces are complete.
    pub point: u64,
    /// Where its pieces are copied to, if they are, and its ring, if it has one.
    pub copied: Copied,
    pub ring: Ends,
    pub pieces: Vec<Piece>,
}

impl Offer {
    /// Words before the pieces, and of a piece.
    const HEAD: usize = 8;
    const PIECE: usize = 3;

    fn bytes(&self) -> Vec<u8> {
        let Offer { number, turn, failed, point, copied, ring, .. } = self;
        let head = [*number, *turn, *failed, *point, copied.base, copied.point, ring.base, ring.point];
        let pieces = self.pieces.iter().flat_map(|p| [p.nbytes, p.input, p.output]);
        head.into_iter().chain(pieces).flat_map(u64::to_le_bytes).collect()
    }

    fn read(bytes: &[u8]) -> Option<Offer> {
        let words: Vec<u64> = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes)).collect();
        if !bytes.len().is_multiple_of(8) || words.len() < Offer::HEAD {
            return None;
        }
        let (head, rest) = words.split_at(Offer::HEAD);
        let pieces = rest.chunks_exact(Offer::PIECE);
        let whole = pieces.remainder().is_empty();
        let pieces = pieces.map(|p| Piece { nbytes: p[0], input: p[1], output: p[2] }).collect();
        let &[number, turn, failed, point, base, first, ring, of_ring] = head else { return None };
        let (copied, ring) = (Copied { base, point: first }, Ends { number, base: ring, point: of_ring });
        whole.then_some(Offer { number, turn, failed, point, copied, ring, pieces })
    }
}

/// What a device brings to a meeting.
#[derive(Default)]
pub(super) struct Meeting {
    pub pieces: Vec<Piece>,
    /// The number of the point behind which the pieces are complete; those of an agreement have none.
    pub point: u64,
    /// Where the pieces are copied to in host memory, if they are.
    pub copied: Copied,
    pub copies: Vec<Address>,
    /// Whether its host has seen a bad index.
    pub failed: bool,
    /// Whether the streams of the others wait for its own.
    pub with_stream: bool,
}

/// The devices along an axis that have met, in the order of their coordinates.
pub(super) struct Group {
    pub axis: Axis,
    pub all: Vec<Offer>,
    pub coordinate: usize,
    /// The number of the point behind which this device's pieces are copied to the host, if they are.
    pub last: Option<u64>,
}

impl Group {
    /// The address of each device's `k`-th piece or result, plus an offset: the argument `collective::Pieces`.
    pub fn pieces(&self, k: usize, results: bool, offset: impl Fn(usize) -> usize) -> [u64; MOST] {
        let mut out = [0; MOST];
        for (rank, (to, offer)) in out.iter_mut().zip(&self.all).enumerate() {
            let piece = offer.pieces.get(k).copied().unwrap_or_default();
            *to = if results { piece.output } else { piece.input } + offset(rank) as u64;
        }
        out
    }

    /// The events that the devices have recorded.
    pub fn recorded(&self) -> impl Iterator<Item = Recorded> + '_ {
        self.all.iter().map(|o| Recorded { number: o.number, axis: self.axis, turn: o.turn as usize })
    }

    /// Queues a copy of bytes of the piece or result of a device, behind the points where they are complete.
    pub fn fetch(
        &self,
        endpoint: &Endpoint,
        lane: &Lane,
        rank: usize,
        from: Address,
        to: Address,
        nbytes: usize,
    ) -> Result<()> {
        let offer = &self.all[rank];
        if rank == self.coordinate || offer.copied.base == 0 {
            return lane.copy(from, to, nbytes);
        }
        let mut at = from;
        for (end, point) in offer.copied.parts(from, nbytes) {
            endpoint.wait_for_point(offer.number, point, lane)?;
            lane.copy_across(at, to + (at - from), (end - at) as usize)?;
            at = end;
        }
        Ok(())
    }

    /// Makes a lane wait until this device has copied its pieces to the host, if it does: they may be overwritten then.
    pub fn leave(&self, endpoint: &Endpoint, lane: &Lane) -> Result<()> {
        match self.last {
            Some(point) => endpoint.wait_for_point(self.own(), point, lane),
            None => Ok(()),
        }
    }

    /// Makes a lane wait until all others have copied their `k`-th piece to the host, if they do.
    pub fn arrive(&self, endpoint: &Endpoint, lane: &Lane, k: usize) -> Result<()> {
        for offer in self.all.iter().filter(|o| o.copied.base != 0 && o.number != self.own()) {
            let piece = offer.pieces[k];
            endpoint.wait_for_point(offer.number, offer.copied.point_at(piece.input + piece.nbytes), lane)?;
        }
        Ok(())
    }

    /// The number of this device.
    pub fn own(&self) -> u64 {
        self.all[self.coordinate].number
    }
}

impl Mesh<'_> {
    /// Exchanges addresses with the devices along an axis, with the events that are recorded now: that of the lane if there is one, and that
    /// of the stream if the others wait for it.
    pub(super) fn exchange(&self, state: &mut State, axis: Axis, what: &str, meeting: Meeting) -> Result<Group> {
        let Meeting { pieces, point, copied, copies, failed, with_stream } = meeting;
        let endpoint = &self.connection.endpoint;
        let axial = &mut state.lanes[axis as usize];
        let on_host = matches!(axial.transport, Some(Transport::Memory { on_host: true, .. }));
        axial.turn ^= 1;
        if with_stream {
            endpoint.record_stream(axis, axial.turn)?;
        }
        axial.lane.iter().try_for_each(|lane| endpoint.record_lane(axis, axial.turn, lane))?;
        let (number, turn) = (endpoint.number, axial.turn as u64);
        let ring = axial.host.as_ref().map_or(Ends { number, ..Ends::default() }, |host| host.ends(endpoint));
        let failed = u64::from(failed);
        let mut own = Offer { number, turn, failed, point, copied, ring, pieces: pieces.clone() };
        own.pieces.iter_mut().zip(copies).for_each(|(piece, copy)| piece.input = copy);
        let sent = self.peers.exchange(axis, &own.bytes())?;
        let all: Option<Vec<Offer>> = sent.iter().map(|bytes| Offer::read(bytes)).collect();
        let bug = |what: String| Error::system("cuda", format!("this is a bug: {what}"));
        let mut all =
            all.ok_or_else(|| bug(format!("a device along {} sends something else for {what}", axis.name())))?;
        let coordinate = self.peers.coordinate(axis);
        if all.get(coordinate).is_none_or(|o| o.number != own.number) {
            return Err(bug(format!("the device at {coordinate} along {} is not itself", axis.name())));
        }
        let sizes = |o: &Offer| o.pieces.iter().map(|p| p.nbytes).collect::<Vec<_>>();
        if all.iter().any(|o| sizes(o) != sizes(&own)) {
            return Err(bug(format!("the pieces of {what} differ in size")));
        }
        if all.len() > MOST {
            let message = format!("{} devices along {}; at most {MOST}", all.len(), axis.name());
            return Err(Error::system("cuda", message));
        }
        // This device reads its own pieces where they are.
        let ends = std::mem::replace(&mut all[coordinate].pieces, pieces);
        let ends = ends.iter().map(|p| p.input + p.nbytes).max();
        let last = ends.filter(|_| copied.base != 0).map(|end| copied.point_at(end));
        if !on_host {
            all.iter().try_for_each(|other| self.open(state, other.number))?;
        }
        Ok(Group { axis, all, coordinate, last })
    }

    /// Meets the devices along an axis: what their streams have queued so far comes before what this one's queues from now on.
    pub(super) fn meet(
        &self,
        axis: Axis,
        what: &str,
        piece: Piece,
        copy: Option<Address>,
        failed: bool,
    ) -> Result<Group> {
        let copies = copy.into_iter().collect();
        let meeting = Meeting { pieces: vec![piece], copies, failed, with_stream: true, ..Meeting::default() };
        let group = self.exchange(&mut self.connection.state(), axis, what, meeting)?;
        for other in group.recorded().filter(|o| o.number != group.own()) {
            self.connection.endpoint.wait_for_stream(other)?;
        }
        Ok(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_read_as_it_was_sent() {
        let piece = |k| Piece { nbytes: 1 << 40, input: 3 << 50, output: k };
        let copied = Copied { base: 1 << 33, point: 4 };
        let ring = Ends { number: 2, base: 1 << 34, point: 6 };
        let offer = Offer { number: 2, turn: 1, failed: 1, point: 9, copied, ring, pieces: vec![piece(4), piece(5)] };
        assert_eq!(Offer::read(&offer.bytes()), Some(offer.clone()));
        let none = Offer { pieces: Vec::new(), ..offer.clone() };
        assert_eq!(Offer::read(&none.bytes()), Some(none));
        assert_eq!(Offer::read(&offer.bytes()[8..]), None, "sent by another version, or by a CPU");
        assert_eq!(Offer::read(&offer.bytes()[4..]), None);
    }

    #[test]
    fn pieces_are_in_the_order_of_coordinates() {
        let piece = |k: u64| Piece { nbytes: 8, input: 1000 * k, output: 1000 * k + 500 };
        let offer = |k: u64| Offer { pieces: vec![piece(k), piece(k + 10)], ..Offer::default() };
        let group = Group { axis: Axis::Dp, all: vec![offer(1), offer(2), offer(3)], coordinate: 1, last: None };
        assert_eq!(group.pieces(0, false, |k| 8 + k * 16)[..4], [1008, 2024, 3040, 0]);
        assert_eq!(group.pieces(1, true, |_| 0)[..3], [11500, 12500, 13500]);
    }
}
