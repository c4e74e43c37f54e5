//! A disk that outlives its machines, and that loses what was not flushed when one is killed.
//!
//! No cache mode of the emulator loses anything then: with all of them a write that has ended is in
//! the host's page cache at least, which outlives the emulator. So the lab is the disk itself. It
//! answers the emulator by the NBD protocol, and keeps the old contents of all sectors that were
//! written since the last flush. When the machine is dead, each such sector gets any of the
//! contents that it had since then. A seed decides which.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process;
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result, anyhow};
use vellum_testing::random::Random;

/// What the disk writes as a whole.
const SECTOR: usize = 512;

/// The most bytes of a request.
const MOST: u32 = 32 << 20;

/// The contents of a disk, which may outlive several machines.
#[derive(Debug)]
pub struct Disk {
    file: File,
    bytes: u64,
    /// It says that it has flushed, and has not.
    lies: bool,
    /// For each sector that was written since the last flush: what it had before, and what it got,
    /// each with the number of the write.
    unflushed: BTreeMap<u64, Vec<(u64, [u8; SECTOR])>>,
    writes: u64,
}

/// What is lost in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    /// Nothing: only the machine has died.
    Nothing,
    /// All that was not flushed.
    All,
    /// Some of the writes, each as a whole.
    Writes,
    /// Some of the sectors, so that writes are torn, too.
    Sectors,
}

impl Disk {
    /// An empty disk, in a new file.
    ///
    /// # Errors
    /// If the file cannot be made.
    pub fn new(path: &Path, bytes: u64, lies: bool) -> Result<Disk> {
        let file = File::options().read(true).write(true).create_new(true).open(path);
        let file = file.with_context(|| format!("creating {}", path.display()))?;
        file.set_len(bytes)?;
        Ok(Disk { file, bytes, lies, unflushed: BTreeMap::new(), writes: 0 })
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.writes += 1;
        let mut old = vec![0; bytes.len()];
        self.file.read_exact_at(&mut old, at)?;
        let (old, new) = (old.as_chunks::<SECTOR>().0, bytes.as_chunks::<SECTOR>().0);
        for (sector, (old, new)) in (at / SECTOR as u64..).zip(old.iter().zip(new)) {
            let contents = self.unflushed.entry(sector).or_insert_with(|| vec![(0, *old)]);
            contents.push((self.writes, *new));
        }
        self.file.write_all_at(bytes, at)
    }

    /// What was written to these sectors is durable; what was written to others may not be.
    fn force(&mut self, at: u64, len: u64) {
        let sectors = at / SECTOR as u64..(at + len) / SECTOR as u64;
        self.unflushed.retain(|sector, _| self.lies || !sectors.contains(sector));
    }

    /// All that was written before is durable.
    fn flush(&mut self) {
        if !self.lies {
            self.unflushed.clear();
        }
    }

    /// The machine is off, and was not killed: a disk that loses power later has all.
    pub fn settle(&mut self) {
        self.unflushed.clear();
    }

    /// The power has failed. Returns how many sectors were not flushed, and how many of these have
    /// not what was written last.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn crash(&mut self, seed: u64) -> Result<(usize, usize)> {
        let mut random = Random(seed);
        let loss = match random.below(4) {
            0 => Loss::Nothing,
            1 => Loss::All,
            2 => Loss::Writes,
            _ => Loss::Sectors,
        };
        let unflushed = std::mem::take(&mut self.unflushed);
        let (sectors, mut lost) = (unflushed.len(), 0);
        for (sector, contents) in unflushed {
            let last = contents.len() - 1;
            let kept = match loss {
                Loss::Nothing => last,
                Loss::All => 0,
                Loss::Writes => {
                    let is_kept = |write: u64| Random(seed ^ write << 8).once_in(2);
                    contents.iter().rposition(|(write, _)| is_kept(*write)).unwrap_or(0)
                }
                Loss::Sectors => random.index(contents.len()),
            };
            if kept < last {
                lost += 1;
                self.file.write_all_at(&contents[kept].1, sector * SECTOR as u64)?;
            }
        }
        Ok((sectors, lost))
    }
}

/// The name of the disk's socket, which is in no file system: a path may be too long for a socket.
/// A lab runs one machine at a time.
pub fn socket() -> String {
    format!("vellum-lab-disk-{}", process::id())
}

/// A disk that a machine uses.
#[derive(Debug)]
pub struct Served {
    thread: JoinHandle<(Disk, io::Result<()>)>,
}

impl Served {
    /// Waits for the emulator in a thread of its own.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(mut disk: Disk) -> Result<Served> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(socket())?)?;
        let thread = thread::spawn(move || {
            let served = listener.accept().and_then(|(stream, _)| serve(&mut disk, stream));
            (disk, served)
        });
        Ok(Served { thread })
    }

    /// Takes the disk back from a machine that is off.
    ///
    /// # Errors
    /// If the emulator asked for what a disk cannot do.
    pub fn end(self) -> Result<Disk> {
        // The machine may never have come.
        drop(UnixStream::connect_addr(&SocketAddr::from_abstract_name(socket())?));
        let (disk, served) = self.thread.join().map_err(|_| anyhow!("the disk panicked"))?;
        match served {
            // It was killed in the midst of a request.
            Err(error) if is_end(&error) => Ok(disk),
            served => served.map(|()| disk).context("the disk"),
        }
    }
}

