//! Stores, their trees, and readers and writers of values.
//!
//! A reader or writer owns a handle of its tree, so that C may free handles in any order. A lock
//! guards it, so that several threads may use it.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_char, c_int, c_void};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum::{Error, Options, OwnedValueReader, OwnedValueWriter, Store, Tree};
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given};
use crate::raw::{buffer, bytes, path, text};

/// `vellum_store`.
#[derive(Debug)]
pub struct StoreHandle(pub(crate) Store);

/// `vellum_tree`.
#[derive(Debug)]
pub struct TreeHandle(pub(crate) Tree);

/// `vellum_reader`.
#[derive(Debug)]
pub struct ReaderHandle(Mutex<OwnedValueReader>);

/// `vellum_writer`. None once it was finished.
#[derive(Debug)]
pub struct WriterHandle(Mutex<Option<OwnedValueWriter>>);

/// `struct vellum_store_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStoreOptions {
    pool_bytes: u64,
    flags: u32,
    reserved: u32,
}

const CREATE: u32 = 1;
const READ_ONLY: u32 = 2;
const NEW: u32 = 4;
// Not 8, which asked for a log: a program of that time would lose its log.
const NO_LOG: u32 = 1024;
const CREATE_WITHOUT_LOG: u32 = CREATE | NO_LOG;

/// Whether a flag is set. All other flags are errors.
pub(crate) fn only_flag(flags: u32, flag: u32) -> Outcome<bool> {
    match flags & !flag {
        0 => Ok(flags != 0),
        _ => Err(Failure::argument("flags that this function does not take")),
    }
}

/// Whether a key must not have a value yet.
pub(crate) fn is_new(flags: u32) -> Outcome<bool> {
    only_flag(flags, NEW)
}

pub(crate) fn no_key() -> Failure {
    Failure::new(Errno::NODATA, "the tree has no such key".into())
}

