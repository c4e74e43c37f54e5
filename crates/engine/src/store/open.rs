//! Creates and opens a store: finds the valid header, refuses invalid files, and reads the free
//! map.

use std::path::Path;
use std::sync::Arc;

use vellum_pool::device::{Device, FileDevice, FileOptions, SyncMemory, UnpublishedFile, Write};
use vellum_pool::{PAGE_SIZE, PageRef, Pool, PoolError, RawPages, Space};

use crate::error::{Error, Result};
use crate::node::{Fences, NodeMut};
use crate::page::format::{StoreFormat, scratch_pool};
use crate::page::{self, PageKind};
use crate::redo::log::OpenLog;
use crate::redo::recover::InMemory;
use crate::store::changes::{ChangeTracker, ChangesSince, TrackedDevice};
use crate::store::core::StoreCore;
use crate::store::file::StoreFile;
use crate::store::free_map::{self, FileMap};
use crate::store::header::{
    AlignedPage, FORMAT_VERSION, FORMAT_VERSION_NEWEST, HEADER_PAGES, Header, HeaderPage,
    LISTED_FRAMES_MAX, LogPoint,
};
use crate::store::open_log::{LogPlace, RecoveryOutcome, begin_log, recover, resume_log};
use crate::store::options::{Options, PAGE_FRAMES_MAX, min_pool_frames};
use crate::store::orphans::Orphans;
use crate::tree::CATALOG;

/// Opens the file as a device.
fn open_file(path: &Path, options: &Options) -> Result<Arc<dyn Device>> {
    Ok(Arc::new(FileDevice::open(path, file_options(options))?))
}

/// Creates a store in a new file. The file gets its name when the store is complete and durable. It
/// replaces an empty file of this name.
pub(crate) fn create_file(path: &Path, options: &Options) -> Result<StoreCore> {
    if options.is_read_only() {
        return Err(Error::ReadOnly);
    }
    let (device, file) = UnpublishedFile::create(path, file_options(options))?;
    let place = LogPlace::of(options, Some(path));
    let mut core = create_without_log(Arc::new(device), options, &place)?;
    if !options.wants_log(&place) {
        file.publish()?;
        return Ok(core);
    }
    let header = core.pages.header();
    let log = place.create(&header, &core.pages.device, options)?;
    if let Err(error) = file.publish() {
        log.remove();
        return Err(error.into());
    }
    // Not before: a crash would leave a log that no store needs, and that looks needed.
    if let Err(error) = begin_log(&mut core, log, options) {
        // The store is locked, so no process has used it.
        if path.is_file() && path.canonicalize().and_then(std::fs::remove_file).is_ok() {
            drop(place.create(&header, &core.pages.device, options).map(OpenLog::remove));
        }
        return Err(error);
    }
    Ok(core)
}

fn file_options(options: &Options) -> FileOptions {
    FileOptions {
        read_only: options.is_read_only(),
        direct: options.direct,
        ..FileOptions::default()
    }
}

/// Creates an empty store on a device, durably.
pub(crate) fn create(device: Arc<dyn Device>, options: &Options) -> Result<StoreCore> {
    let place = LogPlace::of(options, None);
    let mut core = create_without_log(device, options, &place)?;
    if options.wants_log(&place) {
        let header = core.pages.header();
        let log = place.create(&header, &core.pages.device, options)?;
        begin_log(&mut core, log, options)?;
    }
    Ok(core)
}

