//! Tests docs/format.md: a decoder that was written only from that document reads a store file.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::{Random, all_freed, memory_store};

struct File(Vec<u8>);

impl File {
    fn u16(&self, at: usize) -> usize {
        u16::from_le_bytes(self.0[at..at + 2].try_into().unwrap()).into()
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    fn bytes(&self, at: usize, len: usize) -> &[u8] {
        &self.0[at..at + len]
    }

    /// Checks a page header and returns the page's offset in the file.
    fn page(&self, id: u64, frames: u32, kind: u8, tree: u32) -> usize {
        let at = id as usize * 4096;
        let bytes = self.bytes(at, frames as usize * 4096);
        assert_eq!(self.u64(at), crc64_nvme(&bytes[8..]));
        assert_eq!((self.u64(at + 8), self.u64(at + 16)), (id, 0));
        assert_eq!((self.u32(at + 24), self.u32(at + 28)), (frames, tree));
        assert_eq!(self.bytes(at + 32, 4), b"VLMP");
        assert_eq!((self.0[at + 36], self.0[at + 37], self.0[at + 39]), (kind, 1, 0));
        at
    }

    /// Appends the entries of a tree below a page, in order.
    fn tree(&self, id: u64, frames: u32, tree: u32, found: &mut Vec<(Vec<u8>, Vec<u8>)>) {
        let level = self.0[id as usize * 4096 + 38];
        let page = self.page(id, frames, if level == 0 { 3 } else { 2 }, tree);
        let (count, prefix_len) = (self.u16(page + 40), self.u16(page + 46));
        let lower = page + self.u16(page + 48);
        let prefix = if prefix_len > 0 { self.bytes(lower, prefix_len) } else { &[] };
        let skip = self.u16(page + 58);
        let skipped = self.bytes(page + self.u16(page + 140), skip);
        for slot in 0..count {
            let slot = page + 136 + slot * if level == 0 { 12 } else { 16 };
            if level > 0 {
                self.tree(self.u64(slot + 8), frames, tree, found);
                continue;
            }
            let (cell, key_len) = (page + self.u16(slot + 4), self.u16(slot + 6));
            let suffix = self.bytes(cell, key_len);
            assert_eq!(&suffix[..skip], skipped);
            let (mut head, len) = ([0; 4], (key_len - skip).min(4));
            head[..len].copy_from_slice(&suffix[skip..skip + len]);
            assert_eq!(self.u32(slot), u32::from_be_bytes(head));
            let (value, len) = (cell + key_len, self.u16(slot + 8));
            let key = [prefix, suffix].concat();
            let value = match self.u16(slot + 10) {
                0 => self.bytes(value, len).to_vec(),
                1 => self.blob(value, frames, tree, &key),
                flags => panic!("flags {flags}"),
            };
            found.push((key, value));
        }
        if level > 0 {
            self.tree(self.u64(page + 64), frames, tree, found);
        }
    }

    fn blob(&self, at: usize, page_frames: u32, tree: u32, key: &[u8]) -> Vec<u8> {
        let (id, len, frames) = (self.u64(at), self.u64(at + 8), self.u32(at + 16));
        let expected = (len + 56).div_ceil(4096) as u32;
        assert_eq!(frames, expected.next_multiple_of(page_frames));
        let page = self.page(id, frames, 4, tree);
        assert_eq!(self.u64(page + 40), len);
        let rest = self.bytes(page + 48, frames as usize * 4096 - 56);
        assert!(rest[len as usize..].iter().all(|byte| *byte == 0));
        let end = page + frames as usize * 4096;
        assert_eq!(self.u64(end - 8), crc64_nvme(key).max(1));
        rest[..len as usize].to_vec()
    }

    /// The first page and the end of the space, and the number of free frames.
    fn free_map(&self, first: u64, frames: u32) -> (u64, u64, u64) {
        let (mut map, mut next) = (Vec::new(), first);
        while next != 0 {
            let page = self.page(next, frames, 5, 0);
            map.extend_from_slice(self.bytes(page + 56, self.u64(page + 48) as usize));
            next = self.u64(page + 40);
        }
        let map = File(map);
        assert_eq!((map.u32(0), map.u32(4)), (1, 0));
        let extents = map.u64(24) as usize;
        assert_eq!(map.0.len(), 32 + 16 * extents);
        let free = (0..extents).map(|extent| map.u64(40 + 16 * extent)).sum();
        (map.u64(8), map.u64(16), free)
    }
}

/// CRC-64/NVME, bit by bit: polynomial 0xad93d23594c93659, reflected, all ones in and out.
fn crc64_nvme(bytes: &[u8]) -> u64 {
    let mut crc = u64::MAX;
    for byte in bytes {
        crc ^= u64::from(*byte);
        for _ in 0..8 {
            let carry = if crc & 1 == 1 { 0x9a6c_9329_ac4b_c9b5 } else { 0 };
            crc = (crc >> 1) ^ carry;
        }
    }
    !crc
}

#[test]
fn a_decoder_written_from_the_document_reads_the_file() {
    for page_frames in [1, 2] {
        let (device, store) = memory_store(64, page_frames);
        let mut models: BTreeMap<&str, BTreeMap<Vec<u8>, Vec<u8>>> = BTreeMap::new();
        let mut random = Random(5);
        for name in ["one", "another"] {
            let tree = store.create_tree(name).unwrap();
            let model = models.entry(name).or_default();
            for n in 0..3000u64 {
                let key = format!("{}/{}", "prefix".repeat(n as usize % 3), random.below(9999));
                let len = if n % 500 == 7 { 5000 + n } else { random.below(60) };
                let value = vec![n as u8; len as usize];
                tree.upsert(key.as_bytes(), &value).unwrap();
                model.insert(key.into_bytes(), value);
            }
            for key in model.keys().step_by(3).cloned().collect::<Vec<_>>() {
                tree.remove(&key).unwrap();
                model.remove(&key);
            }
        }
        all_freed(&store);
        let used = store.stat().unwrap().used_pages;
        let id = store.stat().unwrap().store_id;
        store.close().unwrap();

        let file = File(device.snapshot());
        let newest = (0..2).max_by_key(|page| file.u64(page * 4096 + 72)).unwrap();
        let header = file.page(newest as u64, 1, 1, 0);
        assert_eq!(file.bytes(header + 40, 8), b"VELLUMDB");
        assert_eq!((file.u32(header + 48), file.u32(header + 52)), (1, page_frames));
        assert_eq!(file.bytes(header + 56, 16), id.to_le_bytes());
        assert_eq!(file.u64(header + 72) % 2, newest as u64);
        assert_eq!(file.u64(header + 80), 1, "clean");
        assert_eq!(file.u64(header + 104) * 4096, file.0.len() as u64);
        assert_eq!(file.u32(header + 112), 4);

        let (first, end, free) = file.free_map(file.u64(header + 96), page_frames);
        assert_eq!(first, 2);
        // The pages of the map were allocated after the statistics were taken.
        assert!(end - free >= used && end - free <= used + 4 * u64::from(page_frames));

        let mut trees = Vec::new();
        file.tree(file.u64(header + 88), page_frames, 1, &mut trees);
        assert_eq!(trees.len(), models.len());
        for ((name, entry), (expected_name, model)) in trees.into_iter().zip(&models) {
            assert_eq!(name, expected_name.as_bytes());
            let entry = File(entry);
            assert_eq!(entry.0.len(), 16);
            let mut found = Vec::new();
            file.tree(entry.u64(8), page_frames, entry.u32(0), &mut found);
            assert!(found.iter().map(|(key, value)| (key, value)).eq(model.iter()));
        }
    }
}
