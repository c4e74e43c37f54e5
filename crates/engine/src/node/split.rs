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

/// Chooses where to divide `node` so that an entry with key `incoming` finds room.
///
/// The halves have about the same size; around that point the shortest separator wins. At the ends
/// of a level, where keys arrive in ascending or descending order, the node is divided as close to
/// its end as the new fences allow, so that full nodes stay behind.
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
