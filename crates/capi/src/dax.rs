//! Files on byte-addressable storage: their mappings, heaps of ephemeral ones, pools of zeroed
//! files.
#![allow(unsafe_code)] // exported names

use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use self_cell::self_cell;
use vellum_dax::{
    Access, Backend, BackendChoice, DaxFile, Durability, Ephemeral, Heap, HeapOptions, Mapping,
    Options, ZeroPool,
};
use vellum_morsel::Errno;

use crate::call::{Failure, OutParameter, Outcome, call, given, vellum_last_error};
use crate::raw::{bytes, duplicate, path};

/// `vellum_dax`.
#[derive(Debug)]
pub struct DaxHandle(DaxFile);

/// `vellum_dax_mapping`.
#[derive(Debug)]
pub struct DaxMappingHandle(Mapping);

/// `vellum_dax_heap`.
#[derive(Debug)]
pub struct HeapHandle(Arc<Heap>);

self_cell!(
    struct InHeap {
        owner: Arc<Heap>,
        #[covariant]
        dependent: Ephemeral,
    }

    impl {Debug}
);

/// `vellum_dax_ephemeral`.
#[derive(Debug)]
pub struct EphemeralHandle(InHeap);

/// `vellum_dax_pool`.
#[derive(Debug)]
pub struct PoolHandle(ZeroPool);

/// `struct vellum_dax_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CDaxOptions {
    backend: u32,
    durability: u32,
}

/// `struct vellum_dax_stat`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CDaxStat {
    pages: u64,
    present: u64,
    table_bytes: u64,
    mappings: u64,
    served_by_file: u64,
    ephemeral: u64,
    is_stale: u32,
    reserved: u32,
}

const AUTO: u32 = 0;
const TABLE: u32 = 1;
const MMAP: u32 = 2;

const WRITE: u32 = 1;
const CREATE: u32 = 2;

fn backend(number: u32) -> Outcome<BackendChoice> {
    match number {
        AUTO => Ok(BackendChoice::Auto),
        TABLE => Ok(BackendChoice::Only(Backend::Table)),
        MMAP => Ok(BackendChoice::Only(Backend::Mmap)),
        _ => Err(Failure::argument("a backend that does not exist")),
    }
}

fn number_of(backend: Backend) -> u32 {
    match backend {
        Backend::Table => TABLE,
        Backend::Mmap => MMAP,
    }
}

fn access(number: u32) -> Outcome<Access> {
    match number {
        0 => Ok(Access::Read),
        1 => Ok(Access::ReadWrite),
        _ => Err(Failure::argument("an access that does not exist")),
    }
}

