//! Counts the edges of the control flow that a reader took, where the compiler has instrumented it.
//!
//! `-C passes=sancov-module -C llvm-args=-sanitizer-coverage-inline-8bit-counters` (LLVM's SanitizerCoverage) gives every edge a counter
//! of one byte and passes the arrays of counters to a function before `main`.

use std::sync::Mutex;

/// The arrays of counters: first address and length.
static ARRAYS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Called by each instrumented module before `main`.
// SAFETY: no other function has this name; the signature is that of SanitizerCoverage.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut u8, stop: *mut u8) {
    let found = (start as usize, stop as usize - start as usize);
    let mut arrays = ARRAYS.lock().unwrap();
    if !arrays.contains(&found) {
        arrays.push(found);
    }
}

fn each(mut visit: impl FnMut(usize, &mut u8)) {
    let mut first = 0;
    for (start, length) in ARRAYS.lock().unwrap().iter() {
        // SAFETY: the array is a static of the program. Threads of readers that still count lose a count at most.
        #[allow(unsafe_code)]
        let counters = unsafe { std::slice::from_raw_parts_mut(*start as *mut u8, *length) };
        for (k, counter) in counters.iter_mut().enumerate() {
            visit(first + k, counter);
        }
        first += length;
    }
}

/// Sets all counters to 0.
pub fn clear() {
    each(|_, counter| *counter = 0);
}

/// How often each edge has been taken in one run: a bit for each range of counts, as in AFL.
#[derive(Default)]
pub struct Coverage {
    seen: Vec<u8>,
}

impl Coverage {
    /// Adds the counts of the last run; returns whether an edge was taken more or less often than in any other.
    pub fn is_new(&mut self) -> bool {
        let mut new = false;
        each(|k, counter| {
            let range = match *counter {
                0 => return,
                1 => 1,
                2 => 2,
                3 => 4,
                4..=7 => 8,
                8..=15 => 16,
                16..=31 => 32,
                32..=127 => 64,
                _ => 128,
            };
            if self.seen.len() <= k {
                self.seen.resize(k + 1, 0);
            }
            new |= self.seen[k] & range == 0;
            self.seen[k] |= range;
        });
        new
    }

    /// The number of edges that have been taken.
    pub fn edges(&self) -> usize {
        self.seen.iter().filter(|ranges| **ranges != 0).count()
    }
}
