//! Maps memory of a Morsel, or of a cache of the process' own, instead of a file's.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, readlink};
use vellum_interpose::{Request, Rules};
use vellum_morsel::{BackendKind, Client, Morsel};

use crate::cached;
use crate::mounts;
use crate::system;

thread_local! {
    /// Whether this thread is in this module: its calls from here go straight to the kernel.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Maps a Morsel instead of the file; `None` if the rules do not take the file or the attempt
/// fails.
pub(crate) fn substitute(request: &Request, address: usize) -> Option<usize> {
    // A thread that is ending has lost this variable.
    if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
        return None;
    }
    // SAFETY: the place of this thread's error number, which the caller expects to be unchanged.
    let errno = unsafe { *libc::__errno_location() };
    // A thread that is to be cancelled must not unwind from here.
    let cancelling = system::set_cancelling(system::NOT_CANCELLED);
    let mapped = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the descriptor belongs to the caller, and is open during the call. If no
        // descriptor has this number, the calls on it fail.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(request.file) });
        match substitute_for(&file, request)? {
            Substitute::Cache => cached::map(request),
            Substitute::Morsel => map_morsel(&file, request, address),
        }
    }));
    system::set_cancelling(cancelling);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    let _ = INSIDE.try_with(|inside| inside.set(false));
    mapped.ok().flatten()
}

/// What is mapped instead of a file.
enum Substitute {
    Cache,
    Morsel,
}

/// The rules for each substitute.
struct AllRules {
    cache: Rules,
    morsel: Rules,
}

/// Empty if the environment asks for nothing.
static RULES: OnceLock<AllRules> = OnceLock::new();

/// Reads the rules, before there are threads: in a child of a fork a thread of its parent may read
/// them for ever.
pub(crate) fn read_rules() {
    let [cache, morsel] = [Rules::OF_CACHES, Rules::OF_MORSELS].map(Rules::of_environment);
    let _ = RULES.set(AllRules { cache, morsel });
}

/// What is mapped instead of a file; `None` if the file itself is to be mapped.
fn substitute_for(file: &File, request: &Request) -> Option<Substitute> {
    let rules = RULES.get()?;
    if rules.cache.are_none() && rules.morsel.are_none() {
        return None;
    }
    let stat = fstat(file).ok()?;
    let length = u64::try_from(stat.st_size).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
        || !request.begins_within(length)
    {
        return None;
    }
    let substitute = if rules.cache.take(length, || path(file)) {
        Substitute::Cache
    } else if rules.morsel.take(length, || path(file)) {
        Substitute::Morsel
    } else {
        return None;
    };
    // The program itself may write to the file, or make a shared mapping writable later.
    (fcntl_getfl(file).ok()? & OFlags::RWMODE == OFlags::RDONLY).then_some(substitute)
}

/// Maps the daemon's Morsel of a file.
fn map_morsel(file: &File, request: &Request, address: usize) -> Option<usize> {
    let morsel = Client::usual().load_at_rest(file, |_| {}).ok()?.morsel;
    if morsel.length() != u64::try_from(fstat(file).ok()?.st_size).ok()? {
        return None;
    }
    match morsel.backend() {
        BackendKind::Kernel => mount(&morsel, request),
        _ => {
            let instead = Request { file: morsel.as_fd().as_raw_fd(), ..*request };
            // SAFETY: without MAP_FIXED, which the request does not have, nothing is replaced.
            unsafe { system::map(address, &instead) }
        }
    }
}

/// The file's path, as the kernel knows it.
fn path(file: &File) -> Option<Vec<u8>> {
    let place = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    readlink(place, Vec::new()).ok().map(std::ffi::CString::into_bytes)
}

/// Maps all of a Morsel of the module, of which the program gets the part that it has asked for.
fn mount(morsel: &Morsel, request: &Request) -> Option<usize> {
    // A child has its parent's mappings, as of a file.
    if !morsel.shape().is_inherited() {
        return None;
    }
    let extent = usize::try_from(morsel.shape().extent()).ok()?;
    let offsets = request.pages_within(extent)?;
    let whole = Request {
        length: extent,
        rights: libc::PROT_READ,
        flags: libc::MAP_SHARED,
        file: morsel.as_fd().as_raw_fd(),
        offset: 0,
    };
    // SAFETY: nothing is replaced.
    let base = unsafe { system::map(0, &whole) }?;
    let (start, end) = (base + offsets.start, base + offsets.end);
    let mount = base..base + extent;
    if mounts::add(start..end, &mount, 0, &Request { offset: 0, ..*request }) {
        return Some(start);
    }
    // SAFETY: it was mapped above, and no other code knows it.
    unsafe { system::unmap(&mount) };
    None
}
