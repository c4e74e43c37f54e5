//! Finds the limit because of which the kernel refused address space.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::PAGE_SIZE;
use crate::error::ReserveError;

/// The limits that decide whether the kernel maps more.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    /// Bytes of the address space in use.
    total: u64,
    /// Bytes of its private writable part.
    data: u64,
    /// RLIMIT_AS; None if unlimited.
    total_limit: Option<u64>,
    /// RLIMIT_DATA; None if unlimited.
    data_limit: Option<u64>,
    /// `vm.overcommit_memory`.
    overcommit: Option<u32>,
}

/// Turns the errno of a failed mapping of `needed` more bytes into an error that names the cause.
///
/// Linux answers ENOMEM for all of them, so this function reads the limits; `bytes` is the whole
/// length that the caller asked for.
pub(crate) fn explain(
    errno: Errno,
    purpose: &'static str,
    bytes: usize,
    needed: usize,
) -> ReserveError {
    let (total, data) = mapped_bytes().unwrap_or((0, 0));
    let limits = Limits {
        total,
        data,
        total_limit: getrlimit(Resource::As).current,
        data_limit: getrlimit(Resource::Data).current,
        overcommit: overcommit_mode(),
    };
    cause(errno, purpose, bytes, needed as u64, limits)
}

/// The error for a failed mapping under the given limits.
fn cause(
    errno: Errno,
    purpose: &'static str,
    bytes: usize,
    needed: u64,
    limits: Limits,
) -> ReserveError {
    if errno != Errno::NOMEM {
        return ReserveError::Refused { purpose, bytes, errno };
    }
    let exceeds = |used: u64, limit: &u64| used.saturating_add(needed) > *limit;
    if let Some(limit) = limits.total_limit.filter(|limit| exceeds(limits.total, limit)) {
        return ReserveError::AddressSpaceLimit { purpose, bytes, limit };
    }
    if let Some(limit) = limits.data_limit.filter(|limit| exceeds(limits.data, limit)) {
        return ReserveError::DataLimit { purpose, bytes, limit };
    }
    if limits.overcommit == Some(2) {
        return ReserveError::Overcommit { purpose, bytes };
    }
    ReserveError::Refused { purpose, bytes, errno }
}

/// Bytes of this process's address space and of the private writable part of it.
fn mapped_bytes() -> Option<(u64, u64)> {
    parse_statm(&std::fs::read_to_string("/proc/self/statm").ok()?)
}

/// Fields 1 (size) and 6 (data and stack) of `/proc/self/statm`, in bytes.
fn parse_statm(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_ascii_whitespace().map(|field| field.parse::<u64>().ok());
    let total = fields.next()??;
    let data = fields.nth(4)??;
    Some((total * PAGE_SIZE as u64, data * PAGE_SIZE as u64))
}

/// How much memory this user may lock, in words.
pub(crate) fn lockable() -> String {
    lock_limit().map_or_else(
        || "any amount".to_owned(),
        |bytes| format!("{} KiB in all (RLIMIT_MEMLOCK)", bytes >> 10),
    )
}

/// Bytes that this user may lock; `None` if there is no limit.
pub(crate) fn lock_limit() -> Option<u64> {
    /// The number of the capability to lock any amount (CAP_IPC_LOCK).
    const IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let is_limited = effective_capabilities(&status) >> IPC_LOCK & 1 == 0;
    getrlimit(Resource::Memlock).current.filter(|_| is_limited)
}

/// The field CapEff of `/proc/thread-self/status`, if it exists.
fn effective_capabilities(status: &str) -> u64 {
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    field.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0)
}

/// `vm.overcommit_memory`: 0 heuristic, 1 always, 2 never; None where it cannot be read.
pub(crate) fn overcommit_mode() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statm_gives_total_and_data() {
        assert_eq!(parse_statm("1000 10 5 2 0 300 0\n"), Some((4_096_000, 1_228_800)));
        assert_eq!(parse_statm("1000 10"), None);
        let (total, data) = mapped_bytes().unwrap();
        assert!(total > data && data > 0);
    }

    #[test]
    fn capabilities_are_read_in_hexadecimal() {
        assert_eq!(effective_capabilities("Uid:\t0\nCapEff:\t000001ffffffffff\n") >> 14 & 1, 1);
        assert_eq!(effective_capabilities("CapEff:\t0000000000000000\n"), 0);
        assert_eq!(effective_capabilities(""), 0);
        assert!(!lockable().is_empty());
    }

    #[test]
    fn the_limit_that_is_exceeded_is_the_cause() {
        let why = |errno, limits| cause(errno, "test", 100, 100, limits);
        let used = Limits { total: 1_000, data: 500, ..Limits::default() };
        let refused = |errno| ReserveError::Refused { purpose: "test", bytes: 100, errno };
        assert_eq!(why(Errno::NOMEM, used), refused(Errno::NOMEM));
        let total = Limits { total_limit: Some(1_099), overcommit: Some(2), ..used };
        assert_eq!(
            why(Errno::NOMEM, total),
            ReserveError::AddressSpaceLimit { purpose: "test", bytes: 100, limit: 1_099 }
        );
        assert_eq!(why(Errno::ACCESS, total), refused(Errno::ACCESS));
        let data = Limits { total_limit: Some(1_100), data_limit: Some(599), ..used };
        assert_eq!(
            why(Errno::NOMEM, data),
            ReserveError::DataLimit { purpose: "test", bytes: 100, limit: 599 }
        );
        let never = Limits { data_limit: Some(600), overcommit: Some(2), ..used };
        let error = why(Errno::NOMEM, never);
        assert_eq!(error, ReserveError::Overcommit { purpose: "test", bytes: 100 });
        assert!(error.to_string().contains("vm.overcommit_memory=0"), "{error}");
    }
}
