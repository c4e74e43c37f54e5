//! Maps by the numbers of pages.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Numbers of pages are spread well enough without the work of a hash function for strangers' keys.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// A map by the number of a page's first frame.
pub(super) type ByPage<T> = HashMap<u64, T, BuildHasherDefault<PageHasher>>;
