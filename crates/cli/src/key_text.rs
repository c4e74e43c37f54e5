//! Keys and values as text: hexadecimal, and printable with escapes.
//!
//! These are the two encodings of the dump format of Berkeley DB and LMDB. `bytevalue` has two
//! hexadecimal digits for each byte. `print` leaves printable ASCII as it is, doubles a backslash,
//! and writes every other byte as a backslash and two digits.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use crate::error::{Failure, Outcome};

/// The bytes of a key given on the command line, as they are or in hexadecimal.
///
/// # Errors
/// When `hex` is set and the text is not hexadecimal.
pub fn from_argument(text: &OsStr, hex: bool) -> Outcome<Vec<u8>> {
    if !hex {
        return Ok(text.as_bytes().to_vec());
    }
    from_hex(text.as_bytes()).ok_or_else(|| {
        let shown = text.display();
        Failure::message(format!("'{shown}' is not hexadecimal; write two digits for each byte"))
    })
}

/// Bytes from two hexadecimal digits each; `None` for anything else.
pub fn from_hex(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 2);
    (push_from_hex(text, &mut bytes)? == text.len()).then_some(bytes)
}

/// Appends the bytes of pairs of hexadecimal digits; returns how many letters it has used, because
/// one may be left. `None` for anything else.
pub fn push_from_hex(text: &[u8], bytes: &mut Vec<u8>) -> Option<usize> {
    let (pairs, rest) = text.as_chunks::<2>();
    for [high, low] in pairs {
        bytes.push(digit(*high)? << 4 | digit(*low)?);
    }
    Some(text.len() - rest.len())
}

/// Appends two hexadecimal digits for each byte.
pub fn push_hex(bytes: &[u8], text: &mut Vec<u8>) {
    for byte in bytes {
        push_digits(*byte, text);
    }
}

/// Bytes from printable text with escapes; `None` for a broken escape.
pub fn from_printable(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    (push_from_printable(text, &mut bytes)? == text.len()).then_some(bytes)
}

/// Appends the bytes of printable text with escapes; returns how many letters it has used, because
/// an escape may be cut off at the end. `None` for a broken escape.
pub fn push_from_printable(text: &[u8], bytes: &mut Vec<u8>) -> Option<usize> {
    let mut rest = text;
    loop {
        rest = match rest {
            [b'\\', b'\\', rest @ ..] => {
                bytes.push(b'\\');
                rest
            }
            [b'\\', high, low, rest @ ..] => {
                bytes.push(digit(*high)? << 4 | digit(*low)?);
                rest
            }
            [b'\\', ..] | [] => return Some(text.len() - rest.len()),
            [byte, rest @ ..] => {
                bytes.push(*byte);
                rest
            }
        }
    }
}

/// Appends printable text with escapes.
pub fn push_printable(bytes: &[u8], text: &mut Vec<u8>) {
    for byte in bytes {
        match byte {
            b'\\' => text.extend_from_slice(b"\\\\"),
            b' '..=b'~' => text.push(*byte),
            _ => {
                text.push(b'\\');
                push_digits(*byte, text);
            }
        }
    }
}

/// Printable text with escapes.
pub fn printable(bytes: &[u8]) -> String {
    let mut text = Vec::with_capacity(bytes.len());
    push_printable(bytes, &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn push_digits(byte: u8, text: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.push(DIGITS[usize::from(byte >> 4)]);
    text.push(DIGITS[usize::from(byte & 15)]);
}

fn digit(letter: u8) -> Option<u8> {
    match letter {
        b'0'..=b'9' => Some(letter - b'0'),
        b'a'..=b'f' => Some(letter - b'a' + 10),
        b'A'..=b'F' => Some(letter - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives_both_encodings() {
        let bytes: Vec<u8> = (0..=255).collect();
        let (mut hex, mut print) = (Vec::new(), Vec::new());
        push_hex(&bytes, &mut hex);
        push_printable(&bytes, &mut print);
        assert_eq!(from_hex(&hex), Some(bytes.clone()));
        assert_eq!(from_printable(&print), Some(bytes));
        assert!(print.iter().all(|byte| (b' '..=b'~').contains(byte)));
        assert_eq!(printable(b"a\\b\n\xff"), "a\\\\b\\0a\\ff");
    }

    #[test]
    fn broken_text_is_refused() {
        for text in ["a", "0g", "00 1", "é"] {
            assert_eq!(from_hex(text.as_bytes()), None, "{text}");
        }
        for text in ["\\", "\\0", "\\0g", "a\\zz"] {
            assert_eq!(from_printable(text.as_bytes()), None, "{text}");
        }
        assert_eq!(from_hex(b"Ff00"), Some(vec![255, 0]));
    }
}
