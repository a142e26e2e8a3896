//! Numbers from a seed, the same on every machine.

use std::time::Duration;

/// A stream of numbers (SplitMix64).
pub struct Dice(u64);

impl Dice {
    /// Streams of one seed that have different names have nothing to do with each other.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Self(seed ^ stream.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        dice.next();
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 up to `limit`, without it.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True in so many of a thousand cases.
    pub fn per_mille(&mut self, cases: u64) -> bool {
        self.below(1_000) < cases
    }

    /// A time between two, in steps of a millisecond.
    pub fn between(&mut self, (least, most): (Duration, Duration)) -> Duration {
        let span = most.saturating_sub(least).as_millis();
        let span = u64::try_from(span).expect("times of a test are short");
        least + Duration::from_millis(self.below(span + 1))
    }

    /// The pause until the next of arrivals that know nothing of each other (exponential).
    pub fn pause(&mut self, mean: Duration) -> Duration {
        /// A 52 bit number is a fraction that a float holds.
        const BITS: u32 = 52;
        let part = u32::try_from(self.next() >> (64 - BITS) >> (BITS - 32)).expect("32 bits");
        let fraction = (f64::from(part) + 1.0) / (f64::from(u32::MAX) + 1.0);
        mean.mul_f64(-fraction.ln())
    }

    /// One of several by weight.
    pub fn weighted<T: Copy>(&mut self, choices: &[(T, u64)]) -> T {
        let total = choices.iter().map(|(_, weight)| weight).sum();
        let mut at = self.below(total);
        for (choice, weight) in choices {
            if at < *weight {
                return *choice;
            }
            at -= weight;
        }
        unreachable!("the weights add up to the total")
    }

    /// Another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            let other = self.below(at as u64 + 1);
            list.swap(at, usize::try_from(other).expect("an index"));
        }
    }
}
