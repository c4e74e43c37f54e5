//! The bodies of the fuzz targets of logs and of recovery. They need the feature `testing`: a log
//! in memory, and stores without threads.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use vellum::{MemoryDevice, Options, Store};
use vellum_log::{
    BLOCK_BYTES, Block, Log, LogDevice, LogError, LogOptions, Lsn, Record, SimulatedDevice,
    SimulatedOptions,
};

use crate::entry::{change, change_page, newest_header, read, trees};
use crate::source::{Source, change_bytes};

/// Bytes of a block's head.
const HEAD: usize = 48;
const PAYLOAD: usize = BLOCK_BYTES - HEAD;
/// Blocks that a log has room for.
const BLOCKS: u64 = 128;
/// No file of these grows so far.
const FILE_PAGES: u64 = 4096;

/// Decodes a block, and a record of a store. What is sound is the same when it is encoded again.
pub fn record_decoder(bytes: &[u8]) {
    if let Some(again) = vellum::record_encoded_again(bytes) {
        assert_eq!(again, bytes);
    }
    // A record of a sound log with some changes.
    let mut source = Source(bytes);
    let records = &sound_crash(1).records;
    let mut record = records[source.below(records.len())].clone();
    while source.has_more() {
        change_bytes(&mut record, &mut source);
        record.truncate(1 << 16);
        if let Some(again) = vellum::record_encoded_again(&record) {
            assert_eq!(again, record);
        }
    }
    let mut block = Block::ZERO;
    let len = bytes.len().min(BLOCK_BYTES);
    block.0[..len].copy_from_slice(&bytes[..len]);
    for magic in [false, true] {
        if magic {
            block.0[4..8].copy_from_slice(b"VLOG");
            block.0[36] = 1;
            // These have no meaning.
            block.0[38..40].fill(0);
            block.reseal();
        }
        if let Some(again) = block.encoded_again() {
            assert_eq!(again.0, block.0);
        }
    }
}

/// Reads a log of blocks that have right checksums and any fields, and goes on with it.
///
/// Each block takes a choice, its fields and its payload from the input. What a first opening has
/// read, and what is appended then, a second one must read.
pub fn log_reader(bytes: &[u8]) {
    let mut source = Source(bytes);
    let records = (0..source.below(6)).map(|_| {
        let len = source.below(9000);
        let mut record = source.take(len / 64).to_vec();
        record.resize(len, 5);
        record
    });
    let mut blocks = lay(&records.collect::<Vec<_>>());
    while source.has_more() {
        let choice = source.number();
        let at = source.below(blocks.len() + 1);
        if at == blocks.len() {
            blocks.push(Block::ZERO);
        }
        change_block(&mut blocks[at], choice, &mut source);
        if choice & 0xf == 0 {
            blocks.remove(at);
        }
    }
    let device = log_of(&blocks);
    let found = records_of(&device, None);
    let options = log_options();
    let Ok((log, _)) = open_log(&device, &options, None, |_| {}) else { return };
    let mut expected: Vec<Vec<u8>> =
        found.unwrap().into_iter().map(|record| record.bytes).collect();
    for len in [0, 10, 7000] {
        let Ok(lsn) = log.append(&vec![len as u8; len]) else { return };
        log.wait_durable(lsn).unwrap();
        expected.push(vec![len as u8; len]);
    }
    drop(log);
    let found = match records_of(&Arc::new(device.crash()), None) {
        Err(error) if has_run_out(&error) => return,
        found => found.unwrap(),
    };
    assert!(found.into_iter().map(|record| record.bytes).eq(expected));
}

/// Whether a log is refused because a block is of the last opening that there can be.
fn has_run_out(error: &dyn std::error::Error) -> bool {
    error.to_string().contains("the last one")
}

/// Changes a field of a block's head, or of its payload, and seals it again.
fn change_block(block: &mut Block, choice: usize, source: &mut Source<'_>) {
    let at = match choice & 3 {
        0 => source.below(BLOCK_BYTES),
        1 => HEAD + source.below(16),
        _ => 8 + source.below(HEAD - 8),
    };
    block.0[at] = source.number() as u8;
    if choice & 0xe00 == 0xe00 {
        // A number at an edge of what fits, or of half of it.
        let edge = (u64::MAX >> (choice >> 12 & 1)).wrapping_sub(source.number() as u64 % 4);
        block.0[at & !7..][..8].copy_from_slice(&edge.to_le_bytes());
    }
    if choice & 0x100 == 0 {
        block.reseal();
    }
}

fn log_options() -> LogOptions {
    let mut options = LogOptions::default();
    options.ring_bytes = 64 << 10;
    options
}

