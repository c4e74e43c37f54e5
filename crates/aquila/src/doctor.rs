//! Which backends and variants work here, found out by mapping a file with each.

use std::fs::File;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::PAGE_SIZE;
use crate::cache::{Backend, BackendChoice, Cache, Options};
use crate::error::{Error, Result};
use crate::mapping::Access;
use crate::probe::{DirtyTracking, Faults, Frames};

/// Pages of the file that the self-test maps, and of its cache.
const PAGES: usize = 32;
const CACHE: usize = 8;

/// The result of one self-test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The backend.
    pub backend: Backend,
    /// The variant of the backend; its name otherwise.
    pub variant: &'static str,
    /// Whether it works.
    pub works: bool,
    /// One line: what it offers; or why it does not work.
    pub about: String,
}

/// Tests each backend and each of its variants with a file of its own: it reads, stores, evicts,
/// syncs and compares. Takes about a millisecond.
pub fn doctor() -> Vec<Check> {
    let own = BackendChoice::Only(Backend::Userfaultfd);
    let options = Options::new((CACHE * PAGE_SIZE) as u64).without_minimum();
    let memory_files = options.clone().backend(own).frames(Frames::MemoryFile);
    let candidates = [
        (
            Backend::Userfaultfd,
            "anonymous",
            "a cache of the program's own, for files with one mapping and no pin",
            options.clone().backend(own).frames(Frames::Anonymous),
        ),
        (
            Backend::Userfaultfd,
            "write-protect",
            "the same for all files; pages that were stored to are written back",
            memory_files.clone().dirty_tracking(DirtyTracking::WriteProtect),
        ),
        (
            Backend::Userfaultfd,
            "mapped",
            "the same; every page that is mapped in a writable mapping is written back",
            memory_files.dirty_tracking(DirtyTracking::Mapped),
        ),
        (
            Backend::Userfaultfd,
            "monitor",
            "a cache whose mappings system calls can use; its own threads handle the faults",
            options.clone().backend(own).faults(Faults::Monitor),
        ),
        (
            Backend::Kernel,
            "kernel",
            "mmap: the machine's page cache, without a budget or a policy of the program's",
            options.backend(BackendChoice::Only(Backend::Kernel)),
        ),
    ];
    candidates
        .into_iter()
        .map(|(backend, variant, about, options)| {
            let result = options.build().and_then(|cache| test(&cache));
            let works = result.is_ok();
            let about = result.map_or_else(|error| error.to_string(), |()| about.to_owned());
            Check { backend, variant, works, about }
        })
        .collect()
}

/// Stores to every page of a file through a cache that is smaller, and compares.
fn test(cache: &Cache) -> Result<()> {
    let doing = "testing a backend";
    let failed = |errno| Error::of(doing, errno);
    let wrong = |page: usize| Error::NoBackend {
        backend: cache.backend().name(),
        reason: format!("the self-test found wrong bytes in page {page}"),
    };
    let file = File::from(memfd_create("vellum-aquila-test", MemfdFlags::CLOEXEC).map_err(failed)?);
    rustix::fs::ftruncate(&file, (PAGES * PAGE_SIZE) as u64).map_err(failed)?;
    let byte = |page: usize, round: u8| page as u8 * 2 + round;
    for page in 0..PAGES {
        rustix::io::pwrite(&file, &[byte(page, 0)], (page * PAGE_SIZE) as u64).map_err(failed)?;
    }
    let mapping = cache.map(&file, .., Access::ReadWrite)?;
    // What does not work at all is an error here, and not a signal below.
    mapping.prefetch(..PAGE_SIZE)?;
    for page in 0..PAGES {
        if mapping.mapped().load(page * PAGE_SIZE) != byte(page, 0) {
            return Err(wrong(page));
        }
        mapping.mapped().store(page * PAGE_SIZE, byte(page, 1));
    }
    mapping.sync()?;
    for page in 0..PAGES {
        let mut found = [0];
        rustix::io::pread(&file, &mut found, (page * PAGE_SIZE) as u64).map_err(failed)?;
        if found != [byte(page, 1)] || mapping.mapped().load(page * PAGE_SIZE) != byte(page, 1) {
            return Err(wrong(page));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_backend_works_everywhere_and_every_line_says_something() {
        let checks = doctor();
        assert!(checks.iter().any(|check| check.backend == Backend::Kernel && check.works));
        assert!(checks.iter().all(|check| !check.about.is_empty()));
        let works = |variant| checks.iter().any(|check| check.variant == variant && check.works);
        let auto = Options::new(1 << 20).build().unwrap();
        let own = works("write-protect") || works("mapped");
        assert_eq!(auto.backend() == Backend::Userfaultfd, own);
        assert_eq!(auto.write_protects(), own.then(|| works("write-protect")));
    }
}
