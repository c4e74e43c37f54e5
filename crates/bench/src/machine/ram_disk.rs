//! A block device in memory with a file system on it, which stands in for a fast SSD: zram.
//!
//! It is set up as root and torn down on drop. It records every device under `/run/vellum-bench`
//! before it uses it. So the next run, or a [cleaner](crate::worker::Cleaner), can tell the devices
//! of a killed run from those of other programs, and remove them. The device stores incompressible
//! data unchanged: data under test must not compress.

mod zram;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::memory_available;
use super::owner::Owner;
use zram::Zram;

/// Where devices are recorded and mounted. It is empty after a start of the machine, as they are.
const RECORDS: &str = "/run/vellum-bench";

/// Memory that is left to all other programs.
const RESERVE: u64 = 1 << 30;

/// The file system: no journal, nothing reserved, and nothing left to be initialised later, which
/// would go on while measurements run.
const MAKE_FILE_SYSTEM: &[&str] = &[
    "-q",
    "-F",
    "-b",
    "4096",
    "-m",
    "0",
    "-O",
    "^has_journal",
    "-E",
    "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
];

/// How often unmounting is tried while a process still uses the file system, and the pause between.
const UNMOUNT_TRIES: u32 = 50;
const UNMOUNT_PAUSE: Duration = Duration::from_millis(100);

/// A mounted block device in memory.
#[derive(Debug)]
pub struct RamDisk {
    record: Record,
    bytes: u64,
}

impl RamDisk {
    /// A device of `bytes` with an empty file system. It takes memory only as it is filled, and
    /// gives it back as files go.
    ///
    /// # Errors
    /// Without root or zram, and if memory could not hold a full device; names what is missing.
    pub fn set_up(bytes: u64) -> Result<RamDisk> {
        remove_leftovers();
        let available = memory_available();
        if bytes + RESERVE > available {
            bail!(
                "a RAM disk of {} MiB does not fit the {} MiB of memory that are available",
                bytes >> 20,
                available >> 20
            );
        }
        let record = Record::make(Path::new(RECORDS), Zram::add()?)?;
        // From here on the record is torn down if anything fails.
        let disk = RamDisk { record, bytes };
        disk.record.zram.set_size(bytes)?;
        run(Command::new("mkfs.ext4").args(MAKE_FILE_SYSTEM).arg(disk.device()))?;
        run(Command::new("mount")
            .args(["-t", "ext4", "-o", "noatime,discard"])
            .arg(disk.device())
            .arg(disk.path()))?;
        Ok(disk)
    }

    /// The directory of the file system.
    pub fn path(&self) -> PathBuf {
        self.record.mount_point()
    }

    /// The device itself. Writing to it destroys the file system.
    pub fn device(&self) -> PathBuf {
        self.record.zram.path()
    }

    /// Bytes that the device holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        if let Err(error) = self.record.tear_down() {
            eprintln!("vellum bench: {error:#}");
        }
    }
}

/// Tears down devices whose makers were killed; returns how many.
pub(super) fn remove_leftovers() -> usize {
    let Ok(records) = fs::read_dir(RECORDS) else { return 0 };
    let records = records.flatten().filter_map(|entry| Record::read(&entry.path()));
    records.filter(|(owner, record)| !owner.is_alive() && record.tear_down().is_ok()).count()
}

/// The record that a device is ours: a directory with the device's number and generation in its
/// name, the owner in a file, and the mount point.
#[derive(Debug)]
struct Record {
    path: PathBuf,
    zram: Zram,
}

impl Record {
    fn make(records: &Path, zram: Zram) -> Result<Record> {
        let path = records.join(format!("{}-{}", zram.number(), zram.generation()));
        let record = Record { path, zram };
        let make = || -> io::Result<()> {
            fs::create_dir_all(record.mount_point())?;
            fs::write(record.owner_file(), Owner::this_process().to_string())
        };
        if let Err(error) = make() {
            let message = format!("cannot record a RAM disk in {}", record.path.display());
            // The error is the cause, not the failure of the removal.
            let _ = record.tear_down();
            return Err(error).context(message);
        }
        Ok(record)
    }

    /// The record of another run; `None` if it is incomplete, as it is for a moment.
    fn read(path: &Path) -> Option<(Owner, Record)> {
        let (number, generation) = path.file_name()?.to_str()?.split_once('-')?;
        let zram = Zram::recorded(number.parse().ok()?, generation.parse().ok()?);
        let record = Record { path: path.to_owned(), zram };
        let owner = fs::read_to_string(record.owner_file()).ok()?;
        Some((Owner::parse(&owner)?, record))
    }

    fn mount_point(&self) -> PathBuf {
        self.path.join("mounted")
    }

    fn owner_file(&self) -> PathBuf {
        self.path.join("owner")
    }

    /// Unmounts and removes the device, then the record. A device that is in use elsewhere stays.
    fn tear_down(&self) -> Result<()> {
        let place = self.mount_point();
        for attempt in 1.. {
            if !is_mounted(&place) {
                break;
            }
            match run(Command::new("umount").arg(&place)) {
                Ok(()) => {}
                Err(error) if attempt >= UNMOUNT_TRIES => {
                    return Err(error.context("the RAM disk stays until the next run"));
                }
                Err(_) => thread::sleep(UNMOUNT_PAUSE),
            }
        }
        self.zram.remove()?;
        let remove = || -> io::Result<()> {
            // Not recursively: were anything still mounted there, its files would go.
            fs::remove_dir(&place)?;
            fs::remove_file(self.owner_file())?;
            fs::remove_dir(&self.path)
        };
        match remove() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }
}

fn is_mounted(place: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1).map(Path::new) == Some(place))
}

/// Runs a command to its end.
fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}): {}", output.status, words.trim().replace('\n', "; "));
    }
    Ok(())
}
