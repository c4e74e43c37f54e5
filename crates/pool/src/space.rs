//! Which page ranges of a file are allocated.
//!
//! The pages below `end` are either allocated or in one of the free extents; beyond `end` there is
//! nothing. What holds: free extents are not empty, lie between `first` and `end`, and do not touch
//! one another (neighbours are merged), so the free map of a given allocation is unique. All
//! operations take O(log n) steps for n free extents, unless they say otherwise.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::free_extents::FreeExtents;

/// No space is longer than this: byte positions in a file are signed 64-bit numbers.
pub const MAX_PAGES: u64 = 1 << 51;

const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const EXTENT_BYTES: usize = 16;
const LENGTH: &str = "its length and its number of extents differ";

/// What is wrong with a range to be freed, or with an encoded space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpaceError {
    /// The range is empty, or not within the pages that can be allocated.
    #[error("pages {start}+{count} are not within the allocatable pages {first}..{end}")]
    OutOfRange {
        /// First page to free.
        start: u64,
        /// How many pages.
        count: u64,
        /// First page that can be allocated.
        first: u64,
        /// First page past the end.
        end: u64,
    },
    /// Part of the range is free already.
    #[error(
        "pages {start}+{count} are not all allocated: {free_start}+{free_count} is free already"
    )]
    AlreadyFree {
        /// First page to free.
        start: u64,
        /// How many pages.
        count: u64,
        /// Start of the free extent in the way.
        free_start: u64,
        /// Its length.
        free_count: u64,
    },
    /// The encoded bytes are of another version.
    #[error("the free map has version {found}, this program knows version {VERSION}")]
    Version {
        /// What was found.
        found: u32,
    },
    /// The encoded bytes are not a space.
    #[error("the free map is damaged: {0}")]
    Damaged(&'static str),
}

/// The allocated and free pages of a file.
#[derive(Clone, Debug)]
pub struct Space {
    first: u64,
    end: u64,
    by_start: FreeExtents,
    /// The same as (count, start).
    by_size: BTreeSet<(u64, u64)>,
    free_pages: u64,
    generation: u64,
}

/// Two spaces are equal if the same pages are allocated, whatever happened before.
impl PartialEq for Space {
    fn eq(&self, other: &Space) -> bool {
        (self.first, self.end) == (other.first, other.end) && self.by_start == other.by_start
    }
}

impl Eq for Space {}

impl Space {
    /// An empty space that starts at page `first_usable_page`: the pages before it are never
    /// handed out.
    ///
    /// # Panics
    /// If it starts beyond 2^51: a programming error.
    pub fn new(first_usable_page: u64) -> Self {
        assert!(first_usable_page <= MAX_PAGES, "a space cannot start at {first_usable_page}");
        Self {
            first: first_usable_page,
            end: first_usable_page,
            by_start: FreeExtents::default(),
            by_size: BTreeSet::new(),
            free_pages: 0,
            generation: 0,
        }
    }

    /// Allocates `count` pages in a row and returns the first.
    ///
    /// They come from the smallest free extent that is large enough, of several the one with the
    /// lowest address; if there is none, from the end, which moves up.
    ///
    /// # Panics
    /// If `count` is 0 or more than 2^51: a programming error.
    pub fn allocate(&mut self, count: u64) -> u64 {
        assert!((1..=MAX_PAGES).contains(&count), "a range of {count} pages cannot be allocated");
        if let Some(&(size, start)) = self.by_size.range((count, 0)..).next() {
            self.remove(start, size);
            if size > count {
                self.insert(start + count, size - count);
            }
            return start;
        }
        let start = match self.free_tail() {
            Some((start, size)) => {
                self.remove(start, size);
                start
            }
            None => self.end,
        };
        self.end = start + count;
        self.generation += 1;
        start
    }

    /// Allocates `count` pages in a row that end at or below page `bound`, and returns the first:
    /// the lowest ones that are free. `None` if there are none. The end never moves.
    ///
    /// Takes O(d log n) steps for d different sizes of free extents, and O(log n) if the first
    /// extent has room, as always for one page.
    ///
    /// # Panics
    /// As [`allocate`](Self::allocate).
    pub fn allocate_below(&mut self, count: u64, bound: u64) -> Option<u64> {
        assert!((1..=MAX_PAGES).contains(&count), "a range of {count} pages cannot be allocated");
        let (start, size) = self.lowest_with_room(count)?;
        if start.saturating_add(count) > bound {
            return None;
        }
        self.remove(start, size);
        if size > count {
            self.insert(start + count, size - count);
        }
        Some(start)
    }

