//! Marks among the recorded writes of a disk: messages to its device.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

/// The command `DM_TARGET_MSG`, and the bytes of its head (`struct dm_ioctl`).
const TARGET_MESSAGE: libc::Ioctl = 0xc138_fd0e_u32 as libc::Ioctl;
const HEAD: usize = 312;

/// Where the head has the device's name.
const NAME: usize = 48;

/// Notes texts among the writes of a disk. A program for that would take longer than a commit.
#[derive(Debug)]
pub struct Marker {
    control: File,
    name: String,
}

impl Marker {
    /// For the recorded disk of this name.
    pub fn new(name: &str) -> Marker {
        let control = File::options().read(true).write(true).open("/dev/mapper/control").unwrap();
        Marker { control, name: name.to_owned() }
    }

    /// Notes one word.
    pub fn mark(&self, word: &str) {
        let message = format!("mark {word}");
        // Behind the head: the sector of the target, and the message with a zero after it.
        let mut bytes = vec![0; HEAD + 8 + message.len() + 1];
        let len = bytes.len() as u32;
        // The interface's version is 4.0.0.
        for (at, word) in [(0, 4), (12, len), (16, HEAD as u32)] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[NAME..NAME + self.name.len()].copy_from_slice(self.name.as_bytes());
        bytes[HEAD + 8..][..message.len()].copy_from_slice(message.as_bytes());
        // SAFETY: The kernel reads and writes as many bytes as the head says, which are all.
        let done =
            unsafe { libc::ioctl(self.control.as_raw_fd(), TARGET_MESSAGE, bytes.as_mut_ptr()) };
        assert_eq!(done, 0, "{}: {}", self.name, io::Error::last_os_error());
    }
}
