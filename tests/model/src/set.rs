//! A set of small numbers.

use std::fmt;

/// Numbers below 8: units, pods or claims.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Set(u8);

impl Set {
    pub(crate) const EMPTY: Self = Self(0);

    pub(crate) fn of(number: usize) -> Self {
        Self(1 << number)
    }

    /// The numbers below `count`.
    pub(crate) fn below(count: usize) -> Self {
        (0..count).collect()
    }

    pub(crate) fn has(self, number: usize) -> bool {
        self.0 & (1 << number) != 0
    }

    pub(crate) fn insert(&mut self, number: usize) {
        self.0 |= 1 << number;
    }

    pub(crate) fn remove(&mut self, number: usize) {
        self.0 &= !(1 << number);
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        usize::try_from(self.0.count_ones()).unwrap_or(usize::MAX)
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        (0..8).filter(move |number| self.has(*number))
    }

    /// Every choice of `size` of the numbers.
    pub(crate) fn choices(self, size: usize) -> impl Iterator<Item = Self> {
        (0..=u8::MAX)
            .map(Self)
            .filter(move |choice| choice.without(self).is_empty() && choice.len() == size)
    }
}

impl FromIterator<usize> for Set {
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        let mut set = Self::EMPTY;
        for number in numbers {
            set.insert(number);
        }
        set
    }
}

impl fmt::Debug for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_made_once() {
        let choices: Vec<Set> = Set::below(3).choices(2).collect();
        assert_eq!(choices.len(), 3);
        assert!(choices.iter().all(|choice| choice.len() == 2));
    }
}