/// Whether the other end is gone.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Numbers of the protocol: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.
mod nbd {
    pub const MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
    pub const OPTION: u64 = u64::from_be_bytes(*b"IHAVEOPT");
    pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
    pub const REQUEST: u32 = 0x2560_9513;
    pub const REPLY: u32 = 0x6744_6698;
    /// Of the server: the newer handshake, without zeros.
    pub const SERVER: u16 = 0b11;
    /// Of the disk: it has these flags, flushes, and forced unit access.
    pub const DISK: u16 = 0b1101;
    pub const ABORT: u32 = 2;
    pub const GO: u32 = 7;
    pub const ACKNOWLEDGE: u32 = 1;
    pub const INFORMATION: u32 = 3;
    pub const UNSUPPORTED: u32 = (1 << 31) + 1;
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const FORCED: u16 = 1;
    pub const INVALID: u32 = 22;
}

/// Answers an emulator until it is gone.
fn serve(disk: &mut Disk, stream: UnixStream) -> io::Result<()> {
    let mut input = BufReader::with_capacity(1 << 16, stream.try_clone()?);
    let mut output = stream;
    if !greet(disk, &mut input, &mut output)? {
        return Ok(());
    }
    let mut bytes = Vec::new();
    loop {
        let request: [u8; 28] = take(&mut input)?;
        let word = |at: usize| u64::from_be_bytes(request[at..at + 8].try_into().unwrap_or([0; 8]));
        let (magic, flags, kind) = (word(0) >> 32, (word(0) >> 16) as u16, word(0) as u16);
        let (cookie, at, len) = (word(8), word(16), word(20) as u32);
        if magic != u64::from(nbd::REQUEST) || len > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        bytes.resize(len as usize, 0);
        if kind == nbd::WRITE {
            input.read_exact(&mut bytes)?;
        }
        let is_whole = (at | u64::from(len)).is_multiple_of(SECTOR as u64);
        let fits = is_whole && at.checked_add(len.into()).is_some_and(|end| end <= disk.bytes);
        let mut error = 0;
        match kind {
            nbd::DISCONNECT => return Ok(()),
            nbd::FLUSH => disk.flush(),
            nbd::READ if fits => disk.file.read_exact_at(&mut bytes, at)?,
            nbd::WRITE if fits => {
                disk.write(at, &bytes)?;
                if flags & nbd::FORCED != 0 {
                    disk.force(at, len.into());
                }
            }
            _ => error = nbd::INVALID,
        }
        let mut reply = [&nbd::REPLY.to_be_bytes()[..], &u32::to_be_bytes(error)].concat();
        reply.extend(cookie.to_be_bytes());
        if kind == nbd::READ && error == 0 {
            reply.extend(&bytes);
        }
        output.write_all(&reply)?;
    }
}

/// Agrees with an emulator on the disk; false if it wants none.
fn greet(disk: &Disk, input: &mut impl Read, output: &mut impl Write) -> io::Result<bool> {
    let greeting = [&nbd::MAGIC.to_be_bytes()[..], &nbd::OPTION.to_be_bytes()].concat();
    output.write_all(&[&greeting[..], &nbd::SERVER.to_be_bytes()].concat())?;
    let _flags: [u8; 4] = take(input)?;
    loop {
        let magic: [u8; 8] = take(input)?;
        let (option, len): ([u8; 4], [u8; 4]) = (take(input)?, take(input)?);
        let len = u32::from_be_bytes(len);
        if magic != nbd::OPTION.to_be_bytes() || len > MOST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        input.read_exact(&mut vec![0; len as usize])?;
        let mut answer = |kind: u32, data: &[u8]| {
            let mut reply = nbd::OPTION_REPLY.to_be_bytes().to_vec();
            reply.extend(option);
            reply.extend(kind.to_be_bytes());
            reply.extend((data.len() as u32).to_be_bytes());
            reply.extend(data);
            output.write_all(&reply)
        };
        match u32::from_be_bytes(option) {
            nbd::GO => {
                // The kind of this information is 0.
                let about = [&[0; 2][..], &disk.bytes.to_be_bytes(), &nbd::DISK.to_be_bytes()];
                answer(nbd::INFORMATION, &about.concat())?;
                answer(nbd::ACKNOWLEDGE, &[])?;
                return Ok(true);
            }
            nbd::ABORT => {
                answer(nbd::ACKNOWLEDGE, &[])?;
                return Ok(false);
            }
            _ => answer(nbd::UNSUPPORTED, &[])?,
        }
    }
}

