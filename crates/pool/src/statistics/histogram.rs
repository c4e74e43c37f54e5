//! A histogram of durations that any thread may add to.
//!
//! Eight buckets for each power of two of nanoseconds: a quantile is exact within 12.5 %.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SUB_BITS: u32 = 3;
const BUCKETS: usize = (65 - SUB_BITS as usize) << SUB_BITS;

/// Durations, counted in buckets.
#[derive(Debug)]
pub(crate) struct Histogram {
    buckets: Box<[AtomicU64]>,
    nanoseconds: AtomicU64,
}

impl Histogram {
    pub(crate) fn new() -> Histogram {
        let buckets = (0..BUCKETS).map(|_| AtomicU64::new(0)).collect();
        Histogram { buckets, nanoseconds: AtomicU64::new(0) }
    }

    fn bucket(nanoseconds: u64) -> usize {
        if nanoseconds < 1 << SUB_BITS {
            return nanoseconds as usize;
        }
        let shift = nanoseconds.ilog2() - SUB_BITS;
        ((shift as usize) << SUB_BITS) + (nanoseconds >> shift) as usize
    }

    /// The greatest duration that a bucket counts.
    fn upper_bound(bucket: usize) -> u64 {
        if bucket < 1 << SUB_BITS {
            return bucket as u64;
        }
        let shift = (bucket >> SUB_BITS) - 1;
        let mantissa = (bucket as u64 & ((1 << SUB_BITS) - 1)) | (1 << SUB_BITS);
        ((u128::from(mantissa + 1) << shift) - 1).min(u128::from(u64::MAX)) as u64
    }

    /// Counts `times` events that took `duration` each.
    pub(crate) fn record(&self, duration: Duration, times: u64) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let bucket = Self::bucket(nanoseconds).min(BUCKETS - 1);
        self.buckets[bucket].fetch_add(times, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds.wrapping_mul(times), Ordering::Relaxed);
    }

    /// What was counted so far.
    pub(crate) fn summary(&self) -> Latency {
        let counts: Vec<u64> =
            self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        let quantile = |q: f64| {
            let rank = ((count as f64 * q).ceil() as u64).max(1);
            let mut seen = 0;
            let bucket = counts.iter().position(|n| {
                seen += n;
                seen >= rank
            });
            Duration::from_nanos(bucket.map_or(0, Self::upper_bound))
        };
        let total = self.nanoseconds.load(Ordering::Relaxed);
        Latency {
            count,
            mean: Duration::from_nanos(total.checked_div(count).unwrap_or(0)),
            p50: quantile(0.5),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: quantile(1.0),
        }
    }
}

/// How long something took: quantiles are upper bounds within 12.5 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// How many were measured.
    pub count: u64,
    /// The arithmetic mean.
    pub mean: Duration,
    /// Half took no longer.
    pub p50: Duration,
    /// 99 of 100 took no longer.
    pub p99: Duration,
    /// 999 of 1000 took no longer.
    pub p999: Duration,
    /// None took longer.
    pub max: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_cover_all_durations_in_order_without_gaps() {
        let mut previous = 0;
        for exponent in 2..64 {
            for quarter in [0, 1, 3] {
                let n = (1u64 << exponent) + (quarter << (exponent - 2));
                let bucket = Histogram::bucket(n);
                assert!(bucket < BUCKETS && bucket >= previous, "{n}");
                assert!(Histogram::upper_bound(bucket) >= n, "{n}");
                assert!(bucket == 0 || Histogram::upper_bound(bucket - 1) < n, "{n}");
                previous = bucket;
            }
        }
        assert!(Histogram::bucket(u64::MAX) < BUCKETS);
    }

    #[test]
    fn quantiles_are_within_an_eighth() {
        let histogram = Histogram::new();
        (1..=1000).for_each(|n| histogram.record(Duration::from_micros(n), 1));
        let summary = histogram.summary();
        for (measured, exact) in [(summary.p50, 500), (summary.p99, 990), (summary.max, 1000)] {
            let exact = Duration::from_micros(exact);
            assert!(measured >= exact && measured <= exact * 9 / 8, "{measured:?} {exact:?}");
        }
        assert_eq!(summary.count, 1000);
        assert_eq!(summary.mean, Duration::from_nanos(500_500));
    }

    #[test]
    fn empty_is_all_zero() {
        assert_eq!(Histogram::new().summary(), Latency::default());
    }
}
