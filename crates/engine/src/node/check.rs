//! Checks of a node: a quick check of all bounds, and a strict check of all invariants.

use super::layout::NodeLimits;
use super::layout::*;
use super::read::Node;
use crate::page::bytes::{get_u16, get_u32, get_u64};
use crate::page::{LEVEL, PageKind, kind_number};

/// An invariant that a node violates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NodeDamage(pub String);

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(NodeDamage(format!($($message)+)));
        }
    };
}

/// The fields of the node header.
struct Header {
    level: u8,
    count: usize,
    heap_top: usize,
    heap_used: usize,
    prefix_len: usize,
    skip: usize,
    flags: u16,
    lower: (usize, usize),
    upper: (usize, usize),
}

impl Header {
    fn read(bytes: &[u8]) -> Header {
        let field = |at| usize::from(get_u16(bytes, at));
        Header {
            level: bytes[LEVEL],
            count: field(COUNT),
            heap_top: field(HEAP_TOP),
            heap_used: field(HEAP_USED),
            prefix_len: field(PREFIX_LEN),
            skip: field(SKIP),
            flags: get_u16(bytes, FENCE_FLAGS),
            lower: (field(LOWER_OFFSET), field(LOWER_LEN)),
            upper: (field(UPPER_OFFSET), field(UPPER_LEN)),
        }
    }

    fn slots_end(&self) -> usize {
        SLOTS + self.count * slot_size(self.level)
    }
}

/// Checks that all offsets of a node point into its heap and that its sizes add up. Code that holds
/// a lock on the page can then use the offsets without further checks. Passes over the slots once.
///
/// # Errors
/// The first violation.
pub fn check_bounds(bytes: &[u8]) -> Result<(), NodeDamage> {
    ensure!(
        bytes.len() >= 4096 && bytes.len().is_multiple_of(4096) && bytes.len() <= 65536,
        "a node has 4 KiB to 64 KiB, not {} bytes",
        bytes.len()
    );
    let (header, end) = (Header::read(bytes), heap_end(bytes.len()));
    let kind = if header.level == 0 { PageKind::Leaf } else { PageKind::Inner };
    ensure!(kind_number(bytes) == kind as u8, "its level {} does not fit its kind", header.level);
    ensure!(header.level <= LEVEL_MAX, "its level is {}", header.level);
    let limits = NodeLimits::for_page_size(bytes.len());
    ensure!(
        header.slots_end() <= header.heap_top && header.heap_top <= end,
        "its {} slots and its heap from {} overlap",
        header.count,
        header.heap_top
    );
    ensure!(header.flags & !(HAS_LOWER | HAS_UPPER) == 0, "it has unknown flags");
    // An empty cell may have any offset, because the heap's top may have moved past it.
    let inside = |(offset, len): (usize, usize)| {
        (offset >= header.heap_top || len == 0) && offset + len <= end
    };
    let mut used = 0;
    for (flag, fence, name) in
        [(HAS_LOWER, header.lower, "lower"), (HAS_UPPER, header.upper, "upper")]
    {
        if header.flags & flag == 0 {
            ensure!(
                fence == (0, 0),
                "its {name} fence has a length, but its flags say that there is none"
            );
        } else {
            ensure!(inside(fence), "its {name} fence lies outside its heap");
            ensure!(fence.1 <= limits.max_key, "its {name} fence is {} bytes long", fence.1);
            used += fence.1;
        }
    }
    let fence = |(offset, len)| &bytes[offset..offset + len];
    let prefix_len = match header.flags == HAS_LOWER | HAS_UPPER {
        true => common_prefix(fence(header.lower), fence(header.upper)),
        false => 0,
    };
    ensure!(header.prefix_len == prefix_len, "its prefix is {} bytes long", header.prefix_len);
    for index in 0..header.count {
        let slot = SLOTS + index * slot_size(header.level);
        let payload = match header.level {
            0 => usize::from(get_u16(bytes, slot + SLOT_PAYLOAD_LEN)),
            _ => 0,
        };
        let suffix_len = usize::from(get_u16(bytes, slot + SLOT_KEY_LEN));
        ensure!(
            suffix_len >= header.skip,
            "the key of slot {index} is shorter than the skipped bytes"
        );
        let key_len = header.prefix_len + suffix_len;
        ensure!(key_len <= limits.max_key, "the key of slot {index} is {key_len} bytes long");
        let cell = LEAF_SLOT + key_len + payload;
        ensure!(
            header.level > 0 || cell <= limits.max_cell,
            "its cell {index} is {cell} bytes long"
        );
        let len = key_len - header.prefix_len + payload;
        ensure!(
            inside((usize::from(get_u16(bytes, slot + SLOT_OFFSET)), len)),
            "its cell {index} lies outside its heap"
        );
        used += len;
    }
    ensure!(
        used == header.heap_used && used <= end - header.heap_top,
        "its heap holds {used} bytes, but its header says {}",
        header.heap_used
    );
    Ok(())
}

