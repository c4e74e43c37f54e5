//! Dividing a full node into two.

use super::layout::*;
use super::read::{Node, Position};
use super::write::{Fences, NodeMut, cell};

/// How a node is to be divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Slots that go to the left node. In an inner node the slot behind them becomes the separator.
    pub left: usize,
    /// The upper fence of the left and the lower fence of the right node.
    pub separator: Vec<u8>,
}

/// The shortest key `s` with `low <= s < high`; `low < high`.
pub fn separator<'a>(low: &'a [u8], high: &'a [u8]) -> &'a [u8] {
    let common = common_prefix(low, high);
    // One byte more than both share is above `low`; it is below `high` if something follows.
    if common + 1 < high.len() && common < low.len() { &high[..common + 1] } else { low }
}

/// So many entries in a row, each inserted after the one before, are a run: a quarter of a leaf's,
/// within these limits. With fewer, random inserts look like runs now and then; a leaf of fewer
/// than eight entries shows too little to tell.
const RUN: std::ops::RangeInclusive<usize> = 4..=8;

/// In which order the entries around an insertion point came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Ascending,
    Descending,
}

/// Chooses where to divide `node` so that an entry with key `incoming` finds room.
///
/// The halves have about the same size; around that point the shortest separator wins. Where
/// entries arrive in ascending or descending order, the node is divided where they arrive, so that
/// full nodes stay behind: at the ends of a level, and in a leaf wherever its newest entries show
/// such an order.
///
/// # Errors
/// [`Torn`] if the node is damaged.
pub fn plan_split(node: Node<&[u8]>, incoming: &[u8]) -> Result<Split, Torn> {
    let (count, leaf) = (node.count()?, node.level()? == 0);
    if count == 0 {
        return Err(Torn);
    }
    let Position { index: at, exact } = node.find_slot(incoming)?;
    let ascending = at == count && node.upper()?.is_none();
    // An entry that is there already, and grows, is no neighbour of the others.
    let descending = at == 0 && !exact && node.lower()?.is_none();
    if !leaf {
        let left = match (ascending, descending) {
            (true, _) => count - 1,
            (_, true) => 0,
            _ => balanced(node, leaf, count)?.0,
        };
        let mut separator = Vec::new();
        node.key_into(left, &mut separator)?;
        return Ok(Split { left, separator });
    }
    if !exact
        && let Some(run) = run_at(node, at, count)?
        && let split = split_at_run(node, at, count, incoming, run)?
        && halves_fit(node, &split)?
    {
        return Ok(split);
    }
    let candidates = match (ascending, descending) {
        _ if count < 2 && exact => return Err(Torn),
        _ if count < 2 => [at, at],
        (true, _) => [count, count - 1],
        (_, true) => [0, 1],
        _ => balanced(node, leaf, count)?.into(),
    };
    for left in candidates {
        let split = split_leaf_at(node, left, incoming)?;
        if halves_fit(node, &split)? {
            return Ok(split);
        }
    }
    // A long fence for a full node: by bytes, which always fits.
    split_leaf_at(node, balanced(node, leaf, count)?.1, incoming)
}

/// Whether the entries beside `at` came one after the other, and lately.
///
/// The heap tells: it grows downwards, so a cell below another one is the newer one. Entries that a
/// split or a compaction has moved lie in the order of their keys, and tell nothing; but such
/// entries lie in the upper part of the heap, unless nothing came since.
fn run_at(node: Node<&[u8]>, at: usize, count: usize) -> Result<Option<Run>, Torn> {
    let offset = |index: usize| node.u16_at(SLOTS + index * LEAF_SLOT + SLOT_OFFSET);
    let (top, end) = (node.u16_at(HEAP_TOP)?, heap_end(node.bytes().len()));
    let middle = top + end.checked_sub(top).ok_or(Torn)? / 2;
    let needed = (count / 4).clamp(*RUN.start(), *RUN.end());
    if at >= needed {
        let first = offset(at - needed)?;
        let mut run = first < middle;
        for index in at - needed + 1..at {
            run &= offset(index)? < offset(index - 1)?;
        }
        if run {
            return Ok(Some(Run::Ascending));
        }
    }
    if at + needed <= count {
        let last = offset(at + needed - 1)?;
        let mut run = last < middle;
        for index in at + 1..at + needed {
            run &= offset(index - 1)? < offset(index)?;
        }
        if run {
            return Ok(Some(Run::Descending));
        }
    }
    Ok(None)
}

/// A split where a run goes on. What lies beyond the run's end stays with it if it is little, and
/// else goes to a leaf of its own, so that the run's next leaves are full.
fn split_at_run(
    node: Node<&[u8]>,
    at: usize,
    count: usize,
    incoming: &[u8],
    run: Run,
) -> Result<Split, Torn> {
    let beyond = match run {
        Run::Ascending => at..count,
        Run::Descending => 0..at,
    };
    let mut size = 0;
    for index in beyond {
        size += LEAF_SLOT + node.suffix(index)?.len() + node.payload_place(index)?.len;
    }
    let little = size <= capacity(node.bytes().len()) / 8;
    // With what lies beyond it, the incoming entry goes to the right of an ascending run.
    let goes_right = little == (run == Run::Ascending);
    let mut beside = Vec::new();
    let key = match goes_right && at > 0 || at == count {
        true => {
            node.key_into(at - 1, &mut beside)?;
            separator(&beside, incoming)
        }
        false => {
            node.key_into(at, &mut beside)?;
            separator(incoming, &beside)
        }
    };
    Ok(Split { left: at, separator: key.to_vec() })
}