fn open_log(
    device: &Arc<SimulatedDevice>,
    options: &LogOptions,
    from: Option<Lsn>,
    mut visit: impl FnMut(Record),
) -> Result<(Log, vellum_log::End), LogError> {
    Log::open_without_thread(device.clone(), options, from, |record| {
        visit(record.to_record());
        Ok::<_, LogError>(())
    })
}

fn records_of(device: &Arc<SimulatedDevice>, from: Option<Lsn>) -> Result<Vec<Record>, LogError> {
    let mut records = Vec::new();
    open_log(device, &log_options(), from, |record| records.push(record))?;
    Ok(records)
}

/// The blocks of a log that has these records from its beginning on (docs/log.md).
fn lay(records: &[Vec<u8>]) -> Vec<Block> {
    let (mut stream, mut begins) = (Vec::new(), Vec::new());
    for record in records {
        begins.push(stream.len());
        stream.extend_from_slice(&(record.len() as u32).to_le_bytes());
        stream.extend_from_slice(record);
    }
    begins.push(stream.len());
    let identity = SimulatedDevice::new(SimulatedOptions::default()).identity();
    let payloads = stream.chunks(PAYLOAD).take(BLOCKS as usize - 8).enumerate();
    let block = |(number, payload): (usize, &[u8])| {
        let start = number * PAYLOAD;
        let next = begins[begins.partition_point(|begin| *begin < start)];
        let carry = (next - start).min(PAYLOAD);
        let mut block = Block::ZERO;
        let head = &mut block.0[..HEAD];
        head[4..8].copy_from_slice(b"VLOG");
        head[8..16].copy_from_slice(&identity.to_le_bytes());
        head[16..24].copy_from_slice(&(number as u64).to_le_bytes());
        head[24..32].copy_from_slice(&(number as u64).to_le_bytes());
        head[32..34].copy_from_slice(&(payload.len() as u16).to_le_bytes());
        head[34..36].copy_from_slice(&(carry as u16).to_le_bytes());
        head[36] = 1;
        head[37] = u8::from(number == 0);
        head[40] = 1;
        block.0[HEAD..HEAD + payload.len()].copy_from_slice(payload);
        block.reseal();
        block
    };
    payloads.map(block).collect()
}

/// A log that has these blocks.
fn log_of(blocks: &[Block]) -> Arc<SimulatedDevice> {
    let segments = BLOCKS / 8;
    let options = SimulatedOptions { segments, ..SimulatedOptions::default() };
    let device = SimulatedDevice::new(options);
    for (number, block) in (0..BLOCKS).zip(blocks) {
        if number == device.scan().end {
            device.extend().unwrap();
        }
        device.damage(number, |bytes| *bytes = block.0);
    }
    Arc::new(device)
}

/// A small store that was not closed, and its log.
struct Crashed {
    file: Vec<u8>,
    records: Vec<Vec<u8>>,
}

fn options(page_frames: u32, log: &Arc<SimulatedDevice>) -> Options {
    let options = Options::new().pool_bytes(256 * 4096 * u64::from(page_frames));
    options.page_frames(page_frames).log_bytes(100 << 10).log_device(log.clone()).single_threaded()
}

/// A store with several trees whose log has records of each kind.
fn sound_crash(page_frames: u32) -> &'static Crashed {
    static STORES: [OnceLock<Crashed>; 2] = [OnceLock::new(), OnceLock::new()];
    STORES[page_frames as usize - 1].get_or_init(|| {
        let file = crate::entry::sound_store(page_frames);
        let device = Arc::new(MemoryDevice::from_snapshot(file.to_vec()));
        let log = log_of(&[]);
        // No checkpoint is due before the end.
        let options = options(page_frames, &log).log_bytes(4 << 20);
        let store = Store::open_on(device.clone(), &options).unwrap();
        let (tree, other) = (store.tree("t").unwrap(), store.create_tree("v").unwrap());
        for n in 0..12_u32 {
            tree.upsert(&[&n.to_be_bytes()[2..], &[b'k'; 500]].concat(), &[3; 40]).unwrap();
            other.upsert(format!("key {n}").as_bytes(), &[n as u8; 700]).unwrap();
        }
        other.upsert(b"long", &[8; 5000]).unwrap();
        let mut writer = other.writer(b"pieces").unwrap();
        std::io::Write::write_all(&mut writer, &[9; 20_000]).unwrap();
        writer.finish().unwrap();
        other.remove_range("key 1".."key 5").unwrap();
        let both = store.transact(|txn| {
            txn.put(&tree, b"one", b"1")?;
            txn.remove(&other, b"key 6")?;
            txn.put(&other, b"two", &[2; 3000])
        });
        both.unwrap();
        store.drop_tree("u").unwrap();
        store.sync().unwrap();
        let file = device.snapshot();
        let at = newest_header(&file);
        let number = |at: usize| u64::from_le_bytes(*file[at..].first_chunk().unwrap());
        let from = number(at + 144).wrapping_sub(number(at + 136));
        assert!(from < BLOCK_BYTES as u64, "the log begins with the record that recovery needs");
        let records = records_of(&Arc::new(log.kill()), Some(Lsn(from))).unwrap();
        let records: Vec<_> = records.into_iter().map(|record| record.bytes).collect();
        assert!(records.len() > 20);
        Crashed { file, records }
    })
}

