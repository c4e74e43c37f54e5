//! The buffer manager of a store, to look at: [`PoolView`].

use vellum_pool::device::DeviceInfo;
use vellum_pool::{BackendKind, Pool, PoolError, Space};

/// What can be asked of the buffer manager of a store. It changes no page.
///
/// ```compile_fail
/// fn pages_of_a_store_cannot_be_freed(store: &vellum::Store) {
///     let _ = store.pool().free_page(vellum::PageRef::new(2, 1));
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a>(pub(crate) &'a Pool);

impl PoolView<'_> {
    /// How pages are populated and released.
    pub fn backend(self) -> BackendKind {
        self.0.backend()
    }

    /// What the device says of itself.
    pub fn device_info(self) -> DeviceInfo {
        self.0.device_info()
    }

    /// How many pages of 4 KiB hold memory, by the kernel's own page tables. Slow: it reads
    /// `/proc/self/pagemap`.
    ///
    /// # Errors
    /// `/proc/self/pagemap` cannot be read.
    pub fn kernel_resident_pages(self) -> Result<u64, PoolError> {
        self.0.kernel_resident_pages()
    }

    /// Pages of 4 KiB that were freed while a reader or a write-back held them, and still are held.
    pub fn frames_to_free(self) -> u64 {
        self.0.frames_to_free()
    }

    /// Reads the map of allocated pages.
    pub fn with_space<R>(self, read: impl FnOnce(&Space) -> R) -> R {
        self.0.with_space(read)
    }
}
