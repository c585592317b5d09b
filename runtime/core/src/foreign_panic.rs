//! Catches panics of foreign code that hostile input may cause, such as decoders of file formats. The caller makes an error of it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs foreign code; `None` if it panics. Panic hooks print nothing then (`is_caught`).
pub fn catch<T>(f: impl FnOnce() -> T) -> Option<T> {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    let out = catch_unwind(AssertUnwindSafe(f));
    DEPTH.with(|depth| depth.set(depth.get() - 1));
    out.ok()
}

/// Whether a panic of this thread is caught and becomes an error.
pub fn is_caught() -> bool {
    DEPTH.with(Cell::get) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught_and_known_to_be() {
        assert_eq!(catch(|| (is_caught(), catch(is_caught))), Some((true, Some(true))));
        assert_eq!(catch(|| -> u32 { std::panic::resume_unwind(Box::new("foreign")) }), None);
        assert!(!is_caught());
    }
}