/// Recovers a sound store that was not closed, after changes of its file, of the blocks of its log,
/// and of its records, all sealed again.
///
/// The first byte chooses the length of pages, whether recovery has memory for few pages, how the
/// store ends afterwards, and whether it is read and changed a lot before. If the recovered store
/// is sound, it stays sound.
pub fn recovery(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let page_frames = 1 + u32::from(choice & 1);
    let crashed = sound_crash(page_frames);
    let (mut file, mut records) = (crashed.file.clone(), crashed.records.clone());
    let (mut source, mut later) = (Source(rest), Vec::new());
    while source.has_more() {
        let choice = source.number();
        match choice % 8 {
            0 => change_page(&mut file, choice >> 3, &mut source),
            1 => later.push((choice, source.number(), source.take(4))),
            _ => change_records(&mut records, choice, &mut source),
        }
    }
    let mut blocks = lay(&records);
    for (choice, number, bytes) in later {
        let count = blocks.len().max(1);
        if let Some(block) = blocks.get_mut(number % count) {
            change_block(block, choice >> 3, &mut Source(bytes));
        }
    }
    recover(file, &log_of(&blocks), page_frames, *choice);
}

fn change_records(records: &mut Vec<Vec<u8>>, choice: usize, source: &mut Source<'_>) {
    let (at, other) = (source.below(records.len()), source.below(records.len()));
    if records.is_empty() {
        return;
    }
    match choice >> 3 & 0xf {
        0 => drop(records.remove(at)),
        1 => records.insert(other, records[at].clone()),
        2 => records.swap(at, other),
        3 => change_bytes(&mut records[at], source),
        4 | 5 => {
            let place = source.below(records[at].len());
            if let Some(byte) = records[at].get_mut(place) {
                *byte = source.number() as u8;
            }
        }
        6 | 7 => {
            let from = records[other].clone();
            copy_part(&from, &mut records[at], source);
        }
        _ => {
            let from = records[other].clone();
            change_field(&from, &mut records[at], source);
        }
    }
}

/// Changes a number in a record, so that the record stays one: by one, to a number at an edge of
/// what fits, or to one that another record has there.
fn change_field(from: &[u8], record: &mut [u8], source: &mut Source<'_>) {
    let fields = Parts::of(record).fields;
    let Some((at, len)) = fields.get(source.below(fields.len())).copied() else { return };
    let choice = source.number();
    let mut number = [0; 8];
    number[..len].copy_from_slice(&record[at..at + len]);
    let number = u64::from_le_bytes(number);
    let others = Parts::of(from).fields;
    let mut others = others.iter().cycle().skip(choice >> 3).take(64);
    let new = match (choice % 8, others.find(|other| other.1 == len)) {
        (0, _) => number.wrapping_add(1),
        (1, _) => number.wrapping_sub(1),
        (2, _) => (1_u64 << ((choice >> 3) % 64)).wrapping_sub((choice >> 9) as u64 & 1),
        (3, _) => (choice >> 3) as u64,
        (_, Some((other, _))) => {
            let mut number = [0; 8];
            number[..len].copy_from_slice(&from[*other..other + len]);
            u64::from_le_bytes(number)
        }
        (_, None) => 0,
    };
    record[at..at + len].copy_from_slice(&new.to_le_bytes()[..len]);
}

/// Adds a range or a page of one record to another one.
fn copy_part(from: &[u8], record: &mut Vec<u8>, source: &mut Source<'_>) {
    let (parts, own) = (Parts::of(from), Parts::of(record));
    let choice = source.number();
    let (of, count, place) = match choice % 3 {
        0 => (parts.pages, 2, record.len()),
        kind => ([parts.taken, parts.freed].concat(), 2 + 2 * kind, 8 + 12 * own.taken.len()),
    };
    let Some(part) = of.get((choice >> 2) % of.len().max(1)).cloned() else { return };
    let Some(place) = Some(place).filter(|place| *place <= record.len()) else { return };
    let old = u16::from_le_bytes([record[count], record[count + 1]]);
    record[count..count + 2].copy_from_slice(&old.wrapping_add(1).to_le_bytes());
    record.splice(place..place, from[part].iter().copied());
}

