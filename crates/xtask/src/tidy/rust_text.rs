//! Takes Rust text apart into code and comments, byte for byte in place.
//!
//! This is no parser. It knows comments (nested ones too), strings of every kind, characters and
//! lifetimes. The rules need no more to find words and braces reliably.

/// The same text twice, once with only the code and once with only the comments; line breaks stay.
pub struct RustText {
    /// Code alone: comments and the contents of strings and characters are spaces.
    pub code: String,
    /// Comments alone.
    pub comments: String,
}

/// Takes `text` apart; both results have its length and its line breaks.
pub fn take_apart(text: &str) -> RustText {
    let bytes = text.as_bytes();
    let mut code = blank(bytes);
    let mut comments = blank(bytes);
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (length, target) = if rest.starts_with(b"//") {
            (line_comment(rest), Some(&mut comments))
        } else if rest.starts_with(b"/*") {
            (block_comment(rest), Some(&mut comments))
        } else if let Some(length) = raw_string(bytes, at) {
            (length, None)
        } else if rest[0] == b'"' {
            (quoted(rest, b'"'), None)
        } else if rest[0] == b'\'' && is_character(rest) {
            (quoted(rest, b'\''), None)
        } else {
            (1, Some(&mut code))
        };
        let end = (at + length).min(bytes.len());
        if let Some(target) = target {
            target[at..end].copy_from_slice(&bytes[at..end]);
        }
        at = end;
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    RustText { code: text(code), comments: text(comments) }
}

/// The places of `word` in `code` as a whole identifier.
pub fn find_words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = code.as_bytes();
    code.match_indices(word).map(|found| found.0).filter(move |&start| {
        let end = start + word.len();
        let before = start > 0 && is_identifier(bytes[start - 1]);
        !before && !bytes.get(end).copied().is_some_and(is_identifier)
    })
}

/// The number of the line, counted from 1, that byte `at` of `text` is on.
pub fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1
}

fn blank(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| if *byte == b'\n' { b'\n' } else { b' ' }).collect()
}

fn is_identifier(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn line_comment(rest: &[u8]) -> usize {
    rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len())
}

fn block_comment(rest: &[u8]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of the raw string that starts at `at`, from its `r`, if there is one.
fn raw_string(bytes: &[u8], at: usize) -> Option<usize> {
    let joined = at > 0 && is_identifier(bytes[at - 1]) && !matches!(bytes[at - 1], b'b' | b'c');
    if bytes[at] != b'r' || joined {
        return None;
    }
    let hashes = bytes[at + 1..].iter().take_while(|byte| **byte == b'#').count();
    let open = at + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let mut close = vec![b'"'];
    close.resize(1 + hashes, b'#');
    let body = &bytes[open + 1..];
    let length = body.windows(close.len()).position(|window| window == close);
    Some(match length {
        Some(length) => open + 1 + length + close.len() - at,
        None => bytes.len() - at,
    })
}

/// Length of a string or character in `quote`s, both of them included.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Tells `'x'` and `'\n'` from the lifetime `'x`.
fn is_character(rest: &[u8]) -> bool {
    match rest.get(1) {
        Some(b'\\') => true,
        Some(&first) => {
            // A character outside ASCII takes two to four bytes.
            let length = match first {
                0..=0x7f => 1,
                0x80..=0xdf => 2,
                0xe0..=0xef => 3,
                _ => 4,
            };
            rest.get(1 + length) == Some(&b'\'')
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(text: &str) -> String {
        take_apart(text).code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_strings_are_not_code() {
        assert_eq!(code("a // b\nc /* d /* e */ f */ g"), "a c g");
        assert_eq!(code(r#"a("b \" c", d)"#), "a( , d)");
        assert_eq!(code("a(r#\"b \" c\"#, br\"d\\\", e)"), "a( , b , e)");
        assert_eq!(code("for r in bar\"x\" {}"), "for r in bar {}");
    }

    #[test]
    fn characters_are_told_from_lifetimes() {
        assert_eq!(code("fn f<'a>(x: &'a str) -> 'b {'{'}"), "fn f<'a>(x: &'a str) -> 'b { }");
        assert_eq!(code(r"['\'', '\\', b'{', 'é', '→']"), "[ , , b , , ]");
    }

    #[test]
    fn comments_keep_their_places() {
        let text = "let a = 1; // SAFETY: b\n\"// c\"";
        let comments = take_apart(text).comments;
        assert_eq!(comments.len(), text.len());
        assert_eq!(comments.find("// SAFETY"), text.find("// SAFETY"));
        assert!(!comments.contains("// c"));
    }

    #[test]
    fn words_are_whole() {
        let found: Vec<usize> =
            find_words("unsafe unsafe_code not_unsafe unsafe{", "unsafe").collect();
        assert_eq!(found, [0, 30]);
        assert_eq!(line_of("a\nb\nc", 4), 3);
    }

    #[test]
    fn unfinished_text_ends_at_its_end() {
        for text in ["\"abc", "r#\"abc\"", "/* abc", "'", "'\\", "r#", "\"\\"] {
            assert_eq!(take_apart(text).code.len(), text.len(), "{text}");
        }
    }
}
