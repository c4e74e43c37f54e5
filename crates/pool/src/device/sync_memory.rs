//! A device that remembers that a sync has failed.
//!
//! The kernel reports a page that it could not write to one sync only, and calls the page clean
//! then. A store syncs its file from several threads, for several purposes. Without this device the
//! thread that comes second would take the kernel's next answer for the truth.

use std::io;
use std::sync::{Arc, Mutex};

use vellum_vm::Surface;

use super::workers::lock;
use super::{Device, DeviceInfo, ReadDone, ReadRange, RegisteredMemory, Write};

/// Another device. Once one sync has failed, all later syncs fail, too.
#[derive(Debug)]
pub struct SyncMemory {
    inner: Arc<dyn Device>,
    /// The first failure. A thread that syncs holds the lock to the end, so no other thread is told
    /// of a success before this one has noted its failure.
    failed: Mutex<Option<(io::ErrorKind, String)>>,
}

impl SyncMemory {
    /// Wraps a device. All who sync it must use the same wrapper.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, failed: Mutex::new(None) }
    }
}

impl Device for SyncMemory {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.inner.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.inner.start_reads(surface, reads);
    }

    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        self.inner.registered_memory(surface)
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        self.inner.write(writes);
    }

    fn sync(&self) -> io::Result<()> {
        let mut failed = lock(&self.failed);
        if let Some((kind, what)) = &*failed {
            return Err(io::Error::new(*kind, format!("an earlier sync failed: {what}")));
        }
        // A panic of the device is no answer: the next sync asks again.
        let synced = self.inner.sync();
        *failed = synced.as_ref().err().map(|error| (error.kind(), error.to_string()));
        synced
    }

    fn pages(&self) -> io::Result<u64> {
        self.inner.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.inner.resize(pages)
    }

    fn unlock(&self) {
        self.inner.unlock();
    }

    fn answers_at_once(&self) -> bool {
        self.inner.answers_at_once()
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use vellum_vm::Errno;

    use super::super::{Call, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation};
    use super::*;

    #[test]
    fn after_a_failed_sync_all_fail() {
        let device = FaultyDevice::new(MemoryDevice::new(), 1).unwrap();
        let plan = device.plan();
        let device = SyncMemory::new(Arc::new(device));
        device.sync().unwrap();
        plan.fail_nth(Operation::Sync, 1, Fault::Error(Errno::IO));
        assert_eq!(device.sync().unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
        let later = device.sync().unwrap_err().to_string();
        assert!(later.starts_with("an earlier sync failed: "), "{later}");
        assert_eq!(plan.counts().syncs, 2, "the device is not asked again");
    }

    #[test]
    fn after_a_panic_in_a_sync_the_next_one_asks_again() {
        let hooked = Arc::new(HookedDevice::new(MemoryDevice::new()));
        hooked.set_hook(|call| assert!(call != Call::Sync, "on purpose"));
        let device = SyncMemory::new(hooked.clone());
        assert!(catch_unwind(AssertUnwindSafe(|| device.sync())).is_err());
        hooked.clear_hook();
        device.sync().unwrap();
    }
}