    /// Whether [`allocate_below`](Self::allocate_below) finds room.
    pub fn has_room_below(&self, count: u64, bound: u64) -> bool {
        let lowest = self.lowest_with_room(count);
        lowest.is_some_and(|(start, _)| start.saturating_add(count) <= bound)
    }

    /// The first free extent of at least `count` pages, as (start, count).
    fn lowest_with_room(&self, count: u64) -> Option<(u64, u64)> {
        let first = self.by_start.iter().next()?;
        if first.1 >= count {
            return Some(first);
        }
        // Of each size, the set has the lowest extent first.
        let (mut lowest, mut at_least) = (None::<(u64, u64)>, count);
        while let Some(&(size, start)) = self.by_size.range((at_least, 0)..).next() {
            if lowest.is_none_or(|(lowest, _)| start < lowest) {
                lowest = Some((start, size));
            }
            at_least = size + 1;
        }
        lowest
    }

    /// Frees `count` pages from `start`, which need not have been allocated in one piece.
    ///
    /// # Errors
    /// [`SpaceError::OutOfRange`] or [`SpaceError::AlreadyFree`]; nothing was changed then.
    pub fn free(&mut self, start: u64, count: u64) -> Result<(), SpaceError> {
        let within = start >= self.first && count > 0;
        let Some(end) = start.checked_add(count).filter(|&end| within && end <= self.end) else {
            return Err(SpaceError::OutOfRange { start, count, first: self.first, end: self.end });
        };
        let before = self.by_start.before(end);
        if let Some((free_start, free_count)) = before
            && free_start + free_count > start
        {
            return Err(SpaceError::AlreadyFree { start, count, free_start, free_count });
        }
        let (mut merged_start, mut merged_count) = (start, count);
        if let Some((free_start, free_count)) = before
            && free_start + free_count == start
        {
            self.remove(free_start, free_count);
            merged_start = free_start;
            merged_count += free_count;
        }
        if let Some(free_count) = self.by_start.get(end) {
            self.remove(end, free_count);
            merged_count += free_count;
        }
        self.insert(merged_start, merged_count);
        Ok(())
    }

    /// Makes `count` pages from `start` allocated, whichever of them are so already. Pages between
    /// the end and `start` become free.
    ///
    /// # Errors
    /// [`SpaceError::OutOfRange`]; nothing was changed then.
    pub fn set_allocated(&mut self, start: u64, count: u64) -> Result<(), SpaceError> {
        let within = start >= self.first && count > 0;
        let end = start.checked_add(count).filter(|&end| within && end <= MAX_PAGES);
        let Some(end) = end else {
            return Err(SpaceError::OutOfRange { start, count, first: self.first, end: MAX_PAGES });
        };
        let known = self.end;
        if end > known {
            self.end = end;
            self.generation += 1;
            if start > known {
                self.free(known, start - known)?;
            }
        }
        while let Some((free_start, free_count)) = self.by_start.before(end)
            && free_start + free_count > start
        {
            self.remove(free_start, free_count);
            if free_start < start {
                self.insert(free_start, start - free_start);
            }
            if free_start + free_count > end {
                self.insert(end, free_start + free_count - end);
            }
        }
        Ok(())
    }

    /// Makes `count` pages from `start` free, whichever of them are so already.
    ///
    /// # Errors
    /// [`SpaceError::OutOfRange`]; nothing was changed then.
    pub fn set_free(&mut self, start: u64, count: u64) -> Result<(), SpaceError> {
        self.set_allocated(start, count)?;
        self.free(start, count)
    }

    /// The first page that can ever be allocated.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The first page past all allocated and free ones: how long the file must be, in pages.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// If the last pages are free, cuts them off and returns the new end.
    pub fn trim(&mut self) -> Option<u64> {
        let (start, count) = self.free_tail()?;
        self.remove(start, count);
        self.end = start;
        Some(start)
    }

    /// How many pages are free.
    pub fn free_pages(&self) -> u64 {
        self.free_pages
    }

    /// How many pages are allocated, without those before the first that can be.
    pub fn allocated_pages(&self) -> u64 {
        self.end - self.first - self.free_pages
    }

