//! Backups, checks and compactions of stores.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::path::PathBuf;

use vellum::{BackupOptions, BackupProgress, CheckReport, ControlSocket, Error, RestoreOptions};

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::raw::{path, strings};
use crate::store::{StoreHandle, only_flag};

/// `vellum_progress`.
type Tell = Option<extern "C" fn(argument: *mut c_void, done: u64, total: u64) -> c_int>;

/// `struct vellum_backup_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CBackupOptions {
    since: *const c_char,
    bytes_per_second: u64,
    progress: Tell,
    argument: *mut c_void,
    flags: u32,
    reserved: u32,
}

/// `struct vellum_check`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CCheck {
    pages_checked: u64,
    lost_pages: u64,
}

const FREE_LOST: u32 = 2048;
const REPLACE: u32 = 4096;
const UNCHECKED: u32 = 8192;
const READ_ALL: u32 = 16384;

const NONE: CBackupOptions = CBackupOptions {
    since: std::ptr::null(),
    bytes_per_second: 0,
    progress: None,
    argument: std::ptr::null_mut(),
    flags: 0,
    reserved: 0,
};

impl CBackupOptions {
    /// The caller's options. The function takes these flags.
    ///
    /// # Errors
    /// A reserved member that is not 0, and another flag.
    fn of(options: Option<&CBackupOptions>, flags: u32) -> Outcome<CBackupOptions> {
        let options = *options.unwrap_or(&NONE);
        if options.reserved != 0 {
            return Err(Failure::argument("a reserved member of the options is not 0"));
        }
        match options.flags & !flags {
            0 => Ok(options),
            _ => Err(Failure::argument("flags that this function does not take")),
        }
    }

    fn replaces(self) -> bool {
        self.flags & REPLACE != 0
    }

    fn checks(self) -> bool {
        self.flags & UNCHECKED == 0
    }

    fn tell(self, progress: BackupProgress) -> ControlFlow<()> {
        tell(self.progress, self.argument, progress.bytes_done, progress.bytes_total)
    }
}

/// Tells the caller's function, if there is one, how far a call is.
fn tell(progress: Tell, argument: *mut c_void, done: u64, total: u64) -> ControlFlow<()> {
    match progress.map_or(0, |tell| tell(argument, done, total)) {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_backup(
    store: Option<&StoreHandle>,
    name: *const c_char,
    options: Option<&CBackupOptions>,
) -> c_int {
    call(|| {
        let (store, name) = (&given(store, "the store")?.0, path(name, "the path")?);
        let given = CBackupOptions::of(options, REPLACE | UNCHECKED | READ_ALL)?;
        let mut options = BackupOptions::new().replace(given.replaces()).check(given.checks());
        if !given.since.is_null() {
            options = options.since(path(given.since, "the base")?);
        }
        let reads_all = given.flags & READ_ALL != 0;
        if reads_all && given.since.is_null() {
            return Err(Failure::argument("only an increment takes VELLUM_READ_ALL"));
        }
        options = options.read_all(reads_all);
        if given.bytes_per_second != 0 {
            options = options.bytes_per_second(given.bytes_per_second);
        }
        store.backup(name, &options, &mut |progress| given.tell(progress))?;
        Ok(())
    })
}

/// The names of a backup and its increments.
fn files(backups: *const *const c_char, count: usize) -> Outcome<(PathBuf, Vec<PathBuf>)> {
    let mut paths = Vec::new();
    for backup in strings(backups, count, "the backups")? {
        paths.push(PathBuf::from(path(*backup, "a backup")?));
    }
    match paths.is_empty() {
        false => Ok((paths.remove(0), paths)),
        true => Err(Failure::argument("there is no backup")),
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_repair_from(
    store: Option<&StoreHandle>,
    backups: *const *const c_char,
    count: usize,
    progress: Option<extern "C" fn(argument: *mut c_void, done: u64, total: u64) -> c_int>,
    argument: *mut c_void,
) -> c_int {
    call(|| {
        let (store, (full, increments)) = (&given(store, "the store")?.0, files(backups, count)?);
        store.repair_from(full, &increments, &mut |now| {
            tell(progress, argument, now.bytes_done, now.bytes_total)
        })?;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_restore(
    name: *const c_char,
    backups: *const *const c_char,
    count: usize,
    options: Option<&CBackupOptions>,
) -> c_int {
    call(|| {
        let name = path(name, "the path")?;
        let given = CBackupOptions::of(options, REPLACE | UNCHECKED)?;
        if !given.since.is_null() || given.bytes_per_second != 0 {
            return Err(Failure::argument("options that a restore does not take"));
        }
        let (full, increments) = files(backups, count)?;
        let options = RestoreOptions::new().replace(given.replaces()).check(given.checks());
        vellum::restore(name, full, &increments, &options, &mut |progress| given.tell(progress))?;
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_check(
    store: Option<&StoreHandle>,
    flags: u32,
    progress: Option<extern "C" fn(argument: *mut c_void, done: u64, total: u64) -> c_int>,
    argument: *mut c_void,
    result: Option<&mut MaybeUninit<CCheck>>,
) -> c_int {
    call(|| {
        let (out, store) = (OutParameter::new(result)?, &given(store, "the store")?.0);
        let frees = only_flag(flags, FREE_LOST)?;
        let tell = |done, total| tell(progress, argument, done, total);
        let report = match frees {
            true => store.free_lost_pages(&mut |now| tell(now.pages_done, now.pages_total))?,
            false => store.check_until(&mut |now| tell(now.pages_done, now.pages_total))?,
        };
        refuse_damage(&report)?;
        let CheckReport { pages_checked, lost_pages, .. } = report;
        out.set(CCheck { pages_checked, lost_pages });
        Ok(())
    })
}

fn refuse_damage(report: &CheckReport) -> Outcome {
    match &report.damage[..] {
        [] => Ok(()),
        [first, ..] => {
            let count = report.damage.len();
            let message = format!("the store is damaged in {count} places; the first: {first}");
            Err(Failure::new(vellum_morsel::Errno::BADMSG, message))
        }
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_compact(
    store: Option<&StoreHandle>,
    progress: Option<extern "C" fn(argument: *mut c_void, done: u64, total: u64) -> c_int>,
    argument: *mut c_void,
) -> c_int {
    call(|| {
        let store = &given(store, "the store")?.0;
        let report =
            store.compact(&mut |now| tell(progress, argument, now.pages_seen, now.pages_total))?;
        if report.is_complete { Ok(()) } else { Err(Error::Cancelled.into()) }
    })
}

/// `vellum_control_socket`. Dropping it ends the socket.
#[derive(Debug)]
pub struct ControlSocketHandle(#[expect(dead_code, reason = "it works by itself")] ControlSocket);

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_control_socket_open(
    store: Option<&StoreHandle>,
    name: *const c_char,
    result: Option<&mut MaybeUninit<Box<ControlSocketHandle>>>,
) -> c_int {
    call(|| {
        let (out, store) = (OutParameter::new(result)?, &given(store, "the store")?.0);
        let socket = store.control_socket(path(name, "the path")?)?;
        out.set(Box::new(ControlSocketHandle(socket)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_control_socket_close(socket: Option<Box<ControlSocketHandle>>) {
    call(|| {
        drop(socket);
        Ok(())
    });
}