fn take<const BYTES: usize>(input: &mut impl Read) -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 64 << 10;

    fn disk(lies: bool) -> (tempfile::TempDir, Disk) {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::new(&folder.path().join("disk"), BYTES, lies).unwrap();
        (folder, disk)
    }

    /// What two sectors have after two writes to both, the second one of which was not flushed.
    fn after(seed: u64, lies: bool) -> [u8; 2] {
        let (_folder, mut disk) = disk(lies);
        disk.write(1024, &[1; 2 * SECTOR]).unwrap();
        disk.flush();
        disk.write(1024, &[2; 2 * SECTOR]).unwrap();
        disk.crash(seed).unwrap();
        let mut found = [0; 2 * SECTOR];
        disk.file.read_exact_at(&mut found, 1024).unwrap();
        assert!(found.chunks(SECTOR).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
        [found[0], found[SECTOR]]
    }

    #[test]
    fn a_crash_loses_what_was_not_flushed_and_nothing_else() {
        let found: std::collections::BTreeSet<_> =
            (0..100).map(|seed| after(seed, false)).collect();
        assert_eq!(Vec::from_iter(found), [[1, 1], [1, 2], [2, 1], [2, 2]]);
        assert!((0..100).any(|seed| after(seed, true).contains(&0)), "a disk that lies");
        assert_eq!(after(7, false), after(7, false));
    }

    /// `tests/host.rs` relies on this seed.
    #[test]
    fn a_seed_takes_all_that_was_not_flushed() {
        assert_eq!(after(1, false), [1, 1]);
        assert_eq!(after(1, true), [0, 0]);
    }

    #[test]
    fn a_disk_that_settles_loses_nothing() {
        let (_folder, mut disk) = disk(true);
        disk.write(0, &[1; SECTOR]).unwrap();
        disk.settle();
        assert_eq!(disk.crash(1).unwrap(), (0, 0));
    }

    #[test]
    fn an_emulator_is_answered() {
        let (_folder, mut disk) = disk(false);
        let (theirs, mut ours) = UnixStream::pair().unwrap();
        let served = thread::spawn(move || (serve(&mut disk, theirs), disk));
        let [magic, option]: [[u8; 8]; 2] = [take(&mut ours).unwrap(), take(&mut ours).unwrap()];
        assert_eq!((&magic, &option), (b"NBDMAGIC", b"IHAVEOPT"));
        assert_eq!(take(&mut ours).unwrap(), [0, 3]);
        ours.write_all(&[0, 0, 0, 3]).unwrap();
        let mut ask = |option: u32| {
            let option = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &[0; 4]].concat();
            ours.write_all(&option).unwrap();
            let _head: [u8; 12] = take(&mut ours).unwrap();
            let kind = u32::from_be_bytes(take(&mut ours).unwrap());
            let len = u32::from_be_bytes(take(&mut ours).unwrap());
            let mut data = vec![0; len as usize];
            ours.read_exact(&mut data).unwrap();
            (kind, data)
        };
        assert_eq!(ask(8), (nbd::UNSUPPORTED, vec![]));
        let about = [&[0; 2][..], &BYTES.to_be_bytes(), &[0, 13]].concat();
        assert_eq!(ask(nbd::GO), (nbd::INFORMATION, about));
        let _acknowledged: [u8; 20] = take(&mut ours).unwrap();
        let mut ask = |kind: u16, at: u64, len: u32, data: &[u8], answered: usize| {
            let head = [&nbd::REQUEST.to_be_bytes()[..], &[0; 2], &kind.to_be_bytes()].concat();
            let request = [&head[..], &[7; 8], &at.to_be_bytes(), &len.to_be_bytes(), data];
            ours.write_all(&request.concat()).unwrap();
            let reply: [u8; 16] = take(&mut ours).unwrap();
            assert_eq!((&reply[..4], &reply[8..]), (&nbd::REPLY.to_be_bytes()[..], &[7; 8][..]));
            let mut data = vec![0; answered];
            ours.read_exact(&mut data).unwrap();
            (reply[7], data)
        };
        assert_eq!(ask(nbd::WRITE, 512, 512, &[5; 512], 0), (0, vec![]));
        assert_eq!(ask(nbd::READ, 512, 512, &[], 512), (0, vec![5; 512]));
        assert_eq!(ask(nbd::WRITE, BYTES, 512, &[5; 512], 0).0, 22, "beyond the end");
        assert_eq!(ask(nbd::FLUSH, 0, 0, &[], 0).0, 0);
        assert_eq!(ask(nbd::WRITE, 0, 512, &[6; 512], 0).0, 0);
        let forced = [&nbd::REQUEST.to_be_bytes()[..], &[0, 1, 0, 1], &[7; 8]].concat();
        let forced = [&forced[..], &512u64.to_be_bytes(), &512u32.to_be_bytes(), &[6; 512]];
        ours.write_all(&forced.concat()).unwrap();
        let _forced: [u8; 16] = take(&mut ours).unwrap();
        drop(ours);
        let (end, disk) = served.join().unwrap();
        assert!(is_end(&end.unwrap_err()));
        assert_eq!(Vec::from_iter(disk.unflushed.keys()), [&0]);
    }
}