/// Checks every invariant of a node.
///
/// # Errors
/// The first violation.
pub fn check(bytes: &[u8]) -> Result<(), NodeDamage> {
    check_bounds(bytes)?;
    let header = Header::read(bytes);
    let node = Node::new(bytes);
    let torn = |_| NodeDamage("it cannot be read".into());
    ensure!(bytes[RESERVED..UPPER_CHILD].iter().all(|byte| *byte == 0), "reserved bytes are set");
    let upper_child = get_u64(bytes, UPPER_CHILD);
    ensure!((upper_child != 0) == (header.level != 0), "its upper child is {upper_child}");
    check_overlap(bytes, &header)?;
    let (lower, upper) = (node.lower().map_err(torn)?, node.upper().map_err(torn)?);
    let mut prefix_len = 0;
    if let (Some(lower), Some(upper)) = (lower, upper) {
        ensure!(lower < upper, "its lower fence is not below its upper fence");
        prefix_len = common_prefix(lower, upper);
    }
    ensure!(header.prefix_len == prefix_len, "its prefix is {} bytes long", header.prefix_len);
    ensure!(header.count > 0 || header.skip == 0, "it has no slots, but skips bytes");
    let (mut before, mut key) = (lower.map(<[u8]>::to_vec), Vec::new());
    for index in 0..header.count {
        let slot = SLOTS + index * slot_size(header.level);
        let suffix = node.suffix(index).map_err(torn)?;
        let first = node.suffix(0).map_err(torn)?;
        let skip = header.skip;
        ensure!(
            first[..skip] == suffix[..skip],
            "slot {index} differs from slot 0 in the skipped bytes"
        );
        let head = head_of(&suffix[skip..]);
        ensure!(get_u32(bytes, slot) == head, "the head of slot {index} is wrong");
        node.key_into(index, &mut key).map_err(torn)?;
        ensure!(before.as_ref().is_none_or(|before| *before < key), "slot {index} is out of order");
        check_slot(bytes, &header, slot, index)?;
        before = Some(std::mem::take(&mut key));
    }
    if let (Some(upper), Some(last)) = (upper, &before) {
        // A separator equal to the upper fence would leave the upper child without any keys.
        let inside = last.as_slice() <= upper && (header.level == 0 || last.as_slice() < upper);
        ensure!(header.count == 0 || inside, "its last key is above its upper fence");
    }
    check_hints(bytes, &header)
}

/// Checks the fields of a slot that differ between leaves and inner nodes.
fn check_slot(bytes: &[u8], header: &Header, slot: usize, index: usize) -> Result<(), NodeDamage> {
    if header.level != 0 {
        ensure!(get_u64(bytes, slot + SLOT_CHILD) != 0, "slot {index} has no child");
        return Ok(());
    }
    let flags = get_u16(bytes, slot + SLOT_FLAGS);
    ensure!(flags & !BLOB_FLAG == 0, "slot {index} has unknown flags");
    let len = usize::from(get_u16(bytes, slot + SLOT_PAYLOAD_LEN));
    let blob = flags & BLOB_FLAG != 0;
    ensure!(
        !blob || len == crate::page::blob::BLOB_REF,
        "the blob reference of slot {index} is {len} bytes long"
    );
    Ok(())
}

/// Checks that no two cells or fences overlap.
fn check_overlap(bytes: &[u8], header: &Header) -> Result<(), NodeDamage> {
    let mut ranges = vec![header.lower, header.upper];
    for index in 0..header.count {
        let slot = SLOTS + index * slot_size(header.level);
        let payload = match header.level {
            0 => usize::from(get_u16(bytes, slot + SLOT_PAYLOAD_LEN)),
            _ => 0,
        };
        let len = usize::from(get_u16(bytes, slot + SLOT_KEY_LEN)) + payload;
        ranges.push((usize::from(get_u16(bytes, slot + SLOT_OFFSET)), len));
    }
    ranges.retain(|(_, len)| *len != 0);
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        ensure!(pair[0].0 + pair[0].1 <= pair[1].0, "two cells overlap at {}", pair[1].0);
    }
    Ok(())
}

/// Checks that the hints are the heads of slots at equal distances, or zero in a small node.
fn check_hints(bytes: &[u8], header: &Header) -> Result<(), NodeDamage> {
    let distance = hint_distance(header.count);
    for hint in 0..HINT_COUNT {
        let expected = match header.count > HINTS_FROM {
            true => get_u32(bytes, SLOTS + (hint + 1) * distance * slot_size(header.level)),
            false => 0,
        };
        ensure!(get_u32(bytes, HINTS + 4 * hint) == expected, "hint {hint} is wrong");
    }
    Ok(())
}