fn create_without_log(
    device: Arc<dyn Device>,
    options: &Options,
    place: &LogPlace,
) -> Result<StoreCore> {
    let (device, changes) = wrap(device);
    let page_frames = options.page_frames.unwrap_or(1);
    if !(1..=PAGE_FRAMES_MAX).contains(&page_frames) {
        return Err(Error::BadOption(format!(
            "tree pages of {page_frames} frames: choose 1 to {PAGE_FRAMES_MAX} (4 to 64 KiB)"
        )));
    }
    if options.is_read_only() {
        return Err(Error::ReadOnly);
    }
    let pool_options = options.pool_options(page_frames)?;
    options.check_log(page_frames, place)?;
    let space = Space::new(HEADER_PAGES);
    let mut header = Header {
        version: FORMAT_VERSION,
        page_frames,
        store_id: random_id(),
        sequence: 0,
        clean: false,
        catalog: 0,
        free_map: 0,
        changes: false,
        file_pages: 0,
        next_tree: CATALOG + 1,
        listed: 0,
        log: LogPoint::default(),
    };
    let file = Arc::new(StoreFile::new(&device, changes, header, FORMAT_VERSION));
    let format = StoreFormat::of(file.clone());
    let pool = Pool::open(device.clone(), format, space, pool_options)?;

    let mut root = pool.allocate(page_frames)?;
    let catalog = root.page();
    page::init(&mut root, catalog, PageKind::Leaf, 0, CATALOG);
    NodeMut::format(&mut root, 0, Fences::default(), 0);
    drop(root);
    header.catalog = catalog.id.0;
    header.file_pages = pool.file_pages();
    for sequence in 0..HEADER_PAGES {
        header.sequence = sequence;
        let page = header.page();
        let write = |source| PoolError::Write { page, source };
        header.write(&*device, &[]).map_err(write)?;
    }
    // Before the first page: a store that was on the device before must be invalid from now on.
    device.sync().map_err(PoolError::Sync)?;
    file.update(|known| *known = header);
    let core = StoreCore::new(pool, device, file, Vec::new(), false);
    core.sync()?;
    Ok(core)
}

/// The device of a store's file, which remembers failed syncs, and what notes its writes.
fn wrap(device: Arc<dyn Device>) -> (Arc<dyn Device>, Arc<ChangeTracker>) {
    let changes = Arc::default();
    let device = Arc::new(SyncMemory::new(device));
    (Arc::new(TrackedDevice::new(device, &changes)), changes)
}

/// A random number that identifies a store or a value.
pub(crate) fn random_id() -> u128 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library seeds it from the system's random numbers.
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    half() << 64 | half()
}

/// Opens the store on a device.
pub(crate) fn open(device: Arc<dyn Device>, options: &Options) -> Result<StoreCore> {
    open_with(device, options, &LogPlace::of(options, None))
}

/// Opens the store in a file.
pub(crate) fn open_at(path: &Path, options: &Options) -> Result<StoreCore> {
    open_with(open_file(path, options)?, options, &LogPlace::of(options, Some(path)))
}

fn open_with(device: Arc<dyn Device>, options: &Options, place: &LogPlace) -> Result<StoreCore> {
    let (device, changes) = wrap(device);
    let pages = device.pages().map_err(PoolError::Resize)?;
    let (mut header, mut older) = read_header(&device, pages, options.salvage)?;
    if let Some(asked) = options.page_frames.filter(|asked| *asked != header.page_frames) {
        return Err(Error::BadOption(format!(
            "the store's tree pages have {} frames of 4 KiB, not {asked}: leave the option out to \
             open it, or load a dump of it into a new store",
            header.page_frames
        )));
    }
    let pool_options = options.pool_options(header.page_frames)?;
    options.check_log(header.page_frames, place)?;
    let (mut log, mut recovery, mut in_memory) = (None, None, None);
    let mut removed = Vec::new();
    if !options.salvage {
        // First, because the file's length in a header that says "in use" may be wrong.
        match (header.clean, header.log.identity, options.is_read_only()) {
            (false, 0, _) => return Err(Error::UncleanShutdown),
            (false, _, true) => return Err(Error::NeedsRecovery),
            _ => {}
        }
        if pages < header.file_pages {
            return Err(Error::Truncated { found: pages, expected: header.file_pages });
        }
        if !header.clean {
            let read = || Ok((header_as_read(&device, &header)?, read_free_map(&device, &header)?));
            let (opened, outcome) = recover(&device, header, read, place, options)?;
            log = Some(opened);
            match outcome {
                RecoveryOutcome::Clean(clean, report, values) => {
                    // It went to the other page.
                    older = header.encoded_version();
                    (header, recovery, removed) = (clean, Some(report), values);
                }
                RecoveryOutcome::InMemory(store) => in_memory = Some(*store),
            }
        }
    }
    if !options.salvage {
        check_listed_pages(&device, &header, !options.is_read_only())?;
    }
    let (map, redone) = match in_memory {
        _ if options.salvage => (FileMap::of_space(Space::new(pages)), None),
        None => (read_free_map(&device, &header)?, None),
        Some(InMemory { header: newer, map, pages, pending, removed: values, report }) => {
            (header, recovery, removed) = (newer, Some(report), values);
            (map, Some((pages, pending)))
        }
    };
    let FileMap { places, space, changes: since } = map;
    if let Some(since) = since.filter(|_| options.wants_log(place) || options.is_read_only()) {
        changes.go_on(since);
    }
    let file = Arc::new(StoreFile::new(&device, changes, header, older));
    let format = StoreFormat::of(file.clone());
    let pool = Pool::open(device.clone(), format, space, pool_options)?;
    let mut core = StoreCore::new(pool, device, file, places, options.salvage);
    core.recovery = recovery;
    if options.salvage {
        let space = sure_free_map(&core.pages.device, &header);
        core.orphans = Some(Orphans::new(&core.pages.device, header.page_frames, space));
    }
    // The next checkpoint, or the end of a view, finds their pages and frees them.
    core.pages.unlinked.add_unreadable(removed);
    match (options.wants_log(place), log, redone) {
        (_, Some(log), Some((pages, pending))) => {
            resume_log(&mut core, log, pages, *pending, options)?;
        }
        (true, Some(log), None) => begin_log(&mut core, log, options)?,
        (true, None, _) => {
            let log = place.create(&header, &core.pages.device, options)?;
            begin_log(&mut core, log, options)?;
        }
        (false, Some(log), None) => log.remove(),
        (false, None, _) if !options.is_read_only() => place.remove_left(&header, options),
        (false, None, _) => {}
    }
    Ok(core)
}

