//! Seeded randomness, so that a run can be had again.

use std::collections::BTreeSet;

/// `SplitMix64`: small, and good enough to shuffle a few ids.
#[derive(Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The elements in random order, as iterating over one of Go's sets gives them.
    pub(crate) fn shuffled(&mut self, set: &BTreeSet<String>) -> Vec<String> {
        let mut keyed: Vec<(u64, &String)> = set.iter().map(|id| (self.next(), id)).collect();
        keyed.sort_unstable();
        keyed.into_iter().map(|(_, id)| id.clone()).collect()
    }
}
