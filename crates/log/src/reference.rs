//! What a simulated log was told, and so what must and what may be found after a crash.

use crate::block::Lsn;
use crate::scan::Record;

/// What was appended, in order, and is not known to be lost.
#[derive(Clone, Default)]
pub(crate) struct Reference {
    pub(crate) appended: Vec<(Lsn, u64)>,
    /// The greatest number that was acknowledged.
    pub(crate) acknowledged: Option<Lsn>,
    /// Records before this may be gone.
    pub(crate) trimmed: Option<Lsn>,
    pub(crate) next: u64,
}

/// The bytes of a record: anything that differs from all others.
pub(crate) fn content(number: u64) -> Vec<u8> {
    let longest = [3, 100, 1000, 5000, 30_000][(number % 5) as usize];
    let len = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((0..len % longest).map(|at| (number.wrapping_mul(31) + at) as u8));
    bytes
}

impl Reference {
    /// Compares what an opening found, and takes it for durable from then on: an opening hands out
    /// nothing that a crash could still take.
    pub(crate) fn check(&mut self, from: Option<Lsn>, found: &[Record]) {
        let needed = from.or(self.trimmed).unwrap_or(Lsn(0));
        let first = found.first().map_or(needed, |record| record.lsn);
        let begin = self.appended.partition_point(|(lsn, _)| *lsn < first);
        let missing = self.appended[..begin].iter().find(|(lsn, _)| *lsn >= needed);
        let unacknowledged = |lsn| self.acknowledged.is_none_or(|last| lsn > last);
        if let Some((lsn, number)) = missing {
            assert!(unacknowledged(*lsn), "the first ones are lost: {number} at {lsn}");
        }
        let expected = &self.appended[begin..];
        assert!(found.len() <= expected.len(), "invented: {:?}", found[expected.len()].lsn);
        for (record, (lsn, number)) in found.iter().zip(expected) {
            assert_eq!(record.lsn, *lsn, "record {number} was appended elsewhere");
            assert!(record.bytes == content(*number), "record {number} at {lsn} is another");
        }
        if let Some((lsn, number)) = expected.get(found.len()) {
            assert!(unacknowledged(*lsn), "acknowledged and lost: {number} at {lsn}");
        }
        self.appended.truncate(begin + found.len());
        self.acknowledged = self.acknowledged.max(found.last().map(|record| record.lsn));
    }

    /// All before `durable` was acknowledged.
    pub(crate) fn acknowledge(&mut self, durable: Lsn) {
        let count = self.appended.partition_point(|(lsn, _)| *lsn < durable);
        if let Some((lsn, _)) = self.appended[..count].last() {
            self.acknowledged = self.acknowledged.max(Some(*lsn));
        }
    }
}