/// A split of a leaf between two of its slots, or between its last one and `incoming`.
fn split_leaf_at(node: Node<&[u8]>, left: usize, incoming: &[u8]) -> Result<Split, Torn> {
    let (mut low, mut high) = (incoming.to_vec(), incoming.to_vec());
    if left > 0 {
        node.key_into(left - 1, &mut low)?;
    }
    if left < node.count()? {
        node.key_into(left, &mut high)?;
    }
    Ok(Split { left, separator: separator(&low, &high).to_vec() })
}

/// Whether both halves of a leaf fit their pages, with the separator as a new fence.
fn halves_fit(node: Node<&[u8]>, split: &Split) -> Result<bool, Torn> {
    let (lower, upper) = (node.lower()?, node.upper()?);
    let middle = Some(&split.separator[..]);
    let halves = [
        (0..split.left, Fences { lower, upper: middle }),
        (split.left..node.count()?, Fences { lower: middle, upper }),
    ];
    for (slots, fences) in halves {
        let longer = fences.prefix_len().checked_sub(node.prefix_len()?).ok_or(Torn)?;
        let mut size = fences.size();
        for index in slots {
            let suffix = node.suffix(index)?.len().checked_sub(longer).ok_or(Torn)?;
            size += LEAF_SLOT + suffix + node.payload_place(index)?.len;
        }
        if size > capacity(node.bytes().len()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The slot near the middle with the shortest separator before it, or in it, and the slot in the
/// middle, by bytes.
fn balanced(node: Node<&[u8]>, leaf: bool, count: usize) -> Result<(usize, usize), Torn> {
    let size = |index| -> Result<usize, Torn> {
        let payload = if leaf { node.payload_place(index)?.len } else { 0 };
        Ok(slot_size(u8::from(!leaf)) + node.suffix(index)?.len() + payload)
    };
    let mut total = 0;
    for index in 0..count {
        total += size(index)?;
    }
    let (mut middle, mut left) = (0, 0);
    while middle < count - 1 && left + size(middle)? <= total / 2 {
        left += size(middle)?;
        middle += 1;
    }
    let least = usize::from(leaf);
    let (from, to) = match leaf || count > 2 {
        true => (middle.saturating_sub(count / 16), middle + count / 16),
        false => (middle, middle),
    };
    let (mut best, mut shortest) = (middle.max(least), usize::MAX);
    for index in from.max(least)..=to.min(count - 1) {
        let suffix = node.suffix(index)?;
        let len = match leaf {
            true => separator(node.suffix(index - 1)?, suffix).len(),
            false => suffix.len(),
        };
        let nearer = index.abs_diff(middle) < best.abs_diff(middle);
        if len < shortest || (len == shortest && nearer) {
            (best, shortest) = (index, len);
        }
    }
    Ok((best, middle.max(least)))
}

/// Moves the slots left of the split to `left`, a new page, and keeps the others in `page`.
///
/// So the reference that the parent has of `page` stays right, and the parent gains one separator
/// before it. Both pages have their page headers; the rest of `left` is overwritten.
///
/// # Errors
/// [`Torn`] if the node is damaged; nothing is changed then but `left`.
pub fn split_off_left(page: &mut [u8], left: &mut [u8], split: &Split) -> Result<(), Torn> {
    let old = page.to_vec();
    let node = Node::new(&old[..]);
    let (level, count) = (node.level()?, node.count()?);
    let fences = Fences { lower: node.lower()?, upper: Some(&split.separator) };
    // In an inner node the separator's own child becomes the upper child of the left node.
    let (upper_child, right_from) = match level {
        0 => (0, split.left),
        _ => (node.child(split.left)?, split.left + 1),
    };
    fill(NodeMut::format(left, level, fences, upper_child), node, 0..split.left)?;
    let fences = Fences { lower: Some(&split.separator), upper: node.upper()? };
    let upper_child = if level == 0 { 0 } else { node.child(count)? };
    fill(NodeMut::format(page, level, fences, upper_child), node, right_from..count)
}

/// Appends slots of `source`, whose prefix is not longer than the target's.
fn fill(
    mut target: NodeMut<'_>,
    source: Node<&[u8]>,
    slots: std::ops::Range<usize>,
) -> Result<(), Torn> {
    let longer = target.node().prefix_len()?.checked_sub(source.prefix_len()?).ok_or(Torn)?;
    for index in slots {
        let (suffix, payload) = cell(source, index)?;
        target.push([suffix.get(longer..).ok_or(Torn)?, &[]], payload);
    }
    target.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_are_short_and_between() {
        let cases: [(&[u8], &[u8], &[u8]); 8] = [
            (b"", b"a", b""),
            (b"", b"abc", b""),
            (b"a", b"b", b"a"),
            (b"abc", b"abd", b"abc"),
            (b"abcxyz", b"abdef", b"abd"),
            (b"abc", b"abcdef", b"abc"),
            (b"abc\0", b"abc\x01\x02", b"abc\x01"),
            (b"a\0", b"a\0\0", b"a\0"),
        ];
        for (low, high, expected) in cases {
            let found = separator(low, high);
            assert_eq!(found, expected, "{low:?} {high:?}");
            assert!(low <= found && found < high);
        }
    }
}