/// The store's error inside an error of a reader or writer.
pub(crate) fn of_stream(error: io::Error) -> Error {
    error.downcast().unwrap_or_else(Error::Input)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_open(
    name: *const c_char,
    options: Option<&CStoreOptions>,
    result: Option<&mut MaybeUninit<Box<StoreHandle>>>,
) -> c_int {
    call(|| {
        let (out, name) = (OutParameter::new(result)?, path(name, "the path")?);
        out.set(Box::new(StoreHandle(open(name, options)?)));
        Ok(())
    })
}

fn open(path: &Path, options: Option<&CStoreOptions>) -> Outcome<Store> {
    let none = CStoreOptions { pool_bytes: 0, flags: 0, reserved: 0 };
    let CStoreOptions { pool_bytes, flags, reserved } = *options.unwrap_or(&none);
    if reserved != 0 {
        return Err(Failure::argument("a reserved member of the options is not 0"));
    }
    let mut options = Options::new();
    if pool_bytes != 0 {
        options = options.pool_bytes(pool_bytes);
    }
    if flags & NO_LOG != 0 {
        options = options.log(false);
    }
    Ok(match flags {
        0 | NO_LOG => Store::open(path, &options)?,
        CREATE | CREATE_WITHOUT_LOG => Store::open_or_create(path, &options)?,
        READ_ONLY => Store::open(path, &options.read_only(true))?,
        _ => return Err(Failure::argument("flags that exclude each other, or do not exist")),
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_sync(store: Option<&StoreHandle>) -> c_int {
    call(|| Ok(given(store, "the store")?.0.sync()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_resize_pool(store: Option<&StoreHandle>, bytes: u64) -> c_int {
    call(|| Ok(given(store, "the store")?.0.resize_pool(bytes)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_store_close(store: Option<Box<StoreHandle>>) -> c_int {
    call(|| Ok(store.map_or(Ok(()), |store| store.0.close())?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_tree_open(
    store: Option<&StoreHandle>,
    name: *const c_char,
    flags: u32,
    result: Option<&mut MaybeUninit<Box<TreeHandle>>>,
) -> c_int {
    call(|| {
        let (out, store) = (OutParameter::new(result)?, given(store, "the store")?);
        let name = text(name, "the name")?;
        let tree = match only_flag(flags, CREATE)? {
            true => store.0.tree_or_create(name)?,
            false => store.0.tree(name)?,
        };
        out.set(Box::new(TreeHandle(tree)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_tree_close(tree: Option<Box<TreeHandle>>) {
    call(|| {
        drop(tree);
        Ok(())
    });
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_tree_put(
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
    flags: u32,
) -> c_int {
    call(|| {
        let Some(TreeHandle(tree)) = tree else { return given(None, "the tree") };
        let (key, value) = (bytes(key, key_length)?, bytes(value, value_length)?);
        let is_new = is_new(flags)?;
        let stored = match is_new {
            true => tree.insert(key, value),
            false => tree.upsert(key, value).map(drop),
        };
        if !matches!(stored, Err(Error::ValueTooLong { .. })) {
            return Ok(stored?);
        }
        let mut writer = tree.writer(key)?;
        writer.write_all(value).map_err(of_stream)?;
        match is_new {
            true => writer.finish_new()?,
            false => drop(writer.finish()?),
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_tree_remove(
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
) -> c_int {
    call(|| match given(tree, "the tree")?.0.remove(bytes(key, key_length)?)? {
        true => Ok(()),
        false => Err(no_key()),
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_reader_open(
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
    result: Option<&mut MaybeUninit<Box<ReaderHandle>>>,
) -> c_int {
    call(|| {
        let (out, tree) = (OutParameter::new(result)?, given(tree, "the tree")?.0.clone());
        let reader = tree.into_reader(bytes(key, key_length)?)?.ok_or_else(no_key)?;
        out.set(Box::new(ReaderHandle(Mutex::new(reader))));
        Ok(())
    })
}

impl ReaderHandle {
    /// A panic under the lock is a bug. Afterwards the handle always fails.
    fn lock(&self) -> MutexGuard<'_, OwnedValueReader> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fills the buffer, or reads to the end of the value. After an error the position has not changed.
fn fill(reader: &mut OwnedValueReader, buffer: &mut [u8]) -> io::Result<usize> {
    let (begin, mut filled) = (reader.stream_position()?, 0);
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) => {
                reader.seek(SeekFrom::Start(begin))?;
                return Err(error);
            }
        }
    }
    Ok(filled)
}

/// As [`fill`], from a given byte of the value.
fn fill_from(reader: &mut OwnedValueReader, from: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let begin = reader.stream_position()?;
    reader.seek(SeekFrom::Start(from))?;
    let filled = fill(reader, buffer);
    reader.seek(SeekFrom::Start(begin))?;
    filled
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_reader_length(reader: Option<&ReaderHandle>) -> u64 {
    reader.map_or(0, |reader| reader.lock().len())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_reader_read(
    reader: Option<&ReaderHandle>,
    target: *mut c_void,
    length: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    call(|| {
        let (out, reader) = (OutParameter::new(count)?, given(reader, "the reader")?);
        let target = buffer(target, length)?;
        out.set(fill(&mut reader.lock(), target).map_err(of_stream)?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_reader_read_at(
    reader: Option<&ReaderHandle>,
    offset: u64,
    target: *mut c_void,
    length: usize,
    count: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    call(|| {
        let (out, reader) = (OutParameter::new(count)?, given(reader, "the reader")?);
        let target = buffer(target, length)?;
        out.set(fill_from(&mut reader.lock(), offset, target).map_err(of_stream)?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_reader_close(reader: Option<Box<ReaderHandle>>) {
    call(|| {
        drop(reader);
        Ok(())
    });
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_writer_open(
    tree: Option<&TreeHandle>,
    key: *const c_void,
    key_length: usize,
    result: Option<&mut MaybeUninit<Box<WriterHandle>>>,
) -> c_int {
    call(|| {
        let (out, tree) = (OutParameter::new(result)?, given(tree, "the tree")?.0.clone());
        let writer = tree.into_writer(bytes(key, key_length)?)?;
        out.set(Box::new(WriterHandle(Mutex::new(Some(writer)))));
        Ok(())
    })
}

impl WriterHandle {
    fn lock(&self) -> MutexGuard<'_, Option<OwnedValueWriter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn finished() -> Failure {
    Failure::new(Errno::ALREADY, "the writer was finished: close it".into())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_writer_write(
    writer: Option<&WriterHandle>,
    begin: *const c_void,
    length: usize,
) -> c_int {
    call(|| {
        let (writer, bytes) = (given(writer, "the writer")?, bytes(begin, length)?);
        let mut writer = writer.lock();
        Ok(writer.as_mut().ok_or_else(finished)?.write_all(bytes).map_err(of_stream)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_writer_length(writer: Option<&WriterHandle>) -> u64 {
    writer.map_or(0, |writer| writer.lock().as_ref().map_or(0, OwnedValueWriter::len))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_writer_finish(writer: Option<&WriterHandle>, flags: u32) -> c_int {
    call(|| {
        let writer = given(writer, "the writer")?;
        let is_new = is_new(flags)?;
        let writer = writer.lock().take().ok_or_else(finished)?;
        match is_new {
            true => writer.finish_new()?,
            false => drop(writer.finish()?),
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_writer_close(writer: Option<Box<WriterHandle>>) {
    call(|| {
        drop(writer);
        Ok(())
    });
}
