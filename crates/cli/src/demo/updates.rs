//! The content that an update writes, from which both the old and the new content can be verified.
//!
//! Generation 0 is the file's own content. Generation g > 0 is that content with every byte changed
//! by a mask that depends on g, followed by g as eight bytes. So updates change lengths too, and
//! each generation names itself.

use std::collections::HashMap;

/// A chunk, by the file's place in the listing and the chunk's number.
pub type ChunkId = (usize, u32);

/// The generation of every chunk that was updated.
pub type Generations = HashMap<ChunkId, u64>;

/// Bytes that each generation above 0 appends.
pub const TRAILER: usize = 8;

fn mask(generation: u64) -> u8 {
    // Never 0, so that a lost update is noticed.
    (generation % 255) as u8 + 1
}

/// Turns the file's own content into that of a generation.
pub fn apply(content: &mut Vec<u8>, generation: u64) {
    if generation == 0 {
        return;
    }
    let mask = mask(generation);
    content.iter_mut().for_each(|byte| *byte ^= mask);
    content.extend_from_slice(&generation.to_le_bytes());
}

/// Turns the content of a generation back into the file's own; false if it is another generation.
#[must_use]
pub fn undo(content: &mut Vec<u8>, generation: u64) -> bool {
    if generation == 0 {
        return true;
    }
    let Some(end) = content.len().checked_sub(TRAILER) else { return false };
    if content[end..] != generation.to_le_bytes() {
        return false;
    }
    content.truncate(end);
    let mask = mask(generation);
    content.iter_mut().for_each(|byte| *byte ^= mask);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_can_be_undone_and_told_apart() {
        for generation in [0, 1, 2, 254, 255, 256, 1 << 40] {
            let mut content = b"content".to_vec();
            apply(&mut content, generation);
            assert_eq!(content != b"content", generation > 0);
            assert!(!undo(&mut content.clone(), generation + 1));
            assert!(undo(&mut content, generation));
            assert_eq!(content, b"content");
        }
        assert!(!undo(&mut vec![1, 2, 3], 1));
    }
}