    /// How many of the pages from `page` on are allocated. Looks at the free extents there.
    pub fn allocated_from(&self, page: u64) -> u64 {
        let page = page.max(self.first);
        let later = self.by_start.iter().rev().take_while(|(start, count)| start + count > page);
        let free: u64 = later.map(|(start, count)| start + count - start.max(page)).sum();
        self.end.saturating_sub(page) - free
    }

    /// The size of the largest free extent in pages, 0 if there is none.
    pub fn largest_free(&self) -> u64 {
        self.by_size.last().map_or(0, |&(count, _)| count)
    }

    /// Whether any of `count` pages from `start` lies in a free extent. Pages past the end are not
    /// free: they do not exist.
    pub fn has_free(&self, start: u64, count: u64) -> bool {
        let extent = self.by_start.before(start.saturating_add(count));
        extent.is_some_and(|(first, len)| first + len > start)
    }

    /// The free extents as (start, count), by address.
    pub fn free_extents(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.by_start.iter()
    }

    /// The last free extent.
    pub fn last_free(&self) -> Option<(u64, u64)> {
        self.by_start.last()
    }

    /// A number that changes whenever pages are allocated, freed or cut off.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The space as it is now, to be encoded later. Costs a 256th of a copy of the free extents.
    pub fn snapshot(&self) -> SpaceSnapshot {
        let (first, end, generation) = (self.first, self.end, self.generation);
        let len = self.by_start.len();
        SpaceSnapshot { first, end, generation, len, chunks: self.by_start.snapshot() }
    }

    /// The space as bytes, all numbers little-endian: version (u32), 0 (u32), first page, end,
    /// number of free extents (u64 each), then start and count (u64 each) of every free extent,
    /// by address.
    pub fn encode(&self) -> Vec<u8> {
        self.snapshot().encode(Vec::new())
    }

    /// The length of [`encode`](Self::encode)'s result in bytes, at no cost.
    pub fn encoded_len(&self) -> usize {
        HEADER_BYTES + EXTENT_BYTES * self.by_start.len()
    }

    /// Reads what [`encode`](Self::encode) wrote. Every space has one encoding only, and memory is
    /// used in proportion to the bytes given, whatever they say.
    ///
    /// # Errors
    /// [`SpaceError::Version`] or [`SpaceError::Damaged`].
    pub fn decode(bytes: &[u8]) -> Result<Self, SpaceError> {
        match Self::decode_first(bytes)? {
            (space, []) => Ok(space),
            _ => Err(SpaceError::Damaged(LENGTH)),
        }
    }

    /// As [`decode`](Self::decode), of bytes that begin with what [`encode`](Self::encode) wrote.
    /// Returns the bytes after that, too.
    ///
    /// # Errors
    /// [`SpaceError::Version`] or [`SpaceError::Damaged`].
    pub fn decode_first(bytes: &[u8]) -> Result<(Self, &[u8]), SpaceError> {
        let (header, rest) =
            bytes.split_at_checked(HEADER_BYTES).ok_or(SpaceError::Damaged("it is too short"))?;
        let version = number(header, 0) as u32;
        if version != VERSION {
            return Err(SpaceError::Version { found: version });
        }
        if number(header, 0) >> 32 != 0 {
            return Err(SpaceError::Damaged("a reserved field is not zero"));
        }
        let [first, end, count] = [number(header, 8), number(header, 16), number(header, 24)];
        if first > end || end > MAX_PAGES {
            return Err(SpaceError::Damaged("its first page and its end do not fit together"));
        }
        let extents = usize::try_from(count).ok().and_then(|count| count.checked_mul(EXTENT_BYTES));
        let (extents, rest) = extents
            .and_then(|len| rest.split_at_checked(len))
            .ok_or(SpaceError::Damaged(LENGTH))?;
        let mut space = Self::new(first);
        space.end = end;
        let mut lowest = first;
        for extent in extents.chunks_exact(EXTENT_BYTES) {
            let (start, count) = (number(extent, 0), number(extent, 8));
            let within = start.checked_add(count).filter(|&after| count > 0 && after <= end);
            let Some(after) = within.filter(|_| start >= lowest) else {
                return Err(SpaceError::Damaged(
                    "an extent is empty, out of range, out of order or touches another",
                ));
            };
            space.insert(start, count);
            lowest = after + 1;
        }
        Ok((space, rest))
    }

    /// The free extent that ends at the end.
    fn free_tail(&self) -> Option<(u64, u64)> {
        let (start, count) = self.by_start.last()?;
        (start + count == self.end).then_some((start, count))
    }

