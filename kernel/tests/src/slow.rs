//! A slow block device: null_blk with a timer.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder in which such devices are configured.
const CONFIGURATION: &str = "/sys/kernel/config";

/// A device. Reads return arbitrary bytes.
#[derive(Debug)]
pub struct Slow {
    folder: PathBuf,
    device: PathBuf,
}

impl Slow {
    /// Bytes of one.
    pub const BYTES: u64 = 64 << 20;

    /// A device whose every answer takes so long.
    pub fn new(delay: Duration) -> Self {
        let nullb = Path::new(CONFIGURATION).join("nullb");
        if !nullb.exists() {
            let (kind, at) = (c"configfs", c"/sys/kernel/config");
            // SAFETY: the strings end with zeros, and there are no options.
            let mounted = unsafe {
                libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, std::ptr::null())
            };
            assert_eq!(mounted, 0, "mount: {}", crate::sys::last_error());
        }
        let folder = nullb.join("slow");
        fs::create_dir(&folder).expect("a device of null_blk");
        let set = |name: &str, value: u128| {
            fs::write(folder.join(name), value.to_string()).expect("a parameter of null_blk");
        };
        set("size", u128::from(Self::BYTES >> 20));
        set("blocksize", 4096);
        set("hw_queue_depth", 512);
        // By a timer.
        set("irqmode", 2);
        set("completion_nsec", delay.as_nanos());
        set("power", 1);
        let index = fs::read_to_string(folder.join("index")).expect("its number");
        // Later kernels name the device after the folder.
        let names = ["/dev/slow".to_owned(), format!("/dev/nullb{}", index.trim())];
        let device = names.iter().map(PathBuf::from).find(|path| path.exists());
        Self { device: device.expect("the slow device"), folder }
    }

    /// The requests that it got so far, answered or not.
    pub fn requests(&self) -> u64 {
        let name = self.device.file_name().unwrap_or_default();
        let stat = Path::new("/sys/block").join(name).join("stat");
        let stat = fs::read_to_string(stat).expect("its counts");
        let counts: Vec<u64> = stat.split_whitespace().flat_map(str::parse).collect();
        // Reads and writes that ended, and those in flight.
        counts[0] + counts[4] + counts[8]
    }

    /// Opens it for direct I/O.
    pub fn open(&self) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(&self.device).expect("the slow device")
    }
}

impl Drop for Slow {
    /// Waits for I/O in flight.
    fn drop(&mut self) {
        // The device is removed with the guest at the latest.
        let _ = fs::remove_dir(&self.folder);
    }
}
