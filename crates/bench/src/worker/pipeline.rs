//! A step of a pipeline of processes: packets come from one socket, as Morsels, and go to the next.
//!
//! A packet is a head of fixed length, followed by the Morsel. Only the process that has received a
//! packet uses it, until it sends it on.
#![allow(unsafe_code)]

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use crc_fast::{CrcAlgorithm, checksum};
use serde::{Deserialize, Serialize};
use vellum_morsel::{Access, Mapping, Morsel};

use crate::workload::values::Random;

/// The work on each packet (DIMES'23, section 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Fill the packet with random bytes.
    Fill,
    /// Compute the CRC-32 of the bytes.
    Sum,
    /// Overwrite the bytes.
    Overwrite,
}

/// A step of a pipeline, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Its work.
    pub step: Step,
    /// The socket at which it listens.
    pub from: PathBuf,
    /// The socket to which it sends packets.
    pub to: PathBuf,
}

/// The head before each Morsel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// The packet's number; without a Morsel, if it has no bytes.
    pub number: u64,
    /// Bytes of the packet.
    pub length: u64,
    /// The sum of the bytes, once there is one.
    pub sum: u64,
    /// In a head without bytes: the page faults of the steps since they began.
    pub faults: u64,
    /// In a head without bytes: their time in user space, in ticks of the kernel's clock.
    pub ticks: u64,
}

impl Head {
    const BYTES: usize = 40;

    /// Reads the next head; `None` if there are no more.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn read(socket: &mut UnixStream) -> Result<Option<Head>> {
        let mut bytes = [0; Head::BYTES];
        match socket.read_exact(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        }
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("chunks of 8 bytes")));
        let mut next = || words.next().unwrap_or_default();
        let (number, length, sum) = (next(), next(), next());
        Ok(Some(Head { number, length, sum, faults: next(), ticks: next() }))
    }

    /// Writes it.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn write(&self, socket: &mut UnixStream) -> Result<()> {
        let words = [self.number, self.length, self.sum, self.faults, self.ticks];
        Ok(socket.write_all(&words.map(u64::to_le_bytes).concat())?)
    }
}

/// Connects to a process that listens there, or will listen soon.
///
/// # Errors
/// If no process listens in time.
pub fn connect(path: &Path) -> Result<UnixStream> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match UnixStream::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(error) if Instant::now() > end => return Err(error).context("the next step"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

impl Stage {
    /// Runs a step until no more packets come.
    ///
    /// # Errors
    /// Errors of the system; a message that is no packet.
    pub(super) fn run(&self) -> Result<()> {
        let listener = UnixListener::bind(&self.from).context("listening")?;
        let mut to = connect(&self.to)?;
        let (mut from, _) = listener.accept()?;
        while let Some(mut head) = Head::read(&mut from)? {
            if head.length == 0 {
                let (faults, ticks) = spent()?;
                head.faults += faults;
                head.ticks += ticks;
                head.write(&mut to)?;
                continue;
            }
            let morsel = Morsel::receive(&from)?;
            self.step.work(&mut head, &morsel)?;
            head.write(&mut to)?;
            morsel.send(&to)?;
        }
        Ok(())
    }
}

impl Step {
    fn work(self, head: &mut Head, morsel: &Morsel) -> Result<()> {
        let access = if self == Step::Sum { Access::Read } else { Access::ReadWrite };
        let mapping = morsel.map(access)?;
        ensure!(head.length <= mapping.length(), "a packet longer than its memory");
        let length = usize::try_from(head.length)?;
        match self {
            Step::Fill => fill(head.number, bytes_of(&mapping, length)),
            Step::Sum => {
                // SAFETY: mapped as long as `mapping`; no other process has the packet, see above.
                let bytes = unsafe { slice::from_raw_parts(mapping.base().as_ptr(), length) };
                head.sum = checksum(CrcAlgorithm::Crc32IsoHdlc, bytes);
            }
            Step::Overwrite => bytes_of(&mapping, length).fill(0xa5),
        }
        Ok(())
    }
}

#[allow(clippy::mut_from_ref)]
fn bytes_of(mapping: &Mapping, length: usize) -> &mut [u8] {
    // SAFETY: mapped for writing as long as `mapping`, which nothing else borrows; no other process
    // has the packet, see above.
    unsafe { slice::from_raw_parts_mut(mapping.base().as_ptr(), length) }
}

/// Pseudo-random bytes that follow from the number.
fn fill(number: u64, bytes: &mut [u8]) {
    let mut random = Random::new(number);
    for word in bytes.chunks_mut(8) {
        word.copy_from_slice(&random.bits().to_le_bytes()[..word.len()]);
    }
}

/// Page faults of this process, and its time in user space in ticks.
fn spent() -> Result<(u64, u64)> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The name, in parentheses, may contain anything.
    let rest = stat.rsplit_once(')').context("/proc/self/stat")?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |index: usize| -> Result<u64> {
        Ok(fields.get(index).context("/proc/self/stat")?.parse()?)
    };
    Ok((field(7)?, field(11)?))
}

/// The sum of a packet, computed from its number.
pub fn sum_of(number: u64, length: u64) -> Result<u64> {
    let mut bytes = vec![0; usize::try_from(length)?];
    fill(number, &mut bytes);
    Ok(checksum(CrcAlgorithm::Crc32IsoHdlc, &bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_a_socket() {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let head = Head { number: 1, length: u64::MAX, sum: 3, faults: 4, ticks: 5 };
        head.write(&mut here).unwrap();
        assert_eq!(Head::read(&mut there).unwrap(), Some(head));
        drop(here);
        assert_eq!(Head::read(&mut there).unwrap(), None);
    }

    #[test]
    fn faults_are_counted() {
        let before = spent().unwrap().0;
        let memory = vec![1_u8; 16 << 20];
        assert!(memory.iter().all(|byte| *byte == 1));
        assert!(spent().unwrap().0 > before);
    }

    #[test]
    fn a_sum_belongs_to_its_number() {
        assert_eq!(sum_of(1, 5_001).unwrap(), sum_of(1, 5_001).unwrap());
        assert_ne!(sum_of(1, 5_001).unwrap(), sum_of(2, 5_001).unwrap());
    }
}
