//! Sizes the memory through which messages between pipeline stages pass on a backend that keeps it beside the arena.
//!
//! A message is copied to a slot: staging memory of its sender, and landing memory of its receiver. A slot takes later messages of
//! about its size. The sender makes another one while messages of a size have few, so that it seldom waits for the receiver.

use crate::ir::{Kernel, Library, Program};
use perilune_core::ops::collective;
use std::ops::RangeInclusive;

/// The rule by which a backend makes slots.
#[derive(Clone, Copy, Debug)]
pub struct MessageSlots {
    /// The most times by which a slot may be larger than its message.
    pub most_room: usize,
    /// The least bytes of a slot.
    pub least_room: usize,
    /// As long as a message fits fewer slots, it gets one more rather than one that the receiver's GPU has yet to empty.
    pub spare: usize,
    /// The same for messages of at least `large` bytes, such as tied weights.
    pub spare_of_large: usize,
    pub large: usize,
}

impl MessageSlots {
    /// The sizes of slots that a message fits.
    pub fn rooms(&self, nbytes: usize) -> RangeInclusive<usize> {
        nbytes..=(nbytes * self.most_room).max(self.least_room)
    }

    /// The size of a new slot for a message.
    pub fn new_room(&self, nbytes: usize) -> usize {
        nbytes.max(self.least_room)
    }

    /// Below how many fitting slots a message gets a new one.
    pub fn spare(&self, nbytes: usize) -> usize {
        if nbytes < self.large { self.spare } else { self.spare_of_large }
    }

    /// Bytes that each device along `pp` has in slots once a step has run several times, at least one of them ahead of the GPUs.
    pub fn held(&self, program: &Program) -> Vec<usize> {
        let sent =
            program.stages.iter().enumerate().flat_map(|(from, stage)| {
                messages(&stage.program).map(move |(to, nbytes)| Message { from, to, nbytes })
            });
        self.held_by(&sent.collect::<Vec<_>>(), program.stages.len())
    }

    fn held_by(&self, sent: &[Message], devices: usize) -> Vec<usize> {
        let mut held = vec![0; devices];
        // The slots of each pair of devices.
        let mut slots = vec![Vec::new(); devices * devices];
        let steps = self.spare.max(self.spare_of_large);
        for Message { from, to, nbytes } in (0..steps).flat_map(|_| sent.iter().copied()) {
            let (fitting, own) = (self.rooms(nbytes), &mut slots[from * devices + to]);
            if own.iter().filter(|room| fitting.contains(room)).count() < self.spare(nbytes) {
                let room = self.new_room(nbytes);
                own.push(room);
                held[from] += room;
                held[to] += room;
            }
        }
        held
    }
}

/// What a device along `pp` sends another one.
#[derive(Clone, Copy, Debug)]
struct Message {
    from: usize,
    to: usize,
    nbytes: usize,
}

/// The messages of the stages of a device: the receiver's coordinate along `pp`, and bytes.
fn messages(program: &Program) -> impl Iterator<Item = (usize, usize)> + '_ {
    let bytes = |l: &Library| l.inputs.iter().zip(&l.dtypes).map(|(v, dtype)| v.shape().numel() * dtype.size()).sum();
    program.kernels.iter().filter_map(move |kernel| match kernel {
        Kernel::Library(l) if l.op == &collective::SEND => Some((l.attrs[1] as usize, bytes(l))),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: MessageSlots =
        MessageSlots { most_room: 2, least_room: 100, spare: 4, spare_of_large: 2, large: 10_000 };

    fn held(sent: &[(usize, usize, usize)]) -> Vec<usize> {
        let message = |(from, to, nbytes): &(usize, usize, usize)| Message { from: *from, to: *to, nbytes: *nbytes };
        SLOTS.held_by(&sent.iter().map(message).collect::<Vec<_>>(), 3)
    }

    #[test]
    fn both_sides_hold_the_slots_of_each_size() {
        assert_eq!(held(&[]), [0, 0, 0]);
        // However often a message is sent: 4 slots, of large ones 2.
        assert_eq!(held(&[(0, 1, 1000)]), [4000, 4000, 0]);
        assert_eq!(held(&[(0, 1, 1000); 9]), [4000, 4000, 0]);
        assert_eq!(held(&[(1, 2, 20_000)]), [0, 40_000, 40_000]);
        // Small ones share slots of the least size, and others those of up to twice theirs.
        assert_eq!(held(&[(0, 2, 3), (0, 2, 70)]), [400, 0, 400]);
        assert_eq!(held(&[(0, 1, 2000), (0, 1, 1000)]), [10_000, 10_000, 0]);
        assert_eq!(held(&[(0, 1, 2001), (0, 1, 1000)]), [4 * 3001, 4 * 3001, 0]);
        // Each direction has its own.
        assert_eq!(held(&[(0, 1, 1000), (1, 0, 1000)]), [8000, 8000, 0]);
    }
}
