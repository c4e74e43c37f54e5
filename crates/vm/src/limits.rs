//! Why the kernel refused address space: finds the limit that is in the way.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::PAGE_SIZE;
use crate::mapping::ReserveError;

/// Turns the errno of a failed mapping of `needed` more bytes into an error that names the cause.
///
/// Linux says ENOMEM for all of them, so the limits are looked up; `bytes` is what the caller
/// asked for in all.
pub(crate) fn explain(
    errno: Errno,
    purpose: &'static str,
    bytes: usize,
    needed: usize,
) -> ReserveError {
    if errno != Errno::NOMEM {
        return ReserveError::Refused { purpose, bytes, errno };
    }
    let (total, data) = mapped_bytes().unwrap_or((0, 0));
    let needed = needed as u64;
    if let Some(limit) = getrlimit(Resource::As).current
        && total.saturating_add(needed) > limit
    {
        return ReserveError::AddressSpaceLimit { purpose, bytes, limit };
    }
    if let Some(limit) = getrlimit(Resource::Data).current
        && data.saturating_add(needed) > limit
    {
        return ReserveError::DataLimit { purpose, bytes, limit };
    }
    match overcommit_mode() {
        Some(2) => ReserveError::Overcommit { purpose, bytes },
        _ => ReserveError::Refused { purpose, bytes, errno },
    }
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
    fn other_errnos_are_passed_on() {
        let error = explain(Errno::ACCESS, "test", 4096, 4096);
        assert_eq!(
            error,
            ReserveError::Refused { purpose: "test", bytes: 4096, errno: Errno::ACCESS }
        );
    }
}
