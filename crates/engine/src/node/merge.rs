//! Joining two neighbours of a level.

use super::layout::*;
use super::read::Node;
use super::write::{Fences, NodeMut, Payload, cell};

/// Whether `left` and its right neighbour fit into one page. `separator` is the key between them
/// in their parent, which an inner node gets back.
///
/// # Errors
/// [`Torn`] if one of the nodes is damaged.
pub fn fits_merge(left: Node<&[u8]>, right: Node<&[u8]>, separator: &[u8]) -> Result<bool, Torn> {
    let fences = Fences { lower: left.lower()?, upper: right.upper()? };
    let prefix = fences.prefix_len();
    let mut size = fences.size() + grown(left, prefix)? + grown(right, prefix)?;
    if left.level()? != 0 {
        size += INNER_SLOT + separator.len().checked_sub(prefix).ok_or(Torn)?;
    }
    Ok(left.level()? == right.level()? && size <= capacity(left.bytes().len()))
}

/// Bytes of a node's slots and cells once its prefix is only `prefix` bytes long.
fn grown(node: Node<&[u8]>, prefix: usize) -> Result<usize, Torn> {
    let count = node.count()?;
    let fences = Fences { lower: node.lower()?, upper: node.upper()? };
    let cells = node.u16_at(HEAP_USED)?.checked_sub(fences.size()).ok_or(Torn)?;
    let longer = node.prefix_len()?.checked_sub(prefix).ok_or(Torn)?;
    Ok(count * (slot_size(node.level()?) + longer) + cells)
}

/// Moves everything from `left` into `right`, in front. The caller knows that it fits; `left` is
/// unused afterwards, and the parent loses the separator between them.
///
/// # Errors
/// [`Torn`] if one of the nodes is damaged; nothing is changed then.
pub fn merge_into_right(left: Node<&[u8]>, right: &mut [u8], separator: &[u8]) -> Result<(), Torn> {
    let old = right.to_vec();
    let old = Node::new(&old[..]);
    let (level, count) = (old.level()?, old.count()?);
    let fences = Fences { lower: left.lower()?, upper: old.upper()? };
    let upper_child = if level == 0 { 0 } else { old.child(count)? };
    let mut image = right.to_vec();
    let mut target = NodeMut::format(&mut image, level, fences, upper_child);
    let prefix = target.node().prefix_len()?;
    append(&mut target, left)?;
    if level != 0 {
        let middle = left.child(left.count()?)?;
        target.push([separator.get(prefix..).ok_or(Torn)?, &[]], Payload::Child(middle));
    }
    append(&mut target, old)?;
    target.finish();
    right.copy_from_slice(&image);
    Ok(())
}

/// Appends all slots of `source`, whose prefix is not shorter than the target's.
fn append(target: &mut NodeMut<'_>, source: Node<&[u8]>) -> Result<(), Torn> {
    let start = source.prefix()?.get(target.node().prefix_len()?..).ok_or(Torn)?;
    for index in 0..source.count()? {
        let (suffix, payload) = cell(source, index)?;
        target.push([start, suffix], payload);
    }
    Ok(())
}
