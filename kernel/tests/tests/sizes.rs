//! The structures of commands may grow. Programs that know fewer or more fields than the module
//! still work.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::exmap::plan as pool;
use vellum_kernel_tests::morsel::plan as shape;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::{Errno, Exmap, Mapping, Morsel, PAGE, morsel_turn, turn};
use vellum_uapi::{exmap, morsel};

/// The command's number in a program whose structure has `size` bytes.
fn numbered(command: u32, size: usize) -> u32 {
    command & !(0x3fff << 16) | (size as u32) << 16
}

/// The argument that a program passes: its structure's size, and the fields that it knows.
struct Passed(Vec<u8>);

impl Passed {
    fn new(size: usize, fields: &[u8]) -> Self {
        let mut bytes = fields.to_vec();
        bytes.resize(size, 0);
        bytes[..4].copy_from_slice(&(size as u32).to_le_bytes());
        // The page after it is not writable.
        bytes.extend([0xee; 64]);
        Self(bytes)
    }

    /// The address, for a command of the program.
    fn address(&mut self) -> u64 {
        self.0.as_mut_ptr().expose_provenance() as u64
    }

    #[track_caller]
    fn answer(self) -> Vec<u8> {
        let (answer, beyond) = self.0.split_at(self.0.len() - 64);
        assert!(beyond == [0xee; 64], "an answer beyond the structure");
        answer.to_vec()
    }
}

type Call<'a> = &'a dyn Fn(u32, u64) -> Result<u64, Errno>;

/// A newer program's structure has a field that this module does not know.
#[track_caller]
fn assert_newer_works(call: Call<'_>, command: u32, known: usize, fields: &[u8]) {
    for size in [known + 4, known + 8, known + 100, PAGE] {
        let number = numbered(command, size);
        for at in [known, size - 1] {
            let mut passed = Passed::new(size, fields);
            passed.0[at] = 1;
            let address = passed.address();
            assert_eq!(call(number, address), Err(Errno::TOOBIG), "{size} bytes, one at {at}");
        }
    }
    let size = known + 8;
    let mut passed = Passed::new(size, fields);
    let address = passed.address();
    assert_eq!(call(numbered(command, size), address), Ok(0), "{size} bytes");
    assert_eq!(passed.answer()[known..], [0; 8], "what this module does not know");
}

/// Sizes below the first version, and above any future one.
#[track_caller]
fn assert_others_refused(call: Call<'_>, command: u32, first: usize) {
    for size in [0, 3, 4, first - 8, first - 1] {
        let mut passed = Passed::new(first, &[]);
        passed.0[..4].copy_from_slice(&(size as u32).to_le_bytes());
        let address = passed.address();
        assert_eq!(call(command, address), Err(Errno::INVAL), "{size} bytes");
    }
    // The memory exists and is zero, but the size is refused first.
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let (length, protection) = (1 << 32, sys::READ_WRITE);
    let request = Request { address: 0, length, protection, flags, fd: None, offset: 0 };
    let memory = Mapping::new(request).unwrap();
    for size in [PAGE as u32 + 1, 1 << 20, u32::MAX] {
        let stored = vellum_kernel_tests::access::kernel_store(memory.start(), &size.to_le_bytes());
        assert_eq!(stored, Ok(()));
        let answer = call(command, memory.start() as u64);
        assert_eq!(answer, Err(Errno::TOOBIG), "{size} bytes");
    }
}

#[test]
fn older_and_newer_programs_use_exmaps() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(16, 3, 0);
    let call = |command, argument| exmap.command(command, argument);
    assert_newer_works(&call, exmap::QUERY, size_of::<exmap::Query>(), &[]);
    assert_newer_works(&call, exmap::STAT, size_of::<exmap::Stat>(), &[]);
    assert_others_refused(&call, exmap::QUERY, 32);
    assert_others_refused(&call, exmap::STAT, 120);
    assert_others_refused(&call, exmap::CREATE, 32);
    assert_others_refused(&call, exmap::HARVEST, 40);
    assert_others_refused(&call, exmap::MOVE, 32);
    // The first version ended before the fields about blocks.
    let mut passed = Passed::new(120, &[]);
    let address = passed.address();
    assert_eq!(call(numbered(exmap::STAT, 120), address), Ok(0));
    let answer = passed.answer();
    assert_eq!(answer[4..16], [3, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0], "interfaces and frames");

    let create = pool(8, 1, 0);
    let mut fields = vec![0; 4];
    fields.extend(create.interfaces.to_le_bytes());
    fields.extend(create.flags.to_le_bytes());
    fields.extend(create.frames.to_le_bytes());
    fields.extend(create.backing.to_le_bytes());
    let other = Exmap::open();
    let call = |command, argument| other.command(command, argument);
    assert_newer_works(&call, exmap::CREATE, size_of::<exmap::Create>(), &fields);
    assert_eq!(other.stat().unwrap().frames, 8);
}

#[test]
fn older_and_newer_programs_use_morsels() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::nameless();
    let call = |command, argument| morsel.command(command, argument);
    assert_newer_works(&call, morsel::QUERY, size_of::<morsel::Query>(), &[]);
    assert_newer_works(&call, morsel::STAT, size_of::<morsel::Stat>(), &[]);
    assert_others_refused(&call, morsel::QUERY, 32);
    assert_others_refused(&call, morsel::CREATE, 32);
    assert_others_refused(&call, morsel::FILL, 40);
    assert_others_refused(&call, morsel::STAT, 72);
    let create = shape(1, 5000, 0);
    let mut fields = vec![0; 4];
    fields.extend(create.order.to_le_bytes());
    fields.extend(create.length.to_le_bytes());
    assert_newer_works(&call, morsel::CREATE, size_of::<morsel::Create>(), &fields);
    assert_eq!(morsel.stat().length, 5000);
}
