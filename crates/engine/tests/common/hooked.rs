//! A device that runs a hook before each of its operations that change the file.
#![allow(dead_code)]

use std::io;
use std::sync::Mutex;

use vellum_pool::device::{Device, DeviceInfo, MemoryDevice, PageRange, ReadDone, Surface, Write};

/// What the device is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// To write a batch that begins with this page.
    Write(u64),
    Sync,
    Unlock,
}

type Hook = Box<dyn Fn(About) + Send + Sync>;

/// See the module's documentation.
#[derive(Default)]
pub struct Hooked {
    pub memory: MemoryDevice,
    hook: Mutex<Option<std::sync::Arc<Hook>>>,
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}

impl Hooked {
    pub fn set(&self, hook: impl Fn(About) + Send + Sync + 'static) {
        *self.hook.lock().unwrap() = Some(std::sync::Arc::new(Box::new(hook)));
    }

    fn run(&self, about: About) {
        let hook = self.hook.lock().unwrap().clone();
        if let Some(hook) = hook {
            hook(about);
        }
    }
}

impl Device for Hooked {
    fn read(&self, surface: &Surface, range: PageRange) -> io::Result<()> {
        self.memory.read(surface, range)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(PageRange, ReadDone)>) {
        self.memory.start_reads(surface, reads);
    }

    fn write(&self, batch: &mut [Write<'_>]) {
        self.run(About::Write(batch.first().map_or(0, |write| write.page)));
        self.memory.write(batch);
    }

    fn sync(&self) -> io::Result<()> {
        self.run(About::Sync);
        self.memory.sync()
    }

    fn pages(&self) -> io::Result<u64> {
        self.memory.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.memory.resize(pages)
    }

    fn unlock(&self) {
        self.run(About::Unlock);
        self.memory.unlock();
    }

    fn info(&self) -> DeviceInfo {
        self.memory.info()
    }
}
