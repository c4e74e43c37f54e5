//! The kernel's log.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::{Duration, Instant};

use crate::counters::PATIENCE;

/// The kernel's messages since this was opened.
#[derive(Debug)]
pub struct KernelLog {
    file: File,
}

impl KernelLog {
    /// Begins now.
    pub fn begin() -> Self {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let mut file = options.open("/dev/kmsg").expect("/dev/kmsg");
        file.seek(SeekFrom::End(0)).expect("the end of /dev/kmsg");
        Self { file }
    }

    /// Repeats an operation until the kernel logs these words, because the kernel limits the rate
    /// of repeated messages. The kernel may be silent for up to [`PATIENCE`].
    #[track_caller]
    pub fn wait_for(&mut self, words: &str, mut action: impl FnMut()) {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            action();
            std::thread::sleep(Duration::from_millis(200));
            while let Some(message) = self.next() {
                if message.contains(words) {
                    return;
                }
            }
        }
        panic!("the kernel does not say '{words}'");
    }

    fn next(&mut self) -> Option<String> {
        // One message with each call; the longest fits.
        let mut bytes = [0; 8192];
        let length = self.file.read(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }
}
