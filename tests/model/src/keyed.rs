//! A value that is shared, and compared by a hash taken once: states differ in little, and pools are large.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// A shared value and its hash.
pub(crate) struct Keyed<T> {
    key: u64,
    value: Arc<T>,
}

impl<T: Hash> Keyed<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            key: key_of(&value),
            value: Arc::new(value),
        }
    }
}

impl<T> Keyed<T> {
    pub(crate) fn key(&self) -> u64 {
        self.key
    }
}

/// The same in every run, so that a counterexample is found again.
pub(crate) fn key_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl<T> Clone for Keyed<T> {
    fn clone(&self) -> Self {
        Self {
            key: self.key,
            value: Arc::clone(&self.value),
        }
    }
}

impl<T> Deref for Keyed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> PartialEq for Keyed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl<T> Eq for Keyed<T> {}

impl<T> Hash for Keyed<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key.hash(state);
    }
}

impl<T: fmt::Debug> fmt::Debug for Keyed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}
