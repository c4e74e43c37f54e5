//! Keys in memory: those of a transaction's changes, and of old values.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Shorter keys, and keys of this length, need no memory of their own.
const SHORT: usize = 22;

/// A key whose copies are cheap: a short one is copied with its bytes, a long one is shared.
#[derive(Clone)]
pub(crate) enum Key {
    Short { len: u8, bytes: [u8; SHORT] },
    Long(Arc<[u8]>),
}

impl From<&[u8]> for Key {
    fn from(key: &[u8]) -> Key {
        let mut bytes = [0; SHORT];
        match bytes.get_mut(..key.len()) {
            Some(short) => {
                short.copy_from_slice(key);
                Key::Short { len: key.len() as u8, bytes }
            }
            None => Key::Long(key.into()),
        }
    }
}

impl Deref for Key {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Key::Short { len, bytes } => &bytes[..usize::from(*len)],
            Key::Long(bytes) => bytes,
        }
    }
}

/// Maps with keys are asked by the bytes of a key.
impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self[..] == other[..]
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        self[..].cmp(&other[..])
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_any_length_are_ordered_by_their_bytes() {
        assert_eq!(size_of::<Key>(), 24);
        let bytes: Vec<u8> = (0..100).map(|at| 200 - at).collect();
        let keys: Vec<Key> = (0..=100).map(|len| Key::from(&bytes[..len])).collect();
        assert!(keys.is_sorted());
        for (len, key) in keys.iter().enumerate() {
            assert_eq!(key[..], bytes[..len]);
            assert_eq!(*key, key.clone());
        }
        assert!(Key::from(&[7; 22][..]) < Key::from(&[7; 23][..]));
        assert!(Key::from(&[8; 22][..]) > Key::from(&[7; 23][..]));
    }
}