    fn insert(&mut self, start: u64, count: u64) {
        self.by_start.insert(start, count);
        self.by_size.insert((count, start));
        self.free_pages += count;
        self.generation += 1;
    }

    fn remove(&mut self, start: u64, count: u64) {
        self.by_start.remove(start);
        self.by_size.remove(&(count, start));
        self.free_pages -= count;
        self.generation += 1;
    }
}

/// A [`Space`] as it was at one moment, whatever happens to it afterwards.
#[derive(Clone, Debug)]
pub struct SpaceSnapshot {
    first: u64,
    end: u64,
    generation: u64,
    len: usize,
    chunks: Vec<Arc<Vec<(u64, u64)>>>,
}

impl SpaceSnapshot {
    /// The space's [generation](Space::generation) at that moment.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The length of [`encode`](Self::encode)'s result in bytes, at most, with so many ranges that
    /// are given back.
    pub fn encoded_len_max(&self, given_back: usize) -> usize {
        HEADER_BYTES + EXTENT_BYTES * (self.len + given_back)
    }

    /// As [`Space::encode`], once the ranges (start, count) of `given_back` are free as well; they
    /// are allocated in the space and do not overlap. Linear in the number of extents.
    pub fn encode(&self, mut given_back: Vec<(u64, u64)>) -> Vec<u8> {
        given_back.sort_unstable();
        let mut bytes = Vec::with_capacity(self.encoded_len_max(given_back.len()));
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        for number in [self.first, self.end, 0] {
            bytes.extend(number.to_le_bytes());
        }
        let mut put = |(start, count): (u64, u64)| {
            bytes.extend(start.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        };
        let mut more = given_back.into_iter().peekable();
        let mut pending: Option<(u64, u64)> = None;
        let mut add = |(start, count): (u64, u64)| match &mut pending {
            // Neighbours become one.
            Some((first, len)) if *first + *len >= start => {
                *len = (*len).max(start + count - *first);
            }
            pending => {
                if let Some(extent) = pending.replace((start, count)) {
                    put(extent);
                }
            }
        };
        for &extent in self.chunks.iter().flat_map(|chunk| chunk.iter()) {
            while let Some(range) = more.next_if(|range| *range < extent) {
                add(range);
            }
            add(extent);
        }
        more.for_each(add);
        pending.into_iter().for_each(put);
        let extents = (bytes.len() - HEADER_BYTES) / EXTENT_BYTES;
        bytes[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&(extents as u64).to_le_bytes());
        bytes
    }
}

/// The number at a position that is within the bytes.
fn number(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_fit_at_the_lowest_address_is_taken() {
        let mut space = Space::new(2);
        for count in [4, 1, 2, 1, 2, 1, 8, 1] {
            space.allocate(count);
        }
        assert_eq!(space.end(), 22);
        for (start, count) in [(2, 4), (7, 2), (10, 2), (13, 8)] {
            space.free(start, count).unwrap();
        }
        assert_eq!((space.free_pages(), space.largest_free()), (16, 8));
        assert_eq!([2, 1, 1, 5, 9].map(|count| space.allocate(count)), [7, 10, 11, 13, 22]);
        assert_eq!((space.end(), space.free_pages(), space.allocated_pages()), (31, 7, 22));
    }

    #[test]
    fn the_lowest_place_below_a_bound_is_taken() {
        let mut space = Space::new(2);
        space.allocate(30);
        for (start, count) in [(4, 1), (8, 3), (14, 2), (20, 8)] {
            space.free(start, count).unwrap();
        }
        let (mut below, end) = (space.clone(), space.end());
        assert_eq!([2, 2].map(|count| below.allocate_below(count, 32)), [Some(8), Some(14)]);
        assert_eq!(below.allocate_below(2, 21), None);
        assert_eq!([2, 6].map(|count| below.allocate_below(count, 28)), [Some(20), Some(22)]);
        assert_eq!([1; 3].map(|count| below.allocate_below(count, 11)), [Some(4), Some(10), None]);
        assert_eq!((below.free_pages(), below.end()), (0, end));
        let allocated = |from| space.allocated_from(from);
        assert_eq!(allocated(0), space.allocated_pages());
        assert_eq!([8, 10, 22, 28, 31, 32, 99].map(allocated), [11, 11, 4, 4, 1, 0, 0]);
    }

    #[test]
    fn a_free_tail_is_used_when_growing_and_cut_off_when_trimming() {
        let mut space = Space::new(0);
        space.allocate(3);
        space.free(1, 2).unwrap();
        assert_eq!((space.allocate(5), space.end()), (1, 6));
        assert_eq!(space.trim(), None);
        space.free(1, 2).unwrap();
        assert_eq!(space.trim(), None);
        space.free(3, 3).unwrap();
        assert_eq!((space.trim(), space.end(), space.free_pages()), (Some(1), 1, 0));
        space.free(0, 1).unwrap();
        assert_eq!((space.trim(), space.trim()), (Some(0), None));
        assert_eq!(space, Space::new(0));
    }

    #[test]
    fn what_cannot_be_freed_changes_nothing() {
        let mut space = Space::new(4);
        space.allocate(10);
        space.free(6, 2).unwrap();
        let before = space.clone();
        for (start, count) in
            [(3, 1), (0, 20), (4, 0), (14, 1), (13, 2), (u64::MAX, 2), (5, u64::MAX)]
        {
            let error = space.free(start, count).unwrap_err();
            assert!(matches!(error, SpaceError::OutOfRange { .. }), "{start}+{count}: {error}");
        }
        for (start, count) in [(6, 2), (6, 1), (7, 1), (5, 2), (7, 3), (4, 10)] {
            let error = space.free(start, count).unwrap_err();
            assert!(matches!(error, SpaceError::AlreadyFree { free_start: 6, .. }), "{error}");
        }
        assert_eq!(space, before);
        assert!(space.has_free(7, 1) && space.has_free(5, 2));
        assert!(![5, 8, 99].iter().any(|page| space.has_free(*page, 1)));
    }

    /// A snapshot with ranges given back is what freeing them would make of the space.
    #[test]
    fn a_snapshot_is_encoded_as_the_space_was() {
        let mut space = Space::new(2);
        space.allocate(5000);
        (0..1500).for_each(|n| space.free(5 + 3 * n, 1 + n % 2).unwrap());
        let given_back = vec![(4997, 5), (3, 2), (6, 2), (4500, 1), (4501, 1)];
        let mut freed = space.clone();
        given_back.iter().for_each(|(start, count)| freed.free(*start, *count).unwrap());
        let (snapshot, encoded) = (space.snapshot(), space.encode());
        let generation = space.generation();
        space.allocate(1);
        space.free(2, 1).unwrap();
        assert!(space.generation() > generation && snapshot.generation() == generation);
        assert_eq!(snapshot.encode(Vec::new()), encoded);
        assert!(snapshot.encode(given_back.clone()).len() <= snapshot.encoded_len_max(5));
        assert_eq!(Space::decode(&snapshot.encode(given_back)).unwrap(), freed);
    }

    /// Encodes numbers of one's own choice.
    fn encoded(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn encoded_spaces_are_checked() {
        let good = encoded(&[1, 1, 9, 2, 2, 3, 6, 1]);
        let more = [&good[..], &[7; 5]].concat();
        assert_eq!(Space::decode_first(&more).unwrap().1, [7; 5]);
        assert!(matches!(Space::decode(&more), Err(SpaceError::Damaged(_))));
        assert_eq!(Space::decode(&good).unwrap().encode(), good);
        assert_eq!(Space::decode(&good).unwrap().encoded_len(), good.len());
        assert_eq!(Space::decode(&encoded(&[2, 1, 9, 0])), Err(SpaceError::Version { found: 2 }));
        let bad: &[&[u64]] = &[
            &[],
            &[1, 1, 9],
            &[1 | 1 << 32, 1, 9, 0],
            &[1, 9, 1, 0],
            &[1, 1, MAX_PAGES + 1, 0],
            &[1, 1, 9, 1],
            &[1, 1, 9, u64::MAX],
            &[1, 1, 9, 0, 2, 3],
            &[1, 1, 9, 1, 2, 3, 6],
            &[1, 1, 9, 1, 2, 0],
            &[1, 1, 9, 1, 0, 3],
            &[1, 1, 9, 1, 8, 2],
            &[1, 1, 9, 1, 2, u64::MAX],
            &[1, 1, 9, 2, 6, 1, 2, 3],
            &[1, 1, 9, 2, 2, 3, 4, 1],
            &[1, 1, 9, 2, 2, 3, 5, 1],
        ];
        for words in bad {
            let error = Space::decode(&encoded(words)).unwrap_err();
            assert!(matches!(error, SpaceError::Damaged(_)), "{words:?}: {error}");
        }
        assert!(Space::decode(&good[..good.len() - 1]).is_err());
    }
}