/// Where the parts of a record are (`crates/engine/src/redo/record.rs`).
#[derive(Default)]
struct Parts {
    taken: Vec<Range<usize>>,
    freed: Vec<Range<usize>>,
    pages: Vec<Range<usize>>,
    /// Where numbers are, and their lengths.
    fields: Vec<(usize, usize)>,
}

impl Parts {
    fn of(record: &[u8]) -> Parts {
        let mut parts = Parts::default();
        // A record that was changed before may end anywhere.
        let _ = parts.find(record);
        parts.fields.retain(|(at, len)| at + len <= record.len());
        parts
    }

    fn find(&mut self, record: &[u8]) -> Option<()> {
        let number = |at: usize, len: usize| {
            let bytes = record.get(at..at + len)?;
            Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
        };
        let (pages, taken, freed) = (number(2, 2)?, number(4, 2)?, number(6, 2)?);
        let mut at = 8;
        for index in 0..taken + freed {
            record.get(at..at + 12)?;
            let ranges = if index < taken { &mut self.taken } else { &mut self.freed };
            ranges.push(at..at + 12);
            self.fields.extend([(at, 8), (at + 8, 4)]);
            at += 12;
        }
        for _ in 0..pages {
            let (form, len) = (number(at + 12, 1)?, number(at + 13, 4)?);
            let (begin, end) = (at + 17, at + 17 + len);
            record.get(begin..end)?;
            self.pages.push(at..end);
            self.fields.extend([(at, 8), (at + 8, 4), (at + 12, 1)]);
            match form {
                1 => self.find_edits(&record[..end], begin)?,
                _ => {
                    // The gap, the page's header, the node's header and the first slots.
                    self.fields.extend([(begin, 4), (begin + 4, 4)]);
                    let page = begin + 8;
                    self.fields.extend([24, 28].map(|field| (page + field, 4)));
                    self.fields.extend([(page + 8, 8), (page + 64, 8)]);
                    self.fields.extend([36, 37, 38].map(|field| (page + field, 1)));
                    self.fields.extend((40..60).step_by(2).map(|field| (page + field, 2)));
                    self.fields.extend((136..200).step_by(2).map(|field| (page + field, 2)));
                }
            }
            at = end;
        }
        Some(())
    }

    fn find_edits(&mut self, record: &[u8], mut at: usize) -> Option<()> {
        let number = |at: usize| {
            let bytes = record.get(at..at + 2)?;
            Some(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))
        };
        while at < record.len() {
            self.fields.extend([(at, 1), (at + 1, 2)]);
            at += match record[at] {
                1 => {
                    self.fields.push((at + 5, 1));
                    8 + number(at + 3)? + number(at + 6)?
                }
                2 => {
                    self.fields.push((at + 3, 1));
                    6 + number(at + 4)?
                }
                3 => 3,
                _ => {
                    let count = number(at + 1)?;
                    self.fields.extend((0..count).map(|index| (at + 3 + 2 * index, 2)));
                    3 + 2 * count
                }
            };
        }
        Some(())
    }
}

/// Opens a store whose log may say anything.
fn recover(file: Vec<u8>, log: &Arc<SimulatedDevice>, page_frames: u32, choice: u8) {
    let bytes = if choice & 2 == 0 { 1 << 20 } else { 12 << 10 };
    let device = Arc::new(MemoryDevice::from_snapshot(file).limited_to(FILE_PAGES));
    let options = |log| options(page_frames, log);
    let opened = Store::open_on(device.clone(), &options(log).recovery_bytes(bytes));
    let Ok(store) = opened else { return };
    let was_sound = store.check(&mut |_| {}).is_ok_and(|report| report.is_sound());
    for tree in trees(&store) {
        if choice & 8 != 0 {
            read(&tree);
            change(&tree);
            read(&tree);
        }
        let _ = (tree.upsert(b"key 7", &[1; 3000]), tree.remove(b"key 3"));
    }
    let _ = (store.create_tree("new"), store.drop_tree("v"), store.sync());
    if choice & 4 == 0 {
        let _ = store.close();
        return reopen(device.snapshot(), &options(&log_of(&[])), was_sound);
    }
    let (image, log) = (device.snapshot(), Arc::new(log.kill()));
    drop(store);
    reopen(image, &options(&log), was_sound);
}

fn reopen(image: Vec<u8>, options: &Options, was_sound: bool) {
    let device = Arc::new(MemoryDevice::from_snapshot(image).limited_to(FILE_PAGES));
    let store = match Store::open_on(device, options) {
        Ok(store) => store,
        Err(error) if was_sound && !has_run_out(&error) => {
            panic!("a sound store does not open again: {error}")
        }
        Err(_) => return,
    };
    let report = store.check(&mut |_| {});
    if was_sound {
        let report = report.unwrap();
        assert!(report.is_sound(), "{:?}", report.damage);
    }
}