/// Checks that each page in the header's list has the checksum in the list. If one differs, a crash
/// or a power failure came before the checkpoint had written all of them.
///
/// If `durably`, as for a store that is opened for writing, this makes the header and these pages
/// durable, because the next header relies on them. The last process may have been killed while it
/// waited for a sync, or after a sync had failed. Then the kernel's page cache may have pages that
/// the device does not have. The kernel may consider them clean, and would not write them at
/// another sync. So this function writes the header and the listed pages again, as it read them.
/// All other pages were durable before the header was written. A crash during this function leaves
/// the same states as a crash of the last process.
fn check_listed_pages(device: &Arc<dyn Device>, header: &Header, durably: bool) -> Result<()> {
    if !durably && header.listed == 0 {
        return Ok(());
    }
    let newest = header_as_read(device, header)?;
    let pool = scratch_pool(device, StoreFormat::to_read(), 2 * LISTED_FRAMES_MAX)?;
    let mut pages = Vec::with_capacity(header.listed as usize);
    for listed in header.list(&newest.0) {
        match pool.fix_shared(listed.page) {
            Ok(page) if page::checksum_of(&page) == listed.checksum => pages.push(page),
            Err(error @ PoolError::Read { .. }) => return Err(error.into()),
            _ => return Err(Error::UncleanShutdown),
        }
    }
    if !durably {
        return Ok(());
    }
    // A damaged list may have a page twice.
    pages.sort_unstable_by_key(|page| page.page());
    pages.dedup_by_key(|page| page.page());
    let places = [header.page()].into_iter().chain(pages.iter().map(|page| page.page()));
    let all = [&newest.0[..]].into_iter().chain(pages.iter().map(|page| &page[..]));
    let writes = places.clone().zip(all).map(|(page, bytes)| Write::new(page.id.0, [bytes, &[]]));
    let mut writes: Vec<_> = writes.collect();
    device.write(&mut writes);
    for (write, page) in writes.into_iter().zip(places) {
        write.result.map_err(|source| PoolError::Write { page, source })?;
    }
    Ok(device.sync().map_err(PoolError::Sync)?)
}

/// The page of a header that was read before, byte for byte.
fn header_as_read(device: &Arc<dyn Device>, header: &Header) -> Result<Box<AlignedPage>> {
    let pool = small_pool(device, Arc::new(RawPages), 1)?;
    let mut page = Box::new(AlignedPage([0; PAGE_SIZE]));
    page.0.copy_from_slice(&pool.fix_shared(header.page())?);
    match Header::decode(header.page().id.0, &page.0) {
        HeaderPage::Valid(found) if found == *header => Ok(page),
        _ => Err(Error::damaged(header.page(), "it has changed since it was read a moment ago")),
    }
}

/// A pool for reading a few pages before the free map is known.
fn small_pool(
    device: &Arc<dyn Device>,
    format: Arc<dyn vellum_pool::PageFormat>,
    page_frames: u32,
) -> Result<Pool> {
    scratch_pool(device, format, min_pool_frames(page_frames))
}

