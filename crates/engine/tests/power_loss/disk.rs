//! A disk whose writes are recorded, and what it had when the power failed.
//!
//! The kernel's target `dm-log-writes` records every write to a disk, in the order in which the
//! writes became durable: those that were complete when a flush began stand before that flush. From
//! the records this module makes the contents that the disk may have had at any point.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use vellum_testing::random::Random;

const SECTOR: usize = 512;

/// The first bytes of the records: a number of the kernel's.
const MAGIC: u64 = 0x006a_7366_7773_6872;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// A program for disks. The lab puts one into the folder of the test.
pub fn tool(name: &str) -> Command {
    let own = std::env::current_exe().unwrap().with_file_name(name);
    let mut command = Command::new(if own.exists() { own } else { name.into() });
    // dmsetup would wait for a daemon that the lab does not have.
    command.env("DM_DISABLE_UDEV", "1");
    command
}

/// Runs a command, which has to succeed. Returns what it says.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {} {said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Whether this machine records writes.
pub fn is_possible() -> bool {
    let targets = tool("dmsetup").arg("targets").output();
    targets.is_ok_and(|targets| String::from_utf8_lossy(&targets.stdout).contains("log-writes"))
}

/// A block device whose bytes are in a file.
#[derive(Debug)]
pub struct Loop {
    pub device: PathBuf,
}

impl Loop {
    pub fn new(file: &Path, bytes: u64) -> Loop {
        // Another thread would find the same free device.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap();
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(file)
            .and_then(|file| file.set_len(bytes))
            .unwrap();
        let device = PathBuf::from(run(Command::new("losetup").arg("-f")).trim());
        run(Command::new("losetup").arg(&device).arg(file));
        Loop { device }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

/// A device of the kernel's device mapper.
#[derive(Debug)]
pub struct Mapped {
    name: String,
}

impl Mapped {
    pub fn new(name: &str, table: &str) -> Mapped {
        let mut create = tool("dmsetup");
        create.args(["create", name, "--table", table]);
        run(&mut create);
        Mapped { name: name.to_owned() }
    }

    pub fn device(&self) -> PathBuf {
        Path::new("/dev/mapper").join(&self.name)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = tool("dmsetup").args(["remove", &self.name]).status();
    }
}

/// A mounted file system.
#[derive(Debug)]
pub struct Mounted {
    pub folder: PathBuf,
}

impl Mounted {
    pub fn new(device: &Path, folder: &Path) -> Mounted {
        fs::create_dir_all(folder).unwrap();
        run(Command::new("mount").args(["-t", "ext4"]).arg(device).arg(folder));
        Mounted { folder: folder.to_owned() }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let mut umount = Command::new("umount");
        umount.arg(&self.folder).stderr(Stdio::null());
        // A process that another thread starts has this one's files for a moment.
        for _ in 0..500 {
            if umount.status().is_ok_and(|status| status.success()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{}: cannot be unmounted", self.folder.display());
    }
}

/// Makes an ext4 file system.
pub fn make_file_system(device: &Path) {
    let mut mke2fs = tool("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-E", "nodiscard"]).arg(device);
    run(&mut mke2fs);
}

/// Notes a number among the recorded writes.
pub fn mark(name: &str, number: u64) {
    run(tool("dmsetup").args(["message", name, "0", "mark", &number.to_string()]));
}

/// A record.
#[derive(Debug)]
struct Record {
    flags: u64,
    /// The first byte of the disk that was written.
    at: u64,
    /// The bytes that were written, as a range of the records; or the text of a mark.
    bytes: std::ops::Range<u64>,
}

/// The records of a disk, oldest first.
#[derive(Debug)]
pub struct Records {
    file: File,
    records: Vec<Record>,
}

/// A moment at which the power fails.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// It follows this record.
    after: usize,
    /// Whether all writes before it are durable, because they were flushed; otherwise some of those
    /// after the last flush are lost.
    pub is_flushed: bool,
    /// The newest mark before it.
    pub marked: u64,
}

impl Records {
    /// Reads the records in a file.
    pub fn read(path: &Path) -> Records {
        let mut file = File::open(path).unwrap();
        let head = read_at(&mut file, 0, 32);
        let word = |bytes: &[u8], at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!((word(&head, 0), word(&head, 8)), (MAGIC, 1), "the records' head");
        let (count, sector) = (word(&head, 16), word(&head, 24) & 0xffff_ffff);
        assert_eq!(sector, SECTOR as u64, "bytes of a sector");
        let (mut records, mut at) = (Vec::new(), sector);
        for _ in 0..count {
            let entry = read_at(&mut file, at, 32);
            let (first, sectors, flags, data) =
                (word(&entry, 0), word(&entry, 8), word(&entry, 16), word(&entry, 24));
            at += sector;
            let bytes = match flags {
                // The text of a mark follows its record in the same sector.
                _ if flags & MARK != 0 => at - sector + 32..at - sector + 32 + data,
                _ if flags & DISCARD != 0 => at..at,
                _ => at..at + sectors * sector,
            };
            at = if flags & MARK != 0 { at } else { bytes.end };
            records.push(Record { flags, at: first * sector, bytes });
        }
        Records { file, records }
    }

    /// The number that a mark notes; `None` for the kernel's own mark at the end.
    fn number(&mut self, record: usize) -> Option<u64> {
        let bytes = self.records[record].bytes.clone();
        let text = read_at(&mut self.file, bytes.start, (bytes.end - bytes.start) as usize);
        String::from_utf8_lossy(&text).parse().ok()
    }

    /// All flushes and marks after the mark 0.
    pub fn moments(&mut self) -> Vec<Moment> {
        let (mut moments, mut marked) = (Vec::new(), None);
        for after in 0..self.records.len() {
            let flags = self.records[after].flags;
            if flags & MARK != 0 {
                marked = self.number(after);
            }
            let Some(marked) = marked else { continue };
            if flags & (MARK | FLUSH) != 0 {
                moments.push(Moment { after, is_flushed: flags & FLUSH != 0, marked });
            }
        }
        moments
    }

    /// Writes what the disk had at a moment to a device. Before the moment it had lost the writes
    /// of the last `flushes_lost` flushes, which is what only a broken disk does.
    pub fn restore(
        &mut self,
        moment: Moment,
        flushes_lost: usize,
        bytes: u64,
        device: &Path,
        random: &mut Random,
    ) {
        let is_flush = |record: &Record| record.flags & FLUSH != 0;
        let before = &self.records[..=moment.after];
        let flushes = before.iter().enumerate().filter(|(_, record)| is_flush(record));
        let flushes: Vec<usize> = flushes.map(|(number, _)| number).collect();
        let kept = flushes.len().saturating_sub(flushes_lost);
        // What stands before this flush is durable.
        let flushed = kept.checked_sub(1).map_or(0, |last| flushes[last]);
        let end = if flushes_lost > 0 { flushed } else { moment.after + 1 };
        let mut image = vec![0; bytes as usize];
        for (number, record) in self.records[..end].iter().enumerate() {
            let is_durable = number < flushed || record.flags & FUA != 0;
            if record.flags & (MARK | DISCARD) != 0 || !is_durable && random.once_in(2) {
                continue;
            }
            let len = (record.bytes.end - record.bytes.start) as usize;
            let written = read_at(&mut self.file, record.bytes.start, len);
            image[record.at as usize..record.at as usize + len].copy_from_slice(&written);
        }
        let mut device = OpenOptions::new().write(true).open(device).unwrap();
        device.write_all(&image).unwrap();
        device.sync_all().unwrap();
    }
}

fn read_at(file: &mut File, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut bytes).unwrap();
    bytes
}
