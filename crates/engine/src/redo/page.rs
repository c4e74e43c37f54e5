//! Redo of one page.

use vellum_pool::{PageDamage, PageRef};

use super::record::{BadRecord, Edits, PageRecord, Redo};
use crate::node::{Edit, Node, NodeLimits, NodeMut, Payload, check_bounds, splits_at};
use crate::page::blob::BLOB_REF;
use crate::page::{self, PageKind};

/// Makes `bytes` the page as it was after the group whose record is `record`, at `lsn` in the log.
/// For edits, `bytes` is the page as it was before the group. For an image, `bytes` may be anything
/// of the page's length.
///
/// # Errors
/// [`PageDamage`] if the record does not fit the page: one of the two was damaged before its
/// checksum was computed. Then the page must not be used.
pub(crate) fn redo(record: &PageRecord<'_>, lsn: u64, bytes: &mut [u8]) -> Result<(), PageDamage> {
    let page = record.page;
    let damage = |what: &str| PageDamage { page, what: format!("redo at {lsn}: {what}") };
    if bytes.len() != page.bytes() {
        return Err(damage("the page has another length"));
    }
    match record.redo {
        Redo::Image { begin, end, bytes: image } => {
            bytes[..begin].copy_from_slice(&image[..begin]);
            bytes[begin..end].fill(0);
            bytes[end..].copy_from_slice(&image[begin..]);
            check_image(page, bytes)?;
        }
        Redo::Edits(edits) => {
            if page::lsn(bytes) >= lsn {
                return Err(damage("the page is newer than the record"));
            }
            redo_edits(edits, bytes).map_err(|BadRecord(what)| damage(what))?;
        }
    }
    page::set_lsn(bytes, lsn);
    Ok(())
}

/// Checks what the header of a page says, but for the checksum, and the bounds of its node.
fn check_image(page: PageRef, bytes: &[u8]) -> Result<(), PageDamage> {
    page::verify_parts(page, bytes, page::checksum_of(bytes))?;
    check_bounds(bytes).map_err(|damage| PageDamage { page, what: damage.to_string() })
}

fn redo_edits(edits: &[u8], bytes: &mut [u8]) -> Result<(), BadRecord> {
    let kind = page::kind_number(bytes);
    if kind != PageKind::Leaf as u8 && kind != PageKind::Inner as u8 {
        return Err(BadRecord("the page is no node"));
    }
    let mut edits = Edits::new(edits);
    while let Some(edit) = edits.next()? {
        check_edit(edit, Node::new(bytes))?;
        if !NodeMut::new(bytes).edit(edit) {
            return Err(BadRecord("an entry does not fit"));
        }
    }
    Ok(())
}

/// Checks that the node can have this edit: a node's own code believes what it is told.
fn check_edit(edit: Edit<'_>, node: Node<&[u8]>) -> Result<(), BadRecord> {
    let torn = |_| BadRecord("the page cannot be read");
    let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
    let limits = NodeLimits::for_page_size(node.bytes().len());
    let has_slot = |index: usize| match index < count {
        true => Ok(()),
        false => Err(BadRecord("the page has no such slot")),
    };
    let has_room = |key_len: usize, payload: Payload<'_>| {
        let fits = match payload {
            Payload::Inline(value) => level == 0 && value.len() <= limits.max_inline_value(key_len),
            Payload::Blob(reference) => level == 0 && reference.len() == BLOB_REF,
            Payload::Child(page) => level > 0 && page != 0,
        };
        match fits && key_len <= limits.max_key {
            true => Ok(()),
            false => Err(BadRecord("the page cannot have such an entry")),
        }
    };
    match edit {
        Edit::Insert { index, key, payload } => {
            has_room(key.len(), payload)?;
            if !node.covers(key).map_err(torn)? {
                return Err(BadRecord("the page does not have such keys"));
            }
            let position = node.find_slot(key).map_err(torn)?;
            match position.index == index && !position.exact {
                true => Ok(()),
                false => Err(BadRecord("the key belongs elsewhere in the page")),
            }
        }
        Edit::Replace { index, payload: payload @ Payload::Child(_) } if index == count => {
            has_room(0, payload)
        }
        Edit::Replace { index, payload } => {
            has_slot(index)?;
            has_room(node.key_len(index).map_err(torn)?, payload)
        }
        Edit::Overwrite { index, offset, bytes } => {
            has_slot(index)?;
            let place = match level {
                0 => node.payload_place(index).map_err(torn)?,
                _ => return Err(BadRecord("children are not overwritten")),
            };
            match !place.blob && offset + bytes.len() <= place.len {
                true => Ok(()),
                false => Err(BadRecord("the page has no such value")),
            }
        }
        Edit::Remove { index } => has_slot(index),
        Edit::RemoveAll { indexes } => {
            indexes.last().map_or(Ok(()), |last| has_slot(*last))?;
            match indexes.is_sorted_by(|one, two| one < two) {
                true => Ok(()),
                false => Err(BadRecord("slots are not in order")),
            }
        }
        Edit::Keep { at, separator, .. } => {
            let is_there = splits_at(node, at, separator).map_err(torn)?;
            match is_there && separator.len() <= limits.max_key {
                true => Ok(()),
                false => Err(BadRecord("the page is not split there")),
            }
        }
    }
}
