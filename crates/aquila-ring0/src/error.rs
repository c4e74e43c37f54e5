//! Why a thread cannot go to ring 0, and what to do.

use rustix::io::Errno;

/// The result of an operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The processor is of another kind.
    #[error("ring 0 needs an x86-64 processor")]
    Processor,
    /// `/dev/kvm` does not open.
    #[error("/dev/kvm does not open: {errno}; {advice}")]
    NoKvm {
        /// The error of the system.
        errno: Errno,
        /// What to do.
        advice: &'static str,
    },
    /// KVM works, and the processor does not run guests itself.
    #[error(
        "KVM does not run guests on the processor here, but interprets them: {found}; use a \
         machine whose processor flags have vmx or svm"
    )]
    Interpreted {
        /// What the self-test saw.
        found: String,
    },
    /// KVM or the processor lacks something.
    #[error("{what} is missing; {advice}")]
    Missing {
        /// What is missing.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// The process is a child that was forked after the machine was made.
    #[error("a forked process does not have its parent's machine; make one of its own")]
    Forked,
    /// The thread runs in ring 0 already.
    #[error("this thread runs in ring 0 already; call the function itself")]
    Inside,
    /// The thread must be in ring 3 for that.
    #[error("{doing} is not possible in ring 0; do it before")]
    OnlyInRing3 {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The machine has a cache.
    #[error("the machine has a cache already; map the file with that one")]
    HasCache,
    /// The cache would have too few pages.
    #[error(
        "a cache of {pages} pages is too small; have {least} or more, which are {} bytes",
        u64::from(*.least) << 12
    )]
    CacheTooSmall {
        /// The pages that it was to have.
        pages: u32,
        /// The fewest that it can have.
        least: u32,
    },
    /// The file is mapped.
    #[error("the file is mapped already; use that mapping, or close it before")]
    AlreadyMapped,
    /// Memory or addresses ran out.
    #[error("{doing}: not enough memory or addresses; free some, or raise the limit (RLIMIT_AS)")]
    NoMemory {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The machine has as many managed ranges as it can have.
    #[error("the machine has {most} managed ranges already; use a longer one for several purposes")]
    TooManyRanges {
        /// The limit.
        most: usize,
    },
    /// Any other error of the system.
    #[error("{doing}: {errno}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The error of the system.
        errno: Errno,
    },
}

impl Error {
    /// The meaning of an error number.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of(doing: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::NOMEM => Self::NoMemory { doing },
            errno => Self::System { doing, errno },
        }
    }

    /// The meaning of an error of KVM.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn kvm(doing: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |error| Self::of(doing, Errno::from_raw_os_error(error.errno()))
    }
}