fn options(given: Option<&CDaxOptions>) -> Outcome<Options> {
    let Some(options) = given else { return Ok(Options::default()) };
    let durability = match options.durability {
        0 => Durability::Synced,
        1 => Durability::Flushed,
        _ => return Err(Failure::argument("a durability that does not exist")),
    };
    Ok(Options { backend: backend(options.backend)?, durability })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_last_error() -> *const c_char {
    vellum_last_error()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_open(
    name: *const c_char,
    flags: u32,
    given_options: Option<&CDaxOptions>,
    result: Option<&mut MaybeUninit<Box<DaxHandle>>>,
) -> c_int {
    call(|| {
        let (out, name) = (OutParameter::new(result)?, path(name, "the path")?);
        let options = options(given_options)?;
        let file = match flags {
            0 => DaxFile::open(name, &options),
            WRITE => DaxFile::open_to_write(name, &options),
            flags if flags == WRITE | CREATE => DaxFile::create(name, &options),
            _ => return Err(Failure::argument("flags that do not exist, or CREATE alone")),
        };
        out.set(Box::new(DaxHandle(file?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_from_fd(
    fd: c_int,
    given_options: Option<&CDaxOptions>,
    result: Option<&mut MaybeUninit<Box<DaxHandle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let file = DaxFile::from_file(File::from(duplicate(fd)?), &options(given_options)?)?;
        out.set(Box::new(DaxHandle(file)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_close(file: Option<Box<DaxHandle>>) {
    drop(file);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_backend(file: Option<&DaxHandle>) -> u32 {
    file.map_or(0, |file| number_of(file.0.backend()))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_why_no_table(file: Option<&DaxHandle>) -> c_int {
    call(|| match given(file, "the file")?.0.why_no_table() {
        None => Ok(()),
        Some(why) => Err(Failure::new(Errno::OPNOTSUPP, why.to_owned())),
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_length(
    file: Option<&DaxHandle>,
    result: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call(|| {
        let (out, file) = (OutParameter::new(result)?, given(file, "the file")?);
        out.set(file.0.length()?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_append(
    file: Option<&DaxHandle>,
    begin: *const c_void,
    length: usize,
    offset: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call(|| {
        let start = given(file, "the file")?.0.append(bytes(begin, length)?)?;
        if let Some(offset) = offset {
            offset.write(start);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_extend(file: Option<&DaxHandle>, length: u64) -> c_int {
    call(|| Ok(given(file, "the file")?.0.extend(length)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_refresh(file: Option<&DaxHandle>) -> c_int {
    call(|| Ok(given(file, "the file")?.0.refresh()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_sync(file: Option<&DaxHandle>) -> c_int {
    call(|| Ok(given(file, "the file")?.0.sync()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_get_stat(
    file: Option<&DaxHandle>,
    result: Option<&mut MaybeUninit<CDaxStat>>,
) -> c_int {
    call(|| {
        let (out, file) = (OutParameter::new(result)?, given(file, "the file")?);
        let Some(stat) = file.0.stat()? else {
            let why = file.0.why_no_table().unwrap_or_default();
            return Err(Failure::new(Errno::OPNOTSUPP, format!("there is no table: {why}")));
        };
        out.set(CDaxStat {
            pages: stat.pages,
            present: stat.present,
            table_bytes: stat.table_bytes,
            mappings: stat.mappings,
            served_by_file: stat.served_by_file,
            ephemeral: stat.ephemeral,
            is_stale: stat.is_stale.into(),
            reserved: 0,
        });
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_map(
    file: Option<&DaxHandle>,
    access_number: u32,
    result: Option<&mut MaybeUninit<Box<DaxMappingHandle>>>,
) -> c_int {
    call(|| {
        let (out, file) = (OutParameter::new(result)?, given(file, "the file")?);
        out.set(Box::new(DaxMappingHandle(file.0.map(access(access_number)?)?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_unmap(mapping: Option<Box<DaxMappingHandle>>) {
    drop(mapping);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_mapping_base(mapping: Option<&DaxMappingHandle>) -> *mut c_void {
    mapping.map_or(ptr::null_mut(), |mapping| mapping.0.base().as_ptr().cast())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_mapping_length(
    mapping: Option<&DaxMappingHandle>,
    result: Option<&mut MaybeUninit<u64>>,
) -> c_int {
    call(|| {
        let (out, mapping) = (OutParameter::new(result)?, given(mapping, "the mapping")?);
        out.set(mapping.0.length()?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_write_durably(
    mapping: Option<&DaxMappingHandle>,
    offset: u64,
    begin: *const c_void,
    length: usize,
) -> c_int {
    call(|| {
        let mapping = given(mapping, "the mapping")?;
        Ok(mapping.0.write_durably(offset, bytes(begin, length)?)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_persist(
    mapping: Option<&DaxMappingHandle>,
    offset: u64,
    length: usize,
) -> c_int {
    call(|| Ok(given(mapping, "the mapping")?.0.persist(offset, length)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_heap_open(
    backend_number: u32,
    access_number: u32,
    capacity: u64,
    batch: u32,
    result: Option<&mut MaybeUninit<Box<HeapHandle>>>,
) -> c_int {
    call(|| {
        let out = OutParameter::new(result)?;
        let mut options = HeapOptions::new(access(access_number)?);
        options.backend = backend(backend_number)?;
        if capacity != 0 {
            options.capacity = capacity;
        }
        options.batch = (batch != 0).then_some(batch);
        out.set(Box::new(HeapHandle(Arc::new(Heap::new(&options)?))));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_heap_close(heap: Option<Box<HeapHandle>>) {
    drop(heap);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_heap_backend(heap: Option<&HeapHandle>) -> u32 {
    heap.map_or(0, |heap| number_of(heap.0.backend()))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_heap_flush(heap: Option<&HeapHandle>) -> c_int {
    call(|| Ok(given(heap, "the heap")?.0.flush()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_heap_map(
    heap: Option<&HeapHandle>,
    fd: c_int,
    result: Option<&mut MaybeUninit<Box<EphemeralHandle>>>,
) -> c_int {
    call(|| {
        let (out, heap, file) =
            (OutParameter::new(result)?, given(heap, "the heap")?, duplicate(fd)?);
        let mapped = InHeap::try_new(Arc::clone(&heap.0), |heap| heap.map(&file))?;
        out.set(Box::new(EphemeralHandle(mapped)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_heap_map_range(
    heap: Option<&HeapHandle>,
    fd: c_int,
    offset: u64,
    length: u64,
    result: Option<&mut MaybeUninit<Box<EphemeralHandle>>>,
) -> c_int {
    call(|| {
        let (out, heap, file) =
            (OutParameter::new(result)?, given(heap, "the heap")?, duplicate(fd)?);
        let mapped =
            InHeap::try_new(Arc::clone(&heap.0), |heap| heap.map_range(&file, offset, length))?;
        out.set(Box::new(EphemeralHandle(mapped)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_ephemeral_unmap(ephemeral: Option<Box<EphemeralHandle>>) {
    drop(ephemeral);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_ephemeral_base(ephemeral: Option<&EphemeralHandle>) -> *mut c_void {
    let base = |mapped: &EphemeralHandle| mapped.0.borrow_dependent().base().as_ptr().cast();
    ephemeral.map_or(ptr::null_mut(), base)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_ephemeral_length(ephemeral: Option<&EphemeralHandle>) -> usize {
    ephemeral.map_or(0, |mapped| mapped.0.borrow_dependent().length())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_ephemeral_sync(ephemeral: Option<&EphemeralHandle>) -> c_int {
    call(|| Ok(given(ephemeral, "the mapping")?.0.borrow_dependent().sync()?))
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_pool_open(
    folder: *const c_char,
    result: Option<&mut MaybeUninit<Box<PoolHandle>>>,
) -> c_int {
    call(|| {
        let (out, folder) = (OutParameter::new(result)?, path(folder, "the folder")?);
        out.set(Box::new(PoolHandle(ZeroPool::open(folder)?)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_pool_close(pool: Option<Box<PoolHandle>>) {
    drop(pool);
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_pool_create(
    pool: Option<&PoolHandle>,
    name: *const c_char,
    length: u64,
    given_options: Option<&CDaxOptions>,
    result: Option<&mut MaybeUninit<Box<DaxHandle>>>,
) -> c_int {
    call(|| {
        let (out, pool) = (OutParameter::new(result)?, given(pool, "the pool")?);
        let file = pool.0.create(path(name, "the path")?, length, &options(given_options)?)?;
        out.set(Box::new(DaxHandle(file)));
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_dax_pool_replace(
    pool: Option<&PoolHandle>,
    name: *const c_char,
    length: u64,
    given_options: Option<&CDaxOptions>,
    result: Option<&mut MaybeUninit<Box<DaxHandle>>>,
) -> c_int {
    call(|| {
        let (out, pool) = (OutParameter::new(result)?, given(pool, "the pool")?);
        let file = pool.0.replace(path(name, "the path")?, length, &options(given_options)?)?;
        out.set(Box::new(DaxHandle(file)));
        Ok(())
    })
}
