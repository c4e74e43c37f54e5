//! A device that passes all operations on to another device, and calls a hook of the test around
//! them.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};

use vellum_vm::Surface;

use super::super::workers::lock;
use super::super::{Device, DeviceInfo, ReadDone, ReadRange, RegisteredMemory, Write};

/// The operation for which a [`HookedDevice`] calls its hook. The hook runs before the operation,
/// unless the operation's name says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call<'a> {
    /// A read that blocks.
    Read,
    /// The start of reads that do not block.
    StartReads,
    /// Writes to these pages, by one call.
    Write(&'a [u64]),
    /// The end of the writes to these pages.
    AfterWrite(&'a [u64]),
    /// A sync.
    Sync,
    /// A change of the length.
    Resize,
    /// An unlock.
    Unlock,
}

type Hook = Arc<dyn Fn(Call<'_>) + Send + Sync>;

/// Another device, and a hook. The hook may block, call the device, and panic: the panic is then
/// the operation's.
pub struct HookedDevice<D> {
    inner: D,
    hook: Mutex<Option<Hook>>,
}

impl<D: Device> HookedDevice<D> {
    /// Wraps a device. There is no hook until [`set_hook`](Self::set_hook).
    pub fn new(inner: D) -> Self {
        Self { inner, hook: Mutex::new(None) }
    }

    /// The device below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Sets the hook, in place of the one before. Operations that began earlier may still call that
    /// one.
    pub fn set_hook(&self, hook: impl Fn(Call<'_>) + Send + Sync + 'static) {
        *lock(&self.hook) = Some(Arc::new(hook));
    }

    /// Removes the hook.
    pub fn clear_hook(&self) {
        *lock(&self.hook) = None;
    }

    fn call_hook(&self, call: Call<'_>) {
        // No lock is held while the hook runs.
        let hook = lock(&self.hook).clone();
        if let Some(hook) = hook {
            hook(call);
        }
    }
}

impl<D> fmt::Debug for HookedDevice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HookedDevice")
    }
}

impl<D: Device> Device for HookedDevice<D> {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.call_hook(Call::Read);
        self.inner.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.call_hook(Call::StartReads);
        self.inner.start_reads(surface, reads);
    }

    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        self.inner.registered_memory(surface)
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        let pages: Vec<u64> = writes.iter().map(|write| write.page).collect();
        self.call_hook(Call::Write(&pages));
        self.inner.write(writes);
        self.call_hook(Call::AfterWrite(&pages));
    }

    fn sync(&self) -> io::Result<()> {
        self.call_hook(Call::Sync);
        self.inner.sync()
    }

    fn pages(&self) -> io::Result<u64> {
        self.inner.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.call_hook(Call::Resize);
        self.inner.resize(pages)
    }

    fn unlock(&self) {
        self.call_hook(Call::Unlock);
        self.inner.unlock();
    }

    fn answers_at_once(&self) -> bool {
        self.inner.answers_at_once()
    }

    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
}