/// The two header pages.
pub(crate) fn header_pages(device: &Arc<dyn Device>, pages: u64) -> Result<Vec<HeaderPage>> {
    let pool = small_pool(device, Arc::new(RawPages), 1)?;
    let numbers = 0..pages.min(HEADER_PAGES);
    numbers
        .map(|number| Ok(Header::decode(number, &pool.fix_shared(PageRef::new(number, 1))?)))
        .collect()
}

/// Reads the valid header, and the version of the other one, or a later one. Both headers must be
/// sound: if the newer one were lost, the older one would describe a state that the file no longer
/// has.
fn read_header(device: &Arc<dyn Device>, pages: u64, salvage: bool) -> Result<(Header, u32)> {
    if pages == 0 {
        let what = "the file is empty, or shorter than one page: create a store in an empty file";
        return Err(Error::NotAStore(what.into()));
    }
    let (mut newest, mut wrong): (Option<Header>, Option<Error>) = (None, None);
    let (mut older, mut foreign) = (FORMAT_VERSION, 0);
    let found = header_pages(device, pages)?;
    for (number, page) in (0..).zip(&found) {
        match page {
            HeaderPage::Valid(header) => {
                let is_newer = |newest: &Header| newest.sequence < header.sequence;
                let other = match newest {
                    Some(newest) if !is_newer(&newest) => Some(*header),
                    _ => newest.replace(*header),
                };
                older = other.map_or(older, |other| other.encoded_version());
            }
            HeaderPage::OtherVersion(version) => {
                return Err(Error::UnknownFormat { found: *version, known: FORMAT_VERSION_NEWEST });
            }
            HeaderPage::Damaged(damage) => wrong = Some(damage.clone().into()),
            HeaderPage::Foreign => {
                foreign += 1;
                let what = "it is not a header page";
                wrong = wrong.or(Some(Error::damaged(PageRef::new(number, 1), what)));
            }
        }
    }
    if foreign == found.len() {
        return Err(Error::NotAStore("its first pages are not headers of a store".into()));
    }
    match (newest, wrong) {
        (Some(newest), _) if salvage => Ok((newest, older)),
        (_, Some(wrong)) => Err(wrong),
        (Some(newest), None) if !are_consecutive(&found) => Err(Error::damaged(
            newest.page(),
            "the sequence numbers of the two headers are not consecutive",
        )),
        (Some(newest), None) if pages < HEADER_PAGES => {
            Err(Error::Truncated { found: pages, expected: newest.file_pages })
        }
        (Some(newest), None) => Ok((newest, older)),
        (None, None) => Err(Error::NotAStore("it has no header".into())),
    }
}

/// Whether the two headers belong to one store and were written one right after the other.
fn are_consecutive(found: &[HeaderPage]) -> bool {
    match found {
        [HeaderPage::Valid(one), HeaderPage::Valid(two)] => {
            one.store_id == two.store_id && one.sequence.abs_diff(two.sequence) == 1
        }
        _ => true,
    }
}

/// The space of a file, if its free map is sure.
fn sure_free_map(device: &Arc<dyn Device>, header: &Header) -> Option<Space> {
    let headers = header_pages(device, HEADER_PAGES).ok()?;
    let are_sound = headers.iter().all(|page| matches!(page, HeaderPage::Valid(_)));
    let is_sure = are_sound && header.clean && header.listed == 0;
    is_sure.then(|| read_free_map(device, header).ok()).flatten().map(|map| map.space)
}

/// The free map of a header, with what was written since a backup if the header says so.
pub(crate) fn read_free_map(device: &Arc<dyn Device>, header: &Header) -> Result<FileMap> {
    let pool = small_pool(device, StoreFormat::to_read(), header.page_frames)?;
    let (places, bytes) = free_map::read(&pool, header.free_map, header.page_frames)?;
    let first = PageRef::new(header.free_map, header.page_frames);
    let damaged = |what: String| Error::damaged(first, what);
    let decoded = Space::decode_first(&bytes).map_err(|error| damaged(error.to_string()))?;
    let changes = match (header.changes, decoded.1) {
        (true, more) => ChangesSince::decode(more, header.store_id, pool.file_pages()).map(Some),
        (false, []) => Ok(None),
        (false, _) => Err("the free map is longer than it says"),
    };
    let (space, changes) = (decoded.0, changes.map_err(|what| damaged(what.into()))?);
    if space.first() != HEADER_PAGES || space.end() > pool.file_pages() {
        return Err(damaged("the free map belongs to another file".into()));
    }
    Ok(FileMap { places, space, changes })
}
