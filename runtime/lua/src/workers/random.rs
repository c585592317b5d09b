//! Draws the random numbers of `math.random` in workers: pure functions of the seed, the record's index and the number of the draw.

use crate::boundary::{Guarded, recipe_line};
use crate::errors::Cause;
use mlua::{Function, Lua, Value, Variadic};
use perilune_core::philox::philox4x32;
use std::cell::Cell;
use std::rc::Rc;

/// The second word of the counter, which no use of a seed in `sample_order.rs` has.
const STREAM: u32 = 0x4c75_6121;

/// The position in the random numbers of one state.
#[derive(Default)]
pub struct Draws {
    seed: u64,
    index: Cell<u64>,
    draw: Cell<u32>,
}

impl Draws {
    pub fn new(seed: u64) -> Draws {
        Draws { seed, ..Draws::default() }
    }

    /// Goes to the first draw of a record.
    pub fn begin(&self, index: u64) {
        self.index.set(index);
        self.draw.set(0);
    }

    fn next(&self) -> u64 {
        let (draw, index) = (self.draw.get(), self.index.get());
        self.draw.set(draw.wrapping_add(1));
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let words = philox4x32([draw, STREAM, index as u32, (index >> 32) as u32], key);
        u64::from(words[0]) | u64::from(words[1]) << 32
    }

    /// A number in [0, 1) of 53 random bits.
    fn float(&self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// An integer in `low..=high`, each equally likely: draws above the range are rejected.
    fn between(&self, low: i64, high: i64) -> i64 {
        let range = (high as u64).wrapping_sub(low as u64);
        let mask = u64::MAX >> range.leading_zeros().min(63);
        loop {
            let draw = self.next() & mask;
            if draw <= range {
                return low.wrapping_add(draw as i64);
            }
        }
    }
}

/// Makes `math.random`, with the arguments of Lua's own.
pub fn function(lua: &Lua, draws: Rc<Draws>) -> mlua::Result<Function> {
    Guarded(lua).create_function(move |lua, args: Variadic<i64>| {
        let (low, high) = match args[..] {
            [] => return Ok(Value::Number(draws.float())),
            [0] => return Ok(Value::Integer(draws.next() as i64)),
            [high] => (1, high),
            [low, high] => (low, high),
            _ => {
                return Err(recipe_line::raised(
                    lua,
                    "math.random: wrong number of arguments".into(),
                    None,
                    Cause::Recipe,
                ));
            }
        };
        if low > high {
            let message = format!("math.random: there is no integer from {low} to {high}");
            return Err(recipe_line::raised(lua, message, None, Cause::Recipe));
        }
        Ok(Value::Integer(draws.between(low, high)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_functions_of_seed_and_index() {
        let draws = |seed: u64, index: u64| {
            let draws = Draws::new(seed);
            draws.begin(index);
            [draws.next(), draws.next(), draws.between(1, 1000) as u64]
        };
        assert_eq!(draws(7, 3), draws(7, 3));
        assert_ne!(draws(7, 3), draws(7, 4));
        assert_ne!(draws(7, 3), draws(8, 3));
        assert_ne!(draws(7, 1 << 32), draws(7, 0));
    }

    #[test]
    fn integers_are_uniform_and_in_range() {
        let draws = Draws::new(1);
        let mut counts = [0u32; 6];
        for _ in 0..60_000 {
            counts[usize::try_from(draws.between(-2, 3) + 2).expect("in range")] += 1;
        }
        // 5 degrees of freedom: above 20.5 with a probability of 0.001.
        let chi2: f64 = counts.iter().map(|c| (f64::from(*c) - 10_000.0).powi(2) / 10_000.0).sum();
        assert!(chi2 < 20.5, "{counts:?}");
        assert_eq!(draws.between(5, 5), 5);
        assert!((0..100).any(|_| draws.between(i64::MIN, i64::MAX) < 0));
        assert!((0..1000).all(|_| (0.0..1.0).contains(&draws.float())));
    }
}
